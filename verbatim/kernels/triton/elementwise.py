"""Elementwise activations, with the bits of torch's functions on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from verbatim.kernels.options import Activation
from verbatim.kernels.triton.numbers import DTYPES, EXACT, exp, rounded, widened

SILU = tl.constexpr(int(Activation.SILU))
BLOCK = tl.constexpr(1024)  # elements per program


@triton.jit
def _activate(out, x, up, count, KIND: tl.constexpr):
    dtype: tl.constexpr = out.dtype.element_ty
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    value = widened(tl.load(x + at, mask=mask, other=0.0))
    numerator = value if KIND == SILU else tl.full([BLOCK], 1.0, tl.float32)
    result = rounded(tl.div_rn(numerator, 1.0 + exp(-value)), dtype)
    if up is not None:
        factor = widened(tl.load(up + at, mask=mask, other=0.0))
        result = rounded(widened(result) * factor, dtype)
    tl.store(out + at, result, mask=mask)


def supports(x: Tensor, activation: Activation) -> bool:
    """Return whether the kernel supports the activation and the dtype."""
    return activation in (Activation.SILU, Activation.SIGMOID) and x.dtype in DTYPES


def activate(x: Tensor, activation: Activation, up: Tensor | None = None) -> Tensor:
    """Return the activation of `x`, rounded to its dtype, times `up` of the same shape and dtype, if any."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if count := x.numel():
        up = None if up is None else up.contiguous()
        grid = (triton.cdiv(count, BLOCK.value),)
        _activate[grid](out, x, up, count, KIND=int(activation), **EXACT)
    return out
