"""Batches that recompute the K and V of sequences after their loss."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

from verbatim.batch import ZERO_STATE, Batch, adapter_column, block_tables, state_columns
from verbatim.core import Sequence
from verbatim.engine.work import Span, choices


def recompute_batches(
    sequences: Iterable[Sequence], block_size: int, max_batch_tokens: int
) -> list[Batch]:
    """Return batches that recompute the K, V and states of all computed positions, without logits.

    Shared blocks are recomputed once. So are shared states, from the first token on.
    """
    sequences = list({_state_of(s) or s: s for s in sequences}.values())
    covered: defaultdict[int, int] = defaultdict(int)  # recomputed rows of each block
    batches: list[Batch] = []
    pieces: list[Span] = []
    room = max_batch_tokens

    def flush() -> None:
        nonlocal pieces, room
        if pieces:
            batches.append(_batch(pieces))
        pieces, room = [], max_batch_tokens

    for sequence in sequences:
        begin, end = 0, sequence.num_computed
        if not sequence.states:
            begin = _uncovered(sequence, covered, block_size)
        while begin < end:
            stop = min(end, begin + room)
            pieces.append((sequence, begin, stop))
            room -= stop - begin
            begin = stop
            if not room or begin < end:  # two pieces of a sequence can't be in one batch
                flush()
        for i, block in enumerate(sequence.blocks):
            rows = min(block_size, end - i * block_size)
            covered[block] = max(covered[block], rows)
    flush()
    return batches


def _state_of(sequence: Sequence) -> int | None:
    """Return the slot of a sequence's state; sequences with the same one have computed the same tokens."""
    return sequence.states.get(sequence.num_computed)


def _uncovered(sequence: Sequence, covered: dict[int, int], block_size: int) -> int:
    """Return the first position of a sequence that is not covered by an earlier one in the same block."""
    for i, block in enumerate(sequence.blocks):
        rows = min(block_size, sequence.num_computed - i * block_size)
        if covered[block] < rows:
            return i * block_size
    return sequence.num_computed


def _batch(pieces: list[Span]) -> Batch:
    token_ids: list[int] = []
    positions: list[int] = []
    query_starts = [0]
    # An unfinished state is kept where the last one will be.
    slots = [_state_of(sequence) or ZERO_STATE for sequence, _, _ in pieces]
    sources = [
        slot if begin else ZERO_STATE for slot, (_, begin, _) in zip(slots, pieces, strict=True)
    ]
    for sequence, begin, end in pieces:
        token_ids += sequence.token_ids(begin, end)
        positions += range(begin, end)
        query_starts.append(len(token_ids))
    return Batch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        query_starts=torch.tensor(query_starts, dtype=torch.int32),
        context_lens=torch.tensor([end for _, _, end in pieces], dtype=torch.int32),
        block_tables=block_tables([sequence.blocks for sequence, _, _ in pieces]),
        logit_rows=torch.empty(0, dtype=torch.int64),
        **choices(pieces),
        **adapter_column([sequence.request.adapter for sequence, _, _ in pieces]),
        **state_columns(sources, [end - 1 for end in query_starts[1:]], slots),
    )
