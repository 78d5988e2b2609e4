"""Quantized K and V, in 8 or 4 bits: packing of rows.

A row is one token's vector of one KV head. It is cut into groups of neighbouring elements (the last
one may be short), and an element of a group is stored as an integer:

    code = round((x - low) / scale)        x is read back as low + scale * code

with `low` the group's smallest element and `scale` its range over 2^bits - 1, both bf16 and rounded
outwards, so that no element is more than half a step off. A group never spans rows: the row of a
token depends on that token alone. `scale * code` is exact in float32 (8 bits times 8), so
an element is read back with one rounding, bit-identically by every backend.

At equal bytes, asymmetric scales err less: groups of 64 with both ends than groups of 32 with a
symmetric scale at 8 bits, and groups of 32 than groups of 16 at 4 bits, most of all with outlier
channels (benchmarks/kv.py --formats).
"""

from __future__ import annotations

import torch
from torch import Tensor

from verbatim.errors import NotSupported
from verbatim.kernels.options import HEAD_BYTES, Packing

HIGH_BITS = -0x10000  # the bits of a float32 that a bf16 keeps

# The groups are those of verbatim/kernels/attention_groups.h.
PACKINGS = {p.name: p for p in (Packing("int8", 8, 64), Packing("int4", 4, 32))}

KVDtype = torch.dtype | Packing
_FLOATS: dict[str, KVDtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve_kv_dtype(kv_dtype: str | torch.dtype) -> KVDtype:
    """Return the dtype or packing named by `kv_dtype`.

    Raises:
        NotSupported: an unsupported dtype.
    """
    known = {**_FLOATS, **PACKINGS}
    found = known.get(str(kv_dtype).removeprefix("torch."))
    if found is None:
        raise NotSupported(f"kv_dtype={kv_dtype!r}: must be 'auto' or one of {sorted(known)}")
    return found


def row_nbytes(dtype: KVDtype, width: int) -> int:
    """Return the bytes of one head's vector of `width` elements."""
    return dtype.row_bytes(width) if isinstance(dtype, Packing) else width * dtype.itemsize


def pack(x: Tensor, packing: Packing) -> Tensor:
    """Quantize `[..., D]` of any float dtype to rows `[..., row_bytes(D)]` uint8.

    All elements of a group with a NaN or an infinity are read back as NaN.
    """
    if not x.shape[-1]:
        return x.to(torch.uint8)
    levels = 2**packing.bits - 1
    codes, heads = [], []
    for group in x.float().split(packing.group, -1):
        low, high = group.amin(-1, keepdim=True), group.amax(-1, keepdim=True)
        low = round_down(low + 0.0)  # -0 becomes 0
        # A tensor: torch on a GPU divides by a number as it multiplies by its inverse.
        step = (high - low) / torch.full_like(low, levels) + 0.0
        scale = round_up(step)
        steps = torch.where(scale > 0, (group - low) / scale, 0.0)
        finite = step.isfinite()
        code = torch.where(finite, steps.round().clamp(0, levels), 0.0).to(torch.uint8)
        if packing.bits == 4:
            half = (code.shape[-1] + 1) // 2
            last = torch.nn.functional.pad(code[..., half:], (0, code.shape[-1] % 2))
            code = code[..., :half] | last << 4
        codes.append(code)
        heads.append(torch.where(finite, torch.cat([scale, low], -1), torch.nan))
    # Copy the upper bits, as torch's conversion yields different NaNs.
    head_bytes = (torch.cat(heads, -1).view(torch.int32) >> 16).to(torch.int16).view(torch.uint8)
    return torch.cat([*codes, head_bytes], -1)


def unpack(rows: Tensor, width: int, packing: Packing) -> Tensor:
    """Dequantize rows `[..., row_bytes(width)]` uint8 to `[..., width]` float32."""
    sizes = [min(packing.group, width - e) for e in range(0, width, packing.group)]
    codes, head_bytes = rows.split([packing.code_bytes(width), HEAD_BYTES * len(sizes)], -1)
    heads = head_bytes.clone(memory_format=torch.contiguous_format).view(torch.bfloat16).float()
    groups = []
    for size, code, head in zip(
        sizes,
        codes.split([packing.code_bytes(size) for size in sizes], -1),
        heads.split(2, -1),
        strict=True,
    ):
        if packing.bits == 4:
            code = torch.cat([code & 15, code >> 4], -1)[..., :size]
        scale, low = head.split(1, -1)
        groups.append(low + scale * code)
    return torch.cat(groups, -1)


def round_up(x: Tensor, bits: int = 16) -> Tensor:
    """Round away from zero so that the lowest `bits` bits are zero: 16 give a bf16, in float32."""
    mask = (1 << bits) - 1
    return (x.view(torch.int32) + mask & ~mask).view(torch.float32)


def round_down(x: Tensor) -> Tensor:
    """Round down to a bf16, in float32."""
    truncated = (x.view(torch.int32) & HIGH_BITS).view(torch.float32)
    return torch.where(x < 0, round_up(x), truncated)
