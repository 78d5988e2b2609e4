"""One step's work: whose rows are in it, and the batch that they make."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from verbatim.batch import Batch, block_tables
from verbatim.core import Sequence


@dataclass(slots=True)
class Draft:
    """Ids that may come next, for the model to look at all at once.

    What stands in it can come next as far as anybody knows before the forward: ids of the vocabulary,
    within the sequence's structure and length.
    """

    ids: list[int] = field(default_factory=list)
    # Which ids the structure allows behind each of them (`SampleRow.mask`); None where there is none.
    masks: list[torch.Tensor | None] = field(default_factory=list)


@dataclass(slots=True)
class Chunk:
    """The rows of one sequence in one batch."""

    sequence: Sequence
    num_rows: int  # without those of its draft
    num_prompt_rows: int  # leading logits rows that report on positions of the prompt
    draws: bool  # the last logits row draws the next token, and those of the draft the next ones
    max_draft: int = 0  # rows for which there is room behind
    draft: Draft = field(default_factory=Draft)
    first_logits_row: int = 0
    first_draw: int = 0  # where its rows begin in the step's `Draws`
    num_draws: int = 0
    num_accepted: int = 0  # tokens of the draft that stand
    error: BaseException | None = None  # of the request, behind the tokens that stand


@dataclass(slots=True)
class Schedule:
    """One step's work."""

    chunks: list[Chunk]
    block_copies: list[tuple[int, int]]  # (from, to), to be made first

    def batch(self) -> Batch:
        """The forward to run, once the drafts are there; each chunk notes where its rows of logits begin."""
        token_ids: list[int] = []
        positions: list[int] = []
        query_starts = [0]
        context_lens: list[int] = []
        logit_rows: list[int] = []
        for chunk in self.chunks:
            sequence, draft = chunk.sequence, chunk.draft.ids
            start, stop = sequence.num_computed, sequence.num_computed + chunk.num_rows
            first_row = len(token_ids)
            token_ids += sequence.token_ids(start, stop) + draft
            positions += range(start, stop + len(draft))
            query_starts.append(len(token_ids))
            context_lens.append(stop + len(draft))
            chunk.first_logits_row = len(logit_rows)
            if chunk.num_prompt_rows:
                known = first_row + sequence.request.num_prompt_rows_done - start
                logit_rows += range(known, known + chunk.num_prompt_rows)
            if chunk.draws:
                logit_rows += range(len(token_ids) - 1 - len(draft), len(token_ids))
        requests = [chunk.sequence.request for chunk in self.chunks]
        return Batch(
            token_ids=torch.tensor(token_ids, dtype=torch.int64),
            positions=torch.tensor(positions, dtype=torch.int64),
            query_starts=torch.tensor(query_starts, dtype=torch.int32),
            context_lens=torch.tensor(context_lens, dtype=torch.int32),
            block_tables=block_tables([chunk.sequence.blocks for chunk in self.chunks]),
            logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
            block_copies=self.block_copies,
            wants_hidden=any(request.params.hidden_states for request in requests),
            forced_experts=_forced_experts(self.chunks, len(token_ids)),
        )


def _forced_experts(chunks: list[Chunk], num_rows: int) -> torch.Tensor | None:
    """`Batch.forced_experts`: the recorded routing of the rows that have one."""
    recorded = [chunk.sequence.request.params.replay_routing for chunk in chunks]
    known = next((routing for routing in recorded if routing is not None), None)
    if known is None:
        return None
    forced = torch.full((num_rows, *known.shape[1:]), -1, dtype=torch.int16)
    row = 0
    for chunk, routing in zip(chunks, recorded, strict=True):
        if routing is not None:
            start = chunk.sequence.num_computed
            mine = routing[start : start + chunk.num_rows + len(chunk.draft.ids)]
            forced[row : row + len(mine)] = mine
        row += chunk.num_rows + len(chunk.draft.ids)
    return forced
