"""Hidden states of micro-batches that wait for their turn, on the disk meanwhile."""

from __future__ import annotations

import ctypes
from time import perf_counter
from typing import Any
from weakref import ref

from torch import Tensor, UntypedStorage, nn

from verbatim.placement.offload.choice import Percents
from verbatim.placement.offload.kv import deal
from verbatim.placement.offload.schedule import Part
from verbatim.placement.offload.scratch import Scratch
from verbatim.placement.offload.trace import Trace
from verbatim.placement.offload.units import Unit
from verbatim.placement.offload.visits import Traffic
from verbatim.weights.files import up


class HiddenStates:
    """`Activations` that deals micro-batches out to tiers: those of the disk wait without their memory.

    What goes is the hidden state that a part's next unit is called with. Everything in the part's suspended
    forward that refers to it goes on doing so: its storage is emptied, and filled again in time. What else
    a forward holds (positions, masks, what was computed once for all layers) stays.

    Tensors that belong to the module, that can't be emptied, or that two parts share stay as well. Of "gpu"
    and "cpu", which are both the memory that computes, nothing has to go. Nothing is read ahead: hidden
    states are small beside the weights of a layer.

    Args:
        module: whose parameters and buffers are not to be touched.
        percents: of the micro-batches, in (gpu, cpu, disk).
        scratch: room on the disk.
        trace: takes note of reads and writes.

    Attributes:
        traffic: of the disk tier; all waiting is between layers.
    """

    def __init__(
        self, module: nn.Module, percents: Percents, scratch: Scratch, trace: Trace
    ) -> None:
        self.traffic = Traffic()
        self._module, self._percents = module, percents
        self._scratch, self._trace = scratch, trace
        self._rooms: dict[int, tuple[int, int]] = {}  # of each part's number: where, bytes
        # By number, until the next forward: parts of one that broke off are never brought back.
        self._away: dict[int, tuple[ref[Part], UntypedStorage, int]] = {}
        self._tiers: list[str] = []
        self._before: Unit | None = None
        self._owned: set[int] = set()

    def send(self, part: Part) -> None:
        """Write the hidden state of a part down and free its memory.

        Raises:
            TierFailed: it can't be written, or there is no room.
        """
        if self._tier(part.number) != "disk":
            return
        storage = self._storage_of(part)
        if storage is None:
            return
        begin, nbytes = perf_counter(), storage.nbytes()
        self._scratch.write_from([_memory(storage)], self._room(part.number, nbytes))
        self._away[part.number] = ref(part), storage, nbytes
        storage.resize_(0)
        self.traffic.bytes_written += nbytes
        self.traffic.store_s += perf_counter() - begin
        self._trace.add("write", f"hidden #{part.number}", begin, perf_counter())

    def bring(self, part: Part) -> None:
        """Read it back; nothing happens where it stayed.

        Raises:
            TierFailed: it can't be read.
        """
        if part.number not in self._away:
            return
        owner, storage, nbytes = self._away[part.number]
        if owner() is not part:
            return
        begin = perf_counter()
        storage.resize_(nbytes)
        self._scratch.read_into([_memory(storage)], self._rooms[part.number][0])
        del self._away[part.number]
        self.traffic.bytes_read += nbytes
        self.traffic.load_s += perf_counter() - begin
        self._trace.add("read", f"hidden #{part.number}", begin, perf_counter())

    def _tier(self, number: int) -> str:
        if number >= len(self._tiers):
            self._tiers = deal([1] * (number + 1), self._percents)
        return self._tiers[number]

    def _room(self, number: int, nbytes: int) -> int:
        at, has = self._rooms.get(number, (0, 0))
        if has < nbytes:
            has = up(nbytes + nbytes // 4)
            at = self._scratch.reserve(has)
            self._rooms[number] = at, has
        return at

    def _storage_of(self, part: Part) -> UntypedStorage | None:
        args, kwargs = part.inputs
        hidden: Any = args[0] if args else kwargs.get("hidden_states")
        if type(hidden) is not Tensor or not hidden.is_floating_point() or not hidden.numel():
            return None
        storage = hidden.untyped_storage()
        if not storage.resizable() or storage._cdata in self._kept(part.unit):
            return None
        shared = any(storage._cdata == other._cdata for _, other, _ in self._away.values())
        return None if shared else storage

    def _kept(self, unit: Unit | None) -> set[int]:
        """The storages that belong to the module, while parts come to stand before `unit`."""
        if unit is not self._before or not self._owned:
            tensors = (*self._module.parameters(), *self._module.buffers())
            self._before, self._owned = unit, {t.untyped_storage()._cdata for t in tensors}
        return self._owned


def _memory(storage: UntypedStorage) -> memoryview:
    # By its address: a tensor over it would be one of inference mode, or not, at the wrong time.
    array = (ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())
    return memoryview(array).cast("B")
