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

# The wait of a step for the masks that begin with it; those of slow structures are not waited for.
MASK_WAIT_S = 5e-4


_rank = attrgetter("rank")


class Scheduler:
    """Continuous batching under a token budget: decodes first, then chunks of prefill.

    Sequences are ordered by rank: the arrival time, shifted by the priority. When blocks run out, or
    `max_sequences` is reached, the sequence with the worst rank is preempted: it keeps its tokens, loses
    its blocks, and is recomputed later.

    Args:
        pool: the blocks of the KV store.
        states: the slots of recurrent states.
        block_size: token positions per block.
        max_batch_tokens: maximum number of rows of a batch.
        max_sequences: maximum number of running sequences.
        max_prompt_rows: maximum number of logits rows for prompt log-probs and drafts in a batch, which
            bounds the memory of their logits.
        prefix_cache: reuse the blocks of prompts with a common prefix, cached or in flight.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        max_batch_tokens: int,
        max_sequences: int,
        max_prompt_rows: int,
        *,
        states: StateSlots | None = None,
        prefix_cache: bool = False,
    ) -> None:
        self.pool = pool
        self.states = states or StateSlots(0)
        self.block_size = block_size
        self.max_batch_tokens = max_batch_tokens
        self.max_sequences = max_sequences
        self.max_prompt_rows = max_prompt_rows
        self.prefixes = Prefixes(pool, self.states, block_size, enabled=prefix_cache)
        self.sessions = Sessions(pool, self.states, block_size)
        self.waiting: list[Sequence] = []  # by rank, which is constant and of one sequence alone
        self.running: dict[Sequence, None] = {}  # in the order of their start
        self.num_preemptions = 0
        self.masks: set[Future[Tensor]] = set()  # under way at the last `schedule`
        self._count = itertools.count()

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence, with the blocks that its session has cached."""
        sequence.number = next(self._count)
        self.sessions.attach(sequence)
        self._queue(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, finished or not, and free its blocks."""
        self._free(sequence)
        self.running.pop(sequence, None)
        place = bisect_left(self.waiting, sequence.rank, key=_rank)
        if self.waiting[place : place + 1] == [sequence]:
            del self.waiting[place]

    def _queue(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_rank)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Start `child` from the state of `parent`, on the same blocks (copy-on-write).

        The child is queued if the parent has no blocks, or `max_sequences` is reached.
        """
        child.number = next(self._count)
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
            draft_lengths: desired draft length of each sequence. Drafts get only capacity that is left
                over: no sequence waits or is preempted for a draft.
        """
        work = Schedule(self.max_batch_tokens, self.max_prompt_rows)
        self._compute_masks()
        # A beam with candidates waits for the other beams of its request, a sequence for its mask.
        active = [
            s for s in self.running if s.candidates is None and (not s.grammar or s.grammar.ready)
        ]
        active.sort(key=lambda s: (s.num_uncomputed > 1, s.rank))
        for sequence in active:
            self._schedule_waiting(work, before=sequence)
            self._schedule_running(sequence, work)
        self._schedule_waiting(work)
        if draft_lengths:
            self._reserve_drafts(draft_lengths, work)
        return work if work.chunks else None

    def _schedule_waiting(self, work: Schedule, before: Sequence | None = None) -> None:
        """Start waiting sequences in order of rank, as far as rows, sequence slots and blocks allow.

        Args:
            before: start only those that go before this running sequence.
        """
        place = 0
        while work.rows and place < len(self.waiting):
            sequence = self.waiting[place]
            if before is not None and not _goes_before(sequence, before):
                break
            if (
                # Another sequence is computing its prefix.
                (not sequence.blocks and self.prefixes.is_in_flight(sequence))
                or (sequence.request.needs_prompt_rows and not work.prompt_rows)
                or self._start_mask(sequence) is not None
            ):
                place += 1
            elif not self._start(sequence, work):
                break

    def _compute_masks(self) -> None:
        """Start computing the masks of the running sequences, and wait a moment for the new quick ones.

        A sequence whose mask takes longer is left out of steps until it has it.
        """
        late, self.masks = self.masks, set()
        quick: set[Future[Tensor]] = set()
        for sequence in self.running:
            job, grammar = self._start_mask(sequence), sequence.grammar
            if job is not None and job not in late and grammar and not grammar.is_slow:
                quick.add(job)
        if quick:
            wait(quick, timeout=MASK_WAIT_S)

    def _start_mask(self, sequence: Sequence) -> Future[Tensor] | None:
        """Start computing the mask of a sequence's next token, if needed; None if it is computed."""
        if sequence.grammar is None or sequence.candidates is not None:
            return None
        job = sequence.grammar.prepare()
        if job is not None:
            self.masks.add(job)
        return job

    def advance(self, chunk: Chunk) -> None:
        """Mark the rows of `chunk` as computed."""
        chunk.sequence.num_computed += chunk.num_rows
        self.prefixes.computed(chunk.sequence)
        if not chunk.max_draft:  # else `accept` decides which states are kept
            self.states.keep(chunk.sequence, chunk.sequence.num_computed)

    def accept(self, sequence: Sequence, num_drafts: int) -> None:
        """Mark `num_drafts` accepted draft rows as computed; free the blocks of the rejected ones."""
        sequence.num_computed += num_drafts
        self._truncate(sequence, sequence.num_computed)
        self.prefixes.computed(sequence)
        self.states.keep(sequence, sequence.num_computed)

    def roll_back(self, work: Schedule) -> None:
        """Undo a step that was interrupted before commit."""
        for chunk in work.chunks:
            sequence = chunk.sequence
            self.states.keep(sequence, sequence.num_computed)
            if work.block_copies and sequence in self.running:
                self._preempt(sequence)  # the copies may not have been made
            elif chunk.max_draft:  # the next step may have no draft, and need the blocks
                self._truncate(sequence, sequence.num_computed + chunk.num_rows)

    def evict(self, sequence: Sequence) -> None:
        """Preempt a sequence, which may also be waiting."""
        if sequence in self.running:
            self._preempt(sequence)
        else:
            self._free(sequence)

    def evict_all(self) -> None:
        """Preempt every sequence, and clear all cached blocks, also those of sessions."""
        for sequence in [*self.running, *self._parked()]:
            self.evict(sequence)
        self.sessions.drop_kv()
        self.prefixes.forget()

    def _parked(self) -> list[Sequence]:
        """Return the waiting sequences that hold blocks: of a session, or shared with another sequence."""
        return [sequence for sequence in self.waiting if sequence.blocks]

    def discard_pending(self, request: Request) -> None:
        """Discard results of the old weights that no token depends on yet, after `evict_all`."""
        num_new = request.sequences[0].num_tokens - request.num_input_tokens
        if not num_new:  # else the prompt's results are complete
            request.prompt_tokens = []
        for beam in request.sequences:
            if beam.candidates is not None:
                beam.candidates = None
                self._queue(beam)

    def _schedule_running(self, sequence: Sequence, work: Schedule) -> None:
        """Schedule the next rows of a running sequence, preempting sequences of a worse rank if needed."""
        # It may have been preempted in this step, and even been started again.
        if not work.rows or sequence not in self.running or sequence in work.scheduled:
            return
        chunk = self._chunk(sequence, work)
        if chunk.num_rows and self._make_room(sequence, chunk.num_rows, work):
            self._allocate(chunk, work)

    def _reserve_drafts(self, lengths: Mapping[Sequence, int], work: Schedule) -> None:
        """Allocate rows and blocks for drafts from the remaining capacity."""
        if work.block_copies:
            return  # drafting may write to a block before it is copied
        for chunk in work.chunks:
            sequence = chunk.sequence
            wanted = min(lengths.get(sequence, 0), work.rows, work.prompt_rows)
            # A sequence preempted since the lengths were chosen has more than one row to compute.
            if not wanted or not chunk.draws or chunk.num_rows > 1:
                continue
            end = sequence.num_computed + chunk.num_rows
            blocks = len(sequence.blocks) + self.pool.num_free
            chunk.max_draft = min(
                wanted, blocks * self.block_size - end, self.states.num_free(wanted)
            )
            self.states.reserve(sequence, range(end + 1, end + chunk.max_draft + 1))
            missing = -(-(end + chunk.max_draft) // self.block_size) - len(sequence.blocks)
            sequence.blocks += self.pool.take(max(0, missing))
            work.rows -= chunk.max_draft
            work.prompt_rows -= chunk.max_draft

    def _truncate(self, sequence: Sequence, num_tokens: int) -> None:
        """Free the blocks behind the first `num_tokens` positions."""
        needed = -(-num_tokens // self.block_size)
        self.pool.give_back(sequence.blocks[needed:])
        del sequence.blocks[needed:]

    def _start(self, sequence: Sequence, work: Schedule) -> bool:
        """Start a waiting sequence, preempting others if its priority allows; return whether it runs."""
        was_parked = bool(sequence.blocks)
        if not was_parked:
            # Else it might not start, and read the same files again in each step.
            can_start = len(self.running) < self.max_sequences
            self.prefixes.attach(sequence, load=can_start)
        chunk = self._chunk(sequence, work)
        if not chunk.num_rows or not self._make_room(sequence, chunk.num_rows, work):
            if not was_parked:
                self._free(sequence)  # the prefix is looked up again next time
            return False
        self.waiting.remove(sequence)
        self.running[sequence] = None
        self._record_start(sequence)
        self.prefixes.promise(sequence)
        self._allocate(chunk, work)
        return True

    def _make_room(self, sequence: Sequence, rows: int, work: Schedule) -> bool:
        """Free blocks for `rows` of a sequence, and a slot if it waits; return whether that was possible.

        A running sequence preempts any other of a worse rank, and itself if there is none. A beam with
        candidates is preempted first.
        """
        runs = sequence in self.running
        while True:
            is_short = self._is_short(sequence, rows)
            if not is_short and (runs or len(self.running) < self.max_sequences):
                return True
            if is_short and self._reclaim_idle(but=sequence):
                continue
            others = (s for s in self.running if s not in work.scheduled)
            victims = [s for s in others if runs or _may_preempt(sequence, s)]
            if not victims:
                return False
            last = max(victims, key=lambda s: (s.candidates is not None, s.rank))
            self._preempt(last)
            if last is sequence:
                return False

    def _record_start(self, sequence: Sequence) -> None:
        request, metrics = sequence.request, sequence.request.metrics
        if not request.was_scheduled:
            request.was_scheduled = True
            metrics.queue_s = time.monotonic() - request.arrival
            metrics.num_cached_tokens = sequence.num_computed
            self.prefixes.num_hits += sequence.num_computed

    def _chunk(self, sequence: Sequence, work: Schedule) -> Chunk:
        """Return the next rows of `sequence` that fit into the batch."""
        request = sequence.request
        rows = min(sequence.num_uncomputed, work.rows)
        prompt_rows, first = 0, sequence.next_prompt_row
        # The row at position p scores prompt token p + 1. Results from before an eviction are kept.
        if first is not None and sequence.num_computed <= first:
            rows = min(rows, first - sequence.num_computed + work.prompt_rows)
            end = min(sequence.num_computed + rows, request.num_input_tokens - 1)
            prompt_rows = max(0, end - first)
        is_last = rows == sequence.num_uncomputed
        draws = is_last and not (request.is_prefill_only or sequence.finished)
        return Chunk(sequence, rows, prompt_rows, draws)

    def _preempt(self, sequence: Sequence) -> None:
        """Move a running sequence back to the queue, at its old rank and without its blocks."""
        self._free(sequence)
        del self.running[sequence]
        # A beam with candidates needs neither blocks nor a place in the queue until the others have theirs.
        if sequence.candidates is None:
            self._queue(sequence)
        self.num_preemptions += 1
        sequence.request.metrics.preemptions += 1

    def _reclaim_idle(self, but: Sequence) -> bool:
        """Free blocks of an idle session, else of a waiting sequence; return False if there are none."""
        if self.sessions.free_block():
            return True
        for sequence in reversed(self._parked()):
            if sequence is not but:
                self._free(sequence)
                return True
        return False

    def _free(self, sequence: Sequence) -> None:
        self.pool.give_back(sequence.blocks)
        sequence.blocks = []
        self.states.keep(sequence, 0)
        sequence.num_computed = 0
        sequence.num_draft_computed.clear()
        self.prefixes.withdraw(sequence)

    def _is_short(self, sequence: Sequence, rows: int) -> bool:
        """Return whether blocks, or a slot for its state, are missing for the next rows of a sequence."""
        missing = self._blocks_missing(sequence, rows)
        return missing > self.pool.num_free or not self.states.num_free(1)

    def _blocks_missing(self, sequence: Sequence, rows: int) -> int:
        needed = -(-(sequence.num_computed + rows) // self.block_size)
        return max(0, needed - len(sequence.blocks)) + self._needs_copy(sequence)

    def _needs_copy(self, sequence: Sequence) -> bool:
        """Return whether the next row is written to a shared block."""
        block, offset = divmod(sequence.num_computed, self.block_size)
        return offset > 0 and self.pool.is_shared(sequence.blocks[block])

    def _allocate(self, chunk: Chunk, work: Schedule) -> None:
        """Allocate the blocks of a chunk and add it to the batch; copy a shared block before the write."""
        sequence = chunk.sequence
        missing = self._blocks_missing(sequence, chunk.num_rows)
        if self._needs_copy(sequence):
            index = sequence.num_computed // self.block_size
            shared, (copy,) = sequence.blocks[index], self.pool.take(1)
            work.block_copies.append((shared, copy))
            self.pool.give_back([shared])
            sequence.blocks[index] = copy
            missing -= 1
        sequence.blocks += self.pool.take(missing)
        end = sequence.num_computed + chunk.num_rows
        self.states.reserve(sequence, [end])
        snapshots = self.prefixes.snapshots(sequence, end)
        self.states.reserve(sequence, snapshots[: self.states.num_free(len(snapshots))])
        work.add(chunk)


def _goes_before(waiting: Sequence, running: Sequence) -> bool:
    """Return whether `waiting` is scheduled before `running`; a decode gives way to priority only."""
    if running.num_uncomputed == 1:
        return _may_preempt(waiting, running)
    return waiting.rank <= running.rank


def _may_preempt(waiting: Sequence, running: Sequence) -> bool:
    """Return whether `waiting` may preempt `running`: a better priority is needed, not an earlier arrival.

    A beam with candidates yields to any sequence: the beams that it waits for may be in the queue.
    """
    if running.candidates is not None:
        return True
    return running.request.params.priority > waiting.request.params.priority and (
        running.rank > waiting.rank
    )
