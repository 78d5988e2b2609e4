"""Continuous batching: selects the sequences of each step and allocates their blocks.

The order of scheduling decides when a token is generated, never which token it is.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left, insort
from collections.abc import Mapping
from concurrent.futures import Future, wait
from operator import attrgetter

from torch import Tensor

from verbatim.core import Request, Sequence
from verbatim.engine.sessions import Sessions
from verbatim.engine.work import Chunk, Schedule
from verbatim.kv.blocks import BlockPool
from verbatim.kv.prefixes import Prefixes
from verbatim.kv.states import StateSlots
from verbatim.protocols import Runner

# Maximum time a step waits for the masks that it starts to compute, except those of slow structures.
MASK_WAIT_S = 5e-4


_rank = attrgetter("rank")


class Scheduler:
    """Continuous batching under a token budget: decodes first, then chunks of prefill.

    Sequences are ordered by rank: the arrival time, shifted by the priority. When blocks run out, or
    `max_sequences` is reached, the sequence with the worst rank is preempted: it keeps its tokens, loses
    its blocks, and is recomputed later.

    Args:
        runner: provides the numbers of blocks and of states, and the size of a block.
        max_batch_tokens: maximum number of rows of a batch.
        max_sequences: maximum number of running sequences.
        max_prompt_rows: maximum number of logits rows for prompt log-probs and drafts in a batch, which
            bounds the memory of their logits.
        prefix_cache: whether prompts share the blocks of a common prefix, cached or in flight.
    """

    def __init__(
        self,
        runner: Runner,
        max_batch_tokens: int,
        max_sequences: int,
        max_prompt_rows: int,
        *,
        prefix_cache: bool = False,
    ) -> None:
        self.pool = pool = BlockPool(runner.num_blocks, runner.block_size)
        self.states = StateSlots(runner.num_states)
        self.block_size = runner.block_size
        self.max_batch_tokens = max_batch_tokens
        self.max_sequences = max_sequences
        self.max_prompt_rows = max_prompt_rows
        self.prefixes = Prefixes(pool, self.states, enabled=prefix_cache)
        self.sessions = Sessions(pool, self.states)
        self.waiting: list[Sequence] = []  # sorted by rank, which is unique and constant
        self.running: dict[Sequence, None] = {}  # in start order
        self.num_preemptions = 0
        self.masks: set[Future[Tensor]] = set()  # not computed yet at the last `schedule`
        self._arrival_numbers = itertools.count()

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence, with the cached blocks of its session."""
        sequence.number = next(self._arrival_numbers)
        self.sessions.attach(sequence)
        self._queue(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, finished or not, and free its blocks."""
        self._free(sequence)
        self.running.pop(sequence, None)
        index = bisect_left(self.waiting, sequence.rank, key=_rank)
        if self.waiting[index : index + 1] == [sequence]:
            del self.waiting[index]

    def _queue(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_rank)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Start `child` from the state of `parent`, on the same blocks (copy-on-write).

        The child is queued if the parent has no blocks, or `max_sequences` is reached.
        """
        child.number = next(self._arrival_numbers)
        child.blocks, child.keys = list(parent.blocks), list(parent.keys)
        child.num_computed = parent.num_computed
        self.pool.share(child.blocks)
        child.num_indexed = parent.num_indexed
        self.states.fork(parent, child)
        if child.blocks and len(self.running) < self.max_sequences:
            self.running[child] = None
        else:
            self._queue(child)

    def schedule(self, draft_lengths: Mapping[Sequence, int] | None = None) -> Schedule | None:
        """Select the rows of the next step; None if nothing can run.

        Args:
            draft_lengths: desired draft length of each sequence. Drafts use only the remaining capacity: no
                sequence waits or is preempted for a draft.
        """
        work = Schedule(self.max_batch_tokens, self.max_prompt_rows)
        self._compute_masks()
        # Beams with candidates wait for the other beams of their request, other sequences for their masks.
        active = [
            s for s in self.running if s.candidates is None and (not s.grammar or s.grammar.ready)
        ]
        active.sort(key=lambda s: (s.num_uncomputed > 1, s.rank))
        for sequence in active:
            self._schedule_waiting(work, before=sequence)
            # It may have been preempted in this step, and even started again.
            if not work.rows or sequence not in self.running or sequence in work.scheduled:
                continue
            chunk = self._chunk(sequence, work)
            if chunk.num_rows and self._make_room(sequence, chunk.num_rows, work):
                self._allocate(chunk, work)
        self._schedule_waiting(work)
        if draft_lengths:
            self._reserve_drafts(draft_lengths, work)
        return work if work.chunks else None

    def _schedule_waiting(self, work: Schedule, before: Sequence | None = None) -> None:
        """Start waiting sequences in order of rank, as far as rows, sequence slots and blocks allow.

        With `before`, start only sequences that are scheduled before that running one.
        """
        index = 0
        while work.rows and index < len(self.waiting):
            sequence = self.waiting[index]
            if before is not None and not _goes_before(sequence, before):
                break
            if (
                # First, as this is quick: thousands may wait for it.
                (sequence.request.needs_prompt_rows and not work.prompt_rows)
                # Another sequence is computing the same prefix.
                or (not sequence.blocks and self.prefixes.is_in_flight(sequence))
                or self._start_mask(sequence) is not None
            ):
                index += 1
            elif not self._start(sequence, work):
                break

    def _compute_masks(self) -> None:
        """Start computing the masks of the running sequences, and wait briefly for the new fast ones.

        A sequence is left out of steps until its mask is computed.
        """
        earlier, self.masks = self.masks, set()
        fast: set[Future[Tensor]] = set()
        for sequence in self.running:
            job, grammar = self._start_mask(sequence), sequence.grammar
            if job is not None and job not in earlier and grammar and not grammar.is_slow:
                fast.add(job)
        if fast:
            wait(fast, timeout=MASK_WAIT_S)

    def _start_mask(self, sequence: Sequence) -> Future[Tensor] | None:
        """Start computing the mask of a sequence's next token; return the job, or None if none is needed."""
        if sequence.grammar is None or sequence.candidates is not None:
            return None
        job = sequence.grammar.prepare()
        if job is not None:
            self.masks.add(job)
        return job

    def advance(self, chunk: Chunk) -> None:
        """Mark the rows of `chunk` as computed."""
        chunk.sequence.num_computed += chunk.num_rows
        self.prefixes.index_blocks(chunk.sequence)
        if not chunk.max_draft:  # else `accept` keeps the right states
            self.states.keep_only(chunk.sequence, chunk.sequence.num_computed)

    def accept(self, sequence: Sequence, num_drafts: int) -> None:
        """Mark `num_drafts` accepted draft rows as computed; free the blocks of the rejected ones."""
        sequence.num_computed += num_drafts
        self.pool.resize(sequence, sequence.num_computed)
        self.prefixes.index_blocks(sequence)
        self.states.keep_only(sequence, sequence.num_computed)

    def roll_back(self, work: Schedule) -> None:
        """Undo a step that was interrupted before commit."""
        for chunk in work.chunks:
            sequence = chunk.sequence
            self.states.keep_only(sequence, sequence.num_computed)
            if work.block_copies and sequence in self.running:
                self._requeue(sequence)  # its blocks may not have been copied yet
            elif chunk.max_draft:  # the next step may have no draft, and need the blocks
                self.pool.resize(sequence, sequence.num_computed + chunk.num_rows)

    def evict(self, sequence: Sequence) -> None:
        """Preempt a running sequence, or free the blocks of a waiting one."""
        if sequence in self.running:
            self._preempt(sequence)
        else:
            self._free(sequence)

    def evict_all(self) -> None:
        """Preempt every sequence, and clear all cached blocks, including those of sessions."""
        # A waiting sequence has blocks from a session, or shared with another sequence.
        for sequence in [*self.running, *(s for s in self.waiting if s.blocks)]:
            self.evict(sequence)
        self.sessions.drop_kv()
        self.prefixes.forget()

    def discard_pending(self, request: Request) -> None:
        """Discard results of the old weights that no token depends on yet. Called after `evict_all`."""
        num_new = request.sequences[0].num_tokens - request.num_input_tokens
        if not num_new:  # else the prompt's results are complete
            request.prompt_tokens = []
        for beam in request.sequences:
            if beam.candidates is not None:
                beam.candidates = None
                self._queue(beam)

    def _reserve_drafts(self, lengths: Mapping[Sequence, int], work: Schedule) -> None:
        """Allocate rows and blocks for drafts from the remaining capacity."""
        if work.block_copies:
            return  # drafting might write to a block before it is copied
        for chunk in work.chunks:
            sequence = chunk.sequence
            length = min(lengths.get(sequence, 0), work.rows, work.prompt_rows)
            # A sequence that was preempted after the lengths were chosen has more than one row to compute.
            if not length or not chunk.draws or chunk.num_rows > 1:
                continue
            end = sequence.num_computed + chunk.num_rows
            blocks = len(sequence.blocks) + self.pool.num_free
            chunk.max_draft = min(
                length, blocks * self.block_size - end, self.states.num_free(length)
            )
            self.states.reserve(sequence, range(end + 1, end + chunk.max_draft + 1))
            self.pool.resize(sequence, end + chunk.max_draft)
            work.rows -= chunk.max_draft
            work.prompt_rows -= chunk.max_draft

    def _start(self, sequence: Sequence, work: Schedule) -> bool:
        """Start a waiting sequence, preempting others if its priority allows; return whether it started."""
        was_parked = bool(sequence.blocks)
        if not was_parked:
            # Files are read only if it can start; otherwise every step might read the same ones.
            can_start = len(self.running) < self.max_sequences
            self.prefixes.attach(sequence, load=can_start)
        chunk = self._chunk(sequence, work)
        if not chunk.num_rows or not self._make_room(sequence, chunk.num_rows, work):
            if not was_parked:
                self._free(sequence)  # the prefix is looked up again next time
            return False
        self.waiting.remove(sequence)
        self.running[sequence] = None
        request = sequence.request
        if not request.was_scheduled:
            request.was_scheduled = True
            request.metrics.queue_s = time.monotonic() - request.arrival
            request.metrics.num_cached_tokens = sequence.num_computed
            self.prefixes.num_hits += sequence.num_computed
        self.prefixes.register(sequence)
        self._allocate(chunk, work)
        return True

    def _make_room(self, sequence: Sequence, rows: int, work: Schedule) -> bool:
        """Free blocks for `rows` rows, and a slot if the sequence is waiting; return whether it succeeded.

        A running sequence preempts the one with the worst rank, which may be itself. Beams with candidates
        are preempted first.
        """
        runs = sequence in self.running
        while True:
            # Too few free blocks or state slots?
            is_short = self._blocks_missing(sequence, rows) > self.pool.num_free
            is_short = is_short or not self.states.num_free(1)
            if not is_short and (runs or len(self.running) < self.max_sequences):
                return True
            if is_short and self._reclaim_blocks(but=sequence):
                continue
            others = (s for s in self.running if s not in work.scheduled)
            victims = [s for s in others if runs or _may_preempt(sequence, s)]
            if not victims:
                return False
            last = max(victims, key=lambda s: (s.candidates is not None, s.rank))
            self._preempt(last)
            if last is sequence:
                return False

    def _chunk(self, sequence: Sequence, work: Schedule) -> Chunk:
        """Return the next rows of `sequence` that fit into the batch."""
        request = sequence.request
        rows = min(sequence.num_uncomputed, work.rows)
        prompt_rows, first = 0, sequence.next_prompt_row
        # The row at position p scores prompt token p + 1. Earlier results are kept through evictions.
        if first is not None and sequence.num_computed <= first:
            rows = min(rows, first - sequence.num_computed + work.prompt_rows)
            end = min(sequence.num_computed + rows, request.num_input_tokens - 1)
            prompt_rows = max(0, end - first)
        is_last = rows == sequence.num_uncomputed
        draws = is_last and not (request.is_prefill_only or sequence.finished)
        return Chunk(sequence, rows, prompt_rows, draws)

    def _preempt(self, sequence: Sequence) -> None:
        """Move a running sequence back to the queue, and count that."""
        self._requeue(sequence)
        self.num_preemptions += 1
        sequence.request.metrics.preemptions += 1

    def _requeue(self, sequence: Sequence) -> None:
        """Move a running sequence back to the queue, at its old rank and without its blocks."""
        self._free(sequence)
        del self.running[sequence]
        # A beam with candidates needs no blocks, and is not queued until the other beams have theirs.
        if sequence.candidates is None:
            self._queue(sequence)

    def _reclaim_blocks(self, but: Sequence) -> bool:
        """Free blocks of an idle session, else of a waiting sequence; return False if there are none."""
        if self.sessions.free_block():
            return True
        waiting = (s for s in reversed(self.waiting) if s.blocks and s is not but)
        if (sequence := next(waiting, None)) is not None:
            self._free(sequence)
        return sequence is not None

    def _free(self, sequence: Sequence) -> None:
        self.pool.resize(sequence, 0)
        self.states.keep_only(sequence, 0)
        sequence.num_computed = 0
        sequence.num_draft_computed.clear()
        self.prefixes.unregister(sequence)

    def _blocks_missing(self, sequence: Sequence, rows: int) -> int:
        needed = self.pool.blocks_for(sequence.num_computed + rows)
        return max(0, needed - len(sequence.blocks)) + self._needs_copy(sequence)

    def _needs_copy(self, sequence: Sequence) -> bool:
        """Return whether the next row is written to a shared block."""
        block, offset = divmod(sequence.num_computed, self.block_size)
        return offset > 0 and self.pool.is_shared(sequence.blocks[block])

    def _allocate(self, chunk: Chunk, work: Schedule) -> None:
        """Allocate the blocks of a chunk, copying a shared block before a write; add it to the batch."""
        sequence = chunk.sequence
        end = sequence.num_computed + chunk.num_rows
        index, offset = divmod(sequence.num_computed, self.block_size)
        if self._needs_copy(sequence):
            shared, (copy,) = sequence.blocks[index], self.pool.take(1)
            work.block_copies.append((shared, copy))
            self.pool.release([shared])
            sequence.blocks[index] = copy
        elif offset:  # the block may be cached, for other tokens
            self.pool.forget_block(sequence.blocks[index])
        self.pool.resize(sequence, end)
        self.states.reserve(sequence, [end])
        snapshots = self.prefixes.snapshots(sequence, end)
        self.states.reserve(sequence, snapshots[: self.states.num_free(len(snapshots))])
        work.add(chunk)


def _goes_before(waiting: Sequence, running: Sequence) -> bool:
    """Return whether `waiting` is scheduled before `running`; a decode yields only to a better priority."""
    if running.num_uncomputed == 1:
        return _may_preempt(waiting, running)
    return waiting.rank <= running.rank


def _may_preempt(waiting: Sequence, running: Sequence) -> bool:
    """Return whether `waiting` may preempt `running`: by a better priority, an earlier arrival is not enough.

    A beam with candidates yields to any sequence, because the beams that it waits for may be queued.
    """
    if running.candidates is not None:
        return True
    return running.request.params.priority > waiting.request.params.priority and (
        running.rank > waiting.rank
    )
