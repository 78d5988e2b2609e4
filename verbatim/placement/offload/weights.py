"""The weights of an offloaded model: held in memory, or read while earlier units compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from verbatim import kernels
from verbatim.common.shield import Shield
from verbatim.placement.offload.cost import Plan
from verbatim.placement.offload.experts import ExpertCache
from verbatim.placement.offload.scratch import Scratch
from verbatim.placement.offload.stream import READERS, Lane, Ring, Use, use_of
from verbatim.placement.offload.trace import Trace
from verbatim.placement.offload.units import Slot, Unit, Units
from verbatim.quantization.matrix import pack_and_measure, rounded
from verbatim.weights.files import OpenFiles, pages, read_whole, round_to_pages
from verbatim.weights.lazy import InMemory, Stored, materialize, rows_of, sources
from verbatim.weights.update import WeightWriter, overwrite

_ALIGNED = 64  # bytes; torch's own products may round differently for less aligned matrices


class Weights:
    """Provides the parameters of a unit while it computes.

    Args:
        units: the model's units, with a tier for each slot. Slots in "gpu" and "cpu" are read immediately.
        plan: the plan, with the sizes of the rings and of the expert cache.
        scratch: file of K and V; further files are opened beside it.
        packed: file of the weights written to the disk tier, closed with this object; None: there are none.
        tidy: called after each unit.
        device: the device that computes, if its memory is not RAM; None: "gpu" and "cpu" are used in place.

    Attributes:
        experts: cache of experts that are read one by one; None: there are none.
        files: the open weight files.
        dropped: whether the weights are freed, by `drop`; `restore` reads them (as for a `Checkpoint`).

    Raises:
        TierFailed: a file can't be read.
    """

    def __init__(
        self,
        units: Units,
        plan: Plan,
        trace: Trace,
        scratch: Scratch,
        packed: Scratch | None,
        tidy: Callable[[], object],
        device: torch.device | None = None,
    ) -> None:
        self.units, self.plan, self.trace, self.scratch = units, plan, trace, scratch
        self._tidy = tidy
        self.is_mixed = False  # an update was interrupted: some weights are new, some old
        self.dropped = True
        self.experts: ExpertCache | None = None
        self.files = OpenFiles()
        self.ring = Ring("weights", READERS, trace, ahead=plan.overlap, device=device)
        # In the device's memory; filled by one thread, which takes the data from `ring`.
        self.device_ring: Ring | None = None
        self._lane = None if device is None else Lane(device)
        if self._lane is not None:
            self.device_ring = Ring("device weights", 1, trace, ahead=plan.overlap, lane=self._lane)
        self._in_place = ("gpu", "cpu") if device is None else ("gpu",)  # tiers used in place
        self._staged = {
            unit: [slot for slot in unit.slots if slot.tier not in self._in_place]
            for unit in units.order
        }
        self._packed = packed  # weights of the disk tier that no user file holds in this form
        self._drop_file: Scratch | None = None  # written by `drop`
        self._dropped_slots: dict[Slot, Stored] = {}  # weights in `_drop_file`
        self._streamed: dict[Unit, Use] = {}  # uses of the ring in RAM
        self._copied: dict[Unit, Use] = {}  # uses of the device ring
        # The order of use in a forward, for reading ahead.
        self._order = [unit for unit, slots in self._staged.items() if slots and not unit.gathers]
        self._order_seen: list[Unit] | None = None  # units used so far, while `learning`
        self.restore()

    def restore(self, _module: object = None) -> None:
        """Read the weights that stay in memory, if they were dropped, and start to read the others ahead.

        Raises:
            TierFailed: a file can't be read; all memory is freed then.
        """
        if not self.dropped:
            return
        try:
            for slot, stored in self._dropped_slots.items():
                assert self._drop_file is not None
                slot.lazy = InMemory(read_whole(stored, self._drop_file))
            for slot in self.units.slots:
                if slot.tier == "disk":
                    continue
                data, in_place = materialize(slot.lazy, read_whole), slot.tier in self._in_place
                if self._lane is not None:
                    data = self._lane.keep(data, on_device=in_place)
                if isinstance(slot.lazy, InMemory):
                    slot.lazy = InMemory(data)  # frees the other copy
                slot.data = data
                if in_place:
                    slot.install(data)
            self._open_files()
        except BaseException:
            self._drop()
            raise
        self._dropped_slots, self.dropped = {}, False
        if self._drop_file is not None:
            self._drop_file.close()
            self._drop_file = None

    def _open_files(self) -> None:
        self.files = OpenFiles(self._packed)
        for unit, staged in self._staged.items():
            if unit.gathers or not staged:
                continue
            if stored := [s for slot in staged if slot.tier == "disk" for s in sources(slot.lazy)]:
                self._streamed[unit] = use_of(unit.name, stored, self.files)
            if self.device_ring is not None:
                nbytes = sum(round_to_pages(slot.tier_bytes) for slot in staged)
                self._copied[unit] = Use(unit.name, nbytes, [partial(self._copy, unit)])
        if nbytes := self.plan.memory.get("experts", 0):
            self.experts = ExpertCache(
                self.units.experts, nbytes, self.plan.overlap, self.trace, self.files
            )
        self.ring.reserve(self.plan.memory.get("ring", 0))
        if self.device_ring is not None:
            self.device_ring.reserve(self.plan.memory.get("GPU ring", 0))
        self._read_ahead()

    def _read_ahead(self) -> None:
        """Read units ahead in their order, forward after forward."""
        if self.device_ring is not None:
            self.device_ring.drop()  # its thread takes from `ring`
        if read := [self._streamed[unit] for unit in self._order if unit in self._streamed]:
            self.ring.follow(read, repeat=True)
        if self.device_ring is not None and self._order:
            self.device_ring.follow([self._copied[unit] for unit in self._order], repeat=True)

    def drop(self, _module: object) -> None:
        """Free all memory until `restore`; weights that no file holds in this form are written to disk.

        Raises:
            TierFailed: the file can't be written; nothing is freed then.
        """
        if self.dropped:
            return
        drop_file, held = self.scratch.open_sibling(), dict[Slot, Stored]()
        try:
            for slot in self.units.slots:
                if isinstance(slot.lazy, InMemory):
                    held[slot] = drop_file.store(slot.name, slot.lazy.tensor)
        except BaseException:
            drop_file.close()
            raise
        self._drop_file, self._dropped_slots, self.dropped = drop_file, held, True
        self._drop()

    def replace(
        self,
        new: Mapping[Slot, InMemory | Stored],
        buffers: list[tuple[Tensor, Tensor]],
        packed: Scratch | None,
    ) -> None:
        """Replace weights, and buffers in pairs (target, new values).

        Args:
            packed: new file of the disk tier, closed with this object, even on an error; None: unchanged.
        """
        self.is_mixed = True
        if packed is not None:
            self._close_files()
            if self._packed is not None:
                self._packed.close()
            self._packed = packed
        elif self.device_ring is not None:
            self.device_ring.drop()  # it may hold copies of old weights
        copies = [*buffers]
        for slot, lazy in new.items():
            if isinstance(lazy, InMemory):
                assert slot.data is not None
                copies.append((slot.data, lazy.tensor))
                lazy = InMemory(slot.data)
            slot.lazy = lazy
        overwrite(copies)
        if packed is not None:
            self._open_files()
        self.is_mixed = False

    @property
    def bytes_read(self) -> int:
        """Bytes read from files since the model was opened, without weights that stay in memory."""
        return sum(map(self.trace.nbytes, ("wait weights", "read rows", "read experts")))

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Record the order in which the block uses units, in which they are read ahead from then on."""
        self._order_seen = []
        try:
            yield
            if self._order_seen:
                self._order = self._order_seen
                self._read_ahead()
        finally:
            self._order_seen = None

    @contextmanager
    def patched(self, unit: Unit) -> Iterator[None]:
        """Install the parameters of `unit` for the duration of the block.

        Raises:
            TierFailed: a file can't be read.
        """
        staged = self._staged[unit]
        with ExitStack() as last_first:
            last_first.callback(self._tidy)
            if staged and unit.gathers:
                # Ctrl-C is deferred: it could leave torch's stack of function modes unbalanced.
                last_first.enter_context(Shield().up())
                slots = {slot.parameter: slot for slot in staged}
                last_first.enter_context(_RowReads(slots, self._rows))
            elif staged:
                if self._order_seen is not None:
                    self._order_seen.append(unit)
                source = self._in_ram(unit) if self.device_ring is None else self._on_device(unit)
                data = last_first.enter_context(source)
                for slot in staged:
                    last_first.callback(slot.install, None)
                    slot.install(data[slot])
            yield

    @contextmanager
    def _in_ram(self, unit: Unit) -> Iterator[dict[Slot, Tensor]]:
        """Yield the weights of `unit` that are not used in place, in RAM; may raise TierFailed."""
        with ExitStack() as last_first:
            data = {s: s.data for s in self._staged[unit] if s.data is not None}
            if (use := self._streamed.get(unit)) is not None:
                read = partial(_read, use, self.ring.take(use))
                last_first.callback(self.ring.release)
                begin = perf_counter()
                for slot in unit.slots:
                    if slot.tier == "disk":  # decoded, cast or stacked
                        data[slot] = materialize(slot.lazy, read)
                self.trace.add("make", "weights", unit.name, begin)
            yield data
            data.clear()

    @contextmanager
    def _on_device(self, unit: Unit) -> Iterator[dict[Slot, Tensor]]:
        """Yield the weights of `unit` that are not used in place, in the device's memory."""
        assert self.device_ring is not None
        region = self.device_ring.take(self._copied[unit])
        try:
            yield dict(self._places(unit, region))
        finally:
            self.device_ring.release()

    def _copy(self, unit: Unit, region: Tensor) -> int:
        """Copy the weights of `unit` to device memory, in the ring's thread; return their bytes."""
        assert self._lane is not None
        with self._in_ram(unit) as data:
            for slot, target in self._places(unit, region):
                source = data[slot]
                target.view(source.dtype).view(source.shape).copy_(source, non_blocking=True)
            self._lane.wait()
        return region.nbytes

    def _places(self, unit: Unit, region: Tensor) -> Iterator[tuple[Slot, Tensor]]:
        """Yield the slots of `unit` that are not used in place, and their tensors in device memory."""
        at = 0
        for slot in self._staged[unit]:
            data, like = region[at : at + slot.tier_bytes], slot.target
            yield slot, data.view(like.dtype).view(like.shape)
            at += round_to_pages(slot.tier_bytes)

    def _rows(self, slot: Slot, ids: Tensor) -> Tensor:
        """Return the rows `ids` `[len(ids), H]` of an embedding `[V, H]`, from its file or from RAM."""
        if slot.data is not None:
            return slot.data.index_select(0, ids.cpu())
        begin = perf_counter()
        lazies: list[Any] = [rows_of(slot.lazy, row, row + 1) for row in ids.tolist()]
        tensors = (stored for lazy in lazies for stored in sources(lazy))
        use = use_of(slot.name, tensors, self.files)
        memory = pages(use.nbytes)
        for read in use.reads:
            read(memory)
        rows = [torch.empty(0, *slot.parameter.shape[1:], dtype=slot.parameter.dtype)]
        rows += [materialize(lazy, partial(_read, use, memory)) for lazy in lazies]
        nbytes = sum(stored.nbytes for stored in use.places)
        self.trace.add("read", "rows", slot.name, begin, nbytes)
        output = torch.cat(rows)
        return output if slot.rounding is None else rounded(output, slot.rounding, slot.name)

    def close(self) -> None:
        """End the readers and free everything. May be called again."""
        self._drop()
        for scratch in (self._packed, self._drop_file):
            if scratch is not None:
                scratch.close()

    def _close_files(self) -> None:
        if self.device_ring is not None:
            self.device_ring.close()
        self.ring.close()
        if self.experts is not None:
            self.experts.close()
        self.files.close()
        self._streamed, self._copied = {}, {}

    def _drop(self) -> None:
        self._close_files()
        if self._lane is not None:
            self._lane.release()
        for slot in self.units.slots:
            slot.install(None)
            slot.data = None
            if isinstance(slot.lazy, InMemory):
                slot.lazy = InMemory(slot.lazy.tensor.new_empty(0))


def _read(use: Use, region: Tensor, stored: Stored) -> Tensor:
    """Return a tensor that was read into a region: a view, or a copy if it is misaligned."""
    at = use.places[stored]
    data = region[at : at + stored.nbytes]
    misaligned_by = data.data_ptr() % _ALIGNED
    if misaligned_by and (misaligned_by % stored.dtype.itemsize or kernels.library() is None):
        data = data.clone()
    return data.view(stored.dtype).view(stored.shape)


class _RowReads(TorchFunctionMode):
    """Reads only the rows that an embedding's own forward uses, which may scale rows or shift ids.

    Calls of `F.embedding` and indexing are replaced.
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
            weight, index = args
            return self._look_up(weight, torch.arange(len(weight), device=index.device)[index])
        return func(*args, **kwargs)

    def _look_up(self, weight: Any, ids: Tensor) -> Tensor:
        unique_ids, inverse = torch.unique(ids, return_inverse=True)
        rows: Tensor = self._rows(self._slots[weight], unique_ids).to(ids.device)
        return rows[inverse]


class TierWriter(WeightWriter):
    """Writes new weights: in place in memory, and to a new file in the disk tier.

    Args:
        weights: weights of a model, or of a part of one.
        targets: state dict of its module before quantization.

    Attributes:
        packed: names of weights that are held quantized or on the disk.
    """

    def __init__(self, weights: Weights, targets: Mapping[str, Tensor]) -> None:
        self._weights = weights
        self._shield = Shield()  # defers Ctrl-C until all weights are written
        self._reset()
        self.squares = {}
        owned: dict[Tensor, list[Slot]] = {}
        for slot in weights.units.slots:
            owned.setdefault(slot.cut[0] if slot.cut else slot.parameter, []).append(slot)
        # Tied weights are listed once; a parameter without slots belongs to another part.
        self._slots = {n: owned.pop(target) for n, target in targets.items() if target in owned}
        self._buffers = {n: t for n, t in targets.items() if not isinstance(t, nn.Parameter)}
        self.packed = [
            name
            for name, slots in self._slots.items()
            if any(slot.tier == "disk" or slot.packing is not None for slot in slots)
        ]
        self.exact = [n for n in (*self._slots, *self._buffers) if n not in set(self.packed)]

    def _reset(self) -> None:
        self._new_file: Scratch | None = None
        self._new: dict[Slot, InMemory | Stored] = {}

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Quantize new weights, and write those of the disk tier to a file; `write` installs them.

        Raises:
            TierFailed: the disk tier has no room.
            ModelError: a weight can't be quantized.
        """
        names = [name for name in self.packed if name in tensors]
        if any(slot in self._new for name in names for slot in self._slots[name]):
            self.drop()  # left by an interrupted update
        if self._new_file is None:
            self._new_file = self._weights.scratch.open_sibling()
        try:
            for name in names:
                self._prepare(name, tensors[name])
        except BaseException:
            self.drop()
            raise

    def _prepare(self, name: str, tensor: Tensor) -> None:
        for slot in self._slots[name]:
            weight = tensor if slot.cut is None else tensor[slot.cut[1] : slot.cut[2]]
            data = weight.detach().to(slot.parameter.dtype).contiguous()
            if slot.packing is not None:
                data, self.squares[slot.name] = pack_and_measure(data, slot.packing, slot.name)
            if slot.tier == "disk":
                assert self._new_file is not None
                self._new[slot] = self._new_file.store(slot.name, data)
            else:
                self._new[slot] = InMemory(data)

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Write the unquantized weights in memory, and install all prepared ones."""
        try:
            for name in self.exact:
                if name in tensors and name in self._slots:
                    self._prepare(name, tensors[name])
        except BaseException:
            self.drop()
            raise
        buffers = [(old, tensors[name]) for name, old in self._buffers.items() if name in tensors]
        with self._shield.up():
            new, new_file = self._new, self._new_file
            self._reset()
            self._weights.replace(new, buffers, new_file)

    def drop(self) -> None:
        """Discard the prepared weights."""
        if self._new_file is not None:
            self._new_file.close()
        self._reset()
