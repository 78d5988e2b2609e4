"""References to the tensors and numbers that a fast path depends on, to detect changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from verbatim.model.packed import PackedLinear

# The layout of a tensor: address, number of elements, strides, dtype. None: there is no tensor.
TensorLayout = tuple[int, int, tuple[int, ...], torch.dtype] | None
# A reference to a tensor or a number: its dictionary and name.
Place = tuple[dict[str, Any], str]
# Attributes that change while a module is patched, or with its caller.
NOT_OURS = frozenset(
    {"training", "_attn_implementation_internal", "_experts_implementation_internal"}
)


def layouts_of(places: list[Place]) -> list[TensorLayout]:
    """Return the current layouts of the referenced tensors."""
    return [
        None if (t := fields.get(name)) is None else (t.data_ptr(), t.numel(), t.stride(), t.dtype)
        for fields, name in places
    ]


def numbers_of(modules: list[nn.Module]) -> list[Place]:
    """Return references of the numbers and strings that forwards may depend on, also those of configs."""
    fields = [m.__dict__ for m in dict.fromkeys(modules)]
    configs = [f["config"].__dict__ for f in fields if hasattr(f.get("config"), "__dict__")]
    return [
        (values, name)
        for values in (*fields, *{id(c): c for c in configs}.values())
        for name, value in values.items()
        if name not in NOT_OURS and (value is None or type(value) in (int, float, bool, str))
    ]


def places_of(linear: nn.Module) -> list[Place]:
    """Return references of the tensors of a linear layer."""
    if type(linear) is PackedLinear:
        return [(linear._buffers, "packed"), (linear._parameters, "bias")]
    return [(linear._parameters, "weight"), (linear._parameters, "bias")]
