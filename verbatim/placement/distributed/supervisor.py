"""Replacement of lost stages, and recomputation of their KV cache.

A stage is its layers' weights, which lie in the checkpoint, and K and V, which follow from the hidden
states that went in. Those are computed again for the sequences that hold blocks: from what the stage
before has kept of its output, where it has all of it, else from further up, in the end from the ids. No
row's bits depend on when it is computed, so the outputs stay the same.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict

from verbatim.batch import Batch
from verbatim.errors import OutOfBlocks, StageFailed, VerbatimError
from verbatim.placement.distributed.choice import Cluster
from verbatim.placement.distributed.group import StageGone, StageHandle, error_of
from verbatim.placement.distributed.hosts import NoHost
from verbatim.placement.distributed.plan import Range
from verbatim.placement.distributed.stage_line import StageLine
from verbatim.placement.distributed.wire import Mark, Message, encode

_LOOK_S = 5.0  # between two looks for machines that have joined
_log = logging.getLogger("verbatim.cluster")


class Supervisor:
    """Keeps every stage alive, with the KV cache that it must have.

    Attributes:
        held: gives batches that compute whatever K and V are held now, without logits.
        at_rest: returns whether no sequence holds K and V.
        recovery_s: how long each recovery so far has taken.
        step: the last piece of work that was sent out.
        weights: "files", as they are in the checkpoint, "updated" in memory, or "mixed", while that is done
            or where it went wrong.
    """

    def __init__(self, group: StageLine, cluster: Cluster) -> None:
        self.group = group
        self.cluster = cluster
        self.held: Callable[[], list[Batch]] = list
        self.at_rest: Callable[[], bool] = lambda: False
        self.num_restarts = 0
        self.recovery_s: list[float] = []
        self.replayed_tokens = 0
        self.step = 0
        self.weights = "files"
        self._copied: dict[
            int, int
        ] = {}  # blocks that began as a copy of a higher one, or were written from files: the highest
        self._shunned: set[str] = set()  # machines on which layers could not be opened
        self._next_look = time.monotonic() + _LOOK_S

    @property
    def in_order(self) -> bool:
        """Return whether all stages are alive, as far as is known, connected, and have the KV in use."""
        return self.group.connected and not any(
            member.lost is not None or member.behind for member in self.group.members
        )

    def recover(self, *, last: bool = False) -> set[int]:
        """Replace all lost stages, connect again, and recompute their KV.

        What Ctrl-C breaks off here is taken up again by the next call.

        Args:
            last: there were so many attempts already that this one is not made.

        Returns:
            The places that were filled anew.

        Raises:
            StageFailed: it can't be done; names the stage and the reason.
        """
        if self.weights == "updated" and self.group.lost:
            lost = "; ".join(map(str, self.group.lost))
            raise StageFailed(
                f"{lost}: its weights were updated in memory, and are lost; call update_weights again"
            )
        begin = time.monotonic()
        reason: object = f"max_restarts={self.cluster.max_restarts}"
        gone: list[str] = []
        for _ in range(0 if last else self.cluster.max_restarts):
            gone = [str(member) for member in self.group.lost] or gone
            try:
                self._replace_lost()
                self.group.connect()
                fresh = {m.index for m in self.group.members if m.behind}
                self._replay(fresh)
            except StageGone as error:
                reason = error
                continue
            except (VerbatimError, OSError) as error:
                reason = error
                break
            for member in self.group.members:
                member.behind = False
            took = time.monotonic() - begin
            self.recovery_s.append(took)
            _log.warning("%s; replaced in %.2f s", "; ".join(gone) or "connections lost", took)
            self.prepare_spares()
            return fresh
        gone = gone or [str(member) for member in self.group.lost] or ["a stage"]
        raise StageFailed(f"{'; '.join(gone)}: it could not be replaced: {reason}")

    def prepare_spares(self) -> None:
        """Start spare processes in the background."""
        self.group.hosts.prepare(self.cluster.spares, asdict(self.group.model["source"]))

    def _replace_lost(self) -> None:
        lost, hosts = self.group.lost, self.group.hosts
        for member in lost:
            member.give_up()
        silent = {m.host.machine for m in lost if not hosts.reachable(m.host)}
        for old in lost:
            self._fill(old, silent)
            self.num_restarts += 1

    def _fill(self, old: StageHandle, silent: set[str]) -> None:
        """Replace the stage `old`, on any machine that can hold its layers."""
        why: Exception | None = None
        while True:
            try:
                (new,) = self.group.launch(1, silent | self._shunned)
            except NoHost as error:
                raise why or error from None
            try:
                self._take_the_place(old, new, silent)
            except (StageGone, NoHost, OutOfBlocks):
                raise
            except VerbatimError as error:
                why = error
                self._shun(new.host.machine, error)
            else:
                return

    def _take_the_place(self, old: StageHandle, new: StageHandle, silent: set[str]) -> None:
        """Open the layers of `old` on `new`, and on a second process if it lacks the memory for all."""
        group, filled, ranges = self.group, [new], [(old.first, old.end)]
        try:
            held = group.layout.bytes_of(*ranges[0])
            if held > group.layout.room(new.facts["memory"]):
                filled += self.group.launch(1, silent | self._shunned)
                room = [member.facts["memory"] for member in filled]
                ranges = group.layout.divide(room, [1.0, 1.0], ranges[0])
            group.open(filled, ranges)
            place = self.group.members.index(old)
            line = [*self.group.members[:place], *filled, *self.group.members[place + 1 :]]
            for member in filled:
                member.restarts, member.behind = old.restarts + 1, True
            group.allocate_some(filled, line)
        except BaseException:
            for member in filled:
                member.give_up()
            raise
        self.group.members = line
        for index, member in enumerate(line):
            member.index = index

    def _shun(self, machine: str, error: Exception) -> None:
        _log.warning("%s can't be used: %s", machine, error)
        self._shunned.add(machine)

    def note_copies(self, copies: list[tuple[int, int]]) -> None:
        """Record that blocks are about to be copied, (from, to), with the hidden states kept of them.

        So of a block that began as a copy of one beyond what is kept, the beginning is not there either.
        """
        for source, target in copies:
            highest = self._copied.get(source, source)
            if highest > target:
                self._copied[target] = highest
            else:
                self._copied.pop(target, None)

    def note_written(self, blocks: list[int]) -> None:
        """Record that blocks get contents of which no stage has kept hidden states."""
        self._copied.update(dict.fromkeys(blocks, sys.maxsize))

    def catch_up(self, first: int) -> None:
        """Let all stages from this one on recompute the KV in use, after all work sent so far.

        It goes through those before, too: what was sent out must not be overtaken.

        Raises:
            StageGone: a stage is lost meanwhile; these stages must catch up with the others, too.
        """
        members = self.group.members[first:]
        for member in members:
            member.behind = True
        for batch in self.held():
            self.replayed_tokens += batch.num_tokens
            self._send_down(batch, self.group.members[0], len(self.group.members) - 1, kept=False)
        for member in members:
            member.behind = False

    def _replay(self, places: set[int]) -> None:
        """Let these stages recompute the KV in use, and those between them pass it on."""
        if not places:
            return
        first, last = min(places), max(places)
        for batch in self.held():
            self.replayed_tokens += batch.num_tokens
            blocks = set(batch.block_tables.flatten().tolist())
            highest = max(self._copied.get(block, block) for block in blocks)
            start, kept = first, False
            while start > 0 and not kept:
                start -= 1
                kept = (
                    start not in places and highest < self.group.members[start].shape["kept_blocks"]
                )
            self._send_down(batch, self.group.members[start], last, kept=kept)

    def _send_down(self, batch: Batch, start: StageHandle, last: int, *, kept: bool) -> None:
        self.step += 1
        step = self.step
        self.send(batch, step, start.index, last, kept=kept, replays=True)
        while True:
            for member, report in self.group.wait_for_report():
                if report.get("ended", [0, 0, 0])[1] == step:
                    return
                self.raise_if_failed(member, report, step)

    def send(
        self,
        batch: Batch,
        step: int,
        first: int,
        stop: int,
        *,
        part: int = 0,
        parts: int = 1,
        fresh: Sequence[int] = (),
        kept: bool = False,
        replays: bool = False,
    ) -> None:
        """Send a micro-batch to the stages from `first` to `stop`; hidden states go from one to the next.

        Args:
            part, parts: which micro-batch of the step it is, and of how many.
            fresh: places that make no copies of blocks.
            kept: the first one doesn't compute, but hands on what it has kept.
            replays: it is a recomputation, and not sampled from.
        """
        work = {
            "do": "work",
            **Mark(self.group.epoch, step, part)._asdict(),
            "parts": parts,
            "first": first,
            "stop": stop,
            "fresh": list(fresh),
            "kept": kept,
            "replays": replays,
            "batch": batch,
        }
        encoded = encode(work)
        for member in self.group.members[first : stop + 1]:
            member.send(encoded)

    def raise_if_failed(self, member: StageHandle, report: Message, step: int) -> None:
        """Raise the error that a stage reports of this step, or of its connection to the next stage."""
        if report.get("epoch") != self.group.epoch:
            return
        if "unreachable" in report:
            raise StageGone([self.group.cut_off(member, report["unreachable"])])
        if report.get("failed") == step:
            raise error_of(report["error"], str(member))

    def move(self, ranges: list[Range]) -> None:
        """Move layers: stages with other ranges than these open them, and recompute their KV.

        Raises:
            StageFailed: a stage was lost meanwhile, and can't be replaced.
        """
        members = self.group.members
        changed = {
            member: wanted
            for member, wanted in zip(members, ranges, strict=True)
            if (member.first, member.end) != wanted
        }
        try:
            for member in changed:
                member.behind, member.shape = True, {}
            self.group.open(list(changed), list(changed.values()))
            self.group.allocate_some(list(changed), members)
        except BaseException as error:
            for member in changed:
                member.lost = member.lost or "it was to hold other layers, which went wrong"
            if not isinstance(error, StageGone):
                raise
        self.recover()

    def take_in_joined(self) -> None:
        """Move a stage to a machine that has none, from one that has several.

        It checks now and then, and only while no sequence holds K and V.
        """
        now = time.monotonic()
        if now < self._next_look or self.weights != "files" or not self.at_rest():
            return
        self._next_look = now + _LOOK_S
        on = Counter(member.host.machine for member in self.group.members)
        known = set(on) | self._shunned
        try:
            free = [m for m in self.group.hosts.machines() if m not in known]
        except NoHost as error:
            _log.warning("the machines that have joined can't be listed: %s", error)
            return
        crowded = [member for member in self.group.members if on[member.host.machine] > 1]
        if not free or not crowded:
            return
        old = crowded[-1]
        try:
            (new,) = self.group.launch(1, known | set(free[1:]))
            self._take_the_place(old, new, known | set(free[1:]))
        except (VerbatimError, OSError) as error:
            self._shun(free[0], error)
            return
        new.restarts = old.restarts
        old.give_up()
        _log.info("%s has joined, and takes layers %d to %d", free[0], old.first, old.end)
        self.recover()
