"""The other ranks as rank 0 sees them: calls, answers, and which ranks are lost."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from verbatim.errors import TierFailed
from verbatim.placement.distributed.group import StageGone, StageGroup, StageHandle
from verbatim.placement.distributed.hosts import Hosts, NoHost
from verbatim.placement.distributed.launcher import WorkerProcess
from verbatim.placement.distributed.wire import Message, encode

_TELL_S = 3.0  # in which it becomes known who is gone
_MORE_S = 0.05  # for the reports of others, which may have caused it
_ENDED_S = 0.5  # in which a process that hung up is known to have ended


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
        """Return each rank's answer, in order.

        Raises:
            TierFailed: one is gone.
            VerbatimError: one could not do what was asked for.
        """
        return self.ask_each([message] * len(self.members))

    def ask_each(self, messages: list[Message]) -> list[Any]:
        """Return each rank's answer to a message of its own, as `ask`."""
        try:
            return self.call_each(list(zip(self.members, messages, strict=True)), patient=True)
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
