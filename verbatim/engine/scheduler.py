"""Which sequences run next, and on which blocks.

The order decides when a token is made, never which token it is.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from verbatim.core import Request, Sequence
from verbatim.engine.sessions import Sessions
from verbatim.engine.waiting import WaitingRoom
from verbatim.engine.work import Chunk, Schedule
from verbatim.kv.blocks import BlockPool
from verbatim.kv.prefixes import Prefixes


@dataclass(slots=True)
class _Budget:
    """What one batch may still take in."""

    rows: int
    prompt_rows: int
    chunks: list[Chunk] = field(default_factory=list)
    scheduled: set[Sequence] = field(default_factory=set)
    copies: list[tuple[int, int]] = field(default_factory=list)

    def add(self, chunk: Chunk) -> None:
        assert chunk.sequence not in self.scheduled
        self.chunks.append(chunk)
        self.scheduled.add(chunk.sequence)
        self.rows -= chunk.num_rows
        self.prompt_rows -= chunk.num_prompt_rows


class Scheduler:
    """Continuous batching under a token budget: decodes first, then chunks of prefill.

    Who goes first among equals is decided by rank: the time of arrival, moved by the priority. When
    blocks or seats run out, the last in rank goes back to waiting with its tokens and without its
    blocks, and is recomputed later; nothing else about it changes.

    Args:
        pool: the blocks of the KV store.
        block_size: token positions in a block.
        max_batch_tokens: rows of one batch at most.
        max_sequences: sequences running at once at most.
        max_prompt_rows: logits rows for prompt log-probs and drafts in one batch at most, which bounds
            the memory of their logits.
        prefix_cache: look for prompts that begin like an earlier one, or like one in flight.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        max_batch_tokens: int,
        max_sequences: int,
        max_prompt_rows: int,
        *,
        prefix_cache: bool = False,
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.max_batch_tokens = max_batch_tokens
        self.max_sequences = max_sequences
        self.max_prompt_rows = max_prompt_rows
        self.prefixes = Prefixes(pool, block_size, enabled=prefix_cache)
        self.sessions = Sessions(pool, block_size)
        self.waiting = WaitingRoom()
        self.running: dict[Sequence, None] = {}  # in the order in which they began to run
        self.num_preemptions = 0
        self.num_new = 0  # requests that wait and have never run
        self._parked: dict[Sequence, None] = {}  # those who hold blocks while they wait
        self._count = itertools.count()

    def add(self, sequence: Sequence) -> None:
        """Take in a sequence that has computed nothing yet, but for what a session holds of it."""
        sequence.number = next(self._count)
        self.num_new += 1
        self.sessions.attach(sequence)
        self.waiting.add(sequence)
        if sequence.blocks:
            self._parked[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, finished or not, and take its blocks back."""
        self._release(sequence)
        self.running.pop(sequence, None)
        if self.waiting.remove(sequence) and not sequence.request.was_scheduled:
            self.num_new -= 1

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` go on from where `parent` is, on the same blocks; the first to write copies.

        Where the parent has no blocks any more, or all seats are taken, the child waits its turn.
        """
        child.number = next(self._count)
        child.blocks, child.keys = list(parent.blocks), list(parent.keys)
        child.num_computed = parent.num_computed
        self.pool.share(child.blocks)
        child.num_indexed = parent.num_indexed
        if child.blocks and len(self.running) < self.max_sequences:
            self.running[child] = None
        else:
            self.waiting.add(child)
            if child.blocks:
                self._parked[child] = None

    def schedule(self, draft_lengths: Mapping[Sequence, int] | None = None) -> Schedule | None:
        """Pick the rows of the next step; None when nothing can run.

        Args:
            draft_lengths: rows that sequences would like behind theirs for a draft. They get what is left:
                nobody waits or loses blocks for a draft.
        """
        budget = _Budget(self.max_batch_tokens, self.max_prompt_rows)
        self._make_way()
        # A beam that has its candidates waits for the others of its request.
        active = [s for s in self.running if s.candidates is None]
        active.sort(key=lambda s: (s.num_uncomputed > 1, s.rank))
        num_decodes = sum(s.num_uncomputed == 1 for s in active)
        for sequence in active[:num_decodes]:
            self._continue(sequence, budget)
        for sequence in active[num_decodes:]:
            # Among prefills, whoever waits at a better rank is first.
            self._begin_waiting(budget, before=sequence)
            self._continue(sequence, budget)
        self._begin_waiting(budget)
        if draft_lengths:
            self._make_room_for_drafts(draft_lengths, budget)
        return Schedule(budget.chunks, budget.copies) if budget.chunks else None

    def _begin_waiting(self, budget: _Budget, before: Sequence | None = None) -> None:
        """Let those who wait begin, in order of rank, while there are rows, seats and blocks."""
        put_off: list[Sequence] = []  # they need rows of logits, of which the batch has no more
        while budget.rows and (first := self._next_waiting()) is not None:
            if before is not None and first.rank > before.rank:
                break
            if first.request.needs_prompt_rows and not budget.prompt_rows:
                self.waiting.remove(first)
                put_off.append(first)
            elif not self._begin(first, budget):
                break
        for sequence in put_off:
            self.waiting.add(sequence)

    def advance(self, chunk: Chunk) -> None:
        """The rows of `chunk` are computed."""
        chunk.sequence.num_computed += chunk.num_rows
        self.waiting.readmit(self.prefixes.computed(chunk.sequence))

    def accept(self, sequence: Sequence, num_drafts: int) -> None:
        """So many rows of its draft stand as well; the blocks that only the others needed go back."""
        sequence.num_computed += num_drafts
        self._give_back_behind(sequence, sequence.num_computed)
        self.waiting.readmit(self.prefixes.computed(sequence))

    def interrupted(self, work: Schedule) -> None:
        """A step was broken off in its middle: nobody can tell whether its block copies were made."""
        for chunk in work.chunks:
            sequence = chunk.sequence
            if work.block_copies and sequence in self.running:
                self._preempt(sequence)
            elif chunk.max_draft:  # the next step may have no draft, and need the blocks
                self._give_back_behind(sequence, sequence.num_computed + chunk.num_rows)

    def evict_all(self) -> None:
        """Everybody who runs goes back to waiting, and no block holds anything any more."""
        for sequence in list(self.running):
            self._preempt(sequence)
        for sequence in list(self._parked):
            self._release(sequence)
        self.sessions.drop_kv()
        self.pool.forget()

    def held(self) -> list[Sequence]:
        """Those who run, or have just ended: what they have computed is all that is kept from here on. What
        others hold, what is cached, and what layers that draft have computed, is let go.
        """
        ended = [
            sequence for sequence in self._parked if sequence.finished
        ]  # and are still read from
        for sequence in list(self._parked):
            if not sequence.finished:
                self._release(sequence)
        self.sessions.drop_kv()
        self.pool.drop_cached()
        for sequence in self.running:
            sequence.truncate_draft_cache(0)
        return [*self.running, *ended]

    def revise(self, request: Request) -> None:
        """After everybody was evicted: forget what the old weights said of what comes next."""
        made = request.sequences[0].num_tokens - request.num_input_tokens
        if not made:  # else the prompt has been reported on
            request.prompt_logprobs, request.prompt_top_logprobs = [], []
            request.prompt_hidden = []
        for beam in request.sequences:
            if beam.candidates is not None:
                beam.candidates = None
                for entries in (beam.top_logprobs, beam.hidden):
                    del entries[len(beam.output_ids) :]
                self.waiting.add(beam)

    def _continue(self, sequence: Sequence, budget: _Budget) -> None:
        """The next rows of a running sequence, at the cost of those behind it if need be."""
        # An earlier one may have preempted it, after which it may even have begun anew.
        if not budget.rows or sequence not in self.running or sequence in budget.scheduled:
            return
        chunk = self._chunk(sequence, budget)
        if not chunk.num_rows:
            return
        while self._blocks_missing(sequence, chunk.num_rows) > self.pool.num_free:
            if not self._free_idle():
                others = (s for s in self.running if s not in budget.scheduled)
                last = max(others, key=_dispensable)
                self._preempt(last)
                if last is sequence:
                    return
        self._grow(chunk, budget)

    def _make_room_for_drafts(self, lengths: Mapping[Sequence, int], budget: _Budget) -> None:
        """Rows and blocks for drafts, of what all others have left."""
        if budget.copies:
            return  # drafting may write to a block, and would do so before it is copied from or to
        for chunk in budget.chunks:
            sequence = chunk.sequence
            wanted = min(lengths.get(sequence, 0), budget.rows, budget.prompt_rows)
            # Whoever lost its blocks since the lengths were chosen has more to compute than one row.
            if not wanted or not chunk.draws or chunk.num_rows > 1:
                continue
            end = sequence.num_computed + chunk.num_rows
            blocks = len(sequence.blocks) + self.pool.num_free
            chunk.max_draft = min(wanted, blocks * self.block_size - end)
            missing = -(-(end + chunk.max_draft) // self.block_size) - len(sequence.blocks)
            sequence.blocks += self.pool.take(max(0, missing))
            budget.rows -= chunk.max_draft
            budget.prompt_rows -= chunk.max_draft

    def _give_back_behind(self, sequence: Sequence, num_tokens: int) -> None:
        """Give back the blocks that hold none of the first `num_tokens` positions."""
        needed = -(-num_tokens // self.block_size)
        self.pool.give_back(sequence.blocks[needed:])
        del sequence.blocks[needed:]

    def _next_waiting(self) -> Sequence | None:
        """The first in rank of those that wait, and for nobody else's prefill."""
        while (sequence := self.waiting.first()) is not None:
            awaited = None if sequence.blocks else self.prefixes.in_flight(sequence)
            if awaited is None:
                return sequence
            self.waiting.hold(sequence, awaited)
        return None

    def _begin(self, sequence: Sequence, budget: _Budget) -> bool:
        """Give a waiting sequence a seat and its first rows, if there is room or somebody must yield."""
        was_parked = sequence in self._parked
        if not was_parked:
            self.prefixes.attach(sequence)
        chunk = self._chunk(sequence, budget)
        if not chunk.num_rows or not self._make_room(sequence, chunk.num_rows, budget):
            if not was_parked:
                self._release(sequence)  # the prefix is looked for again next time
            return False
        self.waiting.remove(sequence)
        self._parked.pop(sequence, None)
        self.running[sequence] = None
        self._note_start(sequence)
        self.prefixes.promise(sequence)
        self._grow(chunk, budget)
        return True

    def _make_way(self) -> None:
        """Before anybody is scheduled: the first who waits, if anybody runs at a worse priority."""
        first = self._next_waiting()
        if first is None:
            return
        priority, is_parked = first.request.params.priority, first in self._parked
        if any(s.request.params.priority > priority for s in self.running):
            if not is_parked:
                self.prefixes.attach(first)
            nobody_yet = _Budget(self.max_batch_tokens, self.max_prompt_rows)
            self._make_room(first, min(first.num_uncomputed, nobody_yet.rows), nobody_yet)
            if not is_parked:
                self._release(first)

    def _make_room(self, sequence: Sequence, rows: int, budget: _Budget) -> bool:
        """A seat and the blocks for `rows` of a waiting sequence; False if nobody yields to it."""
        while True:
            short_of_blocks = self._blocks_missing(sequence, rows) > self.pool.num_free
            if not short_of_blocks and len(self.running) < self.max_sequences:
                return True
            if short_of_blocks and self._free_idle(but=sequence):
                continue
            yielding = [
                s for s in self.running if s not in budget.scheduled and _yields(s, sequence)
            ]
            if not yielding:
                return False
            self._preempt(max(yielding, key=_dispensable))

    def _note_start(self, sequence: Sequence) -> None:
        request, metrics = sequence.request, sequence.request.metrics
        if not request.was_scheduled:
            request.was_scheduled = True
            self.num_new -= 1
            metrics.queue_s = time.monotonic() - request.arrival
            metrics.num_cached_tokens = sequence.num_computed
            self.prefixes.num_hits += sequence.num_computed

    def _chunk(self, sequence: Sequence, budget: _Budget) -> Chunk:
        """The next rows of `sequence` within the budget."""
        request = sequence.request
        rows = min(sequence.num_uncomputed, budget.rows)
        targets, unread = 0, sequence.next_prompt_row
        # The row of position p reports on prompt token p + 1. What is known already, before an
        # eviction, is not asked for again.
        if unread is not None and sequence.num_computed <= unread:
            rows = min(rows, unread - sequence.num_computed + budget.prompt_rows)
            end = min(sequence.num_computed + rows, request.num_input_tokens - 1)
            targets = max(0, end - unread)
        draws = rows == sequence.num_uncomputed and not request.is_prefill_only
        return Chunk(sequence, rows, targets, draws)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to waiting, at its old rank, with its tokens and without its blocks."""
        self._release(sequence)
        del self.running[sequence]
        # A beam that knows how it may go on needs no blocks, nor a place in the queue, to wait for others.
        if sequence.candidates is None:
            self.waiting.add(sequence)
        self.num_preemptions += 1
        sequence.request.metrics.preemptions += 1

    def _free_idle(self, but: Sequence | None = None) -> bool:
        """Sessions between their turns hold blocks, and so do those that wait for a seat: the samples of a
        request their prompt's, turns their session's. But not at the cost of others.
        """
        if self.sessions.free_block():
            return True
        for sequence in reversed(self._parked):
            if sequence is not but:
                self._release(sequence)
                return True
        return False

    def _release(self, sequence: Sequence) -> None:
        self.pool.give_back(sequence.blocks)
        sequence.blocks = []
        sequence.num_computed = 0
        sequence.num_draft_computed.clear()
        self._parked.pop(sequence, None)
        self.waiting.readmit(self.prefixes.withdraw(sequence))

    def _blocks_missing(self, sequence: Sequence, rows: int) -> int:
        needed = -(-(sequence.num_computed + rows) // self.block_size)
        return max(0, needed - len(sequence.blocks)) + self._writes_to_a_shared_block(sequence)

    def _writes_to_a_shared_block(self, sequence: Sequence) -> bool:
        block, offset = divmod(sequence.num_computed, self.block_size)
        return offset > 0 and self.pool.is_shared(sequence.blocks[block])

    def _grow(self, chunk: Chunk, budget: _Budget) -> None:
        """Take the blocks for a chunk; a shared block that it writes to is copied first."""
        sequence = chunk.sequence
        missing = self._blocks_missing(sequence, chunk.num_rows)
        if self._writes_to_a_shared_block(sequence):
            index = sequence.num_computed // self.block_size
            shared, (own,) = sequence.blocks[index], self.pool.take(1)
            budget.copies.append((shared, own))
            self.pool.give_back([shared])
            sequence.blocks[index] = own
            missing -= 1
        sequence.blocks += self.pool.take(missing)
        budget.add(chunk)


def _dispensable(running: Sequence) -> tuple[bool, tuple[float, int]]:
    """Whoever has most of this goes first: a beam that only waits for the others of its request, then
    the last in rank.
    """
    return running.candidates is not None, running.rank


def _yields(running: Sequence, waiting: Sequence) -> bool:
    """Only a better priority takes a seat from somebody who runs; arriving earlier is no reason. A beam
    that only waits for others gives way to everybody: those others may be waiting themselves.
    """
    if running.candidates is not None:
        return True
    return running.request.params.priority > waiting.request.params.priority and (
        running.rank > waiting.rank
    )
