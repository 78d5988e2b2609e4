"""Where the tensors and numbers hang that a fast path depends on, and whether they are as they were."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from verbatim.model.packed import PackedLinear

# Where a tensor's numbers are: address, number, strides, dtype. None: there is no tensor.
Lying = tuple[int, int, tuple[int, ...], torch.dtype] | None
# Where a tensor or a number hangs: in which dictionary, by what name.
Place = tuple[dict[str, Any], str]
# What changes while a module is borrowed, or by who calls it.
NOT_OURS = frozenset(
    {"training", "_attn_implementation_internal", "_experts_implementation_internal"}
)


def lying(places: list[Place]) -> list[Lying]:
    """Where the tensors lie that hang there now."""
    return [
        None if (t := fields.get(name)) is None else (t.data_ptr(), t.numel(), t.stride(), t.dtype)
        for fields, name in places
    ]


def numbers_of(modules: list[nn.Module]) -> list[Place]:
    """Where modules keep numbers and words that their forwards may depend on: each dictionary and name.

    Also those of configs, which some forwards read each time.
    """
    fields = [m.__dict__ for m in dict.fromkeys(modules)]
    configs = [f["config"].__dict__ for f in fields if hasattr(f.get("config"), "__dict__")]
    return [
        (values, name)
        for values in (*fields, *{id(c): c for c in configs}.values())
        for name, value in values.items()
        if name not in NOT_OURS and (value is None or type(value) in (int, float, bool, str))
    ]


def places_of(linear: nn.Module) -> list[Place]:
    """Where the tensors of a linear layer hang."""
    if type(linear) is PackedLinear:
        return [(linear._buffers, "packed"), (linear._parameters, "bias")]
    return [(linear._parameters, "weight"), (linear._parameters, "bias")]
