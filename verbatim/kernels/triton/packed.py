"""Dequantization of matrices in registers, tile by tile, from the bytes that the CPU's kernels read.

`decode_tile` gives the bits of `quantization/matrix.py`'s `unpack` for every encoding: a number is
`step * code + zero`, rounded to float32, then to the matrix' dtype.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from verbatim.kernels.packing import BLOCK, BLOCKS, TABLES, Encoding, Packing, WeightPacking
from verbatim.kernels.triton.numbers import EXACT, helper, rounded

_TILE = 128  # elements of a row that a program unpacks at once


def format_of(packing: WeightPacking, data: Tensor, tile: int) -> tuple[Any, ...]:
    """Return the constants of a compiled kernel that `decode_tile` needs.

    Args:
        data: the bytes of the matrix.
        tile: elements along K of a tile, a power of two.

    Returns:
        The elements of a row decoded with one head, group, bits, encoding, bytes of a block, whether it is
        interleaved, the alignment of heads, and whether all groups are full.
    """
    rows, block_bytes = packing.rows, BLOCKS.get(packing.rows.encoding, 0)
    group = group_of(rows)
    if packing.interleaved:
        places = [4]
    else:
        places = [block_bytes or rows.code_bytes(packing.depth), packing.row_bytes]
    return (
        16 if block_bytes else math.gcd(group, tile),
        group,
        rows.bits,
        rows.encoding.name,
        block_bytes,
        packing.interleaved,
        math.gcd(4, data.data_ptr(), *places),
        packing.depth % group == 0,
    )


def group_of(rows: Packing) -> int:
    """Return the elements of a row between two that are stored alike."""
    return BLOCK if rows.encoding in BLOCKS else rows.group


def stride_of(packing: WeightPacking) -> int:
    """Return the bytes of a row, or its 4-byte words if it is interleaved."""
    return packing.row_words if packing.interleaved else packing.row_bytes


@functools.cache
def table_of(encoding: Encoding, device: torch.device) -> Tensor | None:
    """Return the table of an encoding on a device, if it has one."""
    return TABLES[encoding].to(device) if encoding in TABLES else None


@helper
def _byte(pointer, mask):
    return tl.load(pointer, mask=mask, other=0).to(tl.int32)


@helper
def _number(code, offset):
    """Return codes from 0 to 255, minus an integer, in float32: by their bits, as conversions are slow."""
    return (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + offset)


@helper
def _two_bytes(pointer, mask, ALIGN):
    """Load a 16-bit number, 0 to 65535."""
    if ALIGN >= 2:
        pair = pointer.to(tl.pointer_type(tl.uint16), bitcast=True)
        found = tl.load(pair, mask=mask, other=0).to(tl.int32)
    else:
        found = _byte(pointer, mask) | _byte(pointer + 1, mask) << 8
    return found


@helper
def _word(pointer, mask, ALIGN):
    """Load 32 bits."""
    if ALIGN == 4:
        found = tl.load(pointer.to(tl.pointer_type(tl.int32), bitcast=True), mask=mask, other=0)
    else:
        found = _two_bytes(pointer, mask, ALIGN) | _two_bytes(pointer + 2, mask, ALIGN) << 16
    return found


@helper
def _float16(pointer, mask, ALIGN):
    bits = _two_bytes(pointer, mask, ALIGN).to(tl.uint16)
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@helper
def _block_codes(block, j, at, mask, ENCODING):
    """Return the codes of elements `j + at` of blocks, for `j` a multiple of 16 and `at` below 16."""
    low = j % 32 + at  # within 32 bytes
    if ENCODING == "Q4_K":
        code = _byte(block + 16 + j // 64 * 32 + low, mask) >> j // 32 % 2 * 4 & 15
    elif ENCODING == "Q5_K":
        code = _byte(block + 48 + j // 64 * 32 + low, mask) >> j // 32 % 2 * 4 & 15
        code |= (_byte(block + 16 + low, mask) >> j // 32 & 1) << 4
    elif ENCODING == "Q6_K":
        code = _byte(block + j // 128 * 64 + j % 64 + at, mask) >> j % 128 // 64 * 4 & 15
        code |= (_byte(block + 128 + j // 128 * 32 + low, mask) >> j % 128 // 32 * 2 & 3) << 4
    elif ENCODING == "Q3_K":
        code = _byte(block + 32 + j // 128 * 32 + low, mask) >> j % 128 // 32 * 2 & 3
        code |= (_byte(block + low, mask) >> j // 32 & 1) << 2
    elif ENCODING == "Q2_K":
        code = _byte(block + 16 + j // 128 * 32 + low, mask) >> j % 128 // 32 * 2 & 3
    else:
        tl.static_assert(ENCODING == "NVFP4")
        code = _byte(block + 20 + j // 64 * 32 + low, mask) >> j // 32 % 2 * 4 & 15
    return code


@helper
def _block_heads(block, table, j, mask, ENCODING, ALIGN):
    """Return step and zero of the elements of blocks from `j` on, for `j` a multiple of 16."""
    group = j // 16
    zero = tl.zeros_like(group).to(tl.float32)
    if ENCODING == "Q4_K" or ENCODING == "Q5_K":
        pair = j // 32
        a = _byte(block + 4 + pair % 4, mask)
        b = _byte(block + 8 + pair % 4, mask)
        c = _byte(block + 12 + pair % 4, mask)
        scale = tl.where(pair < 4, a & 63, (c & 15) | a >> 6 << 4)
        least = tl.where(pair < 4, b & 63, c >> 4 | b >> 6 << 4)
        step = _float16(block, mask, ALIGN) * scale.to(tl.float32)
        zero = -(_float16(block + 2, mask, ALIGN) * least.to(tl.float32))
    elif ENCODING == "Q6_K":
        scale = (_byte(block + 192 + group, mask) ^ 128) - 128
        step = _float16(block + 208, mask, ALIGN) * scale.to(tl.float32)
    elif ENCODING == "Q3_K":
        scale = _byte(block + 96 + group % 8, mask) >> group // 8 * 4 & 15
        scale |= (_byte(block + 104 + group % 4, mask) >> group // 4 * 2 & 3) << 4
        step = _float16(block + 108, mask, ALIGN) * (scale - 32).to(tl.float32)
    elif ENCODING == "Q2_K":
        both = _byte(block + group, mask)
        step = _float16(block + 80, mask, ALIGN) * (both & 15).to(tl.float32)
        zero = -(_float16(block + 82, mask, ALIGN) * (both >> 4).to(tl.float32))
    else:
        factor = _word(block, mask, ALIGN).to(tl.float32, bitcast=True)
        step = tl.load(table + 16 + _byte(block + 4 + group, mask)) * factor
    return step, zero


@helper
def _group_codes(row, first, at, depth, mask, SPAN, GROUP, BITS, INTERLEAVED, WHOLE, PAIRS):
    """Return the codes of elements `first + at` of rows, for `first` a multiple of SPAN, `at` below it."""
    inside = at if SPAN == GROUP else first % GROUP + at
    if INTERLEAVED:
        per_word = 32 // BITS
        word = first // GROUP * (1 + GROUP // per_word) + 1 + inside // per_word
        code = _byte(row + word * 128 + inside % 4, mask)
        if BITS == 4:
            code = code >> inside // 4 % 2 * 4 & 15
    elif PAIRS:
        size: tl.constexpr = SPAN * BITS // 16
        pairs = row.to(tl.pointer_type(tl.uint16), bitcast=True) + first * BITS // 16
        pairs = tl.load(pairs + tl.arange(0, size)[None, :, None], mask=mask, other=0).to(tl.int32)
        if BITS == 8:
            codes = tl.permute(tl.join(pairs & 255, pairs >> 8), (0, 1, 3, 2))
        else:
            low, high = tl.join(pairs & 15, pairs >> 8 & 15), tl.join(pairs >> 4 & 15, pairs >> 12)
            codes = tl.permute(tl.join(low, high), (0, 4, 1, 3, 2))
        code = tl.reshape(codes, first.shape[0], SPAN, row.shape[2])
    elif BITS == 8:
        code = _byte(row + first + at, mask)
    else:
        half = GROUP // 2
        if not WHOLE:  # the last group is short
            half = (tl.minimum(GROUP, depth - first // GROUP * GROUP) + 1) // 2
        code = _byte(row + first // GROUP * (GROUP // 2) + inside % half, mask)
        code = code >> inside // half * 4 & 15
    return code


@helper
def _group_head(row, first, depth, mask, GROUP, BITS, ENCODING, INTERLEAVED, ALIGN):
    """Return the bits of the heads of the groups that contain elements `first`."""
    group = first // GROUP
    if INTERLEAVED:
        head = _word(row + group * (1 + GROUP * BITS // 32) * 128, mask, ALIGN)
    elif ENCODING == "HALF" or ENCODING == "MXFP4":
        head = _two_bytes(row + (depth * BITS + 7) // 8 + group * 2, mask, ALIGN)
    else:
        head = _word(row + (depth * BITS + 7) // 8 + group * 4, mask, ALIGN)
    return head


@helper
def _rows_at(data, column, stride, INTERLEAVED):
    """Return the address of the first byte of each row `column` of the matrix."""
    column = column.to(tl.int64)
    if INTERLEAVED:
        row = data + column // 32 * stride * 128 + column % 32 * 4
    else:
        row = data + column * stride
    return row


@helper
def decode_tile(data, table, columns, start, depth, DTYPE, DEPTH, FORMAT):
    """Return elements `start` to `start + DEPTH` of some columns, dequantized: `[DEPTH, C]`, 0 outside.

    Args:
        columns: (column numbers `[C]`, number of columns of the matrix, stride of its layout).
        depth: depth of the matrix.
    """
    column, num_columns, stride = columns
    SPAN: tl.constexpr = FORMAT[0]
    GROUP: tl.constexpr = FORMAT[1]
    BITS: tl.constexpr = FORMAT[2]
    ENCODING: tl.constexpr = FORMAT[3]
    BLOCK_BYTES: tl.constexpr = FORMAT[4]
    INTERLEAVED: tl.constexpr = FORMAT[5]
    ALIGN: tl.constexpr = FORMAT[6]
    WHOLE: tl.constexpr = FORMAT[7]
    ALIGNED: tl.constexpr = WHOLE and not INTERLEAVED and ALIGN % 2 == 0 and SPAN * BITS % 16 == 0
    # Codes are loaded two bytes at a time.
    PAIRS: tl.constexpr = ALIGNED and (BITS == 8 or SPAN == GROUP)
    first = start + tl.arange(0, DEPTH // SPAN)[:, None, None] * SPAN
    at = tl.arange(0, SPAN)[None, :, None]
    head_mask = (first < depth) & (column < num_columns)[None, None, :]
    mask = head_mask if WHOLE else head_mask & (first + at < depth)
    row = _rows_at(data, column, stride, INTERLEAVED)[None, None, :]
    has_zero = True
    if BLOCK_BYTES > 0:
        block = row + first // 256 * BLOCK_BYTES
        step, zero = _block_heads(block, table, first % 256, head_mask, ENCODING, ALIGN)
        code = _block_codes(block, first % 256, at, mask, ENCODING)
        has_zero = ENCODING != "NVFP4"
        if ENCODING == "NVFP4":
            number = tl.load(table + code)
        elif ENCODING == "Q6_K":
            number = _number(code, 32)
        elif ENCODING == "Q3_K":
            number = _number(code, 4)
        else:
            number = _number(code, 0)
    else:
        head = _group_head(row, first, depth, head_mask, GROUP, BITS, ENCODING, INTERLEAVED, ALIGN)
        code = _group_codes(
            row, first, at, depth, mask, SPAN, GROUP, BITS, INTERLEAVED, WHOLE, PAIRS
        )
        zero = 0.0
        if ENCODING == "AFFINE" or ENCODING == "CENTERED":
            step = (head << 16).to(tl.float32, bitcast=True)
            zero = (head & -65536).to(tl.float32, bitcast=True)
            number = _number(code, 8 if ENCODING == "CENTERED" else 0)
        elif ENCODING == "ZERO_POINT":
            step = (head & -256).to(tl.float32, bitcast=True)
            number = _number(code, 0) - _number(head & 255, 0)
        elif ENCODING == "SIGNED":
            step = head.to(tl.float32, bitcast=True)
            number = _number(code, 1 << BITS - 1)
        elif ENCODING == "HALF":
            step = head.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
            number = _number(code, 1 << BITS - 1)
        else:
            has_zero = False
            number = tl.load(table + code)
            if ENCODING == "MXFP4":
                step = (head << 16).to(tl.float32, bitcast=True)
            else:
                step = head.to(tl.float32, bitcast=True)
    # The product is exact if `zero` is not 0, so there is one rounding either way.
    value = tl.fma(step, number, zero) if has_zero else step * number
    if not WHOLE:
        value = tl.where(mask, value, 0.0)
    return tl.reshape(rounded(value, DTYPE), DEPTH, column.shape[0])


@triton.jit
def _unpack(
    out, data, table, rows, num_columns, depth, stride, DEPTH: tl.constexpr, FORMAT: tl.constexpr
):
    place = tl.program_id(0) + tl.arange(0, 1)
    start = tl.program_id(1) * DEPTH
    columns = tl.load(rows + place), num_columns, stride
    tile = decode_tile(data, table, columns, start, depth, out.dtype.element_ty, DEPTH, FORMAT)
    k = start + tl.arange(0, DEPTH)[:, None]
    tl.store(out + place.to(tl.int64)[None, :] * depth + k, tile, mask=k < depth)


def unpack(data: Tensor, packing: WeightPacking, rows: Tensor) -> Tensor:
    """Dequantize the rows `rows` `[n]` of a quantized matrix on their GPU: `[n, depth]`."""
    out = torch.empty(len(rows), packing.depth, dtype=packing.dtype, device=data.device)
    if out.numel():
        _unpack[(len(rows), triton.cdiv(packing.depth, _TILE))](
            out,
            data,
            table_of(packing.rows.encoding, data.device),
            rows,
            packing.width,
            packing.depth,
            stride_of(packing),
            DEPTH=_TILE,
            FORMAT=format_of(packing, data, _TILE),
            **EXACT,
        )
    return out
