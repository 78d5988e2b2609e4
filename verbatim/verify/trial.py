"""`Trial`: a running schedule, with counters of its engines' forwards."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from verbatim.batch import Batch
from verbatim.core import Delta, Result
from verbatim.errors import VerbatimError
from verbatim.llm import LLM
from verbatim.placement.distributed.choice import Cluster
from verbatim.verify.compare import Comparison
from verbatim.verify.report import Row
from verbatim.verify.requests import TestRequest


class NotRun(Exception):
    """Raised, with the reason, if a schedule is impossible here or did not take effect."""


@dataclass(slots=True)
class Subject:
    """The model under test and its reference results.

    Attributes:
        model: as in `LLM`.
        options: options of `LLM` for all schedules.
        cluster: placement of the row "two-stages".
        requests: the requests of every schedule.
        expected: their results when run alone.
        most_alone: maximum of sequences per forward when each request runs alone.
        info: `LLM.info` of the resident engine.
    """

    model: Any
    options: dict[str, Any]
    cluster: Cluster
    requests: list[TestRequest] = field(default_factory=list)
    expected: list[Result] = field(default_factory=list)
    most_alone: int = 0
    info: dict[str, Any] = field(default_factory=dict)
    _plain: LLM | None = None

    def plain(self) -> LLM:
        """Return the resident engine, opened on first use."""
        if self._plain is None:
            self._plain = LLM(self.model, **self.options)
            self.info = self._plain.info()
        return self._plain

    def close(self) -> None:
        """Close the resident engine, to free its memory."""
        if self._plain is not None:
            self._plain.close()
            self._plain = None


class Trial:
    """A schedule's runs, notes and counters.

    Attributes:
        comparison: of its results with the expected ones.
        notes: evidence that the schedule took effect.
        forwards, rows: forwards of its engines, and rows in them.
        most: maximum of sequences per forward.
    """

    def __init__(self, subject: Subject, name: str, what: str) -> None:
        self.subject = subject
        self.name, self.what = name, what
        self.comparison = Comparison()
        self.notes: list[str] = []
        self.forwards = self.rows = self.most = 0
        self._run = 0
        self._begin = time.perf_counter()

    def row(self, status: str, **rest: Any) -> Row:
        """Return the row of this schedule, with its notes and counters."""
        figures: dict[str, Any] = {
            "note": "; ".join(self.notes),
            "forwards": self.forwards,
            "rows_per_forward": self.rows / max(1, self.forwards),
            "sequences_at_once": self.most,
            "seconds": time.perf_counter() - self._begin,
        }
        return Row(self.name, self.what, status, **(figures | rest))

    @contextmanager
    def opened(self, **changes: Any) -> Iterator[LLM]:
        """Open an engine with these options; without any, use the resident one, which schedules share.

        Raises:
            NotRun: it can't be opened.
        """
        llm = self.subject.plain()  # a schedule may need its `info`
        if changes:
            self.subject.close()
            try:
                llm = LLM(self.subject.model, **(self.subject.options | changes))
            except VerbatimError as error:
                raise NotRun(" ".join(str(error).split())) from None
        runner: Any = llm.engine.runner
        forward = runner.forward

        def counted(batch: Batch) -> Any:
            self.forwards += 1
            self.rows += batch.num_tokens
            self.most = max(self.most, batch.num_sequences)
            return forward(batch)

        runner.forward = counted
        try:
            yield llm
        finally:
            del runner.forward
            if changes:
                llm.close()

    def _arguments(self, number: int) -> dict[str, Any]:
        """Return the prompt and parameters of one request, with a separate prefix cache for each run."""
        request = self.subject.requests[number]
        salt = f"verify/{self.name}/{self._run}"
        draft = request.params.num_beams == 1  # beams draw nothing
        return {
            "prompt": request.prompt,
            "params": request.params.replace(cache_salt=salt, draft=draft),
        }

    def alone(self, llm: LLM, numbers: Sequence[int]) -> list[Result]:
        """Run requests one after the other."""
        return [self.together(llm, [i])[0] for i in numbers]

    def together(self, llm: LLM, numbers: Sequence[int]) -> list[Result]:
        """Run requests as one batch."""
        self._run += 1
        arguments = [self._arguments(i) for i in numbers]
        return llm.generate(
            [each["prompt"] for each in arguments], [each["params"] for each in arguments]
        )

    async def streamed(self, llm: LLM, number: int) -> Result:
        """Run one request and join its streamed deltas."""
        return _joined([delta async for delta in llm.astream(**self._arguments(number))])

    @property
    def numbers(self) -> list[int]:
        """The indices of all requests."""
        return list(range(len(self.subject.requests)))

    def add(
        self,
        found: list[Result],
        numbers: Sequence[int] | None = None,
        *,
        label: str = "",
        expected: list[Result] | None = None,
    ) -> None:
        """Compare the results of requests, by default with those of the requests run alone."""
        for at, number in enumerate(self.numbers if numbers is None else numbers):
            before = self.subject.expected[number] if expected is None else expected[at]
            self.comparison.add(number, before, found[at], label)

    def check_batched(self) -> None:
        """Raise NotRun if the engine ran the requests one by one."""
        if self.most <= self.subject.most_alone:
            raise NotRun(f"no forward had more than {self.most} sequences, as in the reference")


def _joined(deltas: list[Delta]) -> Result:
    result = deltas[-1].result
    assert result is not None
    outputs = []
    for output in result.outputs:
        parts = [delta for delta in deltas if delta.index == output.index]
        joined: dict[str, Any] = {
            name: [entry for part in parts for entry in getattr(part, name) or ()]
            for name in ("token_ids", "logprobs", "sampled_logprobs", "top_logprobs")
            if getattr(output, name) is not None
        }
        text = "".join(part.text for part in parts)
        outputs.append(dataclasses.replace(output, text=text, **joined))
    return dataclasses.replace(result, outputs=outputs)
