"""Recorded steps: a small step is recorded once per batch size and replayed without Python overhead.

A step makes hundreds of small calls; with few rows, the Python overhead of each exceeds its compute time. On
a GPU the calls are recorded as a CUDA graph, on a CPU by `tape.py`. A recording treats every row as a
separate sequence. The rows of a draft or of a short prompt chunk share one block table, and each row attends
up to its own position, since a layer writes all of its K and V before it attends. So one recording serves
every division of its rows into sequences. On a GPU sizes are rounded up, and padding rows read and write the
scratch block. Rows do not affect each other's bits (with `deterministic=True`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verbatim.batch import ZERO_STATE, Batch, dummy_batch
from verbatim.errors import NotSupported, first_line
from verbatim.kv.flat import HiddenStore
from verbatim.kv.states import StateRows
from verbatim.kv.store import KVStore
from verbatim.model.decoder import Decoder
from verbatim.model.quantized import weights_of
from verbatim.model.routing import Records
from verbatim.protocols import Forward

_ROWS_PER_SEQUENCE = 16  # maximum; each row reads all K and V of the sequence
_MIN_CONTEXT = 512  # minimum capacity of a recorded block table, in positions

# Runs a forward; returns its output and the experts chosen by the routers, if they are recorded.
Step = Callable[[], tuple[Forward, Tensor | None]]
# A replay of a step, and the bytes of RAM that it holds.
Recording = tuple[Step, int]
# Records a step; its tensors must keep their addresses.
Recorder = Callable[[Step], Recording]


class RecordingLimits(NamedTuple):
    """Limits on which steps are recorded, and on the memory of the recordings."""

    rows: int  # of a step; larger steps are compute-bound, and a recording holds all logits
    spare_logits: int  # rows without needed logits, as a recording computes the logits of all rows
    rounded: bool  # whether row counts are rounded up
    uses: int  # number of unrecorded steps of a size before it is recorded
    nbytes: int  # in total; the least recently used recordings are dropped. 0: no limit


ON_GPU = RecordingLimits(rows=256, spare_logits=64, rounded=True, uses=0, nbytes=0)
ON_CPU = RecordingLimits(rows=8, spare_logits=0, rounded=False, uses=3, nbytes=64_000_000)


def enabled() -> bool:
    """Return False if `VERBATIM_RECORDED_STEPS=0`, which runs every step call by call, for debugging."""
    return os.environ.get("VERBATIM_RECORDED_STEPS") != "0"


def rounded_rows(rows: int) -> int:
    """Round up a number of rows: to a power of two up to 8, a multiple of 8 up to 64, else of 32."""
    if rows <= 8:
        return 1 << (rows - 1).bit_length()
    step = 8 if rows <= 64 else 32
    return -(-rows // step) * step


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A recorded step. Each replay reads the current contents of `inputs` and `batch.entering`."""

    batch: Batch  # of the recording; its per-step tensors are views of `inputs`
    inputs: Tensor  # all input tensors packed into one uint8 buffer on the device
    host: Tensor  # the staging buffer of `inputs` in RAM
    columns: list[Tensor]  # the input tensors as views of `host`
    blank: Tensor  # the contents of `host` for a batch of padding rows only
    replay: Step
    nbytes: int  # of RAM held by the recording


def _columns(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Return views of the byte buffer `flat` with the shapes and dtypes of `like`, in order."""
    parts = flat.split([_aligned(tensor.nbytes) for tensor in like])
    return [
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for part, tensor in zip(parts, like, strict=True)
    ]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


class RecordedSteps:
    """The recorded steps of one decoder, run in place of `Decoder.run`."""

    def __init__(self, recorder: Recorder, limits: RecordingLimits = ON_GPU) -> None:
        self._recorder, self._limits = recorder, limits
        self._uses: Counter[tuple[int, int, bool]] = Counter()
        self._recorded: dict[tuple[int, int, bool], _Recorded] = {}
        self._weights: list[Tensor] = []
        self._pointers: list[int] = []
        self.reason: str | None = None  # why steps are no longer recorded; None while they are

    def run(
        self,
        decoder: Decoder,
        batch: Batch,
        store: KVStore,
        records: Records = MappingProxyType({}),
        body: HiddenStore | None = None,
    ) -> Forward | None:
        """Return the output of `decoder.run`, valid until the next forward; None: not recorded."""
        limits = self._limits
        if self.reason or not _fits(batch, store, limits) or not decoder.steps_can_be_recorded():
            return None
        buffers = [*store.tensors[:1], *(() if body is None else body.tensors)]
        buffers += [] if store.states is None else store.states.tensors[:1]
        pointers = [*map(Tensor.data_ptr, buffers), *map(Tensor.data_ptr, self._weights)]
        if self._pointers != pointers:  # a weight or the KV cache was reallocated
            self._recorded.clear()
            self._weights = weights_of(decoder.raw_module)
            self._pointers = [*map(Tensor.data_ptr, [*buffers, *self._weights])]
        width = 1 << (batch.block_tables.shape[1] - 1).bit_length()
        rows = rounded_rows(batch.num_tokens) if limits.rounded else batch.num_tokens
        size = rows, max(width, _MIN_CONTEXT // store.block_size), batch.wants_hidden
        recorded = self._recorded.pop(size, None)
        if recorded is None:
            self._uses[size] += 1
            if self._uses[size] <= limits.uses:
                return None
            try:
                with torch.inference_mode(False):  # its tensors must be writable in any mode
                    recorded = self._record(decoder, batch, store, body, *size[:2])
            except Exception as error:  # arbitrary model code may fail to be recorded
                self.reason = f"{type(error).__name__}: {first_line(error)}"
                return None
        self._recorded[size] = recorded  # moved to the end: most recently used
        if limits.nbytes:
            self._evict()
        routing = records.get("routing")
        if routing is not None:
            routing.copy_blocks(batch.block_copies)
        store.copy_blocks(batch.block_copies)
        values = _inputs(batch, store)
        _fill(recorded, values, batch.entering)
        try:
            out, experts = recorded.replay()
        except NotSupported as error:  # from the check of the first replay
            self.reason = str(error)
            return None
        if routing is not None and experts is not None:
            routing.write(values[0], experts[: batch.num_tokens])
        needed: Any = slice(batch.num_tokens)
        if len(batch.logit_rows) < batch.num_tokens:
            needed = batch.logit_rows.to(store.device)
        return Forward(out.logits[needed], None if out.hidden is None else out.hidden[needed])

    def _evict(self) -> None:
        sizes = [*self._recorded]
        total = sum(recorded.nbytes for recorded in self._recorded.values())
        for size in sizes[:-1]:
            if total <= self._limits.nbytes:
                return
            total -= self._recorded.pop(size).nbytes
            self._uses[size] = 0

    @property
    def status(self) -> int | str:
        """The number of recorded sizes, or `reason`."""
        return self.reason or len(self._recorded)

    def _record(
        self,
        decoder: Decoder,
        like: Batch,
        store: KVStore,
        body: HiddenStore | None,
        rows: int,
        width: int,
    ) -> _Recorded:
        if self._limits is ON_GPU:
            decoder.check_runs_freely()
        device, batch = store.device, dummy_batch(rows, width)
        if store.states is not None:
            zeros = torch.full((rows,), ZERO_STATE, dtype=torch.int32)
            batch.state_sources, batch.state_targets = zeros, zeros
            batch.state_rows = torch.full_like(zeros, rows)  # out of range: no state is written
        values = _inputs(batch, store)
        blank = torch.zeros(sum(_aligned(tensor.nbytes) for tensor in values), dtype=torch.uint8)
        for column, tensor in zip(_columns(blank, values), values, strict=True):
            column.copy_(tensor)
        host, inputs = blank.clone(), blank.to(device, copy=True)
        batch.query_starts, batch.logit_rows = (
            tensor.to(device) for tensor in (batch.query_starts, batch.logit_rows)
        )
        slots, batch.token_ids, batch.positions, batch.context_lens, batch.block_tables, *states = (
            _columns(inputs, values)
        )
        if states:
            batch.state_sources, batch.state_rows, batch.state_targets = states
        if like.entering is not None:
            batch.entering = like.entering.new_zeros(rows, like.entering.shape[1], device=device)
        batch.wants_hidden = like.wants_hidden
        recording = self._recorder(lambda: decoder.forward_in_place(batch, slots, store, body))
        return _Recorded(batch, inputs, host, _columns(host, values), blank, *recording)


def _fits(batch: Batch, store: KVStore, limits: RecordingLimits) -> bool:
    """Return whether a recorded step can compute a batch."""
    if not 0 < batch.num_tokens <= limits.rows or batch.adapters is not None:
        return False
    if batch.forced_experts is not None or batch.forced_keys is not None or batch.records_keys:
        return False
    if batch.num_tokens - len(batch.logit_rows) > limits.spare_logits:
        return False
    if batch.state_sources is not None and batch.state_targets is not None:
        # A piece of a sequence may overwrite the state that it reads; the first replay runs twice.
        if not set(batch.state_sources.tolist()).isdisjoint(batch.state_targets.tolist()):
            return False
    # In recurrent layers each row depends on the previous row of its sequence.
    rows_each = _ROWS_PER_SEQUENCE if store.states is None else 1
    return int(batch.query_starts.diff().max()) <= rows_each


def _inputs(batch: Batch, store: KVStore) -> list[Tensor]:
    """Return the per-step input tensors on the CPU, slots first, with each row as a separate sequence."""
    tables = batch.block_tables
    if batch.num_tokens > batch.num_sequences:
        tables = tables.repeat_interleave(batch.query_starts.diff(), 0)
    columns = [batch.slots(store.block_size), batch.token_ids, batch.positions]
    columns += [(batch.positions + 1).int(), tables]
    if store.states is not None:
        columns += StateRows.of(batch)[1:]
    return columns


def _fill(recorded: _Recorded, values: list[Tensor], entering: Tensor | None) -> None:
    """Copy the inputs of a step into the buffers of a recording; the remaining rows are padding."""
    recorded.host.copy_(recorded.blank)
    for column, tensor in zip(recorded.columns, values, strict=True):
        column[tuple(map(slice, tensor.shape))] = tensor
    recorded.inputs.copy_(recorded.host, non_blocking=True)  # a single transfer to the GPU
    static = recorded.batch.entering
    if static is not None and entering is not None:
        static[: len(entering)].copy_(entering, non_blocking=True)


def cuda_recorder(device: torch.device) -> Recorder:
    """Return a recorder of CUDA graphs on `device`; the graphs share one memory pool."""
    pool: Any = torch.cuda.graph_pool_handle()
    side = torch.cuda.Stream(device)  # torch's default capture stream belongs to one device

    def record(step: Step) -> Recording:
        current, graph = torch.cuda.current_stream(device), torch.cuda.CUDAGraph()
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):  # restores the thread's stream even if a capture fails
                for _ in range(2):  # warm-up: compiles kernels and selects algorithms
                    step()
                with torch.cuda.graph(graph, pool, side, capture_error_mode="thread_local"):
                    out = step()
        finally:
            current.wait_stream(side)

        def replay() -> tuple[Forward, Tensor | None]:
            graph.replay()
            return out

        return replay, 0

    return record
