"""How long a draft should be: a number that is given, or as long as it pays."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field

from verbatim.core import Sequence
from verbatim.engine.costs import Costs
from verbatim.engine.work import Chunk

MAX_ADAPTIVE = 8  # tokens of a draft whose length is left to us

_MEMORY = 0.95  # what a forward leaves of a sequence's record: some twenty forwards count
_PRIOR_TRIES = 4.0  # what the record of all sequences counts in that of each
_FIRST_GUESS = 0.7  # of acceptance, before anything is known
_FIRST_PAUSE, _LONGEST_PAUSE = 8, 128  # steps without a draft before another one is tried
# What drafts must promise to gain: what is measured is noisy, and of many that run side by side some run
# ahead, so that the last ones are left with a batch that is half empty.
_WORTH, _WORTH_OF_MANY = 1.05, 1.25
_TRYING = 0.005  # share of the time for drafts that are not expected to pay
_GRADES = 5  # of the chance that a drafted token stands
_LONGEST_SLEEP = 8  # steps in which nobody is asked, where drafts pay for nobody
_FIRST_PLAIN = 3  # steps that are measured before anybody is drafted for
_PLAIN_EVERY = 64  # at least, a step without drafts tells anew what one costs
_FORGOTTEN_AFTER = 512  # steps


class FixedLengths:
    """The same length for everybody, at every step."""

    def __init__(self, length: int) -> None:
        self.fixed = length

    def begin_step(self) -> bool:
        """Another step begins; is there anything to choose in it?"""
        return True

    def choose(self, room: Mapping[Sequence, int]) -> dict[Sequence, int]:
        """Tokens to ask for, for sequences with `room` for some; those without are left out."""
        return {s: min(self.fixed, n) for s, n in room.items() if min(self.fixed, n) > 0}

    def note_proposal(self, chunks: list[Chunk], spent_s: float) -> None:
        """Proposing for these has taken this long."""

    def note_step(self, chunks: list[Chunk], spent_s: float) -> None:
        """A step has taken this long, without proposing."""

    def note_draft(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Of the `drafted` tokens of one that was asked for, the first `accepted` stand."""


@dataclass(slots=True)
class Record:
    """What became of drafts, by place: entry `j` is about their `j + 1`-th tokens."""

    tries: list[float] = field(default_factory=lambda: [0.0] * MAX_ADAPTIVE)
    hits: list[float] = field(default_factory=lambda: [0.0] * MAX_ADAPTIVE)
    empty: float = 0.0  # share of the proposals that came back with nothing
    paused_until: int = 0  # the step in which a draft is tried again
    next_pause: int = _FIRST_PAUSE

    def pause(self, step: int) -> None:
        """No drafts for a while, and next time for twice as long."""
        self.paused_until = step + self.next_pause
        self.next_pause = min(2 * self.next_pause, _LONGEST_PAUSE)

    def note(self, drafted: int, accepted: int) -> None:
        """A token counts as tried if those before it stood."""
        for j in range(MAX_ADAPTIVE):
            self.tries[j] *= _MEMORY
            self.hits[j] *= _MEMORY
            if j < drafted and j <= accepted:
                self.tries[j] += 1
                self.hits[j] += j < accepted


class AdaptiveLengths:
    """As many tokens as pay, from what was accepted and from what steps and drafts have cost so far.

    For each step it picks the drafts with which the most tokens come out of a second: the probability
    that a drafted token stands falls along the draft, the cost of a step grows with its rows, and that of
    drafting with the longest draft. Where none pays, a token is drafted now and then, in case things
    have changed, for a two-hundredth of the time. Only speed depends on any of it.
    """

    fixed = None

    def __init__(self) -> None:
        self._all = Record()
        self._records: weakref.WeakKeyDictionary[Sequence, Record] = weakref.WeakKeyDictionary()
        self._step_s = Costs()  # by rows
        self._draft_s = Costs()  # of one more token for so many sequences
        self._credit_s = 0.0  # what may be spent on trying
        self._step = 0
        self._sleeps_until = 0
        self._num_plain = 0  # steps without drafts that were measured
        self._last_plain = 0

    def begin_step(self) -> bool:
        """Another step begins; is there anything to choose in it?"""
        self._step += 1
        if self._step % _PLAIN_EVERY == 0:
            for costs in (self._step_s, self._draft_s):
                costs.forget(self._step - _FORGOTTEN_AFTER)
        return self._step >= self._sleeps_until and not self._wants_plain_step

    @property
    def _wants_plain_step(self) -> bool:
        long_ago = self._step - self._last_plain > _PLAIN_EVERY
        return self._num_plain < _FIRST_PLAIN or long_ago

    def choose(self, room: Mapping[Sequence, int]) -> dict[Sequence, int]:
        """Tokens to ask for, for sequences with `room` for some; those without are left out."""
        base_s = self._step_s.expected(len(room))
        if base_s is None:
            return {}
        lengths: dict[Sequence, int] = {}
        offers: list[tuple[float, int, Sequence]] = []  # chance that it stands, place, whose
        for sequence, most in room.items():
            record = self._record(sequence)
            if record.paused_until > self._step:
                continue
            if record.paused_until and most > 0:  # whatever is expected: things may have changed
                chance = (1.0 - record.empty) * self._chance(record, 0, None)
                if self._may_try(len(lengths), chance * base_s / len(room)):
                    lengths[sequence] = 1
                    record.paused_until = 0
                else:
                    record.paused_until = self._step + _LONGEST_SLEEP
                continue
            chance, each = 1.0 - record.empty, None
            for j in range(min(most, MAX_ADAPTIVE)):
                each = self._chance(record, j, each)
                chance *= each
                if chance < 0.02:
                    break
                offers.append((chance, j, sequence))
        # Among about equal chances nobody runs ahead of the others: a batch ends with its last sequence.
        offers.sort(key=lambda offer: (-int(offer[0] * _GRADES), offer[1]))
        for _, _, sequence in offers[: self._how_many(offers, len(room), base_s)]:
            lengths[sequence] = lengths.get(sequence, 0) + 1
        if not lengths:
            for sequence in room:
                record = self._record(sequence)
                if not record.paused_until:
                    record.pause(self._step)
            first = min(self._record(sequence).paused_until for sequence in room)
            self._sleeps_until = min(first, self._step + _LONGEST_SLEEP)
        return lengths

    def _how_many(
        self, offers: list[tuple[float, int, Sequence]], num_rows: int, base_s: float
    ) -> int:
        """How many of the offers, the best first, give the most tokens a second."""
        worth = _WORTH_OF_MANY - (_WORTH_OF_MANY - _WORTH) / num_rows
        best, best_rate, tokens, draft_s = 0, worth * num_rows / base_s, float(num_rows), 0.0
        lines = [0] * MAX_ADAPTIVE  # how many drafts have a token at each place
        for count, (chance, place, _) in enumerate(offers, start=1):
            step_s, one_more_s = self._step_s.expected(num_rows + count), self._more_s(lines[place])
            if step_s is None or one_more_s is None or count > best + 2 * num_rows + MAX_ADAPTIVE:
                break
            tokens += chance
            draft_s += one_more_s
            lines[place] += 1
            rate = tokens / (step_s + draft_s)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def _more_s(self, lines: int) -> float | None:
        """What it costs to draft a token for one more sequence than `lines`; None if that is unknown."""
        if not self._draft_s.known:
            return 0.0  # hoped to be free, so that it is tried
        with_it = self._draft_s.expected(lines + 1)
        without = self._draft_s.expected(lines) if lines else 0.0
        return None if with_it is None or without is None else with_it - without

    def _may_try(self, lines: int, saved_s: float) -> bool:
        """Is there time for one more draft of a token that will hardly pay? Then what it loses is taken.

        Args:
            lines: how many are tried in this step already.
            saved_s: what the token is worth, with the chance that it stands.
        """
        lost_s = max(0.0, (self._more_s(lines) or 0.0) - saved_s)
        if lost_s > self._credit_s:
            return False
        self._credit_s -= lost_s
        return True

    def note_proposal(self, chunks: list[Chunk], spent_s: float) -> None:
        """Proposing for these has taken this long."""
        longest = max(chunk.max_draft for chunk in chunks)
        lines = -(-sum(chunk.max_draft for chunk in chunks) // longest)
        self._draft_s.note(lines, spent_s / longest, self._step)

    def note_step(self, chunks: list[Chunk], spent_s: float) -> None:
        """A step has taken this long, without proposing."""
        most_s = 2 * max(spent_s, self._draft_s.expected(1) or 0.0)
        self._credit_s = min(self._credit_s + _TRYING * spent_s, most_s)
        num_drafted = sum(len(chunk.draft.ids) for chunk in chunks)
        if not num_drafted:  # also with prefill in it: what never comes alone can't be waited for
            self._last_plain = self._step
        if all(chunk.draws and chunk.num_rows == 1 for chunk in chunks):
            self._step_s.note(len(chunks) + num_drafted, spent_s, self._step)
            self._num_plain += not num_drafted

    def note_draft(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Of the `drafted` tokens of one that was asked for, the first `accepted` stand."""
        record = self._record(sequence)
        record.empty += 0.1 * ((not drafted) - record.empty)
        for each in (record, self._all):
            each.note(drafted, accepted)
        if accepted:
            record.next_pause = _FIRST_PAUSE

    def _record(self, sequence: Sequence) -> Record:
        record = self._records.get(sequence)
        if record is None:
            record = self._records[sequence] = Record()
        return record

    def _chance(self, record: Record, place: int, before: float | None) -> float:
        """That the token at a place of a draft stands if those before it do.

        Args:
            before: the same of the place before, which tells of this one where little else is known.
        """
        prior = (self._all.hits[place] + _FIRST_GUESS) / (self._all.tries[place] + 1)
        if before is not None:
            prior = (prior + before) / 2
        hits = record.hits[place] + _PRIOR_TRIES * prior
        return hits / (record.tries[place] + _PRIOR_TRIES)
