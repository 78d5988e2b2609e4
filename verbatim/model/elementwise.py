"""Norms and activations by the compiled kernels.

They are the functions of fused layers (`layer.py`), so a layer run module by module is bit-identical.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from verbatim import kernels
from verbatim.kernels.functions import SUFFIX, addresses, run, struct_of
from verbatim.kernels.options import Activation, NormKind
from verbatim.model.differential import noise


@struct_of("norm")
class NormStruct(ctypes.Structure):
    """`vb::Norm` of kernels/elementwise.h."""

    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("width", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("kind", ctypes.c_int32),
        ("bias", ctypes.c_void_p),
    ]


OF_MLPS = [a for a in Activation if not Activation.SIGMOID <= a <= Activation.SOFTPLUS]


def activation_of(module: Any) -> Activation | None:
    """Return the activation of an MLP that a module computes, if the kernels have it."""
    # Nothing here is recorded, nor made on the default device of a model that is being opened.
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        x = 3.0 * noise((999,), torch.float32)
        x[::9] *= 100.0  # where some are clamped
        if not served(x):
            return None
        try:
            found = type(module).forward(module, x)
            return next(a for a in OF_MLPS if torch.allclose(activate(x, a), found, 1e-5, 1e-6))
        except Exception:  # it is anything else
            return None


def served(x: Tensor, activation: Activation | None = None) -> bool:
    """Return whether the kernels support `x`: float32 and bfloat16 on the CPU, without gradients.

    With an activation, also on a GPU, if the kernels there have it.
    """
    if x.requires_grad and torch.is_grad_enabled():
        return False
    if activation is not None and kernels.triton_serves(x.device):
        from verbatim.kernels.triton import elementwise

        return elementwise.served(x, activation)
    return x.dtype in SUFFIX and x.is_cpu and kernels.library() is not None


@kernels.without_overrides
def norm(
    x: Tensor, weight: Tensor | None, eps: float, kind: NormKind, bias: Tensor | None = None
) -> Tensor:
    """Compute the norm over the last dimension of `x` `[..., N]`; `weight` and `bias` `[N]` have its dtype,
    or are None.

    `served(x)` must hold. 1 / sqrt(mean + eps) is computed in float32, the sum of squares in sixteen lanes.
    """
    x = x.contiguous()
    out, width = torch.empty_like(x), x.shape[-1]
    if x.numel():
        at_weight, at_bias = addresses(weight, bias)
        struct = NormStruct(at_weight, width, eps, kind, at_bias)
        at = out.data_ptr(), x.data_ptr(), ctypes.byref(struct)
        run("vb_norm", x.dtype, *at, x.numel() // width)
    return out


@kernels.without_overrides
def activate(x: Tensor, activation: Activation, up: Tensor | None = None) -> Tensor:
    """Compute the activation of `x`, rounded to its dtype, and times `up`.

    `served(x, activation)` must hold.
    """
    if kernels.triton_serves(x.device):
        from verbatim.kernels.triton import elementwise

        return elementwise.activate(x, activation, up)
    x = x.contiguous()
    out, up = torch.empty_like(x), None if up is None else up.contiguous()
    if x.numel():
        run("vb_activate", x.dtype, *addresses(out, x, up), x.numel(), activation)
    return out
