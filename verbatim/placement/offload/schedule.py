"""The order of work: each unit is installed once, for all micro-batches.

What a layer is called with is computed for a whole forward, in shapes that differ from architecture to
architecture. So nothing is sliced: each micro-batch runs the module's own forward, as a greenlet that stops
before every unit.
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
from verbatim.placement.offload.choice import Percents
from verbatim.placement.offload.cut import cut
from verbatim.placement.offload.kv import assign_tiers
from verbatim.placement.offload.scratch import Scratch
from verbatim.placement.offload.trace import Trace
from verbatim.placement.offload.units import Unit
from verbatim.placement.offload.weights import Weights
from verbatim.weights.files import up


class Part(greenlet):  # type: ignore[misc]
    """The suspended forward of one micro-batch.

    Attributes:
        unit: the one that runs next; None when the forward is done.
        inputs: the arguments of that unit.
        output: what its forward returned.
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

    def go(self) -> None:
        """Run the next unit, and stop before the one after it."""
        with activate(self._context):
            self.switch()

    def stop_before(self, unit: Unit, inputs: tuple[Any, ...]) -> None:
        """Suspend the forward before `unit`; called from within it."""
        self.unit, self.inputs = unit, inputs
        self.parent.switch()
        self.inputs = ()

    def end(self) -> None:
        """Unwind an unfinished forward, and drop its output."""
        if self:
            with activate(self._context):
                self.throw(GreenletExit)
        self.output = None

    def run(self) -> None:
        """Run the forward, in this greenlet."""
        self.output = self._forward()
        self.unit = None


class HiddenStates:
    """Keeps the hidden states of waiting micro-batches in their tiers; those on the disk take no memory.

    What is moved is the hidden state that a part's next unit is called with: its storage is emptied and
    filled again, so all references in the suspended forward stay valid. Everything else that a forward holds
    (positions, masks, what was computed once for all layers) stays.

    Tensors of the module, tensors that can't be emptied and those that two parts share stay, too. Without a
    GPU "gpu" and "cpu" are both RAM, so nothing is moved there. Nothing is read ahead: hidden states are
    small beside the weights of a layer.

    Args:
        module: has the parameters and buffers that must not be moved.
        percents: of the micro-batches, in (gpu, cpu, disk).
        scratch: room on the disk.
        trace: records reads and writes.
        is_apart: "gpu" is not RAM.
    """

    def __init__(
        self,
        module: nn.Module,
        percents: Percents,
        scratch: Scratch,
        trace: Trace,
        *,
        is_apart: bool = False,
    ) -> None:
        self._module, self._percents = module, percents
        self._scratch, self._trace, self._is_apart = scratch, trace, is_apart
        self._rooms: dict[int, tuple[int, int]] = {}  # of each part's number: where, bytes
        # The emptied storage, its bytes, and they themselves, if they are in RAM beside a GPU.
        self._away = WeakKeyDictionary[Part, tuple[UntypedStorage, int, UntypedStorage | None]]()
        self._before: Unit | None = None  # what parts wait for
        self._owned: set[int] = set()  # storages of the module meanwhile

    def send(self, part: Part) -> None:
        """Write the hidden state of a part to its tier and free its memory.

        Raises:
            TierFailed: it can't be written, or there is no room.
        """
        tier = assign_tiers([1] * (part.number + 1), self._percents)[-1]
        if tier == "gpu" or (tier == "cpu" and not self._is_apart):
            return
        if (storage := self._storage_of(part)) is None:
            return
        begin, nbytes, kept = perf_counter(), storage.nbytes(), None
        data = storage.clone() if self._is_apart and storage.device.type == "cpu" else storage.cpu()
        if tier == "cpu":
            kept = data
        else:
            at, has = self._rooms.get(part.number, (0, 0))
            if has < nbytes:
                has = up(nbytes + nbytes // 4)
                at = self._scratch.reserve(has)
                self._rooms[part.number] = at, has
            self._scratch.write_from([_memory(data)], at)
        self._away[part] = storage, nbytes, kept
        storage.resize_(0)
        self._trace.add("write", "hidden states", f"hidden #{part.number}", begin, nbytes)

    def bring(self, part: Part) -> None:
        """Read it back, if it was moved.

        Raises:
            TierFailed: it can't be read.
        """
        if part not in self._away:
            return
        (storage, nbytes, data), begin = self._away[part], perf_counter()
        storage.resize_(nbytes)
        if data is None:
            data = UntypedStorage(nbytes) if storage.device.type != "cpu" else storage
            self._scratch.read([_memory(data)], self._rooms[part.number][0], direct=False)
        if data is not storage:
            storage.copy_(data)
        del self._away[part]
        self._trace.add("read", "hidden states", f"hidden #{part.number}", begin, nbytes)

    def _storage_of(self, part: Part) -> UntypedStorage | None:
        args, kwargs = part.inputs
        hidden: Any = args[0] if args else kwargs.get("hidden_states")
        if type(hidden) is not Tensor or not hidden.is_floating_point() or not hidden.numel():
            return None
        storage = hidden.untyped_storage()
        if part.number == 0 or part.unit is not self._before:  # a model has thousands of tensors
            own = (*self._module.parameters(), *self._module.buffers())
            self._before, self._owned = part.unit, {t.untyped_storage()._cdata for t in own}
        away = {other._cdata for other, *_ in self._away.values()}
        is_shared = storage._cdata in self._owned or storage._cdata in away
        return storage if storage.resizable() and not is_shared else None


def _memory(storage: UntypedStorage) -> memoryview:
    # A tensor over the storage could have the wrong inference mode.
    array = (ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())
    return memoryview(array).cast("B")


class BlockSchedule:
    """The order of work of a decoder: in micro-batches, layer by layer.

    Args:
        weights: lends the units what they need, by a plan that has the sizes of micro-batches.
        activations: keeps hidden states elsewhere between two units.
    """

    def __init__(self, weights: Weights, activations: HiddenStates | None) -> None:
        self._plan, self.weights, self.activations = weights.plan, weights, activations

    def learning(self) -> AbstractContextManager[None]:
        """Record the order of units in the block."""
        return self.weights.learning()

    def cut(self, batch: Batch) -> list[Batch]:
        """Return the micro-batches of a batch."""
        return cut(batch, self._plan.batch_size, self._plan.micro_tokens)

    def run(
        self, contexts: Sequence[ForwardContext], forwards: Sequence[Callable[[], Any]]
    ) -> list[Any]:
        """Return the outputs of `forwards`, each under its forward context."""
        parts = [Part(i, *pair) for i, pair in enumerate(zip(contexts, forwards, strict=True))]
        try:
            for part in parts:
                self._go(part, None, parts)
            while waiting := [part for part in parts if part.unit is not None]:
                unit = waiting[0].unit
                assert unit is not None
                here = [part for part in waiting if part.unit is unit]
                with self.weights.patched(unit):
                    for left, part in zip(reversed(range(len(here))), here, strict=True):
                        if self.weights.experts is not None:
                            self.weights.experts.later_parts = left
                        self._go(part, unit, waiting)
            return [part.output for part in parts]
        finally:
            for part in parts:
                part.end()

    def _go(self, part: Part, unit: Unit | None, others: list[Part]) -> None:
        # A single part never waits for others, so its hidden states stay.
        away = self.activations if len(others) > 1 else None
        if self.activations is not None and unit is not None:
            self.activations.bring(part)  # it may have been moved while others ran
        begin = perf_counter()
        part.go()
        name = f"start #{part.number}" if unit is None else f"{unit.name} #{part.number}"
        self.weights.trace.add("compute", "weights", name, begin)
        if away is not None and part.unit is not None:
            away.send(part)


def install_gates(weights: Weights) -> None:
    """Make every unit stop before its forward, so that its parameters can be installed."""
    for unit in weights.units.order:
        unit.module.forward = UnitGate(unit, weights)


class UnitGate(WeightGate):
    """The forward of a unit's module.

    Outside of a block schedule (inspection of the model, a trial) parameters are installed at once.
    """

    def __init__(self, unit: Unit, weights: Weights) -> None:
        super().__init__(unit.module)
        self._unit, self._weights = unit, weights

    def open(self) -> AbstractContextManager[None]:
        return self._weights.patched(self._unit)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        part = getcurrent()
        # An embedding's rows are looked up for each micro-batch: there is nothing to share.
        if isinstance(part, Part) and not self._unit.gathers:
            part.stop_before(self._unit, (args, kwargs))
            return self.forward(*args, **kwargs)
        with self.open():
            return self.forward(*args, **kwargs)
