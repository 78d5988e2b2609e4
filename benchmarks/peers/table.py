"""The table of results: tokens per second, ratio to the best peer, fraction of the limit."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

OURS = "Verbatim"
OURS_A8 = "Verbatim a8"  # with activations in 8 bits
DECODE_GOAL, LIMIT_GOAL, PREFILL_GOAL = 1.2, 0.9, 1.0


@dataclass(frozen=True, slots=True)
class Cell:
    """One configuration to measure. `rows` is 0 for the prefill of one prompt."""

    fmt: str
    prompt: int
    rows: int

    @property
    def is_decode(self) -> bool:
        return self.rows > 0

    @property
    def tokens(self) -> int:
        """Tokens that are timed together: those of a step, or of a prompt."""
        return self.rows or self.prompt

    def __str__(self) -> str:
        what = f"{self.rows} row{'s' * (self.rows > 1)}" if self.rows else "prefill"
        return f"{self.fmt}, prompt {self.prompt}, {what}"


@dataclass(slots=True)
class Measured:
    """A cell's times in every system, and the machine's minimum time in each round."""

    cell: Cell
    limits_s: list[float]
    seconds: dict[str, list[float]] = field(default_factory=dict)  # by system

    def tokens_per_s(self, system: str) -> float | None:
        """Return the median speed of a system; None if it was not measured."""
        times = self.seconds.get(system)
        return self.cell.tokens / statistics.median(times) if times else None

    @property
    def best_peer(self) -> tuple[str, float] | None:
        """The fastest other system, and its tokens per second."""
        speeds = [
            (name, self.tokens_per_s(name)) for name in self.seconds if name not in (OURS, OURS_A8)
        ]
        known = [(name, speed) for name, speed in speeds if speed is not None]
        return max(known, key=lambda entry: entry[1], default=None)

    @property
    def limit(self) -> float:
        """Tokens per second at the machine's limit."""
        return self.cell.tokens / statistics.median(self.limits_s)

    @property
    def ratio(self) -> float | None:
        """Verbatim's speed divided by the best peer's."""
        ours, best = self.tokens_per_s(OURS), self.best_peer
        return None if ours is None or best is None else ours / best[1]

    @property
    def fraction(self) -> float | None:
        """Verbatim's speed divided by the limit."""
        ours = self.tokens_per_s(OURS)
        return None if ours is None else ours / self.limit

    @property
    def goal(self) -> float | None:
        """Tokens per second to reach: in decode 1.2 times the best peer or 90 % of the limit, if less."""
        best = self.best_peer
        if best is None:
            return None
        if not self.cell.is_decode:
            return PREFILL_GOAL * best[1]
        return min(DECODE_GOAL * best[1], LIMIT_GOAL * self.limit)

    @property
    def reached(self) -> bool | None:
        ours, goal = self.tokens_per_s(OURS), self.goal
        return None if ours is None or goal is None else ours >= goal

    def as_json(self) -> dict[str, Any]:
        best = self.best_peer
        return {
            "format": self.cell.fmt,
            "prompt": self.cell.prompt,
            "rows": self.cell.rows or None,
            "tokens_per_s": {name: self.tokens_per_s(name) for name in self.seconds},
            "seconds": self.seconds,
            "limit_tokens_per_s": self.limit,
            "best_peer": best[0] if best else None,
            "ratio": self.ratio,
            "of_limit": self.fraction,
            "goal_tokens_per_s": self.goal,
            "reached": self.reached,
        }


def rows_of(measured: list[Measured], systems: list[str]) -> list[list[str]]:
    """Return the rows of the table as text, the header first."""
    head = [
        "format",
        "prompt",
        "rows",
        *systems,
        "limit",
        "to the best peer",
        "of the limit",
        "goal",
    ]
    return [head] + [
        [
            entry.cell.fmt,
            f"{entry.cell.prompt:,}",
            str(entry.cell.rows) if entry.cell.is_decode else "prefill",
            *(number(entry.tokens_per_s(name)) for name in systems),
            number(entry.limit),
            "" if entry.ratio is None else f"{entry.ratio:.2f}",
            "" if entry.fraction is None else f"{entry.fraction:.0%}".replace("%", " %"),
            {True: "reached", False: "missed", None: ""}[entry.reached],
        ]
        for entry in measured
    ]


def number(value: float | None) -> str:
    """Format a speed; "" for None."""
    if value is None:
        return ""
    return f"{value:.1f}" if value < 99.5 else f"{value:,.0f}"


def text(table: list[list[str]]) -> str:
    """Format a table for a terminal."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in table]
    lines.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join(lines)


def markdown(table: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in table]
    lines.insert(1, "| " + " | ".join("---" for _ in table[0]) + " |")
    return "\n".join(lines)
