"""Products of 8-bit activations with quantized weights, by the formulas of `quantization/integers.py`.

Sums of codes are exact integers, and the rest is the same sequence of roundings, so every element has the
bits of the CPU's kernels, whatever the tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from verbatim.kernels.packing import WeightPacking
from verbatim.kernels.triton.numbers import EXACT, rounded, widened

_TILES = ((16, 32, 4), (64, 64, 4), (128, 64, 8))  # (rows, columns, warps), for more and more rows
_HALF_EVEN = tl.constexpr(1.5 * 2.0**23)  # adding it rounds to an integer, ties to even
_SMALLEST = tl.constexpr(2.0**-100)


@triton.jit
def _codes(codes, scales, sums, x, depth, groups, GROUP: tl.constexpr, SIZE: tl.constexpr):
    """Quantize one group of one row."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, SIZE)
    k = group * GROUP + at
    mask = (at < GROUP) & (k < depth)
    part = widened(tl.load(x + row * depth + k, mask=mask, other=0.0))
    is_finite = tl.sum((part - part != 0.0).to(tl.int32), 0) == 0
    peak = tl.max(tl.where(is_finite, tl.abs(part), 0.0), 0)
    fit = is_finite & (peak >= _SMALLEST)
    factor = tl.div_rn(127.0, tl.where(fit, peak, 1.0))
    code = tl.where(fit, (part * factor + _HALF_EVEN) - _HALF_EVEN, 0.0)
    tl.store(codes + row * depth + k, code.to(tl.int8), mask=mask)
    scale = tl.where(fit, tl.div_rn(peak, 127.0), tl.where(is_finite, 0.0, float("nan")))
    tl.store(scales + row * groups + group, scale)
    tl.store(sums + row * groups + group, tl.sum(code, 0))


def activation_codes(x: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize rows `[R, K]`: codes int8 `[R, K]`, scales `[R, groups]` and sums of codes `[R, groups]`."""
    (num_rows, depth), x = x.shape, x.contiguous()
    codes = torch.empty(num_rows, depth, dtype=torch.int8, device=x.device)
    scales = torch.empty(num_rows, triton.cdiv(depth, group), dtype=torch.float32, device=x.device)
    sums = torch.empty_like(scales)
    groups = scales.shape[1]
    size = triton.next_power_of_2(group)
    _codes[(num_rows, groups)](
        codes, scales, sums, x, depth, groups, GROUP=group, SIZE=size, num_warps=1, **EXACT
    )
    return codes, scales, sums


@triton.jit(do_not_specialize=["num_rows"])
def _integer_linear(
    out,
    codes,
    scales,
    sums,
    data,
    bias,
    num_rows,
    num_columns,
    depth,
    groups,
    stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row_mask, column_mask = row < num_rows, column < num_columns
    row_at = row.to(tl.int64)
    matrix = data.to(tl.pointer_type(tl.int32), bitcast=True)
    matrix += column.to(tl.int64) // 32 * stride * 32 + column % 32
    CODES: tl.constexpr = 32 // BITS  # per word
    WORDS: tl.constexpr = GROUP // CODES
    within, place = tl.arange(0, GROUP), tl.arange(0, CODES)
    shift = (place * 8 if BITS == 8 else place % 4 * 8 + place // 4 * 4)[None, :, None]
    total = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
    for group in range(groups):
        first = group * (1 + WORDS)  # word of the group's head, which precedes its codes
        k, word = group * GROUP + within, first + 1 + tl.arange(0, WORDS)
        a = tl.load(
            codes + row_at[:, None] * depth + k[None, :],
            mask=row_mask[:, None] & (k < depth)[None, :],
            other=0,
        )
        mask = column_mask[None, :] & (word < stride)[:, None]
        words = tl.load(matrix[None, :] + word[:, None] * 32, mask=mask, other=0)
        head = tl.load(matrix + first * 32, mask=column_mask, other=0)
        x_scale = tl.load(scales + row_at * groups + group, mask=row_mask, other=0.0)[:, None]
        x_sum = tl.load(sums + row_at * groups + group, mask=row_mask, other=0.0)[:, None]
        code = tl.reshape(words[:, None, :] >> shift & (1 << BITS) - 1, GROUP, COLUMNS)
        dots = tl.dot(a, (code - 128 if BITS == 8 else code).to(tl.int8), out_dtype=tl.int32)
        products = dots.to(tl.float32)
        if BITS == 8:
            products += 128.0 * x_sum
        scale = (head << 16).to(tl.float32, bitcast=True)[None, :]
        low = (head & -65536).to(tl.float32, bitcast=True)[None, :]
        total += x_scale * (scale * products + low * x_sum)
    if bias is not None:
        total += widened(tl.load(bias + column, mask=column_mask, other=0.0))[None, :]
    tl.store(
        out + row_at[:, None] * num_columns + column[None, :],
        rounded(total, out.dtype.element_ty),
        mask=row_mask[:, None] & column_mask[None, :],
    )


def linear(
    x: Tensor,
    data: Tensor,
    packing: WeightPacking,
    bias: Tensor | None = None,
    *,
    float32: bool = False,
) -> Tensor:
    """Return the product of x `[..., K]` and an interleaved matrix: `[..., N]` in x's dtype, or float32."""
    num_columns, depth = packing.width, packing.depth
    codes, scales, sums = activation_codes(x.reshape(-1, depth), packing.rows.group)
    num_rows, groups = scales.shape
    dtype = torch.float32 if float32 else x.dtype
    out = torch.empty(num_rows, num_columns, dtype=dtype, device=x.device)
    if out.numel():
        fits = (tile for tile in _TILES if num_rows <= tile[0])
        rows, columns, warps = next(fits, _TILES[-1])
        _integer_linear[(triton.cdiv(num_columns, columns), triton.cdiv(num_rows, rows))](
            out,
            codes,
            scales,
            sums,
            data,
            None if bias is None else bias.contiguous(),
            num_rows,
            num_columns,
            depth,
            groups,
            packing.row_words,
            ROWS=rows,
            COLUMNS=columns,
            GROUP=packing.rows.group,
            BITS=packing.rows.bits,
            num_warps=warps,
            num_stages=4,
            **EXACT,
        )
    return out.view(*x.shape[:-1], num_columns)
