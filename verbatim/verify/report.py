"""`Report`: what held on this machine, and what didn't."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verbatim.plain import to_plain

REFERENCE, EQUAL, DIFFERS, FAILED, NOT_RUN = "reference", "equal", "differs", "failed", "not run"


@dataclass(frozen=True, slots=True)
class Row:
    """One schedule.

    Attributes:
        name: of the schedule.
        what: what it does.
        status: "reference" (the requests alone, which the others are held against), "equal", "differs",
            "failed" (an error came instead of words) or "not run".
        ids_equal, logprobs_equal: bit for bit; None where nothing was compared. Ends and texts count
            with the ids.
        note: what shows that it was this schedule; or why it was not run; or the error.
        first_difference: in words.
        largest_difference: between two log-probs of the same token behind the same tokens.
        differing: the kinds of the requests that came out otherwise.
        num_tokens, num_logprobs: that were compared.
        forwards: of the model.
        rows_per_forward: tokens that one forward computed, at the mean.
        sequences_at_once: that one forward computed, at most: 1 would be no batch.
        seconds: that it took, with opening.
    """

    name: str
    what: str
    status: str
    ids_equal: bool | None = None
    logprobs_equal: bool | None = None
    note: str = ""
    first_difference: str | None = None
    largest_difference: float | None = None
    differing: tuple[str, ...] = ()
    num_tokens: int = 0
    num_logprobs: int = 0
    forwards: int = 0
    rows_per_forward: float = 0.0
    sequences_at_once: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """All rows, and what they are of.

    Attributes:
        model, numerics_key: as `LLM.info` has them.
        seed: of the requests.
        num_requests: that each schedule ran.
    """

    model: str
    numerics_key: str
    seed: int
    num_requests: int
    rows: tuple[Row, ...]

    def of(self, *statuses: str) -> list[Row]:
        """The rows with one of these statuses."""
        return [row for row in self.rows if row.status in statuses]

    @property
    def ok(self) -> bool:
        """Something was compared, and all of it was the same bits."""
        return bool(self.of(EQUAL)) and not self.of(DIFFERS, FAILED)

    def verdict(self) -> str:
        """In a sentence."""
        equal, run = len(self.of(EQUAL)), len(self.of(EQUAL, DIFFERS, FAILED))
        left = self.of(NOT_RUN)
        rest = f"; not run: {', '.join(row.name for row in left)}" if left else ""
        if not run:
            return f"nothing was compared{rest}"
        if self.ok:
            return (
                f"the same bits in {'the schedule' if run == 1 else f'all {run} schedules'}{rest}"
            )
        bad = ", ".join(row.name for row in self.of(DIFFERS, FAILED))
        return f"{equal} of {run} schedules gave the same bits; not so: {bad}{rest}"

    def as_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        plain: dict[str, Any] = to_plain(self)
        return {"ok": self.ok, "verdict": self.verdict()} | plain
