"""Rotary embeddings and the writing of K and V in one kernel, one program per token.

As in transformers, `x * cos + rotate_half(x) * sin` with every product and the sum rounded to the
dtype, so that the bits are those of a layer that runs module by module.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from verbatim.kernels.triton.numbers import DTYPES, EXACT, helper, rounded, widened


@helper
def _turned(x, pointer, at, held, cos, sin, WIDTH: tl.constexpr, ROTATED: tl.constexpr):
    """The heads whose values `x` stand at `pointer + at`; the first `ROTATED` of `WIDTH` turn."""
    half: tl.constexpr = ROTATED // 2
    place = at % WIDTH
    other = tl.where(place < half, at + half, at - half)
    beside = tl.load(pointer + other, mask=held & (place < ROTATED), other=0.0)
    beside = tl.where(place < half, -widened(beside), widened(beside))
    left = rounded(widened(x) * widened(cos), x.dtype)
    right = rounded(beside * widened(sin), x.dtype)
    return tl.where(place < ROTATED, rounded(widened(left) + widened(right), x.dtype), x)


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
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    STORE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    angles = token * angle_stride

    at = tl.arange(0, K_BLOCK)
    held = at < KV_HEADS * KEY
    keys = tl.load(k + token * k_stride + at, mask=held, other=0.0)
    if ROTATED > 0:
        angle = held & (at % KEY < ROTATED)
        c = tl.load(cos + angles + at % KEY, mask=angle, other=1.0)
        s = tl.load(sin + angles + at % KEY, mask=angle, other=0.0)
        keys = _turned(keys, k + token * k_stride, at, held, c, s, KEY, ROTATED)
    place = ((block * KV_HEADS + at // KEY) * BLOCK_SIZE + offset) * KEY + at % KEY
    tl.store(k_store + place, rounded(widened(keys), STORE), mask=held)

    at = tl.arange(0, V_BLOCK)
    held = at < KV_HEADS * VALUE
    values = tl.load(v + token * v_stride + at, mask=held, other=0.0)
    place = ((block * KV_HEADS + at // VALUE) * BLOCK_SIZE + offset) * VALUE + at % VALUE
    tl.store(v_store + place, rounded(widened(values), STORE), mask=held)

    if ROTATED > 0:
        at = tl.arange(0, Q_BLOCK)
        held = at < HEADS * KEY
        queries = tl.load(q + token * q_stride + at, mask=held, other=0.0)
        angle = held & (at % KEY < ROTATED)
        c = tl.load(cos + angles + at % KEY, mask=angle, other=1.0)
        s = tl.load(sin + angles + at % KEY, mask=angle, other=0.0)
        queries = _turned(queries, q + token * q_stride, at, held, c, s, KEY, ROTATED)
        tl.store(q_out + token * HEADS * KEY + at, queries, mask=held)


def served(k: Tensor, v: Tensor, k_store: Tensor) -> bool:
    """Return whether the kernel supports these dtypes."""
    return k.dtype in DTYPES and v.dtype is k.dtype and k_store.dtype in DTYPES


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
) -> Tensor:
    """Rotate `q` `[T, H, D]` and `k` `[T, Hkv, D]`, and write `k` and `v` `[T, Hkv, Dv]` to the stores.

    Args:
        cos, sin: `[T, R]` in the dtype of `q`, the second half a repetition of the first; the first R of
            a head's D values turn. None turns nothing.
        k_store, v_store: `[blocks, Hkv, block_size, D]`, of any served dtype.
        slots: `[T]` int64.

    Returns:
        The rotated `q`, or `q` itself where nothing turns.
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
            K_BLOCK=triton.next_power_of_2(kv_heads * key_size),
            V_BLOCK=triton.next_power_of_2(kv_heads * value_size),
            STORE=DTYPES[k_store.dtype],
            num_warps=4,
            **EXACT,
        )
    return out


def write_kv(k: Tensor, v: Tensor, k_store: Tensor, v_store: Tensor, slots: Tensor) -> None:
    """Compute `verbatim.kv.attention.write_kv` for tensors on one GPU; `served` must hold."""
    rope_and_write(k, k, v, None, None, k_store, v_store, slots)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The plain reference: `x` `[T, H, D]` rotated by angles `[T, R]`."""
    width = cos.shape[1]
    turning, rest = x[..., :width], x[..., width:]
    half = width // 2
    beside = torch.cat([-turning[..., half:], turning[..., :half]], -1)
    return torch.cat([turning * cos[:, None] + beside * sin[:, None], rest], -1)
