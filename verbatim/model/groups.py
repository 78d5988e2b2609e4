"""Quantization of groups in torch: the reference of the packing kernels.

`quantize.py` describes the layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verbatim.errors import ModelError
from verbatim.model.gguf_blocks import pack_blocks, unpack_blocks
from verbatim.model.weight_packing import (
    BLOCKS,
    TABLES,
    Encoding,
    WeightPacking,
    nearest,
    stretches,
)

LARGEST = 2.0**126  # largest weight, so that a group's range is finite
PIECE = 1 << 20  # elements packed at once
_HIGH_BITS = -0x10000  # the bits of a float32 that a bf16 keeps


def unfit(name: str) -> ModelError:
    """Return the error for a weight that can't be quantized."""
    return ModelError(
        f"quantization: {name} has NaN, an infinity or a number beyond {LARGEST:.3g}, which can't be "
        "quantized"
    )


def _encode(
    x: Tensor, dim: int, packing: WeightPacking, name: str
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Quantize groups to codes in bytes (two per byte with 4 bits), and the parts of their heads.

    The parts are int16 or int32, and follow one another in a row.
    """
    bits, encoding = packing.quantization.bits, packing.encoding
    levels = 2**bits - 1
    low, high = x.aminmax(dim=dim, keepdim=True)
    peak = torch.maximum(high, -low)
    if not bool((peak <= LARGEST).all()):  # a NaN is not, either
        raise unfit(name)
    zero: Tensor | float = 0.0
    if encoding is Encoding.AFFINE:
        zero = low = _round_down(low + 0.0)  # -0 becomes 0
        scale = _round_up((high - low) / levels + 0.0)
        code = ((x - low) / scale).round()
    elif encoding is Encoding.ZERO_POINT:
        low, high = low.clamp(max=0), high.clamp(min=0)
        scale = _round_up((high - low) / levels, 8)
        zero = torch.where(scale > 0, -low / scale, 0).round()
        code = (x / scale).round() + zero
    elif encoding is Encoding.SIGNED:
        scale = peak / (levels // 2)
        code = (x / scale).round() + (levels + 1) // 2
    elif encoding is Encoding.HALF:
        scale = (peak / (levels // 2)).half().float()
        code = (x / scale).round() + (levels + 1) // 2
    elif encoding is Encoding.CENTERED:
        scale = _round_up((high - low) / levels)
        zero = (low + 8 * scale).bfloat16().float()
        code = ((x - zero) / scale).round() + 8
    elif encoding is Encoding.FP8:
        scale = peak / 448
        code = (x / scale).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        table = TABLES[encoding].to(x.device)
        scale = peak / table.max()
        if encoding is Encoding.MXFP4:
            scale = scale.log2().ceil().exp2()
        code = nearest(x / scale, table)
    if not bool(scale.isfinite().all()):  # no float16
        raise unfit(name)
    if encoding not in (Encoding.FP8, *TABLES):
        code = code.clamp_(0, levels)
    code = code.masked_fill(scale == 0, 0).to(torch.uint8)
    if encoding is Encoding.AFFINE:
        return halved(code, dim, bits), (_upper_half(scale), _upper_half(low))
    return halved(code, dim, bits), (heads_of(scale, zero, encoding),)


def halved(code: Tensor, dim: int, bits: int) -> Tensor:
    """Put codes of 4 bits two in a byte: those of the first half of a group below those of the second."""
    if bits == 8:
        return code
    half = (code.shape[dim] + 1) // 2
    first, last = code.narrow(dim, 0, half), code.narrow(dim, half, code.shape[dim] - half)
    out = first.clone()
    out.narrow(dim, 0, last.shape[dim]).bitwise_or_(last << 4)
    return out


def heads_of(scale: Tensor, zero: Tensor | float, encoding: Encoding) -> Tensor:
    """Return the heads of groups, but those of `AFFINE`, as int32 or int16.

    Args:
        scale: float32. What an encoding has no room for is rounded off.
        zero: of `ZERO_POINT`: 0 to 255; of `CENTERED`: float32.
    """
    if encoding is Encoding.HALF:
        return scale.half().view(torch.int16)
    if encoding is Encoding.CENTERED:
        return scale.view(torch.int32) >> 16 & 0xFFFF | torch.as_tensor(zero).view(torch.int32)
    if encoding is Encoding.ZERO_POINT:
        upper = (scale.view(torch.int32) + 0x80) & ~0xFF
        return torch.bitwise_or(upper, torch.as_tensor(zero).to(torch.int32))
    return _upper_half(scale) if encoding is Encoding.MXFP4 else scale.view(torch.int32)


def _decode(code: Tensor, heads: Tensor, dim: int, size: int, packing: WeightPacking) -> Tensor:
    """Dequantize groups of `size` elements to float32.

    Args:
        heads: int32 or int16, with one element along `dim`, or two of `AFFINE`.
    """
    bits, encoding = packing.quantization.bits, packing.encoding
    if bits == 4:
        code = torch.cat([code & 15, code >> 4], dim).narrow(dim, 0, size)
    if encoding is Encoding.AFFINE:
        scale, low = heads.view(torch.bfloat16).split(1, dim)
        made: Tensor = low.float() + scale.float() * code
        return made
    number = code.float()
    if encoding is Encoding.CENTERED:
        scale, zero = (part.view(torch.float32) for part in (heads << 16, heads & _HIGH_BITS))
        moved: Tensor = scale * (number - 8) + zero
        return moved
    if encoding is Encoding.ZERO_POINT:
        scale, number = (heads & ~0xFF).view(torch.float32), number - (heads & 0xFF)
    else:
        halves = {Encoding.MXFP4: torch.bfloat16, Encoding.HALF: torch.float16}
        scale = heads.view(halves.get(encoding, torch.float32)).float()
    if encoding in (Encoding.SIGNED, Encoding.HALF):
        number = number - 2 ** (bits - 1)
    elif encoding is Encoding.FP8:
        number = code.view(torch.float8_e4m3fn).float()
    elif encoding in TABLES:
        number = TABLES[encoding].to(code.device)[code.int()]
    # As in the kernels, a zero of integers is never -0, also with a scale that is 0 or negative.
    integers = encoding in (Encoding.ZERO_POINT, Encoding.SIGNED, Encoding.HALF)
    return scale * number + 0.0 if integers else scale * number


def _round_up(x: Tensor, bits: int = 16) -> Tensor:
    """Round away from zero so that the lowest `bits` bits are zero: 16 give a bf16, in float32."""
    mask = (1 << bits) - 1
    return (x.view(torch.int32) + mask & ~mask).view(torch.float32)


def _round_down(x: Tensor) -> Tensor:
    """Round down to a bf16, in float32."""
    truncated = (x.view(torch.int32) & _HIGH_BITS).view(torch.float32)
    return torch.where(x < 0, _round_up(x), truncated)


def _upper_half(x: Tensor) -> Tensor:
    """Return float32 values that are exact in bf16 as int16, bit for bit."""
    return (x.view(torch.int32) >> 16).to(torch.int16)


def _as_heads(data: Tensor, packing: WeightPacking) -> Tensor:
    """Return bytes at any address as the integers of `_encode`."""
    wide = packing.head_bytes == 4 and packing.encoding is not Encoding.AFFINE
    whole = data.clone(memory_format=torch.contiguous_format)
    return whole.view(torch.int32 if wide else torch.int16)


def pack_rows(weight: Tensor, packing: WeightPacking, name: str, out: Tensor) -> None:
    """Quantize `weight` `[..., N, K]` into `out`, `[packing.nbytes]` uint8."""
    depth = packing.depth
    target = out.view(packing.vectors, packing.vector_bytes)
    rows = weight.reshape(packing.vectors, depth)
    step = max(1, PIECE // depth)
    for begin in range(0, len(rows), step):
        x = rows[begin : begin + step].float()
        if packing.encoding in BLOCKS:
            blocks, halves = pack_blocks(x, packing.encoding)
            if not bool(halves.isfinite().all()):
                raise unfit(name)
            target[begin : begin + step] = blocks
            continue
        codes, heads, at = [], [], 0
        for count, size in stretches(depth, packing.quantization.group_size):
            groups = x[:, at : at + count * size].reshape(len(x), count, size)
            code, head = _encode(groups, -1, packing, name)
            codes.append(code.flatten(1))
            heads.append(torch.cat(head, -1).view(torch.uint8).flatten(1))
            at += count * size
        torch.cat(codes + heads, 1, out=target[begin : begin + step])


def unpack_rows(packed: Tensor, packing: WeightPacking, out: Tensor) -> None:
    """Dequantize the output of `pack_rows` into the contiguous `out`."""
    depth, bits = packing.depth, packing.quantization.bits
    source = packed.view(packing.vectors, packing.vector_bytes)
    target = out.view(packing.vectors, depth)
    step = max(1, PIECE // depth)
    for begin in range(0, len(source), step):
        rows = source[begin : begin + step]
        if packing.encoding in BLOCKS:
            target[begin : begin + step] = unpack_blocks(rows, packing.encoding)
            continue
        codes = rows[:, : (depth * bits + 7) // 8]
        heads = _as_heads(rows[:, codes.shape[1] :], packing)
        each = packing.head_bytes // heads.element_size()
        at, code_at, head_at = 0, 0, 0
        for count, size in stretches(depth, packing.quantization.group_size):
            nbytes = (size * bits + 7) // 8
            code = codes[:, code_at : code_at + count * nbytes].reshape(len(rows), count, nbytes)
            head = heads[:, head_at : head_at + each * count].reshape(len(rows), count, each)
            groups = _decode(code, head, -1, size, packing)
            target[begin : begin + step, at : at + count * size] = groups.flatten(1)
            at, code_at = at + count * size, code_at + count * nbytes
            head_at += each * count
