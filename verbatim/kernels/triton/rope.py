"""Rotary embeddings and the write of K and V in one kernel, one program per token.

As in transformers, `x * cos + rotate_half(x) * sin` with every product and the sum rounded to the
dtype, so the bits are those of a layer that runs module by module.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from verbatim.kernels.packing import Packing
from verbatim.kernels.triton.numbers import DTYPES, EXACT, helper, rounded, widened
from verbatim.kernels.triton.quantized import elements_of, store_groups


@helper
def _rotate(x, pointer, at, mask, cos, sin, WIDTH: tl.constexpr, ROTATED: tl.constexpr):
    """Rotate heads with the values `x` at `pointer + at`, in the first `ROTATED` of `WIDTH` dimensions."""
    half: tl.constexpr = ROTATED // 2
    place = at % WIDTH
    other = tl.where(place < half, at + half, at - half)
    rotated_half = tl.load(pointer + other, mask=mask & (place < ROTATED), other=0.0)
    rotated_half = tl.where(place < half, -widened(rotated_half), widened(rotated_half))
    left = rounded(widened(x) * widened(cos), x.dtype)
    right = rounded(rotated_half * widened(sin), x.dtype)
    return tl.where(place < ROTATED, rounded(widened(left) + widened(right), x.dtype), x)


@helper
def _groups(
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    UNITS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
):
    """Return the offsets `[UNITS, GROUP]` of the elements of a token's heads, which of them exist, and the
    head and the group within it `[UNITS]`.
    """
    groups: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
    unit = tl.arange(0, UNITS)
    head, group = unit // groups, unit % groups
    element = elements_of(group, WIDTH, GROUP, BITS)
    mask = (head < HEADS)[:, None] & (element < WIDTH)
    return head[:, None] * WIDTH + element, mask, head, group


@helper
def _write(
    store,
    x,
    at,
    mask,
    row,
    group,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    STORE: tl.constexpr,
):
    """Write elements, at offsets from `_groups`, to rows `[UNITS]` of a store, quantized if it has `BITS`."""
    if BITS == 0:
        tl.store(store + row[:, None] * WIDTH + at % WIDTH, rounded(widened(x), STORE), mask=mask)
    else:
        store_groups(store, row, group, x, mask, WIDTH, GROUP, BITS)


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
    angle_stride,
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
    STORE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    angles = token * angle_stride

    at, mask, head, group = _groups(KV_HEADS, KEY, K_UNITS, K_GROUP, BITS)
    keys = tl.load(k + token * k_stride + at, mask=mask, other=0.0)
    if ROTATED > 0:
        angle = mask & (at % KEY < ROTATED)
        c = tl.load(cos + angles + at % KEY, mask=angle, other=1.0)
        s = tl.load(sin + angles + at % KEY, mask=angle, other=0.0)
        keys = _rotate(keys, k + token * k_stride, at, mask, c, s, KEY, ROTATED)
    row = (block * KV_HEADS + head) * BLOCK_SIZE + offset
    _write(k_store, keys, at, mask, row, group, KEY, K_GROUP, BITS, STORE)

    if VALUE > 0:  # the keys of an indexer have no values
        at, mask, head, group = _groups(KV_HEADS, VALUE, V_UNITS, V_GROUP, BITS)
        values = tl.load(v + token * v_stride + at, mask=mask, other=0.0)
        row = (block * KV_HEADS + head) * BLOCK_SIZE + offset
        _write(v_store, values, at, mask, row, group, VALUE, V_GROUP, BITS, STORE)

    if ROTATED > 0:
        at = tl.arange(0, Q_BLOCK)
        mask = at < HEADS * KEY
        queries = tl.load(q + token * q_stride + at, mask=mask, other=0.0)
        angle = mask & (at % KEY < ROTATED)
        c = tl.load(cos + angles + at % KEY, mask=angle, other=1.0)
        s = tl.load(sin + angles + at % KEY, mask=angle, other=0.0)
        queries = _rotate(queries, q + token * q_stride, at, mask, c, s, KEY, ROTATED)
        tl.store(q_out + token * HEADS * KEY + at, queries, mask=mask)


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
            q if cos is None else cos,
            q if sin is None else sin,
            k_store,
            v_store,
            slots,
            q.stride(0),
            k.stride(0),
            v.stride(0),
            rotated,
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
            STORE=None if packing else DTYPES[k_store.dtype],
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


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `x` `[T, H, D]` rotated by `cos` and `sin` `[T, R]`: the plain reference."""
    width = cos.shape[1]
    turning, rest = x[..., :width], x[..., width:]
    half = width // 2
    rotated_half = torch.cat([-turning[..., half:], turning[..., :half]], -1)
    return torch.cat([turning * cos[:, None] + rotated_half * sin[:, None], rest], -1)
