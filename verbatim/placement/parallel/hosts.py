"""The ranks that the user started, as processes for the stages of a pipeline."""

from __future__ import annotations

from typing import Any

from verbatim.placement.cluster.contact import NoHost
from verbatim.placement.cluster.group import Host
from verbatim.placement.cluster.hosts import versions
from verbatim.placement.cluster.link import Address
from verbatim.placement.cluster.stage import Stage
from verbatim.placement.launcher import HOST
from verbatim.placement.parallel.group import RankGroup


class RankHost:
    """A rank with one stage, beside the user's program; `stage` is that of this process."""

    def __init__(self, rank: int, address: Address, stage: Stage | None = None) -> None:
        self.machine = f"rank {rank}"
        self.address = address
        self._stage = stage

    def kill(self) -> None:
        """Close this process's stage; those of others are closed with their programs."""
        if self._stage is not None:
            self._stage.close()


class RankHosts:
    """One stage on each rank, rank 0 last, which has the head then; none of them can be replaced.

    Args:
        group: the other ranks, all connected.
        timeout_s: within which they answer.
    """

    def __init__(self, group: RankGroup, timeout_s: float) -> None:
        self.key = group.key
        self._group = group
        group.tell({"do": "stage", "asks": True})
        answers = sorted(group.answers(timeout_s).items())
        own = Stage(group.key, HOST)
        self._hosts = [RankHost(rank, (HOST, answer["port"])) for rank, answer in answers]
        self._hosts.append(RankHost(0, own.address, own))
        self._left = list(self._hosts)

    def start(self, count: int, avoid: set[str]) -> list[Host]:
        if count > len(self._left):
            raise NoHost("ranks that the user started can't be replaced")
        hosts, self._left = self._left[:count], self._left[count:]
        return list(hosts)

    def prepare(self, count: int, model: dict[str, Any]) -> None:
        """Do nothing: there is no spare rank."""

    def machines(self) -> list[str]:
        return [host.machine for host in self._hosts]

    def reachable(self, host: Host) -> bool:
        return True

    def versions(self) -> dict[str, str]:
        return versions()

    def close(self) -> None:
        for host in self._hosts:
            host.kill()
        self._group.close()
