"""Unwraps models, and refuses sharded ones. Classes are compared by name to avoid optional imports."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from verbatim.errors import NotSupported
from verbatim.options import dtype_name

# The attribute that holds the wrapped model. The wrappers' own forwards communicate with other ranks (such
# as to broadcast buffers) or compile, which generation must not do.
_INSIDE = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
}
_SHARDED = ("FullyShardedDataParallel", "FSDPModule", "DTensor")
_PEFT = frozenset({"peft.peft_model.PeftModel", "peft.mixed_model.PeftMixedModel"})


def unwrap(model: Any) -> Any:
    """Return the model inside DistributedDataParallel, DataParallel and torch.compile wrappers."""
    while (inner := next((_INSIDE[n] for n in _names(model) if n in _INSIDE), None)) is not None:
        model = getattr(model, inner)
    return model


def is_transformers(model: Any) -> bool:
    """Return whether `model` is a transformers model, with or without PEFT adapters."""
    from transformers import PreTrainedModel

    while not _PEFT.isdisjoint(_names(model)):
        model = model.get_base_model()
    return isinstance(model, PreTrainedModel)


def modules_of(model: Any) -> list[nn.Module]:
    """Return the model or, if it is not a module, the modules among its (or a bound method's) attributes."""
    model = getattr(model, "__self__", model)
    if isinstance(model, nn.Module):
        return [model]
    values = getattr(model, "__dict__", {}).values()
    return [value for value in values if isinstance(value, nn.Module)]


def device_of(model: Any) -> torch.device:
    """Return the device of the model's first parameter; the CPU if it has none."""
    parameters = (p for module in modules_of(model) for p in module.parameters())
    return next((p.device for p in parameters), torch.device("cpu"))


def check_runnable(model: Any) -> None:
    """Check that the whole model is in this process and on one device, the CPU or a GPU.

    Raises:
        NotSupported: the model is sharded over ranks, or a parameter is complex or on another device.
    """
    first = None
    for module in modules_of(model):
        for layer in module.modules():
            _refuse_sharded(layer, type(layer).__name__)
        for name, parameter in module.named_parameters():
            _refuse_sharded(parameter, name)
            if parameter.device.type not in ("cpu", "cuda"):
                raise NotSupported(
                    f"{name} is on {parameter.device}; it must be on the CPU or on a CUDA GPU"
                )
            first = first or parameter.device
            if parameter.device != first:
                raise NotSupported(
                    f"{name} is on {parameter.device} and others are on {first}; a live module "
                    "must be on one device"
                )
            if parameter.is_complex():
                raise NotSupported(f"{name} is {dtype_name(parameter.dtype)}: complex weights")


def _refuse_sharded(part: Any, name: str) -> None:
    for cls in type(part).__mro__:
        if cls.__name__ in _SHARDED and cls.__module__.startswith("torch.distributed"):
            raise NotSupported(
                f"{name} is sharded over ranks ({cls.__name__}): its forward gathers weights from "
                "all of them, and ranks make different numbers of forwards. Gather the weights "
                "into a module of their own (or use DistributedDataParallel, which keeps the "
                "whole module on every rank)"
            )


def _names(value: Any) -> set[str]:
    return {f"{cls.__module__}.{cls.__qualname__}" for cls in type(value).__mro__}
