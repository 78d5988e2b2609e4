"""Sources of processes that serve a share of a model: the interface, and this machine's processes."""

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
    """A process, on any machine, that serves a share of a model."""

    address: Address
    machine: str  # name of the machine

    def kill(self) -> None:
        """End the process at once; no effect if it has ended."""
        ...


class Hosts:
    """A source of `Host` processes.

    Args:
        prepared: existing processes, such as ranks started by the user; `start` uses them first.
    """

    start_s = 120.0  # time limit of a start; the first process imports torch and transformers

    def __init__(self, key: bytes, prepared: Sequence[Any] = ()) -> None:
        self.key = key
        self._hosts = list(prepared)
        self._prepared = list(prepared)

    def start(self, count: int, avoid: set[str]) -> list[Any]:
        """Start processes on all machines except `avoid`, evenly; return them when they listen.

        Raises:
            NoHost: there are not enough machines or processes.
        """
        avoid, hosts, deadline = set(avoid), list[Any](), time.monotonic() + self.start_s
        usable = [h for h in self._prepared if h.machine not in avoid and self.reachable(h)]
        for host in set(self._prepared).difference(usable):
            host.kill()
        starting, self._prepared = usable[:count], usable[count:]
        try:
            if len(starting) < count:
                starting += self._create(count - len(starting), avoid, None)
            for host in starting:  # grows: each process that fails is replaced
                try:
                    self._wait(host, deadline)
                    hosts.append(host)
                except NoHost:
                    host.kill()
                    if host not in usable:
                        if self.reachable(host):
                            raise
                        avoid.add(host.machine)
                    spare, self._prepared = self._prepared[:1], self._prepared[1:]
                    starting += spare or self._create(1, avoid, None)
        except BaseException:
            for host in starting:
                host.kill()
            raise
        return hosts

    def prepare(self, count: int, model: dict[str, Any]) -> None:
        """Start processes in the background for the next `start`.

        They inspect the model, given by the fields of its `ModelSource`, in advance.
        """
        missing = count - len(self._prepared)
        with suppress(NoHost):  # then `start` tries again, and reports the error
            self._prepared += self._create(missing, set(), model) if missing > 0 else []

    def _create(self, count: int, avoid: set[str], model: dict[str, Any] | None) -> list[Any]:
        """Begin to start processes, which inspect `model`, if any; raise NoHost if there is no machine."""
        raise NoHost("ranks that the user started can't be replaced")

    def _wait(self, host: Any, deadline: float) -> None:
        """Wait until a process listens, and set its address; raise NoHost if it ends or the time is over."""

    def machines(self) -> list[str]:
        """Return the names of all machines that are available now."""
        return [host.machine for host in self._hosts]

    def reachable(self, host: Any) -> bool:
        """Return whether the machine of a process is reachable."""
        return True

    def close(self) -> None:
        """End all processes that were started here."""
        for host in self._hosts:
            host.kill()


class LocalHosts(Hosts):
    """Starts processes on this machine, which run `share`, a subclass of `Served`, as "module:class"."""

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
