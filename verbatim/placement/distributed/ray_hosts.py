"""Stages on several machines, as Ray actors: connection to Ray with this user's token, processes, status.

Ray starts and ends the processes, on this machine or others. The processes communicate over their own
connections (`link.py`).
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from verbatim.errors import NotSupported, first_line
from verbatim.placement.distributed.hosts import Hosts, NoHost
from verbatim.placement.distributed.link import Address

_CHECK_S = 2.0  # interval at which a machine is checked while a process starts on it
_NAMESPACE = "verbatim"  # Ray's namespace of our actors
_STATUS_S = 3.0  # time limit for the status of all stages
_CONNECT_S = 1.5  # after which a machine counts as unreachable


def answers(address: tuple[str, int]) -> bool:
    """Return whether a process accepts connections at this address."""
    try:
        socket.create_connection(address, timeout=_CONNECT_S).close()
    except (OSError, UnicodeError):  # UnicodeError: the host "a..b"
        return False
    return True


def listens(address: str) -> bool:
    """Return whether a process accepts connections at "host:port"; Ray itself would wait half a minute.

    True for any other form of address, which may be valid for Ray.
    """
    host, colon, port = address.rpartition(":")
    return not (colon and port.isdigit()) or "/" in host or answers((host, int(port)))


def token_path() -> Path:
    """Return the path of this user's Ray token file, which may not exist; RAY_AUTH_TOKEN overrides it."""
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

    Ray itself would write one that all users of this machine can read.

    Raises:
        NoHost: the file can't be written.
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
    """Import Ray, an optional dependency, with token authentication if this user has a token.

    Raises:
        NotSupported: Ray is not installed.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if "ray" not in sys.modules and has_token():
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # read once, as Ray is imported
    try:
        import ray
    except ImportError:
        raise NotSupported("placement=Cluster(...) needs Ray: pip install '.[cluster]'") from None
    return ray


def connect_ray(address: str) -> None:
    """Connect this process to the Ray cluster at an address.

    Raises:
        NoHost: there is no cluster, or it requires another token.
    """
    import ray

    if not listens(address):
        raise NoHost(f"no Ray cluster at {address}: no answer")
    try:
        ray.init(address, **ray_options())
    except ray.exceptions.AuthenticationError:
        raise NoHost(
            f"the Ray cluster at {address} requires another token than this machine has in "
            "~/.ray/auth_token, RAY_AUTH_TOKEN_PATH or RAY_AUTH_TOKEN"
        ) from None
    except Exception as error:  # ConnectionError, ValueError, RuntimeError, for several reasons
        location = "on this machine" if address == "auto" else f"at {address}"
        if "Could not find any running" in str(error):
            raise NoHost(
                f"no Ray cluster {location}: start one with `verbatim cluster start`"
            ) from None
        # The address accepts connections, so the token is the likely reason; Ray does not say.
        if "Failed to connect" in str(error):
            raise NoHost(
                f"no Ray cluster {location} that accepts the token of this machine "
                "(~/.ray/auth_token, RAY_AUTH_TOKEN_PATH or RAY_AUTH_TOKEN)"
            ) from None
        raise NoHost(f"no Ray cluster {location}: {first_line(error)}") from error


class _FixedList(list[str]):
    """A list that ignores `extend`, which Ray calls to add the program's folder."""

    def extend(self, more: object) -> None:
        """Do nothing."""


def ray_options() -> dict[str, Any]:
    """Return the arguments of every `ray.init`.

    By default, the program's folder is first in the import path of Ray's workers. It may be a source tree
    without kernels, but stages must run the same code as this process.
    """
    from ray.job_config import JobConfig

    path = _FixedList([str(Path(__file__).parents[3])])
    return {
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "job_config": JobConfig(_py_driver_sys_path=path),
    }


class RayHost:
    """A Ray actor as a `Host`."""

    def __init__(self, actor: Any, daemon: Address) -> None:
        self.actor = actor
        self.machine = daemon[0]
        self.daemon = daemon  # the address of Ray's daemon on that machine
        # A Ray reference, requested early, as Ray's head may be lost later.
        self.status_ref = actor.status.remote()
        self.killed = False
        self.address: Address = ("", 0)

    def kill(self) -> None:
        import ray

        if not self.killed:
            self.killed = True
            with suppress(Exception):  # the actor is gone, or Ray is
                ray.kill(self.actor, no_restart=True)


class RayHosts(Hosts):
    """Actors on the machines of a Ray cluster.

    Args:
        address: address of the Ray cluster. None: the one this process is connected to, or `RAY_ADDRESS`.
        name: name of this set of stages, shown by `verbatim cluster status`.

    Raises:
        NotSupported: Ray is not installed.
        NoHost: there is no Ray at `address`.
    """

    start_s = 60.0  # time limit for the start of a process, including imports

    def __init__(self, address: str | None, key: bytes, name: str) -> None:
        from verbatim.placement.distributed.stage_share import StageActor

        super().__init__(key)
        self._ray = ray = import_ray()
        self._name = name
        self._own = not ray.is_initialized()
        if self._own:
            connect_ray(address or os.environ["RAY_ADDRESS"])
        self._head: str = ray.get_runtime_context().gcs_address
        if not self._own and address not in (None, self._head):
            raise NotSupported(
                f"address={address!r}: this process is connected to the Ray cluster at {self._head}"
            )
        self._actor = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=4)(StageActor)

    def _wait(self, host: RayHost, deadline: float) -> None:
        try:
            while not self._ray.wait([host.status_ref], timeout=_CHECK_S)[0]:
                if time.monotonic() >= deadline or not self.reachable(host):
                    raise TimeoutError("no answer in time")
                self._check_head()
            host.address = self._ray.get(host.status_ref)["address"]
        except NoHost:
            raise
        except Exception as error:  # Ray raises many kinds of errors if an actor is gone
            raise NoHost(f"{host.machine}: no process started: {first_line(error)}") from None
        if not answers(host.address):
            raise NoHost(f"{host.machine}: the process has ended")

    def _create(self, count: int, avoid: set[str], model: dict[str, Any] | None) -> list[RayHost]:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        nodes = {node: at for node, at in self._nodes().items() if at[0] not in avoid}
        if not nodes:
            raise NoHost("there is no machine left for another stage")
        hosts = []
        for _ in range(count):
            node = self._emptiest(nodes)
            actor = self._actor.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                name=f"verbatim-{self._name}-{os.urandom(4).hex()}",
                namespace=_NAMESPACE,
                runtime_env={"env_vars": {"OMP_WAIT_POLICY": "passive"}},
            ).remote(self.key)
            hosts.append(RayHost(actor, nodes[node]))
            self._hosts.append(hosts[-1])
            if model is not None:
                actor.warm.remote(model)
        return hosts

    def _emptiest(self, nodes: dict[str, Address]) -> str:
        """Return the machine with the fewest of our processes; in a tie, this machine if it is among them."""
        self._hosts = [host for host in self._hosts if not host.killed]
        this_node = self._ray.get_runtime_context().get_node_id()
        counts = Counter(host.daemon for host in self._hosts)
        return min(nodes, key=lambda node: (counts[nodes[node]], node != this_node))

    def machines(self) -> list[str]:
        return list(dict.fromkeys(machine for machine, _ in self._nodes().values()))

    def _nodes(self) -> dict[str, Address]:
        """Return the address of Ray's daemon on each reachable machine, by Ray's id of the machine.

        Ray itself takes a minute to notice that a machine is gone.
        """
        self._check_head()
        try:
            alive = [node for node in self._ray.nodes() if node["Alive"]]
        except Exception as error:
            raise NoHost(f"Ray can't list its machines: {first_line(error)}") from None
        daemons = {n["NodeID"]: (n["NodeManagerAddress"], n["NodeManagerPort"]) for n in alive}
        with ThreadPoolExecutor(32) as pool:
            reachable = list(pool.map(answers, daemons.values()))
        return {node: daemons[node] for node, ok in zip(daemons, reachable, strict=True) if ok}

    def _check_head(self) -> None:
        """Raise NoHost if Ray's head is unreachable; Ray itself would retry for minutes."""
        if not listens(self._head):
            raise NoHost(f"Ray's head at {self._head} can't be reached")

    def reachable(self, host: RayHost) -> bool:
        return answers(host.daemon)

    def close(self) -> None:
        super().close()  # ends unused processes, too, such as after Ctrl-C
        if self._own:
            self._ray.shutdown()


def cluster_status(address: str | None) -> dict[str, Any]:
    """Return the status of the Ray cluster at `address` (None: on this machine), as plain values.

    Returns:
        `address`; `machines`, each with `machine` (its address), `cores`, `memory_bytes`, and whether it is
        `reachable` from here; and `clusters`, the stages of each open model, in the order of their layers:
        `StageShare.status`, or `silent` for a stage that does not answer.

    Raises:
        NotSupported: Ray is not installed.
        NoHost: there is no cluster.
    """
    ray = import_ray()
    connect_ray(address or os.environ.get("RAY_ADDRESS") or "auto")
    try:
        return {
            "address": ray.get_runtime_context().gcs_address,
            "machines": [
                {
                    "machine": node["NodeManagerAddress"],
                    "cores": node["Resources"].get("CPU", 0.0),
                    "memory_bytes": int(node["Resources"].get("memory", 0)),
                    "reachable": answers((node["NodeManagerAddress"], node["NodeManagerPort"])),
                }
                for node in ray.nodes()
                if node["Alive"]
            ],
            "clusters": _clusters(ray),
        }
    finally:
        ray.shutdown()


def _clusters(ray: Any) -> dict[str, list[dict[str, Any]]]:
    names: dict[Any, str] = {}
    for entry in ray.util.list_named_actors(all_namespaces=True):
        if entry["namespace"] == _NAMESPACE:
            try:
                actor = ray.get_actor(entry["name"], namespace=_NAMESPACE)
            except ValueError:
                continue  # it has ended meanwhile
            names[actor.status.remote()] = entry["name"]
    ready = ray.wait([*names], num_returns=len(names), timeout=_STATUS_S)[0] if names else []
    clusters: dict[str, list[dict[str, Any]]] = {}
    for status, name in sorted(names.items(), key=lambda named: named[1]):
        stage: dict[str, Any] = {"silent": True}
        if status in ready:
            try:
                stage = ray.get(status) | {"silent": False}
            except ray.exceptions.RayError:
                continue  # it has ended meanwhile
        clusters.setdefault(name.split("-")[1], []).append(stage)

    def order(stage: dict[str, Any]) -> tuple[Any, ...]:
        """Stages by index, then silent stages, then spares by pid."""
        is_spare = stage.get("layers", ()) is None
        return is_spare, stage["silent"], stage.get("index", 0), stage.get("pid", 0)

    return {name: sorted(stages, key=order) for name, stages in clusters.items()}
