"""Norms and activations by the compiled kernels.

They are the functions of fused layers (`layer.py`), so a layer run module by module is bit-identical.
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
_TYPES = {"P": ctypes.c_void_p, "L": ctypes.c_int64, "I": ctypes.c_int, "F": ctypes.c_float}


def activation_of(module: nn.Module) -> Activation | None:
    """Return the activation of a module, if the kernels support it."""
    name = type(module).__name__
    if type(module) is nn.SiLU or name == "SiLUActivation":
        return Activation.SILU
    tanh = type(module) is nn.GELU and module.approximate == "tanh"
    return Activation.GELU_TANH if tanh or name in ("GELUTanh", "PytorchGELUTanh") else None


def declared(
    library: ctypes.CDLL | None, name: str, dtype: torch.dtype | None, arguments: list[Any]
) -> Callable[..., None]:
    """Return a kernel with the types of its arguments, for a dtype if it has several."""
    assert library is not None
    function: Any = getattr(library, name if dtype is None else f"{name}_{SUFFIX[dtype]}")
    function.restype, function.argtypes = None, arguments
    return function  # type: ignore[no-any-return]


@functools.cache
def kernel(
    library: ctypes.CDLL | None, name: str, signature: str, dtype: torch.dtype | None = None
) -> Callable[..., None]:
    """Return a kernel by a letter for each argument: pointer, long, int or float."""
    return declared(library, name, dtype, [_TYPES[letter] for letter in signature])


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
    function = kernel(kernels.library(), "vb_rms_norm", "PPPLLFII", x.dtype)
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
    function = kernel(kernels.library(), "vb_activate", "PPPLII", gate.dtype)
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
