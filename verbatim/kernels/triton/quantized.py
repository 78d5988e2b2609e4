"""Quantized K and V in kernels, in the format that `quantization/rows.py` describes."""

from __future__ import annotations

import triton.language as tl

from verbatim.kernels.triton.numbers import helper, rounded, widened


@helper
def elements_of(group, WIDTH, GROUP, BITS):
    """Return the elements `[U, GROUP]` of a row's groups `[U]` in the order of their codes; else `WIDTH`.

    At 4 bits the two elements of a byte are adjacent.
    """
    i = tl.arange(0, GROUP)[None, :]
    first = group[:, None] * GROUP
    element = first + i
    if BITS == 4:
        half = (tl.minimum(WIDTH - first, GROUP) + 1) // 2
        element = tl.where(i // 2 < half, first + i // 2 + i % 2 * half, WIDTH)
    return element


@helper
def _round_away(x):
    """Round `x` away from zero to a bf16, in float32."""
    return (x.to(tl.int32, bitcast=True) + 0xFFFF & -0x10000).to(tl.float32, bitcast=True)


@helper
def store_groups(store, row, group, x, mask, WIDTH, GROUP, BITS):
    """Quantize groups `x` `[U, GROUP]`, in the order of `elements_of`, and store them in rows `[U]`.

    Args:
        mask: which of the elements exist.
    """
    levels: tl.constexpr = 2**BITS - 1
    x = widened(x)
    low = tl.min(tl.where(mask, x, float("inf")), 1) + 0.0  # -0 becomes 0
    high = tl.max(tl.where(mask, x, float("-inf")), 1)
    nans = tl.sum((mask & (x != x)).to(tl.int32), 1)
    low = tl.where((low > 0) & (low < 2.0**-126), 0.0, low)
    low = tl.where((low < 0) & (low > -(2.0**-126)), -(2.0**-126), low)
    truncated = (low.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)
    low = tl.where(low < 0, _round_away(low), truncated)
    step = tl.div_rn(high - low, tl.full(low.shape, levels, tl.float32)) + 0.0
    step = tl.where((step > 0) & (step < 2.0**-117), 2.0**-117, step)
    finite = (tl.abs(step) < float("inf")) & (nans == 0)
    scale = _round_away(step)
    used = finite & (scale > 0)
    divisor = tl.broadcast_to(tl.where(used, scale, 1.0)[:, None], x.shape)
    steps = tl.div_rn(x - low[:, None], divisor)
    code = (steps + 12582912.0) - 12582912.0  # 1.5 * 2**23: the nearest integer, ties to even
    code = tl.where(used[:, None] & mask, tl.minimum(code, levels), 0.0).to(tl.int32)
    head = low.to(tl.int32, bitcast=True) | (scale.to(tl.int32, bitcast=True) >> 16)
    head = tl.where(finite, head, 0x7FC07FC0)  # two NaN

    size: tl.constexpr = GROUP * BITS // 8
    code_bytes: tl.constexpr = (WIDTH * BITS + 7) // 8
    row_bytes: tl.constexpr = code_bytes + (WIDTH + GROUP - 1) // GROUP * 4
    if BITS == 4:
        pairs = tl.reshape(code, [code.shape[0], size, 2])
        code = tl.sum(pairs << 4 * tl.arange(0, 2)[None, None, :], 2)
    there = tl.max(mask.to(tl.int32), 1)[:, None] > 0
    start = store + row[:, None] * row_bytes
    at = group[:, None] * size + tl.arange(0, size)[None, :]
    tl.store(start + at, code.to(tl.uint8), mask=there & (at < code_bytes))
    byte = tl.arange(0, 4)[None, :]
    heads = (head[:, None] >> 8 * byte) & 255
    tl.store(start + code_bytes + group[:, None] * 4 + byte, heads.to(tl.uint8), mask=there)


@helper
def load_rows(store, row, mask, ROWS, WIDTH, BLOCK, BITS, GROUP, COMPUTE):
    """Load rows `[ROWS]` of a store of K or V: `[ROWS, BLOCK]` in `COMPUTE`, zero where there is nothing.

    Args:
        GROUP: elements per scale, at most `BLOCK`.
        BITS: bits per code; 0: the store holds floats.
    """
    if BITS == 0:
        at = tl.arange(0, BLOCK)[None, :]
        x = tl.load(store + row[:, None] * WIDTH + at, mask[:, None] & (at < WIDTH), other=0.0)
        if x.dtype != COMPUTE:
            x = widened(x)
    else:
        code_bytes: tl.constexpr = (WIDTH * BITS + 7) // 8
        row_bytes: tl.constexpr = code_bytes + (WIDTH + GROUP - 1) // GROUP * 4
        group = tl.arange(0, BLOCK // GROUP)[:, None]
        i = tl.arange(0, GROUP)[None, :]
        # The compiler takes rows at multiples of the block size to be aligned as blocks are.
        alignment: tl.constexpr = row_bytes & -row_bytes
        start = store + tl.multiple_of(row[:, None, None] * row_bytes, [1, 1, alignment])
        byte = i
        if BITS == 4:
            half = GROUP // 2
            if WIDTH % GROUP != 0:  # the last group is short
                half = (tl.maximum(tl.minimum(WIDTH - group * GROUP, GROUP), 1) + 1) // 2
            byte = i % half
        at = group * (GROUP * BITS // 8) + byte
        there = mask[:, None, None] & (group * GROUP + i < WIDTH)[None, :, :]
        code = tl.load(start + at[None, :, :], there, other=0).to(tl.int32)
        if BITS == 4:
            code = (code >> (i // half * 4)[None, :, :]) & 15
        part = tl.arange(0, 4)[None, None, :]
        there = mask[:, None, None] & (group * GROUP < WIDTH)[None, :, :]
        head = tl.load(start + code_bytes + group[None, :, :] * 4 + part, there, other=0)
        bits = tl.sum(head.to(tl.int32) << 8 * part, 2)[:, :, None]
        scale = (bits << 16).to(tl.float32, bitcast=True)
        low = (bits & -0x10000).to(tl.float32, bitcast=True)
        x = tl.reshape(rounded(low + scale * code.to(tl.float32), COMPUTE), [ROWS, BLOCK])
    return x
