"""Norms and activations computed by the compiled kernels.

Fused layers (`layer.py`) use the same functions, so they are bit-identical to layers run module by module.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from verbatim import kernels
from verbatim.kernels.functions import SUFFIX, addresses, run, struct_layout
from verbatim.kernels.options import Activation, NormKind
from verbatim.model.differential import noise, trial


@struct_layout("P weight\nL width\nF eps\nI kind\nP bias", size="norm")
class NormStruct(ctypes.Structure):
    """`vb::Norm` of kernels/elementwise.h."""


MLP_ACTIVATIONS = [a for a in Activation if not Activation.SIGMOID <= a <= Activation.SOFTPLUS]


def activation_of(act: Any) -> Activation | None:
    """Return the MLP activation of a module or a function, by a trial; None if the kernels don't have it."""
    with trial():  # not on the default device of a model that is being opened
        x = 3.0 * noise((999,), torch.float32)
        x[::9] *= 100.0  # large enough for activations that clamp
        if not supports(x):
            return None
        try:
            expected = type(act).forward(act, x) if isinstance(act, nn.Module) else act(x)
            return next(
                a for a in MLP_ACTIVATIONS if torch.allclose(activate(x, a), expected, 1e-5, 1e-6)
            )
        except Exception:  # not an activation
            return None


def supports(x: Tensor, activation: Activation | None = None) -> bool:
    """Return whether the kernels support `x`: float32 or bfloat16 on the CPU, without gradients.

    With an `activation`, also on a GPU, if the Triton kernels have it.
    """
    if x.requires_grad and torch.is_grad_enabled():
        return False
    if activation is not None and kernels.uses_triton(x.device):
        from verbatim.kernels.triton import elementwise

        return elementwise.supports(x, activation)
    return x.dtype in SUFFIX and x.is_cpu and kernels.library() is not None


@kernels.without_overrides
def norm(
    x: Tensor, weight: Tensor | None, eps: float, kind: NormKind, bias: Tensor | None = None
) -> Tensor:
    """Normalize `x` `[..., N]` over its last dimension; requires `supports(x)`.

    `weight` and `bias` `[N]` have the dtype of `x`, or are None. 1 / sqrt(mean + eps) is computed in
    float32, from a sum of squares in sixteen lanes.
    """
    x = x.contiguous()
    out, width = torch.empty_like(x), x.shape[-1]
    if x.numel():
        at_weight, at_bias = addresses(weight, bias)
        struct = NormStruct(at_weight, width, eps, kind, at_bias)
        pointers = out.data_ptr(), x.data_ptr(), ctypes.byref(struct)
        run("vb_norm", x.dtype, *pointers, x.numel() // width)
    return out


@kernels.without_overrides
def activate(x: Tensor, activation: Activation, up: Tensor | None = None) -> Tensor:
    """Return the activation of `x`, rounded, times `up` if given; requires `supports(x, activation)`."""
    if kernels.uses_triton(x.device):
        from verbatim.kernels.triton import elementwise

        return elementwise.activate(x, activation, up)
    x = x.contiguous()
    out, up = torch.empty_like(x), None if up is None else up.contiguous()
    if x.numel():
        run("vb_activate", x.dtype, *addresses(out, x, up), x.numel(), activation)
    return out
