"""Draft lengths: fixed, or adapted to acceptance and measured cost."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field

from verbatim.core import Sequence
from verbatim.engine.costs import Costs
from verbatim.engine.work import Chunk

MAX_ADAPTIVE = 8  # maximum adaptive draft length

_DECAY = 0.95  # of a sequence's acceptance counts per draft: about twenty drafts count
_PRIOR_TRIES = 4.0  # weight of the acceptance of all sequences in that of each
_INITIAL_ACCEPTANCE = 0.7
_FIRST_PAUSE, _LONGEST_PAUSE = 8, 128  # steps without a draft before the next trial
# Minimum expected speedup of drafts, for one sequence and for many. Measurements are noisy, and among many
# sequences some run ahead, which leaves a half-empty batch to the last ones.
_MIN_SPEEDUP, _MIN_SPEEDUP_OF_MANY = 1.05, 1.25
_TRIAL_SHARE = 0.005  # share of time for trial drafts that are not expected to pay
_GRADES = 5  # of acceptance probability, for sorting
_LONGEST_SLEEP = 8  # steps without any choice of lengths while no draft pays
_FIRST_PLAIN = 3  # steps that are measured before the first draft
_PLAIN_EVERY = 64  # steps at most until one without drafts is measured again
_FORGOTTEN_AFTER = 512  # steps


class FixedLengths:
    """The same draft length for every sequence and step."""

    def __init__(self, length: int) -> None:
        self.fixed = length

    def begin_step(self) -> bool:
        """Begin a step; return whether `choose` is to be called in it."""
        return True

    def choose(self, limits: Mapping[Sequence, int]) -> dict[Sequence, int]:
        """Return the draft lengths above 0, given the maximum length of each sequence."""
        return {s: min(self.fixed, n) for s, n in limits.items() if min(self.fixed, n) > 0}

    def note_proposal(self, chunks: list[Chunk], spent_s: float) -> None:
        """Record the duration of a proposal."""

    def note_step(self, chunks: list[Chunk], spent_s: float) -> None:
        """Record the duration of a step, without the proposal."""

    def note_draft(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Record that the first `accepted` of `drafted` tokens were accepted."""


@dataclass(slots=True)
class Record:
    """Decayed acceptance counts by position: entry `j` is about the `j + 1`-th tokens of drafts."""

    tries: list[float] = field(default_factory=lambda: [0.0] * MAX_ADAPTIVE)
    hits: list[float] = field(default_factory=lambda: [0.0] * MAX_ADAPTIVE)
    empty: float = 0.0  # share of empty proposals
    paused_until: int = 0  # the step of the next trial draft
    next_pause: int = _FIRST_PAUSE

    def pause(self, step: int) -> None:
        """Pause drafting, and double the length of the next pause."""
        self.paused_until = step + self.next_pause
        self.next_pause = min(2 * self.next_pause, _LONGEST_PAUSE)

    def note(self, drafted: int, accepted: int) -> None:
        """Count a draft; a token counts as tried if all tokens before it were accepted."""
        for j in range(MAX_ADAPTIVE):
            self.tries[j] *= _DECAY
            self.hits[j] *= _DECAY
            if j < drafted and j <= accepted:
                self.tries[j] += 1
                self.hits[j] += j < accepted


class AdaptiveLengths:
    """Draft lengths that maximize the throughput expected from measured acceptance and cost.

    Each step gets the drafts with the most expected tokens per second: the acceptance probability falls
    along a draft, the cost of a step grows with its rows, and the cost of drafting with the longest
    draft. While no draft pays, single tokens are drafted as trials, for at most `_TRIAL_SHARE` of the time.
    Outputs do not depend on the lengths.
    """

    fixed = None

    def __init__(self) -> None:
        self._all = Record()
        self._records: weakref.WeakKeyDictionary[Sequence, Record] = weakref.WeakKeyDictionary()
        self._step_s = Costs()  # by rows
        self._draft_s = Costs()  # of one more token, by number of sequences
        self._credit_s = 0.0  # time available for trials
        self._step = 0
        self._sleeps_until = 0
        self._num_plain = 0  # measured steps without drafts
        self._last_plain = 0

    def begin_step(self) -> bool:
        """Begin a step; return whether `choose` is to be called in it."""
        self._step += 1
        if self._step % _PLAIN_EVERY == 0:
            for costs in (self._step_s, self._draft_s):
                costs.forget(self._step - _FORGOTTEN_AFTER)
        is_plain_due = self._step - self._last_plain > _PLAIN_EVERY
        return (
            self._step >= self._sleeps_until
            and self._num_plain >= _FIRST_PLAIN
            and not is_plain_due
        )

    def choose(self, limits: Mapping[Sequence, int]) -> dict[Sequence, int]:
        """Return the draft lengths above 0, given the maximum length of each sequence."""
        base_s = self._step_s.expected(len(limits))
        if base_s is None:
            return {}
        lengths: dict[Sequence, int] = {}
        offers: list[tuple[float, int, Sequence]] = []  # acceptance probability, position, sequence
        for sequence, limit in limits.items():
            record = self._record(sequence)
            if record.paused_until > self._step:
                continue
            if record.paused_until and limit > 0:  # a trial, whatever its expected gain
                chance = (1.0 - record.empty) * self._chance(record, 0, None)
                if self._may_try(len(lengths), chance * base_s / len(limits)):
                    lengths[sequence] = 1
                    record.paused_until = 0
                else:
                    record.paused_until = self._step + _LONGEST_SLEEP
                continue
            chance, conditional = 1.0 - record.empty, None
            for j in range(min(limit, MAX_ADAPTIVE)):
                conditional = self._chance(record, j, conditional)
                chance *= conditional
                if chance < 0.02:
                    break
                offers.append((chance, j, sequence))
        # With about equal chances, drafts grow evenly: a batch ends with its slowest sequence.
        offers.sort(key=lambda offer: (-int(offer[0] * _GRADES), offer[1]))
        for _, _, sequence in offers[: self._best_count(offers, len(limits), base_s)]:
            lengths[sequence] = lengths.get(sequence, 0) + 1
        if not lengths:
            for sequence in limits:
                record = self._record(sequence)
                if not record.paused_until:
                    record.pause(self._step)
            first = min(self._record(sequence).paused_until for sequence in limits)
            self._sleeps_until = min(first, self._step + _LONGEST_SLEEP)
        return lengths

    def _best_count(
        self, offers: list[tuple[float, int, Sequence]], num_rows: int, base_s: float
    ) -> int:
        """Return how many of the sorted offers give the most tokens per second."""
        speedup = _MIN_SPEEDUP_OF_MANY - (_MIN_SPEEDUP_OF_MANY - _MIN_SPEEDUP) / num_rows
        best, best_rate, tokens, draft_s = 0, speedup * num_rows / base_s, float(num_rows), 0.0
        num_drafts = [0] * MAX_ADAPTIVE  # with a token at each position
        for count, (chance, place, _) in enumerate(offers, start=1):
            step_s = self._step_s.expected(num_rows + count)
            extra_s = self._extra_s(num_drafts[place])
            if step_s is None or extra_s is None or count > best + 2 * num_rows + MAX_ADAPTIVE:
                break
            tokens += chance
            draft_s += extra_s
            num_drafts[place] += 1
            rate = tokens / (step_s + draft_s)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def _extra_s(self, num_drafts: int) -> float | None:
        """Return the cost of a draft token beside `num_drafts` at its position; None if unknown."""
        if not self._draft_s.known:
            return 0.0  # assumed free until measured
        with_it = self._draft_s.expected(num_drafts + 1)
        without = self._draft_s.expected(num_drafts) if num_drafts else 0.0
        return None if with_it is None or without is None else with_it - without

    def _may_try(self, num_trials: int, saved_s: float) -> bool:
        """Return whether the credit covers one more trial draft, and charge its expected loss.

        Args:
            num_trials: trials in this step already.
            saved_s: expected time saved by the token.
        """
        lost_s = max(0.0, (self._extra_s(num_trials) or 0.0) - saved_s)
        if lost_s > self._credit_s:
            return False
        self._credit_s -= lost_s
        return True

    def note_proposal(self, chunks: list[Chunk], spent_s: float) -> None:
        """Record the duration of a proposal."""
        longest = max(chunk.max_draft for chunk in chunks)
        num_drafts = -(-sum(chunk.max_draft for chunk in chunks) // longest)
        self._draft_s.note(num_drafts, spent_s / longest, self._step)

    def note_step(self, chunks: list[Chunk], spent_s: float) -> None:
        """Record the duration of a step, without the proposal."""
        limit_s = 2 * max(spent_s, self._draft_s.expected(1) or 0.0)
        self._credit_s = min(self._credit_s + _TRIAL_SHARE * spent_s, limit_s)
        num_drafted = sum(len(chunk.draft.ids) for chunk in chunks)
        if not num_drafted:  # also a step with prefill: under load there may be no other
            self._last_plain = self._step
        if all(chunk.draws and chunk.num_rows == 1 for chunk in chunks):
            self._step_s.note(len(chunks) + num_drafted, spent_s, self._step)
            self._num_plain += not num_drafted

    def note_draft(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Record that the first `accepted` of `drafted` tokens were accepted."""
        record = self._record(sequence)
        record.empty += 0.1 * ((not drafted) - record.empty)
        record.note(drafted, accepted)
        self._all.note(drafted, accepted)
        if accepted:
            record.next_pause = _FIRST_PAUSE

    def _record(self, sequence: Sequence) -> Record:
        record = self._records.get(sequence)
        if record is None:
            record = self._records[sequence] = Record()
        return record

    def _chance(self, record: Record, place: int, before: float | None) -> float:
        """Return the probability that the token at a position is accepted if those before it are.

        Args:
            before: the same of the position before, a prior where there are few measurements.
        """
        prior = (self._all.hits[place] + _INITIAL_ACCEPTANCE) / (self._all.tries[place] + 1)
        if before is not None:
            prior = (prior + before) / 2
        hits = record.hits[place] + _PRIOR_TRIES * prior
        return hits / (record.tries[place] + _PRIOR_TRIES)
