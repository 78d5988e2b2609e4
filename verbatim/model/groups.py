"""Quantization of groups in torch: the reference of the packing kernels.

`kernels/packed_rows.py` describes the layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verbatim.errors import ModelError
from verbatim.kernels.packed_rows import in_groups, pair, quantize, round_up, unpair
from verbatim.model.blocks import pack_blocks, unpack_blocks
from verbatim.model.weight_packing import (
    BLOCKS,
    TABLES,
    Encoding,
    WeightPacking,
    nearest,
)

LARGEST = 2.0**126  # largest weight, so that a group's range is finite
PIECE = 1 << 20  # elements packed at once


def unfit(name: str) -> ModelError:
    """Return the error for a weight that can't be quantized."""
    return ModelError(
        f"quantization: {name} has NaN, an infinity or a number beyond {LARGEST:.3g}, which can't be "
        "quantized"
    )


def _encode(x: Tensor, packing: WeightPacking, name: str) -> tuple[Tensor, Tensor]:
    """Quantize rows of float32 to codes and heads."""
    bits, encoding = packing.quantization.bits, packing.encoding
    levels = 2**bits - 1
    rows, x = x, in_groups(x, packing.quantization.group_size)
    low, high = x.aminmax(dim=-1, keepdim=True)
    peak = torch.maximum(high, -low)
    if not bool((peak <= LARGEST).all()):  # a NaN is not, either
        raise unfit(name)
    if encoding is Encoding.AFFINE:
        return quantize(rows, bits, packing.quantization.group_size)
    zero: Tensor | float = 0.0
    if encoding is Encoding.ZERO_POINT:
        low, high = low.clamp(max=0), high.clamp(min=0)
        scale = round_up((high - low) / levels, 8)
        zero = torch.where(scale > 0, -low / scale, 0).round()
        code = (x / scale).round() + zero
    elif encoding is Encoding.SIGNED:
        scale = peak / (levels // 2)
        code = (x / scale).round() + (levels + 1) // 2
    elif encoding is Encoding.HALF:
        scale = (peak / (levels // 2)).half().float()
        code = (x / scale).round() + (levels + 1) // 2
    elif encoding is Encoding.CENTERED:
        scale = round_up((high - low) / levels)
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
    return code.flatten(1)[:, : packing.depth], heads_of(scale, zero, encoding).squeeze(-1)


def heads_of(scale: Tensor, zero: Tensor | float, encoding: Encoding) -> Tensor:
    """Return the heads of groups as int32 or int16.

    Args:
        scale: float32. What an encoding has no room for is rounded off.
        zero: of `ZERO_POINT`: 0 to 255; of `CENTERED`: float32.
    """
    if encoding is Encoding.HALF:
        return scale.half().view(torch.int16)
    if encoding is Encoding.CENTERED:
        return pair(scale, torch.as_tensor(zero))
    if encoding is Encoding.ZERO_POINT:
        upper = (scale.view(torch.int32) + 0x80) & ~0xFF
        return torch.bitwise_or(upper, torch.as_tensor(zero).to(torch.int32))
    return _upper_half(scale) if encoding is Encoding.MXFP4 else scale.view(torch.int32)


def _decode(code: Tensor, heads: Tensor, packing: WeightPacking) -> Tensor:
    """Dequantize codes and heads to rows of float32."""
    bits, encoding = packing.quantization.bits, packing.encoding
    code, heads = in_groups(code, packing.quantization.group_size), heads[..., None]
    number = code.float()
    if encoding in (Encoding.AFFINE, Encoding.CENTERED):
        scale, zero = unpair(heads)
        value: Tensor = scale * (number - 8 * (encoding is Encoding.CENTERED)) + zero
        return value.flatten(1)[:, : packing.depth]
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
    value = scale * number + 0.0 if integers else scale * number
    return value.flatten(1)[:, : packing.depth]


def _upper_half(x: Tensor) -> Tensor:
    """Return float32 values that are exact in bf16 as int16, bit for bit."""
    return (x.view(torch.int32) >> 16).to(torch.int16)


def pack_rows(weight: Tensor, packing: WeightPacking, name: str, out: Tensor) -> None:
    """Quantize `weight` `[..., N, K]` into `out`, `[packing.nbytes]` uint8."""
    target = out.view(packing.vectors, packing.vector_bytes)
    rows = weight.reshape(packing.vectors, packing.depth)
    step = max(1, PIECE // packing.depth)
    for some, part in zip(rows.split(step), target.split(step), strict=True):
        if packing.encoding in BLOCKS:
            blocks, halves = pack_blocks(some.float(), packing.encoding)
            if not bool(halves.isfinite().all()):
                raise unfit(name)
            part.copy_(blocks)
        else:
            part.copy_(packing.join(*_encode(some.float(), packing, name)))


def unpack_rows(packed: Tensor, packing: WeightPacking, out: Tensor) -> None:
    """Dequantize the output of `pack_rows` into the contiguous `out`."""
    source = packed.view(packing.vectors, packing.vector_bytes)
    target = out.view(packing.vectors, packing.depth)
    step = max(1, PIECE // packing.depth)
    for some, part in zip(source.split(step), target.split(step), strict=True):
        if packing.encoding in BLOCKS:
            part.copy_(unpack_blocks(some, packing.encoding))
        else:
            part.copy_(_decode(*packing.split(some), packing))
