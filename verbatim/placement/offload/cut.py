"""Splitting of a batch into micro-batches."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from verbatim.batch import Batch


def cut(batch: Batch, max_sequences: int, max_rows: int) -> list[Batch]:
    """Micro-batches of at most so many sequences and rows, in order.

    A sequence with more rows than that goes through in pieces, each in a micro-batch of its own: the
    later ones find the K and V of the earlier ones in the store.
    """
    starts, lens = batch.query_starts.tolist(), batch.context_lens.tolist()
    pieces: list[tuple[int, int, int]] = []  # sequence, first row, end
    for s, (begin, end) in enumerate(itertools.pairwise(starts)):
        pieces += [(s, b, min(b + max_rows, end)) for b in range(begin, end, max_rows)]
    parts: list[list[tuple[int, int, int]]] = []
    for piece in pieces:
        last = parts[-1] if parts else None
        fits = last is not None and (
            len(last) < max_sequences and piece[2] - last[0][1] <= max_rows
        )
        # Two pieces of a sequence in one batch would be two sequences that write to the same blocks.
        if fits and last is not None and last[-1][0] != piece[0]:
            last.append(piece)
        else:
            parts.append([piece])
    if len(parts) == 1:
        return [batch]
    return [_part(batch, part, starts, lens) for part in parts]


def _part(
    batch: Batch, pieces: list[tuple[int, int, int]], starts: list[int], lens: list[int]
) -> Batch:
    first, end = pieces[0][1], pieces[-1][2]
    sequences = [s for s, _, _ in pieces]
    bounds = torch.tensor([b for _, b, _ in pieces] + [end], dtype=torch.int32)
    contexts = [lens[s] - (starts[s + 1] - e) for s, _, e in pieces]
    wanted: Tensor = batch.logit_rows
    forced = batch.forced_experts
    return Batch(
        token_ids=batch.token_ids[first:end],
        positions=batch.positions[first:end],
        query_starts=bounds - first,
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        block_tables=batch.block_tables[sequences],
        logit_rows=wanted[(wanted >= first) & (wanted < end)] - first,
        wants_hidden=batch.wants_hidden,
        forced_experts=None if forced is None else forced[first:end],
    )
