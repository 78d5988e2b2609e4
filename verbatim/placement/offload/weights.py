"""The weights of a model, of which only those that are needed now are in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from verbatim import kernels
from verbatim.model.quantize import rounded
from verbatim.placement.offload.experts import ExpertCache
from verbatim.placement.offload.lane import Lane
from verbatim.placement.offload.plan import Plan
from verbatim.placement.offload.scratch import Scratch
from verbatim.placement.offload.stream import READERS, Layout, Ring, Use, lay_out
from verbatim.placement.offload.trace import Trace
from verbatim.placement.offload.units import Slot, Unit, Units
from verbatim.shield import Shield
from verbatim.weights.files import OpenFiles, bytes_of, pages, read_whole, up
from verbatim.weights.lazy import Held, LazyWeight, Stored, materialize, rows_of, sources
from verbatim.weights.update import overwrite

_ALIGNED = 64  # bytes; what torch's own products may round differently without


class Weights:
    """Provides the parameters of a unit while it computes.

    Args:
        units: with a tier for each slot. Those in "gpu" and "cpu" are read at once.
        plan: with the memory in which the others are read ahead, and that of experts, read one by one.
        trace: records reads and waits.
        scratch: has K and V; further files are opened beside it.
        packed: holds weights that were written for the disk tier, if any were; closed with this.
        tidy: called after each unit.
        device: that computes, if its memory is not RAM; None: "gpu" and "cpu" are both RAM, used in place.

    Attributes:
        experts: those, if there are any.
        files: the open files of weights.
        dropped: as of `Checkpoint`, whose place this takes: `drop` frees the weights, `restore` reads them.

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
        self.units = units
        self.is_mixed = False  # an update of them went wrong
        self.dropped = True
        self.experts: ExpertCache | None = None
        self.plan, self._tidy = plan, tidy
        self.ring = Ring("weights", READERS, trace, ahead=plan.overlap, device=device)
        # The next hop, whose one thread takes what it copies from `ring`.
        self.device_ring: Ring | None = None
        self._lane = None if device is None else Lane(device)
        if self._lane is not None:
            self.device_ring = Ring("device weights", 1, trace, ahead=plan.overlap, lane=self._lane)
        self._near = ("gpu", "cpu") if device is None else ("gpu",)  # tiers that are used in place
        self._copied: dict[Unit, Use] = {}  # to the device
        self.scratch = scratch
        self._packed = packed  # weights of the disk tier that are in no file of the user's
        self._asleep: Scratch | None = None
        self._slept: dict[Slot, Stored] = {}  # weights that are in no file otherwise
        self.files = OpenFiles()
        self._order: list[Unit] = []  # as a forward uses them
        self._seen: list[Unit] | None = None  # those used so far, while their order is recorded
        self.trace = trace
        self._streamed: dict[Unit, tuple[Layout, Use]] = {}
        self.restore()

    def restore(self, _module: object = None) -> None:
        """Read the weights that stay in memory, unless they are there, and start to read the others ahead.

        Raises:
            TierFailed: a file can't be read; nothing is allocated then.
        """
        if not self.dropped:
            return
        try:
            for slot, stored in self._slept.items():
                assert self._asleep is not None
                slot.lazy = Held(read_whole(stored, self._asleep))
            for slot in self.units.slots:
                if slot.tier != "disk":
                    self._hold(slot, materialize(slot.lazy, read_whole))
            self._open_files()
        except BaseException:
            self._drop()
            raise
        self._slept, self.dropped = {}, False
        if self._asleep is not None:
            self._asleep.close()
            self._asleep = None

    def _hold(self, slot: Slot, data: Tensor) -> None:
        """Keep a weight in its tier, and install it if it is used there."""
        if self._lane is not None:
            data = self._lane.keep(data, near=slot.tier in self._near)
        slot.held = data
        if isinstance(slot.lazy, Held):
            slot.lazy = Held(data)  # not in two tiers
        if slot.tier in self._near:
            slot.install(data)

    def _away(self, unit: Unit) -> list[Slot]:
        """Return the slots of a unit that are not used where they are."""
        return [slot for slot in unit.slots if slot.tier not in self._near]

    def _open_files(self) -> None:
        self.files = OpenFiles(self._packed)
        for unit in self.units.order:
            if unit.gathers:
                continue
            on_disk = [slot.lazy for slot in unit.slots if slot.tier == "disk"]
            if on_disk:
                layout = lay_out(stored for lazy in on_disk for stored in sources(lazy))
                self._streamed[unit] = layout, layout.use(unit.name, self.files)
            if self.device_ring is not None and (away := self._away(unit)):
                nbytes = sum(up(slot.tier_bytes) for slot in away)
                self._copied[unit] = Use(unit.name, nbytes, [partial(self._copy, unit)])
        if nbytes := self.plan.memory.get("experts", 0):
            self.experts = ExpertCache(
                self.units.experts, nbytes, self.plan.overlap, self.trace, self.files
            )
        self.ring.reserve(self.plan.memory.get("ring", 0))
        if self.device_ring is not None:
            self.device_ring.reserve(self.plan.memory.get("GPU ring", 0))
        self._follow(self._order or [unit for unit in self.units.order if self._moves(unit)])

    def _moves(self, unit: Unit) -> bool:
        return unit in self._streamed or unit in self._copied

    def _follow(self, order: list[Unit]) -> None:
        """Read units ahead in this order of uses, forward after forward."""
        if self.device_ring is not None:
            self.device_ring.drop()  # its thread takes from the other one
        if read := [self._streamed[unit][1] for unit in order if unit in self._streamed]:
            self.ring.follow(read, repeat=True)
        if self.device_ring is not None and order:
            self.device_ring.follow([self._copied[unit] for unit in order], repeat=True)

    def drop(self, _module: object) -> None:
        """Free all memory until `restore`; weights in memory that are in no file as they are go to one.

        Raises:
            TierFailed: they can't be written; nothing is freed then.
        """
        if self.dropped:
            return
        asleep, held = self.scratch.another(), dict[Slot, Stored]()
        try:
            for slot in self.units.slots:
                if isinstance(slot.lazy, Held):
                    held[slot] = asleep.keep(slot.name, slot.lazy.tensor)
        except BaseException:
            asleep.close()
            raise
        self._asleep, self._slept, self.dropped = asleep, held, True
        self._drop()

    def replace(
        self,
        copies: list[tuple[Tensor, Tensor]],
        lazies: Mapping[Slot, LazyWeight],
        packed: Scratch | None,
    ) -> None:
        """Put new weights in place.

        Args:
            copies: (target, new) in memory.
            lazies: what `lazy` of slots becomes.
            packed: the file of the disk tier from now on; None: the present one.
        """
        self.is_mixed = True
        if packed is not None:
            self._close_files()
        overwrite(copies)
        for slot, lazy in lazies.items():
            slot.lazy = lazy
        if packed is not None:
            if self._packed is not None:
                self._packed.close()
            self._packed = packed
            self._open_files()
        self.is_mixed = False

    @property
    def bytes_read(self) -> int:
        """Bytes read from files since it was opened, without those kept in memory."""
        return sum(map(self.trace.nbytes, ("wait weights", "read rows", "read experts")))

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
        away = self._away(unit)
        with ExitStack() as last_first:
            last_first.callback(self._tidy)
            if away and unit.gathers:
                # Ctrl-C could leave torch with an override that has ended, or without one that has not.
                last_first.enter_context(Shield().up())
                own = {slot.parameter: slot for slot in away}
                last_first.enter_context(_Lookup(own, self._rows))
            elif away:
                if self._seen is not None:
                    self._seen.append(unit)
                source = self._in_ram(unit) if self.device_ring is None else self._on_device(unit)
                data = last_first.enter_context(source)
                for slot in away:
                    last_first.callback(slot.install, None)
                    slot.install(data[slot])
            yield

    @contextmanager
    def _in_ram(self, unit: Unit) -> Iterator[dict[Slot, Tensor]]:
        """Yield the weights of `unit` that are not used where they are, in RAM.

        Raises:
            TierFailed: they can't be read.
        """
        with ExitStack() as last_first:
            found = {s: s.held for s in self._away(unit) if s.held is not None}
            if unit in self._streamed:
                layout, use = self._streamed[unit]
                read = partial(_read, layout, self.ring.take(use))
                last_first.callback(self.ring.give_back)
                begin = perf_counter()
                for slot in unit.slots:
                    if slot.tier == "disk":  # unpacked, cast and stacked
                        found[slot] = materialize(slot.lazy, read)
                self.trace.add("make", "weights", unit.name, begin)
            yield found
            found.clear()

    def _copy(self, unit: Unit, region: Tensor) -> int:
        """Copy the weights of `unit` to a region of the device's memory, in a thread; return their bytes."""
        assert self._lane is not None
        at = 0
        with self._in_ram(unit) as data:
            for slot in self._away(unit):
                target = region[at : at + slot.tier_bytes].view(data[slot].dtype)
                target.view(data[slot].shape).copy_(data[slot], non_blocking=True)
                at += up(slot.tier_bytes)
            self._lane.wait()
        return at

    @contextmanager
    def _on_device(self, unit: Unit) -> Iterator[dict[Slot, Tensor]]:
        """Yield the same in the device's memory."""
        assert self.device_ring is not None
        region, at, found = self.device_ring.take(self._copied[unit]), 0, dict[Slot, Tensor]()
        try:
            for slot in self._away(unit):
                data, like = region[at : at + slot.tier_bytes], slot.parameter
                if slot.packing is None:
                    data = data.view(like.dtype).view(like.shape)
                found[slot] = data
                at += up(slot.tier_bytes)
            yield found
        finally:
            self.device_ring.give_back()

    def _rows(self, slot: Slot, ids: Tensor) -> Tensor:
        """Return rows of an embedding `[V, H]`, read from its file: `[len(ids), H]`.

        Args:
            ids: without repetitions.
        """
        if slot.held is not None:
            return slot.held.index_select(0, ids.cpu())
        begin = perf_counter()
        lazies: list[Any] = [rows_of(slot.lazy, row, row + 1) for row in ids.tolist()]
        layout = lay_out(stored for lazy in lazies for stored in sources(lazy))
        memory = pages(layout.nbytes)
        use, view = layout.use(slot.name, self.files), bytes_of(memory)
        for read in use.reads:
            read(view)
        rows = [torch.empty(0, *slot.parameter.shape[1:], dtype=slot.parameter.dtype)]
        rows += [materialize(lazy, partial(_read, layout, memory)) for lazy in lazies]
        nbytes = sum(stored.nbytes for stored in layout.places)
        self.trace.add("read", "rows", slot.name, begin, nbytes)
        found = torch.cat(rows)
        return found if slot.rounding is None else rounded(found, slot.rounding, slot.name)

    def close(self) -> None:
        """End the readers and free everything; a second call does nothing."""
        self._drop()
        for scratch in (self._packed, self._asleep):
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
            slot.held = None
            if isinstance(slot.lazy, Held):
                slot.lazy = Held(slot.lazy.tensor.new_empty(0))


def _read(layout: Layout, region: Tensor, stored: Stored) -> Tensor:
    """Return a tensor of a region of memory."""
    at = layout.places[stored]
    found = region[at : at + stored.nbytes]
    odd = found.data_ptr() % _ALIGNED
    if odd and (odd % stored.dtype.itemsize or kernels.library() is None):
        found = found.clone()
    return found.view(stored.dtype).view(stored.shape)


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
            return self._look_up(weight, torch.arange(len(weight), device=chosen.device)[chosen])
        return func(*args, **kwargs)

    def _look_up(self, weight: Any, ids: Tensor) -> Tensor:
        wanted, place = torch.unique(ids, return_inverse=True)
        rows: Tensor = self._rows(self._slots[weight], wanted).to(ids.device)
        return rows[place]
