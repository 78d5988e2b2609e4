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
    # Rows that have no more than `width` keys see all of them.
    every = torch.arange(0 if options.records else width, dtype=torch.int32, device=q.device)
    positions = _positions(batch, len(q))[:, None, None]
    chosen = torch.where(every <= positions, every, -1)
    chosen = torch.nn.functional.pad(chosen, (0, width - len(every)), value=-1)
    chosen = chosen.repeat(1, groups, 1)
    starts, lens = batch.query_starts.tolist(), batch.context_lens.tolist()
    most_rows = _MAX_ELEMENTS // (q.shape[1] * _TILE * q.shape[2])
    rows_at_once = max(1, min(most_rows, _MAX_SCORES // (groups * max(lens))))
    inside = torch.arange(options.block, device=q.device)
    keys, held = q, -1  # those of sequence `held`
    for first in range(0, len(q), rows_at_once):
        last = min(first + rows_at_once, len(q))
        spans = [
            (s, begin, end)
            for s, length in enumerate(lens)
            if (begin := max(first, starts[s])) < (end := min(last, starts[s + 1]))
            and length - (starts[s + 1] - end) > len(every)
        ]
        if not spans:
            continue
        longest = max(lens[s] for s, *_ in spans)
        size = last - first, groups, longest
        scores = torch.full(size, -torch.inf, dtype=torch.float32, device=q.device)
        for s, begin, end in spans:
            if s != held:
                keys, held = keys_of(batch.block_tables[s].long())[: lens[s]], s
            weights = None if options.weights is None else options.weights[begin:end]
            rows = scores[begin - first : end - first, :, : lens[s]]
            rows.copy_(index_scores(q[begin:end].float(), weights, keys))
        at = positions[first:last]
        later = torch.arange(longest, device=q.device) > at
        blocks = _best_blocks(scores.masked_fill_(later, -torch.inf), at, options)
        if options.records:
            ends = blocks * options.block + options.block - 1
            own = chosen[first:last, :, : ends.shape[-1]]
            own[:] = torch.where(ends <= at, ends, -1)
            continue
        keys_of_blocks = (blocks[..., None] * options.block + inside).flatten(-2)
        if options.pooled:
            unfinished = (at + 1) // options.block * options.block + inside[:-1]
            unfinished = unfinished.expand(-1, groups, -1)
            keys_of_blocks = torch.cat([keys_of_blocks, unfinished], -1)
        found = torch.where(keys_of_blocks <= at, keys_of_blocks, -1).int()
        chosen[first:last] = torch.where(at < len(every), chosen[first:last], found)
    return chosen


def _positions(batch: AttentionBatch, num_rows: int) -> Tensor:
    """Return the position of each row in its sequence, `[T]`."""
    lengths = batch.query_starts.diff().long()
    last = (batch.context_lens - batch.query_starts[1:]).long().repeat_interleave(lengths)
    return last + torch.arange(num_rows, device=last.device)


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


def index_scores(q: Tensor, weights: Tensor | None, keys: Tensor) -> Tensor:
    """Score `keys` `[L, D]` for rows `q` `[R, H, D]`, with `weights` `[R, H]` if any: `[R, G, L]` float32.

    The bits are the same with and without kernels.
    """
    if has_kernels(q.device):
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
    sinks = [None] * groups if options.sinks is None else options.sinks.chunk(groups)
    heads = torch.arange(k_store.shape[1], device=q.device).chunk(groups)
    outs = [
        _attend_to_copies(
            attention,
            own,
            [(k_store, v_store, some)],
            batch,
            replace(options, sinks=sink),
            kv_heads,
        )
        for own, some, sink, kv_heads in zip(
            q.chunk(groups, 1), chosen.unbind(1), sinks, heads, strict=True
        )
    ]
    return torch.cat(outs, 1)


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
    recent = _positions(batch, len(q))[:, None] + torch.arange(1 - window, 1, device=q.device)
    parts = [(k_store, k_store, recent), (v_store, v_store, records)]
    head = torch.zeros(1, dtype=torch.int64, device=q.device)
    return _attend_to_copies(attention, q, parts, batch, replace(options, window=0), head)


def _attend_to_copies(
    attention: Callable[..., Tensor],
    q: Tensor,
    parts: list[tuple[Tensor, Tensor, Tensor]],
    batch: AttentionBatch,
    options: AttentionOptions,
    heads: Tensor,
) -> Tensor:
    """Run `attention` on copies of rows of several stores, with one softmax for each query row.

    Args:
        parts: for each store of K and V the positions that rows attend to, `[T, k]`; negative ones are
            ignored.
        heads: the KV heads of the queries.
    """
    options = replace(options, chosen=None, records=None)
    lengths = batch.query_starts.diff().long()
    sequences = torch.arange(len(lengths), device=q.device).repeat_interleave(lengths)[:, None]
    block_size = parts[0][0].shape[2]
    row_bytes = sum(
        positions.shape[1] * (k_store[0, heads, 0].nbytes + v_store[0, heads, 0].nbytes)
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
            index = (blocks[..., None] * k_store.shape[1] + heads) * block_size
            index += valid[..., None] % block_size
            k = _rows_of(k_store, index)
            copies.append((k, k if v_store is k_store else _rows_of(v_store, index)))
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


def _rows_of(store: Tensor, index: Tensor) -> Tensor:
    """Return copies of rows `[..., D]` of a store, by their numbers among those of all blocks and heads."""
    rows: Tensor = store.flatten(0, 2).index_select(0, index.flatten())
    return rows.view(*index.shape, store.shape[-1])
