"""CUDA graphs: a decode step is recorded once for each size, and then launched as a whole.

A step of one row a sequence launches some hundred small kernels; at few rows the GPU waits for Python most
of the time. Sizes are rounded up, and surplus rows belong to no sequence: they read and write the
scratch block, and no row's bits depend on the rows beside it (with `deterministic=True`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from verbatim.batch import SCRATCH_BLOCK, ZERO_STATE, Batch, dummy_batch
from verbatim.errors import first_line
from verbatim.kv.states import StateRows
from verbatim.kv.store import KVStore
from verbatim.model.decoder import Decoder
from verbatim.model.routing import Records

MAX_ROWS = 512  # of a step that is recorded; larger ones keep a GPU busy
_LEAST_CONTEXT = 512  # positions that the smallest tables hold

# Logits, and what layers chose.
Step = Callable[[], tuple[Tensor, Tensor | None]]
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
    """A recorded step, which reads `inputs` anew each time.

    Attributes:
        inputs: bytes on the device.
        host: the same in RAM, and `columns` the tensors in it.
        blank: those of surplus rows only.
    """

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
    """The recorded steps of one decoder over one store.

    Args:
        recorder: `cuda_recorder(device)`; a test may do without a GPU.
        records: of what layers choose.

    Attributes:
        reason: why nothing is recorded any more; None as long as it works.
    """

    def __init__(
        self,
        decoder: Decoder,
        store: KVStore,
        recorder: Recorder,
        records: Records = MappingProxyType({}),
    ) -> None:
        self._decoder, self._store, self._recorder = decoder, store, recorder
        self._routing = records.get("routing")
        self._recorded: dict[tuple[int, int], _Recorded] = {}
        self._weights: list[Tensor] = []
        self._pointers: list[int] = []
        self.reason: str | None = None

    def run(self, batch: Batch) -> Tensor | None:
        """Return logits `[R, V]` of `batch`, to be read before the next forward; None if it can't be
        replayed.
        """
        rows = batch.num_tokens
        fits = rows == batch.num_sequences == len(batch.logit_rows) <= MAX_ROWS
        if self.reason or not fits or batch.block_copies or batch.wants_hidden:
            return None
        if batch.forced_experts is not None or not self._decoder.steps_can_be_recorded():
            return None
        if self._pointers != self._current():  # a weight was replaced, or K and V slept
            self.forget()
        width = 1 << (batch.block_tables.shape[1] - 1).bit_length()
        key = rounded_rows(rows), max(width, _LEAST_CONTEXT // self._store.block_size)
        recorded = self._recorded.get(key)
        if recorded is None:
            try:
                recorded = self._recorded[key] = self._record(*key)
            except Exception as error:  # a model may do anything that can't be recorded
                self.reason = f"{type(error).__name__}: {first_line(error)}"
                return None
        slots = batch.slots(self._store.block_size)
        self._fill(recorded, self._inputs(batch, slots))
        logits, chosen = recorded.replay()
        if self._routing is not None and chosen is not None:
            self._routing.write(slots, chosen[:rows])
        return logits[:rows]

    @property
    def count(self) -> int:
        """The number of recorded sizes."""
        return len(self._recorded)

    def forget(self) -> None:
        """Drop all recordings; they are made again when needed."""
        self._recorded.clear()
        self._weights = [*self._decoder.module.parameters()]
        self._pointers = self._current()

    def _current(self) -> list[int]:
        layers = self._store.layers
        stores = [layers[0][0]] if layers else []
        if self._store.states is not None:
            stores += self._store.states.tensors[:1]
        return [*map(Tensor.data_ptr, stores), *map(Tensor.data_ptr, self._weights)]

    def _record(self, rows: int, width: int) -> _Recorded:
        self._decoder.check_experts_run_freely()
        store, device = self._store, self._store.device
        batch = dummy_batch(rows, width)
        slots = torch.full((rows,), SCRATCH_BLOCK * store.block_size)
        if store.states is not None:
            zeros = torch.full((rows,), ZERO_STATE, dtype=torch.int32)
            batch.state_sources, batch.state_targets = zeros, zeros
            batch.state_rows = torch.full_like(zeros, rows)  # there is no such row
        values = self._inputs(batch, slots)
        blank = torch.zeros(sum(_padded(tensor.nbytes) for tensor in values), dtype=torch.uint8)
        for column, tensor in zip(_columns(blank, values), values, strict=True):
            column.copy_(tensor)
        host, inputs = blank.clone(), blank.to(device, copy=True)
        batch.query_starts, batch.logit_rows = (
            tensor.to(device) for tensor in (batch.query_starts, batch.logit_rows)
        )
        batch.token_ids, batch.positions, batch.context_lens, batch.block_tables, slots, *states = (
            _columns(inputs, values)
        )
        if states:
            batch.state_sources, batch.state_rows, batch.state_targets = states
        replay = self._recorder(lambda: self._decoder.forward_in_place(batch, slots, store))
        return _Recorded(inputs, host, _columns(host, values), blank, replay)

    def _inputs(self, batch: Batch, slots: Tensor) -> list[Tensor]:
        """Return what differs from step to step."""
        columns = [batch.token_ids, batch.positions, batch.context_lens, batch.block_tables, slots]
        if self._store.states is not None:
            columns += StateRows.of(batch)[1:]
        return columns

    def _fill(self, recorded: _Recorded, values: list[Tensor]) -> None:
        """Copy a step's inputs to where the recording reads them, before those of surplus rows."""
        recorded.host.copy_(recorded.blank)
        for column, tensor in zip(recorded.columns, values, strict=True):
            column[tuple(map(slice, tensor.shape))] = tensor
        recorded.inputs.copy_(recorded.host, non_blocking=True)  # one copy to the GPU


def cuda_recorder(device: torch.device) -> Recorder:
    """Return a recorder of the kernels that a function launches on `device`; all recordings share memory."""
    pool: Any = torch.cuda.graph_pool_handle()

    def record(step: Step) -> Step:
        beside = torch.cuda.Stream(device)
        beside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(beside):
            for _ in range(2):  # what is compiled or chosen at the first call must be there
                step()
        torch.cuda.current_stream(device).wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(device),
            torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
        ):
            out = step()

        def replay() -> tuple[Tensor, Tensor | None]:
            graph.replay()
            return out

        return replay

    return record
