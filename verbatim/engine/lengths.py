"""Draft lengths: fixed, or adapted to moving averages of acceptance and cost."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

from verbatim.core import Sequence
from verbatim.engine.work import Chunk

MAX_ADAPTIVE = 8  # maximum adaptive draft length

_INITIAL_ACCEPTANCE = 0.7
_PRIOR_DRAFTS = 3  # that count like the acceptance of all sequences, in that of a new one
_LEAST_WEIGHT = 0.035  # of the latest draft in the acceptance of its sequence
_DECAY = 0.97  # of the weight of a measured duration per measurement
# Minimum expected speedup of drafts, for one sequence and for many. Measurements are noisy, and among many
# sequences some run ahead, which leaves a half-empty batch to the last ones.
_MIN_SPEEDUP, _MIN_SPEEDUP_OF_MANY = 1.05, 1.25
_FIRST_PAUSE, _LONGEST_PAUSE = 8, 128  # steps without a draft before the next trial
_TRIAL_SHARE = 0.005  # share of time for trials that are not expected to pay
_PLAIN_EVERY = 64  # steps at most until one without drafts is measured again


class FixedLengths:
    """A constant draft length."""

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


class Line:
    """The duration of an operation as a line over its size: a moving least-squares fit."""

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # of the weights, and weighted of x, y, x * x, x * y
        self._slope = 0.0

    @property
    def known(self) -> bool:
        """Return whether there are measurements."""
        return self._sums[0] > 0

    def note(self, x: float, y: float) -> None:
        """Add a measurement. Other load on the machine only ever lengthens one."""
        if self._sums[0] > 3:
            y = min(y, 2 * self.at(x))
        if self.known and y < self.at(x) / 2:
            self._sums = [0.0] * 5
        new = (1.0, x, y, x * x, x * y)
        self._sums = [_DECAY * a + b for a, b in zip(self._sums, new, strict=True)]
        n, sx, sy, sxx, sxy = self._sums
        spread = sxx - sx * sx / n
        if spread > 0.01 * n:
            self._slope = max(0.0, (sxy - sx * sy / n) / spread)

    def at(self, x: float) -> float:
        """Return the expected duration."""
        n, sx, sy, _, _ = self._sums
        mean_x, mean_y = sx / n, sy / n
        return max(mean_y + self._slope * (x - mean_x), 0.1 * mean_y)


class DraftHistory:
    """Statistics of a sequence's drafts: moving averages, and when the next trial is due.

    Attributes:
        acceptance: entry `j`: of the `j + 1`-th token of drafts, if the tokens before it were accepted.
        proposed: share of proposals that were not empty.
    """

    def __init__(self, acceptance: list[float], proposed: float) -> None:
        self.acceptance, self.proposed = acceptance, proposed
        self._num_drafts = _PRIOR_DRAFTS
        self.paused_until = 0
        self.next_pause = _FIRST_PAUSE

    def note(self, drafted: int, accepted: int) -> None:
        """Count a draft."""
        self._num_drafts += 1
        weight = max(1 / self._num_drafts, _LEAST_WEIGHT)
        self.proposed += weight * ((drafted > 0) - self.proposed)
        for j in range(MAX_ADAPTIVE if drafted else 0):
            seen = j < drafted and j <= accepted
            # Positions that were not reached follow the one before.
            latest = float(j < accepted) if seen else self.acceptance[j - 1]
            self.acceptance[j] += weight * (latest - self.acceptance[j])

    def pause(self, step: int) -> None:
        """Pause drafting, and double the length of the next pause."""
        self.paused_until = step + self.next_pause
        self.next_pause = min(2 * self.next_pause, _LONGEST_PAUSE)


class AdaptiveLengths:
    """Draft lengths that maximize the expected tokens per second.

    The probability that a draft token is accepted falls along its draft; the cost of a step grows with its
    rows, and that of drafting with the drafts and the longest of them. A sequence whose drafts do not pay
    drafts single tokens as trials, ever more seldom. Outputs do not depend on the lengths.
    """

    fixed = None

    def __init__(self) -> None:
        self._all = DraftHistory([_INITIAL_ACCEPTANCE] * MAX_ADAPTIVE, 1.0)
        self._records: weakref.WeakKeyDictionary[Sequence, DraftHistory] = (
            weakref.WeakKeyDictionary()
        )
        self._step_s = Line()  # by rows
        self._draft_s = Line()  # of one more token of the longest draft, by number of sequences
        self._step = self._last_plain = self._sleeps_until = 0
        self._credit_s = 0.0  # time available for trials

    def begin_step(self) -> bool:
        """Begin a step; return whether `choose` is to be called in it."""
        self._step += 1
        is_plain_due = self._step - self._last_plain > _PLAIN_EVERY
        return self._step_s.known and self._step >= self._sleeps_until and not is_plain_due

    def choose(self, limits: Mapping[Sequence, int]) -> dict[Sequence, int]:
        """Return the draft lengths above 0, given the maximum length of each sequence."""
        lengths: dict[Sequence, int] = {}
        offers: list[tuple[float, int, Sequence]] = []  # acceptance probability, position, sequence
        for sequence, limit in limits.items():
            record = self._record(sequence)
            if record.paused_until > self._step:
                continue
            if record.paused_until and limit > 0:
                if self._may_try(record, len(lengths), len(limits)):
                    lengths[sequence], record.paused_until = 1, 0
                else:
                    record.paused_until = self._step + _FIRST_PAUSE
                continue
            chance = record.proposed
            for j in range(min(limit, MAX_ADAPTIVE)):
                chance *= record.acceptance[j]
                offers.append((chance, j, sequence))
        # With about equal chances, drafts grow evenly: a batch ends with its slowest sequence.
        offers.sort(key=lambda offer: (-int(5 * offer[0]), offer[1]))
        for _, _, sequence in offers[: self._best_count(offers, len(limits))]:
            lengths[sequence] = lengths.get(sequence, 0) + 1
        for sequence in limits:
            record = self._record(sequence)
            if sequence not in lengths and record.paused_until <= self._step:
                record.pause(self._step)
        if not lengths:
            self._sleeps_until = min(self._record(s).paused_until for s in limits)
        return lengths

    def _may_try(self, record: DraftHistory, num_trials: int, num_rows: int) -> bool:
        """Return whether there is time for one more trial, and charge its expected loss."""
        draft_s = 0.0
        if self._draft_s.known:
            draft_s = self._draft_s.at(num_trials + 1)
            draft_s -= self._draft_s.at(num_trials) if num_trials else 0.0
        saved_s = record.proposed * record.acceptance[0] * self._step_s.at(num_rows) / num_rows
        lost_s = max(0.0, draft_s - saved_s)
        if lost_s > self._credit_s:
            return False
        self._credit_s -= lost_s
        return True

    def _best_count(self, offers: list[tuple[float, int, Sequence]], num_rows: int) -> int:
        """Return how many of the sorted offers give the most tokens per second."""
        speedup = _MIN_SPEEDUP_OF_MANY - (_MIN_SPEEDUP_OF_MANY - _MIN_SPEEDUP) / num_rows
        best, best_rate = 0, speedup * num_rows / self._step_s.at(num_rows)
        tokens, num_drafts = float(num_rows), [0] * MAX_ADAPTIVE  # with a token at each position
        for count, (chance, place, _) in enumerate(offers, start=1):
            tokens += chance
            num_drafts[place] += 1
            seconds = self._step_s.at(num_rows + count)
            if self._draft_s.known:  # assumed free until measured
                seconds += sum(self._draft_s.at(n) for n in num_drafts if n)
            if tokens / seconds > best_rate:
                best, best_rate = count, tokens / seconds
        return best

    def note_proposal(self, chunks: list[Chunk], spent_s: float) -> None:
        """Record the duration of a proposal."""
        longest = max(chunk.max_draft for chunk in chunks)
        self._draft_s.note(sum(chunk.max_draft for chunk in chunks) / longest, spent_s / longest)

    def note_step(self, chunks: list[Chunk], spent_s: float) -> None:
        """Record the duration of a step, without the proposal."""
        limit_s = 2 * max(spent_s, self._draft_s.at(1) if self._draft_s.known else 0.0)
        self._credit_s = min(self._credit_s + _TRIAL_SHARE * spent_s, limit_s)
        num_drafted = sum(len(chunk.draft.ids) for chunk in chunks)
        if not num_drafted:  # also a step with prefill: under load there may be no other
            self._last_plain = self._step
        if all(chunk.draws and chunk.num_rows == 1 for chunk in chunks):
            self._step_s.note(len(chunks) + num_drafted, spent_s)

    def note_draft(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Record that the first `accepted` of `drafted` tokens were accepted."""
        record = self._record(sequence)
        record.note(drafted, accepted)
        self._all.note(drafted, accepted)
        if accepted:
            record.next_pause = _FIRST_PAUSE

    def _record(self, sequence: Sequence) -> DraftHistory:
        record = self._records.get(sequence)
        if record is None:
            record = DraftHistory([*self._all.acceptance], self._all.proposed)
            self._records[sequence] = record
        return record
