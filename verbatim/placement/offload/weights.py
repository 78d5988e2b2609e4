"""The weights of a model, of which only those that are needed now are in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from verbatim import kernels
from verbatim.placement.offload.checkpoint import placeholder
from verbatim.placement.offload.files import File, read_whole
from verbatim.placement.offload.recipe import Stored, cook, ingredients
from verbatim.placement.offload.scratch import Scratch
from verbatim.placement.offload.stream import Layout, Stream, lay_out
from verbatim.placement.offload.trace import Trace
from verbatim.placement.offload.units import Slot, Unit, Units

_ALIGNED = 64  # bytes; what torch's own products may round differently without


class Weights:
    """Lends a unit its parameters for as long as it computes.

    Args:
        units: with the tier of each slot settled. Those in "gpu" and "cpu" are read here and now.
        ring_bytes: memory in which the others are read ahead.
        num_readers: threads that do so; 0 reads a unit when it is lent.
        trace: takes note of reads and waits.
        scratch: holds what was written for the disk tier, if anything was.

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
    ) -> None:
        self.units = units
        self._row_files: dict[Any, File] = {}
        self._row_bytes = 0
        self._region: tuple[Layout, Tensor] | None = None
        layouts: list[Layout] = []
        self._layout_of: dict[Unit, int] = {}
        try:
            for slot in units.slots:
                if slot.in_place:
                    slot.parameter.data = cook(slot.recipe, read_whole)
            for unit in units.order:
                away = [slot for slot in unit.slots if self.is_streamed(unit, slot)]
                tensors = [s for slot in away for s in ingredients(slot.recipe)]
                if tensors:
                    self._layout_of[unit] = len(layouts)
                    layouts.append(lay_out(unit.name, tensors))
            files = {} if scratch is None else {scratch.path: scratch.file()}
            self.stream = Stream(layouts, ring_bytes, num_readers if layouts else 0, trace, files)
        except BaseException:
            self._drop()
            raise

    @staticmethod
    def is_streamed(unit: Unit, slot: Slot) -> bool:
        """Is `slot` read as a whole for `unit`? Of an embedding that is away, rows are looked up."""
        return slot.tier == "disk" and not unit.gathers

    @property
    def bytes_read(self) -> int:
        """From files, since it was opened, without what was read once and for all."""
        return self.stream.bytes_read + self._row_bytes

    @property
    def bytes_per_forward(self) -> int:
        """Read for each forward; rows of an embedding come on top."""
        return sum(layout.nbytes for layout in self.stream.layouts)

    @contextmanager
    def lent(self, unit: Unit) -> Iterator[None]:
        """Let the parameters of `unit` have their numbers in this block.

        Raises:
            TierFailed: they can't be read.
        """
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
            region = self.stream.take(index)
            self._region = self.stream.layouts[index], region
        try:
            for slot in away:
                slot.parameter.data = cook(slot.recipe, self._read)
            yield
        finally:
            for slot in away:
                slot.parameter.data = placeholder(slot.parameter)
            self._region = None
            if index is not None:
                self.stream.give_back()

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
        """Rows of an embedding `[V, H]`, straight from its file: `[len(ids), H]`."""
        (stored,) = ingredients(slot.recipe)
        width = stored.nbytes // stored.shape[0]
        file = self._row_files.get(stored.path)
        if file is None:
            file = self._row_files[stored.path] = File(stored.path)
        rows = []
        for row in ids.tolist():
            at = stored.offset + row * width
            place = Stored(stored.name, stored.path, at, width, stored.dtype, stored.shape[1:])
            rows.append(read_whole(place, file))
        self._row_bytes += width * len(rows)
        return cook(slot.recipe, lambda _: torch.stack(rows))

    def close(self) -> None:
        """End the readers and free everything. Again does nothing."""
        self.stream.close()
        self._drop()

    def _drop(self) -> None:
        for slot in self.units.slots:
            slot.parameter.data = placeholder(slot.parameter)
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
        if func is F.embedding:
            ids, weight = args[0], args[1] if len(args) > 1 else kwargs["weight"]
            slot = self._slots.get(weight)
            if slot is not None:
                wanted, place = torch.unique(ids, return_inverse=True)
                return self._rows(slot, wanted)[place]
        return func(*args, **(kwargs or {}))
