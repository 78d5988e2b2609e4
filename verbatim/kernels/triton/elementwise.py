"""Elementwise activations, with the bits of torch's functions on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from verbatim.kernels.options import Activation
from verbatim.kernels.triton.numbers import DTYPES, EXACT, exp, rounded, widened

SILU = tl.constexpr(int(Activation.SILU))


@triton.jit
def _activate(
    out,
    x,
    up,
    count,
    KIND: tl.constexpr,
    HAS_UP: tl.constexpr,
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    value = widened(tl.load(x + at, mask=mask, other=0.0))
    numerator = value if KIND == SILU else tl.full([BLOCK], 1.0, tl.float32)
    result = rounded(tl.div_rn(numerator, 1.0 + exp(-value)), DTYPE)
    if HAS_UP:
        factor = widened(tl.load(up + at, mask=mask, other=0.0))
        result = rounded(widened(result) * factor, DTYPE)
    tl.store(out + at, result, mask=mask)


def supports(x: Tensor, activation: Activation) -> bool:
    """Return whether the kernel supports the activation and the dtype."""
    return activation in (Activation.SILU, Activation.SIGMOID) and x.dtype in DTYPES


def activate(x: Tensor, activation: Activation, up: Tensor | None = None) -> Tensor:
    """Return the activation of `x`, rounded to its dtype, times `up` of the same shape and dtype, if any."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if count := x.numel():
        _activate[(triton.cdiv(count, 1024),)](
            out,
            x,
            x if up is None else up.contiguous(),
            count,
            KIND=int(activation),
            HAS_UP=up is not None,
            BLOCK=1024,
            DTYPE=DTYPES[x.dtype],
            **EXACT,
        )
    return out
