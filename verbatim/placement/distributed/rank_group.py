"""The other ranks as rank 0 sees them: calls, answers, and which ranks are lost."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from verbatim.errors import TierFailed
from verbatim.placement.distributed.group import StageGone, StageGroup, StageHandle
from verbatim.placement.distributed.handshake import Address
from verbatim.placement.distributed.hosts import Host, Hosts, NoHost
from verbatim.placement.distributed.launcher import WorkerProcess
from verbatim.placement.distributed.stage import Stage
from verbatim.placement.distributed.wire import Message, encode

_TELL_S = 3.0  # in which it becomes known who is gone
_MORE_S = 0.05  # for the reports of others, which may have caused it
_ENDED_S = 0.5  # in which a process that hung up is known to have ended
_END_S = 5.0


class RankHost:
    """A rank that the user started, with one stage; `stage` is that of this process."""

    def __init__(self, rank: int, address: Address, stage: Stage | None = None) -> None:
        self.machine = f"rank {rank}"
        self.address = address
        self._stage = stage

    def kill(self) -> None:
        """Close this process's stage; those of others are closed with their programs."""
        if self._stage is not None:
            self._stage.close()


class RankHosts(Hosts):
    """Ranks that the user started, with a stage each. None of them can be replaced."""

    def __init__(self, key: bytes, hosts: Sequence[RankHost]) -> None:
        self.key = key
        self._hosts = list(hosts)
        self._left = list(hosts)

    def start(self, count: int, avoid: set[str]) -> list[Host]:
        if count > len(self._left):
            raise NoHost("ranks that the user started can't be replaced")
        hosts, self._left = self._left[:count], self._left[count:]
        return list(hosts)

    def prepare(self, count: int, model: dict[str, Any]) -> None:
        """Do nothing: there is no spare rank."""

    def machines(self) -> list[str]:
        return [host.machine for host in self._hosts]

    def close(self) -> None:
        for host in self._hosts:
            host.kill()


class RankGroup(StageGroup):
    """The ranks 1 to `size` - 1 of a tensor-parallel model, which are never replaced.

    Raises:
        TierFailed: one does not come, or has other versions.
    """

    def __init__(self, hosts: Hosts, size: int, timeout_s: float) -> None:
        super().__init__(hosts, patience_s=timeout_s, step_timeout_s=timeout_s)
        self.size = size
        try:
            self.members = self.launch(size - 1)
        except NoHost as error:
            self.close()
            raise TierFailed(f"a rank of {size}: {error}") from None
        except BaseException:
            self.close()
            raise
        for rank, member in enumerate(self.members, start=1):
            member.index, member.name = rank, f"rank {rank} of {size}"
            if isinstance(member.host, WorkerProcess):
                member.name += f": process {member.host.pid}"

    def tell(self, message: Mapping[str, Any]) -> None:
        """Let all ranks make a call that this one makes as well.

        Raises:
            TierFailed: one is gone; the message names it. The others have got it.
        """
        encoded = encode(message)
        for member in self.members:
            member.send(encoded)
        if self.lost:
            raise self.failure(None)

    def ask(self, message: Message) -> list[Any]:
        """Return each rank's answer, in order; the ranks get their numbers as `rank`.

        Raises:
            TierFailed: one is gone.
            VerbatimError: one could not do what was asked for.
        """
        orders = [(member, {**message, "rank": member.index}) for member in self.members]
        try:
            return self.call_each(orders, patient=True)
        except StageGone as error:
            raise self.failure(error) from error

    def failure(self, error: Exception | None) -> TierFailed:
        """Return the error that names the rank that failed, once it is known."""
        end = time.monotonic() + _TELL_S
        reports: list[tuple[StageHandle, Message]] = []
        while not (self.lost or reports) and time.monotonic() < end:
            self.pump()
            reports += self.reports()
        for _ in self.members:
            self.pump(_MORE_S)
        # Who went without a word took the others along.
        for member in self.lost:
            ended, host = "", member.host
            if isinstance(host, WorkerProcess) and host.wait(_ENDED_S):
                ended = f" has ended ({host.ended})"
            return TierFailed(f"{member.name}{ended}: {member.lost}")
        for member, report in reports:
            return TierFailed(f"{member.name}: {': '.join(report['error'])}")
        stuck = f"no rank is known to be gone, but one does not answer: {error}"
        return TierFailed(f"of {self.size} ranks, {stuck}")


class Followers:
    """Other ranks of the user's programs, which get the results of rank 0."""

    def __init__(self, members: Sequence[StageHandle]) -> None:
        self._members = members

    def tell(self, told: Mapping[str, Any]) -> None:
        """Send their programs a message; TierFailed if one is gone."""
        encoded = encode({"do": "tell", "told": told})
        for member in self._members:
            member.send(encoded)
        for member in self._members:
            if member.lost is not None:
                raise TierFailed(str(member))


class Follower:
    """This rank's stage, and what rank 0 tells its program."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def wait(self) -> Message:
        """Return what rank 0 tells next; TierFailed if it is gone."""
        message = self._stage.told.get()
        if message is None:
            raise TierFailed("rank 0 is gone")
        told: Message = message["told"]
        return told

    def close(self) -> None:
        """Close the stage, and wait until it has ended."""
        self._stage.close()
        self._stage.join(_END_S)
