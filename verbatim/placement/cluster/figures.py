"""Timings of a cluster's steps."""

from __future__ import annotations

import statistics
from typing import Any


class Figures:
    """Timings of the steps: totals in seconds, and medians of the last thousand."""

    def __init__(self) -> None:
        self.steps = 0
        self.total_s = self.compute_s = self.draw_s = 0.0
        self._hops: list[float] = []
        self._rest: list[float] = []

    def note(self, seconds: float, parts: int, answer: dict[str, Any]) -> None:
        """Add a step in `parts` micro-batches that took `seconds`, with the times in its answer."""
        self.steps += 1
        self.total_s += seconds
        self.compute_s += answer["busy"]
        self.draw_s += answer["draw_s"]
        if parts == 1:
            if answer["num_hops"]:
                self._hops.append(answer["hops"] / answer["num_hops"])
            self._rest.append(seconds - answer["busy"] - answer["draw_s"])
            del self._hops[:-1000], self._rest[:-1000]

    def as_dict(self) -> dict[str, float | None]:
        """Return the timings. `hop_s`: from the end of one stage's work to the beginning of the next one's,
        on the same machine; None without one. `rest_s`: the part of a step that neither computes nor
        draws.
        """
        return {
            "steps": self.steps,
            "step_s": self.total_s,
            "compute_s": self.compute_s,
            "draw_s": self.draw_s,
            "hop_s": statistics.median(self._hops) if self._hops else None,
            "rest_s": statistics.median(self._rest) if self._rest else None,
        }
