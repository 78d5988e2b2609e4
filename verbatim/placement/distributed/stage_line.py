"""The stages of a model: their layers, memory and connections, and the replacement of lost stages.

The state of a stage can be restored: weights are read from the checkpoint, K and V recomputed from token ids.
If a stage is lost, the K and V of all stages are dropped, and the engine recomputes them as for evicted
sequences. Recomputed rows are bit-identical, so outputs do not change.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from itertools import zip_longest

from verbatim.batch import Adapter
from verbatim.common.shield import Shield
from verbatim.errors import NotSupported, OutOfBlocks, StageFailed, VerbatimError
from verbatim.params import CHOICES
from verbatim.placement.distributed.choice import Cluster
from verbatim.placement.distributed.group import StageGone, StageGroup, StageHandle, error_of
from verbatim.placement.distributed.hosts import Hosts, NoHost
from verbatim.placement.distributed.served import check_keys
from verbatim.placement.distributed.split import LayerSizes, Range
from verbatim.placement.distributed.wire import Message
from verbatim.protocols import CacheLost

_CHECK_INTERVAL_S = 5.0  # interval of checks for machines that have joined
_log = logging.getLogger("verbatim.cluster")


class StageLine(StageGroup):
    """All stages of a model, in the order of their layers.

    Args:
        layout: sizes of the model's layers.
        model: the arguments of `StageShare.open` common to all stages.
        fingerprint: fingerprint of the model's files on this machine.
    """

    def __init__(
        self, hosts: Hosts, cluster: Cluster, layout: LayerSizes, model: Message, fingerprint: str
    ) -> None:
        super().__init__(
            hosts, patience_s=cluster.patience_s, step_timeout_s=cluster.step_timeout_s
        )
        self.cluster = cluster
        self.layout = layout
        self.model = model
        self.epoch = 0  # number of the current set of connections
        self.adapters: dict[int, Adapter] = {}  # by number; stages load them when they are opened
        self.blocks: Message = {}  # the size of every stage's KV cache: `num_blocks`, `num_states`
        # Evicts all sequences, and returns how many of their tokens were computed.
        self.evict: Callable[[], int] = int
        self.at_rest: Callable[[], bool] = lambda: False  # whether no sequence holds K and V
        self.num_restarts = 0
        self.recovery_s: list[float] = []  # seconds that each recovery took
        self.recomputed_tokens = 0  # total of the results of `evict`
        self.weights = "files"  # as in the checkpoint; "updated" in memory; "mixed": partly updated
        self._fingerprint = fingerprint
        self._connected = False  # every stage has its connections of this epoch
        self._excluded: set[str] = set()  # machines on which layers could not be opened
        self._next_check = time.monotonic() + _CHECK_INTERVAL_S

    def _prepare(self, launched: list[StageHandle]) -> None:
        """Assign a device to each new process, and store its memory and speed in `facts`."""
        alive = [member for member in self.members if member.lost is None]
        for member in launched:
            machine = member.facts["machine"]
            taken = {other.number for other in alive if other.facts["machine"] == machine}
            member.number = min({*range(len(taken) + 1)} - taken)
            alive.append(member)
        numbers = [{"number": member.number} for member in launched]
        device = self.model["options"].device
        answers = self.call("use", launched, numbers, patient=True, device=device)
        for member, facts in zip(launched, answers, strict=True):
            member.facts |= facts

    def open(self, members: list[StageHandle], ranges: list[Range]) -> None:
        """Open a range of layers on each of `members`.

        Raises:
            StageGone: a stage was lost meanwhile.
            VerbatimError: a stage can't open its layers, or would compute other bits.
        """
        arguments = []
        sharing = Counter(member.memory_at for member in members)
        for member, (first, end) in zip(members, ranges, strict=True):
            member.first, member.end = first, end
            memory = member.facts["memory"] // sharing[member.memory_at]
            arguments.append({"first": first, "end": end, "memory": memory})
        common = {**self.model, "blocks": self.blocks, "adapters": list(self.adapters.values())}
        shapes = self.call("open", members, arguments, patient=True, **common)
        for member, shape in zip(members, shapes, strict=True):
            member.shape |= shape  # stages that move keep their `info` until `allocate`
            if shape["fingerprint"] != self._fingerprint:
                raise NotSupported(
                    f"{member.host.machine} has another model at {self.model['source'].model!r} than this "
                    "machine: all machines of a cluster need the same files"
                )
        opened = [member for member in [*self.members, *members] if member.shape]
        by_torch = any(member.shape["torch_functions"] for member in opened)
        check_keys(
            (member.host.machine, member.shape["numerics_keys"][by_torch]) for member in opened
        )

    def allocate(self, members: list[StageHandle], line: list[StageHandle]) -> None:
        """Allocate the KV cache on `members`; `line` has all stages in order."""
        arguments = []
        for member in members:
            before = line[: line.index(member)]
            first_of = {
                name: sum(other.shape["choices"][name].layers for other in before)
                for name in CHOICES
            }
            arguments.append({"first_of": first_of})
        answers = self.call("allocate", members, arguments, patient=True, **self.blocks)
        for member, answer in zip(members, answers, strict=True):
            member.shape.update(answer)

    def connect(self) -> None:
        """Begin a new epoch: every stage replaces its connections. Raises StageGone if a stage is lost."""
        self._connected = False
        self.epoch += 1
        self.reports()  # discards reports of the last epoch
        per_member = []
        for index, (member, next_stage) in enumerate(zip_longest(self.members, self.members[1:])):
            member.index = index
            next_address = next_stage and next_stage.host.address
            per_member.append({"index": index, "restarts": member.restarts, "next": next_address})
        limits: Message = {"patience_s": self.patience_s, "timeout_s": self.step_timeout_s}
        answers = self.call("link", per_member=per_member, epoch=self.epoch, **limits)
        for member, answer in zip(self.members, answers, strict=True):
            if "unreachable" in answer:
                self.cut_off(member.index + 1, answer["unreachable"])
        self.check()
        self._connected = True

    def cut_off(self, index: int, why: object) -> StageHandle:
        """Mark a stage as lost, as the stage before it can't reach it; return the lost one."""
        before, member = self.members[index - 1 : index + 1]
        member.lost = member.lost or f"{before} can't reach it: {why}"
        return member

    @property
    def in_order(self) -> bool:
        """Return whether all stages are connected, and none is known to be lost."""
        return self._connected and not self.lost

    def recover(self) -> None:
        """Evict all sequences, replace all lost stages, and reconnect. After Ctrl-C, the next call continues.

        Raises:
            StageFailed: the recovery failed; the message has the stage and the reason.
        """
        if self.weights == "updated" and self.lost:
            lost = "; ".join(map(str, self.lost))
            raise StageFailed(
                f"{lost}: its weights were updated in memory, and are lost; call update_weights again"
            )
        begin = time.monotonic()
        # Nothing is cached until the stages are connected again: KV of an earlier epoch is never read.
        self._connected = False
        with Shield().up():
            self.recomputed_tokens += self.evict()
        reason: object = None
        gone: list[str] = []
        for _ in range(max(1, self.cluster.max_restarts)):
            gone = [str(member) for member in self.lost] or gone
            try:
                self._replace_lost()
                self.connect()
            except StageGone as error:
                reason = error
                continue
            except (VerbatimError, OSError) as error:
                reason = error
                break
            took = time.monotonic() - begin
            self.recovery_s.append(took)
            _log.warning("%s; replaced in %.2f s", "; ".join(gone) or "connections lost", took)
            self.prepare_spares()
            return
        self._excluded.clear()  # the next call tries all machines again
        gone = gone or [str(member) for member in self.lost] or ["a stage"]
        raise StageFailed(f"{'; '.join(gone)}: it could not be replaced: {reason}")

    def prepare_spares(self) -> None:
        """Start spare processes in the background."""
        self.hosts.prepare(self.cluster.spares, asdict(self.model["source"]))

    def _replace_lost(self) -> None:
        lost, hosts = self.lost, self.hosts
        for member in lost:
            member.give_up()
        silent = {m.host.machine for m in lost if not hosts.reachable(m.host)}
        for old in lost:
            self._replace_stage(old, silent)
            self.num_restarts += 1

    def _replace_stage(self, old: StageHandle, avoid: set[str]) -> None:
        """Replace the stage `old` by a process on any machine that can hold its layers, except `avoid`."""
        why: Exception | None = None
        while True:
            try:
                (new,) = self.launch(1, avoid | self._excluded)
            except NoHost as error:
                raise why or error from None
            try:
                self._open_in_place_of(old, new, avoid)
            except (StageGone, NoHost, OutOfBlocks):
                raise
            except VerbatimError as error:
                why = error
                self._exclude(new.host.machine, error)
            else:
                return

    def _open_in_place_of(self, old: StageHandle, new: StageHandle, avoid: set[str]) -> None:
        """Open the layers of `old` on `new` and, if that has too little memory, on a second process."""
        members, ranges = [new], [(old.first, old.end)]
        try:
            nbytes = self.layout.bytes_of(*ranges[0])
            if nbytes > self.layout.room(new.facts["memory"]):
                members += self.launch(1, avoid | self._excluded)
                room = [member.facts["memory"] for member in members]
                ranges = self.layout.divide(room, [1.0, 1.0], ranges[0])
            self.open(members, ranges)
            position = self.members.index(old)
            line = [*self.members[:position], *members, *self.members[position + 1 :]]
            for index, member in enumerate(members, start=position):
                member.index = index
                member.restarts = old.restarts + (old.lost is not None)
            self.allocate(members, line)
        except BaseException:
            for member in members:
                member.give_up()
            raise
        self._connected = False
        self.members = line

    def _exclude(self, machine: str, error: Exception) -> None:
        if machine not in self._excluded:
            _log.warning("%s can't be used: %s", machine, error)
        self._excluded.add(machine)

    def check_reports(self, step: int) -> None:
        """Handle the reports of stages.

        Raises:
            StageGone: a stage or the connection between two stages is lost.
            VerbatimError: a stage failed in this step.
        """
        self.check()
        for member, report in self.reports():
            if report.get("epoch") == self.epoch:
                if "cut_off" in report:
                    raise StageGone(str(self.cut_off(report["cut_off"], report["why"])))
                if report.get("step") == step:
                    raise error_of(report["error"], str(member))

    def move(self, ranges: list[Range]) -> None:
        """Evict all sequences, and assign new ranges of layers to the stages.

        Raises:
            StageFailed: a stage was lost meanwhile, and can't be replaced.
        """
        members = self.members
        changed = {
            member: new
            for member, new in zip(members, ranges, strict=True)
            if (member.first, member.end) != new
        }
        if not changed:
            return
        before = [(member.first, member.end) for member in changed]
        self._connected = False
        try:
            self.open(list(changed), list(changed.values()))
            self.allocate(list(changed), members)
        except BaseException as error:
            for member, held in zip(changed, before, strict=True):
                member.first, member.end = held
                member.lost = member.lost or "moving layers to it failed"
            if not isinstance(error, StageGone):
                raise
        self.recover()

    def use_joined_machine(self) -> None:
        """If a machine without stages has joined, move a stage to it from a machine with several.

        The check is made at most once per `_CHECK_INTERVAL_S`, and only while no sequence holds K and V.

        Raises:
            CacheLost: a stage was moved.
            StageFailed: the stages can't be connected again.
        """
        now = time.monotonic()
        if now < self._next_check or self.weights != "files" or not self.at_rest():
            return
        self._next_check = now + _CHECK_INTERVAL_S
        counts = Counter(member.host.machine for member in self.members)
        try:
            free = [m for m in self.hosts.machines() if m not in self._excluded.union(counts)]
        except NoHost as error:
            _log.warning("the machines that have joined can't be listed: %s", error)
            return
        crowded = [member for member in self.members if counts[member.host.machine] > 1]
        if not free or not crowded:
            return
        old = crowded[-1]
        try:  # only the first one; if it can't be used, the next check tries another
            self._replace_stage(old, {*counts, *free[1:]})
        except (VerbatimError, OSError) as error:
            self._exclude(free[0], error)
            return
        old.give_up()
        _log.info("%s has joined, and takes layers %d to %d", free[0], old.first, old.end)
        self.recover()
        raise CacheLost("a stage has moved")
