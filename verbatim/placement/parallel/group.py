"""The other ranks as rank 0 sees them: calls, answers, and which ranks are lost."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verbatim.errors import TierFailed
from verbatim.placement.cluster.contact import NoHost
from verbatim.placement.cluster.group import Host, StageGone, StageGroup, StageHandle
from verbatim.placement.cluster.hosts import Hosts
from verbatim.placement.cluster.link import Address, LinkLost, Refused
from verbatim.placement.cluster.local import LocalHost, LocalHosts
from verbatim.placement.cluster.stage import Stage
from verbatim.placement.launcher import HOST, WorkerProcess

_TELL_S = 3.0  # in which it becomes known who is gone
_MORE_S = 0.05  # for the reports of others, which may have caused it
_END_S = 5.0

Message = dict[str, Any]


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


class Followers:
    """Other ranks of the user's programs, which get the results of rank 0."""

    def __init__(self, members: Sequence[StageHandle]) -> None:
        self._members = members

    def tell(self, told: Mapping[str, Any]) -> None:
        """Send their programs a message; TierFailed if one is gone."""
        for member in self._members:
            member.send({"do": "tell", "told": told})
        for member in self._members:
            if member.lost is not None:
                raise TierFailed(str(member))


class RankGroup:
    """The ranks 1 to `size` - 1, each a stage with a `RankShare`.

    Attributes:
        folder: a private folder, deleted by `close`.
        key: the secret of all ranks.
        members: the ranks, in order.
        processes: those that were started here, by rank; empty where the user started them.
    """

    def __init__(self, size: int, timeout_s: float, key: bytes | None = None) -> None:
        self.size = size
        self.folder = Path(tempfile.mkdtemp(prefix="verbatim-ranks-"))
        self.key = key or secrets.token_bytes(32)
        self.processes: dict[int, WorkerProcess] = {}
        self._stages = StageGroup(self.key, patience_s=timeout_s, step_timeout_s=timeout_s)
        self.members = self._stages.members
        self._launched: list[LocalHosts] = []
        # Runs if it is never closed; its arguments must not refer to this object.
        self._end = weakref.finalize(
            self, _end, os.getpid(), self.folder, self.members, self.processes, self._launched
        )

    def start(self) -> None:
        """Start the processes, and connect to them; TierFailed if one does not come."""
        self._launched.append(LocalHosts(self.key, "verbatim.placement.parallel.worker:serve"))
        try:
            hosts = self._launched[0].start(self.size - 1, set())
        except NoHost as error:
            raise TierFailed(f"a rank of {self.size}: {error}") from None
        self.connect(hosts)

    def connect(self, hosts: Sequence[Host]) -> None:
        """Connect to the ranks; TierFailed if one is gone."""
        for rank, host in enumerate(hosts, start=1):
            name = f"rank {rank} of {self.size}"
            if isinstance(host, LocalHost):
                self.processes[rank] = host.process
                name += f": process {host.process.pid}"
            try:
                member = self._stages.meet(host)
            except (LinkLost, Refused) as error:
                raise TierFailed(f"{name}: {error}") from None
            member.index, member.name = rank, name
            self.members.append(member)

    def tell(self, message: Mapping[str, Any]) -> None:
        """Let all ranks make a call that this one makes as well.

        Raises:
            TierFailed: one is gone; the message names it. The others have got it.
        """
        for member in self.members:
            member.send(message)
        if self._stages.lost:
            raise self.failure(None)

    def ask(self, message: Message) -> list[Any]:
        """Return each rank's answer, in order; the ranks get their numbers as `rank`.

        Raises:
            TierFailed: one is gone.
            VerbatimError: one could not do what was asked for.
        """
        orders = [(member, {**message, "rank": member.index}) for member in self.members]
        try:
            return self._stages.call_each(orders, patient=True)
        except StageGone as error:
            raise self.failure(error) from error

    def failure(self, error: Exception | None) -> TierFailed:
        """Return the error that names the rank that failed, once it is known."""
        end = time.monotonic() + _TELL_S
        reports: list[tuple[StageHandle, Message]] = []
        while not (self._stages.lost or reports) and time.monotonic() < end:
            self._stages.pump()
            reports += self._stages.reports()
        for _ in self.members:
            self._stages.pump(_MORE_S)
        # Who went without a word took the others along.
        for member in self._stages.lost:
            process = self.processes.get(member.index)
            has_ended = process is not None and process.wait(0.5)
            ended = f" has ended ({process.ended})" if process is not None and has_ended else ""
            return TierFailed(f"{member.name}{ended}: {member.lost}")
        for member, report in reports:
            return TierFailed(f"{member.name}: {': '.join(report['error'])}")
        stuck = f"no rank is known to be gone, but one does not answer: {error}"
        return TierFailed(f"of {self.size} ranks, {stuck}")

    def close(self) -> None:
        """End the processes, and free everything; a second call does nothing."""
        self._end()


def _end(
    pid: int,
    folder: Path,
    members: list[StageHandle],
    processes: dict[int, WorkerProcess],
    launched: list[LocalHosts],
) -> None:
    if os.getpid() != pid:  # a forked child
        return
    for member in members:
        member.send({"do": "tell", "told": {"do": "close"}})
        member.link.close()
    end = time.monotonic() + _END_S
    for process in processes.values():
        process.wait(max(0.0, end - time.monotonic()))
    for hosts in launched:
        hosts.close()
    shutil.rmtree(folder, ignore_errors=True)


class RankHosts(Hosts):
    """One stage on each rank that the user started, rank 0 last, which has the head then.

    None of them can be replaced.

    Args:
        key: the secret of all ranks.
        others: the other ranks, in order.
    """

    def __init__(self, key: bytes, others: Sequence[RankHost]) -> None:
        self.key = key
        own = Stage(key, HOST)
        self._hosts = [*others, RankHost(0, own.address, own)]
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

    def close(self) -> None:
        for host in self._hosts:
            host.kill()


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
