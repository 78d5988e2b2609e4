"""Attention to only the keys with the largest scores: an approximation, identical in every schedule."""

from __future__ import annotations

import torch
from torch import Tensor

from verbatim.batch import AttentionBatch
from verbatim.kernels.options import AttentionOptions
from verbatim.kv.indexing import index_scores, sequences_and_positions, top_indices
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
    """Compute `store.attend` with only the `top_k` highest-scoring keys of each row and query head.

    Scores include the scale, the soft cap and ALiBi; of equal scores, the earliest positions are taken.
    Sliding windows apply as usual, and sinks stay in the denominator. A row that sees at most `top_k` keys is
    bit-identical to that of `store.attend`. All others are computed with elementwise operations and tree sums
    in shapes that depend only on the model and `top_k`, so they are batch-invariant. The layer must be in
    memory. Returns `[T, H, Dv]` in the dtype of `q`.
    """
    starts, lens = batch.query_starts.tolist(), batch.context_lens.tolist()
    positions = sequences_and_positions(batch)[1]
    # With chunks, rows that see few keys may follow rows that see many.
    sees_more = positions - options.lowest_key(positions) >= top_k
    heads, value_size = q.shape[1], store.shapes[layer].value_dim
    out = q.new_empty(len(q), heads, value_size)
    if not sees_more.all():
        out = KVStore.attend(store, layer, q, batch, options)
    for s, length in enumerate(lens):
        rows = starts[s] + sees_more[starts[s] : starts[s + 1]].nonzero().flatten()
        if not len(rows):
            continue
        blocks = batch.block_tables[s, : -(-length // store.block_size)].long()
        keys, values = (
            store.rows(x, width, blocks)
            for x, width in zip(store.layer(layer), (q.shape[2], value_size), strict=True)
        )
        largest = max(top_k * value_size, keys.shape[1])
        at_once = max(1, _MAX_PRODUCTS // (heads * largest))
        for some in rows.split(at_once):
            out[some] = _attend_top_k(
                q[some], keys, values, positions[some], options.of_rows(some), top_k
            )
    return out


def _attend_top_k(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    options: AttentionOptions,
    top_k: int,
) -> Tensor:
    """Compute attention of rows of one sequence, ascending, that all see more than `top_k` keys."""
    (rows, heads, _), kv_heads = q.shape, keys.shape[0]
    grouped = (kv_heads, heads // kv_heads)
    oldest, end = int(options.lowest_key(positions[0])), int(positions[-1]) + 1
    positions = positions.to(q.device).reshape(rows, 1, 1, 1)
    lowest = options.lowest_key(positions)
    key_positions = torch.arange(oldest, end, device=q.device)
    pairs = zip(q.float().chunk(kv_heads, 1), keys[:, oldest:end], strict=True)
    length = end - oldest
    scores = torch.stack([index_scores(queries, None, k, length) for queries, k in pairs], 1)
    scores = scores * options.scale  # [R, Hkv, G, L]
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    biased = options.with_biases(scores.flatten(1, 2), positions.flatten(), key_positions)
    scores = biased.view(scores.shape)
    mask = (lowest <= key_positions) & (key_positions <= positions)
    scores = torch.where(mask, scores, -torch.inf)
    best = top_indices(scores, top_k)
    scores = scores.gather(-1, best)  # [R, Hkv, G, k], by position
    largest = scores.amax(-1, keepdim=True)
    if options.sinks is not None:
        sinks = options.sinks.view(-1, *grouped, 1)
        largest = torch.maximum(largest, sinks)
    weights = torch.exp(scores - largest)
    total = tree_sum(weights, -1, keepdim=True)
    if options.sinks is not None:
        total = total + torch.exp(sinks - largest)
    head = torch.arange(kv_heads, device=q.device).reshape(kv_heads, 1, 1)
    chosen = values[head, key_positions[best]]  # [R, Hkv, G, k, Dv]
    chosen = torch.where(weights.unsqueeze(-1) > 0, weights.unsqueeze(-1) * chosen, 0.0)
    output = tree_sum(chosen, -2) / total
    return output.reshape(rows, heads, -1).to(q.dtype)
