"""Stages as processes of this machine, without Ray."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from verbatim.errors import VerbatimError
from verbatim.placement.cluster.contact import NoHost
from verbatim.placement.cluster.group import Host
from verbatim.placement.cluster.hosts import Hosts
from verbatim.placement.cluster.link import Address
from verbatim.placement.cluster.stage import Stage
from verbatim.placement.launcher import HOST, Launcher, WorkerProcess

_START_S = 120.0  # until a process listens: the first one imports torch and transformers


class LocalHost:
    """A worker process with one stage."""

    machine = HOST

    def __init__(self, process: WorkerProcess) -> None:
        self.process = process
        self.address: Address = (HOST, 0)

    def kill(self) -> None:
        self.process.kill()


class LocalHosts(Hosts):
    """Starts processes on this machine.

    Args:
        key: the cluster's secret.
        target: the function that they run, "module:function", with the arguments of `serve`.
    """

    def __init__(self, key: bytes, target: str = f"{__name__}:serve") -> None:
        self.key = key
        self._launcher = Launcher(target)
        self._prepared: list[LocalHost] = []

    def start(self, count: int, avoid: set[str]) -> list[Host]:
        if HOST in avoid:
            raise NoHost("there is no other machine for a stage")
        usable = [host for host in self._prepared if host.process.returncode is None]
        hosts, self._prepared = usable[:count], usable[count:]
        hosts += [self._create(None) for _ in range(count - len(hosts))]
        deadline = time.monotonic() + _START_S
        for host in hosts:
            try:
                host.address = (HOST, host.process.wait_for_message(deadline))
            except VerbatimError as error:
                raise NoHost(str(error)) from None
        return list(hosts)

    def _create(self, model: dict[str, Any] | None) -> LocalHost:
        return LocalHost(self._launcher.start(key=self.key.hex(), model=model))

    def prepare(self, count: int, model: dict[str, Any]) -> None:
        self._prepared += [self._create(model) for _ in range(count - len(self._prepared))]

    def machines(self) -> list[str]:
        return [HOST]

    def close(self) -> None:
        self._launcher.close()


def serve(
    key: str, model: dict[str, Any] | None, report: Callable[[Any], None], share: Any = None
) -> None:
    """Serve one stage until its head is gone: the function that a worker process runs.

    Args:
        key: in hexadecimal digits.
        model: inspected in advance, if given.
        report: takes the port.
        share: as of `Stage`.
    """
    ended = threading.Event()
    stage = Stage(bytes.fromhex(key), HOST, ended.set, share)
    report(stage.address[1])
    if model is not None:
        try:
            stage.warm(model)
        except VerbatimError:
            pass  # reported when the model is opened
    ended.wait()
