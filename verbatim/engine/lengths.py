"""How long a draft should be: a number that is given, or as long as it pays."""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

from verbatim.core import Sequence
from verbatim.engine.scheduler import Chunk

MAX_ADAPTIVE = 8  # tokens of a draft whose length is left to us

_MEMORY = 0.95  # what a forward leaves of a sequence's record: some twenty forwards count
_PRIOR_TRIES = 4.0  # what the record of all sequences counts in that of each
_FIRST_GUESS = 0.7  # of acceptance, before anything is known
_FIRST_PAUSE, _LONGEST_PAUSE = 8, 128  # forwards without a draft before another one is tried
_WORTH = 1.03  # a draft must promise to be so much faster than none: what is measured is noisy
_NEW = 0.2  # share of a new measurement in what is expected


class FixedLengths:
    """The same length for everybody, at every step."""

    def __init__(self, length: int) -> None:
        self._length = length

    def choose(self, room: Mapping[Sequence, int]) -> dict[Sequence, int]:
        """Tokens to ask for, for sequences with `room` for some; those without are left out."""
        return {s: min(self._length, n) for s, n in room.items() if min(self._length, n) > 0}

    def note_proposal(self, chunks: list[Chunk], spent_s: float) -> None:
        """Proposing for these has taken this long."""

    def note_step(self, chunks: list[Chunk], spent_s: float) -> None:
        """A step's forward and draws have taken this long."""

    def note_draft(self, sequence: Sequence, asked: int, drafted: int, accepted: int) -> None:
        """Of `drafted` tokens, where `asked` were wanted, the first `accepted` stand."""


@dataclass(slots=True)
class Record:
    """What became of drafts, by place: entry `j` is about their `j + 1`-th tokens."""

    tries: list[float] = field(default_factory=lambda: [0.0] * MAX_ADAPTIVE)
    hits: list[float] = field(default_factory=lambda: [0.0] * MAX_ADAPTIVE)
    empty: float = 0.0  # share of the proposals that came back with nothing
    pause: int = 0  # forwards to go without a draft
    next_pause: int = _FIRST_PAUSE

    def note(self, drafted: int, accepted: int) -> None:
        """A token counts as tried if those before it stood."""
        for j in range(MAX_ADAPTIVE):
            self.tries[j] *= _MEMORY
            self.hits[j] *= _MEMORY
            if j < drafted and j <= accepted:
                self.tries[j] += 1
                self.hits[j] += j < accepted


class AdaptiveLengths:
    """As many tokens as pay, from what was accepted and from what forwards and drafts have cost so far.

    For each step it picks the drafts with which the most tokens come out of a second: the probability
    that a drafted token stands falls along the draft, the cost of a forward grows with its rows, and that
    of drafting with the longest draft. Only speed depends on any of it.
    """

    def __init__(self) -> None:
        self._all = Record()
        self._records: weakref.WeakKeyDictionary[Sequence, Record] = weakref.WeakKeyDictionary()
        self._forward_s = Costs()
        self._per_token_s: float | None = None  # of drafting one more token for everybody

    def choose(self, room: Mapping[Sequence, int]) -> dict[Sequence, int]:
        """Tokens to ask for, for sequences with `room` for some; those without are left out."""
        base_s = self._forward_s.expected(len(room))
        if base_s is None:
            return {}  # the first forward tells what one without drafts costs
        lengths: dict[Sequence, int] = {}
        offers: list[tuple[float, int, Sequence]] = []  # chance that it stands, place, whose
        for sequence, most in room.items():
            record = self._record(sequence)
            if record.pause:
                record.pause -= 1
                if not record.pause and most > 0:
                    lengths[sequence] = 1  # whatever is expected: things may have changed
                continue
            chance, each = 1.0 - record.empty, None
            for j in range(min(most, MAX_ADAPTIVE)):
                each = self._chance(record, j, each)
                chance *= each
                if chance < 0.02:
                    break
                offers.append((chance, j, sequence))
        offers.sort(key=lambda offer: -offer[0])
        for _, _, sequence in offers[: self._how_many([o[:2] for o in offers], len(room), base_s)]:
            lengths[sequence] = lengths.get(sequence, 0) + 1
        for sequence in room.keys() - lengths.keys():
            record = self._record(sequence)
            if not record.pause:
                record.pause = record.next_pause
                record.next_pause = min(2 * record.next_pause, _LONGEST_PAUSE)
        return lengths

    def _how_many(self, offers: list[tuple[float, int]], num_rows: int, base_s: float) -> int:
        """How many of the offers, the best first, give the most tokens a second."""
        best, best_rate, tokens, longest = 0, _WORTH * num_rows / base_s, float(num_rows), 0
        for count, (chance, place) in enumerate(offers, start=1):
            tokens += chance
            longest = max(longest, place + 1)
            forward_s = self._forward_s.expected(num_rows + count)
            if forward_s is None:
                break
            rate = tokens / (forward_s + longest * (self._per_token_s or 0.0))
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def note_proposal(self, chunks: list[Chunk], spent_s: float) -> None:
        """Proposing for these has taken this long."""
        each_s = spent_s / max(chunk.max_draft for chunk in chunks)
        self._per_token_s = _mixed(self._per_token_s, each_s)

    def note_step(self, chunks: list[Chunk], spent_s: float) -> None:
        """A step's forward and draws have taken this long."""
        if all(chunk.draws and chunk.num_rows == 1 for chunk in chunks):
            self._forward_s.note(len(chunks) + sum(len(c.draft.ids) for c in chunks), spent_s)

    def note_draft(self, sequence: Sequence, asked: int, drafted: int, accepted: int) -> None:
        """Of `drafted` tokens, where `asked` were wanted, the first `accepted` stand."""
        if not asked:
            return
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


class Costs:
    """Seconds of a forward by its number of rows, as measured so far."""

    def __init__(self) -> None:
        self._rows: list[int] = []  # ascending
        self._seconds: dict[int, float] = {}

    def note(self, rows: int, seconds: float) -> None:
        """One more measurement."""
        rows = _coarse(rows)
        if rows not in self._seconds:
            self._rows.insert(bisect_left(self._rows, rows), rows)
        self._seconds[rows] = _mixed(self._seconds.get(rows), seconds)

    def expected(self, rows: int) -> float | None:
        """Seconds of a forward of `rows`; None where it is too far from all that was measured."""
        known, rows = self._rows, _coarse(rows)
        if not known:
            return None
        place = bisect_left(known, rows)
        if place == len(known):
            # Hoped to be free, so that it is tried, but in steps.
            return self._seconds[known[-1]] if rows <= 2 * known[-1] + 8 else None
        above = known[place]
        if above == rows or place == 0:
            return self._seconds[above]
        below = known[place - 1]
        share = (rows - below) / (above - below)
        return (1 - share) * self._seconds[below] + share * self._seconds[above]


def _coarse(rows: int) -> int:
    """Rows to a precision of an eighth, so that few numbers stand for all."""
    step = 1 << max(0, rows.bit_length() - 4)
    return -(-rows // step) * step


def _mixed(expected: float | None, measured: float) -> float:
    """A running mean in which a single outlier counts for little."""
    if expected is None:
        return measured
    return expected + _NEW * (min(measured, 2 * expected) - expected)
