"""Connecting to Ray: the address of a cluster, the token, and the versions that must agree."""

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
_REACH_S = 1.5  # in which a machine takes a connection, or it is not there


def answers(address: tuple[str, int]) -> bool:
    """Return whether a process accepts connections at this address."""
    try:
        socket.create_connection(address, timeout=_REACH_S).close()
    except OSError:
        return False
    return True


def token_path() -> Path | None:
    """Return the file with this user's Ray token, or None; RAY_AUTH_TOKEN comes first."""
    path = _token_path()
    return path if path.is_file() else None


def _token_path() -> Path:
    named = os.environ.get("RAY_AUTH_TOKEN_PATH") or os.path.expanduser("~/.ray/auth_token")
    if named.startswith("~"):
        raise NoHost(
            "this user has no home folder for Ray's token: set RAY_AUTH_TOKEN_PATH or RAY_AUTH_TOKEN"
        )
    return Path(named)


def resolve_token() -> tuple[Path | None, bool]:
    """Return the file with this user's token, None for RAY_AUTH_TOKEN, and whether it was created now.

    Ray would make one that all users of this machine can read.

    Raises:
        NoHost: it can't be written.
    """
    if os.environ.get("RAY_AUTH_TOKEN"):
        return None, False
    found = token_path()
    if found is not None:
        return found, False
    path = _token_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
    except FileExistsError:
        return path, False  # another process created it meanwhile
    except OSError as error:
        raise NoHost(f"can't write a token to {path}: {error.strerror or error}") from None
    return path, True


def import_ray() -> Any:
    """Import Ray, which an extra installs, with token authentication if this user has a token.

    Raises:
        NotSupported: it is not installed.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if "ray" not in sys.modules and (os.environ.get("RAY_AUTH_TOKEN") or token_path()):
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

    try:
        _look_for(given)
        ray.init(given, **ray_options())
    except NoHost:
        raise
    except ray.exceptions.AuthenticationError:
        raise NoHost(
            f"the Ray cluster at {given} asks for another token than this machine has in "
            "~/.ray/auth_token, RAY_AUTH_TOKEN_PATH or RAY_AUTH_TOKEN"
        ) from None
    except Exception as error:  # ConnectionError, ValueError, RuntimeError, of several kinds each
        where = "on this machine" if given == "auto" else f"at {given}"
        if "Could not find any running" in str(error):
            raise NoHost(f"no Ray cluster {where}: `verbatim cluster start` makes one") from None
        if "Failed to connect" in str(
            error
        ):  # although the address answers: Ray gives no other reason
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


def _look_for(address: str) -> None:
    """Raise NoHost if no process listens at "host:port": Ray itself would try for half a minute."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit() and "/" not in host and not answers((host, int(port))):
        raise NoHost(f"no Ray cluster at {address}: no answer")
