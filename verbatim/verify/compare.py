"""Comparison of two results of one request, bit for bit."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from verbatim.core import Completion, Result, TopLogprobs


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between two results.

    Attributes:
        request: index of the request.
        what: the part of the result.
        expected, found: the values of the request alone, and of this schedule.
        run: label of the schedule's run, if there are several.
    """

    request: int
    what: str
    expected: Any
    found: Any
    run: str = ""

    def __str__(self) -> str:
        run = f"{self.run}, " if self.run else ""
        return f"{run}request {self.request}, {self.what}: {self.found!r}, not {self.expected!r}"


@dataclass(slots=True)
class Comparison:
    """The differences between many pairs of results.

    Attributes:
        num_tokens: completion tokens compared.
        num_logprobs: log-probs compared.
        ids_differ, logprobs_differ: requests whose tokens, texts or ends differ; and whose log-probs do.
        first: the first difference; of a token, if there is one.
        largest: largest difference between two log-probs of the same token after the same tokens.
    """

    num_tokens: int = 0
    num_logprobs: int = 0
    ids_differ: set[int] = field(default_factory=set)
    logprobs_differ: set[int] = field(default_factory=set)
    first: Difference | None = None
    largest: float = 0.0
    _first_is_of_ids: bool = False

    @property
    def equal(self) -> bool:
        return not self.ids_differ and not self.logprobs_differ

    def add(self, number: int, expected: Result, found: Result, run: str = "") -> None:
        """Compare one request's results."""
        for what, before, now, of_ids in self._differences(expected, found):
            (self.ids_differ if of_ids else self.logprobs_differ).add(number)
            if self.first is None or (of_ids and not self._first_is_of_ids):
                self.first = Difference(number, what, before, now, run)
                self._first_is_of_ids = of_ids

    def _differences(self, expected: Result, found: Result) -> Iterator[tuple[str, Any, Any, bool]]:
        """Yield (part, expected value, found value, whether it concerns tokens) for each difference."""
        if expected.prompt_token_ids != found.prompt_token_ids:
            yield "the prompt", expected.prompt_token_ids, found.prompt_token_ids, True
            return
        for label, attribute in (
            ("prompt log-prob", "prompt_logprobs"),
            ("top of the prompt", "prompt_top_logprobs"),
        ):
            before, now = getattr(expected, attribute), getattr(found, attribute)
            yield from self._rows(label, before, now, math.inf)
        if len(expected.outputs) != len(found.outputs):
            yield "completions", len(expected.outputs), len(found.outputs), True
        for before, now in zip(expected.outputs, found.outputs, strict=False):
            yield from self._completions(before, now)

    def _completions(
        self, expected: Completion, found: Completion
    ) -> Iterator[tuple[str, Any, Any, bool]]:
        name = f"completion {expected.index}, " if expected.index else ""
        self.num_tokens += len(expected.token_ids)
        same = 0  # leading tokens that agree
        for before, now in zip(expected.token_ids, found.token_ids, strict=False):
            if before != now:
                yield f"{name}token {same}", before, now, True
                break
            same += 1
        else:
            if len(expected.token_ids) != len(found.token_ids):
                lengths = len(expected.token_ids), len(found.token_ids)
                yield f"{name}number of tokens", *lengths, True
        for attribute in ("finish_reason", "stop_reason", "text", "seed", "sample_index"):
            before, now = getattr(expected, attribute), getattr(found, attribute)
            if before != now:
                yield name + attribute.replace("_", " "), before, now, True
        for attribute in ("logprobs", "sampled_logprobs", "top_logprobs"):
            before, now = getattr(expected, attribute), getattr(found, attribute)
            label = f"{name}{attribute.removesuffix('s').replace('_', ' ')}"
            # The distribution is the same up to the first token that differs.
            yield from self._rows(label, before, now, same + (attribute == "top_logprobs"))
        alike = math.inf if expected.token_ids == found.token_ids else 0
        yield from self._rows(f"{name}score", [expected.score], [found.score], alike)

    def _rows(
        self,
        label: str,
        expected: Sequence[float | TopLogprobs | None] | None,
        found: Sequence[float | TopLogprobs | None] | None,
        comparable: float,
    ) -> Iterator[tuple[str, Any, Any, bool]]:
        """Yield the first row that differs in its bits; track the largest gap in the first `comparable`."""
        if expected is None or found is None:
            if expected is not found:
                yield f"{label}s", expected, found, False
            return
        reported = False
        for at, (before, now) in enumerate(zip(expected, found, strict=False)):
            left, right = _entries(before), _entries(now)
            self.num_logprobs += len(left)
            if [(i, _bits(p)) for i, p in left] == [(i, _bits(p)) for i, p in right]:
                continue
            ours, theirs = dict(left), dict(right)
            for i in ours.keys() & theirs.keys() if at < comparable else ():
                gap = 0.0 if _bits(ours[i]) == _bits(theirs[i]) else abs(ours[i] - theirs[i])
                self.largest = max(self.largest, math.inf if math.isnan(gap) else gap)
            if not reported:
                reported = True
                yield f"{label} {at}", before, now, False
        if len(expected) != len(found) and not reported:
            yield f"number of {label}s", len(expected), len(found), False


def _bits(value: float) -> bytes:
    return struct.pack("<d", value)


def _entries(row: float | TopLogprobs | None) -> TopLogprobs:
    """Return a row as log-probs by id; the id of a single one does not matter."""
    if row is None:
        return []
    return [(0, row)] if isinstance(row, float) else row
