"""Norms and activations by the compiled kernels.

They are the functions of fused layers (`layer.py`), so a layer run module by module has the same bits.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from verbatim import kernels
from verbatim.kernels.options import Activation, NormKind

SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}
_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


def activation_of(module: nn.Module) -> Activation | None:
    """Return the activation of a module, if the kernels support it."""
    name = type(module).__name__
    if type(module) is nn.SiLU or name == "SiLUActivation":
        return Activation.SILU
    tanh = type(module) is nn.GELU and module.approximate == "tanh"
    return Activation.GELU_TANH if tanh or name in ("GELUTanh", "PytorchGELUTanh") else None


def declared(
    library: ctypes.CDLL | None, name: str, dtype: torch.dtype, arguments: list[Any]
) -> Callable[..., None]:
    """Return the kernel of this name for a dtype, with the types of its arguments."""
    assert library is not None
    function = getattr(library, f"{name}_{SUFFIX[dtype]}")
    function.restype, function.argtypes = None, arguments
    return function  # type: ignore[no-any-return]


@functools.cache
def _function(library: ctypes.CDLL | None, name: str, dtype: torch.dtype) -> Callable[..., None]:
    arguments = {
        "vb_rms_norm": [*[_POINTER] * 3, _LONG, _LONG, ctypes.c_float, _INT, _INT],
        "vb_activate": [*[_POINTER] * 3, _LONG, _INT, _INT],
    }[name]
    return declared(library, name, dtype, arguments)


def served(x: Tensor) -> bool:
    """Return whether the kernels support `x`: float32 and bfloat16 on the CPU, without gradients."""
    return (
        x.dtype in SUFFIX
        and x.is_cpu
        and not (x.requires_grad and torch.is_grad_enabled())
        and kernels.library() is not None
    )


@kernels.without_overrides
def rms_norm(x: Tensor, weight: Tensor | None, eps: float, kind: NormKind) -> Tensor:
    """Compute the norm over the last dimension of `x` `[..., N]`; `weight` `[N]` has its dtype, or is None.

    `served(x)` must hold. 1 / sqrt(mean + eps) is computed in float32, the sum of squares in sixteen lanes.
    """
    function = _function(kernels.library(), "vb_rms_norm", x.dtype)
    x = x.contiguous()
    out, width = torch.empty_like(x), x.shape[-1]
    if x.numel():
        pointer = None if weight is None else weight.data_ptr()
        function(
            out.data_ptr(),
            x.data_ptr(),
            pointer,
            x.numel() // width,
            width,
            eps,
            kind,
            torch.get_num_threads(),
        )
    return out


@kernels.without_overrides
def activate(gate: Tensor, activation: Activation, up: Tensor | None = None) -> Tensor:
    """Compute the activation of `gate`, rounded to its dtype, times `up` of the same shape, if given.

    `served(gate)` must hold.
    """
    function = _function(kernels.library(), "vb_activate", gate.dtype)
    assert up is None or up.shape == gate.shape
    gate = gate.contiguous()
    up = None if up is None else up.contiguous()
    out = torch.empty_like(gate)
    if gate.numel():
        function(
            out.data_ptr(),
            gate.data_ptr(),
            None if up is None else up.data_ptr(),
            gate.numel(),
            activation,
            torch.get_num_threads(),
        )
    return out
