"""A plan for a model that is about to be opened, and what to expect of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch

from verbatim.model.anatomy import inner_model
from verbatim.model.borrow import threads
from verbatim.model.loader import LoadedModel
from verbatim.placement.offload.choice import Offload
from verbatim.placement.offload.cost import Load, Prediction, Step, predict_step
from verbatim.placement.offload.machine import NOMINAL, Machine, measure
from verbatim.placement.offload.plan import Plan
from verbatim.placement.offload.planner import make_plan, may_spill
from verbatim.placement.offload.shape import ModelShape, shape_of
from verbatim.placement.offload.units import Units
from verbatim.placement.options import EngineOptions
from verbatim.weights.lazy import sources


@dataclass(frozen=True, slots=True)
class Forecast:
    """What was settled, and all that it was settled by."""

    shape: ModelShape
    machine: Machine
    plan: Plan
    prediction: Prediction

    def step(self, sequences: int, rows: int, context: float, logit_rows: int) -> Step:
        """One forward with other numbers than the workload's.

        Args:
            context: positions that a row attends to, on average.
        """
        load = Load(sequences, rows, context, logit_rows)
        return predict_step(
            self.shape, self.plan, self.machine, load, self.plan.widths(int(context))
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "plan": self.plan.as_dict(),
            "prediction": self.prediction.as_dict(),
            "machine": self.machine.as_dict(),
        }


def forecast(
    loaded: LoadedModel,
    units: Units,
    offload: Offload,
    options: EngineOptions,
    limit: int | None,
) -> Forecast:
    """Settle a plan; with `policy="auto"` this machine is measured first, once in a process.

    Args:
        limit: tokens of one sequence at most.

    Raises:
        OutOfBlocks, InvalidRequest: as `make_plan`.
        TierFailed: as `measure`.
    """
    dtype = next(
        (slot.parameter.dtype for slot in units.slots if slot.parameter.is_floating_point()),
        torch.float32,
    )
    shape = shape_of(units, inner_model(loaded.module).config, dtype, options.kv_dtype)
    machine = NOMINAL
    if offload.policy is not None:
        folder = None
        if may_spill(shape, offload, options):
            folder = Path(gettempdir()) if offload.disk is None else offload.disk
        tensors = [stored for slot in units.slots for stored in sources(slot.lazy)]
        with threads(options.num_threads):
            machine = measure(tensors, folder, dtype, offload.disk_limit)
    plan, prediction = make_plan(shape, offload, options, machine, limit)
    return Forecast(shape, machine, plan, prediction)
