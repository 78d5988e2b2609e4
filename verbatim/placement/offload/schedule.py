"""The order of work: each unit is lent once, and all micro-batches go through it before the next one is.

What a layer is called with is computed for a whole forward, in shapes that differ from architecture to
architecture. So nothing is sliced: each micro-batch runs the module's own forward, as a greenlet that stops
before every unit.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Protocol

from greenlet import GreenletExit, getcurrent, greenlet

from verbatim.model.context import Pass, activate
from verbatim.placement.offload.trace import Trace
from verbatim.placement.offload.units import Unit, forward_of
from verbatim.placement.offload.weights import Weights


class Activations(Protocol):
    """A store of hidden states of micro-batches while others compute."""

    def send(self, part: Part) -> None:
        """Take the hidden states of a part away; it stands before a unit."""
        ...

    def bring(self, part: Part) -> None:
        """Put them back."""
        ...


class Part:
    """One micro-batch on its way through the module.

    Attributes:
        unit: it stands before this one; None once it has come through.
        inputs: what the unit is about to be called with.
        output: what its forward returned.
    """

    def __init__(self, number: int, walk: Pass, forward: Callable[[], Any]) -> None:
        self.number = number
        self.unit: Unit | None = None
        self.inputs: tuple[Any, ...] = ()
        self.output: Any = None
        self._walk = walk
        self._forward = forward
        self._greenlet = _Walker(self._run)
        self._greenlet.part = self
        self._greenlet.gr_context = contextvars.copy_context()

    def go(self) -> None:
        """Through the unit, if it stands before one, and on to the next."""
        with activate(self._walk):
            self._greenlet.switch()

    def stop_before(self, unit: Unit, inputs: tuple[Any, ...]) -> None:
        """Called from within: let the others come here first."""
        self.unit, self.inputs = unit, inputs
        self._greenlet.parent.switch()
        self.inputs = ()

    def end(self) -> None:
        """Unwind a forward that will not go on, and let go of what it made."""
        if self._greenlet:
            with activate(self._walk):
                self._greenlet.throw(GreenletExit)
        # It knows this part. Left to the garbage collector, logits of many steps would pile up.
        self._greenlet.part = None
        self.output = None

    def _run(self) -> None:
        self.output = self._forward()
        self.unit = None


class _Walker(greenlet):  # type: ignore[misc]
    part: Part | None


class BlockSchedule:
    """Runs the micro-batches of a forward layer by layer.

    Args:
        weights: lends the units what they need.
        activations: keeps hidden states elsewhere between two units.
        trace: takes note of what is computed when.
    """

    def __init__(
        self,
        weights: Weights,
        activations: Activations | None,
        trace: Trace,
    ) -> None:
        self.weights = weights
        self.activations = activations
        self.compute_s = 0.0
        self._trace = trace

    def run(self, walks: Sequence[Pass], forwards: Sequence[Callable[[], Any]]) -> list[Any]:
        """The outputs of `forwards`, each under its walk."""
        parts = [Part(i, *pair) for i, pair in enumerate(zip(walks, forwards, strict=True))]
        try:
            for part in parts:
                self._go(part, None, parts)
            while waiting := [part for part in parts if part.unit is not None]:
                unit = waiting[0].unit
                assert unit is not None
                here = [part for part in waiting if part.unit is unit]
                with self.weights.lent(unit):
                    for left, part in zip(reversed(range(len(here))), here, strict=True):
                        if self.weights.experts is not None:
                            self.weights.experts.visits_left = left
                        self._go(part, unit, waiting)
            return [part.output for part in parts]
        finally:
            for part in parts:
                part.end()

    def _go(self, part: Part, unit: Unit | None, others: list[Part]) -> None:
        # Who is alone never waits for others, so its hidden states stay.
        away = self.activations if len(others) > 1 else None
        if self.activations is not None and unit is not None:
            self.activations.bring(part)  # the others may have come through since it was sent
        begin = perf_counter()
        part.go()
        end = perf_counter()
        self.compute_s += end - begin
        if unit is not None:
            self._trace.add("compute", f"{unit.name} #{part.number}", begin, end)
        if away is not None and part.unit is not None:
            away.send(part)


def install_gates(weights: Weights) -> None:
    """Let every unit stop before its forward, so that it is lent its parameters.

    Outside of a block schedule (a look at the model, a trial) it is lent them at once.
    """
    for unit in weights.units.order:
        unit.module.forward = _gate(unit, weights)


def _gate(unit: Unit, weights: Weights) -> Callable[..., Any]:
    inner = forward_of(unit.module)
    # An embedding's rows are looked up for each micro-batch: there is nothing to share.
    rows_only = unit.gathers and not any(weights.is_streamed(unit, slot) for slot in unit.slots)

    def forward(*args: Any, **kwargs: Any) -> Any:
        walker = getcurrent()
        if isinstance(walker, _Walker) and walker.part is not None and not rows_only:
            walker.part.stop_before(unit, (args, kwargs))
            return inner(*args, **kwargs)
        with weights.lent(unit):
            return inner(*args, **kwargs)

    return forward
