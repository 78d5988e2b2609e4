"""Weights in few bits: packed once when a model is opened, unpacked when they are lent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from verbatim.model.packing import PackingReport
from verbatim.model.quantization import Quantization
from verbatim.model.quantize import pack_and_measure, rounded
from verbatim.model.weight_packing import WeightPacking
from verbatim.placement.offload.scratch import Scratch
from verbatim.placement.offload.units import Slot, Units
from verbatim.weights.files import read_whole
from verbatim.weights.lazy import Held, materialize


@dataclass(slots=True)
class Compression:
    """What was packed, and how far off it is.

    Attributes:
        packed: weights in few bits.
        rounded: those of which rows are looked up where they lie, or that are small and stay in memory: each
            number is what packing and unpacking leave of it, and they take no fewer bytes.
        exact: matrices that stayed as they were.
    """

    quantization: Quantization
    packed: list[Slot]
    rounded: list[Slot]
    exact: list[Slot]
    squares: dict[str, tuple[float, float]] = field(default_factory=dict)

    def info(self) -> dict[str, Any]:
        """As plain values, for `LLM.info`."""
        packings = {slot.name: slot.packing for slot in self.packed if slot.packing is not None}
        exact, rounded = ([s.name for s in some] for some in (self.exact, self.rounded))
        report = PackingReport(self.quantization, packings, exact, self.squares, rounded)
        return report.info()

    def pack(self, units: Units, scratch: Scratch) -> None:
        """Read what was chosen, one parameter at a time, and put it packed where its tier is.

        Raises:
            ModelError: one holds NaN, an infinity or a number too large; the message names it.
            TierFailed: it can't be read, or the disk tier has no room.
        """
        streamed = {slot for unit in units.order if not unit.gathers for slot in unit.slots}
        streamed.update(slot for layer in units.experts for slot in layer.slots)
        for slot in list(self.packed):
            assert slot.packing is not None
            if slot.tier == "disk":
                slot.rows, slot.rounding = slot.lazy, slot.packing
                if slot not in streamed:  # its rows are looked up, and that is all
                    slot.packing = None
                    self.packed.remove(slot)
                    self.rounded.append(slot)
                    continue
            weight = materialize(slot.lazy, read_whole)
            packed, self.squares[slot.name] = pack_and_measure(weight, slot.packing, slot.name)
            on_disk = slot.tier == "disk"
            slot.lazy = scratch.keep(slot.name, packed) if on_disk else Held(packed)
            slot.in_place = False


def choose(
    units: Units, quantization: Quantization, packings: Mapping[nn.Parameter, WeightPacking]
) -> Compression:
    """Settle which slots will be packed, and what they will take, without reading anything.

    Args:
        packings: what `choose_packings` found in the model that the units are of.
    """
    packed, rounded_ = [], []
    for slot in units.slots:
        packing = packings.get(slot.parameter)
        if packing is None:
            continue
        if slot.rows_only or slot in units.held:
            slot.rounding = packing
            rounded_.append(slot)
        else:
            slot.packing, slot.stored_bytes = packing, packing.nbytes
            packed.append(slot)
    chosen = {*packed, *rounded_}
    exact = [s for s in units.slots if s not in chosen and s.parameter.ndim > 1]
    return Compression(quantization, packed, rounded_, exact)


def rounded_rows(slot: Slot, rows: Tensor) -> Tensor:
    """Rows `[n, K]` that were read as they were, with the numbers that they have in few bits."""
    return rows if slot.rounding is None else rounded(rows, slot.rounding, slot.name)
