"""Rows of quantized numbers in torch: the reference of the kernels for K and V, and for weights.

A row is cut into groups of neighbours (the last one may be short), and an element of a group is stored as an
integer:

    code = round((x - low) / scale)        x is read back as low + scale * code

with `low` the group's smallest element and `scale` its range over 2^bits - 1, both bf16 and rounded
outwards, so that no element is more than half a step off. `scale * code` is exact in float32 (8 bits times
8), so an element is read back with one rounding to float32, bit-identically by every backend.

A row has its codes, then the heads (scale, low) of its groups. With 4 bits, byte i of a group has its
elements i (low half) and i + ceil(size / 2).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

_HIGH_BITS = -0x10000  # the bits of a float32 that a bf16 keeps
_NANS = 0x7FC07FC0


def quantize(x: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """Quantize rows `[..., K]` of float32: codes, uint8 `[..., K]`, and heads, int32 `[..., groups]`.

    All elements of a group with a NaN or an infinity are read back as NaN.
    """
    groups = in_groups(x, group)
    low, high = groups.aminmax(dim=-1, keepdim=True)
    low = round_down(low + 0.0)  # -0 becomes 0
    # A tensor: torch on a GPU divides by a number as it multiplies by its inverse.
    step = (high - low) / torch.full_like(low, 2**bits - 1) + 0.0
    scale, is_finite = round_up(step), step.isfinite()
    code = ((groups - low) / scale).round().clamp(0, 2**bits - 1)
    code = code.masked_fill(~(is_finite & (scale > 0)), 0).to(torch.uint8)
    heads = pair(scale, low).masked_fill(~is_finite, _NANS)
    return code.flatten(-2)[..., : x.shape[-1]], heads.squeeze(-1)


def in_groups(x: Tensor, group: int) -> Tensor:
    """Return rows as `[..., groups, group]`; a short group ends in copies of the row's last element."""
    missing = -x.shape[-1] % group
    rows = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], missing)], -1) if missing else x
    groups: Tensor = rows.unflatten(-1, (-1, group))
    return groups


def pair(scale: Tensor, low: Tensor) -> Tensor:
    """Return heads of two bf16 each, which are given in float32, as int32."""
    return scale.view(torch.int32) >> 16 & 0xFFFF | low.view(torch.int32)


def unpair(heads: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale and the low of heads in float32."""
    return (heads << 16).view(torch.float32), (heads & _HIGH_BITS).view(torch.float32)


def round_up(x: Tensor, bits: int = 16) -> Tensor:
    """Round away from zero so that the lowest `bits` bits are zero: 16 give a bf16, in float32."""
    mask = (1 << bits) - 1
    return (x.view(torch.int32) + mask & ~mask).view(torch.float32)


def round_down(x: Tensor) -> Tensor:
    """Round down to a bf16, in float32."""
    truncated = (x.view(torch.int32) & _HIGH_BITS).view(torch.float32)
    return torch.where(x < 0, round_up(x), truncated)


def stretches(depth: int, group: int) -> list[tuple[int, int]]:
    """Return (groups, size of each): the whole groups, then the short one."""
    found = [(depth // group, group), (1, depth % group)]
    return [(count, size) for count, size in found if count and size]


def fold(code: Tensor, span: int) -> Tensor:
    """Put codes of 4 bits two in a byte: of each `2 * span`, the first half lies below the second."""
    if missing := -code.shape[-1] % (2 * span):
        code = pad(code, (0, missing))
    low, high = code.unflatten(-1, (-1, 2, span)).unbind(-2)
    folded: Tensor = (low | high << 4).flatten(-2)
    return folded


def unfold(data: Tensor, span: int) -> Tensor:
    """Return the codes of bytes `[..., n]` that `fold` made, `[..., 2 * n]`."""
    data = data.unflatten(-1, (-1, span))
    out = torch.empty(*data.shape[:-1], 2, span, dtype=torch.uint8, device=data.device)
    torch.bitwise_and(data, 15, out=out[..., 0, :])
    torch.bitwise_right_shift(data, 4, out=out[..., 1, :])
    return out.flatten(-3)


def join(code: Tensor, heads: Tensor, bits: int, group: int) -> Tensor:
    """Return rows of bytes: of codes, uint8 `[..., K]`, and heads `[..., groups]`, int16 or int32."""
    parts, at = [], 0
    for count, size in stretches(code.shape[-1], group):
        data = code[..., at : at + count * size].unflatten(-1, (count, size))
        parts.append((fold(data, (size + 1) // 2) if bits == 4 else data).flatten(-2))
        at += count * size
    return torch.cat([*parts, heads.contiguous()[..., None].view(torch.uint8).flatten(-2)], -1)


def split(
    rows: Tensor, depth: int, bits: int, group: int, head: torch.dtype = torch.int32
) -> tuple[Tensor, Tensor]:
    """Return the codes and heads, in the dtype `head`, of rows of `depth` elements that `join` made."""
    codes, at = [], 0
    for count, size in stretches(depth, group):
        width = (size * bits + 7) // 8
        data = rows[..., at : at + count * width].unflatten(-1, (count, width))
        if bits == 4:
            data = unfold(data, (size + 1) // 2)[..., :size]
        codes.append(data.flatten(-2))
        at += count * width
    # A copy, as the bytes lie at any address.
    heads = rows[..., at:].clone(memory_format=torch.contiguous_format).view(head)
    return torch.cat(codes, -1), heads
