"""Sources of processes that serve a share of a model: this machine's, and what others must offer."""

from __future__ import annotations

import time
from typing import Any, Protocol

from verbatim.errors import StageFailed, VerbatimError
from verbatim.placement.distributed.handshake import Address
from verbatim.placement.distributed.launcher import HOST, Launcher, WorkerProcess

_START_S = 120.0  # until a process listens: the first one imports torch and transformers


class NoHost(StageFailed):
    """There is no machine, or no memory, for another process."""


class Host(Protocol):
    """A process somewhere that serves a share of a model."""

    address: Address
    machine: str  # which of the machines it is on

    def kill(self) -> None:
        """End it at once; does nothing if it has ended."""
        ...


class Hosts(Protocol):
    """A source of such processes."""

    key: bytes  # the secret of the cluster

    def start(self, count: int, avoid: set[str]) -> list[Host]:
        """Start processes, spread over all machines except those to avoid.

        Raises:
            NoHost: they can't be had.
        """
        ...

    def prepare(self, count: int, model: dict[str, Any]) -> None:
        """Start processes in the background for the next `start`, which inspect a model in advance.

        Args:
            model: the fields of a `ModelSource`.
        """
        ...

    def machines(self) -> list[str]:
        """Return all machines that are available now."""
        ...

    def reachable(self, host: Host) -> bool:
        """Return whether this host's machine is reachable."""
        return True

    def close(self) -> None:
        """End all processes that were started here."""
        ...


class LocalHosts(Hosts):
    """Starts processes on this machine.

    Args:
        key: the cluster's secret.
        share: what they serve, of `worker.SHARES`.
    """

    def __init__(self, key: bytes, share: str = "layers") -> None:
        self.key = key
        self._share = share
        self._launcher = Launcher("verbatim.placement.distributed.worker:serve")
        self._prepared: list[WorkerProcess] = []

    def start(self, count: int, avoid: set[str]) -> list[Host]:
        if HOST in avoid:
            raise NoHost("there is no other machine for a stage")
        usable = [host for host in self._prepared if host.returncode is None]
        hosts, self._prepared = usable[:count], usable[count:]
        hosts += [self._create(None) for _ in range(count - len(hosts))]
        deadline = time.monotonic() + _START_S
        for host in hosts:
            try:
                host.address = (HOST, host.wait_for_message(deadline))
            except VerbatimError as error:
                raise NoHost(str(error)) from None
        return list(hosts)

    def _create(self, model: dict[str, Any] | None) -> WorkerProcess:
        return self._launcher.start(share=self._share, key=self.key.hex(), model=model)

    def prepare(self, count: int, model: dict[str, Any]) -> None:
        self._prepared += [self._create(model) for _ in range(count - len(self._prepared))]

    def machines(self) -> list[str]:
        return [HOST]

    def close(self) -> None:
        self._launcher.close()
