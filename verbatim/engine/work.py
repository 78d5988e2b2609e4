"""The work of one step: its chunks, and the batch that they form."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from verbatim.batch import ZERO_STATE, Batch, Draw
from verbatim.core import Sequence

Span = tuple[Sequence, int, list[int]]  # rows of a sequence: the first position, and their ids


@dataclass(slots=True)
class Chunk:
    """The rows of one sequence in one batch."""

    sequence: Sequence
    num_rows: int  # without the draft
    num_prompt_rows: int  # leading logits rows that are prompt-logprob rows
    draws: bool  # the last logits row, and those of the draft, draw tokens
    max_draft: int = 0  # draft rows that are allocated
    # Proposed next tokens, verified in one forward: in the vocabulary, allowed by the sequence's grammar and
    # within its length limit; and the grammar's mask after each (`SampleRow.mask`), None without a grammar.
    draft_ids: list[int] = field(default_factory=list)
    draft_masks: list[torch.Tensor | None] = field(default_factory=list)
    first_logits_row: int = 0
    # The draws of its logits rows, the prompt's first; one for each sample that draws from a row.
    results: list[Draw] = field(default_factory=list)
    num_accepted: int = 0  # accepted draft tokens
    is_complete: bool = False  # nothing is drawn, as the sequence's grammar is complete
    error: BaseException | None = None  # fails the request after the accepted tokens


@dataclass(slots=True)
class Schedule:
    """The work of one step, and the remaining capacity of its batch."""

    rows: int
    prompt_rows: int
    chunks: list[Chunk] = field(default_factory=list)
    scheduled: set[Sequence] = field(default_factory=set)
    # (from, to), before the forward
    block_copies: list[tuple[int, int]] = field(default_factory=list)

    def add(self, chunk: Chunk) -> None:
        """Add a chunk, which takes its rows from the capacity."""
        assert chunk.sequence not in self.scheduled
        self.chunks.append(chunk)
        self.scheduled.add(chunk.sequence)
        self.rows -= chunk.num_rows
        self.prompt_rows -= chunk.num_prompt_rows

    def batch(self) -> Batch:
        """Return the batch with the drafts of the chunks, and what their requests replay and record.

        Sets each chunk's `first_logits_row`.
        """
        spans: list[Span] = []
        logit_rows: list[int] = []
        sources: list[int] = []
        rows: list[int] = []
        targets: list[int] = []
        end_row = 0
        for chunk in self.chunks:
            sequence, draft = chunk.sequence, chunk.draft_ids
            start, stop = sequence.num_computed, sequence.num_computed + chunk.num_rows
            ids = sequence.token_ids(start, stop) + draft
            spans.append((sequence, start, ids))
            first_row, end_row = end_row, end_row + len(ids)
            states = sequence.states
            sources.append(states[start] if start and states else ZERO_STATE)
            for position in sorted(p for p in states if start < p <= start + len(ids)):
                rows.append(first_row + position - start - 1)
                targets.append(states[position])
            chunk.first_logits_row = len(logit_rows)
            if chunk.num_prompt_rows:
                first_prompt_row = first_row + len(sequence.request.prompt_tokens) - start
                logit_rows += range(first_prompt_row, first_prompt_row + chunk.num_prompt_rows)
            if chunk.draws:
                logit_rows += range(end_row - 1 - len(draft), end_row)
        requests = [chunk.sequence.request for chunk in self.chunks]
        return Batch.of(
            [(ids, start, sequence.blocks) for sequence, start, ids in spans],
            logit_rows,
            states=(sources, rows, targets),
            adapters=[request.adapter for request in requests],
            block_copies=self.block_copies,
            forced_experts=_forced(spans, "replay_routing"),
            forced_keys=_forced(spans, "replay_indices"),
            records_keys=any(request.params.record_indices for request in requests),
            wants_hidden=any(request.params.hidden_states for request in requests),
        )


def _forced(spans: list[Span], field: str) -> torch.Tensor | None:
    """Return the choices that requests replay in these rows, -1 where the model chooses; None without any."""
    replayed = [getattr(sequence.request.params, field) for sequence, _, _ in spans]
    first = next((record for record in replayed if record is not None), None)
    if first is None:
        return None
    num_rows = sum(len(ids) for _, _, ids in spans)
    forced = torch.full((num_rows, *first.shape[1:]), -1, dtype=first.dtype)
    row = 0
    for (_, start, ids), record in zip(spans, replayed, strict=True):
        if record is not None:
            some = record[start : start + len(ids)]  # a record may be shorter
            forced[row : row + len(some)] = some
        row += len(ids)
    return forced
