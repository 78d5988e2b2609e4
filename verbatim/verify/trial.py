"""`Trial`: one schedule while it runs, on engines whose forwards are counted."""

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
from verbatim.placement.cluster.choice import Cluster
from verbatim.verify.requests import Asked


class NotRun(Exception):
    """A schedule that can't be had here, or did not come about; says why."""


@dataclass(slots=True)
class Subject:
    """What is verified.

    Attributes:
        model: as `LLM` takes it.
        options: of `LLM`, for all schedules.
        cluster: the placement of the row of two stages.
        requests: what each schedule runs.
        expected: what they gave alone.
        most_alone: sequences that one forward had at most when each request was alone.
        info: of the engine in memory.
    """

    model: Any
    options: dict[str, Any]
    cluster: Cluster
    requests: list[Asked] = field(default_factory=list)
    expected: list[Result] = field(default_factory=list)
    most_alone: int = 0
    info: dict[str, Any] = field(default_factory=dict)
    _plain: LLM | None = None

    def plain(self) -> LLM:
        """The engine in memory, as the options have it; opened once."""
        if self._plain is None:
            self._plain = LLM(self.model, **self.options)
            self.info = self._plain.info()
        return self._plain

    def close(self) -> None:
        """Close it, so that another one may take the memory."""
        if self._plain is not None:
            self._plain.close()
            self._plain = None


@dataclass(slots=True)
class Run:
    """Results to be compared with others."""

    label: str
    numbers: list[int]  # of the requests
    found: list[Result]
    expected: list[Result]


class Trial:
    """One schedule: its runs, what shows that it was this one, and what the engines did for it.

    Attributes:
        runs: what came out.
        notes: what shows that the schedule came about.
        forwards, rows: of its engines.
        most: sequences that one forward had at most.
    """

    def __init__(self, subject: Subject, name: str) -> None:
        self.subject = subject
        self.name = name
        self.runs: list[Run] = []
        self.notes: list[str] = []
        self.forwards = self.rows = self.most = 0
        self._run = 0

    @contextmanager
    def plain(self) -> Iterator[LLM]:
        """The engine in memory that several schedules share."""
        llm = self.subject.plain()
        with self._counted(llm):
            yield llm

    @contextmanager
    def opened(self, **changes: Any) -> Iterator[LLM]:
        """An engine of its own.

        Raises:
            NotRun: there can be none.
        """
        self.subject.plain()  # whose figures it may need
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
        """Of one request; what one run has cached is not found by another."""
        params = self.subject.requests[number].params
        salt = f"verify/{self.name}/{self._run}"
        return params.replace(cache_salt=salt, draft=params.num_beams == 1)  # beams draw nothing

    def prompt(self, number: int) -> list[int]:
        return self.subject.requests[number].prompt

    def alone(self, llm: LLM, numbers: SequenceOf[int] | None = None) -> list[Result]:
        """Some requests, each when the one before it has ended; all of them if left out."""
        return [self.together(llm, [i])[0] for i in self._numbers(numbers)]

    def together(self, llm: LLM, numbers: SequenceOf[int] | None = None) -> list[Result]:
        """Some requests at once; all of them if left out."""
        self._run += 1
        chosen = self._numbers(numbers)
        return llm.generate([self.prompt(i) for i in chosen], [self.params(i) for i in chosen])

    async def streamed(self, llm: LLM, number: int) -> Result:
        """One request, put together from what its stream gave."""
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
        """Results to be compared: with those of the requests alone, unless others are given."""
        chosen = self._numbers(numbers)
        if expected is None:
            expected = [self.subject.expected[i] for i in chosen]
        self.runs.append(Run(label, chosen, found, expected))

    def check_batched(self) -> None:
        """Raises NotRun: the engine ran the requests one by one, which shows nothing."""
        if self.most <= self.subject.most_alone:
            raise NotRun(f"no forward had more than {self.most} sequences, as in the reference")

    def _numbers(self, numbers: SequenceOf[int] | None) -> list[int]:
        return list(range(len(self.subject.requests)) if numbers is None else numbers)


def _joined(deltas: list[Delta]) -> Result:
    result = deltas[-1].result
    assert result is not None
    outputs = []
    for output in result.outputs:
        own = [delta for delta in deltas if delta.index == output.index]
        outputs.append(
            dataclasses.replace(
                output,
                text="".join(delta.text for delta in own),
                token_ids=[i for delta in own for i in delta.token_ids],
                logprobs=[p for delta in own for p in delta.logprobs],
                sampled_logprobs=_flat([delta.sampled_logprobs for delta in own]),
                top_logprobs=_flat([delta.top_logprobs for delta in own]),
            )
        )
    return dataclasses.replace(result, outputs=outputs)


def _flat(parts: SequenceOf[list[Any] | None]) -> list[Any] | None:
    """Parts as one; None where there are none."""
    known = [part for part in parts if part is not None]
    return [entry for part in known for entry in part] if len(known) == len(parts) else None
