"""Twins: copies of layers on which trials run; and the structure of layers, each of which is tried once.

A twin's norms, biases and one-element buffers are random, as are its matrices if they are mostly zero:
weights without effect now may have one after the next training step. Its layer index may be hidden.
"""

from __future__ import annotations

import enum
import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.kernels.packing import WeightPacking
from verbatim.model.differential import copy_of, noise
from verbatim.model.quantized import weights_of

_CHECKED_ROWS = 64  # number of rows of a matrix that are checked for zeros
_MAX_COMPARED = 4096  # maximum size of a tensor attribute that is compared by value
_INDEX_NAMES = frozenset({"layer_idx", "layer_id", "layer_number"})  # names of the layer index
_IGNORED = frozenset(vars(nn.Module())) - {"_parameters", "_buffers", "_modules"}
_IGNORED |= {"_is_hf_initialized", "forward"}  # "forward": may be a gate
_VALUES = int | float | str | bytes | None | torch.dtype | torch.device | enum.Enum | WeightPacking


def structure_of(layer: nn.Module) -> tuple[Any, ...]:
    """Return a hashable key of everything that the forward of a layer's twin depends on.

    It includes weights by layout, plain attributes by value, and other objects by identity.
    """
    modules = [*layer.modules()]
    weights = weights_of(layer)
    numbers = {id(x): number for number, x in enumerate([*modules, *weights])}

    def layout(x: Tensor) -> Any:
        return type(x), x.shape, x.stride(), x.dtype, x.device, fields(x)

    def value(x: Any) -> Any:
        if id(x) in numbers:
            return numbers[id(x)]
        if isinstance(x, partial):
            x = x.func, x.args, x.keywords
        if isinstance(x, tuple | list):
            return type(x), *map(value, x)
        if isinstance(x, dict):
            return dict, *((name, value(inner)) for name, inner in x.items())
        if isinstance(x, Tensor) and x.numel() <= _MAX_COMPARED and not x.is_meta:
            return *layout(x), *x.flatten().tolist()
        return (type(x), x) if isinstance(x, _VALUES) else id(x)

    def fields(owner: nn.Module | Tensor) -> Any:
        read = {n: x for n, x in owner.__dict__.items() if n not in _IGNORED}
        if "expert_share" in read:  # one object per layer
            read["expert_share"] = type(read["expert_share"])
        return value({n: "place" if _is_index(n, x) else x for n, x in read.items()})

    return *map(layout, weights), *map(type, modules), *map(fields, modules)


class Hidden:
    """A placeholder for a layer index, which raises TypeError when it is used."""

    was_read = False  # whether it was used, even if the caller caught the error

    def _refuse(self, *_: Any) -> Any:
        self.was_read = True
        raise TypeError("the place of a layer in its model is hidden")

    __class__ = property(_refuse)  # read by isinstance


for _name in vars(int).keys() - {"__doc__", "__getattribute__", "__new__"}:
    if _name.startswith("__"):
        setattr(Hidden, _name, Hidden._refuse)


def twin_of(layer: nn.Module, place: Hidden | None) -> nn.Module:
    """Return a copy of a layer in which weights that would hide errors (zeros, all ones) are random.

    The layer is not changed, and the twin shares its large matrices.

    Args:
        place: placeholder for the layer index; None: the twin has the layer's own.
    """
    copies: dict[int, Tensor] = {}

    def tensor_of(_: str, x: Tensor) -> Tensor:
        if not isinstance(x, nn.Parameter):
            single = x.numel() == 1 and _may_be_random(x)
            return noise(tuple(x.shape), x.dtype, 1) if single else x
        if id(x) not in copies:
            copies[id(x)] = _randomized(x, len(copies) + 1)
        return copies[id(x)]

    twin = copy_of(layer, tensor_of)
    for module in () if place is None else twin.modules():
        fields = module.__dict__
        fields.update({name: place for name, x in fields.items() if _is_index(name, x)})
    return twin


def _is_index(name: str, value: Any) -> bool:
    return name in _INDEX_NAMES and type(value) is int


def _may_be_random(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.is_cpu


def _randomized(parameter: Any, seed: int) -> Any:
    """Return `parameter`, or a random one if its values would hide errors."""
    if not _may_be_random(parameter) or parameter.ndim > 2:
        return parameter
    scale = 1.0
    if parameter.ndim == 2:
        some, scale = parameter[:_CHECKED_ROWS], math.sqrt(max(1, parameter.shape[1]))
        if some.isfinite().all() and int(some.count_nonzero()) * 2 > some.numel():
            return parameter
    random = nn.Parameter(noise(tuple(parameter.shape), parameter.dtype, seed) / scale, False)
    random.__dict__.update(parameter.__dict__)
    return random
