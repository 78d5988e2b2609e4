"""One call of `generate`: runs its rows and returns their ids as tensors."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from typing import Any, cast

from torch import Tensor

from verbatim.compat.batches import append_rows
from verbatim.compat.coati.arguments import GenerateArguments
from verbatim.compat.coati.engines import engine_for, pad_of
from verbatim.core import FinishReason, Request, Result
from verbatim.engine.handle import EngineHandle
from verbatim.engine.lockstep import run_together
from verbatim.errors import RequestFailed
from verbatim.placement.hooked import Hooks
from verbatim.placement.wrapped import unwrap


class GenerateCall:
    """The admitted rows of one `generate`; invalid rows are refused when this is built.

    Call one of `whole`, `run_in_lockstep` and `pieces`, once.
    """

    def __init__(self, model: Any, args: GenerateArguments, hooks: Hooks | None) -> None:
        self._llm, self._owns_engine, args = engine_for(model, args, hooks)
        self._ask = args
        self._pad = pad_of(unwrap(model) if self._owns_engine else self._llm, args)
        self._requests: list[Request] = []
        try:
            if args.new_tokens:
                params = args.params(self._llm.engine.admission.vocab_size)
                self._requests = self._llm._admit_rows(args.prompts, params)
        except BaseException:
            self._end()
            raise

    @classmethod
    def run_in_lockstep(cls, begin: Callable[[], GenerateCall], group: Any) -> Tensor:
        """Run the call that `begin` returns, with equally many forwards on all ranks of `group`."""
        call: GenerateCall | None = None

        def start() -> tuple[EngineHandle, list[Request]]:
            nonlocal call
            call = begin()
            return call._llm.engine, call._requests

        try:
            results = run_together(start, group)
        finally:
            if call is not None:
                call._end()
        assert call is not None
        return call._output(results)

    def whole(self) -> Tensor:
        """Run all rows to their end."""
        with self._closing():
            return self._output(self._llm.engine.run(self._requests))

    def _output(self, results: list[Result]) -> Tensor:
        for row, result in enumerate(results):
            _check_whole(row, result.outputs[0].finish_reason)
        rows = [result.outputs[0].token_ids for result in results]
        return self._joined(rows, self._width(rows))

    def pieces(self) -> Generator[Tensor, None, None]:
        """Yield the whole tensor each time it has grown by the stream interval."""
        args, sent = self._ask, -1
        steps = cast("Generator[None]", self._llm.engine.steps(self._requests))
        with self._closing(), closing(steps):
            for _ in steps:
                rows, ready = self._progress()
                for width in _due(sent, ready, args.interval):
                    yield self._joined(rows, width)
                    sent = width
            if sent < ready:  # the end, between two intervals
                yield self._joined(rows, ready)

    @contextmanager
    def _closing(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._end()

    def _end(self) -> None:
        if self._owns_engine:
            self._llm.close()

    def _progress(self) -> tuple[list[list[int]], int]:
        """Return the new ids of each row, and the number of columns that are final."""
        for row, request in enumerate(self._requests):
            if request.error is not None:
                raise request.error
            _check_whole(row, request.sequences[0].finish_reason)
        sequences = [request.sequences[0] for request in self._requests]
        rows = [list(sequence.output_ids) for sequence in sequences]
        growing = [len(s.output_ids) for s in sequences if not s.finished]
        return rows, min(growing) if growing else self._width(rows)

    def _width(self, rows: list[list[int]]) -> int:
        """Return the number of new columns when all rows have ended."""
        return self._ask.new_tokens if self._ask.to_the_end else max(map(len, rows), default=0)

    def _joined(self, rows: list[list[int]], width: int) -> Tensor:
        return append_rows(self._ask.input_ids, rows, self._pad, width)


def _due(sent: int, ready: int, interval: int) -> range:
    """Return the widths of 1, 1 + k, 1 + 2k, ... that are ready and not yet sent."""
    first = 1 if sent < 1 else sent + interval
    return range(first, ready + 1, interval)


def _check_whole(row: int, reason: FinishReason | None) -> None:
    """Raise RequestFailed if the row was aborted, for example by closing a shared engine."""
    if reason is FinishReason.ABORT:
        raise RequestFailed(f"row {row} was ended from outside, by close() or pause('abort')")
