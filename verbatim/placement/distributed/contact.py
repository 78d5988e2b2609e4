"""Connecting to Ray, with this user's token, and the status of a cluster."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
from pathlib import Path
from typing import Any

from verbatim.errors import NotSupported, first_line
from verbatim.placement.distributed.hosts import NoHost

NAMESPACE = "verbatim"  # of our actors, for Ray
_ANSWER_S = 3.0  # in which a stage tells how it is
_REACH_S = 1.5  # in which a machine takes a connection, or it is not there


def answers(address: tuple[str, int]) -> bool:
    """Return whether a process accepts connections at this address."""
    try:
        socket.create_connection(address, timeout=_REACH_S).close()
    except (OSError, UnicodeError):  # the latter of "a..b"
        return False
    return True


def listens(address: str) -> bool:
    """Return whether `answers` an address "host:port", for which Ray itself would wait half a minute.

    True for anything else that Ray may accept.
    """
    host, colon, port = address.rpartition(":")
    return not (colon and port.isdigit()) or "/" in host or answers((host, int(port)))


def token_path() -> Path:
    """Return the file of this user's Ray token, whether it is there or not; RAY_AUTH_TOKEN comes first."""
    named = os.environ.get("RAY_AUTH_TOKEN_PATH") or os.path.expanduser("~/.ray/auth_token")
    if named.startswith("~"):
        raise NoHost(
            "this user has no home folder for Ray's token: set RAY_AUTH_TOKEN_PATH or RAY_AUTH_TOKEN"
        )
    return Path(named)


def has_token() -> bool:
    """Return whether this user has a token."""
    return bool(os.environ.get("RAY_AUTH_TOKEN")) or token_path().is_file()


def make_token() -> bool:
    """Write a token to this user's file if there is none; return whether it was written.

    Ray would make one that all users of this machine can read.

    Raises:
        NoHost: it can't be written.
    """
    if has_token():
        return False
    path = token_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
    except FileExistsError:
        return False  # another process created it meanwhile
    except OSError as error:
        raise NoHost(f"can't write a token to {path}: {error.strerror or error}") from None
    return True


def import_ray() -> Any:
    """Import Ray, which an extra installs, with token authentication if this user has a token.

    Raises:
        NotSupported: it is not installed.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if "ray" not in sys.modules and has_token():
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # read once, as Ray is imported
    try:
        import ray
    except ImportError:
        raise NotSupported("placement=Cluster(...) needs Ray: pip install '.[cluster]'") from None
    return ray


def begin_ray(given: str) -> None:
    """Connect this process to the Ray cluster at an address.

    Raises:
        NoHost: there is no cluster, or its token is another one.
    """
    import ray

    if not listens(given):
        raise NoHost(f"no Ray cluster at {given}: no answer")
    try:
        ray.init(given, **ray_options())
    except ray.exceptions.AuthenticationError:
        raise NoHost(
            f"the Ray cluster at {given} asks for another token than this machine has in "
            "~/.ray/auth_token, RAY_AUTH_TOKEN_PATH or RAY_AUTH_TOKEN"
        ) from None
    except Exception as error:  # ConnectionError, ValueError, RuntimeError, of several kinds each
        where = "on this machine" if given == "auto" else f"at {given}"
        if "Could not find any running" in str(error):
            raise NoHost(f"no Ray cluster {where}: `verbatim cluster start` makes one") from None
        # Although the address answers: Ray gives no other reason.
        if "Failed to connect" in str(error):
            raise NoHost(
                f"no Ray cluster {where} that takes the token of this machine (~/.ray/auth_token, "
                "RAY_AUTH_TOKEN_PATH or RAY_AUTH_TOKEN)"
            ) from None
        raise NoHost(f"no Ray cluster {where}: {first_line(error)}") from error


class _Fixed(list[str]):
    """A list that ignores `extend`."""

    def extend(self, more: object) -> None:
        """Do nothing."""


def ray_options() -> dict[str, Any]:
    """Return the arguments of every `ray.init`.

    Ray lets its workers import from the folder that the program stands in before all others. Stages are to
    run the very code that this process runs, not sources that happen to lie there without their kernels.
    """
    from ray.job_config import JobConfig

    here = _Fixed([str(Path(__file__).parents[3])])
    return {
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "job_config": JobConfig(_py_driver_sys_path=here),
    }


def cluster_status(address: str | None) -> dict[str, Any]:
    """Return the status of the Ray cluster at `address`, as plain values; None: the one of this machine.

    Returns:
        `address`; `machines`, each with `machine` (its address), `cores`, `memory_bytes`, and whether it is
        `reachable` from here; and `clusters`, the stages of each open model, in the order of their layers:
        `StageShare.status`, or `silent` for one that does not answer.

    Raises:
        NotSupported: Ray is not installed.
        NoHost: there is none.
    """
    ray = import_ray()
    begin_ray(address or os.environ.get("RAY_ADDRESS") or "auto")
    try:
        return {
            "address": ray.get_runtime_context().gcs_address,
            "machines": [_machine(node) for node in ray.nodes() if node["Alive"]],
            "clusters": _clusters(ray),
        }
    finally:
        ray.shutdown()


def _machine(node: dict[str, Any]) -> dict[str, Any]:
    return {
        "machine": node["NodeManagerAddress"],
        "cores": node["Resources"].get("CPU", 0.0),
        "memory_bytes": int(node["Resources"].get("memory", 0)),
        "reachable": answers((node["NodeManagerAddress"], node["NodeManagerPort"])),
    }


def _clusters(ray: Any) -> dict[str, list[dict[str, Any]]]:
    asked: dict[Any, str] = {}
    for entry in ray.util.list_named_actors(all_namespaces=True):
        if entry["namespace"] == NAMESPACE:
            try:
                actor = ray.get_actor(entry["name"], namespace=NAMESPACE)
            except ValueError:
                continue  # it has ended meanwhile
            asked[actor.status.remote()] = entry["name"]
    ready: list[Any] = []
    if asked:
        ready, _ = ray.wait([*asked], num_returns=len(asked), timeout=_ANSWER_S)
    found: dict[str, list[dict[str, Any]]] = {}
    for question, name in asked.items():
        stage: dict[str, Any] = {"cluster": name.split("-")[1], "silent": True}
        if question in ready:
            try:
                stage = ray.get(question) | {"silent": False}
            except ray.exceptions.RayError:
                continue  # it has ended meanwhile
        found.setdefault(stage.pop("cluster"), []).append(stage)
    for stages in found.values():
        stages.sort(key=_place)
    return dict(sorted(found.items()))


def _place(stage: dict[str, Any]) -> tuple[int, int]:
    """Return a sort key: stages by their layers, then those without."""
    if stage["silent"]:
        return 1, 0
    return (2, stage["pid"]) if stage["layers"] is None else (0, stage["index"])
