"""RMS norms: one program per row, so that a row's bits do not depend on other rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from verbatim.kernels.options import NormKind
from verbatim.kernels.triton.numbers import DTYPES, EXACT, rounded, widened

BARE, ROUNDED = tl.constexpr(int(NormKind.BARE)), tl.constexpr(int(NormKind.ROUNDED))
ONE_PLUS = tl.constexpr(int(NormKind.ONE_PLUS))
SCALED_FIRST = tl.constexpr(int(NormKind.SCALED_FIRST))


@triton.jit
def _rms_norm(
    out, summed, x, residual, weight, width, eps, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    dtype: tl.constexpr = out.dtype.element_ty
    at = tl.arange(0, BLOCK)
    mask = at < width
    place = tl.program_id(0).to(tl.int64) * width + at
    values = widened(tl.load(x + place, mask=mask, other=0.0))
    if residual is not None:
        values += widened(tl.load(residual + place, mask=mask, other=0.0))
        both = rounded(values, dtype)
        tl.store(summed + place, both, mask=mask)
        values = widened(both)
    if KIND != BARE:
        factor = widened(tl.load(weight + at, mask=mask, other=0.0))
        if KIND >= ONE_PLUS:
            factor += 1.0
        if KIND > ONE_PLUS:
            factor = widened(rounded(factor, dtype))
        if KIND == SCALED_FIRST:
            values = widened(rounded(values * factor, dtype))
    mean = tl.sum(values * values, 0) / width
    normed = values * (1.0 / tl.sqrt_rn(mean + eps))
    if KIND != BARE and KIND != SCALED_FIRST:
        if KIND == ROUNDED:
            normed = widened(rounded(normed, dtype))
        normed = factor * normed
    tl.store(out + place, rounded(normed, dtype), mask=mask)


def supports(x: Tensor, weight: Tensor | None) -> bool:
    """Return whether the kernel supports these dtypes."""
    return x.dtype in DTYPES and (weight is None or weight.dtype is x.dtype)


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, kind: NormKind, *, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the norm over the last dimension of `x` `[..., N]`, by `verbatim.model.norms.formula`.

    With a `residual` of `x`'s shape, the norm is that of their rounded sum.

    Returns:
        The norm, and its input: `x` or that sum.
    """
    x = x.contiguous()
    out, width = torch.empty_like(x), x.shape[-1]
    summed = x
    if residual is not None:
        residual, summed = residual.contiguous(), torch.empty_like(x)
    if x.numel():
        block = triton.next_power_of_2(width)
        tensors, constants = (out, summed, x, residual, weight), {"KIND": int(kind), "BLOCK": block}
        warps = min(16, max(1, block // 256))
        grid = (x.numel() // width,)
        _rms_norm[grid](*tensors, width, eps, **constants, num_warps=warps, **EXACT)
    return out, summed
