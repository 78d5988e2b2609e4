"""Norms and activations by the compiled kernels.

They are the functions of fused layers (`layer.py`), so a layer run module by module is bit-identical.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from verbatim import kernels
from verbatim.kernels.functions import SUFFIX, run
from verbatim.kernels.options import Activation, NormKind


def activation_of(module: nn.Module) -> Activation | None:
    """Return the activation of a module, if the kernels support it."""
    name = type(module).__name__
    if type(module) is nn.SiLU or name == "SiLUActivation":
        return Activation.SILU
    tanh = type(module) is nn.GELU and module.approximate == "tanh"
    return Activation.GELU_TANH if tanh or name in ("GELUTanh", "PytorchGELUTanh") else None


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
    x = x.contiguous()
    out, width = torch.empty_like(x), x.shape[-1]
    if x.numel():
        rows, at = x.numel() // width, None if weight is None else weight.data_ptr()
        run("vb_rms_norm", x.dtype, out.data_ptr(), x.data_ptr(), at, rows, width, eps, kind)
    return out


@kernels.without_overrides
def activate(x: Tensor, activation: Activation) -> Tensor:
    """Compute the activation of `x`, rounded to its dtype. `served(x)` must hold."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        run("vb_activate", x.dtype, out.data_ptr(), x.data_ptr(), None, x.numel(), activation)
    return out
