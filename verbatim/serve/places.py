"""The distribution of a model's layers over tiers or stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def places_of(info: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tiers or stages that hold a model's layers, from `LLM.info`.

    Returns:
        For each its `name`, `weight_bytes` (including embedding and head), and `layers`: the fraction of
        each layer's weights there, 0 to 1.
    """
    if "unit_tiers" in info:
        return _tiers(info["unit_tiers"])
    count = info["layers"]
    if "stages" not in info:
        return [_place("memory", info["weight_bytes"], [1.0] * count)]
    places = []
    for number, stage in enumerate(info["stages"]):
        first, end = stage["layers"]
        shares = [float(first <= layer < end) for layer in range(count)]
        name = f"stage {number} on {stage['machine']}"
        places.append(_place(name, stage["weight_bytes"], shares))
    return places


def _place(name: str, weight_bytes: int, layers: list[float]) -> dict[str, Any]:
    return {"name": name, "weight_bytes": weight_bytes, "layers": layers}


def _tiers(units: Mapping[str, Mapping[str, int]]) -> list[dict[str, Any]]:
    layers = [held for name, held in units.items() if name.rpartition(".")[2].isdigit()]
    places = []
    for tier in ("gpu", "cpu", "disk"):
        nbytes = sum(held.get(tier, 0) for held in units.values())
        if nbytes:
            shares = [held.get(tier, 0) / (sum(held.values()) or 1) for held in layers]
            places.append(_place(tier, nbytes, shares))
    return places
