"""Sparse attention by an indexer: which keys a row sees, and attention to those.

A model with an indexer (DeepSeek Sparse Attention, DeepSeek-AI 2025, arXiv:2512.02556) keeps one more key
for each token. Its score for a row is a weighted sum over the indexer's heads of relu(query * key); the row
attends to the keys of the largest scores. Scores are sums in a fixed order in float32, and of equal ones
the lowest positions are taken, so the choice is a function of the row's sequence alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from verbatim.kernels.options import AttentionOptions, IndexOptions
from verbatim.kv.attention import tree_sum

_TILE = 64  # keys scored at once, at absolute positions
_MAX_ELEMENTS = 1 << 22  # of the largest temporary


def choose_keys(
    q: Tensor,
    keys_of: Callable[[Tensor], Tensor],
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    options: IndexOptions,
) -> Tensor:
    """Choose the keys that each row sees.

    Args:
        q: `[T, H, D]`, the indexer's queries.
        keys_of: returns the index keys in the blocks of a table `[n]`: `[n * block_size, D]` float32.
        query_starts, context_lens, block_tables: as for `paged_attention`.

    Returns:
        `[T, top_k]` int32, positions in ascending order, followed by -1 if there are fewer.
    """
    top_k = options.top_k
    chosen = torch.full((len(q), top_k), -1, dtype=torch.int32, device=q.device)
    starts, lens = query_starts.tolist(), context_lens.tolist()
    rows_at_once = max(1, _MAX_ELEMENTS // (q.shape[1] * _TILE * q.shape[2]))
    for s, length in enumerate(lens):
        begin, end = starts[s], starts[s + 1]
        # Rows that have no more than `top_k` keys see all of them.
        few = max(0, min(end - begin, top_k - (length - (end - begin))))
        positions = torch.arange(length - (end - begin), length, device=q.device)
        every = torch.arange(top_k, dtype=torch.int32, device=q.device).expand(few, top_k)
        seen = every <= positions[:few, None]
        chosen[begin : begin + few] = torch.where(seen, every, -1)
        if few == end - begin:
            continue
        keys = keys_of(block_tables[s].long())[:length]
        for first in range(begin + few, end, rows_at_once):
            last = min(first + rows_at_once, end)
            at = positions[first - begin : last - begin]
            scores = _scores(q[first:last].float(), options.weights[first:last], keys)
            later = torch.arange(length, device=q.device) > at[:, None]
            scores = scores.masked_fill(later, -torch.inf)
            best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
            chosen[first:last] = best.sort(dim=-1).values.int()
    return chosen


def _scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Score `keys` `[L, D]` for rows `q` `[R, H, D]` with `weights` `[R, H]`: `[R, L]`."""
    tiles = [
        tree_sum(tree_sum(q[:, :, None] * tile, -1)[..., 0].relu() * weights[..., None], 1)[:, 0]
        for tile in keys.split(_TILE)
    ]
    return torch.cat(tiles, -1)


def attend_to_chosen(
    attention: Callable[..., Tensor],
    q: Tensor,
    k_store: Tensor,
    v_store: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    options: AttentionOptions,
) -> Tensor:
    """Run `attention` on the keys in `options.chosen`.

    The chosen rows of the stores are copied, and each row becomes a sequence of its own over them. A
    row's bits do not depend on where its keys lie, so one that sees all keys has those of `attention`.

    Args:
        attention: `paged_attention`, or another function of the same arguments.
    """
    chosen = options.chosen
    assert chosen is not None
    if options.window or options.chunk or options.alibi is not None:
        raise ValueError("attention to chosen keys has no window, no chunks and no ALiBi")
    options = replace(options, chosen=None)
    top_k = chosen.shape[1]
    if int(context_lens.max()) <= top_k:
        return attention(q, k_store, v_store, query_starts, context_lens, block_tables, options)
    block_size = k_store.shape[2]
    lengths = (query_starts[1:] - query_starts[:-1]).long()
    sequences = torch.arange(len(lengths), device=q.device).repeat_interleave(lengths)[:, None]
    row_bytes = top_k * (k_store[0, :, 0].nbytes + v_store[0, :, 0].nbytes)
    rows_at_once = max(1, 4 * _MAX_ELEMENTS // row_bytes)
    outs = []
    for first in range(0, len(q), rows_at_once):
        some = chosen[first : first + rows_at_once]
        positions = some.clamp(min=0).long()
        sequence = sequences[first : first + rows_at_once]
        blocks = block_tables[sequence, positions // block_size].long().flatten()
        offsets = (positions % block_size).flatten()
        count = torch.arange(len(some) + 1, dtype=torch.int32, device=q.device)
        outs.append(
            attention(
                q[first : first + rows_at_once],
                k_store[blocks, :, offsets].unsqueeze(2),
                v_store[blocks, :, offsets].unsqueeze(2),
                count,
                (some >= 0).sum(1, dtype=torch.int32),
                torch.arange(some.numel(), dtype=torch.int32, device=q.device).view(some.shape),
                options,
            )
        )
    return torch.cat(outs)
