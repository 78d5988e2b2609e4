"""Attention to the keys of largest score only: an approximation, the same in every schedule."""

from __future__ import annotations

import torch
from torch import Tensor

from verbatim.batch import AttentionBatch
from verbatim.kernels.options import AttentionOptions
from verbatim.kv.indexing import index_scores
from verbatim.kv.recurrence import tree_sum
from verbatim.kv.store import KVStore

_MAX_PRODUCTS = 1 << 22  # elements of the largest temporary


def top_k_attention(
    store: KVStore,
    layer: int,
    q: Tensor,
    batch: AttentionBatch,
    options: AttentionOptions,
    *,
    top_k: int,
) -> Tensor:
    """Compute `store.attend` with only the `top_k` keys of largest score for each query head of each row.

    The score is that of the softmax: with the scale, the soft cap and ALiBi. Of equal ones the earliest
    positions are taken. Sliding windows hold as ever, and sinks stay in the denominator. A row that sees
    no more than `top_k` keys anyway has the bits of `store.attend`; every other is made of elementwise
    operations and trees of additions in shapes that depend on nothing but the model and `top_k`.

    Args:
        store: has the layer in memory.

    Returns:
        `[T, H, Dv]` in the dtype of `q`.
    """
    starts, lens = batch.query_starts.tolist(), batch.context_lens.tolist()
    # Rows see more and more of their sequence, so those that see little stand at its beginning.
    few = [
        _few(length - (starts[s + 1] - starts[s]), length, top_k, options)
        for s, length in enumerate(lens)
    ]
    heads, value_size = q.shape[1], store.shapes[layer].value_dim
    out = q.new_empty(len(q), heads, value_size)
    if any(few):
        out = KVStore.attend(store, layer, q, batch, options)
    for s, length in enumerate(lens):
        begin, end = starts[s] + few[s], starts[s + 1]
        if begin == end:
            continue
        held = batch.block_tables[s, : -(-length // store.block_size)].long()
        keys, values = (
            store.rows(x, width, held)
            for x, width in zip(store.layer(layer), (q.shape[2], value_size), strict=True)
        )
        largest = max(top_k * value_size, keys.shape[1])
        at_once = max(1, _MAX_PRODUCTS // (heads * largest))
        for first in range(begin, end, at_once):
            last = min(first + at_once, end)
            position = length - end + first
            out[first:last] = _rows(q[first:last], keys, values, position, options, top_k)
    return out


def _few(begin: int, end: int, top_k: int, options: AttentionOptions) -> int:
    """Return how many of the rows at these positions attend to at most `top_k` keys."""
    if 0 < (options.window or options.chunk) <= top_k:
        return end - begin
    return max(0, min(end, top_k) - begin)


def _rows(
    q: Tensor, keys: Tensor, values: Tensor, position: int, options: AttentionOptions, top_k: int
) -> Tensor:
    """Attend with rows of one sequence that see more than `top_k` keys, the first at `position`."""
    (rows, heads, _), kv_heads = q.shape, keys.shape[0]
    grouped = (kv_heads, heads // kv_heads)
    positions = torch.arange(position, position + rows, device=q.device).reshape(rows, 1, 1, 1)
    lowest = options.lowest_key(positions)
    oldest = int(lowest[0])
    places = torch.arange(oldest, position + rows, device=q.device)
    pairs = zip(q.float().chunk(kv_heads, 1), keys[:, oldest : position + rows], strict=True)
    scores = torch.stack([index_scores(queries, None, k) for queries, k in pairs], 1)
    scores = scores * options.scale  # [R, Hkv, G, L]
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if options.alibi is not None:
        scores = scores + options.alibi.reshape(*grouped, 1) * (places - positions)
    seen = (lowest <= places) & (places <= positions)
    scores = torch.where(seen, scores, -torch.inf)
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :top_k].sort(-1).values
    scores = scores.gather(-1, best)  # [R, Hkv, G, k], by position
    largest = scores.amax(-1, keepdim=True)
    if options.sinks is not None:
        largest = torch.maximum(largest, options.sinks.reshape(*grouped, 1))
    weights = torch.exp(scores - largest)
    total = tree_sum(weights, -1, keepdim=True)
    if options.sinks is not None:
        total = total + torch.exp(options.sinks.reshape(*grouped, 1) - largest)
    head = torch.arange(kv_heads, device=q.device).reshape(kv_heads, 1, 1)
    chosen = values[head, places[best]]  # [R, Hkv, G, k, Dv]
    chosen = torch.where(weights.unsqueeze(-1) > 0, weights.unsqueeze(-1) * chosen, 0.0)
    mixed = tree_sum(chosen, -2) / total
    return mixed.reshape(rows, heads, -1).to(q.dtype)
