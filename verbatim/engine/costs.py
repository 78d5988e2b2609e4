"""What something costs by its size, on a machine that has other things to do."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque

_WINDOW = 6  # measurements that are remembered, of steps of one size


class Costs:
    """Seconds of something by its number of rows, as measured lately.

    A machine that has other things to do adds to some measurements and takes from none. So of the last few
    one of the smallest counts, and what was not measured for long is forgotten, to be tried again.
    """

    def __init__(self) -> None:
        self._rows: list[int] = []  # ascending
        self._measured: dict[int, deque[float]] = {}
        self._last: dict[int, int] = {}  # the step in which each was measured last
        self._expected: dict[int, float | None] = {}  # until something is measured again

    @property
    def known(self) -> bool:
        """Was anything measured?"""
        return bool(self._rows)

    def note(self, rows: int, seconds: float, step: int) -> None:
        """One more measurement."""
        self._expected.clear()
        rows = _coarse(rows)
        if rows not in self._measured:
            self._rows.insert(bisect_left(self._rows, rows), rows)
            self._measured[rows] = deque(maxlen=_WINDOW)
        self._measured[rows].append(seconds)
        self._last[rows] = step

    def forget(self, before: int) -> None:
        """Forget what was measured last before a step; but not the one measured latest of all."""
        old = [rows for rows, step in self._last.items() if step < before]
        if old and len(old) == len(self._rows):
            old.remove(max(old, key=self._last.__getitem__))
        for rows in old:
            self._rows.remove(rows)
            del self._measured[rows], self._last[rows]
        self._expected.clear()

    def expected(self, rows: int) -> float | None:
        """Seconds for `rows`; None where that is too far from all that was measured."""
        if rows not in self._expected:
            self._expected[rows] = self._between(rows)
        return self._expected[rows]

    def _between(self, rows: int) -> float | None:
        known, rows = self._rows, _coarse(rows)
        if not known:
            return None
        place = bisect_left(known, rows)
        if place == len(known):
            # Hoped to be free, so that it is tried, but in steps.
            return self._at(known[-1]) if rows <= 2 * known[-1] + 8 else None
        above = known[place]
        if above == rows or place == 0:
            return self._at(above)
        below = known[place - 1]
        share = (rows - below) / (above - below)
        return (1 - share) * self._at(below) + share * self._at(above)

    def _at(self, rows: int) -> float:
        lately = sorted(self._measured[rows])
        return lately[len(lately) // 4]


def _coarse(rows: int) -> int:
    """Rows to a precision of an eighth, so that few numbers stand for all."""
    step = 1 << max(0, rows.bit_length() - 4)
    return -(-rows // step) * step
