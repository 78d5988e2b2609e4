"""The weights of a model, of which only those that are needed now are in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from verbatim import kernels
from verbatim.model.quantize import unpack_rows
from verbatim.placement.offload.compress import rounded_rows
from verbatim.placement.offload.experts import ExpertCache
from verbatim.placement.offload.prefetch import Prefetcher
from verbatim.placement.offload.scratch import Scratch
from verbatim.placement.offload.stream import Layout, Ring, Use, lay_out
from verbatim.placement.offload.trace import Trace
from verbatim.placement.offload.units import Slot, Unit, Units
from verbatim.weights.files import OpenFiles, read_whole
from verbatim.weights.lazy import Held, LazyWeight, Stored, materialize, rows_of, sources
from verbatim.weights.update import overwrite

_ALIGNED = 64  # bytes; what torch's own products may round differently without


class Weights:
    """Provides the parameters of a unit while it computes.

    Args:
        units: with a tier for each slot. Those in "gpu" and "cpu" are read at once.
        ring_bytes: memory in which the others are read ahead.
        num_readers: threads that do so; 0 reads a unit when it is installed.
        trace: records reads and waits.
        scratch: has K and V; further files are opened beside it.
        packed: holds weights that were written for the disk tier, if any were; closed with this.
        tidy: called after each unit.
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
        scratch: Scratch,
        packed: Scratch | None = None,
        tidy: Callable[[], object] | None = None,
        expert_bytes: int = 0,
    ) -> None:
        self.units = units
        self.is_mixed = False  # an update of them went wrong
        self.experts: ExpertCache | None = None
        self._tidy = tidy
        self._ring_bytes, self._num_readers = ring_bytes, num_readers
        self._expert_bytes = expert_bytes
        self.ring = Ring("weights", Prefetcher("verbatim-reader", num_readers), trace)
        self.scratch = scratch
        self._packed = packed  # weights of the disk tier that are in no file of the user's
        self._asleep: Scratch | None = None
        self._slept: dict[Slot, Stored] = {}  # weights that are in no file otherwise
        self._files = OpenFiles()
        self._order: list[Unit] = []  # as a forward uses them
        self._seen: list[Unit] | None = None  # those used so far, while their order is recorded
        self._region: tuple[Layout, Tensor] | None = None
        self._trace = trace
        self._streamed: dict[Unit, tuple[Layout, Use]] = {}
        self.allocate()

    def allocate(self) -> None:
        """Read the weights that stay in memory, and start to read the others ahead.

        Raises:
            TierFailed: a file can't be read; nothing is allocated then.
        """
        try:
            for slot, stored in self._slept.items():
                assert self._asleep is not None
                slot.lazy = Held(read_whole(stored, self._asleep))
            for slot in self.units.slots:
                if slot.tier != "disk":
                    made = materialize(slot.lazy, read_whole)
                    slot.install(rounded_rows(slot, made) if slot.packing is None else made)
            self._open_files()
        except BaseException:
            self._drop()
            raise
        self._slept = {}
        if self._asleep is not None:
            self._asleep.close()
            self._asleep = None

    def _open_files(self) -> None:
        self._files = OpenFiles(self._packed)
        for unit in self.units.order:
            away = [slot for slot in unit.slots if self.is_streamed(unit, slot)]
            if tensors := [s for slot in away for s in sources(slot.lazy)]:
                layout = lay_out(tensors)
                self._streamed[unit] = layout, layout.use(unit.name, self._files)
        if self._expert_bytes:
            self.experts = ExpertCache(
                self.units.experts,
                self._expert_bytes,
                self._num_readers,
                self._trace,
                self._files,
            )
        self.ring.reserve(self._ring_bytes)
        self._follow(self._order or list(self._streamed))

    def _follow(self, order: list[Unit]) -> None:
        """Read units ahead in this order of uses, forward after forward."""
        if order:
            self.ring.follow([self._streamed[unit][1] for unit in order], repeat=True)

    def release(self) -> None:
        """Free all memory until `allocate`; weights in memory that are in no file as they are go to one.

        Raises:
            TierFailed: they can't be written; nothing is freed then.
        """
        if self.is_asleep:
            return
        asleep, held = self.scratch.another(), dict[Slot, Stored]()
        try:
            for slot in self.units.slots:
                if isinstance(slot.lazy, Held):
                    held[slot] = asleep.keep(slot.name, slot.lazy.tensor)
        except BaseException:
            asleep.close()
            raise
        self._asleep, self._slept = asleep, held
        self._drop()

    @property
    def is_asleep(self) -> bool:
        """True between `release` and `allocate`."""
        return self._asleep is not None

    def replace(
        self,
        copies: list[tuple[Tensor, Tensor]],
        lazies: Mapping[Slot, tuple[LazyWeight, LazyWeight | None]],
        packed: Scratch | None,
    ) -> None:
        """Put new weights in place.

        Args:
            copies: (target, new) in memory.
            lazies: what `lazy` and `rows` of slots become.
            packed: the file of the disk tier from now on; None: the present one.
        """
        self.is_mixed = True
        if packed is not None:
            self._close_files()
        overwrite(copies)
        for slot, (lazy, rows) in lazies.items():
            slot.lazy, slot.rows = lazy, rows
        if packed is not None:
            if self._packed is not None:
                self._packed.close()
            self._packed = packed
            self._open_files()
        self.is_mixed = False

    @staticmethod
    def is_streamed(unit: Unit, slot: Slot) -> bool:
        """Return whether `slot` is read as a whole for `unit`; of an embedding on the disk, only rows are."""
        return slot.tier == "disk" and not unit.gathers

    @property
    def bytes_read(self) -> int:
        """Bytes read from files since it was opened, without those kept in memory."""
        return sum(map(self._trace.nbytes, ("wait weights", "read rows", "read experts")))

    @property
    def bytes_per_forward(self) -> int:
        """Read for each forward; rows of an embedding and experts come on top."""
        return sum(layout.nbytes for layout, _ in self._streamed.values())

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Record the order of units in this block; later, units are read ahead in this order."""
        self._seen = []
        try:
            yield
            if self._seen:
                self._order = self._seen
                self._follow(self._order)
        finally:
            self._seen = None

    @contextmanager
    def patched(self, unit: Unit) -> Iterator[None]:
        """Provide the parameters of `unit` in this block.

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
        layout, use = self._streamed.get(unit, (None, None))
        # Rows of quantized embeddings are unpacked when they are looked up.
        away = [s for s in unit.slots if s.tier == "disk" or (unit.gathers and s.packing)]
        if not away:
            yield
            return
        if unit.gathers:
            with _Lookup({slot.parameter: slot for slot in away}, self._rows):
                yield
            return
        if layout is not None and use is not None:
            if self._seen is not None:
                self._seen.append(unit)
            self._region = layout, self.ring.take(use)
        try:
            begin = perf_counter()
            for slot in away:
                slot.install(materialize(slot.lazy, self._read))  # unpacked, cast and stacked
            self._trace.add("make", "weights", unit.name, begin)
            yield
        finally:
            for slot in away:
                slot.install(None)
            self._region = None
            if use is not None:
                self.ring.give_back()

    def _read(self, stored: Stored) -> Tensor:
        """Return a tensor of the region in use."""
        assert self._region is not None
        layout, region = self._region
        at = layout.places[stored]
        found = region[at : at + stored.nbytes]
        odd = found.data_ptr() % _ALIGNED
        if odd and (odd % stored.dtype.itemsize or kernels.library() is None):
            found = found.clone()
        return found.view(stored.dtype).view(stored.shape)

    def _rows(self, slot: Slot, ids: Tensor) -> Tensor:
        """Return rows of an embedding `[V, H]`, read from its file or unpacked: `[len(ids), H]`."""
        lazy = slot.rows or slot.lazy
        if isinstance(lazy, Held):
            assert slot.packing is not None
            return unpack_rows(lazy.tensor, slot.packing, ids)
        begin, shape = perf_counter(), slot.parameter.shape
        rows = [torch.empty(0, *shape[1:], dtype=slot.parameter.dtype)]
        for row in ids.tolist():
            own = rows_of(lazy, row, row + 1)
            assert own is not None
            rows.append(materialize(own, self._read_row))
        nbytes = len(ids) * sum(stored.nbytes for stored in sources(lazy)) // shape[0]
        self._trace.add("read", "rows", slot.name, begin, nbytes)
        return rounded_rows(slot, torch.cat(rows))

    def _read_row(self, stored: Stored) -> Tensor:
        return read_whole(stored, self._files.of(stored.path, stored.stamp))

    def check_files(self) -> None:
        """Check that the files are unchanged since the model was opened.

        Raises:
            TierFailed: one was written to; the message names it.
        """
        self._files.check()

    def close(self) -> None:
        """End the readers and free everything; a second call does nothing."""
        self._drop()
        for scratch in (self._packed, self._asleep):
            if scratch is not None:
                scratch.close()

    def _close_files(self) -> None:
        self.ring.close()
        if self.experts is not None:
            self.experts.close()
        self._files.close()
        self._streamed = {}

    def _drop(self) -> None:
        self._close_files()
        for slot in self.units.slots:
            slot.install(None)
            if isinstance(slot.lazy, Held):
                slot.lazy = Held(slot.lazy.tensor.new_empty(0))


class _Lookup(TorchFunctionMode):
    """A torch-function override that reads the rows which an embedding's own forward looks up.

    Subclasses may scale rows or shift ids; only the call of `F.embedding` is replaced.
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
