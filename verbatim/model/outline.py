"""Shapes of K, V and states of a model, found by inspection without data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from verbatim import kernels
from verbatim.errors import UnsupportedModel
from verbatim.model.decoder import register
from verbatim.model.patching import exclusive
from verbatim.model.spec import InspectionContext, inner_model, inspect_forward, takes_positions

_aten = torch.ops.aten


def outline(module: nn.Module) -> InspectionContext:
    """Return the shapes of K, V and states, from an inspection of a module whose weights need no data.

    Of a model that can't be run, those that came before its forward failed.
    """
    register()
    context, inner = InspectionContext(), inner_model(module)
    hollow = _Hollow()  # type: ignore[no-untyped-call]
    with (
        exclusive,
        kernels.using("none"),
        _without_weights(module),
        hollow,
        suppress(UnsupportedModel),
    ):
        inspect_forward(module, inner, context, positions=takes_positions(inner))
    return context


@contextmanager
def _without_weights(module: nn.Module) -> Iterator[None]:
    """Put parameters on the meta device in the place of a module's own within the block."""
    owned = [(layer._parameters, dict(layer._parameters)) for layer in module.modules()]
    hollow: dict[Any, nn.Parameter] = {None: None}  # type: ignore[dict-item]
    for parameter in module.parameters():
        empty = torch.empty_like(parameter, device="meta")
        hollow[parameter] = nn.Parameter(empty, requires_grad=False)
    try:
        for parameters, own in owned:
            parameters.update({name: hollow[parameter] for name, parameter in own.items()})
        yield
    finally:
        for parameters, own in owned:
            parameters.update(own)


class _Hollow(TorchDispatchMode):
    """Computes zeros wherever a weight on the meta device takes part, but for views of weights alone."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        hollow = [x.is_meta for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not any(hollow):
            if kwargs.get("device") == torch.device("meta"):  # a weight's, say
                kwargs["device"] = torch.device("cpu")
            return func(*args, **kwargs)
        if func is _aten.equal.default:
            return True
        if func is _aten._local_scalar_dense.default:
            return func(torch.zeros_like(args[0], device="cpu"))
        if func._schema.is_mutable:
            return args[0]
        stays = all(hollow) and kwargs.get("device") is None
        if "device" in kwargs:
            kwargs["device"] = torch.device("meta")
        args, kwargs = tree_map(
            lambda x: x.to("meta") if isinstance(x, Tensor) else x, (args, kwargs)
        )
        made = func(*args, **kwargs)
        return made if stays else tree_map(_zeros, made)


def _zeros(made: Any) -> Any:
    return torch.zeros_like(made, device="cpu") if isinstance(made, Tensor) else made
