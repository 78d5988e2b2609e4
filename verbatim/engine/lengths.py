"""Choice of draft lengths: fixed, or adapted to moving averages of acceptance and cost."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

from verbatim.core import Sequence
from verbatim.engine.work import Chunk

MAX_ADAPTIVE = 8  # maximum adaptive draft length

_INITIAL_ACCEPTANCE = 0.7
_PRIOR_DRAFTS = 3  # weight, in drafts, of the average over all sequences for a new one
_MIN_WEIGHT = 0.035  # minimum weight of the latest draft in the moving average of its sequence
_DECAY = 0.97  # factor on the weights of earlier measurements, per measurement
# Minimum expected speedup of drafts, for one sequence and for many. Measurements are noisy. Among many
# sequences some finish earlier, and the last ones run in a half-empty batch.
_MIN_SPEEDUP, _MIN_SPEEDUP_OF_MANY = 1.05, 1.25
_TRIAL_SHARE = 0.005  # fraction of the time for trials, steps in which all sequences get a draft
# Minimum number of steps between two trials, and after a trial with an accepted token.
_MIN_TRIAL_PAUSE, _MIN_RETRIAL_PAUSE = 64, 8
_MAX_TRIAL_PAUSE = 256  # maximum steps between two trials, as the costs change with the load
_PLAIN_INTERVAL = 64  # maximum steps between two steps without drafts, which are run to be measured
_MEASURE_INTERVAL = 4  # while drafts do not pay off, one step in this many is measured


class LinearFit:
    """A moving least-squares fit of an operation's duration as a linear function of its size."""

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # of the weights, and weighted sums of x, y, x * x, x * y
        self._slope = 0.0

    @property
    def known(self) -> bool:
        """True if there are measurements."""
        return self._sums[0] > 0

    def note(self, x: float, y: float) -> None:
        """Add a measurement. Long outliers are capped: other load on the machine can only lengthen it."""
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
        acceptance: entry `j`: how often the `j + 1`-th token of a draft is proposed and accepted, given that
            all tokens before it were.
    """

    def __init__(self, acceptance: list[float]) -> None:
        self.acceptance = acceptance
        self._num_drafts = _PRIOR_DRAFTS

    def note(self, length: int, accepted: int) -> None:
        """Count a draft of at most `length` tokens, of which `accepted` were proposed and accepted."""
        self._num_drafts += 1
        weight = max(1 / self._num_drafts, _MIN_WEIGHT)
        for j in range(MAX_ADAPTIVE):
            is_reached = j < length and j <= accepted
            # A position that was not reached takes the value of the previous one.
            latest = float(j < accepted) if is_reached else self.acceptance[j - 1]
            self.acceptance[j] += weight * (latest - self.acceptance[j])


class DraftLengths:
    """Chooses draft lengths: `fixed` or, if that is None, those that maximize the expected tokens per second.

    The acceptance probability of a draft token falls along its draft. The cost of a step grows with its rows;
    the cost of drafting grows with the number of drafts and the longest draft. If drafts do not pay off,
    single tokens are drafted as trials, less often if they cost more. Outputs do not depend on the lengths.
    """

    def __init__(self, fixed: int | None = None) -> None:
        self.fixed = fixed
        self._all = DraftHistory([_INITIAL_ACCEPTANCE] * MAX_ADAPTIVE)
        self._histories: weakref.WeakKeyDictionary[Sequence, DraftHistory] = (
            weakref.WeakKeyDictionary()
        )
        self._step_s = LinearFit()  # by rows
        self._draft_s = LinearFit()  # per token of the longest draft, by number of sequences
        self._step = self._last_plain = self._next_trial = self._trial_again = 0
        self._pays = True  # whether the latest lengths were not all 0

    def begin_step(self) -> bool:
        """Begin a step; return whether drafts are allowed in it, so that `choose` must be called."""
        if self.fixed is not None:
            return True
        self._step += 1
        is_plain_due = self._step - self._last_plain > _PLAIN_INTERVAL
        may_pay = self._pays or self._step >= self._next_trial
        return self._step_s.known and may_pay and not is_plain_due

    def choose(self, limits: Mapping[Sequence, int]) -> dict[Sequence, int]:
        """Return the draft lengths above 0, given the maximum length of each sequence."""
        if self.fixed is not None:
            return {s: min(self.fixed, n) for s, n in limits.items() if min(self.fixed, n) > 0}
        offers: list[tuple[float, int, Sequence]] = []  # acceptance probability, position, sequence
        for sequence, limit in limits.items():
            probability = 1.0
            for j, acceptance in enumerate(self._history(sequence).acceptance[: max(0, limit)]):
                probability *= acceptance
                offers.append((probability, j, sequence))
        # At similar probabilities, drafts grow evenly, because a batch ends with its slowest sequence.
        offers.sort(key=lambda offer: (-int(5 * offer[0]), offer[1]))
        lengths: dict[Sequence, int] = {}
        for _, _, sequence in offers[: self._best_count(offers, len(limits))]:
            lengths[sequence] = lengths.get(sequence, 0) + 1
        self._pays = bool(lengths)
        if self._step >= self._next_trial:
            trials = [s for s, limit in limits.items() if limit > 0 and s not in lengths]
            lengths.update(dict.fromkeys(trials, 1))
            pause = self._trial_pause(len(trials), len(limits))
            self._next_trial = self._step + max(_MIN_TRIAL_PAUSE, pause)
            self._trial_again = self._step + max(_MIN_RETRIAL_PAUSE, pause)
        return lengths

    def _trial_pause(self, num_trials: int, num_rows: int) -> int:
        """Return the number of steps until the next trial, so that trials take `_TRIAL_SHARE` of the time."""
        step_s = self._step_s.at(num_rows)
        cost_s = self._step_s.at(num_rows + num_trials) - step_s
        cost_s += self._draft_s.at(num_trials) if self._draft_s.known else 0.0
        return min(int(cost_s / (_TRIAL_SHARE * step_s)), _MAX_TRIAL_PAUSE)

    def _best_count(self, offers: list[tuple[float, int, Sequence]], num_rows: int) -> int:
        """Return the number of leading offers that maximizes the expected tokens per second."""
        speedup = _MIN_SPEEDUP_OF_MANY - (_MIN_SPEEDUP_OF_MANY - _MIN_SPEEDUP) / num_rows
        best, best_rate = 0, speedup * num_rows / self._step_s.at(num_rows)
        tokens, num_drafts = float(num_rows), [0] * MAX_ADAPTIVE  # drafts by position
        for count, (probability, position, _) in enumerate(offers, start=1):
            tokens += probability
            num_drafts[position] += 1
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
        if not num_drafted:  # a step with prefill counts too: under load there may be no others
            self._last_plain = self._step
        if not self._pays and self._step % _MEASURE_INTERVAL:
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
