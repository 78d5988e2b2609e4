"""The plan of a model with its predicted times, and the times that its forwards took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch

from verbatim.batch import Batch
from verbatim.model.products import threads
from verbatim.placement.offload.choice import Offload
from verbatim.placement.offload.cost import Forecast, Load
from verbatim.placement.offload.machine import NOMINAL, NOMINAL_GPU, measure
from verbatim.placement.offload.planner import Planner
from verbatim.placement.offload.shape import shape_of
from verbatim.placement.offload.units import Units
from verbatim.placement.options import ToOpen
from verbatim.weights.lazy import sources


def forecast(model: ToOpen, offload: Offload, units: Units) -> Forecast:
    """Make a plan; with `policy="auto"` the machine is measured first, once per process.

    Raises:
        OutOfBlocks, InvalidRequest: as `Planner.best`.
        TierFailed: as `measure`.
    """
    dtype = next(
        (slot.parameter.dtype for slot in units.slots if slot.parameter.is_floating_point()),
        torch.float32,
    )
    options = model.options
    shape = shape_of(model.loaded, units, dtype, options.kv_dtype, model.draft)
    planner, device = Planner(shape, offload, options, model.limit), options.device.beside_ram
    machine = NOMINAL if device is None else NOMINAL_GPU
    if offload.policy is not None:
        folder = None
        if planner.may_spill():
            folder = Path(gettempdir()) if offload.disk is None else offload.disk
        tensors = [stored for slot in units.slots for stored in sources(slot.lazy)]
        with threads(options.num_threads), options.device.current():
            machine = measure(tensors, folder, dtype, offload.disk_limit, device)
    return planner.best(machine)


@dataclass(slots=True)
class Measured:
    """Measurements of every forward.

    Attributes:
        steps: sums over forwards with a single row per sequence, by name.
        prompts: those over all other forwards.
        sample_s: seconds of all sampling.
        tokens, draws: sampled tokens, and sampling calls.
    """

    steps: Counter[str] = field(default_factory=Counter)
    prompts: Counter[str] = field(default_factory=Counter)
    sample_s: float = 0.0
    tokens: int = 0
    draws: int = 0

    def add_forward(
        self, batch: Batch, seconds: float, compute_s: float, weight_bytes: int
    ) -> None:
        """Add a forward.

        Args:
            weight_bytes: bytes of weights that it read.
        """
        kind = self.steps if batch.num_tokens == batch.num_sequences else self.prompts
        sums: dict[str, Any] = dict(
            forwards=1,
            seconds=seconds,
            compute_s=compute_s,
            weight_bytes=weight_bytes,
            sequences=batch.num_sequences,
            rows=batch.num_tokens,
            logit_rows=batch.logit_rows.shape[0],
            context=float(batch.positions.sum()) / max(1, batch.num_tokens) + 1,  # of a row
        )
        kind.update(sums)

    def beside(self, forecast: Forecast, peaks: Mapping[str, int]) -> dict[str, Any]:
        """Return {"predicted", "actual"} by name, predicted for the average size of the forwards that ran.

        Args:
            peaks: peak bytes in memory, by kind.
        """
        found: dict[str, dict[str, float | None]] = {}

        def note(name: str, predicted: float | None, actual: float | None) -> None:
            found[name] = {"predicted": predicted, "actual": actual}

        total: float = self.sample_s
        predicted_total = 0.0
        for name, kind in (("decode", self.steps), ("prompt", self.prompts)):
            n = kind["forwards"]
            if not n:
                continue
            mean = {of: value / n for of, value in kind.items()}
            load = Load(
                sequences=round(mean["sequences"]),
                rows=max(1, round(mean["rows"])),
                context=mean["context"],
                logit_rows=round(mean["logit_rows"]),
            )
            step = forecast.step(load)
            total += kind["seconds"]
            predicted_total += n * step.seconds
            note(f"{name}_weights_bytes", step.weight_bytes, mean["weight_bytes"])
            note(f"{name}_compute_s", step.compute_s, mean["compute_s"])
            note(f"{name}_step_s", step.seconds, mean["seconds"])
            if step.weight_bytes:
                io_rate = step.weight_bytes / step.seconds
                note(f"read_in_{name}_per_s", io_rate, mean["weight_bytes"] / mean["seconds"])
        if self.tokens:
            drawn_s = forecast.sample_s(self.tokens, self.draws)
            note("sampling_s", drawn_s, self.sample_s)
            note("tokens_per_s", self.tokens / (predicted_total + drawn_s), self.tokens / total)
        planned = forecast.plan.memory
        for kind_name, nbytes in peaks.items():
            if nbytes or planned.get(kind_name):
                note(f"{kind_name}_bytes", planned.get(kind_name, 0), nbytes)
        return found
