"""The runner of a model in pipeline stages, at the head of the cluster."""

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
from verbatim.placement.micro_batches import split_batch
from verbatim.protocols import CacheLost, Forward, Runner
from verbatim.sampling.sampler import sample_rows
from verbatim.weights.update import NewWeights

_T = TypeVar("_T")
_COMMON = ("architecture", "dtype", "kv_dtype", "gpu")  # in `info`, equal on all stages
# In `info`, sums over all stages.
_SUMMED = ("parameters", "weight_bytes", "kv_bytes", "kv_bytes_per_token", "state_bytes")
_MIN_ROWS = 32  # rows per micro-batch, by default


@dataclass(slots=True)
class Remote(Forward):
    """A forward with logits that stay on the last stage."""

    step: int = 0
    parts: int = 0
    error: Exception | None = None  # if the forward failed
    rows: dict[int, Tensor] = field(default_factory=dict)  # logits received so far, by row


class Clustered(Runner):
    """Sends batches through the stages, and receives token ids from the last one.

    If a stage is lost during a step, it is replaced, and the step is aborted with `CacheLost`.

    Args:
        group: the stages: open, connected, and with their KV caches allocated.
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
        # Runs at the latest when this object is freed, so its arguments must not refer to it.
        self._finalizer = weakref.finalize(self, self.group.close, os.getpid())
        self._asleep: bool | None = None  # whether the weights are dropped, too; None: awake

    @property
    def choices(self) -> Mapping[str, Choices]:
        return self._choices

    # Steps.

    def forward(self, batch: Batch) -> Forward:
        group = self.group
        if group.weights == "mixed":
            raise StageFailed("a weight update was interrupted; call update_weights again")
        if not group.in_order:  # a stage is lost, or a recovery was interrupted
            self._recover("; ".join(map(str, group.lost)) or "connections lost")
        group.use_joined_machine()
        self.num_forwards += 1
        parts = self._cut(batch)
        for number, part in enumerate(parts):
            tags = {"epoch": group.epoch, "step": self.num_forwards, "part": number}
            group.notify("work", group.members, batch=part, **tags)
        return Remote(torch.empty(0), step=self.num_forwards, parts=len(parts))

    def _cut(self, batch: Batch) -> list[Batch]:
        rows, stages = batch.num_tokens, len(self.group.members)
        count = self.group.cluster.micro_batches
        if count is None:
            # With offload, each micro-batch would read the weights from disk.
            many = rows >= _MIN_ROWS * stages and self.group.cluster.offload is None
            count = stages if many else 1
        if count == 1:
            return [batch]
        parts = split_batch(batch, -(-batch.num_sequences // count), -(-rows // count))
        parts[0].block_copies = batch.block_copies
        return parts

    def sample(self, forward: Forward, plan: SamplePlan) -> Draws:
        """See `Runner`. Rows with `processed` logits are drawn here, exactly as on the last stage."""
        assert isinstance(forward, Remote)
        local = [i for i, row in enumerate(plan.rows) if row.processed is not None]
        remote = sorted({*range(len(plan.rows))}.difference(local))
        answer = self._ask(forward, "draw", plan=plan.of(remote))
        forward.hidden = answer["hidden"]
        draws = dict(zip(remote, answer["draws"], strict=True))
        if local:
            processed = plan.of(local)
            logits = torch.stack([forward.rows[row] for row in processed.logits_rows or ()])
            drawn = sample_rows(logits, SamplePlan(processed.rows))
            draws |= zip(local, drawn, strict=True)
        return [draws[i] for i in range(len(plan.rows))]

    def logits(self, forward: Forward, rows: list[int]) -> Tensor:
        assert isinstance(forward, Remote)
        logits: Tensor = self._ask(forward, "logits", rows=rows)
        forward.rows |= zip(rows, logits, strict=True)
        return logits

    def _ask(self, remote: Remote, do: str, **fields: Any) -> Any:
        """Call the last stage about a forward; raise CacheLost if a stage had to be replaced."""
        group = self.group

        def check() -> None:
            try:
                group.check_reports(remote.step)
            except Exception as error:  # reported only once, so stored for later calls
                remote.error = None if isinstance(error, StageGone) else error
                raise

        if remote.error is not None:
            raise remote.error
        tags: Message = {"epoch": group.epoch, "step": remote.step, "parts": remote.parts}
        try:
            return group.call(do, group.members[-1:], meanwhile=check, **tags, **fields)[0]
        except StageGone as error:
            self._recover(error)

    def _recover(self, gone: object) -> NoReturn:
        """Replace the lost stages, and raise CacheLost."""
        self.group.recover()
        limit = self.group.cluster.max_restarts
        why = f"{gone}: the step is not repeated: max_restarts={limit}"
        raise CacheLost(why, limit) from None

    # Drafts.

    def draft(
        self, k: int, batch: Batch, plan: SamplePlan | None, lengths: list[int]
    ) -> list[list[int]]:
        """See `Runner`. One round trip to the stage of the draft layers; StageGone if a stage is lost."""
        if not self.group.in_order:
            raise StageGone("; ".join(map(str, self.group.lost)))
        member = self.group.members[-1 if "mtp_layers" in self.draft_info else 0]
        arguments: Message = dict(k=k, batch=batch, plan=plan, lengths=lengths)
        drawn: list[list[int]] = self.group.call("draft", [member], **arguments)[0]
        return drawn

    # All stages.

    def _retry(self, call: Callable[[], _T]) -> _T:
        """Make a call between two steps, and repeat it when a lost stage was replaced."""
        limit, gone = self.group.cluster.max_restarts, ""
        for _ in range(limit + 1):
            try:
                return call()
            except StageGone as error:
                gone = str(error)
                self.group.recover()
        raise StageFailed(f"{gone}: the call is not repeated: max_restarts={limit}")

    def _call_stages(self, do: str, **fields: Any) -> list[Any]:
        """Call every stage, replacing lost ones, and return the answers."""
        return self._retry(lambda: self.group.call(do, **fields))

    def record(self, name: str, block_table: list[int], num_tokens: int) -> Tensor:
        choices = self.choices[name]
        choices.check(f"the model's {name} can't be recorded")
        arguments: Message = dict(name=name, block_table=list(block_table), num_tokens=num_tokens)
        answers = self._try("record", **arguments)
        if answers is None:
            dtype = torch.int16 if choices.count else torch.int32
            return torch.empty(0, choices.layers, choices.k, dtype=dtype)
        return torch.cat([rows for rows in answers if rows is not None], dim=1)

    def read_cache(self, kind: str, numbers: list[int], used: int | None = None) -> Tensor | None:
        parts = self._try("read_cache", kind=kind, numbers=numbers, used=used)
        if parts is None:
            return None
        widths = self._row_widths(kind)
        # By store: K and V of the layers of all stages, then the recorded experts of all stages.
        by_store = zip(*map(partial(torch.split, dim=1), parts, widths), strict=True)
        return torch.cat([rows for store in by_store for rows in store], dim=1)

    def write_cache(self, kind: str, numbers: list[int], rows: Tensor) -> bool:
        if not self.group.in_order:
            return False
        widths = self._row_widths(kind)
        by_store = zip(*widths, strict=True)
        pieces = rows.split([width for store in by_store for width in store], dim=1)
        shares = [torch.cat(pieces[i :: len(widths)], dim=1) for i in range(len(widths))]
        per_member = [{"rows": share} for share in shares]
        return self._try("write_cache", per_member, kind=kind, numbers=numbers) is not None

    def _row_widths(self, kind: str) -> list[list[int]]:
        """Return the widths in bytes of each stage's stores in a row of `read_cache`."""
        return [member.shape["row_widths"][kind] for member in self.group.members]

    def _try(
        self, do: str, per_member: list[Message] | None = None, **fields: Any
    ) -> list[Any] | None:
        """Call every stage; return None if one is lost: its replacement lacks the cached contents."""
        with suppress(StageGone):
            if self.group.in_order:
                return self.group.call(do, per_member=per_member, **fields)
        return None

    def rebalance(self) -> list[tuple[int, int]]:
        """Reassign the layers to stages by the measured speed of each stage; sessions continue.

        Returns:
            The new range of layers of each stage, as (first, end).

        Raises:
            OutOfBlocks: the layers do not fit into another division.
            StageFailed: a stage was lost meanwhile and can't be replaced.
        """
        if self.group.weights != "files":
            raise NotSupported(
                "rebalance: the weights were updated in memory, and stages read other layers from files"
            )
        status = self._call_stages("status")
        members, layout = list(self.group.members), self.group.layout
        # The measured speed of each stage's work or, after little work, of its memory.
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
        """See `Runner`. If a stage is lost later, its new weights are lost, and must be sent again."""
        if self._asleep:
            raise VerbatimError("the weights are asleep; call wake() before they are updated")
        group, new = self.group, NewWeights(self._targets, tensors, check_finite=check_finite)

        def prepare() -> list[Message]:
            """Send the new weights that stages quantize, and return the names of all."""
            try:
                names = group.call("weight_names", patient=True)
                group.send_weights("prepare_weights", new, [n["packed"] for n in names])
            except StageGone:
                if group.weights == "updated":  # the replacement will read the files
                    group.weights = "mixed"
                raise
            return names

        prepared = [self._retry(prepare)]

        def send() -> None:
            names = prepared.pop() if prepared else prepare()  # a replacement has prepared nothing
            answers = group.send_weights("write_weights", new, [n["exact"] for n in names])
            for member, answer in zip(group.members, answers, strict=True):
                member.shape.update(answer)

        def write() -> None:
            group.weights = "mixed"
            self._retry(send)
            group.weights = "updated"

        return write

    def load_adapter(self, adapter: Adapter) -> None:
        """See `Runner`. Later replacements of stages load the adapter, too."""
        answers = self._call_stages("load_adapter", patient=True, adapter=adapter)
        missing = adapter.layers.keys() - {name for names in answers for name in names}
        if missing:
            raise NotSupported(
                f"adapter {adapter.name!r}: {min(missing)} is not a linear layer that each token goes "
                "through, so an adapter per request can't change it; open the model with the adapter "
                "merged instead"
            )
        self.group.adapters[adapter.number] = adapter

    def unload_adapter(self, number: int) -> None:
        self.group.adapters.pop(number, None)
        self._call_stages("unload_adapter", number=number)

    def sleep(self, weights: bool) -> None:
        if weights and self.group.weights != "files":
            raise NotSupported(
                "sleep(weights=True): the weights were updated in memory, and would be lost"
            )
        self._asleep = weights
        try:
            # The other stages still get the message; a lost one is replaced by `wake`.
            with suppress(StageGone):
                self.group.call("sleep", weights=weights)
        except Exception:  # a stage refused, and others may be asleep
            self.wake()
            raise

    def wake(self) -> None:
        if self._asleep is not None:
            self._call_stages("wake", patient=True)
        self._asleep = None

    def info(self) -> dict[str, Any]:
        members = self.group.members
        infos = [member.shape["info"] for member in members]
        sums = {name: sum(info[name] for info in infos) for name in _SUMMED}
        sums["kv_bytes"] *= self._asleep is None
        top_k = self.group.cluster.offload and self.group.cluster.offload.attention_top_k
        return {
            **{name: infos[0][name] for name in _COMMON if name in infos[0]},
            "placement": "cluster",
            **sums,
            **{
                name: dict(sum((Counter(info[name]) for info in infos), Counter()))
                for name in ("kv_bytes_per_token_by_kind", "state_bytes_by_kind")
            },
            **_joined_quantization([info.get("quantization") for info in infos]),
            "torch_functions": sorted({name for info in infos for name in info["torch_functions"]}),
            "layers": members[-1].end,
            **({"state_slots": self.num_states} if self.num_states else {}),
            **self.draft_info,
            "stages": [
                {
                    "layers": [member.first, member.end],
                    "machine": member.host.machine,
                    "device": member.facts["device"],
                    "pid": member.facts["pid"],
                    "weight_bytes": info["weight_bytes"],
                    "restarts": member.restarts,
                    **({"plan": info["plan_summary"]} if "plan_summary" in info else {}),
                }
                for member, info in zip(members, infos, strict=True)
            ],
            **({"attention": f"approximate: top {top_k} keys"} if top_k else {}),
        }

    def stats(self) -> dict[str, Any]:
        """Return the restarts, their durations (without recomputation) and the recomputed tokens."""
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
        self._finalizer()


def _joined_quantization(stages: list[dict[str, Any] | None]) -> dict[str, Any]:
    """Return the "quantization" entry of `info`: sums over the stages, and the report of each stage."""
    reports = [stage for stage in stages if stage is not None]
    if not reports:
        return {}
    sums = {name: sum(stage[name] for stage in reports) for name in ("bytes_before", "bytes_after")}
    formats = {name for stage in reports for name in stage["format"].split("+")}
    joined = {"format": "+".join(sorted(formats)), "requested": reports[0]["requested"]}
    return {"quantization": {**joined, **sums, "stages": reports}}
