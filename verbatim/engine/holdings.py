"""What the K and V in use stand for: the tokens, sequence by sequence, from which they can be had again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

from verbatim.batch import Batch, block_tables
from verbatim.core import Sequence

_Piece = tuple[Sequence, int, int]  # positions from, to


def batches_of(
    sequences: Iterable[Sequence], block_size: int, max_batch_tokens: int
) -> list[Batch]:
    """Batches that write the K and V of all these sequences' computed positions once more, without logits.

    What sequences share is computed once.
    """
    covered: defaultdict[int, int] = defaultdict(int)  # rows of each block
    batches: list[Batch] = []
    pieces: list[_Piece] = []
    room = max_batch_tokens

    def flush() -> None:
        nonlocal pieces, room
        if pieces:
            batches.append(_batch(pieces))
        pieces, room = [], max_batch_tokens

    for sequence in sequences:
        begin, end = _uncovered(sequence, covered, block_size), sequence.num_computed
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


def _uncovered(sequence: Sequence, covered: dict[int, int], block_size: int) -> int:
    """The first position of a sequence that no earlier one has computed in the same block."""
    for i, block in enumerate(sequence.blocks):
        rows = min(block_size, sequence.num_computed - i * block_size)
        if covered[block] < rows:
            return i * block_size
    return sequence.num_computed


def _batch(pieces: list[_Piece]) -> Batch:
    token_ids: list[int] = []
    positions: list[int] = []
    query_starts = [0]
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
        forced_experts=_forced(pieces, len(token_ids)),
    )


def _forced(pieces: list[_Piece], num_rows: int) -> torch.Tensor | None:
    """`Batch.forced_experts`, where a request replays a routing."""
    known = [sequence.request.params.replay_routing for sequence, _, _ in pieces]
    some = next((routing for routing in known if routing is not None), None)
    if some is None:
        return None
    forced = torch.full((num_rows, *some.shape[1:]), -1, dtype=torch.int16)
    row = 0
    for (_, begin, end), routing in zip(pieces, known, strict=True):
        if routing is not None:
            mine = routing[begin:end]
            forced[row : row + len(mine)] = mine
        row += end - begin
    return forced
