"""`Trial`: a running schedule, with counters of its engines' forwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from verbatim.batch import Batch
from verbatim.core import Delta, Result
from verbatim.errors import VerbatimError
from verbatim.llm import LLM
from verbatim.params import SamplingParams
from verbatim.placement.distributed.choice import Cluster
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


@dataclass(slots=True)
class ComparedRun:
    """Results to compare with expected ones."""

    label: str
    numbers: list[int]  # indices of the requests
    found: list[Result]
    expected: list[Result]


class Trial:
    """A schedule's runs, notes and counters.

    Attributes:
        runs: results to compare.
        notes: evidence that the schedule took effect.
        forwards, rows: forwards of its engines, and rows in them.
        most: maximum of sequences per forward.
    """

    def __init__(self, subject: Subject, name: str) -> None:
        self.subject = subject
        self.name = name
        self.runs: list[ComparedRun] = []
        self.notes: list[str] = []
        self.forwards = self.rows = self.most = 0
        self._run = 0

    @contextmanager
    def plain(self) -> Iterator[LLM]:
        """Use the resident engine, which several schedules share."""
        llm = self.subject.plain()
        with self._counted(llm):
            yield llm

    @contextmanager
    def opened(self, **changes: Any) -> Iterator[LLM]:
        """Open an engine for this schedule.

        Raises:
            NotRun: it can't be opened.
        """
        self.subject.plain()  # a schedule may need its `info`
        self.subject.close()
        options = {**self.subject.options, **changes}
        try:
            llm = LLM(self.subject.model, **options)
        except VerbatimError as error:
            raise NotRun(" ".join(str(error).split())) from None
        with llm, self._counted(llm):
            yield llm

    @contextmanager
    def _counted(self, llm: LLM) -> Iterator[None]:
        runner: Any = llm.engine.runner
        forward = runner.forward

        def counted(batch: Batch) -> Any:
            self.forwards += 1
            self.rows += batch.num_tokens
            self.most = max(self.most, batch.num_sequences)
            return forward(batch)

        runner.forward = counted
        try:
            yield
        finally:
            del runner.forward

    def params(self, number: int) -> SamplingParams:
        """Return the parameters of one request, with a separate prefix cache for each run."""
        params = self.subject.requests[number].params
        salt = f"verify/{self.name}/{self._run}"
        return params.replace(cache_salt=salt, draft=params.num_beams == 1)  # beams draw nothing

    def prompt(self, number: int) -> list[int]:
        return self.subject.requests[number].prompt

    def alone(self, llm: LLM, numbers: SequenceOf[int] | None = None) -> list[Result]:
        """Run requests one after the other; all of them by default."""
        return [self.together(llm, [i])[0] for i in self._numbers(numbers)]

    def together(self, llm: LLM, numbers: SequenceOf[int] | None = None) -> list[Result]:
        """Run requests as one batch; all of them by default."""
        self._run += 1
        chosen = self._numbers(numbers)
        return llm.generate([self.prompt(i) for i in chosen], [self.params(i) for i in chosen])

    async def streamed(self, llm: LLM, number: int) -> Result:
        """Run one request and join its streamed deltas."""
        stream = llm.astream(self.prompt(number), self.params(number))
        return _joined([delta async for delta in stream])

    def add(
        self,
        found: list[Result],
        *,
        label: str = "",
        numbers: SequenceOf[int] | None = None,
        expected: list[Result] | None = None,
    ) -> None:
        """Add results to compare, by default with those of the requests run alone."""
        chosen = self._numbers(numbers)
        if expected is None:
            expected = [self.subject.expected[i] for i in chosen]
        self.runs.append(ComparedRun(label, chosen, found, expected))

    def check_batched(self) -> None:
        """Raise NotRun if the engine ran the requests one by one."""
        if self.most <= self.subject.most_alone:
            raise NotRun(f"no forward had more than {self.most} sequences, as in the reference")

    def _numbers(self, numbers: SequenceOf[int] | None) -> list[int]:
        return list(range(len(self.subject.requests)) if numbers is None else numbers)


def _joined(deltas: list[Delta]) -> Result:
    result = deltas[-1].result
    assert result is not None
    outputs = []
    columns = ("token_ids", "logprobs", "sampled_logprobs", "top_logprobs")
    for output in result.outputs:
        of_output = [delta for delta in deltas if delta.index == output.index]
        joined: dict[str, Any] = {
            name: _flat([getattr(delta, name) for delta in of_output]) for name in columns
        }
        joined["text"] = "".join(delta.text for delta in of_output)
        outputs.append(dataclasses.replace(output, **joined))
    return dataclasses.replace(result, outputs=outputs)


def _flat(parts: SequenceOf[list[Any] | None]) -> list[Any] | None:
    """Join the parts; return None if any is None."""
    present = [part for part in parts if part is not None]
    return [entry for part in present for entry in part] if len(present) == len(parts) else None
