"""Twins of layers, on which trials run, and which layers are so alike that a trial of one is one of all.

Norms, biases and single numbers of a twin are random, and matrices where they are zero: weights that make no
difference today may make one after the next training step. A twin also lacks its layer's place in the model.
"""

from __future__ import annotations

import enum
import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.model.differential import noise
from verbatim.model.packed import weights_of
from verbatim.model.weight_packing import WeightPacking

_MODEST = 64  # rows of a matrix that are looked at
_FEW = 4096  # numbers of a tensor that are compared, where it is no weight
_PLACES = frozenset({"layer_idx", "layer_id", "layer_number"})  # attributes
_NOT_READ = frozenset(vars(nn.Module())) - {"_parameters", "_buffers", "_modules"}
_NOT_READ |= {"_is_hf_initialized", "forward"}  # a gate
_VALUES = int | float | str | bytes | None | torch.dtype | torch.device | enum.Enum | WeightPacking


def structure_of(layer: nn.Module) -> tuple[Any, ...]:
    """Return all that the forward of a layer's twin depends on: equal for layers that are built alike.

    Values of weights are not part of it; of objects that are no plain values it has the ids.
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
        if isinstance(x, Tensor) and x.numel() <= _FEW and not x.is_meta:
            return *layout(x), *x.flatten().tolist()
        return (type(x), x) if isinstance(x, _VALUES) else id(x)

    def fields(owner: nn.Module | Tensor) -> Any:
        read = {n: x for n, x in owner.__dict__.items() if n not in _NOT_READ}
        if "expert_share" in read:  # experts that are elsewhere: each layer has one of its own
            read["expert_share"] = type(read["expert_share"])
        return value({n: "place" if _is_place(n, x) else x for n, x in read.items()})

    return *map(layout, weights), *map(type, modules), *map(fields, modules)


class Hidden:
    """The place of a twin in its model: no number, whose methods all raise.

    Attributes:
        was_read: one of them was called, even if its caller went on.
    """

    was_read = False

    def _refuse(self, *_: Any) -> Any:
        self.was_read = True
        raise TypeError("the place of a layer in its model is hidden")

    __class__ = property(_refuse)  # which isinstance reads


for _name in vars(int).keys() - {"__doc__", "__getattribute__", "__new__"}:
    if _name.startswith("__"):
        setattr(Hidden, _name, Hidden._refuse)


def twin_of(layer: nn.Module, place: Hidden | None) -> nn.Module:
    """Return a copy of a layer with random weights where its own would hide errors (zeros, all ones).

    Nothing of the layer itself is changed, and its large matrices are shared.

    Args:
        place: in the model, in place of the layer's; None: it has the same.
    """
    twins: dict[int, nn.Module] = {}
    parameters: dict[int, nn.Parameter | None] = {id(None): None}

    def of(module: nn.Module) -> nn.Module:
        if id(module) in twins:
            return twins[id(module)]
        twin = twins[id(module)] = object.__new__(type(module))
        fields = twin.__dict__
        fields.update(module.__dict__)
        fields.pop("forward", None)  # ours, or a gate, which would run the layer's own
        if place is not None:
            fields |= {name: place for name, x in fields.items() if _is_place(name, x)}
        fields["_parameters"] = own = dict(module._parameters)
        for name, parameter in own.items():
            if id(parameter) not in parameters:
                parameters[id(parameter)] = _telling(parameter, len(parameters))
            own[name] = parameters[id(parameter)]
        fields["_buffers"] = {
            name: noise(tuple(x.shape), x.dtype, 1)
            if x is not None and x.numel() == 1 and _may_be_random(x)
            else x
            for name, x in module._buffers.items()
        }
        fields["_modules"] = {
            name: None if child is None else of(child) for name, child in module._modules.items()
        }
        return twin

    return of(layer)


def _is_place(name: str, value: Any) -> bool:
    return name in _PLACES and type(value) is int


def _may_be_random(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.is_cpu


def _telling(parameter: Any, seed: int) -> Any:
    """Return `parameter`, or a random one if its values would hide errors."""
    if not _may_be_random(parameter) or parameter.ndim > 2:
        return parameter
    scale = 1.0
    if parameter.ndim == 2:
        some, scale = parameter[:_MODEST], math.sqrt(max(1, parameter.shape[1]))
        if some.isfinite().all() and int(some.count_nonzero()) * 2 > some.numel():
            return parameter
    made = nn.Parameter(noise(tuple(parameter.shape), parameter.dtype, seed) / scale, False)
    made.__dict__.update(parameter.__dict__)
    return made
