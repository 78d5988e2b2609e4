"""CUDA graphs: a short step is recorded once for each size, and then launched as a whole.

A step launches some hundred small kernels; at few rows the GPU waits for Python most of the time. Every
recorded row is a sequence of its own: the rows of a draft, or of a short chunk of a prompt, are given the
same block table, and each attends up to its own position, as all K and V of a layer are written before.
So one recording serves every cut of its rows into sequences. Sizes are rounded up, and surplus rows read and
write the scratch block. No row's bits depend on the rows beside it (with `deterministic=True`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from verbatim.batch import ZERO_STATE, Batch, dummy_batch
from verbatim.errors import first_line
from verbatim.kv.flat import HiddenStore
from verbatim.kv.states import StateRows
from verbatim.kv.store import KVStore
from verbatim.model.decoder import Decoder
from verbatim.model.packed import weights_of
from verbatim.model.routing import Records
from verbatim.protocols import Forward

MAX_ROWS = 256  # of a step that is recorded, which keeps its logits; larger ones keep a GPU busy
_ROWS_EACH = 16  # of a sequence in a recorded step; each of them reads all of its K and V
_SPARE_LOGITS = 64  # rows of a recorded step whose logits are not needed
_LEAST_CONTEXT = 512  # positions that the smallest tables hold

# What a forward returns, and what layers chose.
Step = Callable[[], tuple[Forward, Tensor | None]]
# Makes of a function, whose tensors all stay in their places, something that does the same once more.
Recorder = Callable[[Step], Step]


def wanted() -> bool:
    """Return False if `VERBATIM_CUDA_GRAPHS=0`, which runs every step kernel by kernel, for debugging."""
    return os.environ.get("VERBATIM_CUDA_GRAPHS") != "0"


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
    """

    batch: Batch
    inputs: Tensor
    host: Tensor
    columns: list[Tensor]
    blank: Tensor
    replay: Step


def _columns(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Return tensors like others, one after the other in the bytes of `flat`."""
    parts = flat.split([_padded(tensor.nbytes) for tensor in like])
    return [
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for part, tensor in zip(parts, like, strict=True)
    ]


def _padded(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


class DecodeGraphs:
    """The recorded steps of one decoder, `model.decoder.Steps`.

    Args:
        recorder: `cuda_recorder(device)`; a test may do without a GPU.

    Attributes:
        reason: why nothing is recorded any more; None as long as it works.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
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
        if self.reason or not _fits(batch, store) or not decoder.steps_can_be_recorded():
            return None
        places = [*store.tensors[:1], *(() if body is None else body.tensors)]
        places += [] if store.states is None else store.states.tensors[:1]
        pointers = [*map(Tensor.data_ptr, places), *map(Tensor.data_ptr, self._weights)]
        if self._pointers != pointers:  # a weight was replaced, or K and V slept
            self._recorded.clear()
            self._weights = weights_of(decoder.held)
            self._pointers = [*map(Tensor.data_ptr, [*places, *self._weights])]
        width = 1 << (batch.block_tables.shape[1] - 1).bit_length()
        size = rounded_rows(batch.num_tokens), max(width, _LEAST_CONTEXT // store.block_size)
        recorded = self._recorded.get((*size, batch.wants_hidden))
        if recorded is None:
            try:
                with torch.inference_mode(False):  # its tensors are written to in any mode
                    recorded = self._record(decoder, batch, store, body, *size)
            except Exception as error:  # a model may do anything that can't be recorded
                self.reason = f"{type(error).__name__}: {first_line(error)}"
                return None
            self._recorded[*size, batch.wants_hidden] = recorded
        routing = records.get("routing")
        if routing is not None:
            routing.copy_blocks(batch.block_copies)
        store.copy_blocks(batch.block_copies)
        values = _inputs(batch, store)
        _fill(recorded, values, batch.entering)
        made, chosen = recorded.replay()
        if routing is not None and chosen is not None:
            routing.write(values[0], chosen[: batch.num_tokens])
        rows: Any = slice(batch.num_tokens)
        if len(batch.logit_rows) < batch.num_tokens:
            rows = batch.logit_rows.to(store.device)
        return Forward(made.logits[rows], None if made.hidden is None else made.hidden[rows])

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
        replay = self._recorder(lambda: decoder.forward_in_place(batch, slots, store, body))
        return _Recorded(batch, inputs, host, _columns(host, values), blank, replay)


def _fits(batch: Batch, store: KVStore) -> bool:
    """Return whether a recorded step can do the work of a batch."""
    if not 0 < batch.num_tokens <= MAX_ROWS or batch.adapters is not None:
        return False
    if batch.forced_experts is not None or batch.forced_keys is not None:
        return False
    if batch.num_tokens - len(batch.logit_rows) > _SPARE_LOGITS:
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

    def record(step: Step) -> Step:
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

        return replay

    return record
