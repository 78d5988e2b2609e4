"""Measured durations by size, robust to other load on the machine."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque

_WINDOW = 6  # measurements kept for each size


class Costs:
    """Recent durations of an operation by its number of rows.

    Other load on the machine only ever lengthens measurements, so a low quantile of the last few counts.
    Old measurements are dropped, so that their sizes are tried again.
    """

    def __init__(self) -> None:
        self._rows: list[int] = []  # ascending
        self._measured: dict[int, deque[float]] = {}
        self._last: dict[int, int] = {}  # step of the last measurement
        self._expected: dict[int, float | None] = {}  # memo until the next measurement

    @property
    def known(self) -> bool:
        """Whether there are measurements."""
        return bool(self._rows)

    def note(self, rows: int, seconds: float, step: int) -> None:
        """Add a measurement."""
        self._expected.clear()
        rows = _coarse(rows)
        if rows not in self._measured:
            self._rows.insert(bisect_left(self._rows, rows), rows)
            self._measured[rows] = deque(maxlen=_WINDOW)
        self._measured[rows].append(seconds)
        self._last[rows] = step

    def forget(self, before: int) -> None:
        """Drop the sizes not measured since step `before`, but keep the latest of all."""
        old = [rows for rows, step in self._last.items() if step < before]
        if old and len(old) == len(self._rows):
            old.remove(max(old, key=self._last.__getitem__))
        for rows in old:
            self._rows.remove(rows)
            del self._measured[rows], self._last[rows]
        self._expected.clear()

    def expected(self, rows: int) -> float | None:
        """Return the seconds for `rows`; None if that is too far from all measured sizes."""
        if rows not in self._expected:
            self._expected[rows] = self._between(rows)
        return self._expected[rows]

    def _between(self, rows: int) -> float | None:
        known, rows = self._rows, _coarse(rows)
        if not known:
            return None
        place = bisect_left(known, rows)
        if place == len(known):
            # Assumed to cost no more, so that it is tried, within limits.
            return self._at(known[-1]) if rows <= 2 * known[-1] + 8 else None
        above = known[place]
        if above == rows or place == 0:
            return self._at(above)
        below = known[place - 1]
        share = (rows - below) / (above - below)
        return (1 - share) * self._at(below) + share * self._at(above)

    def _at(self, rows: int) -> float:
        seconds = sorted(self._measured[rows])
        return seconds[len(seconds) // 4]


def _coarse(rows: int) -> int:
    """Round up to a precision of an eighth, so that few sizes are measured."""
    step = 1 << max(0, rows.bit_length() - 4)
    return -(-rows // step) * step
