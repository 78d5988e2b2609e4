"""Quantized weights of an offloaded model: quantized once, when it is opened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from verbatim.model.experts import runs_flat
from verbatim.model.packed import hold_packed, is_linear, placeholder
from verbatim.model.packing import PackingReport, owners
from verbatim.model.quantization import Quantization
from verbatim.model.quantize import pack_and_measure
from verbatim.model.weight_packing import WeightPacking
from verbatim.placement.offload.scratch import Scratch
from verbatim.placement.offload.units import Slot, Units
from verbatim.weights.files import read_whole
from verbatim.weights.formats.stored import stored_as
from verbatim.weights.lazy import Held, materialize


def choose(units: Units, module: nn.Module, packings: Mapping[nn.Parameter, WeightPacking]) -> None:
    """Choose which slots are quantized, and how, without reading anything.

    Slots of which only rows are read are rounded: each number becomes its quantized value, and they take no
    fewer bytes.

    Args:
        packings: from `packings_of`, for the same model.
    """
    packed: dict[nn.Parameter, Slot] = {}
    for slot in units.slots:
        packing = packings.get(slot.parameter)
        if packing is None:
            continue
        if slot.rows_only:
            if stored_as(slot.lazy, packing) is None:  # else, decoded, the numbers are the same
                slot.rounding = packing.plain
            continue
        slot.packing = packing
        packed[slot.parameter] = slot
    seen: set[nn.Module] = set()
    for top in (*(unit.module for unit in units.order), module):
        for _, layer, name, parameter in owners(top):
            if parameter in packed and layer not in seen:
                slot = packed[parameter]
                slot.holders.append((layer, name))
                looks_up = isinstance(layer, nn.Embedding)
                slot.is_unpacked |= not (looks_up or is_linear(layer) or runs_flat(layer))
        seen.update(top.modules())


def pack(units: Units, quantization: Quantization | None, scratch: Scratch) -> PackingReport:
    """Quantize the chosen weights, one parameter at a time, into their tiers; return what was quantized.

    Raises:
        ModelError: one holds NaN, an infinity or a number too large; the message names it.
        TierFailed: one can't be read, or the disk tier has no room.
    """
    for unit in units.order:
        if unit.gathers:
            unit.slots = [_rows_of(slot) for slot in unit.slots]
    squares: dict[str, tuple[float, float]] = {}
    for slot in units.slots:
        if slot.packing is None:
            continue
        stored = stored_as(slot.lazy, slot.packing)
        if stored is not None:
            packed = materialize(stored, read_whole).flatten()
        else:
            weight = materialize(slot.lazy, read_whole)
            packed, squares[slot.name] = pack_and_measure(weight, slot.packing, slot.name)
        slot.lazy = scratch.keep(slot.name, packed) if slot.tier == "disk" else Held(packed)
    for layer in units.experts:
        for slot in layer.slots:
            slot.holders = []  # their slots in the cache are held instead
    for slot in units.slots:
        if slot.packing is not None:
            empty = placeholder(torch.empty(1, dtype=torch.uint8).expand(slot.packing.nbytes))
            for holder, name in slot.holders:
                hold_packed(holder, name, empty, slot.packing)
            slot.holders = [(holder, f"{name}_packed") for holder, name in slot.holders]
    packings = {slot.name: slot.packing for slot in units.slots if slot.packing is not None}
    others = [slot for slot in units.slots if slot.name not in packings]
    return PackingReport(
        quantization,
        packings,
        [s.name for s in others if s.rounding is None and s.parameter.ndim > 1],
        squares,
        [slot.name for slot in others if slot.rounding is not None],
    )


def _rows_of(slot: Slot) -> Slot:
    """Return the slot in whose file an embedding looks rows up, if its quantized table is on the disk."""
    if slot.packing is None or slot.tier != "disk":
        return slot
    slot.holders = [use for use in slot.holders if not isinstance(use[0], nn.Embedding)]
    is_elsewhere, rounding = bool(slot.holders), slot.packing.plain
    return replace(slot, packing=None, holders=[], rows_only=is_elsewhere, rounding=rounding)
