"""Sparse attention: an indexer chooses the keys of each row, and attention reads only those.

A model with an indexer (DeepSeek Sparse Attention, DeepSeek-AI 2025, arXiv:2512.02556) stores an additional
index key for each token. Its score for a row is a weighted sum of relu(query * key) over the indexer's heads;
the row attends to the keys with the largest scores. Scores are float32 sums in a fixed order, and ties go to
the lowest positions, so the choice depends on the row's sequence alone. Other models choose blocks of keys by
the best key in each, separately for each group of heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from verbatim.batch import AttentionBatch
from verbatim.kernels.functions import SUFFIX, addresses, has_kernels, run
from verbatim.kernels.options import AttentionOptions, IndexOptions
from verbatim.kv.recurrence import tree_sum

_TILE = 64  # keys scored at a time
_MAX_ELEMENTS = 1 << 22  # elements of the largest temporary
_MAX_SCORES = 1 << 18  # scores sorted at a time, each with about 32 bytes of temporaries


def choose_keys(
    q: Tensor,
    store: Tensor,
    batch: AttentionBatch,
    options: IndexOptions,
    unpack: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Choose the keys that each row sees.

    Args:
        q: `[T, H, D]`, the indexer's queries.
        store: index keys, `[blocks, 1, block_size, D]`.
        batch: as for `paged_attention`.
        unpack: dequantizes rows of the store, if they are quantized.

    Returns:
        `[T, G, k]` int32, positions in ascending order, padded with -1.
    """
    width, groups = options.width, options.groups(q.shape[1])
    # Rows with at most `width` keys see all of them.
    leading = torch.arange(0 if options.records else width, dtype=torch.int32, device=q.device)
    positions = sequences_and_positions(batch)[1][:, None, None]
    chosen = torch.where(leading <= positions, leading, -1)
    chosen = torch.nn.functional.pad(chosen, (0, width - len(leading)), value=-1)
    chosen = chosen.repeat(1, groups, 1)
    starts, lens = batch.query_starts.tolist(), batch.context_lens.tolist()
    most_rows = _MAX_ELEMENTS // (q.shape[1] * _TILE * q.shape[2])
    rows_at_once = max(1, min(most_rows, _MAX_SCORES // (groups * max(lens))))
    inside = torch.arange(options.block, device=q.device)
    keys, table, loaded = store, None, -1  # index keys of sequence `loaded`
    for first in range(0, len(q), rows_at_once):
        last = min(first + rows_at_once, len(q))
        spans = [
            (s, begin, end, seen)
            for s, length in enumerate(lens)
            if (begin := max(first, starts[s])) < (end := min(last, starts[s + 1]))
            and (seen := length - (starts[s + 1] - end)) > len(leading)
        ]
        if not spans:
            continue
        longest = max(seen for *_, seen in spans)
        size = last - first, groups, longest
        scores = torch.full(size, -torch.inf, dtype=torch.float32, device=q.device)
        for s, begin, end, seen in spans:
            if s != loaded:
                keys, table, loaded = store, batch.block_tables[s], s
                if unpack is not None or not has_kernels(q.device) or store.dtype not in SUFFIX:
                    keys, table = store[table.long(), 0].flatten(0, 1), None
                    keys = keys if unpack is None else unpack(keys)
            weights = None if options.weights is None else options.weights[begin:end]
            rows = scores[begin - first : end - first, :, :seen]
            rows.copy_(index_scores(q[begin:end].float(), weights, keys, seen, table))
        at = positions[first:last]
        later = torch.arange(longest, device=q.device) > at
        blocks = _best_blocks(scores.masked_fill_(later, -torch.inf), at, options)
        if options.records:
            ends = blocks * options.block + options.block - 1
            target = chosen[first:last, :, : ends.shape[-1]]
            target[:] = torch.where(ends <= at, ends, -1)
            continue
        keys_of_blocks = (blocks[..., None] * options.block + inside).flatten(-2)
        if options.pooled:
            unfinished = (at + 1) // options.block * options.block + inside[:-1]
            unfinished = unfinished.expand(-1, groups, -1)
            keys_of_blocks = torch.cat([keys_of_blocks, unfinished], -1)
        visible = torch.where(keys_of_blocks <= at, keys_of_blocks, -1).int()
        chosen[first:last] = torch.where(at < len(leading), chosen[first:last], visible)
    return chosen


def sequences_and_positions(batch: AttentionBatch) -> tuple[Tensor, Tensor]:
    """Return the sequence of each row, and the row's position in it, `[T]` each."""
    lengths = batch.query_starts.diff()
    sequences = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    last = (batch.context_lens - batch.query_starts[1:]).long()[sequences]
    return sequences, last + torch.arange(len(sequences), device=lengths.device)


def _best_blocks(scores: Tensor, at: Tensor, options: IndexOptions) -> Tensor:
    """Return the blocks, ascending, chosen by `scores` `[R, G, L]` for rows at positions `at` `[R, 1, 1]`."""
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
    return top_indices(scores, options.top_k)


def top_indices(scores: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` largest scores `[..., L]`, ascending; of equal ones the first.

    NaN counts as infinity.
    """
    if scores.shape[-1] <= count:
        return torch.arange(scores.shape[-1], device=scores.device).expand(scores.shape)
    scores = scores.nan_to_num(torch.inf, torch.inf, -torch.inf)
    least = scores.topk(count, sorted=False).values.amin(-1, keepdim=True)
    above, equal = scores > least, scores == least
    missing = count - above.sum(-1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(-1) <= missing))
    return chosen.nonzero()[:, -1].view(*scores.shape[:-1], count)


def index_scores(
    q: Tensor, weights: Tensor | None, keys: Tensor, length: int, table: Tensor | None = None
) -> Tensor:
    """Return scores `[R, G, L]` of `length` keys, bit-identical with and without kernels.

    Args:
        q: `[R, H, D]` float32.
        weights: `[R, H]`, or None.
        keys: the sequence's keys `[L or more, D]`; with kernels also a store `[blocks, 1, block_size, D]`.
        table: the sequence's blocks in a store.
    """
    if has_kernels(q.device):
        q, keys = q.contiguous(), keys.contiguous()
        keys = keys if keys.dtype in SUFFIX else keys.float()
        weights = None if weights is None else weights.contiguous()
        groups = q.shape[1] if weights is None else 1
        out = q.new_empty(len(q), groups, length)
        at = addresses(out, q, keys, weights, table)
        run("vb_index_scores", keys.dtype, *at, keys.shape[-2], *q.shape, length)
        return out
    tiles = []
    for tile in keys[:length].split(_TILE):
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

    Each query row becomes a sequence of the stored rows that it has chosen. Results don't depend on the
    location of keys, so a row that sees all keys is bit-identical to dense attention.

    Args:
        attention: `paged_attention`, or another function with the same arguments.
    """
    chosen = options.chosen
    assert chosen is not None
    if options.window or options.chunk or options.alibi is not None:
        raise ValueError("sparse attention does not support windows, chunks or ALiBi")
    groups, top_k = chosen.shape[1:]
    if int(batch.context_lens.max()) <= top_k:
        return attention(q, k_store, v_store, batch, replace(options, chosen=None))
    sinks = [None] * groups if options.sinks is None else options.sinks.chunk(groups)
    heads = torch.arange(k_store.shape[1], device=q.device).chunk(groups)
    outs = [
        _attend_to_rows(
            attention,
            queries,
            [(k_store, v_store, positions)],
            batch,
            replace(options, sinks=sink),
            kv_heads,
        )
        for queries, positions, sink, kv_heads in zip(
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
    """Run `attention` on the keys in each row's window, which are also values, and on `options.records`.

    Args:
        k_store: keys, `[blocks, 1, block_size, D]`.
        v_store: records, of the same shape.
    """
    records, window = options.records, options.window
    assert records is not None and window
    positions = sequences_and_positions(batch)[1][:, None]
    recent = positions + torch.arange(1 - window, 1, device=q.device)
    if isinstance(records, int):
        count = int(batch.context_lens.max()) // records
        ends = torch.arange(1, count + 1, dtype=torch.int32, device=q.device) * records - 1
        records = torch.where(ends <= positions, ends, -1)
    parts = [(k_store, k_store, recent), (v_store, v_store, records)]
    head = torch.zeros(1, dtype=torch.int64, device=q.device)
    return _attend_to_rows(attention, q, parts, batch, replace(options, window=0), head)


def _attend_to_rows(
    attention: Callable[..., Tensor],
    q: Tensor,
    parts: list[tuple[Tensor, Tensor, Tensor]],
    batch: AttentionBatch,
    options: AttentionOptions,
    heads: Tensor,
) -> Tensor:
    """Run `attention` on some rows of one or more stores, with one softmax for each query row.

    Each row of a store becomes a separate block. Rows of several stores are copied into one store.

    Args:
        parts: (K store, V store, positions `[T, k]` that rows attend to); negative positions are ignored.
        heads: indices of the KV heads that `q` attends to.
    """
    if options.differs_by_row:
        raise ValueError("sparse attention does not support biases or sinks that differ by row")
    options = replace(options, chosen=None, records=None)
    sequences = sequences_and_positions(batch)[0][:, None]
    kv_heads, block_size = parts[0][0].shape[1:3]
    # Tables are int32.
    copies = len(parts) > 1 or parts[0][0].shape[:3].numel() >= 2**31
    # Without copies, each KV head is a separate sequence with its own table.
    apart = 1 if copies else len(heads)
    row_bytes = sum(
        positions.shape[1]
        * (k_store[0, heads, 0].nbytes + v_store[0, heads, 0].nbytes if copies else 8 * apart)
        for k_store, v_store, positions in parts
    )
    rows_at_once = max(1, 4 * _MAX_ELEMENTS // row_bytes)
    outs = []
    for first in range(0, len(q), rows_at_once):
        chunk = slice(first, first + rows_at_once)
        missing = torch.cat([positions[chunk] for *_, positions in parts], 1) < 0
        order = missing.byte().argsort(dim=1, stable=True)
        indices = []  # of rows across blocks and heads, for the first head
        for *_, positions in parts:
            valid = positions[chunk].clamp(min=0).long()
            blocks = batch.block_tables[sequences[chunk], valid // block_size].long()
            indices.append(blocks * (kv_heads * block_size) + valid % block_size)
        offsets = heads * block_size
        if copies:
            of_heads = [index[..., None] + offsets for index in indices]
            k = _copy_rows([k_store for k_store, _, _ in parts], of_heads)
            same = all(k_store is v_store for k_store, v_store, _ in parts)
            v = k if same else _copy_rows([v_store for _, v_store, _ in parts], of_heads)
            tables = order + torch.arange(len(order), device=q.device)[:, None] * order.shape[1]
        else:
            k, v = (store.view(-1, 1, 1, store.shape[3]) for store in parts[0][:2])
            tables = indices[0].gather(1, order).int()[:, None] + offsets.int()[:, None]
        lens = (~missing).sum(1, dtype=torch.int32).repeat_interleave(apart)
        count = torch.arange(len(lens) + 1, dtype=torch.int32, device=q.device)
        rows = q[chunk].unflatten(1, (apart, -1)).flatten(0, 1)
        row_options = options
        if options.sinks is not None and apart > 1:
            row_options = replace(
                options, sinks=options.sinks.view(apart, -1).repeat(len(order), 1)
            )
        rows_batch = AttentionBatch(count, lens, tables.view(len(lens), -1).int())
        out = attention(rows, k, v, rows_batch, row_options)
        outs.append(out.unflatten(0, (-1, apart)).flatten(1, 2))
    return torch.cat(outs)


def _copy_rows(stores: list[Tensor], indices: list[Tensor]) -> Tensor:
    """Copy rows of stores, in the order of the query rows, to one store with blocks of one row.

    Args:
        indices: `[T, k, Hkv]` for each store, row numbers across blocks and heads.
    """
    rows = [
        store.flatten(0, 2).index_select(0, index.flatten()).view(*index.shape, store.shape[-1])
        for store, index in zip(stores, indices, strict=True)
    ]
    return (rows[0] if len(rows) == 1 else torch.cat(rows, 1)).flatten(0, 1).unsqueeze(2)
