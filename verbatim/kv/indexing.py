"""Sparse attention: an indexer chooses the keys of each row, and attention reads those.

A model with an indexer (DeepSeek Sparse Attention, DeepSeek-AI 2025, arXiv:2512.02556) keeps one more key
for each token. Its score for a row is a weighted sum over the indexer's heads of relu(query * key); the row
attends to the keys of the largest scores. Scores are sums in a fixed order in float32, and of equal ones
the lowest positions are taken, so the choice is a function of the row's sequence alone. Other models choose
blocks of keys by the best key in each, separately for each group of heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from verbatim.batch import AttentionBatch
from verbatim.kernels.functions import addresses, has_kernels, run
from verbatim.kernels.options import AttentionOptions, IndexOptions
from verbatim.kv.recurrence import tree_sum

_TILE = 64  # keys scored at once, at absolute positions
_MAX_ELEMENTS = 1 << 22  # of the largest temporary
_MAX_SCORES = 1 << 18  # that are sorted at once, which takes about 32 bytes for each


def choose_keys(
    q: Tensor,
    keys_of: Callable[[Tensor], Tensor],
    batch: AttentionBatch,
    options: IndexOptions,
) -> Tensor:
    """Choose the keys that each row sees.

    Args:
        q: `[T, H, D]`, the indexer's queries.
        keys_of: returns the index keys in the blocks of a table `[n]`: `[n * block_size, D]` float32.
        batch: as for `paged_attention`.

    Returns:
        `[T, G, k]` int32, positions in ascending order, followed by -1 if there are fewer.
    """
    width, groups = options.width, options.groups(q.shape[1])
    chosen = torch.full((len(q), groups, width), -1, dtype=torch.int32, device=q.device)
    starts, lens = batch.query_starts.tolist(), batch.context_lens.tolist()
    most_rows = _MAX_ELEMENTS // (q.shape[1] * _TILE * q.shape[2])
    for s, length in enumerate(lens):
        rows_at_once = max(1, min(most_rows, _MAX_SCORES // (groups * length)))
        begin, end = starts[s], starts[s + 1]
        # Rows that have no more than `width` keys see all of them.
        few = max(0, min(end - begin, width - (length - (end - begin))))
        few = 0 if options.records else few
        positions = torch.arange(length - (end - begin), length, device=q.device)[:, None, None]
        every = torch.arange(width, dtype=torch.int32, device=q.device)
        chosen[begin : begin + few] = torch.where(every <= positions[:few], every, -1)
        if few == end - begin:
            continue
        keys = keys_of(batch.block_tables[s].long())[:length]
        for first in range(begin + few, end, rows_at_once):
            last = min(first + rows_at_once, end)
            at = positions[first - begin : last - begin]
            weights = None if options.weights is None else options.weights[first:last]
            scores = index_scores(q[first:last].float(), weights, keys)
            later = torch.arange(length, device=q.device) > at
            blocks = _best_blocks(scores.masked_fill(later, -torch.inf), at, options)
            inside = torch.arange(options.block, device=q.device)
            if options.records:
                ends = blocks * options.block + options.block - 1
                own = chosen[first:last, :, : ends.shape[-1]]
                own[:] = torch.where(ends <= at, ends, -1)
                continue
            keys_of_blocks = (blocks[..., None] * options.block + inside).flatten(-2)
            if options.pooled:
                unfinished = (at + 1) // options.block * options.block + inside[:-1]
                keys_of_blocks = torch.cat([keys_of_blocks, unfinished], -1)
            chosen[first:last] = torch.where(keys_of_blocks <= at, keys_of_blocks, -1)
    return chosen


def _best_blocks(scores: Tensor, at: Tensor, options: IndexOptions) -> Tensor:
    """Return the blocks that rows at positions `at` `[R, 1, 1]` choose by `scores` `[R, G, L]`, ascending."""
    size = options.block
    if options.pooled:
        scores = scores[..., size - 1 :: size]
    elif size > 1:
        missing = -scores.shape[-1] % size
        scores = torch.nn.functional.pad(scores, (0, missing), value=-torch.inf)
        scores = scores.unflatten(-1, (-1, size)).amax(-1)
    if options.num_local:
        behind = at // size - torch.arange(scores.shape[-1], device=at.device)
        local = (behind >= 0) & (behind < options.num_local)
        scores = scores.masked_fill(local, torch.inf)
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., : options.top_k]
    return best.sort(dim=-1).values


def index_scores(
    q: Tensor, weights: Tensor | None, keys: Tensor, *, reference: bool = False
) -> Tensor:
    """Score `keys` `[L, D]` for rows `q` `[R, H, D]`, with `weights` `[R, H]` if any: `[R, G, L]` float32.

    Args:
        reference: compute it in torch, and not by a kernel; the bits are the same.
    """
    if has_kernels(q.device) and not reference:
        q, keys = q.contiguous(), keys.contiguous()
        weights = None if weights is None else weights.contiguous()
        groups = q.shape[1] if weights is None else 1
        out = q.new_empty(len(q), groups, len(keys))
        at = addresses(out, q, keys, weights)
        run("vb_index_scores", None, *at, *q.shape, len(keys))
        return out
    tiles = []
    for tile in keys.split(_TILE):
        scores = tree_sum(q[:, :, None] * tile, -1)
        if weights is not None:
            scores = tree_sum(scores.relu() * weights[..., None], 1, keepdim=True)
        tiles.append(scores)
    return torch.cat(tiles, -1)


def attend_to_chosen(
    attention: Callable[..., Tensor],
    q: Tensor,
    k_store: Tensor,
    v_store: Tensor,
    batch: AttentionBatch,
    options: AttentionOptions,
) -> Tensor:
    """Run `attention` on the keys in `options.chosen`.

    The chosen rows of the stores are copied, and each query row becomes a sequence over its copies. Bits do
    not depend on the location of keys, so a row that sees all keys has the bits of `attention`.

    Args:
        attention: `paged_attention`, or another function of the same arguments.
    """
    chosen = options.chosen
    assert chosen is not None
    if options.window or options.chunk or options.alibi is not None:
        raise ValueError("attention to chosen keys has no window, no chunks and no ALiBi")
    groups, top_k = chosen.shape[1:]
    if int(batch.context_lens.max()) <= top_k:
        return attention(q, k_store, v_store, batch, replace(options, chosen=None))
    if groups > 1:
        sinks = [None] * groups if options.sinks is None else options.sinks.chunk(groups)
        stores = k_store.chunk(groups, 1), v_store.chunk(groups, 1)
        outs = [
            attend_to_chosen(
                attention, own_q, own_k, own_v, batch, replace(options, chosen=some, sinks=sink)
            )
            for own_q, own_k, own_v, some, sink in zip(
                q.chunk(groups, 1), *stores, chosen.chunk(groups, 1), sinks, strict=True
            )
        ]
        return torch.cat(outs, 1)
    return _attend_to_copies(attention, q, [(k_store, v_store, chosen[:, 0])], batch, options)


def attend_to_records(
    attention: Callable[..., Tensor],
    q: Tensor,
    k_store: Tensor,
    v_store: Tensor,
    batch: AttentionBatch,
    options: AttentionOptions,
) -> Tensor:
    """Run `attention` on the keys in each row's window, which are also the values, and on `options.records`.

    Args:
        k_store: keys, `[blocks, 1, block_size, D]`.
        v_store: records, of the same shape.
    """
    records, window = options.records, options.window
    assert records is not None and window
    lengths = batch.query_starts.diff().long()
    last = (batch.context_lens - batch.query_starts[1:]).long().repeat_interleave(lengths)
    positions = last + torch.arange(len(q), device=q.device)
    recent = positions[:, None] + torch.arange(1 - window, 1, device=q.device)
    parts = [(k_store, k_store, recent), (v_store, v_store, records)]
    return _attend_to_copies(attention, q, parts, batch, replace(options, window=0))


def _attend_to_copies(
    attention: Callable[..., Tensor],
    q: Tensor,
    parts: list[tuple[Tensor, Tensor, Tensor]],
    batch: AttentionBatch,
    options: AttentionOptions,
) -> Tensor:
    """Run `attention` on copies of rows of several stores, with one softmax for each query row.

    Args:
        parts: for each store of K and V the positions that rows attend to, `[T, k]`; negative ones are
            ignored.
    """
    options = replace(options, chosen=None, records=None)
    lengths = batch.query_starts.diff().long()
    sequences = torch.arange(len(lengths), device=q.device).repeat_interleave(lengths)[:, None]
    block_size = parts[0][0].shape[2]
    row_bytes = sum(
        positions.shape[1] * (k_store[0, :, 0].nbytes + v_store[0, :, 0].nbytes)
        for k_store, v_store, positions in parts
    )
    rows_at_once = max(1, 4 * _MAX_ELEMENTS // row_bytes)
    outs = []
    for first in range(0, len(q), rows_at_once):
        some = slice(first, first + rows_at_once)
        copies: list[tuple[Tensor, Tensor]] = []
        for k_store, v_store, positions in parts:
            valid = positions[some].clamp(min=0).long()
            blocks = batch.block_tables[sequences[some], valid // block_size].long()
            offsets = valid % block_size
            k = k_store[blocks, :, offsets]  # [rows, k, 1, D]
            copies.append((k, k if v_store is k_store else v_store[blocks, :, offsets]))
        k, v = (
            (x[0] if len(x) == 1 else torch.cat(x, 1)).flatten(0, 1).unsqueeze(2)
            for x in zip(*copies, strict=True)
        )
        del copies
        missing = torch.cat([positions[some] for *_, positions in parts], 1) < 0
        tables = torch.arange(missing.numel(), dtype=torch.int32, device=q.device)
        order = missing.byte().argsort(dim=1, stable=True)
        tables = tables.view(missing.shape).gather(1, order)
        count = torch.arange(len(missing) + 1, dtype=torch.int32, device=q.device)
        lens = (~missing).sum(1, dtype=torch.int32)
        outs.append(attention(q[some], k, v, AttentionBatch(count, lens, tables), options))
    return torch.cat(outs)
