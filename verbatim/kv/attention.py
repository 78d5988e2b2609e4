"""Attention over KV blocks: a C++ kernel and a torch reference with the same interface.

K and V are in stores `[blocks, Hkv, block_size, D]`. A row attends to every position of its sequence up to
its own, through the sequence's block table. Attention is batch-invariant: the bits of a row depend on its
query, its K and V, and the options; not on other rows, chunked prefill, block numbers or the number of
threads. The two backends agree closely, but are not bit-identical.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from verbatim import kernels
from verbatim.batch import AttentionBatch
from verbatim.kernels.functions import SUFFIX, addresses, has_kernels, kernel, run
from verbatim.kernels.options import AttentionOptions
from verbatim.kernels.packing import Packing
from verbatim.kv.recurrence import tree_sum
from verbatim.quantization.rows import pack_rows, unpack_rows

_TILE = 64  # keys per tile of the reference, at absolute positions
_MAX_PRODUCTS = 1 << 22  # elements of the reference's largest temporary


@kernels.without_overrides
def write_kv(
    k: Tensor,
    v: Tensor,
    k_store: Tensor,
    v_store: Tensor,
    slots: Tensor,
    packing: Packing | None = None,
) -> None:
    """Write the rows `k` `[T, Hkv, Dk]` and `v` `[T, Hkv, Dv]` to the stores.

    `slots` `[T]` int64 are block * block_size + offset. Rows are converted to the stores' dtype, or quantized
    with `packing`.
    """
    compiled = has_kernels(k_store.device)
    if compiled:
        assert k_store.is_contiguous() and v_store.is_contiguous() and slots.is_contiguous()
        assert slots.dtype == torch.int64 and len(slots) == len(k) == len(v)
    if packing is not None:
        is_supported = k.dtype == v.dtype and k.dtype in SUFFIX
        if compiled and is_supported and k.stride(2) == v.stride(2) == 1:
            assert k_store.shape[3] == packing.row_bytes(k.shape[2])
            assert v_store.shape[3] == packing.row_bytes(v.shape[2])
            sizes = len(slots), *k_store.shape[1:3], k.shape[2], v.shape[2]
            strides = (ctypes.c_int64 * 4)(*k.stride()[:2], *v.stride()[:2])
            is_bf16, at = k.dtype == torch.bfloat16, addresses(k, v, k_store, v_store, slots)
            run("vb_pack_kv", None, *at, *sizes, strides, is_bf16, packing.bits)
            return
    if not compiled and kernels.uses_triton(k_store.device):
        from verbatim.kernels.triton import rope

        if rope.supports(k, v, k_store, packing):
            rope.write_kv(k, v, k_store, v_store, slots, packing)
            return
    if packing is not None:
        k, v = pack_rows(k, packing), pack_rows(v, packing)
    if k.dtype != k_store.dtype or v.dtype != v_store.dtype:
        k, v = k.to(k_store.dtype), v.to(v_store.dtype)
    if not compiled or k.stride(2) != 1 or v.stride(2) != 1:
        blocks, offsets = slots // k_store.shape[2], slots % k_store.shape[2]
        k_store[blocks, :, offsets] = k
        v_store[blocks, :, offsets] = v
        return
    steps = (x.stride(i) * x.element_size() for x in (k, v) for i in (0, 1))
    widths = (x.shape[3] * x.element_size() for x in (k_store, v_store))
    at, sizes = addresses(k, v, k_store, v_store, slots), (len(slots), *k_store.shape[1:3])
    run("vb_write_kv", None, *at, *sizes, *widths, *steps)


@kernels.without_overrides
def paged_attention(
    q: Tensor,
    k_store: Tensor,
    v_store: Tensor,
    batch: AttentionBatch,
    options: AttentionOptions,
    *,
    batch_invariant: bool = True,
    packing: Packing | None = None,
    value_size: int = 0,
) -> Tensor:
    """Compute causal attention of flat query rows over the stored K and V of their sequences.

    Args:
        q: `[T, H, Dk]`, float32 or bfloat16; query head h reads KV head h // (H // Hkv).
        k_store, v_store: `[blocks, Hkv, block_size, Dk]` and `[..., Dv]`, contiguous, one dtype.
        batch: block tables and lengths of the sequences.
        batch_invariant: False allows faster GPU kernels that are not batch-invariant.
        packing: format of the stores' uint8 rows `[blocks, Hkv, block_size, row_bytes]`, or None. Elements
            are dequantized to the queries' dtype; for bf16 this rounds float32 again, by far less than a
            quantization step. The bits are those of attention over the dequantized values.
        value_size: Dv; required with `packing`.

    Returns:
        `[T, H, Dv]` in the dtype of `q`.
    """
    stored = q.dtype if packing is not None else k_store.dtype
    value_size = v_store.shape[3] if packing is None else value_size
    attend = kernel("vb_attention") if q.device.type == "cpu" else None
    if attend is not None and q.dtype in SUFFIX and stored in SUFFIX:
        num_tokens, heads, key_size = q.shape
        kv_heads, block_size = v_store.shape[1:3]
        kv_format = int(k_store.dtype == torch.bfloat16) if packing is None else packing.bits
        query_starts, context_lens, block_tables = batch
        num_sequences, max_blocks = block_tables.shape
        sinks, alibi, bias = options.sinks, options.alibi, options.bias
        assert k_store.shape[1:3] == (kv_heads, block_size) and heads % kv_heads == 0
        assert packing is not None or k_store.shape[3] == key_size
        assert k_store.dtype == v_store.dtype
        assert query_starts.dtype == context_lens.dtype == block_tables.dtype == torch.int32
        assert len(query_starts) == num_sequences + 1 and len(context_lens) == num_sequences
        assert k_store.is_contiguous() and v_store.is_contiguous() and block_tables.is_contiguous()
        assert query_starts.is_contiguous() and context_lens.is_contiguous()
        rows = (num_tokens, heads)
        assert sinks is None or (sinks.shape in (rows, rows[1:]) and sinks.is_contiguous())
        assert alibi is None or (len(alibi) == heads and alibi.is_contiguous())
        assert bias is None or (bias.shape[:2] == rows and bias.is_contiguous())
        assert bias is None or bias.dtype == q.dtype
        if q.stride(2) != 1:
            q = q.contiguous()
        sink_stride = heads if sinks is not None and sinks.dim() > 1 else 0
        bias_size = 0 if bias is None else bias.shape[2]
        out = q.new_empty((num_tokens, heads, value_size))
        at = addresses(q, out, k_store, v_store, query_starts, context_lens, block_tables)
        attend(
            *at,
            *(num_sequences, max_blocks, *q.stride()[:2], heads, kv_heads, key_size, value_size),
            *(block_size, options.window, options.chunk, q.dtype == torch.bfloat16, kv_format),
            *(options.scale, options.softcap, *addresses(sinks), sink_stride),
            *(*addresses(alibi, bias), bias_size),
        )
        return out
    if kernels.uses_triton(q.device):
        from verbatim.kernels.triton import attention

        if attention.supports(q, k_store, value_size, packing):
            return attention.paged_attention(
                q,
                k_store,
                v_store,
                batch,
                options,
                batch_invariant=batch_invariant,
                packing=packing,
                value_size=value_size,
            )
    if packing is not None:
        used, renamed = torch.unique(batch.block_tables, return_inverse=True)
        batch = batch._replace(block_tables=renamed.to(torch.int32))
        k_store = unpack_rows(k_store[used.long()], q.shape[2], packing).to(q.dtype)
        v_store = unpack_rows(v_store[used.long()], value_size, packing).to(q.dtype)
    return reference_attention(q, k_store, v_store, batch, options)


def reference_attention(
    q: Tensor,
    k_store: Tensor,
    v_store: Tensor,
    batch: AttentionBatch,
    options: AttentionOptions,
) -> Tensor:
    """Compute `paged_attention` in torch, on any device; slow.

    It is batch-invariant because all operations are elementwise: sums are trees of additions, not torch's
    reductions, in which the order depends on shapes and threads.
    """
    out = q.new_zeros((q.shape[0], q.shape[1], v_store.shape[3]))
    row_products = q.shape[1] * _TILE * max(q.shape[2], v_store.shape[3])
    rows_at_once = max(1, _MAX_PRODUCTS // row_products)
    starts, lens = batch.query_starts.tolist(), batch.context_lens.tolist()
    for s, length in enumerate(lens):
        for first in range(starts[s], starts[s + 1], rows_at_once):
            last = min(first + rows_at_once, starts[s + 1])
            position = length - starts[s + 1] + first  # of row `first`
            some = slice(first, last)
            out[some] = _reference_rows(
                q[some], k_store, v_store, batch.block_tables[s], position, options.of_rows(some)
            )
    return out


def _reference_rows(
    q: Tensor,
    k_store: Tensor,
    v_store: Tensor,
    block_table: Tensor,
    position: int,
    options: AttentionOptions,
) -> Tensor:
    """Compute the rows of one sequence, the first at `position`: `[R, H, Dk]` to `[R, H, Dv]`."""
    rows, heads, key_size = q.shape
    kv_heads, block_size, value_size = v_store.shape[1:]
    grouped = (kv_heads, heads // kv_heads)
    queries = q.float().reshape(rows, *grouped, 1, key_size)
    positions = torch.arange(position, position + rows, device=q.device).reshape(rows, 1, 1, 1)
    lowest = options.lowest_key(positions)
    # A sink acts like a logit before the first key, without a value.
    logits = torch.full((heads,), -torch.inf, dtype=torch.float32, device=q.device)
    if options.sinks is not None:
        logits = options.sinks
    largest = logits.view(-1, *grouped, 1).expand(rows, *grouped, 1)
    total = (largest > -torch.inf).float()
    acc = torch.zeros((rows, *grouped, value_size), dtype=torch.float32, device=q.device)
    for first in range(0, position + rows, _TILE):
        if first + _TILE <= lowest[0]:
            continue
        keys = torch.arange(first, first + _TILE, device=q.device)
        visible = (lowest <= keys) & (keys <= positions)
        # Keys past the end read block 0 of the table, and are masked.
        valid_keys = torch.where(keys < position + rows, keys, 0)
        blocks, offsets = block_table[valid_keys // block_size].long(), valid_keys % block_size
        k = k_store[blocks, :, offsets].float().transpose(0, 1).unsqueeze(1)  # [Hkv, 1, tile, Dk]
        v = v_store[blocks, :, offsets].float().transpose(0, 1).unsqueeze(1)
        scores = tree_sum(queries * k, -1) * options.scale
        if options.softcap:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        biased = options.with_biases(scores.flatten(1, 2), positions.flatten(), keys)
        scores = biased.view(scores.shape)
        scores = torch.where(visible, scores, -torch.inf)
        # A row without visible keys in the tile is unchanged.
        active = visible.any(-1, keepdim=True)
        highest = torch.maximum(largest, scores.amax(-1, keepdim=True))
        factor = torch.exp(largest - highest)
        weights = torch.exp(scores - highest)
        values = torch.where(visible.unsqueeze(-1), weights.unsqueeze(-1) * v, 0.0)
        total = torch.where(active, total * factor + tree_sum(weights, -1, keepdim=True), total)
        acc = torch.where(active, acc * factor + tree_sum(values, -2), acc)
        largest = torch.where(active, highest, largest)
    return (acc / total).reshape(rows, heads, value_size).to(q.dtype)
