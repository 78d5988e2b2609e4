"""Recurrent layers of transformers models: their functions, replaced by those over flat batches.

transformers calls a function of the model's own file for each recurrent operation. `patch` puts another in
its place that passes the rows to the forward context of this thread; outside of the engine's forwards it
calls the original.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from torch import nn

from verbatim.model.context import replace_function
from verbatim.model.recurrent_layers import FORWARDS, STATE_BYTES
from verbatim.model.recurrent_ops import FUNCTIONS


def patch(module: nn.Module) -> None:
    """Replace the recurrent functions of the files of a model's classes; does nothing the second time."""
    for file in _files_of(module):
        names = vars(file)
        for name, ours in FUNCTIONS.items():
            if name in names:
                replace_function(file, name, ours)
        for name, ours in FORWARDS.items():
            if name in names:
                replace_function(names[name], "forward", ours)


def reads_weight(layer: nn.Module, name: str) -> bool:
    """Return whether a layer multiplies with the weight of its child `name` itself, as Mamba's do."""
    return name == "dt_proj" and "A_log" in layer._parameters


def has_supported_states(module: nn.Module) -> bool:
    """Return whether recurrent functions in the files of a model's classes can be replaced."""
    names = {name for file in _files_of(module) for name in vars(file)}
    return not names.isdisjoint(FUNCTIONS.keys() | FORWARDS.keys())


def state_bytes(module: nn.Module) -> int:
    """Return the bytes of a sequence's states by the widths of a model's layers, before a forward.

    In these layers, states have as many numbers as a convolution's past rows, and as the products of keys
    and values; recurrences keep float32.
    """
    total = 0
    for layer in module.modules():
        count = STATE_BYTES.get(type(layer).__name__)
        if count is not None:
            total += count(layer)
            continue
        convs = [child for child in layer.children() if isinstance(child, nn.Conv1d)]
        if convs:
            for conv in convs:
                rows = conv.kernel_size[0] - 1
                total += rows * conv.out_channels * conv.weight.dtype.itemsize
            total += _recurrence_width(vars(layer)) * torch.float32.itemsize
    return total


def _recurrence_width(sizes: dict[str, Any]) -> int:
    if "num_v_heads" in sizes:  # gated delta rule
        width: int = sizes["num_v_heads"] * sizes["head_k_dim"] * sizes["head_v_dim"]
    elif "lru_width" in sizes:
        width = sizes["lru_width"]
    elif "ssm_state_size" in sizes:
        width = sizes["intermediate_size"] * sizes["ssm_state_size"]
    else:  # keys as wide as values, or a convolution alone
        width = sizes.get("num_heads", 0) * sizes.get("head_dim", 0) ** 2
    return width


def _files_of(module: nn.Module) -> list[ModuleType]:
    files = {type(layer).__module__ for layer in module.modules()}
    return [
        sys.modules[name]
        for name in sorted(files)
        if name.startswith("transformers.models.") and name in sys.modules
    ]
