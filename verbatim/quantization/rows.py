"""Group-wise quantization of rows in torch: the reference for the kernels for weights, and for K and V.

`kernels/packing.py` has the layout of a row, and the formula of each encoding. In `AFFINE`,

    code = round((x - low) / scale)        x is read back as low + scale * code

where `low` is the group's smallest element, and `scale` its range over 2^bits - 1, both bf16 and rounded
outwards, so that the error is at most half a step. `scale * code` is exact in float32 (8 bits times 8), so
dequantization rounds once, to float32, and all backends are bit-identical.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from verbatim.kernels.packing import HALVES, TABLES, Encoding, Packing

# Elements of `AFFINE` are 0 or normal numbers, as products of bf16 flush subnormal ones to 0.
_SMALLEST, _SMALLEST_SCALE = 2.0**-126, 2.0**-117
_BF16_MASK = -0x10000  # the bits of a float32 that a bf16 keeps


def pack_rows(x: Tensor, packing: Packing) -> Tensor:
    """Quantize `[..., K]` of any float dtype to rows `[..., row_bytes(K)]` uint8.

    In `AFFINE`, all elements of a group with a NaN or an infinity are read back as NaN.
    """
    if not x.shape[-1]:
        return x.to(torch.uint8)
    code, scale, zero = encode(x.float(), packing)
    return join(code, heads_of(scale, zero, packing.encoding), packing)


def unpack_rows(rows: Tensor, width: int, packing: Packing) -> Tensor:
    """Dequantize rows `[..., row_bytes(width)]` uint8 to `[..., width]` float32."""
    return _decode(*split(rows, width, packing), packing)


def encode(x: Tensor, packing: Packing) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize float32 rows `[..., K]`.

    Returns:
        Codes, uint8 `[..., K]`, and the scales and zeros of groups (see `heads_of`), `[..., groups]`. Scales
        that the encoding can't store are infinite or NaN.
    """
    encoding, levels, middle = packing.encoding, 2**packing.bits - 1, 2 ** (packing.bits - 1)
    width, x = x.shape[-1], _in_groups(x, packing.group)
    low, high = x.aminmax(dim=-1, keepdim=True)
    peak, zero = torch.maximum(high, -low), torch.zeros_like(low)
    if encoding is Encoding.AFFINE:
        low = low.masked_fill((low > 0) & (low < _SMALLEST), 0.0)
        low = low.masked_fill((low < 0) & (low > -_SMALLEST), -_SMALLEST)
        low = _round_down(low + 0.0)  # -0 becomes 0
        # The divisor is a tensor, as torch on a GPU divides by a number by multiplying with its inverse.
        step = (high - low) / torch.full_like(low, levels) + 0.0
        step = step.masked_fill((step > 0) & (step < _SMALLEST_SCALE), _SMALLEST_SCALE)
        scale, zero = (
            y.masked_fill(~step.isfinite(), torch.nan) for y in (_round_up(step, 16), low)
        )
        code = ((x - zero) / scale).round()
    elif encoding is Encoding.ZERO_POINT:
        low, high = low.clamp(max=0), high.clamp(min=0)
        scale = _round_up((high - low) / levels, 8)
        zero = torch.where(scale > 0, -low / scale, 0).round()
        code = (x / scale).round() + zero
    elif encoding in (Encoding.SIGNED, Encoding.HALF):
        scale = peak / (middle - 1)
        scale = scale.half().float() if encoding is Encoding.HALF else scale
        code = (x / scale).round() + middle
    elif encoding is Encoding.CENTERED:
        scale = _round_up((high - low) / levels, 16)
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
    code = code.clamp(0, levels).masked_fill(~(scale > 0), 0).to(torch.uint8)
    return code.flatten(-2)[..., :width], scale.squeeze(-1), zero.squeeze(-1)


def heads_of(scale: Tensor, zero: Tensor | float, encoding: Encoding) -> Tensor:
    """Return the heads of groups (scales and zeros) as int32 or int16.

    Args:
        scale: float32 scales; rounded to the precision of the encoding.
        zero: 0 to 255 for `ZERO_POINT`, float32 for `CENTERED` and `AFFINE`; not used by others.
    """
    if encoding in HALVES:
        return scale.to(HALVES[encoding]).view(torch.int16)
    bits, zero = scale.view(torch.int32), torch.as_tensor(zero)
    if encoding in (Encoding.AFFINE, Encoding.CENTERED):
        return bits >> 16 & 0xFFFF | zero.view(torch.int32)
    if encoding is Encoding.ZERO_POINT:
        return (bits + 0x80) & ~0xFF | zero.to(torch.int32)
    return bits


def _decode(code: Tensor, heads: Tensor, packing: Packing) -> Tensor:
    """Dequantize codes and heads to float32 rows."""
    width, encoding = code.shape[-1], packing.encoding
    code, heads = _in_groups(code, packing.group), heads[..., None]
    scale, zero = heads.view(HALVES.get(encoding, torch.float32)).float(), torch.zeros(())
    middle: Tensor | int = 0 if encoding is Encoding.AFFINE else 2 ** (packing.bits - 1)
    if encoding in (Encoding.AFFINE, Encoding.CENTERED):
        scale, zero = (heads << 16).view(torch.float32), (heads & _BF16_MASK).view(torch.float32)
    elif encoding is Encoding.ZERO_POINT:
        scale, middle = (heads & ~0xFF).view(torch.float32), heads & 0xFF
    if encoding in TABLES:
        value = scale * TABLES[encoding].to(code.device)[code.int()]
    else:
        # As in the kernels, adding a zero of 0 makes -0 positive.
        value = scale * (code.float() - middle) + zero
    return value.flatten(-2)[..., :width]


def _in_groups(x: Tensor, group: int) -> Tensor:
    """Return rows as `[..., groups, group]`; a short group is padded with copies of its last element."""
    missing = -x.shape[-1] % group
    rows = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], missing)], -1) if missing else x
    groups: Tensor = rows.unflatten(-1, (-1, group))
    return groups


def _round_up(x: Tensor, bits: int) -> Tensor:
    """Round away from zero so that the lowest `bits` bits are zero; 16 give a bf16, in float32."""
    mask = (1 << bits) - 1
    return (x.view(torch.int32) + mask & ~mask).view(torch.float32)


def _round_down(x: Tensor) -> Tensor:
    """Round down to a bf16, in float32."""
    truncated = (x.view(torch.int32) & _BF16_MASK).view(torch.float32)
    return torch.where(x < 0, _round_up(x, 16), truncated)


def nearest(x: Tensor, table: Tensor) -> Tensor:
    """Return for each element of `x` the index of the nearest number in `table`."""
    order = table.argsort()
    middles = (table[order][1:] + table[order][:-1]) / 2
    return order[torch.bucketize(x.contiguous(), middles)]


def fold(code: Tensor, span: int) -> Tensor:
    """Pack 4-bit codes two to a byte: of each `2 * span` codes, the first half goes to the low bits."""
    if missing := -code.shape[-1] % (2 * span):
        code = pad(code, (0, missing))
    low, high = code.unflatten(-1, (-1, 2, span)).unbind(-2)
    folded: Tensor = (low | high << 4).flatten(-2)
    return folded


def unfold(data: Tensor, span: int) -> Tensor:
    """Unpack bytes `[..., n]`, as returned by `fold`, to codes `[..., 2 * n]`."""
    data = data.unflatten(-1, (-1, span))
    return torch.stack([data & 15, data >> 4], -2).flatten(-3)


def join(code: Tensor, heads: Tensor, packing: Packing) -> Tensor:
    """Return rows of bytes from codes, uint8 `[..., K]`, and heads `[..., groups]`."""
    parts, at = [], 0
    for count, size in packing.group_sizes(code.shape[-1]):
        data = code[..., at : at + count * size].unflatten(-1, (count, size))
        parts.append((fold(data, (size + 1) // 2) if packing.bits == 4 else data).flatten(-2))
        at += count * size
    return torch.cat([*parts, heads.contiguous()[..., None].view(torch.uint8).flatten(-2)], -1)


def split(rows: Tensor, width: int, packing: Packing) -> tuple[Tensor, Tensor]:
    """Return the codes and heads of rows of `width` elements; the inverse of `join`."""
    codes, at = [], 0
    for count, size in packing.group_sizes(width):
        nbytes = packing.code_bytes(size)
        data = rows[..., at : at + count * nbytes].unflatten(-1, (count, nbytes))
        if packing.bits == 4:
            data = unfold(data, (size + 1) // 2)[..., :size]
        codes.append(data.flatten(-2))
        at += count * nbytes
    # A copy, as the bytes may be unaligned.
    heads = rows[..., at:].clone(memory_format=torch.contiguous_format)
    return torch.cat(codes, -1), heads.view(packing.head_dtype)
