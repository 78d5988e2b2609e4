"""The work of one step: its chunks, and the batch that they form."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from verbatim.batch import ZERO_STATE, Batch, adapter_column, block_tables, state_columns
from verbatim.core import Sequence
from verbatim.params import CHOICES

Span = tuple[Sequence, int, int]  # positions from, to


@dataclass(slots=True)
class Draft:
    """Proposed next tokens of a sequence, verified in one forward.

    The ids are in the vocabulary, allowed by the sequence's grammar and within its length limit.
    """

    ids: list[int] = field(default_factory=list)
    # The grammar's mask after each id (`SampleRow.mask`); None without a grammar.
    masks: list[torch.Tensor | None] = field(default_factory=list)


@dataclass(slots=True)
class Chunk:
    """The rows of one sequence in one batch."""

    sequence: Sequence
    num_rows: int  # without the draft
    num_prompt_rows: int  # leading logits rows that are prompt-logprob rows
    draws: bool  # the last logits row, and those of the draft, draw tokens
    max_draft: int = 0  # draft rows that are allocated
    draft: Draft = field(default_factory=Draft)
    first_logits_row: int = 0
    first_draw: int = 0  # index of its first row in the step's `Draws`
    num_draws: int = 0
    num_accepted: int = 0  # accepted draft tokens
    is_complete: bool = False  # it draws nothing, as the sequence's grammar is complete
    error: BaseException | None = None  # fails the request after the accepted tokens


@dataclass(slots=True)
class Schedule:
    """The work of one step."""

    chunks: list[Chunk]
    block_copies: list[tuple[int, int]]  # (from, to), before the forward

    def batch(self) -> Batch:
        """Return the batch with the drafts of the chunks; set each chunk's `first_logits_row`."""
        token_ids: list[int] = []
        positions: list[int] = []
        query_starts = [0]
        context_lens: list[int] = []
        logit_rows: list[int] = []
        state_sources: list[int] = []
        state_rows: list[int] = []
        state_targets: list[int] = []
        spans: list[Span] = []
        for chunk in self.chunks:
            sequence, draft = chunk.sequence, chunk.draft.ids
            start, stop = sequence.num_computed, sequence.num_computed + chunk.num_rows
            first_row = len(token_ids)
            spans.append((sequence, start, stop + len(draft)))
            token_ids += sequence.token_ids(start, stop) + draft
            positions += range(start, stop + len(draft))
            query_starts.append(len(token_ids))
            context_lens.append(stop + len(draft))
            states = sequence.states
            state_sources.append(states[start] if start and states else ZERO_STATE)
            for position in sorted(p for p in states if start < p <= context_lens[-1]):
                state_rows.append(first_row + position - start - 1)
                state_targets.append(states[position])
            chunk.first_logits_row = len(logit_rows)
            if chunk.num_prompt_rows:
                first_prompt_row = first_row + sequence.request.num_prompt_rows_done - start
                logit_rows += range(first_prompt_row, first_prompt_row + chunk.num_prompt_rows)
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
            **choices(spans),
            **adapter_column([request.adapter for request in requests]),
            **state_columns(state_sources, state_rows, state_targets),
        )


def choices(spans: list[Span]) -> dict[str, Any]:
    """Return the fields of `Batch` for these rows from what requests record and replay."""
    experts, keys = (_forced(spans, name) for name in CHOICES)
    records = any(sequence.request.params.record_indices for sequence, _, _ in spans)
    return {"forced_experts": experts, "forced_keys": keys, "records_keys": records}


def _forced(spans: list[Span], name: str) -> torch.Tensor | None:
    """Return what these rows are forced to choose; -1 where they are free."""
    named = f"replay_{name}"
    replayed = [getattr(sequence.request.params, named) for sequence, _, _ in spans]
    first = next((record for record in replayed if record is not None), None)
    if first is None:
        return None
    num_rows = sum(stop - start for _, start, stop in spans)
    forced = torch.full((num_rows, *first.shape[1:]), -1, dtype=first.dtype)
    row = 0
    for (_, start, stop), record in zip(spans, replayed, strict=True):
        if record is not None:
            some = record[start:stop]  # may end before `stop`
            forced[row : row + len(some)] = some
        row += stop - start
    return forced
