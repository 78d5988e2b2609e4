"""`Report` and `Row`: the results of `verify`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verbatim.plain import to_plain

REFERENCE, EQUAL, DIFFERS, FAILED, NOT_RUN = "reference", "equal", "differs", "failed", "not run"


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one schedule.

    Attributes:
        name: name of the schedule.
        what: description of the schedule.
        status: "reference" (the requests run alone), "equal", "differs", "failed" (an error was raised) or
            "not run".
        ids_equal, logprobs_equal: equality bit for bit; None if nothing was compared. Finish reasons and
            texts count with the ids.
        note: evidence that the schedule took effect, the reason why it was not run, or the error.
        first_difference: description of the first difference.
        largest_difference: largest difference between two log-probs of the same token after the same tokens.
        differing: kinds of the requests that differ.
        num_tokens, num_logprobs: numbers compared.
        forwards: forwards of the model.
        rows_per_forward: mean rows (tokens) per forward.
        sequences_at_once: maximum sequences in one forward; 1 means no batching.
        seconds: duration, including opening the model.
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
    """The results of all schedules.

    Attributes:
        model, numerics_key: as in `LLM.info`.
        seed: seed of the requests.
        num_requests: requests per schedule.
        rows: one row per schedule.
    """

    model: str
    numerics_key: str
    seed: int
    num_requests: int
    rows: tuple[Row, ...]

    def of(self, *statuses: str) -> list[Row]:
        """Return the rows with one of these statuses."""
        return [row for row in self.rows if row.status in statuses]

    @property
    def ok(self) -> bool:
        """True if something was compared and all of it was equal bit for bit."""
        return bool(self.of(EQUAL)) and not self.of(DIFFERS, FAILED)

    def verdict(self) -> str:
        """Return the outcome in one sentence."""
        equal, run = len(self.of(EQUAL)), len(self.of(EQUAL, DIFFERS, FAILED))
        left = self.of(NOT_RUN)
        rest = f"; not run: {', '.join(row.name for row in left)}" if left else ""
        if not run:
            return f"nothing was compared{rest}"
        if self.ok:
            return (
                f"bit-identical in {'the schedule' if run == 1 else f'all {run} schedules'}{rest}"
            )
        bad = ", ".join(row.name for row in self.of(DIFFERS, FAILED))
        return f"{equal} of {run} schedules are bit-identical; different or failed: {bad}{rest}"

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON."""
        plain: dict[str, Any] = to_plain(self)
        return {"ok": self.ok, "verdict": self.verdict()} | plain
