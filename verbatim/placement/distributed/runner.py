"""The model in stages, as a Runner: the head of a cluster."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from verbatim.batch import Adapter, Batch, Choices, Draws, SamplePlan
from verbatim.errors import NotSupported, StageFailed, VerbatimError
from verbatim.model.routing import joined
from verbatim.params import CHOICES
from verbatim.placement.distributed.group import StageGone
from verbatim.placement.distributed.stage_line import StageLine
from verbatim.placement.distributed.wire import Message
from verbatim.placement.offload.cut import cut
from verbatim.protocols import CacheLost, Forward, Runner
from verbatim.sampling.sampler import sample_rows
from verbatim.weights.update import NewWeights

_T = TypeVar("_T")
_SUMMED = ("parameters", "weight_bytes", "kv_bytes_per_token", "state_bytes")  # in `info`
_MANY_ROWS = 32  # for each micro-batch, where it is left to us to cut


@dataclass(slots=True)
class Remote(Forward):
    """A forward whose logits stay on the last stage."""

    step: int = 0
    parts: int = 0
    error: Exception | None = None  # that it failed with
    rows: dict[int, Tensor] = field(default_factory=dict)  # logits that were asked for, by row


class Clustered(Runner):
    """Sends batches through the stages, and receives ids from the last one.

    Where a stage is lost in a step, its place is filled, and the step is given up (`CacheLost`).

    Args:
        group: the stages, all open, connected, and with their memory for K and V.
        targets: the state dict of the whole model, without data.
    """

    def __init__(self, group: StageLine, targets: Mapping[str, Tensor]) -> None:
        self.group = group
        self._targets = targets
        shapes = [member.shape for member in self.group.members]
        last = shapes[-1]
        self.vocab_size: int = last["vocab_size"]
        self.num_blocks, self.num_states = group.blocks["num_blocks"], group.blocks["num_states"]
        self.block_size: int = group.model["options"].block_size
        self.num_forwards = 0
        self.hidden_reason: str | None = last["hidden_reason"]
        self._choices = {
            name: joined(name, [shape["choices"][name] for shape in shapes]) for name in CHOICES
        }
        self.draft_info: dict[str, int] = {**shapes[0]["draft"], **last["draft"]}
        # Runs if it is never closed; its arguments must not refer to this object.
        self._let_go = weakref.finalize(self, self.group.close, os.getpid())
        self._asleep: bool | None = None  # with its weights?

    @property
    def choices(self) -> Mapping[str, Choices]:
        return self._choices

    # The step.

    def forward(self, batch: Batch) -> Forward:
        group = self.group
        if group.weights == "mixed":
            raise StageFailed("an update of the weights went wrong; call update_weights again")
        if not group.in_order:  # it went wrong, or was broken off, the last time
            self._recover("; ".join(map(str, group.lost)) or "connections lost")
        group.take_in_joined()
        self.num_forwards += 1
        parts = self._cut(batch)
        for number, part in enumerate(parts):
            which = {"epoch": group.epoch, "step": self.num_forwards, "part": number}
            group.tell("work", group.members, batch=part, **which)
        return Remote(torch.empty(0), step=self.num_forwards, parts=len(parts))

    def _cut(self, batch: Batch) -> list[Batch]:
        rows, stages = batch.num_tokens, len(self.group.members)
        count = self.group.cluster.micro_batches
        if count is None:
            # Each micro-batch reads the weights on the disk.
            many = rows >= _MANY_ROWS * stages and self.group.cluster.offload is None
            count = stages if many else 1
        if count == 1:
            return [batch]
        parts = cut(batch, -(-batch.num_sequences // count), -(-rows // count))
        parts[0].block_copies = batch.block_copies
        return parts

    def sample(self, forward: Forward, plan: SamplePlan) -> Draws:
        """See `Runner`. Rows that were processed here are drawn here, as the last stage would."""
        assert isinstance(forward, Remote)
        here = [i for i, row in enumerate(plan.rows) if row.processed is not None]
        there = sorted({*range(len(plan.rows))}.difference(here))
        answer = self._ask(forward, "draw", plan=plan.of(there))
        forward.hidden = answer["hidden"]
        draws = dict(zip(there, answer["draws"], strict=True))
        if here:
            processed = plan.of(here)
            logits = torch.stack([forward.rows[row] for row in processed.logits_rows or ()])
            drawn = sample_rows(logits, SamplePlan(processed.rows))
            draws |= zip(here, drawn, strict=True)
        return [draws[i] for i in range(len(plan.rows))]

    def logits(self, forward: Forward, rows: list[int]) -> Tensor:
        assert isinstance(forward, Remote)
        logits: Tensor = self._ask(forward, "logits", rows=rows)
        forward.rows |= zip(rows, logits, strict=True)
        return logits

    def _ask(self, remote: Remote, do: str, **fields: Any) -> Any:
        """Return the answer of the last stage about a forward; CacheLost if a stage had to be replaced."""
        group = self.group

        def check() -> None:
            try:
                group.check_reports(remote.step)
            except Exception as error:  # which is reported once, and may be asked for again
                remote.error = None if isinstance(error, StageGone) else error
                raise

        if remote.error is not None:
            raise remote.error
        which: Message = {"epoch": group.epoch, "step": remote.step, "parts": remote.parts}
        try:
            return group.call(do, group.members[-1:], meanwhile=check, **which, **fields)[0]
        except StageGone as error:
            self._recover(error)

    def _recover(self, gone: object) -> NoReturn:
        """Replace the lost stages, and raise CacheLost."""
        self.group.recover()
        limit = self.group.cluster.max_restarts
        why = f"{gone}: it could not be replaced: max_restarts={limit}"
        raise CacheLost(why, limit) from None

    # Drafts.

    def draft(
        self, k: int, batch: Batch, plan: SamplePlan | None, lengths: list[int]
    ) -> list[list[int]]:
        """See `Runner`. Each call is one round trip to the stage that has the layers.

        Raises:
            StageGone: a stage is lost.
        """
        if not self.group.in_order:
            raise StageGone("; ".join(map(str, self.group.lost)))
        member = self.group.members[-1 if "mtp_layers" in self.draft_info else 0]
        asked: Message = dict(k=k, batch=batch, plan=plan, lengths=lengths)
        drawn: list[list[int]] = self.group.call("draft", [member], **asked)[0]
        return drawn

    # All stages.

    def _persist(self, call: Callable[[], _T]) -> _T:
        """Make a call between two steps, and again after each replacement of a stage."""
        for attempt in range(self.group.cluster.max_restarts + 1):
            try:
                return call()
            except StageGone:
                self.group.recover(last=attempt == self.group.cluster.max_restarts)
        raise AssertionError("the last attempt raises")

    def _each(self, do: str, **fields: Any) -> list[Any]:
        """Call every stage once all are alive, and return the answers."""
        return self._persist(lambda: self.group.call(do, **fields))

    def record(self, name: str, block_table: list[int], num_tokens: int) -> Tensor:
        choices = self.choices[name]
        choices.check(f"the model's {name} can't be recorded")
        asked: Message = dict(name=name, block_table=list(block_table), num_tokens=num_tokens)
        answers = self._once("record", **asked)
        if answers is None:
            dtype = torch.int16 if choices.count else torch.int32
            return torch.empty(0, choices.layers, choices.k, dtype=dtype)
        return torch.cat([rows for rows in answers if rows is not None], dim=1)

    def read_cache(self, kind: str, numbers: list[int], used: int | None = None) -> Tensor | None:
        parts = self._once("read_cache", kind=kind, numbers=numbers, used=used)
        if parts is None:
            return None
        widths = self._row_widths(kind)
        # K and V of all layers, then the experts of all layers, whichever stages have them.
        by_store = zip(*map(partial(torch.split, dim=1), parts, widths), strict=True)
        return torch.cat([rows for store in by_store for rows in store], dim=1)

    def write_cache(self, kind: str, numbers: list[int], rows: Tensor) -> bool:
        if not self.group.in_order:
            return False
        widths = self._row_widths(kind)
        by_store = zip(*widths, strict=True)
        pieces = rows.split([width for store in by_store for width in store], dim=1)
        shares = [torch.cat(pieces[i :: len(widths)], dim=1) for i in range(len(widths))]
        own = [{"rows": share} for share in shares]
        return self._once("write_cache", own, kind=kind, numbers=numbers) is not None

    def _row_widths(self, kind: str) -> list[list[int]]:
        """Return the bytes of each store in a row of each stage."""
        return [member.shape["row_widths"][kind] for member in self.group.members]

    def _once(self, do: str, own: list[Message] | None = None, **fields: Any) -> list[Any] | None:
        """Call every stage; return None while one is lost: its successor has not what was cached."""
        try:
            return self.group.call(do, own=own, **fields) if self.group.in_order else None
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
        if self.group.weights != "files":
            raise NotSupported(
                "rebalance: the weights were updated in memory, and stages read other layers from files"
            )
        status = self._each("status")
        members, layout = list(self.group.members), self.group.layout
        # Of its work so far, or that of its memory if it has done little.
        speed = [t["speed"] or m.facts["speed"] for m, t in zip(members, status, strict=True)]
        room = [
            layout.room(member.facts["memory"] + layout.bytes_of(member.first, member.end))
            for member in members
        ]
        self.group.move(layout.divide(room, speed))
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
            self.group.weights = "mixed"
            self._send_weights(new, "exact")
            self.group.weights = "updated"

        return write

    def _send_weights(self, new: NewWeights, last: str) -> None:
        """Send all stages their weights: those that they quantize, and with `last="exact"` also the others,
        which makes them write all.
        """
        group, send_packed = self.group, last == "packed"

        def send() -> None:
            nonlocal send_packed
            try:
                names = group.call("weight_names", patient=True)
                if send_packed:
                    group.send_weights("prepare_weights", new, [n["packed"] for n in names])
                if last == "exact":
                    found = group.send_weights("write_weights", new, [n["exact"] for n in names])
                    for member, answer in zip(group.members, found, strict=True):
                        member.shape.update(answer)
            except StageGone:
                group.weights, send_packed = "mixed", True
                raise

        self._persist(send)

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
        if weights and self.group.weights != "files":
            raise NotSupported(
                "sleep(weights=True): the weights were updated in memory, and would be lost"
            )
        self._asleep = weights
        # All others get the message; a lost stage is replaced at `wake`.
        with suppress(StageGone):
            self.group.call("sleep", weights=weights)

    def wake(self) -> None:
        if self._asleep is not None:
            self._each("wake", patient=True)
        self._asleep = None

    def info(self) -> dict[str, Any]:
        members = self.group.members
        shapes = [member.shape for member in members]
        sums = {name: sum(shape[name] for shape in shapes) for name in _SUMMED}
        top_k = self.group.cluster.offload and self.group.cluster.offload.attention_top_k
        return {
            **{name: shapes[0][name] for name in ("architecture", "dtype", "kv_dtype")},
            "placement": "cluster",
            **({} if shapes[0]["gpu"] is None else {"gpu": shapes[0]["gpu"]}),
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
                    "device": member.facts["device"],
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
        """Return the number of restarts, their durations, and the tokens computed again, under "cluster".

        Durations are without what is computed again.
        """
        group = self.group
        return {
            "cluster": {
                "stages": len(group.members),
                "epoch": group.epoch,
                "restarts": group.num_restarts,
                "recovery_s": list(group.recovery_s),
                "recomputed_tokens": group.recomputed_tokens,
            }
        }

    def close(self) -> None:
        self._let_go()


def _joined_quantization(stages: list[dict[str, Any] | None]) -> dict[str, Any]:
    """Return the "quantization" of `info`, of all stages: sums, and each stage's own."""
    found = [stage for stage in stages if stage is not None]
    if not found:
        return {}
    sums = {name: sum(stage[name] for stage in found) for name in ("bytes_before", "bytes_after")}
    formats = {name for stage in found for name in stage["format"].split("+")}
    joined = {"format": "+".join(sorted(formats)), "requested": found[0]["requested"]}
    return {"quantization": {**joined, **sums, "stages": found}}
