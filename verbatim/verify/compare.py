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
        yield from self._floats(
            "prompt log-prob", expected.prompt_logprobs, found.prompt_logprobs, math.inf
        )
        yield from self._tops(
            "top of the prompt",
            expected.prompt_top_logprobs,
            found.prompt_top_logprobs,
            math.inf,
        )
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
        for attribute in ("logprobs", "sampled_logprobs"):
            before, now = getattr(expected, attribute), getattr(found, attribute)
            label = f"{name}{attribute.removesuffix('s').replace('_', ' ')}"
            yield from self._floats(label, before, now, same)
        yield from self._tops(f"{name}top", expected.top_logprobs, found.top_logprobs, same + 1)
        if expected.score is not None or found.score is not None:
            alike = math.inf if expected.token_ids == found.token_ids else 0
            yield from self._floats(f"{name}score", [expected.score], [found.score], alike)

    def _floats(
        self,
        label: str,
        expected: Sequence[float | None] | None,
        found: Sequence[float | None] | None,
        comparable: float,
    ) -> Iterator[tuple[str, Any, Any, bool]]:
        """Yield the first number that differs in its bits; track the gap of the first `comparable`."""
        if expected is None or found is None:
            if expected is not found:
                yield f"{label}s", expected, found, False
            return
        reported = False
        for at, (before, now) in enumerate(zip(expected, found, strict=False)):
            self.num_logprobs += before is not None
            if _bits(before) == _bits(now):
                continue
            if before is not None and now is not None and at < comparable:
                gap = abs(before - now)
                self.largest = max(self.largest, math.inf if math.isnan(gap) else gap)
            if not reported:
                reported = True
                yield f"{label} {at}", before, now, False
        if len(expected) != len(found) and not reported:
            yield f"number of {label}s", len(expected), len(found), False

    def _tops(
        self,
        label: str,
        expected: Sequence[TopLogprobs | None] | None,
        found: Sequence[TopLogprobs | None] | None,
        comparable: float,
    ) -> Iterator[tuple[str, Any, Any, bool]]:
        if expected is None or found is None:
            if expected is not found:
                yield label, expected, found, False
            return
        if len(expected) != len(found):
            yield f"number of {label}s", len(expected), len(found), False
        reported = False
        for at, (before, now) in enumerate(zip(expected, found, strict=False)):
            left, right = dict(before or ()), dict(now or ())
            self.num_logprobs += len(left)
            for i in left.keys() & right.keys():
                if at < comparable and _bits(left[i]) != _bits(right[i]):
                    gap = abs(left[i] - right[i])
                    self.largest = max(self.largest, math.inf if math.isnan(gap) else gap)
            if not reported and _entries(before) != _entries(now):
                reported = True
                yield f"{label} {at}", before, now, False


def _bits(value: float | None) -> bytes | None:
    return None if value is None else struct.pack("<d", value)


def _entries(entries: TopLogprobs | None) -> list[tuple[int, bytes | None]] | None:
    return None if entries is None else [(i, _bits(p)) for i, p in entries]
