"""The stages of a model: their layers, memory and connections, and the replacement of those that are lost.

A stage is its layers' weights, which lie in the checkpoint, and K and V, which follow from the ids: with a
stage, those of all stages are given up, and the engine computes them again as those of evicted sequences.
No row's bits depend on when it is computed, so the outputs stay the same.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from itertools import zip_longest

from verbatim.batch import Adapter
from verbatim.errors import NotSupported, OutOfBlocks, StageFailed, VerbatimError
from verbatim.params import CHOICES
from verbatim.placement.distributed.choice import Cluster
from verbatim.placement.distributed.group import StageGone, StageGroup, StageHandle, error_of
from verbatim.placement.distributed.hosts import Hosts, NoHost
from verbatim.placement.distributed.plan import LayerSizes, Range
from verbatim.placement.distributed.served import check_keys
from verbatim.placement.distributed.wire import Message
from verbatim.protocols import CacheLost
from verbatim.shield import Shield

_LOOK_S = 5.0  # between two looks for machines that have joined
_log = logging.getLogger("verbatim.cluster")


class StageLine(StageGroup):
    """All stages of a model, in the order of their layers, with the KV cache that each must have.

    Args:
        layout: of the model's layers.
        model: what a stage is told to open, without its range of layers.
        fingerprint: of the model's files here.

    Attributes:
        adapters: those that stages hold from their opening on, by number.
        blocks: what K and V are allocated with: `num_blocks` and `num_states`.
        epoch: raised whenever the stages are connected anew.
        evict: evicts all sequences; returns how many tokens of them were computed.
        at_rest: returns whether no sequence holds K and V.
        recovery_s: how long each recovery so far has taken.
        recomputed_tokens: the tokens that were evicted by `evict`.
        weights: "files", as they are in the checkpoint, "updated" in memory, or "mixed", while that is done
            or where it went wrong.
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
        self.epoch = 0
        self.adapters: dict[int, Adapter] = {}
        self.blocks: Message = {}
        self.evict: Callable[[], int] = int
        self.at_rest: Callable[[], bool] = lambda: False
        self.num_restarts = 0
        self.recovery_s: list[float] = []
        self.recomputed_tokens = 0
        self.weights = "files"
        self._fingerprint = fingerprint
        self._connected = False  # every stage has its connections in this epoch
        self._kv_bytes: dict[Range, int] = {}  # by layers
        self._shunned: set[str] = set()  # machines on which layers could not be opened
        self._next_look = time.monotonic() + _LOOK_S

    def _prepare(self, launched: list[StageHandle]) -> None:
        """Let each new process choose its device, and tell its memory and speed."""
        alive = [member for member in self.members if member.lost is None]
        for member in launched:
            machine = member.facts["machine"]
            taken = {other.number for other in alive if other.facts["machine"] == machine}
            member.number = min({*range(len(taken) + 1)} - taken)
            alive.append(member)
        own = [{"number": member.number} for member in launched]
        device = self.model["options"].device
        answers = self.call("use", launched, own, patient=True, device=device)
        for member, facts in zip(launched, answers, strict=True):
            member.facts |= facts

    def open(self, members: list[StageHandle], ranges: list[Range]) -> None:
        """Open the layers of each of these.

        Raises:
            StageGone: one is lost meanwhile.
            VerbatimError: the layers can't be had there, or the bits would differ.
        """
        own = []
        at = [(member.facts["machine"], member.facts["device"]) for member in members]
        for member, place, (first, end) in zip(members, at, ranges, strict=True):
            member.first, member.end = first, end
            memory = member.facts["memory"] // at.count(place)
            kv_bytes = self._kv_bytes.get((first, end))
            own.append({"first": first, "end": end, "memory": memory, "kv_bytes": kv_bytes})
        told = {**self.model, "adapters": list(self.adapters.values())}
        shapes = self.call("open", members, own, patient=True, **told)
        for member, shape in zip(members, shapes, strict=True):
            member.shape = shape
            if shape["fingerprint"] != self._fingerprint:
                raise NotSupported(
                    f"{member.host.machine} has another model at {self.model['source'].model!r} than this "
                    "machine: all machines of a cluster need the same files"
                )
        opened = [member for member in [*self.members, *members] if member.shape]
        check_keys((member.host.machine, member.shape["numerics_key"]) for member in opened)

    def allocate(self, members: list[StageHandle], line: list[StageHandle]) -> None:
        """Allocate the KV memory of stages; `line` is all of them, in order."""
        own = []
        for member in members:
            before = line[: line.index(member)]
            first_of = {
                name: sum(other.shape["choices"][name].layers for other in before)
                for name in CHOICES
            }
            own.append({"first_of": first_of})
        answers = self.call("allocate", members, own, patient=True, **self.blocks)
        for member, answer in zip(members, answers, strict=True):
            member.shape.update(answer)
            blocks, shape = self.blocks, member.shape
            size = self.model["options"].block_size
            nbytes = blocks["num_blocks"] * size * shape["token_bytes"]
            nbytes += blocks["num_states"] * shape["state_bytes"]
            self._kv_bytes[member.first, member.end] = nbytes

    def connect(self) -> None:
        """Begin a new epoch: every stage closes its connections and gets new ones.

        Raises:
            StageGone: one is lost meanwhile.
        """
        self._connected = False
        self.epoch += 1
        self.reports()  # of the epoch before
        own = []
        for index, (member, behind) in enumerate(zip_longest(self.members, self.members[1:])):
            member.index = index
            behind_at = behind and behind.host.address
            own.append({"index": index, "restarts": member.restarts, "next": behind_at})
        limits: Message = {"patience_s": self.patience_s, "timeout_s": self.step_timeout_s}
        answers = self.call("link", own=own, epoch=self.epoch, **limits)
        for member, answer in zip(self.members, answers, strict=True):
            if "unreachable" in answer:
                self.cut_off(member, answer["unreachable"])
        self.check()
        self._connected = True

    def cut_off(self, member: StageHandle, why: object) -> StageHandle:
        """Mark the stage after this one as lost, because it can't be reached from there."""
        behind = self.members[member.index + 1]
        behind.lost = behind.lost or f"{member} can't reach it: {why}"
        return behind

    @property
    def in_order(self) -> bool:
        """Return whether all stages are alive, as far as is known, and connected."""
        return self._connected and not self.lost

    def recover(self, *, last: bool = False) -> None:
        """Evict all sequences, replace all lost stages, and connect again.

        What Ctrl-C breaks off here is taken up again by the next call.

        Args:
            last: there were so many attempts already that this one is not made.

        Raises:
            StageFailed: it can't be done; names the stage and the reason.
        """
        if self.weights == "updated" and self.lost:
            lost = "; ".join(map(str, self.lost))
            raise StageFailed(
                f"{lost}: its weights were updated in memory, and are lost; call update_weights again"
            )
        begin = time.monotonic()
        # Until the stages are connected anew, nothing is cached: no KV of an earlier epoch is ever read.
        self._connected = False
        with Shield().up():
            self.recomputed_tokens += self.evict()
        reason: object = f"max_restarts={self.cluster.max_restarts}"
        gone: list[str] = []
        for _ in range(0 if last else self.cluster.max_restarts):
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
            self._fill(old, silent)
            self.num_restarts += 1

    def _fill(self, old: StageHandle, avoid: set[str]) -> None:
        """Replace the stage `old`, on any other machine that can hold its layers."""
        why: Exception | None = None
        while True:
            try:
                (new,) = self.launch(1, avoid | self._shunned)
            except NoHost as error:
                raise why or error from None
            try:
                self._take_the_place(old, new, avoid)
            except (StageGone, NoHost, OutOfBlocks):
                raise
            except VerbatimError as error:
                why = error
                self._shun(new.host.machine, error)
            else:
                return

    def _take_the_place(self, old: StageHandle, new: StageHandle, avoid: set[str]) -> None:
        """Open the layers of `old` on `new`, and on a second process if it lacks the memory for all."""
        filled, ranges = [new], [(old.first, old.end)]
        try:
            held = self.layout.bytes_of(*ranges[0])
            if held > self.layout.room(new.facts["memory"]):
                filled += self.launch(1, avoid | self._shunned)
                room = [member.facts["memory"] for member in filled]
                ranges = self.layout.divide(room, [1.0, 1.0], ranges[0])
            self.open(filled, ranges)
            place = self.members.index(old)
            line = [*self.members[:place], *filled, *self.members[place + 1 :]]
            for index, member in enumerate(filled, start=place):
                member.index = index
                member.restarts = old.restarts + (old.lost is not None)
            self.allocate(filled, line)
        except BaseException:
            for member in filled:
                member.give_up()
            raise
        self._connected = False
        self.members = line

    def _shun(self, machine: str, error: Exception) -> None:
        if machine not in self._shunned:
            _log.warning("%s can't be used: %s", machine, error)
        self._shunned.add(machine)

    def check_reports(self, step: int) -> None:
        """Read what the stages report.

        Raises:
            StageGone: a stage is lost, can't reach the next one, or the other way round.
            VerbatimError: a stage failed in this step.
        """
        self.check()
        for member, report in self.reports():
            if report.get("epoch") == self.epoch:
                if "unreachable" in report:
                    raise StageGone(str(self.cut_off(member, report["unreachable"])))
                if "cut_off" in report:
                    before = self.members[member.index - 1]
                    raise StageGone(str(self.cut_off(before, report["cut_off"])))
                if report.get("step") == step:
                    raise error_of(report["error"], str(member))

    def move(self, ranges: list[Range]) -> None:
        """Move layers: evict all sequences, and let stages with other ranges than these open them.

        Raises:
            StageFailed: a stage was lost meanwhile, and can't be replaced.
        """
        members = self.members
        changed = {
            member: wanted
            for member, wanted in zip(members, ranges, strict=True)
            if (member.first, member.end) != wanted
        }
        if not changed:
            return
        self._connected = False
        try:
            for member in changed:
                member.shape = {}
            self.open(list(changed), list(changed.values()))
            self.allocate(list(changed), members)
        except BaseException as error:
            for member in changed:
                member.lost = member.lost or "it was to hold other layers, which went wrong"
            if not isinstance(error, StageGone):
                raise
        self.recover()

    def take_in_joined(self) -> None:
        """Move a stage to a machine that has none, from one that has several.

        It checks now and then, and only while no sequence holds K and V.

        Raises:
            CacheLost: a stage was moved.
            StageFailed: the stages can't be connected again.
        """
        now = time.monotonic()
        if now < self._next_look or self.weights != "files" or not self.at_rest():
            return
        self._next_look = now + _LOOK_S
        on = Counter(member.host.machine for member in self.members)
        try:
            free = [m for m in self.hosts.machines() if m not in self._shunned.union(on)]
        except NoHost as error:
            _log.warning("the machines that have joined can't be listed: %s", error)
            return
        crowded = [member for member in self.members if on[member.host.machine] > 1]
        if not free or not crowded:
            return
        old = crowded[-1]
        try:  # on one of them: the others may be of use if that one is not
            self._fill(old, {*on, *free[1:]})
        except (VerbatimError, OSError) as error:
            self._shun(free[0], error)
            return
        old.give_up()
        _log.info("%s has joined, and takes layers %d to %d", free[0], old.first, old.end)
        self.recover()
        raise CacheLost("a stage has moved")
