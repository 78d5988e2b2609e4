"""Sources of processes that serve a share of a model: this machine's, and what others must offer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from verbatim.errors import StageFailed, VerbatimError
from verbatim.placement.distributed.launcher import HOST, Launcher, WorkerProcess
from verbatim.placement.distributed.link import Address


class NoHost(StageFailed):
    """There is no machine, or no memory, for another process."""


class Host(Protocol):
    """A process somewhere that serves a share of a model."""

    address: Address
    machine: str  # which of the machines it is on

    def kill(self) -> None:
        """End it at once; does nothing if it has ended."""
        ...


class Hosts:
    """A source of such processes: of the given ones, such as ranks that the user started, or of new ones.

    Args:
        key: the secret of the cluster.
        prepared: processes for the next `start`.
    """

    start_s = 120.0  # until a process listens: the first one imports torch and transformers

    def __init__(self, key: bytes, prepared: Sequence[Any] = ()) -> None:
        self.key = key
        self._hosts = list(prepared)
        self._prepared = list(prepared)

    def start(self, count: int, avoid: set[str]) -> list[Any]:
        """Start processes, spread over all machines except those to avoid.

        Raises:
            NoHost: they can't be had.
        """
        avoid, hosts, coming = set(avoid), list[Any](), list[Any]()
        deadline = time.monotonic() + self.start_s
        try:
            while len(hosts) < count:
                missing = count - len(hosts)
                usable = [host for host in self._prepared if self._usable(host, avoid)]
                for host in set(self._prepared).difference(usable):
                    host.kill()
                coming, self._prepared = usable[:missing], usable[missing:]
                prepared = len(coming)
                if prepared < missing:
                    coming += self._create(missing - prepared, avoid, None)
                for number, host in enumerate(coming):
                    try:
                        self._wait(host, deadline)
                        hosts.append(host)
                    except NoHost:
                        host.kill()
                        if number >= prepared:
                            if self.reachable(host):
                                raise
                            avoid.add(host.machine)
        except NoHost:
            for host in [*hosts, *coming]:
                host.kill()
            raise
        return hosts

    def prepare(self, count: int, model: dict[str, Any]) -> None:
        """Start processes in the background for the next `start`, which inspect a model in advance.

        Args:
            model: the fields of a `ModelSource`.
        """
        missing = count - len(self._prepared)
        try:
            self._prepared += self._create(missing, set(), model) if missing > 0 else []
        except NoHost:
            pass  # then there will be one when it is needed, or a message

    def _create(self, count: int, avoid: set[str], model: dict[str, Any] | None) -> list[Any]:
        """Begin to start processes, which inspect a model if given; NoHost if there is no machine."""
        raise NoHost("ranks that the user started can't be replaced")

    def _wait(self, host: Any, deadline: float) -> None:
        """Set the address of a process as soon as it listens; NoHost if it has ended, or is late."""

    def _usable(self, host: Any, avoid: set[str]) -> bool:
        """Return whether a prepared process is still there, on a machine that is not to be avoided."""
        return host.machine not in avoid and self.reachable(host)

    def machines(self) -> list[str]:
        """Return all machines that are available now."""
        return [host.machine for host in self._hosts]

    def reachable(self, host: Any) -> bool:
        """Return whether this host's machine is reachable."""
        return True

    def close(self) -> None:
        """End all processes that were started here."""
        for host in self._hosts:
            host.kill()


class LocalHosts(Hosts):
    """Starts processes on this machine.

    Args:
        key: the cluster's secret.
        share: what they serve, of `worker.SHARES`.
    """

    def __init__(self, key: bytes, share: str = "layers") -> None:
        super().__init__(key)
        self._share = share
        self._launcher = Launcher("verbatim.placement.distributed.worker:serve")

    def _create(
        self, count: int, avoid: set[str], model: dict[str, Any] | None
    ) -> list[WorkerProcess]:
        if HOST in avoid:
            raise NoHost("there is no other machine for a stage")
        arguments = {"share": self._share, "key": self.key.hex(), "model": model}
        return [self._launcher.start(**arguments) for _ in range(count)]

    def _wait(self, host: WorkerProcess, deadline: float) -> None:
        try:
            host.address = (HOST, host.wait_for_message(deadline))
        except VerbatimError as error:
            raise NoHost(str(error)) from None

    def _usable(self, host: WorkerProcess, avoid: set[str]) -> bool:
        return super()._usable(host, avoid) and host.returncode is None

    def machines(self) -> list[str]:
        return [HOST]

    def close(self) -> None:
        self._launcher.close()
