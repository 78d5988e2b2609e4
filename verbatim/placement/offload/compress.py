"""Quantized weights of an offloaded model: quantized once, when it is opened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

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


def choose(units: Units, module: nn.Module, packings: Mapping[nn.Parameter, WeightPacking]) -> None:
    """Choose which slots are quantized, and how, without reading anything.

    Slots of which only rows are read, and small ones that stay in memory, are rounded: each number becomes
    its quantized value, and they take no fewer bytes.

    Args:
        packings: from `choose_packings`, for the same model, and those that its weights are stored in.
    """
    packed: dict[nn.Parameter, Slot] = {}
    for slot in units.slots:
        packing = packings.get(slot.parameter)
        if packing is None:
            continue
        if slot.rows_only or (slot in units.held and not packing.multiplies_codes):
            stored = stored_packing(slot.lazy)
            if stored is None or stored[0] != packing:  # else, decoded, the numbers are the same
                slot.rounding = packing
            continue
        slot.packing = replace(packing, interleaved=packing.multiplies_codes)
        packed[slot.parameter] = slot
    # Of an embedding that is not read as a whole, rows are looked up.
    seen = {layer for unit in units.order if unit.gathers for layer in unit.module.modules()}
    for top in (*(unit.module for unit in units.order), module):
        for _, layer, name, parameter in owners(top):
            if parameter in packed and layer not in seen:
                slot = packed[parameter]
                slot.holders.append((layer, name))
                looks_up = isinstance(layer, nn.Embedding)
                slot.is_unpacked |= not (looks_up or is_linear(layer) or runs_flat(layer))
        seen.update(top.modules())


def pack(
    units: Units, module: nn.Module, quantization: Quantization | None, scratch: Scratch
) -> PackingReport:
    """Quantize the chosen weights, one parameter at a time, into their tiers; return what was quantized.

    Linear layers of `module` become quantized ones.

    Raises:
        ModelError: one holds NaN, an infinity or a number too large; the message names it.
        TierFailed: one can't be read, or the disk tier has no room.
    """
    gathered = {slot for unit in units.order if unit.gathers for slot in unit.slots}
    cached = {slot for layer in units.experts for slot in layer.slots}
    streamed = {slot for unit in units.order if not unit.gathers for slot in unit.slots} | cached
    squares: dict[str, tuple[float, float]] = {}
    for slot in units.slots:
        if slot.packing is not None and slot.tier == "disk" and slot in gathered:
            slot.rows, slot.rounding = slot.lazy, replace(slot.packing, interleaved=False)
            if slot not in streamed:  # only its rows are looked up
                slot.packing = None
        if slot.packing is None:
            continue
        stored = stored_packing(slot.lazy)
        if stored is not None and stored[0] == slot.packing:
            packed = materialize(stored[1], read_whole).flatten()
        else:
            weight = materialize(slot.lazy, read_whole)
            packed, squares[slot.name] = pack_and_measure(weight, slot.packing, slot.name)
        slot.lazy = scratch.keep(slot.name, packed) if slot.tier == "disk" else Held(packed)
    for slot in cached:
        slot.holders = []  # their slots in the cache are held instead
    _hold(units, module)
    exact = [slot for slot in units.slots if slot.packing is None]
    return PackingReport(
        quantization,
        {slot.name: slot.packing for slot in units.slots if slot.packing is not None},
        [s.name for s in exact if s.rounding is None and s.parameter.ndim > 1],
        squares,
        [slot.name for slot in exact if slot.rounding is not None],
    )


def _hold(units: Units, module: nn.Module) -> None:
    """Replace the layers that hold quantized weights by quantized ones."""
    replaced: dict[nn.Module, nn.Module] = {}
    for slot in units.slots:
        if slot.packing is None:
            continue
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
