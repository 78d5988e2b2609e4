"""Recorded steps: a short step is recorded once for each size, and then repeated without its Python.

A step makes some hundred small calls, of which each takes longer in Python than it computes at few rows. On
a GPU they are recorded as a CUDA graph, on a CPU by `tape.py`. Every
recorded row is a sequence of its own: the rows of a draft, or of a short chunk of a prompt, are given the
same block table, and each attends up to its own position, as all K and V of a layer are written before.
So one recording serves every cut of its rows into sequences. On a GPU sizes are rounded up, and surplus rows
read and write the scratch block. No row's bits depend on the rows beside it (with `deterministic=True`).
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
from verbatim.model.packed import weights_of
from verbatim.model.routing import Records
from verbatim.protocols import Forward

_ROWS_EACH = 16  # of a sequence in a recorded step; each of them reads all of its K and V
_LEAST_CONTEXT = 512  # positions that the smallest tables hold

# What a forward returns, and what layers chose.
Step = Callable[[], tuple[Forward, Tensor | None]]
# What does the same once more, and the bytes of RAM that it keeps.
Recording = tuple[Step, int]
# Makes one of a function whose tensors all stay in their places.
Recorder = Callable[[Step], Recording]


class RecordingLimits(NamedTuple):
    """The steps that are recorded.

    Attributes:
        rows: at most so many; more keep the device busy, and a recording keeps their logits.
        spare_logits: rows whose logits are not needed.
        rounded: sizes are rounded up.
        uses: plain steps of a size before it is recorded.
        nbytes: of recordings; beyond, those that were not used for longest are forgotten.
    """

    rows: int
    spare_logits: int
    rounded: bool
    uses: int
    nbytes: int


ON_GPU = RecordingLimits(rows=256, spare_logits=64, rounded=True, uses=0, nbytes=0)
ON_CPU = RecordingLimits(rows=8, spare_logits=0, rounded=False, uses=3, nbytes=64_000_000)


def wanted() -> bool:
    """Return False if `VERBATIM_RECORDED_STEPS=0`, which runs every step call by call, for debugging."""
    return os.environ.get("VERBATIM_RECORDED_STEPS") != "0"


def rounded_rows(rows: int) -> int:
    """Return the size of the recorded step for `rows` rows: powers of two to 8, then steps of 8, then of
    32.
    """
    if rows <= 8:
        return 1 << (rows - 1).bit_length()
    step = 8 if rows <= 64 else 32
    return -(-rows // step) * step


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A recorded step, which reads `inputs` and `batch.entering` anew each time.

    Attributes:
        batch: the tensors that the step reads, on the device.
        inputs: bytes on the device.
        host: the same in RAM, and `columns` the tensors in it.
        blank: those of surplus rows only.
        nbytes: of RAM that it keeps.
    """

    batch: Batch
    inputs: Tensor
    host: Tensor
    columns: list[Tensor]
    blank: Tensor
    replay: Step
    nbytes: int


def _columns(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Return tensors like others, one after the other in the bytes of `flat`."""
    parts = flat.split([_padded(tensor.nbytes) for tensor in like])
    return [
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for part, tensor in zip(parts, like, strict=True)
    ]


def _padded(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


class RecordedSteps:
    """The recorded steps of one decoder, `model.decoder.Steps`.

    Args:
        recorder: `cuda_recorder(device)` or `record_on_cpu`.
        limits: `ON_GPU` or `ON_CPU`.

    Attributes:
        reason: why nothing is recorded any more; None as long as it works.
    """

    def __init__(self, recorder: Recorder, limits: RecordingLimits = ON_GPU) -> None:
        self._recorder, self._limits = recorder, limits
        self._uses: Counter[tuple[int, int, bool]] = Counter()
        self._recorded: dict[tuple[int, int, bool], _Recorded] = {}
        self._weights: list[Tensor] = []
        self._pointers: list[int] = []
        self.reason: str | None = None

    def run(
        self,
        decoder: Decoder,
        batch: Batch,
        store: KVStore,
        records: Records = MappingProxyType({}),
        body: HiddenStore | None = None,
    ) -> Forward | None:
        """Return what `decoder.run` does, to be read before the next forward; None if it can't be
        replayed.
        """
        limits = self._limits
        if self.reason or not _fits(batch, store, limits) or not decoder.steps_can_be_recorded():
            return None
        places = [*store.tensors[:1], *(() if body is None else body.tensors)]
        places += [] if store.states is None else store.states.tensors[:1]
        pointers = [*map(Tensor.data_ptr, places), *map(Tensor.data_ptr, self._weights)]
        if self._pointers != pointers:  # a weight was replaced, or K and V slept
            self._recorded.clear()
            self._weights = weights_of(decoder.held)
            self._pointers = [*map(Tensor.data_ptr, [*places, *self._weights])]
        width = 1 << (batch.block_tables.shape[1] - 1).bit_length()
        rows = rounded_rows(batch.num_tokens) if limits.rounded else batch.num_tokens
        size = rows, max(width, _LEAST_CONTEXT // store.block_size), batch.wants_hidden
        recorded = self._recorded.pop(size, None)
        if recorded is None:
            self._uses[size] += 1
            if self._uses[size] <= limits.uses:
                return None
            try:
                with torch.inference_mode(False):  # its tensors are written to in any mode
                    recorded = self._record(decoder, batch, store, body, *size[:2])
            except Exception as error:  # a model may do anything that can't be recorded
                self.reason = f"{type(error).__name__}: {first_line(error)}"
                return None
        self._recorded[size] = recorded  # the last one used
        if limits.nbytes:
            self._forget_some()
        routing = records.get("routing")
        if routing is not None:
            routing.copy_blocks(batch.block_copies)
        store.copy_blocks(batch.block_copies)
        values = _inputs(batch, store)
        _fill(recorded, values, batch.entering)
        try:
            made, chosen = recorded.replay()
        except NotSupported as error:  # the first time
            self.reason = str(error)
            return None
        if routing is not None and chosen is not None:
            routing.write(values[0], chosen[: batch.num_tokens])
        kept: Any = slice(batch.num_tokens)
        if len(batch.logit_rows) < batch.num_tokens:
            kept = batch.logit_rows.to(store.device)
        return Forward(made.logits[kept], None if made.hidden is None else made.hidden[kept])

    def _forget_some(self) -> None:
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
            decoder.check_experts_run_freely()
        device, batch = store.device, dummy_batch(rows, width)
        if store.states is not None:
            zeros = torch.full((rows,), ZERO_STATE, dtype=torch.int32)
            batch.state_sources, batch.state_targets = zeros, zeros
            batch.state_rows = torch.full_like(zeros, rows)  # there is no such row
        values = _inputs(batch, store)
        blank = torch.zeros(sum(_padded(tensor.nbytes) for tensor in values), dtype=torch.uint8)
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
    """Return whether a recorded step can do the work of a batch."""
    if not 0 < batch.num_tokens <= limits.rows or batch.adapters is not None:
        return False
    if batch.forced_experts is not None or batch.forced_keys is not None:
        return False
    if batch.num_tokens - len(batch.logit_rows) > limits.spare_logits:
        return False
    # The rows of a sequence follow from one another in recurrent layers.
    rows_each = _ROWS_EACH if store.states is None else 1
    return int(batch.query_starts.diff().max()) <= rows_each


def _inputs(batch: Batch, store: KVStore) -> list[Tensor]:
    """Return what differs from step to step, in RAM: slots first; each row is a sequence of its own."""
    tables = batch.block_tables
    if batch.num_tokens > batch.num_sequences:
        tables = tables.repeat_interleave(batch.query_starts.diff(), 0)
    columns = [batch.slots(store.block_size), batch.token_ids, batch.positions]
    columns += [(batch.positions + 1).int(), tables]
    if store.states is not None:
        columns += StateRows.of(batch)[1:]
    return columns


def _fill(recorded: _Recorded, values: list[Tensor], entering: Tensor | None) -> None:
    """Copy a step's inputs to where the recording reads them, before those of surplus rows."""
    recorded.host.copy_(recorded.blank)
    for column, tensor in zip(recorded.columns, values, strict=True):
        column[tuple(map(slice, tensor.shape))] = tensor
    recorded.inputs.copy_(recorded.host, non_blocking=True)  # one copy to the GPU
    static = recorded.batch.entering
    if static is not None and entering is not None:
        static[: len(entering)].copy_(entering, non_blocking=True)


def cuda_recorder(device: torch.device) -> Recorder:
    """Return a recorder of the kernels that a function launches on `device`; all recordings share memory."""
    pool: Any = torch.cuda.graph_pool_handle()
    beside = torch.cuda.Stream(device)  # torch's own stream for captures is that of one device

    def record(step: Step) -> Recording:
        before, graph = torch.cuda.current_stream(device), torch.cuda.CUDAGraph()
        beside.wait_stream(before)
        try:
            with torch.cuda.stream(beside):  # restores the thread's stream even if a capture fails
                for _ in range(2):  # what is compiled or chosen at the first call must be there
                    step()
                with torch.cuda.graph(graph, pool, beside, capture_error_mode="thread_local"):
                    out = step()
        finally:
            before.wait_stream(beside)

        def replay() -> tuple[Forward, Tensor | None]:
            graph.replay()
            return out

        return replay, 0

    return record
