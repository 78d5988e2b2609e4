"""Rotary embeddings and the write of K and V in one kernel, one program per token.

As in transformers, `x * cos + rotate_half(x) * sin` with every product and the sum rounded to the
dtype, so the bits are those of a layer that runs module by module.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from verbatim.kernels.packing import Packing
from verbatim.kernels.triton.numbers import DTYPES, EXACT, helper, rounded, widened
from verbatim.kernels.triton.quantized import elements_of, store_groups


@helper
def _load(x, at, mask, cos, sin, WIDTH, ROTATED):
    """Load elements `at` of a token's heads, with the first `ROTATED` of `WIDTH` dimensions rotated."""
    values = tl.load(x + at, mask=mask, other=0.0)
    if ROTATED > 0:
        half: tl.constexpr = ROTATED // 2
        place = at % WIDTH
        turns = mask & (place < ROTATED)
        c = widened(tl.load(cos + place, mask=turns, other=1.0))
        s = widened(tl.load(sin + place, mask=turns, other=0.0))
        other = tl.load(x + tl.where(place < half, at + half, at - half), mask=turns, other=0.0)
        other = tl.where(place < half, -widened(other), widened(other))
        left, right = rounded(widened(values) * c, values.dtype), rounded(other * s, values.dtype)
        turned = rounded(widened(left) + widened(right), values.dtype)
        values = tl.where(place < ROTATED, turned, values)
    return values


@helper
def _write(store, x, slot, cos, sin, HEADS, WIDTH, ROTATED, BLOCK_SIZE, UNITS, GROUP, BITS):
    """Write a token's heads to its slot of a store, rotated, and quantized if the store has `BITS`.

    A unit is a group of elements of one head.
    """
    groups: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
    unit = tl.arange(0, UNITS)
    head, group = unit // groups, unit % groups
    element = elements_of(group, WIDTH, GROUP, BITS)
    mask = (head < HEADS)[:, None] & (element < WIDTH)
    values = _load(x, head[:, None] * WIDTH + element, mask, cos, sin, WIDTH, ROTATED)
    row = (slot // BLOCK_SIZE * HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE
    if BITS == 0:
        values = rounded(widened(values), store.dtype.element_ty)
        tl.store(store + row[:, None] * WIDTH + element, values, mask=mask)
    else:
        store_groups(store, row, group, values, mask, WIDTH, GROUP, BITS)


@triton.jit
def _rope_and_write(
    q_out,
    q,
    k,
    v,
    cos,
    sin,
    k_store,
    v_store,
    slots,
    q_stride,
    k_stride,
    v_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    K_UNITS: tl.constexpr,
    V_UNITS: tl.constexpr,
    K_GROUP: tl.constexpr,
    V_GROUP: tl.constexpr,
    BITS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if ROTATED > 0:
        cos += token * ROTATED
        sin += token * ROTATED
        at = tl.arange(0, Q_BLOCK)
        mask = at < HEADS * KEY
        queries = _load(q + token * q_stride, at, mask, cos, sin, KEY, ROTATED)
        tl.store(q_out + token * HEADS * KEY + at, queries, mask=mask)
    k, v = k + token * k_stride, v + token * v_stride
    _write(k_store, k, slot, cos, sin, KV_HEADS, KEY, ROTATED, BLOCK_SIZE, K_UNITS, K_GROUP, BITS)
    if VALUE > 0:  # the keys of an indexer have no values
        _write(v_store, v, slot, cos, sin, KV_HEADS, VALUE, 0, BLOCK_SIZE, V_UNITS, V_GROUP, BITS)


def supports(k: Tensor, v: Tensor, k_store: Tensor, packing: Packing | None = None) -> bool:
    """Return whether the kernel supports these dtypes."""
    stored = packing is not None or k_store.dtype in DTYPES
    return k.dtype in DTYPES and v.dtype is k.dtype and stored


def _rows(x: Tensor) -> Tensor:
    """Return `[T, H, D]` with the heads of a token adjacent in memory."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def rope_and_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    k_store: Tensor,
    v_store: Tensor,
    slots: Tensor,
    packing: Packing | None = None,
) -> Tensor:
    """Rotate `q` `[T, H, D]` and `k` `[T, Hkv, D]`, and write `k` and `v` `[T, Hkv, Dv]` to the stores.

    Args:
        cos, sin: `[T, R]` in the dtype of `q`, the second half a repetition of the first; the first R of
            a head's D values are rotated. None: no rotation.
        k_store, v_store: `[blocks, Hkv, block_size, D]`, of any supported dtype.
        slots: `[T]` int64.
        packing: the stores hold uint8 rows of this format, `[blocks, Hkv, block_size, row_bytes]`.

    Returns:
        The rotated `q`, or `q` itself without a rotation.
    """
    num_tokens, kv_heads, key_size = k.shape
    value_size, heads = v.shape[2], q.shape[1]
    assert k_store.is_contiguous() and v_store.is_contiguous()
    q, k, v = _rows(q), _rows(k), _rows(v)
    rotated = 0
    out = q
    if cos is not None and sin is not None:
        cos, sin = cos.contiguous(), sin.contiguous()
        rotated, out = cos.shape[1], q.new_empty(q.shape)
        assert rotated % 2 == 0 and cos.dtype is sin.dtype is q.dtype is k.dtype
    sizes = key_size, value_size
    group_sizes = [
        packing.group if packing else triton.next_power_of_2(max(1, size)) for size in sizes
    ]
    units = [
        triton.next_power_of_2(kv_heads * -(-size // group))
        for size, group in zip(sizes, group_sizes, strict=True)
    ]
    if num_tokens:
        _rope_and_write[(num_tokens,)](
            out,
            q,
            k,
            v,
            cos,
            sin,
            k_store,
            v_store,
            slots,
            q.stride(0),
            k.stride(0),
            v.stride(0),
            HEADS=heads,
            KV_HEADS=kv_heads,
            KEY=key_size,
            VALUE=value_size,
            ROTATED=rotated,
            BLOCK_SIZE=k_store.shape[2],
            Q_BLOCK=triton.next_power_of_2(heads * key_size),
            K_UNITS=units[0],
            V_UNITS=units[1],
            K_GROUP=group_sizes[0],
            V_GROUP=group_sizes[1],
            BITS=packing.bits if packing else 0,
            num_warps=4,
            **EXACT,
        )
    return out


def write_kv(
    k: Tensor,
    v: Tensor,
    k_store: Tensor,
    v_store: Tensor,
    slots: Tensor,
    packing: Packing | None = None,
) -> None:
    """Compute `verbatim.kv.attention.write_kv` for tensors on one GPU; `supports` must hold."""
    rope_and_write(k, k, v, None, None, k_store, v_store, slots, packing)
