"""The share of a stage: some layers with their KV cache, and the connections to adjacent stages.

Work and hidden states are tagged with their epoch, step and micro-batch; those of another epoch are refused.
"""

from __future__ import annotations

import os
import statistics
import struct
import threading
import time
import timeit
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from verbatim.batch import Batch, SamplePlan
from verbatim.errors import VerbatimError
from verbatim.model.device import Device
from verbatim.model.draft_layers import DraftLayers
from verbatim.model.loader import LoadedModel, ModelSource
from verbatim.model.mtp_source import Mtp
from verbatim.model.products import threads
from verbatim.model.spec import ModelSpec
from verbatim.placement.distributed.link import Address, CutOff, Link, LinkLost, connect
from verbatim.placement.distributed.part import Part
from verbatim.placement.distributed.served import Served, Skipped, draft_of, key_of
from verbatim.placement.distributed.split import Split
from verbatim.placement.distributed.wire import Garbage, Message, bytes_of
from verbatim.placement.offload.planner import BUDGET_SHARE
from verbatim.placement.offload.runner import Tiers, open_tiered
from verbatim.placement.options import DEFAULT_KV_SHARE, EngineOptions, OpenRequest
from verbatim.placement.resident import Resident, open_store
from verbatim.protocols import Forward
from verbatim.weights.identity import fingerprint

_LIMITS = ("max_sequences", "max_batch_tokens", "prompt_rows")  # options that a plan may lower
_ECHOES = 3  # round trips to measure the latency of a new connection
_SPANS = 4096  # maximum length of `spans`, which is for benchmarks
_RECENT_S = 10.0  # period over which `tokens_per_s` is averaged
_MIN_FRAMES = 16  # micro-batches before a stage's speed is reported
_WORK = struct.Struct("<qqq")  # epoch, step and micro-batch
_ROWS, _VOID = b"rows", b"void"  # prefixes of `_WORK`; hidden states follow, or filler bytes
_HEAD_BYTES = len(_ROWS) + _WORK.size
_ROW_OFFSET = 64  # of hidden states in their buffer: leaves room for the head, and aligns them


class StageShare(Served):
    """The layers of one pipeline stage."""

    calls = Served.calls | {"link", "work", "draw", "logits", "record", "spans", "status"}
    concurrent = frozenset({"link"})  # may take seconds

    def __init__(self) -> None:
        super().__init__()
        self.part: Part | None = None  # None: no layers are open
        self.epoch = 0  # number of the current set of connections; see `StageLine`
        self.index = 0  # position of the stage
        self._options: EngineOptions
        self._split: Any = None  # the `Split` of the last inspected model
        self._first_of: dict[str, int] = {}
        self._restarts = 0  # how often the process of this stage was replaced
        self._hop_s: float | None = None  # latency of a small message to the next stage
        self._incoming: dict[int, Link] = {}  # the link from the previous stage, by its epoch
        self._next_link: Link | None = None
        self._computed: dict[int, list[Forward]] = {}  # of the last step; on the last stage
        self._num_frames = self._num_tokens = 0
        self._busy_s = 0.0
        self._spans: deque[tuple[int, int, float, float, int]] = deque(maxlen=_SPANS)

    # Layers.

    def use(self, device: Device, number: int) -> Message:
        """See `Served`; adds `speed`, the read bandwidth of the device's memory in bytes/s."""
        return {**super().use(device, number), "speed": _bytes_per_second(self.device)}

    def skeleton(self, source: ModelSource) -> LoadedModel:
        loaded = super().skeleton(source)
        if self._split is None or self._split.skeleton is not loaded:
            self._split = Split(loaded)
        return loaded

    def open(self, **message: Any) -> Message:
        """Free any open layers, then read a range of a model's layers.

        Raises:
            ModelError, NotSupported: this process can't open the layers.
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
            self.part = part = Part(
                self._split, first, end, device=device, draft=draft, place=place
            )
        for adapter in message.get("adapters", ()):
            part.decoder.load_adapter(adapter)
        spec = part.decoder.spec
        return {
            "vocab_size": self._split.vocab_size,
            "choices": spec.choices,
            "hidden_reason": spec.hidden_reason if part.is_last else None,
            "token_bytes": options.token_bytes(spec, part.drafts),
            "state_bytes": sum(state.nbytes for state in spec.states),
            "draft": part.drafts.info(),
            "limits": None if part.tiers is None else _limits_of(part.tiers, spec, part.drafts),
            "numerics_keys": [
                key_of(loaded, options, by_torch=by_torch) for by_torch in (False, True)
            ],
            "torch_functions": sorted(spec.torch_functions),
            "fingerprint": fingerprint(loaded),
            "memory": device.available_memory,
        }

    def allocate(self, num_blocks: int, num_states: int, first_of: dict[str, int]) -> Message:
        """Allocate the KV store.

        Args:
            first_of: for each of `CHOICES`, the number of choosing layers in earlier stages.
        """
        part, options = self._opened(), self._options
        decoder, drafts = part.decoder, part.drafts
        self._first_of = first_of
        if part.tiers is not None:
            self.runner = open_tiered(part.tiers, decoder, drafts, num_blocks, num_states)
        else:
            store = open_store(decoder.spec, options, drafts, num_blocks, num_states)
            self.runner = Resident(decoder, store, options.num_threads, drafts, part.loaded)
            self.runner.record_steps()
        weights = {"parameters": part.num_parameters, "weight_bytes": part.weight_bytes}
        self.runner.placement = {"placement": "cluster", **weights}
        return {"row_widths": self.row_widths, "info": self.runner.info()}

    def record(self, name: str, **fields: Any) -> Tensor | None:
        """Return the recorded choices for a sequence's tokens; None if no layer of this stage chooses."""
        if self.runner is None or name not in self.runner.records:
            return None
        return self.runner.record(name, **fields)

    def close(self) -> None:
        """Free everything."""
        super().close()
        if self.part is not None:
            self.part.close()
        self.part = self.runner = None

    def status(self) -> Message:
        """Return the state of this process, as plain values.

        `speed` is in bytes of weights per second; None until enough work is done.
        """
        part, runner, frames = self.part, self.runner, self._num_frames
        since = time.monotonic() - _RECENT_S
        recent = sum(tokens for *_, end, tokens in self._spans.copy() if end > since)
        weight_bytes = 0 if part is None else part.weight_bytes
        kv_bytes = 0 if runner is None else sum(store.nbytes for store in runner.stores)
        is_measured = frames >= _MIN_FRAMES and self._busy_s
        steps = None if runner is None else runner.decoder.steps
        return {
            "pid": os.getpid(),
            "address": self.address,
            "serving": self._head is not None,
            "layers": None if part is None else [part.first, part.end],
            "weight_bytes": weight_bytes,
            "kv_bytes": kv_bytes,
            "frames": frames,
            "tokens": self._num_tokens,
            "busy_s": self._busy_s,
            "speed": weight_bytes * frames / self._busy_s if is_measured else None,
            "tokens_per_s": recent / _RECENT_S,  # recent throughput, including idle time
            "index": self.index,
            "epoch": self.epoch,
            "restarts": self._restarts,
            "hop_s": self._hop_s,
            "recorded_steps": None if steps is None else steps.status,
        }

    def spans(self) -> list[tuple[int, int, float, float, int]]:
        """Return (step, micro-batch, begin, end, rows) of recent work, with times of `time.monotonic`."""
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
            newest = max([self.epoch, *self._incoming])
            if who["epoch"] < newest:
                raise VerbatimError(f"epoch {who['epoch']} is over: this stage is in {newest}")
            stale, self._incoming = self._incoming, {who["epoch"]: link}
        _close(*stale.values())
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
            next: address of the next stage; None on the last one.
            patience_s: time limit for connecting to the next stage.
            timeout_s: time limit for sending to the next stage, which does not receive while it computes.

        Returns:
            The reason why the next stage is `unreachable`; empty on success.
        """
        with self._lock:
            if epoch <= self.epoch:
                raise VerbatimError(f"epoch {epoch} is over: this stage is in {self.epoch}")
            self.epoch, self.index, self._restarts, self._hop_s = epoch, index, restarts, None
            stale, self._next_link = [self._next_link], None
            if max(self._incoming, default=0) < epoch:
                stale += self._incoming.values()
                self._incoming = {}
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
            self._next_link, self._hop_s = link, hop_s
        threading.Thread(target=self._watch, args=(link, epoch), daemon=True).start()
        return {}

    def _watch(self, link: Link, epoch: int) -> None:
        """Wait until the connection to the next stage is lost, and report it, as messages may be lost."""
        try:
            while True:
                link.receive()  # empty messages, sent while the next stage waits
        except (LinkLost, Garbage) as error:
            link.close()
            if self.epoch == epoch:
                self._report_lost(epoch, self.index + 1, error)

    def _report_lost(self, epoch: int, index: int, why: VerbatimError) -> None:
        """Report that the connection from the stage before `index` to that stage is lost."""
        self.report({"epoch": epoch, "cut_off": index, "why": str(why)})

    def hang_up(self) -> None:
        super().hang_up()
        _close(self._next_link, *self._incoming.values())
        self._next_link, self._incoming = None, {}

    # Steps.

    def work(self, epoch: int, step: int, part: int, batch: Batch) -> None:
        """Run micro-batch `part` of a step, and send its hidden states on; the last stage keeps logits."""
        if not isinstance(batch, Batch):
            raise TypeError("work without a Batch")
        with self._lock:
            now, index, link = self.epoch, self.index, self._next_link
            previous = self._incoming.get(epoch)
        if epoch != now:
            raise VerbatimError(f"epoch {epoch} is over: this stage is in {now}")
        tag, rows = _WORK.pack(epoch, step, part), None
        try:
            hidden = self._receive(previous, tag, batch.num_tokens) if index else None
            begin = time.monotonic()
            out = self.run(batch, hidden)
            self.device.synchronize()
            end = time.monotonic()  # from here to `begin` of the next stage: a hop
            rows = out.logits
        finally:
            if link is not None:
                self._send_hidden(link, tag, rows, batch.num_tokens)
        self._num_frames += 1
        self._num_tokens += batch.num_tokens
        self._busy_s += end - begin
        self._spans.append((step, part, begin, end, batch.num_tokens))
        if link is None:
            if step not in self._computed:
                self._computed = {step: []}
            if self.running.decoder.steps is not None:
                # The next micro-batch overwrites the output of a recorded step.
                hidden = None if out.hidden is None else out.hidden.clone()
                out = replace(out, logits=out.logits.clone(), hidden=hidden)
            self._computed[step].append(out)

    def _row_bytes(self) -> int:
        size: int = self._split.hidden_size * self._split.hidden_dtype.itemsize
        return size

    def _receive(self, previous: Link | None, tag: bytes, num_tokens: int) -> Tensor:
        """Wait for the hidden states `[T, H]` of a micro-batch.

        Raises:
            Skipped: the previous stage failed or is gone. A cut network is reported here.
        """
        buffer = torch.empty(_ROW_OFFSET + num_tokens * self._row_bytes(), dtype=torch.uint8)
        view = buffer.numpy().data[_ROW_OFFSET - _HEAD_BYTES :]
        head = view[:_HEAD_BYTES]
        hidden = buffer[_ROW_OFFSET:].view(self._split.hidden_dtype).view(num_tokens, -1)
        self.busy_since = None
        if previous is None:
            raise Skipped
        try:
            previous.receive_into(view)
        except LinkLost as error:
            if isinstance(error, CutOff):
                self._report_lost(_WORK.unpack(tag)[0], self.index, error)
            raise Skipped from None
        self.busy_since = time.monotonic()
        if head != _ROWS + tag:
            if head != _VOID + tag:  # the head of other work
                previous.close()
            raise Skipped
        return hidden

    def _send_hidden(self, link: Link, tag: bytes, rows: Tensor | None, num_tokens: int) -> None:
        """Send hidden states (None: filler bytes, so that it does not wait) to the next stage.

        This runs in every step, after weights have evicted everything else from the processor's caches, so
        that running code costs more than moving the data. It is not encoded as a message: both sides know its
        size, and the receiver wakes up when the head arrives.
        """
        try:
            head = _ROWS + tag
            if rows is None:
                head = _VOID + tag
                rows = torch.zeros(num_tokens * self._row_bytes(), dtype=torch.uint8)
            link.send_raw(head)
            link.send_raw(bytes_of(rows.cpu().contiguous()))
        except LinkLost as error:
            self._report_lost(_WORK.unpack(tag)[0], self.index + 1, error)

    def run(self, batch: Batch, hidden: Tensor | None) -> Forward:
        """Run one micro-batch on hidden states `[T, H]` from the previous stage; None: on the first one.

        The hidden states for the next stage are in place of logits.
        """
        part, runner = self._opened(), self.running

        def own_columns(name: str, forced: Tensor | None) -> Tensor | None:
            """Return the columns of this stage's layers from the forced choices of all layers."""
            first, count = self._first_of[name], runner.choices[name].layers
            return forced[:, first : first + count] if forced is not None and count else None

        batch.forced_experts = own_columns("routing", batch.forced_experts)
        batch.forced_keys = own_columns("indices", batch.forced_keys)
        part.enter(batch, hidden)
        return runner.forward(batch)

    def draw(self, epoch: int, step: int, parts: int, plan: SamplePlan) -> Message:
        """Sample from the logits of a step.

        Raises:
            VerbatimError: the step belongs to an earlier epoch.
            Skipped: a micro-batch of the step failed.
        """
        logits = self._logits(epoch, step, parts)
        hidden = [part.hidden for part in self._computed[step] if part.hidden is not None]
        return {
            "draws": self.running.sample(Forward(logits), plan),
            "hidden": torch.cat(hidden) if hidden else None,
        }

    def logits(self, epoch: int, step: int, parts: int, rows: list[int]) -> Tensor:
        """Return rows of the logits of a step; raises the errors of `draw`."""
        return self.running.logits(Forward(self._logits(epoch, step, parts)), rows)

    def _logits(self, epoch: int, step: int, parts: int) -> Tensor:
        if epoch != self.epoch:
            raise VerbatimError(f"step {step} belongs to epoch {epoch}, which is over")
        rows = [part.logits for part in self._computed.get(step, ())]
        if len(rows) < parts:
            raise Skipped
        return torch.cat(rows) if len(rows) > 1 else rows[0]


class StageActor(StageShare):
    """A process with one stage, run by Ray as an actor."""

    def __init__(self, key: bytes) -> None:
        import ray

        super().__init__()
        here = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self.listen(key, here, lambda: os._exit(0))


def _close(*links: Link | None) -> None:
    for link in links:
        if link is not None:
            link.close()


def _echo(link: Link) -> None:
    """Answer the messages of the other side's `_half_round_trip`."""
    with suppress(LinkLost, Garbage):
        for _ in range(_ECHOES - 1):
            link.receive()
            link.send({})
        link.receive()
        link.detect_cuts()
        link.send({})


def _half_round_trip(link: Link) -> float:
    """Return the one-way latency of a small message in seconds, the best of a few. The link must be idle."""

    def round_trip() -> None:
        link.send({})
        link.receive()

    return min(timeit.repeat(round_trip, number=1, repeat=_ECHOES)) / 2


def _tiers_of(message: Message, share: float, loaded: LoadedModel, draft: Mtp | None) -> Tiers:
    """Read the weights of a stage into the tiers of a plan.

    Args:
        message: the arguments of `StageShare.open`, with this stage's `memory` and the `blocks` of all stages
            (empty if they are not known yet).
        share: the stage's fraction of the model's layers.
        draft: MTP layers to read with them.
    """
    offload, options, blocks = message["offload"], message["options"], message["blocks"]
    kv_bytes = None if options.kv_bytes is None else int(options.kv_bytes * share)
    if offload.gpu is None and offload.cpu is None:
        if offload.weights is None:
            offload = offload.replace(gpu=int(message["memory"] * BUDGET_SHARE))
        elif kv_bytes is None:
            kv_bytes = int(message["memory"] * DEFAULT_KV_SHARE)
    sizes = (blocks["num_blocks"], blocks["num_states"]) if blocks else None
    options = replace(
        options, kv_bytes=kv_bytes, cache_sizes=sizes, quantization=loaded.quantization
    )
    return Tiers(OpenRequest(loaded, None, options, message["limit"], draft), offload)


def _limits_of(tiers: Tiers, spec: ModelSpec, drafts: DraftLayers) -> Message:
    """Return the limits of a stage's plan: blocks, states if there are any, and the options in `_LIMITS`."""
    blocks, states = tiers.num_blocks(spec, drafts)
    limits = {name: getattr(tiers.options, name) for name in _LIMITS}
    return {**limits, "num_blocks": blocks, **({"num_states": states} if spec.states else {})}


def _bytes_per_second(device: Device) -> float:
    """Measure the read bandwidth of a device's memory in bytes/s, as the median of five runs."""
    block = torch.ones(1 << 22, device=device.torch)

    def read() -> None:
        block.sum()
        device.synchronize()

    return block.nbytes / statistics.median(timeit.repeat(read, number=1, repeat=5))
