"""The weights of a module: their number, and whether they were written to."""

from __future__ import annotations

import math

from torch import nn

from verbatim.model.packed import packed_buffers


def writes_to(module: nn.Module) -> object:
    """Return the identity and the version counter of each parameter, to detect changes."""
    found: list[tuple[int, int]] = []
    # Not `parameters()`, which takes twice as long: this runs at every step.
    layers = [module]
    for layer in layers:
        found.extend(
            (id(p), 0 if p.is_inference() else p._version)
            for p in layer._parameters.values()
            if p is not None
        )
        layers.extend(inner for inner in layer._modules.values() if inner is not None)
    return found


def weight_info(module: nn.Module) -> dict[str, int]:
    """Return the number and bytes of a module's parameters: tied ones once, quantized ones as stored."""
    parameters, packed = list(module.parameters()), list(packed_buffers(module))
    return {
        "parameters": sum(p.numel() for p in parameters)
        + sum(math.prod(packing.shape) for _, _, packing in packed),
        "weight_bytes": sum(p.nbytes for p in parameters) + sum(len(data) for _, data, _ in packed),
    }
