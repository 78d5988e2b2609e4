"""The share of a stage: some layers with their KV cache, their steps, and connections to the stages beside.

Work and hidden states name their epoch, step and micro-batch: those of another epoch are refused.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from verbatim.batch import Batch, SamplePlan
from verbatim.device import Device
from verbatim.errors import VerbatimError
from verbatim.kv.store import cache_info
from verbatim.model.draft_layers import DraftLayers
from verbatim.model.loader import LoadedModel, ModelSource
from verbatim.model.mtp_source import Mtp
from verbatim.model.products import threads
from verbatim.model.spec import ModelSpec
from verbatim.options import dtype_name
from verbatim.placement.distributed.link import Address, CutOff, Link, LinkLost, connect
from verbatim.placement.distributed.part import Part
from verbatim.placement.distributed.served import Served, Skipped, draft_of, key_of
from verbatim.placement.distributed.split import Split
from verbatim.placement.distributed.wire import Garbage, Message, bytes_of, dtype_named
from verbatim.placement.offload.planner import BUDGET_SHARE
from verbatim.placement.offload.report import plan_line
from verbatim.placement.offload.runner import open_tiered
from verbatim.placement.offload.tiers import Tiers
from verbatim.placement.options import DEFAULT_KV_SHARE, EngineOptions, ToOpen
from verbatim.placement.resident import Resident, open_store
from verbatim.protocols import Forward
from verbatim.weights.identity import fingerprint

LIMITS = ("max_sequences", "max_batch_tokens", "prompt_rows")  # of `EngineOptions`, by a plan
_ECHOES = 3  # round trips by which a new connection is measured
_SPANS = 4096  # of the past, for benchmarks
_RECENT_S = 10.0  # over which `tokens_per_s` is
_FEW_FRAMES = 16  # after which a stage's speed is that of its work
_WORK = struct.Struct("<qqq")  # epoch, step and micro-batch
_ROWS, _VOID = b"rows", b"void"  # in front of it: hidden states follow, or as many bytes of none
_HEAD_BYTES = len(_ROWS) + _WORK.size
_FRONT = 64  # bytes in front of hidden states, which begin at an address of their own


class StageShare(Served):
    """The layers of one stage of several.

    Attributes:
        part: the layers; None: none are open.
        epoch: raised whenever all stages are connected anew.
        index: this stage's place in the line.
    """

    calls = Served.calls | {"link", "work", "draw", "logits", "record", "spans"}
    at_once = frozenset({"link"})  # it may take seconds

    def __init__(self) -> None:
        super().__init__()
        self.part: Part | None = None
        self.epoch = 0
        self.index = 0
        self._options: EngineOptions
        self._split: Any = None  # the `Split` of a model that was inspected here
        self._first_of: dict[str, int] = {}
        self._restarts = 0  # how often this place was filled anew
        self._hop_s: float | None = None  # of a small message to the stage behind, when connected
        self._before: Link | None = None
        self._before_epoch = 0
        self._next: Link | None = None
        self._computed: dict[int, list[Forward]] = {}  # of the last step, on the last stage
        self._num_frames = self._num_tokens = 0
        self._busy_s = 0.0
        self._spans: deque[tuple[int, int, float, float, int]] = deque(maxlen=_SPANS)

    # Its layers.

    def use(self, device: Device, number: int) -> Message:
        """See `Served`. `speed` is the read bandwidth of the device's memory in bytes/s."""
        return {**super().use(device, number), "speed": _bytes_per_second(self.device)}

    def skeleton(self, source: ModelSource) -> LoadedModel:
        loaded = super().skeleton(source)
        if self._split is None or self._split.skeleton is not loaded:
            self._split = Split(loaded)
        return loaded

    def open(self, **message: Any) -> Message:
        """Read a range of a model's layers, after freeing those held before.

        Raises:
            ModelError, NotSupported: it can't be had here.
        """
        self.close()
        device = self.device
        options = message["options"] = replace(message["options"], device=device)
        self._options = options
        with self._inspecting, threads(options.num_threads), device.current():
            loaded = self.skeleton(message["source"])
            first, end, place = message["first"], message["end"], None
            if message["offload"] is not None:
                place = partial(_tiers_of, message, (end - first) / self._split.num_layers)
            draft = draft_of(message["draft"])
            part = Part(
                loaded, first, end, split=self._split, device=device, draft=draft, place=place
            )
            self.part = part
        for adapter in message.get("adapters", ()):
            part.decoder.load_adapter(adapter)
        spec, report = part.decoder.spec, part.own.packed
        dtype = options.kv_dtype or spec.dtype
        return {
            "architecture": part.decoder.architecture,
            "parameters": part.num_parameters,
            "weight_bytes": part.weight_bytes,
            "quantization": None if report is None else report.info(),
            "dtype": dtype_name(spec.dtype),
            "kv_dtype": dtype_named(dtype),
            "vocab_size": self._split.vocab_size,
            "choices": spec.choices,
            "hidden_reason": spec.hidden_reason if part.is_last else None,
            **cache_info(spec.layers, spec.states, dtype, part.drafts.bytes_per_token(dtype)),
            "token_bytes": options.token_bytes(spec, part.drafts),
            "draft": part.drafts.info(),
            "limits": None if part.tiers is None else _limits_of(part.tiers, spec, part.drafts),
            "gpu": device.info(),
            "numerics_key": key_of(loaded, options),
            "fingerprint": fingerprint(loaded),
            "memory": device.available_memory,
        }

    def allocate(self, num_blocks: int, num_states: int, first_of: dict[str, int]) -> Message:
        """Allocate the KV store.

        Args:
            first_of: the number of layers before this part that choose, by `CHOICES`.
        """
        part, options = self._opened(), self._options
        decoder, drafts = part.decoder, part.drafts
        self._first_of = first_of
        if part.tiers is not None:
            self.runner = open_tiered(part.tiers, decoder, drafts, num_blocks, num_states)
        else:
            store = open_store(decoder.spec, options, drafts, num_blocks, num_states)
            self.runner = Resident(decoder, store, options.num_threads, drafts, part.own)
            self.runner.record_steps()
        return {"row_widths": self.row_widths}

    def record(self, name: str, **fields: Any) -> Tensor | None:
        """Return what was chosen for a sequence's tokens, from its blocks; None if no layer here chooses."""
        if self.runner is None or name not in self.runner.records:
            return None
        return self.runner.record(name, **fields)

    def close(self) -> None:
        """Free everything."""
        if self.runner is not None:
            self.runner.close()
        if self.part is not None:
            self.part.close()
        self.part = self.runner = self._weights = None

    def status(self) -> Message:
        """See `Served`. `speed` is that of the work so far, in bytes of weights a second."""
        part, runner, frames = self.part, self.runner, self._num_frames
        since = time.monotonic() - _RECENT_S
        recent = sum(tokens for *_, end, tokens in self._spans.copy() if end > since)
        weight_bytes = 0 if part is None else part.weight_bytes
        held = 0 if runner is None else sum(store.nbytes for store in runner.stores)
        known = frames >= _FEW_FRAMES and self._busy_s
        steps = None if runner is None else runner.decoder.steps
        return {
            **super().status(),
            "layers": None if part is None else [part.first, part.end],
            "weight_bytes": weight_bytes,
            "kv_bytes": held,
            "frames": frames,
            "tokens": self._num_tokens,
            "busy_s": self._busy_s,
            "speed": weight_bytes * frames / self._busy_s if known else None,
            "tokens_per_s": recent / _RECENT_S,  # that went through here lately, waiting included
            "index": self.index,
            "epoch": self.epoch,
            "restarts": self._restarts,
            "hop_s": self._hop_s,
            "recorded_steps": None if steps is None else steps.status,
        }

    def spans(self) -> list[tuple[int, int, float, float, int]]:
        """Return the last work: step, micro-batch, begin and end by `time.monotonic`, and rows of each."""
        return list(self._spans)

    def _opened(self) -> Part:
        if self.part is None:
            raise VerbatimError("this stage holds no layers yet, or sleeps")
        return self.part

    # Connections.

    def accept(self, who: Message, link: Link) -> Callable[[], object]:
        if who.get("role") != "stage":
            return super().accept(who, link)
        with self._lock:
            newest = max(self.epoch, self._before_epoch)
            if who["epoch"] < newest:
                raise VerbatimError(f"epoch {who['epoch']} is over: this stage is in {newest}")
            before, self._before, self._before_epoch = self._before, link, who["epoch"]
        _close(before)
        return lambda: _echo(link)

    def link(
        self,
        epoch: int,
        index: int,
        restarts: int,
        next: Address | None,
        patience_s: float,
        timeout_s: float,
    ) -> Message:
        """Begin an epoch: close the connections to other stages, and connect to the next one.

        Args:
            patience_s: time limit of the connection to the next stage.
            timeout_s: the next stage reads nothing for so long while it computes.

        Returns:
            `unreachable`, the reason, if that fails.
        """
        with self._lock:
            if epoch <= self.epoch:
                raise VerbatimError(f"epoch {epoch} is over: this stage is in {self.epoch}")
            self.epoch, self.index, self._restarts, self._hop_s = epoch, index, restarts, None
            stale, self._next = [self._next], None
            if self._before_epoch < epoch:
                stale.append(self._before)
                self._before = None
        _close(*stale)
        if next is None:
            return {}
        try:
            link = connect(next, self.key, {"role": "stage", "epoch": epoch}, patience_s)
            hop_s = _half_round_trip(link)
            link.limit_sending(timeout_s)
        except LinkLost as error:
            return {"unreachable": str(error)}
        with self._lock:
            if self.epoch != epoch:
                link.close()
                raise VerbatimError(f"epoch {epoch} is over: this stage is in {self.epoch}")
            self._next, self._hop_s = link, hop_s
        threading.Thread(target=self._watch, args=(link, epoch), daemon=True).start()
        return {}

    def _watch(self, link: Link, epoch: int) -> None:
        """Report when the next stage is unreachable: sent messages may be lost."""
        try:
            while True:
                link.receive()  # empty messages, while it waits
        except (LinkLost, Garbage) as error:
            link.close()
            if self.epoch == epoch:
                self.report({"epoch": epoch, "unreachable": str(error)})

    def hang_up(self) -> None:
        super().hang_up()
        _close(self._before, self._next)
        self._before = self._next = None

    # Steps.

    def work(self, epoch: int, step: int, part: int, batch: Batch) -> None:
        """Run a micro-batch; its hidden states go on to the next stage, or stay until they are sampled.

        Args:
            part: which micro-batch of the step it is.
        """
        if not isinstance(batch, Batch):
            raise TypeError("the batch of a piece of work is none")
        with self._lock:
            now, index, link = self.epoch, self.index, self._next
            before = self._before if self._before_epoch == epoch else None
        if epoch != now:
            raise VerbatimError(f"epoch {epoch} is of the past: this stage is in {now}")
        which, rows = _WORK.pack(epoch, step, part), None
        try:
            hidden = self._receive(before, which, batch.num_tokens) if index else None
            begin = time.monotonic()
            out = self.run(batch, hidden)
            self.device.synchronize()
            end = time.monotonic()  # from here to the `begin` of the next stage it is a hop
            rows = out.logits
        finally:
            if link is not None:
                self._pass_on(link, which, rows, batch.num_tokens)
        self._num_frames += 1
        self._num_tokens += batch.num_tokens
        self._busy_s += end - begin
        self._spans.append((step, part, begin, end, batch.num_tokens))
        if link is None:
            if step not in self._computed:
                self._computed = {step: []}
            if self.running.decoder.steps is not None:
                # The next micro-batch overwrites what is replayed.
                out = replace(out, logits=out.logits.clone())
            self._computed[step].append(out)

    def _row_bytes(self) -> int:
        size: int = self._split.hidden_size * self._split.hidden_dtype.itemsize
        return size

    def _receive(self, before: Link | None, which: bytes, num_tokens: int) -> Tensor:
        """Wait for the hidden states `[T, H]` of a micro-batch.

        Raises:
            Skipped: the stage before reports why, or is gone; this one reports that it is cut off from it.
        """
        room = torch.empty(_FRONT + num_tokens * self._row_bytes(), dtype=torch.uint8)
        view = room.numpy().data[_FRONT - _HEAD_BYTES :]
        head = view[:_HEAD_BYTES]
        hidden = room[_FRONT:].view(self._split.hidden_dtype).view(num_tokens, -1)
        self.busy_since = None
        if before is None:
            raise Skipped
        try:
            before.fill(view)
        except LinkLost as error:
            if isinstance(error, CutOff):
                self.report({"epoch": _WORK.unpack(which)[0], "cut_off": str(error)})
            raise Skipped from None
        self.busy_since = time.monotonic()
        if head != _ROWS + which:
            if head != _VOID + which:  # of other work
                before.close()
            raise Skipped
        return hidden

    def _pass_on(self, link: Link, which: bytes, rows: Tensor | None, num_tokens: int) -> None:
        """Send hidden states to the next stage; None: as many bytes of none, so that it doesn't wait.

        They go from stage to stage in every step, right after weights have swept all else out of the
        processor's caches: then each piece of code and each object that is touched costs more than moving
        the states does. So both sides know their sizes, and the other side wakes up at the head.
        """
        try:
            head = _ROWS + which
            if rows is None:
                head = _VOID + which
                rows = torch.zeros(num_tokens * self._row_bytes(), dtype=torch.uint8)
            link.put(head)
            link.put(bytes_of(rows.cpu().contiguous()))
        except LinkLost as error:
            self.report({"epoch": _WORK.unpack(which)[0], "unreachable": str(error)})

    def run(self, batch: Batch, hidden: Tensor | None) -> Forward:
        """Run one micro-batch; return its output, with the hidden states that leave in the place of logits.

        Args:
            hidden: `[T, H]` from the stage before; None on the first.
        """
        part, runner = self._opened(), self.running

        def own(name: str, forced: Tensor | None) -> Tensor | None:
            """Return what the layers here are forced to choose, of that of all layers."""
            first, count = self._first_of[name], runner.choices[name].layers
            return forced[:, first : first + count] if forced is not None and count else None

        batch.forced_experts = own("routing", batch.forced_experts)
        batch.forced_keys = own("indices", batch.forced_keys)
        part.enter(batch, hidden)
        return runner.forward(batch)

    def draw(self, epoch: int, step: int, parts: int, plan: SamplePlan) -> Message:
        """Sample from a step.

        Raises:
            VerbatimError: it is of the past.
            Skipped: a micro-batch of it failed.
        """
        logits = self._logits(epoch, step, parts)
        hidden = [part.hidden for part in self._computed[step] if part.hidden is not None]
        return {
            "draws": self.running.sample(Forward(logits), plan),
            "hidden": torch.cat(hidden) if hidden else None,
        }

    def logits(self, epoch: int, step: int, parts: int, rows: list[int]) -> Tensor:
        """Return some logits of a step; errors as of `draw`."""
        return self.running.logits(Forward(self._logits(epoch, step, parts)), rows)

    def _logits(self, epoch: int, step: int, parts: int) -> Tensor:
        if epoch != self.epoch:
            raise VerbatimError(f"step {step} of epoch {epoch} is of the past")
        rows = [part.logits for part in self._computed.get(step, ())]
        if len(rows) < parts:
            raise Skipped
        return torch.cat(rows) if len(rows) > 1 else rows[0]


def _close(*links: Link | None) -> None:
    for link in links:
        if link is not None:
            link.close()


def _echo(link: Link) -> None:
    """Answer the other side's `_half_round_trip`."""
    with suppress(LinkLost, Garbage):
        for _ in range(_ECHOES - 1):
            link.receive()
            link.send({})
        link.receive()
        link.detect_cuts()
        link.send({})


def _half_round_trip(link: Link) -> float:
    """Measure the one-way latency of a small message in seconds, the best of a few. The link must be idle."""
    best = float("inf")
    for _ in range(_ECHOES):
        begin = time.perf_counter()
        link.send({})
        link.receive()
        best = min(best, time.perf_counter() - begin)
    return best / 2


def _tiers_of(message: Message, share: float, own: LoadedModel, draft: Mtp | None) -> Tiers:
    """Return the weights of a stage, read into the tiers of a plan.

    Args:
        message: as of `StageShare.open`. `memory` is this stage's, and so are `kv_bytes`, which are None if
            such a stage was never opened.
        share: the part of the model's layers that the stage has.
        own: the layers.
        draft: MTP layers beside them.
    """
    offload, options, kv_bytes = message["offload"], message["options"], message["kv_bytes"]
    if kv_bytes is None and options.kv_bytes is not None:
        kv_bytes = int(options.kv_bytes * share)
    if offload.gpu is None and offload.cpu is None:
        if offload.weights is None:
            offload = offload.replace(gpu=int(message["memory"] * BUDGET_SHARE))
        elif kv_bytes is None:
            kv_bytes = int(message["memory"] * DEFAULT_KV_SHARE)
    options = replace(options, kv_bytes=kv_bytes, quantization=own.quantization)
    return Tiers(ToOpen(own, None, options, message["limit"], draft), offload)


def _limits_of(tiers: Tiers, spec: ModelSpec, drafts: DraftLayers) -> Message:
    """Return what a stage's plan has room for."""
    blocks, states = tiers.num_blocks(spec, drafts)
    return {
        "num_blocks": blocks,
        "num_states": states if spec.states else None,
        **{name: getattr(tiers.options, name) for name in LIMITS},
        "plan": plan_line(tiers.forecast),
    }


def _bytes_per_second(device: Device) -> float:
    """Measure the read bandwidth of a device in bytes/s: the median of a few tries."""
    block = torch.ones(1 << 22, device=device.torch)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        block.sum()
        device.synchronize()
        times.append(time.perf_counter() - begin)
    return block.nbytes / sorted(times)[2]
