"""Quantized weights of an offloaded model: quantized once, when it is opened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from verbatim.model.experts import runs_flat
from verbatim.model.packed import hold_packed, is_linear, placeholder, replace_children
from verbatim.model.packing import PackingReport, owners
from verbatim.model.quantization import Quantization
from verbatim.model.quantize import pack_and_measure, rounded
from verbatim.model.weight_packing import WeightPacking
from verbatim.placement.offload.scratch import Scratch
from verbatim.placement.offload.units import Slot, Units
from verbatim.weights.files import read_whole
from verbatim.weights.formats.stored import stored_packing
from verbatim.weights.lazy import Held, materialize


@dataclass(slots=True)
class Compression:
    """The quantized weights, and their errors.

    Attributes:
        packed: quantized weights.
        rounded: weights whose rows are read from the checkpoint, or that are small and stay in memory: each
            number is rounded to its quantized value, and they take no fewer bytes.
        exact: matrices that are not quantized.
    """

    quantization: Quantization | None
    packed: list[Slot]
    rounded: list[Slot]
    exact: list[Slot]
    squares: dict[str, tuple[float, float]] = field(default_factory=dict)

    def report(self) -> PackingReport:
        """Return what was quantized, after `pack`."""
        packings = {slot.name: slot.packing for slot in self.packed if slot.packing is not None}
        exact, rounded = ([s.name for s in some] for some in (self.exact, self.rounded))
        return PackingReport(self.quantization, packings, exact, self.squares, rounded)

    def pack(self, units: Units, module: nn.Module, scratch: Scratch) -> None:
        """Quantize the chosen weights, one parameter at a time, into their tiers.

        Linear layers of `module` become quantized ones.

        Raises:
            ModelError: one holds NaN, an infinity or a number too large; the message names it.
            TierFailed: one can't be read, or the disk tier has no room.
        """
        streamed = {slot for unit in units.order if not unit.gathers for slot in unit.slots}
        gathered = {slot for unit in units.order if unit.gathers for slot in unit.slots}
        cached = {slot for layer in units.experts for slot in layer.slots}
        streamed |= cached
        for slot in list(self.packed):
            assert slot.packing is not None
            if slot.tier == "disk" and slot in gathered:
                slot.rows, slot.rounding = slot.lazy, replace(slot.packing, interleaved=False)
                if slot not in streamed:  # only its rows are looked up
                    slot.packing = None
                    self.packed.remove(slot)
                    self.rounded.append(slot)
                    continue
            stored = stored_packing(slot.lazy)
            if stored is not None and stored[0] == slot.packing:
                packed = materialize(stored[1], read_whole).flatten()
            else:
                weight = materialize(slot.lazy, read_whole)
                packed, self.squares[slot.name] = pack_and_measure(weight, slot.packing, slot.name)
            on_disk = slot.tier == "disk"
            slot.lazy = scratch.keep(slot.name, packed) if on_disk else Held(packed)
        for slot in cached:
            slot.holders = []  # their slots in the cache are held instead
        _hold(units, module, [slot for slot in self.packed if slot not in cached])


def choose(
    units: Units,
    module: nn.Module,
    quantization: Quantization | None,
    packings: Mapping[nn.Parameter, WeightPacking],
) -> Compression:
    """Choose which slots are quantized, and how, without reading anything.

    Args:
        packings: from `choose_packings`, for the same model, and those that its weights are stored in.
    """
    packed, rounded_ = [], []
    for slot in units.slots:
        packing = packings.get(slot.parameter)
        if packing is None:
            continue
        interleaves = packing.multiplies_codes
        if slot.rows_only or (slot in units.held and not interleaves):
            stored = stored_packing(slot.lazy)
            if stored is not None and stored[0] == packing:  # decoded, the numbers are the same
                continue
            slot.rounding = packing
            rounded_.append(slot)
            continue
        slot.packing = replace(packing, interleaved=interleaves)
        slot.stored_bytes = slot.packing.nbytes
        packed.append(slot)
    by_parameter = {slot.parameter: slot for slot in packed}
    # Of an embedding that is not read as a whole, rows are looked up.
    seen = {layer for unit in units.order if unit.gathers for layer in unit.module.modules()}
    for top in (*(unit.module for unit in units.order), module):
        for _, layer, name, parameter in owners(top):
            if parameter in by_parameter and layer not in seen:
                slot = by_parameter[parameter]
                slot.holders.append((layer, name))
                looks_up = isinstance(layer, nn.Embedding)
                slot.is_unpacked |= not (looks_up or is_linear(layer) or runs_flat(layer))
        seen.update(top.modules())
    chosen = {*packed, *rounded_}
    exact = [s for s in units.slots if s not in chosen and s.parameter.ndim > 1]
    return Compression(quantization, packed, rounded_, exact)


def _hold(units: Units, module: nn.Module, slots: list[Slot]) -> None:
    """Replace the layers that use these weights by quantized ones."""
    replaced: dict[nn.Module, nn.Module] = {}
    for slot in slots:
        assert slot.packing is not None
        empty = placeholder(torch.empty(1, dtype=torch.uint8).expand(slot.packing.nbytes))
        holders, slot.holders = slot.holders, []
        for layer, name in holders:
            here = replaced.get(layer, layer)
            holder = hold_packed(here, name, empty, slot.packing)
            if holder is not here:
                replaced[layer] = holder
            slot.holders.append((holder, f"{name}_packed"))
    for unit in units.order:
        unit.module = replaced.get(unit.module, unit.module)
    replace_children(replaced, module, *(unit.module for unit in units.order))


def rounded_rows(slot: Slot, rows: Tensor) -> Tensor:
    """Return unquantized rows `[n, K]`, rounded as the weight is when it is quantized."""
    return rows if slot.rounding is None else rounded(rows, slot.rounding, slot.name)
