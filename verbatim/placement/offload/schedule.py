"""The execution order of an offloaded forward: each unit is installed once for all micro-batches.

The arguments of layers have shapes that depend on the architecture, so they can't be sliced in a generic way.
Instead, each micro-batch runs the module's own forward in a greenlet that pauses before every unit.
"""

from __future__ import annotations

import contextvars
import ctypes
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor, UntypedStorage, nn

from verbatim.batch import Batch
from verbatim.model.context import ForwardContext, activate
from verbatim.model.patching import WeightGate
from verbatim.placement.micro_batches import split_batch
from verbatim.placement.offload.choice import Percents, assign_tiers
from verbatim.placement.offload.scratch import Scratch
from verbatim.placement.offload.trace import Trace
from verbatim.placement.offload.units import Unit
from verbatim.placement.offload.weights import Weights
from verbatim.weights.files import round_to_pages


class SuspendedForward(greenlet):  # type: ignore[misc]
    """The suspended forward of one micro-batch.

    Attributes:
        unit: the unit that runs next; None when the forward is done.
        inputs: (args, kwargs) of the call of that unit.
        output: the return value of the forward.
    """

    def __init__(self, number: int, context: ForwardContext, forward: Callable[[], Any]) -> None:
        super().__init__()
        self.number = number
        self.unit: Unit | None = None
        self.inputs: tuple[Any, ...] = ()
        self.output: Any = None
        self._context = context
        self._forward = forward
        self.gr_context = contextvars.copy_context()

    def resume(self) -> None:
        """Resume the forward until it pauses before the next unit, or ends."""
        with activate(self._context):
            self.switch()

    def stop_before(self, unit: Unit, inputs: tuple[Any, ...]) -> None:
        """Pause before `unit`; called from within the forward."""
        self.unit, self.inputs = unit, inputs
        self.parent.switch()
        self.inputs = ()

    def end(self) -> None:
        """Unwind the forward if it has not ended, and drop its output."""
        if self:
            with activate(self._context):
                self.throw(GreenletExit)
        self.output = None

    def run(self) -> None:
        """Run the forward, in this greenlet."""
        self.output = self._forward()
        self.unit = None


class HiddenStates:
    """Moves the hidden states of waiting micro-batches to their tiers and back.

    Only the hidden states passed to a part's next unit are moved: their storage is emptied and refilled in
    place, so all references in the suspended forward stay valid. Not moved are other values that a forward
    holds (positions, masks, values computed once for all layers), tensors of the module, and storages that
    can't be resized or that two parts share. Without a GPU, "gpu" and "cpu" are both RAM. Nothing is read
    ahead: hidden states are small compared to the weights of a layer.

    Args:
        module: the model; its parameters and buffers are never moved.
        percents: shares of the micro-batches in (gpu, cpu, disk).
        scratch: file of the disk tier.
        is_separate: whether the "gpu" tier is a device's own memory, separate from RAM.
    """

    def __init__(
        self,
        module: nn.Module,
        percents: Percents,
        scratch: Scratch,
        trace: Trace,
        *,
        is_separate: bool = False,
    ) -> None:
        self._module, self._percents = module, percents
        self._scratch, self._trace, self._is_separate = scratch, trace, is_separate
        self._moves = percents[2] > 0 or (is_separate and percents[1] > 0)
        self._extents: dict[int, tuple[int, int]] = {}  # by part number: offset in the file, bytes
        # By part: the emptied storage, its size in bytes, and its copy in RAM; None: the copy is on the disk.
        self._moved = WeakKeyDictionary[
            SuspendedForward, tuple[UntypedStorage, int, UntypedStorage | None]
        ]()
        self._owned_unit: Unit | None = None  # the unit at which `_owned` was computed
        self._owned: set[int] = set()  # storages of the module's parameters and buffers

    def evict(self, part: SuspendedForward) -> None:
        """Write the hidden states of a part to its tier and free their memory; may raise TierFailed."""
        if not self._moves:
            return
        tier = assign_tiers([1] * (part.number + 1), self._percents)[-1]
        if tier == "gpu" or (tier == "cpu" and not self._is_separate):
            return
        if (storage := self._storage_of(part)) is None:
            return
        begin, nbytes, ram_copy = perf_counter(), storage.nbytes(), None
        data = (
            storage.clone() if self._is_separate and storage.device.type == "cpu" else storage.cpu()
        )
        if tier == "cpu":
            ram_copy = data
        else:
            offset, capacity = self._extents.get(part.number, (0, 0))
            if capacity < nbytes:
                capacity = round_to_pages(nbytes + nbytes // 4)
                offset = self._scratch.reserve(capacity)
                self._extents[part.number] = offset, capacity
            self._scratch.write_from([_memory(data)], offset)
        self._moved[part] = storage, nbytes, ram_copy
        storage.resize_(0)
        self._trace.add("write", "hidden states", f"hidden #{part.number}", begin, nbytes)

    def restore(self, part: SuspendedForward) -> None:
        """Restore the hidden states of a part, if they were moved; may raise TierFailed."""
        if part not in self._moved:
            return
        (storage, nbytes, data), begin = self._moved[part], perf_counter()
        storage.resize_(nbytes)
        if data is None:
            data = UntypedStorage(nbytes) if storage.device.type != "cpu" else storage
            self._scratch.read([_memory(data)], self._extents[part.number][0], direct=False)
        if data is not storage:
            storage.copy_(data)
        del self._moved[part]
        self._trace.add("read", "hidden states", f"hidden #{part.number}", begin, nbytes)

    def _storage_of(self, part: SuspendedForward) -> UntypedStorage | None:
        args, kwargs = part.inputs
        hidden: Any = args[0] if args else kwargs.get("hidden_states")
        if type(hidden) is not Tensor or not hidden.is_floating_point() or not hidden.numel():
            return None
        storage = hidden.untyped_storage()
        # Once per unit, as a model has thousands of tensors.
        if part.number == 0 or part.unit is not self._owned_unit:
            tensors = (*self._module.parameters(), *self._module.buffers())
            self._owned_unit, self._owned = part.unit, {t.untyped_storage()._cdata for t in tensors}
        moved = {other._cdata for other, *_ in self._moved.values()}
        is_shared = storage._cdata in self._owned or storage._cdata in moved
        return storage if storage.resizable() and not is_shared else None


def _memory(storage: UntypedStorage) -> memoryview:
    # A tensor that views the storage could have the wrong inference mode.
    array = (ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())
    return memoryview(array).cast("B")


class BlockSchedule:
    """The execution order of a decoder: layer by layer, each layer for all micro-batches.

    Args:
        weights: installs the parameters of units; its plan has the sizes of micro-batches.
        hidden: moves hidden states to their tiers between two units.
    """

    def __init__(self, weights: Weights, hidden: HiddenStates) -> None:
        self._plan, self.weights, self._hidden = weights.plan, weights, hidden

    def learning(self) -> AbstractContextManager[None]:
        """Record the order in which units are used in the block."""
        return self.weights.learning()

    def cut(self, batch: Batch) -> list[Batch]:
        """Return the micro-batches of a batch."""
        return split_batch(batch, self._plan.batch_size, self._plan.micro_tokens)

    def run(
        self, contexts: Sequence[ForwardContext], forwards: Sequence[Callable[[], Any]]
    ) -> list[Any]:
        """Run `forwards`, each under its forward context, and return their outputs."""
        parts = [
            SuspendedForward(i, *pair)
            for i, pair in enumerate(zip(contexts, forwards, strict=True))
        ]
        try:
            for part in parts:
                self._advance(part, None, parts)
            while waiting := [part for part in parts if part.unit is not None]:
                unit = waiting[0].unit
                assert unit is not None
                ready = [part for part in waiting if part.unit is unit]
                with self.weights.patched(unit):
                    for num_later, part in zip(reversed(range(len(ready))), ready, strict=True):
                        if self.weights.experts is not None:
                            self.weights.experts.later_parts = num_later
                        self._advance(part, unit, waiting)
            return [part.output for part in parts]
        finally:
            for part in parts:
                part.end()

    def _advance(
        self, part: SuspendedForward, unit: Unit | None, others: list[SuspendedForward]
    ) -> None:
        self._hidden.restore(part)
        begin = perf_counter()
        part.resume()
        name = f"start #{part.number}" if unit is None else f"{unit.name} #{part.number}"
        self.weights.trace.add("compute", "weights", name, begin)
        if part.unit is not None and len(others) > 1:  # a single part never waits
            self._hidden.evict(part)


class UnitGate(WeightGate):
    """The forward of a unit's module.

    In a `BlockSchedule` it pauses until the schedule has installed the parameters. Elsewhere (inspection of
    the model, a trial run) it installs them itself.
    """

    def __init__(self, unit: Unit, weights: Weights) -> None:
        super().__init__(unit.module)
        self._unit, self._weights = unit, weights

    def open(self) -> AbstractContextManager[None]:
        return self._weights.patched(self._unit)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        part = getcurrent()
        # An embedding reads only the rows of its micro-batch, so nothing is shared.
        if isinstance(part, SuspendedForward) and not self._unit.gathers:
            part.stop_before(self._unit, (args, kwargs))
            return self.forward(*args, **kwargs)
        with self.open():
            return self.forward(*args, **kwargs)
