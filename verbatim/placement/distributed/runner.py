"""The model in stages, as a Runner: the head of a cluster."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from verbatim.batch import Adapter, Batch, Choices, Draws, SamplePlan
from verbatim.errors import NotSupported, StageFailed, VerbatimError
from verbatim.model.routing import joined
from verbatim.params import CHOICES
from verbatim.placement.distributed.choice import Cluster
from verbatim.placement.distributed.group import StageGone, StageHandle
from verbatim.placement.distributed.supervisor import Supervisor
from verbatim.placement.distributed.wire import Message
from verbatim.placement.offload.cut import cut
from verbatim.protocols import DraftRunner, Forward
from verbatim.weights.update import NewWeights

_T = TypeVar("_T")
_FEW_FRAMES = 16
_SUMMED = ("parameters", "weight_bytes", "kv_bytes_per_token", "state_bytes")  # in `info`
_MANY_ROWS = 32  # for each micro-batch, where it is left to us to cut


@dataclass(slots=True)
class Remote(Forward):
    """A forward whose logits stay on the last stage."""

    batch: Batch | None = None
    step: int = 0
    parts: int = 0
    fresh: set[StageHandle] = field(
        default_factory=set
    )  # filled their places since it was scheduled


class Clustered(DraftRunner):
    """Sends batches through the stages, and receives ids from the last one.

    Where a stage is lost, the step waits until its place is filled, and is computed once more.

    Args:
        supervisor: of the stages, all open, connected, and with their memory for K and V.
        targets: the state dict of the whole model, without data.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        cluster: Cluster,
        targets: Mapping[str, Tensor],
        *,
        num_blocks: int,
        block_size: int,
        num_states: int,
    ) -> None:
        self.supervisor = supervisor
        self._targets = targets
        self.group = supervisor.group
        self.cluster = cluster
        shapes = [member.shape for member in self.group.members]
        last = shapes[-1]
        self.vocab_size: int = last["vocab_size"]
        self.num_blocks, self.block_size = num_blocks, block_size
        self.num_states = num_states
        self.num_forwards = 0
        self.hidden_reason: str | None = last["hidden_reason"]
        self._choices = {
            name: joined(name, [shape["choices"][name] for shape in shapes]) for name in CHOICES
        }
        self.draft_info: dict[str, int] = {**shapes[0]["draft"], **last["draft"]}
        self._last: Remote | None = None
        # Runs if it is never closed; its arguments must not refer to this object.
        self._let_go = weakref.finalize(self, self.group.close, os.getpid())
        self._asleep: bool | None = None  # with its weights?

    @property
    def choices(self) -> Mapping[str, Choices]:
        return self._choices

    # The step.

    def forward(self, batch: Batch) -> Forward:
        if self.supervisor.weights == "mixed":
            raise StageFailed("an update of the weights went wrong; call update_weights again")
        self.num_forwards += 1
        fresh: set[int] = set()
        if not self.supervisor.in_order:  # it went wrong, or was broken off, the last time
            fresh = self.supervisor.recover()
        else:
            self.supervisor.take_in_joined()
        self._last = remote = Remote(torch.empty(0), batch=batch)
        self._begin(remote, fresh)
        return remote

    def _begin(self, remote: Remote, fresh: set[int]) -> None:
        """Send a batch on its way, in micro-batches.

        Args:
            fresh: places that have just been filled. Who fills one makes no copies of blocks, now or later:
                the source may be free by now, and is not recomputed then.
        """
        batch, group = remote.batch, self.group
        assert batch is not None
        remote.fresh |= {group.members[index] for index in fresh}
        self.supervisor.note_copies(batch.block_copies)
        parts = self._cut(batch)
        self.supervisor.step += 1
        remote.step, remote.parts = self.supervisor.step, len(parts)
        stop = len(group.members) - 1
        places = [member.index for member in group.members if member in remote.fresh]
        for number, part in enumerate(parts):
            self.supervisor.send(
                part, remote.step, 0, stop, part=number, parts=len(parts), fresh=places
            )

    def _cut(self, batch: Batch) -> list[Batch]:
        rows, stages = batch.num_tokens, len(self.group.members)
        count = self.cluster.micro_batches
        if count is None:
            # Each micro-batch reads the weights on the disk.
            many = rows >= _MANY_ROWS * stages and self.cluster.offload is None
            count = stages if many else 1
        if count == 1:
            return [batch]
        parts = cut(batch, -(-batch.num_sequences // count), -(-rows // count))
        parts[0].block_copies = batch.block_copies
        return parts

    def sample(self, forward: Forward, plan: SamplePlan) -> Draws:
        assert isinstance(forward, Remote)
        answer = self._ask(forward, {"do": "draw", "plan": plan})
        forward.hidden = answer["hidden"]
        draws: Draws = answer["draws"]
        return draws

    def logits(self, forward: Forward, rows: list[int]) -> Tensor:
        assert isinstance(forward, Remote)
        logits: Tensor = self._ask(forward, {"do": "logits", "rows": rows})["logits"]
        return logits

    def _persist(self, call: Callable[[set[int] | None], _T]) -> _T:
        """Make a call, and again after each replacement of a stage.

        Args:
            call: gets the places that have just been filled anew; None the first time.
        """
        fresh: set[int] | None = None
        for attempt in range(self.cluster.max_restarts + 1):
            try:
                return call(fresh)
            except StageGone:
                fresh = self.supervisor.recover(last=attempt == self.cluster.max_restarts)
        raise AssertionError("the last attempt raises")

    def _ask(self, remote: Remote, message: Message) -> Message:
        """Return the answer of the last stage about a forward."""

        group = self.group

        def check() -> None:
            for member, report in group.reports():
                self.supervisor.raise_if_failed(member, report, remote.step)

        def ask(fresh: set[int] | None) -> Message:
            if fresh is not None:
                self._begin(remote, fresh)
            which = {"epoch": group.epoch, "step": remote.step, "parts": remote.parts}
            orders = [(group.members[-1], {**message, **which})]
            answer: Message = group.call_each(orders, meanwhile=check)[0]
            return answer

        return self._persist(ask)

    # Drafts.

    def draft(
        self, k: int, batch: Batch, plan: SamplePlan | None, lengths: list[int]
    ) -> list[list[int]]:
        """See `DraftRunner`. Each call is one round trip to the stage that has the layers.

        Raises:
            StageGone: a stage is lost.
        """
        if not self.supervisor.in_order:
            raise StageGone(self.group.lost)
        member = self.group.members[-1 if "mtp_layers" in self.draft_info else 0]
        order = {"do": "draft", "k": k, "batch": batch, "plan": plan, "lengths": lengths}
        drawn: list[list[int]] = self.group.call_each([(member, order)])[0]
        return drawn

    # All stages.

    def _each(
        self, do: str, *, in_a_step: bool = False, patient: bool = False, **fields: Any
    ) -> list[Any]:
        """Call every stage once all are alive, and return the answers.

        Args:
            in_a_step: asked in the middle of a commit, when the rows of the last forward count already for
                some of its sequences, and not yet for others.
            patient: it may take any time, as reading weights does.
        """

        def ask(fresh: set[int] | None) -> list[Any]:
            if in_a_step and fresh and self._last is not None:
                self._begin(self._last, fresh)
                # Who counts already may have exchanged a block for an equal one since: the batch then
                # reads one that was not computed again, and writes what follows from it.
                self.supervisor.catch_up(min(fresh))
            orders = [(member, {"do": do, **fields}) for member in self.group.members]
            return self.group.call_each(orders, patient=patient)

        return self._persist(ask)

    def record(self, name: str, block_table: list[int], num_tokens: int) -> Tensor:
        self.choices[name].check(f"the model's {name} can't be recorded")
        asked: Message = {"block_table": list(block_table), "num_tokens": num_tokens}
        answers = self._each("record", in_a_step=True, name=name, **asked)
        return torch.cat([rows for rows in answers if rows is not None], dim=1)

    def read_cache(self, kind: str, numbers: list[int], used: int | None = None) -> Tensor | None:
        if not self.supervisor.in_order:
            return None
        widths = self._row_widths(kind)
        asked: Message = {"kind": kind, "numbers": numbers, "used": used}
        parts = self._once("read_cache", [asked] * len(widths))
        if parts is None:
            return None
        # K and V of all layers, then the experts of all layers, whichever stages have them.
        by_store = zip(*map(partial(torch.split, dim=1), parts, widths), strict=True)
        return torch.cat([rows for store in by_store for rows in store], dim=1)

    def write_cache(self, kind: str, numbers: list[int], rows: Tensor) -> bool:
        if not self.supervisor.in_order:
            return False
        widths = self._row_widths(kind)
        if kind == "blocks":
            self.supervisor.note_written(numbers)
        by_store = zip(*widths, strict=True)
        pieces = rows.split([width for store in by_store for width in store], dim=1)
        shares = [torch.cat(pieces[i :: len(widths)], dim=1) for i in range(len(widths))]
        asked: Message = {"kind": kind, "numbers": numbers}
        orders = [{**asked, "rows": share} for share in shares]
        return self._once("write_cache", orders) is not None

    def _row_widths(self, kind: str) -> list[list[int]]:
        """Return the bytes of each store in a row of each stage."""
        return [member.shape["row_widths"][kind] for member in self.group.members]

    def _once(self, do: str, orders: list[Message]) -> list[Any] | None:
        """Call every stage; return None if one is lost: its successor has not what was cached."""
        calls = zip(self.group.members, orders, strict=True)
        try:
            return self.group.call_each([(stage, {"do": do, **order}) for stage, order in calls])
        except StageGone:
            return None

    def rebalance(self) -> list[tuple[int, int]]:
        """Divide the layers anew, by the measured speed of each stage; sessions go on.

        Returns:
            The layers of each stage from now on, as (first, end).

        Raises:
            OutOfBlocks: the stages have no room for another division.
            StageFailed: a stage was lost meanwhile and can't be replaced.
        """
        if self.supervisor.weights != "files":
            raise NotSupported(
                "rebalance: the weights were updated in memory, and stages read other layers from files"
            )
        if not self.supervisor.in_order:
            self.supervisor.recover()
        status = self._each("status")
        members, layout = list(self.group.members), self.group.layout
        speed = [_speed(member, told) for member, told in zip(members, status, strict=True)]
        room = [
            layout.room(member.facts["memory"] + layout.bytes_of(member.first, member.end))
            for member in members
        ]
        self.supervisor.move(layout.divide(room, speed))
        return [(member.first, member.end) for member in self.group.members]

    def new_weights(
        self, tensors: Mapping[str, Tensor], *, check_finite: bool
    ) -> Callable[[], None]:
        """See `Runner`. A stage that is lost later takes its weights with it, so they must be sent again."""
        if self._asleep:
            raise VerbatimError("the weights are asleep; call wake() before they are updated")
        new = NewWeights(self._targets, tensors, check_finite=check_finite)
        self._send_weights(new, "packed")

        def write() -> None:
            self.supervisor.weights = "mixed"
            self._send_weights(new, "exact")
            self.supervisor.weights = "updated"

        return write

    def _send_weights(self, new: NewWeights, last: str) -> None:
        """Send all stages their weights: those that they quantize, and with `last="exact"` also the others,
        which makes them write all.
        """

        def send(fresh: set[int] | None) -> None:
            kinds = ["packed"] if fresh is not None or last == "packed" else []
            kinds += ["exact"] if last == "exact" else []
            try:
                for member in self.group.members:
                    names = self._ask_one(member, "weight_names")
                    for kind in kinds:
                        do = "prepare_weights" if kind == "packed" else "write_weights"
                        for piece in new.messages(names[kind]):
                            answer = self._ask_one(member, do, tensors=piece)
                        if kind == "exact":
                            member.shape.update(answer)
            except StageGone:
                self.supervisor.weights = "mixed"
                raise

        self._persist(send)

    def _ask_one(self, member: StageHandle, do: str, **fields: Any) -> Any:
        return self.group.call_each([(member, {"do": do, **fields})], patient=True)[0]

    def load_adapter(self, adapter: Adapter) -> None:
        """See `Runner`. A stage that is replaced later gets it again."""
        try:
            answers = self._each("load_adapter", patient=True, adapter=adapter)
            missing = adapter.layers.keys() - {name for names in answers for name in names}
            if missing:
                raise NotSupported(
                    f"adapter {adapter.name!r}: {min(missing)} is not a linear layer that each token goes "
                    "through, so an adapter per request can't change it; open the model with the adapter "
                    "merged instead"
                )
        except VerbatimError as error:
            if not isinstance(error, StageFailed):
                self.unload_adapter(adapter.number)
            raise
        self.group.adapters[adapter.number] = adapter

    def unload_adapter(self, number: int) -> None:
        self.group.adapters.pop(number, None)
        self._each("unload_adapter", number=number)

    def sleep(self, weights: bool) -> None:
        if weights and self.supervisor.weights != "files":
            raise NotSupported(
                "sleep(weights=True): the weights were updated in memory, and would be lost"
            )
        self._asleep = weights
        # All get the message; a lost stage is replaced at `wake`.
        self._once("sleep", [{"weights": weights}] * len(self.group.members))

    def wake(self) -> None:
        if self._asleep is not None:
            self._each("wake", patient=True)
        self._asleep = None

    def info(self) -> dict[str, Any]:
        members = self.group.members
        shapes = [member.shape for member in members]
        sums = {name: sum(shape[name] for shape in shapes) for name in _SUMMED}
        top_k = self.cluster.offload and self.cluster.offload.attention_top_k
        return {
            **{name: shapes[0][name] for name in ("architecture", "dtype", "kv_dtype")},
            "placement": "cluster",
            **sums,
            **{
                name: dict(sum((Counter(shape[name]) for shape in shapes), Counter()))
                for name in ("kv_bytes_per_token_by_kind", "state_bytes_by_kind")
            },
            **_joined_quantization([shape["quantization"] for shape in shapes]),
            "layers": members[-1].end,
            "kv_bytes": sums["kv_bytes_per_token"] * self.num_blocks * self.block_size,
            **({"state_slots": self.num_states} if self.num_states else {}),
            **self.draft_info,
            "stages": [
                {
                    "layers": [member.first, member.end],
                    "machine": member.host.machine,
                    "pid": member.facts["pid"],
                    "weight_bytes": member.shape["weight_bytes"],
                    "restarts": member.restarts,
                    **({"plan": limits["plan"]} if (limits := member.shape["limits"]) else {}),
                }
                for member in members
            ],
            **({"attention": f"approximate: top {top_k} keys"} if top_k else {}),
        }

    def stats(self) -> dict[str, Any]:
        """Return the number of restarts, their durations, and the tokens computed again, under "cluster"."""
        supervisor = self.supervisor
        return {
            "cluster": {
                "stages": len(self.group.members),
                "epoch": self.group.epoch,
                "restarts": supervisor.num_restarts,
                "recovery_s": list(supervisor.recovery_s),
                "replayed_tokens": supervisor.replayed_tokens,
            }
        }

    def close(self) -> None:
        self._let_go()


def _speed(member: StageHandle, told: Message) -> float:
    """Return a stage's speed in weights/s, from its work so far, or from its memory bandwidth if that is
    little.
    """
    if told["frames"] < _FEW_FRAMES or not told["busy_s"]:
        return float(member.facts["speed"])
    return float(told["weight_bytes"] * told["frames"] / told["busy_s"])


def _joined_quantization(stages: list[dict[str, Any] | None]) -> dict[str, Any]:
    """Return the "quantization" of `info`, of all stages: sums, and each stage's own."""
    found = [stage for stage in stages if stage is not None]
    if not found:
        return {}
    sums = {name: sum(stage[name] for stage in found) for name in ("bytes_before", "bytes_after")}
    formats = {name for stage in found for name in stage["format"].split("+")}
    joined = {"format": "+".join(sorted(formats)), "requested": found[0]["requested"]}
    return {"quantization": {**joined, **sums, "stages": found}}
