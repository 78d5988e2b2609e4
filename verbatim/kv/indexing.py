"""Sparse attention by an indexer: which keys a row sees, and attention to those.

A model with an indexer (DeepSeek Sparse Attention, DeepSeek-AI 2025, arXiv:2512.02556) keeps one more key
for each token. Its score for a row is a weighted sum over the indexer's heads of relu(query * key); the row
attends to the keys of the largest scores. Scores are sums in a fixed order in float32, and of equal ones
the lowest positions are taken, so the choice is a function of the row's sequence alone. Other models choose
blocks of keys, each by its best one, and do so for each group of heads.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from verbatim import kernels
from verbatim.batch import AttentionBatch
from verbatim.kernels.options import AttentionOptions, IndexOptions
from verbatim.kv.attention import tree_sum

_TILE = 64  # keys scored at once, at absolute positions
_MAX_ELEMENTS = 1 << 22  # of the largest temporary


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
    rows_at_once = max(1, _MAX_ELEMENTS // (q.shape[1] * _TILE * q.shape[2]))
    for s, length in enumerate(lens):
        begin, end = starts[s], starts[s + 1]
        # Rows that have no more than `width` keys see all of them.
        few = max(0, min(end - begin, width - (length - (end - begin))))
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
    library = None if reference or q.device.type != "cpu" else _bound(kernels.library())
    if library is not None:
        q, keys = q.contiguous(), keys.contiguous()
        weights = None if weights is None else weights.contiguous()
        groups = q.shape[1] if weights is None else 1
        out = q.new_empty(len(q), groups, len(keys))
        operands = [None if x is None else x.data_ptr() for x in (out, q, keys, weights)]
        library.vb_index_scores(*operands, *q.shape, len(keys), torch.get_num_threads())
        return out
    tiles = []
    for tile in keys.split(_TILE):
        scores = tree_sum(q[:, :, None] * tile, -1)[..., 0]
        if weights is not None:
            scores = tree_sum(scores.relu() * weights[..., None], 1)
        tiles.append(scores)
    return torch.cat(tiles, -1)


@functools.cache
def _bound(library: ctypes.CDLL | None) -> ctypes.CDLL | None:
    """Declare the arguments of the kernel."""
    if library is not None:
        library.vb_index_scores.argtypes = (
            [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 4 + [ctypes.c_int]
        )
    return library


def attend_to_chosen(
    attention: Callable[..., Tensor],
    q: Tensor,
    k_store: Tensor,
    v_store: Tensor,
    batch: AttentionBatch,
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
    options = replace(options, chosen=None)
    chosen = chosen[:, 0]
    block_size = k_store.shape[2]
    lengths = batch.query_starts.diff().long()
    sequences = torch.arange(len(lengths), device=q.device).repeat_interleave(lengths)[:, None]
    row_bytes = top_k * (k_store[0, :, 0].nbytes + v_store[0, :, 0].nbytes)
    rows_at_once = max(1, 4 * _MAX_ELEMENTS // row_bytes)
    outs = []
    for first in range(0, len(q), rows_at_once):
        some = chosen[first : first + rows_at_once]
        positions = some.clamp(min=0).long()
        sequence = sequences[first : first + rows_at_once]
        blocks = batch.block_tables[sequence, positions // block_size].long().flatten()
        offsets = (positions % block_size).flatten()
        count = torch.arange(len(some) + 1, dtype=torch.int32, device=q.device)
        tables = torch.arange(some.numel(), dtype=torch.int32, device=q.device).view(some.shape)
        outs.append(
            attention(
                q[first : first + rows_at_once],
                k_store[blocks, :, offsets].unsqueeze(2),
                v_store[blocks, :, offsets].unsqueeze(2),
                AttentionBatch(count, (some >= 0).sum(1, dtype=torch.int32), tables),
                options,
            )
        )
    return torch.cat(outs)
