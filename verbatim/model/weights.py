"""The weights of a module: their number, and whether they were written to."""

from __future__ import annotations

import math
from itertools import chain
from operator import attrgetter

from torch import nn

from verbatim.model.packed import packed_buffers

_modules, _parameters = attrgetter("_modules"), attrgetter("_parameters")
_version = attrgetter("_version")


def writes_to(module: nn.Module) -> object:
    """Return the identity and the version counter of each parameter, to detect changes."""
    # Level by level, without Python for a single module, as this runs at every step.
    layers, found = [module], list[nn.Parameter | None]()
    while layers:
        found += chain.from_iterable(map(dict.values, map(_parameters, layers)))
        children = chain.from_iterable(map(dict.values, map(_modules, layers)))
        layers = [child for child in children if child is not None]
    parameters = [p for p in found if p is not None]
    try:
        return [*map(id, parameters)], [*map(_version, parameters)]
    except RuntimeError:  # inference tensors have no counter
        return [(id(p), 0 if p.is_inference() else p._version) for p in parameters]


def weight_info(module: nn.Module) -> dict[str, int]:
    """Return the number and bytes of a module's parameters: tied ones once, quantized ones as stored."""
    parameters, packed = list(module.parameters()), list(packed_buffers(module))
    return {
        "parameters": sum(p.numel() for p in parameters)
        + sum(math.prod(packing.shape) for _, _, packing in packed),
        "weight_bytes": sum(p.nbytes for p in parameters) + sum(len(data) for _, data, _ in packed),
    }
