"""`Report` and `Row`: the results of `verify`, and their bitwise comparison."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verbatim.common.plain import to_plain
from verbatim.core import Result, TopLogprobs

REFERENCE, EQUAL, DIFFERS, FAILED, NOT_RUN = "reference", "equal", "differs", "failed", "not run"


@dataclass(slots=True)
class Row:
    """The result of one schedule.

    Attributes:
        name: name of the schedule.
        what: description of the schedule.
        status: "reference" (the requests run alone), "equal", "differs", "failed" (an error was raised) or
            "not run".
        ids_equal, logprobs_equal: whether they are bitwise equal; None if nothing was compared. Finish
            reasons and texts count as ids.
        note: evidence that the schedule took effect, the reason why it was not run, or the error.
        first_difference: description of the first difference in ids or, if there is none, in log-probs.
        largest_difference: largest difference between two log-probs of the same token after the same tokens.
        differing: kinds of the requests that differ.
        num_tokens, num_logprobs: how many were compared.
        forwards: number of forwards of the model.
        rows_per_forward: mean rows (tokens) per forward.
        sequences_at_once: maximum sequences in one forward; 1 means no batching.
        seconds: duration, including opening the model.
    """

    name: str
    what: str
    status: str = REFERENCE
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

    def compare(
        self, number: int, kind: str, expected: Result, found: Result, run: str = ""
    ) -> None:
        """Compare the results of one request.

        Args:
            number: index of the request.
            kind: kind of the request.
            run: label of the schedule's run, if there are several.
        """
        if self.ids_equal is None:
            self.ids_equal, self.logprobs_equal, self.largest_difference = True, True, 0.0
        old_values, new_values = _values(expected), _values(found)
        self.num_tokens += sum(len(output.token_ids) for output in expected.outputs)
        for name in old_values | new_values:
            old, new = old_values.get(name), new_values.get(name)
            has_logprobs = isinstance(old, dict) or isinstance(new, dict)
            if self._equal_logprobs(old or {}, new or {}) if has_logprobs else old == new:
                continue
            if self.first_difference is None or (self.ids_equal and not has_logprobs):
                values = [
                    {ids[-1:]: p for ids, p in value.items()} if isinstance(value, dict) else value
                    for value in (new, old)
                ]
                location = f"{run}, request {number}" if run else f"request {number}"
                self.first_difference = f"{location}, {name}: {values[0]!r}, not {values[1]!r}"
            if has_logprobs:
                self.logprobs_equal = False
            else:
                self.ids_equal = False
            if kind not in self.differing:
                self.differing += (kind,)

    def _equal_logprobs(self, expected: _Logprobs, found: _Logprobs) -> bool:
        self.num_logprobs += len(expected)
        gaps = [
            abs(expected[ids] - found[ids])
            for ids in expected.keys() & found.keys()
            if _bits(expected[ids]) != _bits(found[ids])
        ]
        finite = (math.inf if math.isnan(gap) else gap for gap in gaps)
        self.largest_difference = max(self.largest_difference or 0.0, *finite, 0.0)
        return not gaps and [*expected] == [*found]


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
        """True if something was compared and everything compared was bitwise equal."""
        return bool(self.of(EQUAL)) and not self.of(DIFFERS, FAILED)

    def verdict(self) -> str:
        """Return the outcome in one sentence."""
        equal, run = len(self.of(EQUAL)), len(self.of(EQUAL, DIFFERS, FAILED))
        not_run = self.of(NOT_RUN)
        rest = f"; not run: {', '.join(row.name for row in not_run)}" if not_run else ""
        if not run:
            return f"nothing was compared{rest}"
        if self.ok:
            return (
                f"bit-identical in {'the schedule' if run == 1 else f'all {run} schedules'}{rest}"
            )
        failed = ", ".join(row.name for row in self.of(DIFFERS, FAILED))
        return f"{equal} of {run} schedules are bit-identical; different or failed: {failed}{rest}"

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON."""
        plain: dict[str, Any] = to_plain(self)
        return {"ok": self.ok, "verdict": self.verdict()} | plain


_Logprobs = dict[tuple[int, ...], float]  # by the ids up to and including the scored token


def _values(result: Result) -> dict[str, Any]:
    """Return all values of a result by name, with the log-probs of one position as one value."""
    values: dict[str, Any] = {"the prompt": result.prompt_token_ids}

    def add_rows(
        label: str, rows: Sequence[float | TopLogprobs | None] | None, ids: list[int]
    ) -> None:
        for at, row in enumerate(rows or ()):
            context = tuple(ids[:at])
            if isinstance(row, float):
                values[f"{label} {at}"] = {(*context, *ids[at : at + 1]): row}
            else:
                values[f"{label} {at}"] = {(*context, i): p for i, p in row or ()}

    add_rows("prompt log-prob", result.prompt_logprobs, result.prompt_token_ids)
    add_rows("top of the prompt", result.prompt_top_logprobs, result.prompt_token_ids)
    for output in result.outputs:
        name, ids = f"completion {output.index}, " if output.index else "", output.token_ids
        values |= {f"{name}token {at}": token_id for at, token_id in enumerate(ids)}
        values[f"{name}number of tokens"] = len(ids)
        for attribute in ("finish_reason", "stop_reason", "text", "seed", "sample_index"):
            values[name + attribute.replace("_", " ")] = getattr(output, attribute)
        for attribute in ("logprobs", "sampled_logprobs", "top_logprobs"):
            label = f"{name}{attribute.removesuffix('s').replace('_', ' ')}"
            add_rows(label, getattr(output, attribute), ids)
        values[f"{name}score"] = {} if output.score is None else {tuple(ids): output.score}
    return values


def _bits(value: float) -> bytes:
    return struct.pack("<d", value)
