"""Where the time of a cluster's steps went."""

from __future__ import annotations

from typing import Any


class Figures:
    """Where the time of the steps went, seconds in all."""

    def __init__(self) -> None:
        self.steps = 0
        self.total_s = self.compute_s = self.draw_s = 0.0
        self.hops: list[float] = []  # of the last steps, each the mean over its hops

    def note(self, seconds: float, parts: int, answer: dict[str, Any]) -> None:
        """A step in `parts` micro-batches has taken `seconds`, of which the answer tells where they went."""
        busy = answer["busy"]
        self.steps += 1
        self.total_s += seconds
        self.compute_s += sum(busy)
        self.draw_s += answer["draw_s"]
        if parts == 1:
            between = seconds - sum(busy) - answer["draw_s"]
            self.hops.append(max(0.0, between) / (len(busy) + 1))
            del self.hops[:-1000]

    def as_dict(self) -> dict[str, float | None]:
        hops = sorted(self.hops)
        return {
            "steps": self.steps,
            "step_s": self.total_s,
            "compute_s": self.compute_s,
            "draw_s": self.draw_s,
            "hop_s": hops[len(hops) // 2] if hops else None,
        }
