"""Draft lengths: fixed, or adapted to moving averages of acceptance and cost."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

from verbatim.core import Sequence
from verbatim.engine.work import Chunk

MAX_ADAPTIVE = 8  # maximum adaptive draft length

_INITIAL_ACCEPTANCE = 0.7
_PRIOR_DRAFTS = 3  # weight of the average over all sequences for a new one, in drafts
_MIN_WEIGHT = 0.035  # of the latest draft in the moving average of its sequence
_DECAY = 0.97  # of the weight of a measured duration per measurement
# Minimum expected speedup of drafts, for one sequence and for many. Measurements are noisy, and among many
# sequences some run ahead, which leaves a half-empty batch to the last ones.
_MIN_SPEEDUP, _MIN_SPEEDUP_OF_MANY = 1.05, 1.25
_TRIAL_SHARE = 0.005  # share of the time for trials: steps in which all sequences get a draft
# Minimum steps between two trials, and after a trial with an accepted token.
_TRIAL_PAUSE, _TRIAL_AGAIN = 64, 8
_LONGEST_PAUSE = 256  # maximum steps between two trials, as the costs change with the load
_PLAIN_EVERY = 64  # maximum steps between two steps without drafts, which are measured
_SAMPLED = 4  # while drafts do not pay, one step in this many is measured


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
    """Moving averages of a sequence's drafts.

    Attributes:
        acceptance: entry `j`: how often the `j + 1`-th token of a draft is proposed and accepted, if those
            before it were.
    """

    def __init__(self, acceptance: list[float]) -> None:
        self.acceptance = acceptance
        self._num_drafts = _PRIOR_DRAFTS

    def note(self, length: int, accepted: int) -> None:
        """Count a draft of at most `length` tokens, of which `accepted` were proposed and accepted."""
        self._num_drafts += 1
        weight = max(1 / self._num_drafts, _MIN_WEIGHT)
        for j in range(MAX_ADAPTIVE):
            seen = j < length and j <= accepted
            # Positions that were not reached follow the one before.
            latest = float(j < accepted) if seen else self.acceptance[j - 1]
            self.acceptance[j] += weight * (latest - self.acceptance[j])


class DraftLengths:
    """Draft lengths: fixed, or those that maximize the expected tokens per second.

    The probability that a draft token is accepted falls along its draft; the cost of a step grows with its
    rows, and that of drafting with the drafts and the longest of them. Where drafts do not pay, single tokens
    are drafted as trials; the more a trial costs, the fewer there are. Outputs do not depend on the lengths.

    Args:
        fixed: the length of all drafts; None: it adapts.
    """

    def __init__(self, fixed: int | None = None) -> None:
        self.fixed = fixed
        self._all = DraftHistory([_INITIAL_ACCEPTANCE] * MAX_ADAPTIVE)
        self._histories: weakref.WeakKeyDictionary[Sequence, DraftHistory] = (
            weakref.WeakKeyDictionary()
        )
        self._step_s = Line()  # by rows
        self._draft_s = Line()  # of one more token of the longest draft, by number of sequences
        self._step = self._last_plain = self._next_trial = self._trial_again = 0
        self._pays = True  # the latest lengths were not all 0

    def begin_step(self) -> bool:
        """Begin a step; return whether `choose` is to be called in it."""
        if self.fixed is not None:
            return True
        self._step += 1
        is_plain_due = self._step - self._last_plain > _PLAIN_EVERY
        is_of_use = self._pays or self._step >= self._next_trial
        return self._step_s.known and is_of_use and not is_plain_due

    def choose(self, limits: Mapping[Sequence, int]) -> dict[Sequence, int]:
        """Return the draft lengths above 0, given the maximum length of each sequence."""
        if self.fixed is not None:
            return {s: min(self.fixed, n) for s, n in limits.items() if min(self.fixed, n) > 0}
        offers: list[tuple[float, int, Sequence]] = []  # acceptance probability, position, sequence
        for sequence, limit in limits.items():
            chance = 1.0
            for j, acceptance in enumerate(self._history(sequence).acceptance[: max(0, limit)]):
                chance *= acceptance
                offers.append((chance, j, sequence))
        # With about equal chances, drafts grow evenly: a batch ends with its slowest sequence.
        offers.sort(key=lambda offer: (-int(5 * offer[0]), offer[1]))
        lengths: dict[Sequence, int] = {}
        for _, _, sequence in offers[: self._best_count(offers, len(limits))]:
            lengths[sequence] = lengths.get(sequence, 0) + 1
        self._pays = bool(lengths)
        if self._step >= self._next_trial:
            tried = [s for s, limit in limits.items() if limit > 0 and s not in lengths]
            lengths.update(dict.fromkeys(tried, 1))
            pause = self._trial_pause(len(tried), len(limits))
            self._next_trial = self._step + max(_TRIAL_PAUSE, pause)
            self._trial_again = self._step + max(_TRIAL_AGAIN, pause)
        return lengths

    def _trial_pause(self, num_trials: int, num_rows: int) -> int:
        """Return the number of steps until the next trial, so that trials take `_TRIAL_SHARE` of the time."""
        step_s = self._step_s.at(num_rows)
        cost_s = self._step_s.at(num_rows + num_trials) - step_s
        cost_s += self._draft_s.at(num_trials) if self._draft_s.known else 0.0
        return min(int(cost_s / (_TRIAL_SHARE * step_s)), _LONGEST_PAUSE)

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
        num_drafted = sum(len(chunk.draft_ids) for chunk in chunks)
        if not num_drafted:  # also a step with prefill: under load there may be no other
            self._last_plain = self._step
        if not self._pays and self._step % _SAMPLED:
            return
        if all(chunk.draws and chunk.num_rows == 1 for chunk in chunks):
            self._step_s.note(len(chunks) + num_drafted, spent_s)

    def note_draft(self, sequence: Sequence, length: int, accepted: int) -> None:
        """Record that `accepted` tokens of a draft of at most `length` were accepted."""
        self._history(sequence).note(length, accepted)
        self._all.note(length, accepted)
        if accepted:
            self._next_trial = min(self._next_trial, self._trial_again)

    def _history(self, sequence: Sequence) -> DraftHistory:
        history = self._histories.get(sequence)
        if history is None:
            history = DraftHistory([*self._all.acceptance])
            self._histories[sequence] = history
        return history
