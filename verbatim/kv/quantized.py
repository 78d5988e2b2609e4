"""Quantized K and V, in 8 or 4 bits: packing of rows.

A row (`kernels/packed_rows.py`) is one token's vector of one KV head, so it depends on that token alone.

At equal bytes, asymmetric scales err less: groups of 64 with both ends than groups of 32 with a
symmetric scale at 8 bits, and groups of 32 than groups of 16 at 4 bits, most of all with outlier
channels (benchmarks/kv.py --formats).
"""

from __future__ import annotations

import torch
from torch import Tensor

from verbatim.errors import NotSupported
from verbatim.kernels.options import Packing
from verbatim.kernels.packed_rows import join, quantize, split, unpair

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
    bits, group = packing.bits, packing.group
    return join(*quantize(x.float(), bits, group), bits, group)


def unpack(rows: Tensor, width: int, packing: Packing) -> Tensor:
    """Dequantize rows `[..., row_bytes(width)]` uint8 to `[..., width]` float32."""
    code, heads = split(rows, width, packing.bits, packing.group)
    scale, low = (x.repeat_interleave(packing.group, -1)[..., :width] for x in unpair(heads))
    return low + scale * code
