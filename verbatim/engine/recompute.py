"""Batches that recompute the K and V of sequences after their loss."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate

from verbatim.batch import ZERO_STATE, Batch
from verbatim.core import Sequence
from verbatim.engine.work import Span, batch_of


def recompute_batches(
    sequences: Iterable[Sequence], block_size: int, max_batch_tokens: int
) -> list[Batch]:
    """Return batches that recompute the K, V and states of all computed positions, without logits.

    Shared blocks are recomputed once. So are shared states, from the first token on.
    """
    sequences = list({_state_of(s) or s: s for s in sequences}.values())
    covered: defaultdict[int, int] = defaultdict(int)  # recomputed rows of each block
    batches: list[Batch] = []
    spans: list[Span] = []
    room = max_batch_tokens

    def flush() -> None:
        nonlocal spans, room
        if spans:
            batches.append(_batch(spans))
        spans, room = [], max_batch_tokens

    for sequence in sequences:
        begin, end = 0, sequence.num_computed
        if not sequence.states:
            begin = _uncovered(sequence, covered, block_size)
        while begin < end:
            stop = min(end, begin + room)
            spans.append((sequence, begin, sequence.token_ids(begin, stop)))
            room -= stop - begin
            begin = stop
            if not room or begin < end:  # a batch has one span of a sequence
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


def _batch(spans: list[Span]) -> Batch:
    # An unfinished state is kept where the last one will be.
    slots = [_state_of(sequence) or ZERO_STATE for sequence, _, _ in spans]
    sources = [
        slot if begin else ZERO_STATE for slot, (_, begin, _) in zip(slots, spans, strict=True)
    ]
    last_rows = [end - 1 for end in accumulate(len(ids) for _, _, ids in spans)]
    return batch_of(spans, states=(sources, last_rows, slots))
