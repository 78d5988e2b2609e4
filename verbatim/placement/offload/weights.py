"""The weights of a model, of which only those that are needed now are in memory."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from verbatim import kernels
from verbatim.model.integers import interleaved_rows
from verbatim.model.packed import placeholder
from verbatim.model.quantize import unpack, unpack_rows
from verbatim.placement.offload.compress import rounded_rows
from verbatim.placement.offload.experts import ExpertCache, hold_experts, let_go_of_experts
from verbatim.placement.offload.scratch import Scratch
from verbatim.placement.offload.stream import Layout, Stream, lay_out
from verbatim.placement.offload.trace import Trace
from verbatim.placement.offload.units import Slot, Unit, Units
from verbatim.weights.files import PAGE, File, bytes_of, pages, read_whole, up
from verbatim.weights.lazy import Held, Stored, from_rows, materialize, sources

_ALIGNED = 64  # bytes; what torch's own products may round differently without


class Weights:
    """Lends a unit its parameters for as long as it computes.

    Args:
        units: with the tier of each slot settled. Those in "gpu" and "cpu" are read here and now.
        ring_bytes: memory in which the others are read ahead.
        num_readers: threads that do so; 0 reads a unit when it is lent.
        trace: takes note of reads, waits and unpacking.
        scratch: holds what was written for the disk tier, if anything was.
        tidy: called whenever a unit was lent.
        expert_bytes: memory for experts that are read one by one.

    Attributes:
        experts: those, if there are any.

    Raises:
        TierFailed: a file can't be read.
    """

    def __init__(
        self,
        units: Units,
        ring_bytes: int,
        num_readers: int,
        trace: Trace,
        scratch: Scratch | None = None,
        tidy: Callable[[], object] | None = None,
        expert_bytes: int = 0,
    ) -> None:
        self.units = units
        self._tidy = tidy
        self._row_files: dict[Any, File] = {}
        self._row_bytes = 0
        self._seen: list[int] | None = None  # what was lent so far, of a forward to learn from
        self._region: tuple[Layout, Tensor] | None = None
        self._trace = trace
        self.make_s = 0.0  # unpacking, casting and stacking what was read
        self.experts: ExpertCache | None = None
        layouts: list[Layout] = []
        self._layout_of: dict[Unit, int] = {}
        try:
            for slot in units.slots:
                if slot.in_place and not slot.holders:
                    slot.parameter.data = rounded_rows(slot, materialize(slot.lazy, read_whole))
            for unit in units.order:
                away = [slot for slot in unit.slots if self.is_streamed(unit, slot)]
                tensors = [s for slot in away for s in sources(slot.lazy)]
                if tensors:
                    self._layout_of[unit] = len(layouts)
                    layouts.append(lay_out(unit.name, tensors))
            if expert_bytes:
                self.experts = ExpertCache(units.experts, expert_bytes, num_readers, trace, scratch)
            else:
                hold_experts(units.experts)
            files = {} if scratch is None else {scratch.path: scratch.file()}
            self.stream = Stream(layouts, ring_bytes, num_readers if layouts else 0, trace, files)
        except BaseException:
            self._drop()
            raise

    @staticmethod
    def is_streamed(unit: Unit, slot: Slot) -> bool:
        """Return whether `slot` is read as a whole for `unit`; of an embedding on the disk, only rows are."""
        return slot.tier == "disk" and not unit.gathers

    @property
    def bytes_read(self) -> int:
        """Bytes read from files since it was opened, without those kept in memory."""
        experts = 0 if self.experts is None else self.experts.bytes_read
        return self.stream.bytes_read + self._row_bytes + experts

    @property
    def bytes_per_forward(self) -> int:
        """Read for each forward; rows of an embedding and experts come on top."""
        return sum(layout.nbytes for layout in self.stream.layouts)

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Record the order of units in this block; later, units are read ahead in this order."""
        self._seen = []
        try:
            yield
            if self._seen:
                self.stream.follow(self._seen)
        finally:
            self._seen = None

    @contextmanager
    def lent(self, unit: Unit) -> Iterator[None]:
        """Let the parameters of `unit` have their numbers in this block.

        Raises:
            TierFailed: they can't be read.
        """
        try:
            with self._lent(unit):
                yield
        finally:
            if self._tidy is not None:
                self._tidy()

    @contextmanager
    def _lent(self, unit: Unit) -> Iterator[None]:
        index = self._layout_of.get(unit)
        away = [slot for slot in unit.slots if not slot.in_place]
        if not away:
            yield
            return
        if unit.gathers and index is None:
            with _Lookup({slot.parameter: slot for slot in away}, self._rows):
                yield
            return
        if index is not None:
            if self._seen is not None:
                self._seen.append(index)
            region = self.stream.take(index)
            self._region = self.stream.layouts[index], region
        try:
            begin = perf_counter()
            self._make(away)
            end = perf_counter()
            self.make_s += end - begin
            yield
        finally:
            for slot in away:
                slot.parameter.data = placeholder(slot.parameter)
                slot.lend(None)
            self._region = None
            if index is not None:
                self.stream.give_back()

    def _make(self, away: list[Slot]) -> None:
        """Give parameters their data, and holders their quantized bytes."""
        for slot in away:
            made = materialize(slot.lazy, self._read)
            if slot.packing is None:
                slot.parameter.data = made
            else:
                slot.lend(made)

    def _read(self, stored: Stored) -> Tensor:
        """A tensor in the region that is in use."""
        assert self._region is not None
        layout, region = self._region
        at = layout.places[stored]
        found = region[at : at + stored.nbytes]
        odd = found.data_ptr() % _ALIGNED
        if odd and (odd % stored.dtype.itemsize or kernels.library() is None):
            found = found.clone()
        return found.view(stored.dtype).view(stored.shape)

    def _rows(self, slot: Slot, ids: Tensor) -> Tensor:
        """Rows of an embedding `[V, H]`, straight from its file or unpacked: `[len(ids), H]`."""
        lazy = slot.rows or slot.lazy
        if isinstance(lazy, Held):
            assert slot.packing is not None
            if slot.packing.interleaved:
                return unpack(*interleaved_rows(lazy.tensor, slot.packing, ids))
            return unpack_rows(lazy.tensor, slot.packing, ids)
        parts = sources(lazy)  # the rows of each, one after another
        stored, width = parts[0], parts[0].nbytes // parts[0].shape[0]
        for part in parts:
            if part.path not in self._row_files:
                self._row_files[part.path] = File(part.path, stamp=part.stamp)
        starts = [0, *accumulate(part.shape[0] for part in parts)]
        rows = torch.empty(len(ids), width, dtype=torch.uint8)
        buffer = pages(up(width) + PAGE)
        view = bytes_of(buffer)
        for i, row in enumerate(ids.tolist()):
            number = bisect(starts, row) - 1
            part = parts[number]
            at = part.offset + (row - starts[number]) * width
            skip = at % PAGE
            self._row_files[part.path].read(view[: up(skip + width)], at - skip, skip + width)
            rows[i] = buffer[skip : skip + width]
        self._row_bytes += rows.nbytes
        found = rows.view(stored.dtype).view(len(ids), *stored.shape[1:])
        return rounded_rows(slot, from_rows(lazy, found))

    def check_files(self) -> None:
        """Check that the files are unchanged since the model was opened.

        Raises:
            TierFailed: one was written to; the message names it.
        """
        self.stream.check_files()
        if self.experts is not None:
            self.experts.check_files()
        for file in self._row_files.values():
            file.check()

    def close(self) -> None:
        """End the readers and free everything. Again does nothing."""
        self.stream.close()
        self._drop()

    def _drop(self) -> None:
        if self.experts is not None:
            self.experts.close()
        else:
            let_go_of_experts(self.units.experts)
        for slot in self.units.slots:
            slot.parameter.data = placeholder(slot.parameter)
            slot.lend(None)
            if isinstance(slot.lazy, Held):
                slot.lazy = Held(slot.lazy.tensor.new_empty(0))
        for file in self._row_files.values():
            file.close()
        self._row_files.clear()


class _Lookup(TorchFunctionMode):
    """Stands under an embedding's own forward and looks rows up where they are.

    A class of its own may scale rows or move ids; what it hands to `F.embedding` is what counts.
    """

    def __init__(self, slots: dict[Any, Slot], rows: Any) -> None:
        super().__init__()
        self._slots = slots
        self._rows = rows

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding:
            ids, weight = args[0], args[1] if len(args) > 1 else kwargs["weight"]
            if weight in self._slots:
                return self._look_up(weight, ids)
        elif func is Tensor.__getitem__ and isinstance(args[1], Tensor) and args[0] in self._slots:
            weight, chosen = args
            return self._look_up(weight, torch.arange(len(weight))[chosen])
        return func(*args, **kwargs)

    def _look_up(self, weight: Any, ids: Tensor) -> Tensor:
        wanted, place = torch.unique(ids, return_inverse=True)
        rows: Tensor = self._rows(self._slots[weight], wanted)
        return rows[place]
