"""Sources of processes that serve a share of a model: this machine's, and what others must offer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
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
        avoid, hosts, deadline = set(avoid), list[Any](), time.monotonic() + self.start_s
        usable = [h for h in self._prepared if h.machine not in avoid and self.reachable(h)]
        for host in set(self._prepared).difference(usable):
            host.kill()
        coming, self._prepared = usable[:count], usable[count:]
        try:
            if len(coming) < count:
                coming += self._create(count - len(coming), avoid, None)
            for host in coming:  # more of them where one does not come
                try:
                    self._wait(host, deadline)
                    hosts.append(host)
                except NoHost:
                    host.kill()
                    if host not in usable:
                        if self.reachable(host):
                            raise
                        avoid.add(host.machine)
                    if self._prepared:
                        coming.append(self._prepared.pop(0))
                    else:
                        coming += self._create(1, avoid, None)
        except NoHost:
            for host in coming:
                host.kill()
            raise
        return hosts

    def prepare(self, count: int, model: dict[str, Any]) -> None:
        """Start processes in the background for the next `start`, which inspect a model in advance.

        Args:
            model: the fields of a `ModelSource`.
        """
        missing = count - len(self._prepared)
        with suppress(NoHost):  # then there will be one when it is needed, or a message
            self._prepared += self._create(missing, set(), model) if missing > 0 else []

    def _create(self, count: int, avoid: set[str], model: dict[str, Any] | None) -> list[Any]:
        """Begin to start processes, which inspect a model if given; NoHost if there is no machine."""
        raise NoHost("ranks that the user started can't be replaced")

    def _wait(self, host: Any, deadline: float) -> None:
        """Set the address of a process as soon as it listens; NoHost if it has ended, or is late."""

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
        share: the `Served` that they run, as "module:class" of this package.
    """

    def __init__(self, key: bytes, share: str = "stage_share:StageShare") -> None:
        super().__init__(key)
        self._launcher = Launcher(f"{__package__}.{share}.serve")

    def _create(
        self, count: int, avoid: set[str], model: dict[str, Any] | None
    ) -> list[WorkerProcess]:
        if HOST in avoid:
            raise NoHost("there is no other machine for a stage")
        arguments = {"key": self.key.hex(), "host": HOST, "model": model}
        return [self._launcher.start(**arguments) for _ in range(count)]

    def _wait(self, host: WorkerProcess, deadline: float) -> None:
        try:
            host.address = (HOST, host.wait_for_message(deadline))
        except VerbatimError as error:
            raise NoHost(str(error)) from None
        if host.returncode is not None:
            raise NoHost(f"the process has ended: {host.ended}")

    def machines(self) -> list[str]:
        return [HOST]

    def close(self) -> None:
        self._launcher.close()
