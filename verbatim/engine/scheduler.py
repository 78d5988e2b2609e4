"""Which sequences run next, and on which blocks.

The order decides when a token is made, never which token it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from verbatim.batch import SCRATCH_BLOCK, Batch, SamplePlan, SampleRow
from verbatim.core import Sequence
from verbatim.kv.blocks import BlockPool
from verbatim.sampling.processors import blocked_by_bad_words
from verbatim.sampling.stopping import banned_until_min_tokens


@dataclass(slots=True)
class Chunk:
    """The rows of one sequence in one batch."""

    sequence: Sequence
    num_rows: int
    num_prompt_targets: int  # leading logits rows that report prompt log-probs
    draws: bool  # the last logits row draws the next token


@dataclass(slots=True)
class Schedule:
    """One step's work: the batch, how its logits are drawn, and whose rows they are."""

    chunks: list[Chunk]
    batch: Batch
    plan: SamplePlan


class Scheduler:
    """Continuous batching under a token budget: decodes first, then chunks of prefill.

    Args:
        pool: the blocks of the KV store.
        block_size: token positions in a block.
        max_batch_tokens: rows of one batch at most.
        max_sequences: sequences running at once at most.
        max_prompt_targets: logits rows for prompt log-probs in one chunk at most, which bounds the
            memory of their logits.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        max_batch_tokens: int,
        max_sequences: int,
        max_prompt_targets: int,
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.max_batch_tokens = max_batch_tokens
        self.max_sequences = max_sequences
        self.max_prompt_targets = max_prompt_targets
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.num_preemptions = 0

    def add(self, sequences: Iterable[Sequence]) -> None:
        self.waiting.extend(sequences)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, finished or not, and take its blocks back."""
        self._release(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def schedule(self) -> Schedule | None:
        """Pick the rows of the next step; None when nothing waits."""
        budget = self.max_batch_tokens
        chunks: list[Chunk] = []
        # Python's sort is stable: among those in prefill the oldest stays first.
        for sequence in sorted(self.running, key=lambda s: s.num_uncomputed > 1):
            if budget and sequence in self.running:  # an earlier one may have preempted it
                chunk = self._chunk(sequence, budget)
                if self._make_room(sequence, chunk.num_rows, chunks):
                    chunks.append(chunk)
                    budget -= chunk.num_rows
        while budget and self.waiting and len(self.running) < self.max_sequences:
            chunk = self._chunk(self.waiting[0], budget)
            if self._blocks_missing(chunk.sequence, chunk.num_rows) > self.pool.num_free:
                break
            self._grow(chunk.sequence, chunk.num_rows)
            self.running.append(self.waiting.popleft())
            chunks.append(chunk)
            budget -= chunk.num_rows
        return self._build(chunks) if chunks else None

    def _chunk(self, sequence: Sequence, budget: int) -> Chunk:
        """The next rows of `sequence` within `budget`."""
        request = sequence.request
        rows = min(sequence.num_uncomputed, budget)
        targets = 0
        if request.params.prompt_logprobs is not None and sequence.index == 0:
            # The row of position p holds the log-prob of prompt token p + 1. Those already known,
            # before an eviction, are not asked for again.
            known = len(request.prompt_logprobs)
            if sequence.num_computed <= known < len(request.prompt_ids) - 1:
                rows = min(rows, known - sequence.num_computed + self.max_prompt_targets)
                end = min(sequence.num_computed + rows, len(request.prompt_ids) - 1)
                targets = max(0, end - known)
        draws = rows == sequence.num_uncomputed and request.max_tokens > 0
        return Chunk(sequence, rows, targets, draws)

    def _make_room(self, sequence: Sequence, rows: int, chunks: list[Chunk]) -> bool:
        """Take blocks for `rows` more positions, preempting the youngest; False if that is `sequence`."""
        scheduled = {id(chunk.sequence) for chunk in chunks}
        while (missing := self._blocks_missing(sequence, rows)) > self.pool.num_free:
            youngest = next(s for s in reversed(self.running) if id(s) not in scheduled)
            self._preempt(youngest)
            if youngest is sequence:
                return False
        assert missing <= self.pool.num_free
        self._grow(sequence, rows)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue with its tokens and without its blocks."""
        self._release(sequence)
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1
        sequence.request.metrics.preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        self.pool.give_back(sequence.blocks)
        sequence.blocks = []
        sequence.num_computed = 0

    def _blocks_missing(self, sequence: Sequence, rows: int) -> int:
        needed = -(-(sequence.num_computed + rows) // self.block_size)
        return max(0, needed - len(sequence.blocks))

    def _grow(self, sequence: Sequence, rows: int) -> None:
        sequence.blocks += self.pool.take(self._blocks_missing(sequence, rows))

    def _build(self, chunks: list[Chunk]) -> Schedule:
        token_ids: list[int] = []
        positions: list[int] = []
        query_starts = [0]
        context_lens: list[int] = []
        logit_rows: list[int] = []
        plan: list[SampleRow] = []
        for chunk in chunks:
            sequence, rows = chunk.sequence, chunk.num_rows
            start, stop = sequence.num_computed, sequence.num_computed + rows
            first_row = len(token_ids)
            token_ids += sequence.token_ids(start, stop)
            positions += range(start, stop)
            query_starts.append(len(token_ids))
            context_lens.append(stop)
            known = len(sequence.request.prompt_logprobs)
            for position in range(known, known + chunk.num_prompt_targets):
                logit_rows.append(first_row + position - start)
                plan.append(_target_row(sequence, position + 1))
            if chunk.draws:
                logit_rows.append(len(token_ids) - 1)
                plan.append(_draw_row(sequence))
        return Schedule(
            chunks,
            Batch(
                token_ids=torch.tensor(token_ids, dtype=torch.int64),
                positions=torch.tensor(positions, dtype=torch.int64),
                query_starts=torch.tensor(query_starts, dtype=torch.int32),
                context_lens=torch.tensor(context_lens, dtype=torch.int32),
                block_tables=_table([chunk.sequence.blocks for chunk in chunks]),
                logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
            ),
            SamplePlan(plan),
        )


def _table(blocks: list[list[int]]) -> torch.Tensor:
    width = max(map(len, blocks))
    padded = [row + [SCRATCH_BLOCK] * (width - len(row)) for row in blocks]
    return torch.tensor(padded, dtype=torch.int32)


def _target_row(sequence: Sequence, position: int) -> SampleRow:
    request = sequence.request
    return SampleRow(
        request.params,
        request.seed,
        sequence.sample_index,
        position,
        target=request.prompt_ids[position],
        num_logprobs=request.params.prompt_logprobs or 0,
    )


def _draw_row(sequence: Sequence) -> SampleRow:
    request, params = sequence.request, sequence.request.params
    made = len(sequence.output_ids)
    banned: list[int] = []
    if made < params.min_tokens:
        banned += banned_until_min_tokens(params, request.eos_ids, made)
    if request.bad_word_ids:
        banned += blocked_by_bad_words(
            request.bad_word_ids, request.prompt_ids + sequence.output_ids
        )
    penalized = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    needs_history = penalized != (1.0, 0.0, 0.0)
    return SampleRow(
        params,
        request.seed,
        sequence.sample_index,
        sequence.num_tokens,
        prompt_ids=request.prompt_ids if needs_history else (),
        output_ids=sequence.output_ids if needs_history else (),
        banned_ids=banned,
        num_logprobs=params.logprobs or 0,
    )
