"""K and V in 8 or 4 bits: how a token's vector becomes a row of bytes, and attention over such rows.

A row is one token's vector of one KV head. It is cut into groups of neighbouring elements (the last
one may be short), and an element of a group is held as a whole number:

    code = round((x - low) / scale)        x is read back as low + scale * code

with `low` the group's least element and `scale` its range over 2^bits - 1, both bf16 and rounded
outwards, so that no element is more than half a step off. A group never leaves its row: what is held
for a token depends on nothing but the token. `scale * code` is exact in float32 (8 bits times 8), so
an element is read back with one rounding and the same bits by every backend.

At equal bytes, `low` is worth its two: groups of 64 with both ends err less than groups of 32 with a
symmetric scale at 8 bits, and groups of 32 less than groups of 16 at 4, most of all where a few
channels stand out (benchmarks/kv.py --formats).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from verbatim.errors import NotSupported
from verbatim.kernels.options import AttentionOptions
from verbatim.kv.attention import (
    KERNEL_DTYPES,
    kernel_attention,
    library_for,
    paged_attention,
    write_kv,
)

_HEAD_BYTES = 4  # (scale, low) of a group, two bf16
_HIGH_BITS = -0x10000  # of a float32: those that a bf16 keeps


@dataclass(frozen=True, slots=True)
class Packing:
    """A way to hold K and V in few bits.

    Attributes:
        name: what `kv_dtype` calls it.
        bits: of a code.
        group: elements that share a scale and a lower end.
    """

    name: str
    bits: int
    group: int

    def code_bytes(self, width: int) -> int:
        return (width * self.bits + 7) // 8

    def row_bytes(self, width: int) -> int:
        """Bytes of one head's vector of `width` elements: the codes, then each group's head."""
        return self.code_bytes(width) + -(-width // self.group) * _HEAD_BYTES


# The groups are those of verbatim/kernels/attention_groups.h.
PACKINGS = {p.name: p for p in (Packing("int8", 8, 64), Packing("int4", 4, 32))}

KVDtype = torch.dtype | Packing
_FLOATS: dict[str, KVDtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def settle_kv_dtype(kv_dtype: str | torch.dtype) -> KVDtype:
    """What `kv_dtype` names.

    Raises:
        NotSupported: K and V are not held in that.
    """
    known = {**_FLOATS, **PACKINGS}
    found = known.get(str(kv_dtype).removeprefix("torch."))
    if found is None:
        raise NotSupported(f"kv_dtype={kv_dtype!r}: must be 'auto' or one of {sorted(known)}")
    return found


def pack(x: Tensor, packing: Packing) -> Tensor:
    """`[..., D]` in any float dtype to rows `[..., row_bytes(D)]` uint8.

    A group that holds a NaN or an infinity is read back as NaN throughout.
    """
    levels = 2**packing.bits - 1
    codes, heads = [], []
    for group in x.float().split(packing.group, -1):
        low, high = group.amin(-1, keepdim=True), group.amax(-1, keepdim=True)
        low = _round_down(low + 0.0)  # -0 becomes 0
        step = (high - low) / levels
        scale = _round_up(step)
        steps = torch.where(scale > 0, (group - low) / scale, 0.0)
        finite = step.isfinite()
        code = torch.where(finite, steps.round().clamp(0, levels), 0.0).to(torch.uint8)
        if packing.bits == 4:
            half = (code.shape[-1] + 1) // 2
            last = torch.nn.functional.pad(code[..., half:], (0, code.shape[-1] % 2))
            code = code[..., :half] | last << 4
        codes.append(code)
        heads.append(torch.where(finite, torch.cat([scale, low], -1), torch.nan))
    # The bits are taken over, for torch's conversion has more than one NaN.
    head_bytes = (torch.cat(heads, -1).view(torch.int32) >> 16).to(torch.int16).view(torch.uint8)
    return torch.cat([*codes, head_bytes], -1)


def unpack(rows: Tensor, width: int, packing: Packing) -> Tensor:
    """Rows `[..., row_bytes(width)]` uint8 back to `[..., width]` float32."""
    sizes = [min(packing.group, width - e) for e in range(0, width, packing.group)]
    codes, head_bytes = rows.split([packing.code_bytes(width), _HEAD_BYTES * len(sizes)], -1)
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


def _round_up(x: Tensor) -> Tensor:
    """To the next bf16 away from zero, in float32."""
    return (x.view(torch.int32) + 0xFFFF & _HIGH_BITS).view(torch.float32)


def _round_down(x: Tensor) -> Tensor:
    """To the next bf16 that is not above, in float32."""
    truncated = (x.view(torch.int32) & _HIGH_BITS).view(torch.float32)
    return torch.where(x < 0, _round_up(x), truncated)


def write_packed(
    k: Tensor, v: Tensor, k_store: Tensor, v_store: Tensor, slots: Tensor, packing: Packing
) -> None:
    """`write_kv` into stores `[blocks, Hkv, block_size, row_bytes]` uint8."""
    library = library_for(k_store.device)
    served = k.dtype == v.dtype and k.dtype in KERNEL_DTYPES
    if library is None or not served or k.stride(2) != 1 or v.stride(2) != 1:
        write_kv(pack(k, packing), pack(v, packing), k_store, v_store, slots)
        return
    kernel_pack(library, k, v, k_store, v_store, slots, packing)


def kernel_pack(
    library: ctypes.CDLL,
    k: Tensor,
    v: Tensor,
    k_store: Tensor,
    v_store: Tensor,
    slots: Tensor,
    packing: Packing,
) -> None:
    """`write_packed` by one compiled library."""
    assert k_store.is_contiguous() and v_store.is_contiguous() and slots.is_contiguous()
    assert slots.dtype == torch.int64 and len(slots) == len(k) == len(v)
    assert k_store.shape[3] == packing.row_bytes(k.shape[2])
    assert v_store.shape[3] == packing.row_bytes(v.shape[2])
    library.vb_pack_kv(
        k.data_ptr(),
        v.data_ptr(),
        k_store.data_ptr(),
        v_store.data_ptr(),
        slots.data_ptr(),
        len(slots),
        k_store.shape[1],
        k_store.shape[2],
        k.shape[2],
        v.shape[2],
        (ctypes.c_int64 * 4)(k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
        k.dtype == torch.bfloat16,
        packing.bits,
        torch.get_num_threads(),
    )


def packed_attention(
    q: Tensor,
    k_store: Tensor,
    v_store: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    options: AttentionOptions,
    *,
    value_size: int,
    packing: Packing,
    backend: str = "auto",
) -> Tensor:
    """`paged_attention` over stores `[blocks, Hkv, block_size, row_bytes]` uint8.

    An element is read back in the dtype of the queries: in bf16, `unpack`'s float32 is rounded once
    more, which is far less than its own step. The kernel unpacks a tile of rows at a time; the
    reference unpacks all blocks of the batch and hands them on. Both then compute as for stores of
    that dtype, so the kernel's bits are those that it gives for the unpacked values.

    Args:
        value_size: Dv, which the bytes of a row do not tell.
        backend: "kernel", "reference", or "auto" for the kernel where it can serve.
    """
    if backend not in ("auto", "kernel", "reference"):
        raise ValueError(f"backend={backend!r}: 'auto', 'kernel' or 'reference'")
    batch = (query_starts, context_lens, block_tables, options)
    library = library_for(q.device) if q.dtype in KERNEL_DTYPES else None
    if library is not None and backend != "reference":
        return kernel_attention(
            library, q, k_store, v_store, *batch, packed=(packing.bits, value_size)
        )
    if backend == "kernel":
        raise ValueError(f"no attention kernel for {q.dtype} queries on {q.device}")
    used, renamed = torch.unique(block_tables, return_inverse=True)
    return paged_attention(
        q,
        unpack(k_store[used.long()], q.shape[2], packing).to(q.dtype),
        unpack(v_store[used.long()], value_size, packing).to(q.dtype),
        query_starts,
        context_lens,
        renamed.to(torch.int32),
        options,
        backend="reference",
    )
