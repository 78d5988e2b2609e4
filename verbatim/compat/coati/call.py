"""One call: its rows on their engine, and their ids as tensors."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from typing import Any, cast

from torch import Tensor

from verbatim.compat.coati.arguments import Ask
from verbatim.compat.coati.engines import engine_for, pad_of
from verbatim.core import FinishReason, Request, Result
from verbatim.engine.handle import EngineHandle
from verbatim.engine.lockstep import run_together
from verbatim.errors import RequestFailed
from verbatim.placement.hooked import Hooks
from verbatim.placement.wrapped import unwrap


class Call:
    """The rows of one `generate`, admitted: what can be refused is refused here.

    One of `whole`, `together` and `pieces` may be called, once.
    """

    def __init__(self, model: Any, ask: Ask, hooks: Hooks | None) -> None:
        self._ask = ask
        self._llm, self._own = engine_for(model, ask, hooks)
        self._pad = pad_of(unwrap(model) if self._own else self._llm, ask)
        self._requests: list[Request] = []
        try:
            if ask.new_tokens:
                params = ask.params(self._llm.engine.admission.vocab_size)
                self._requests = self._llm._admit_rows(ask.prompts, params)
        except BaseException:
            self._end()
            raise

    @classmethod
    def together(cls, begin: Callable[[], Call], group: Any) -> Tensor:
        """All of what `begin` makes, with as many forwards as every other rank of `group` makes."""
        call: Call | None = None

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
        return call._made(results)

    def whole(self) -> Tensor:
        """All of it."""
        with self._open():
            return self._made(self._llm.engine.run(self._requests))

    def _made(self, results: list[Result]) -> Tensor:
        for row, result in enumerate(results):
            _check_whole(row, result.outputs[0].finish_reason)
        rows = [result.outputs[0].token_ids for result in results]
        return self._joined(rows, self._width(rows))

    def pieces(self) -> Generator[Tensor, None, None]:
        """The whole tensor, again and again, while it grows."""
        ask, sent = self._ask, -1
        steps = cast("Generator[None]", self._llm.engine.steps(self._requests))
        with self._open(), closing(steps):
            for _ in steps:
                rows, ready = self._so_far()
                for width in _due(sent, ready, ask.interval):
                    yield self._joined(rows, width)
                    sent = width
            if sent < ready:  # the end, between two pieces
                yield self._joined(rows, ready)

    @contextmanager
    def _open(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._end()

    def _end(self) -> None:
        if self._own:
            self._llm.close()

    def _so_far(self) -> tuple[list[list[int]], int]:
        """The new ids of each row, and how many columns of them are certain."""
        for row, request in enumerate(self._requests):
            if request.error is not None:
                raise request.error
            _check_whole(row, request.sequences[0].finish_reason)
        sequences = [request.sequences[0] for request in self._requests]
        rows = [list(sequence.output_ids) for sequence in sequences]
        growing = [len(s.output_ids) for s in sequences if not s.finished]
        return rows, min(growing) if growing else self._width(rows)

    def _width(self, rows: list[list[int]]) -> int:
        """New columns when all have ended."""
        return self._ask.new_tokens if self._ask.to_the_end else max(map(len, rows), default=0)

    def _joined(self, rows: list[list[int]], width: int) -> Tensor:
        return self._ask.joined(rows or [[] for _ in self._ask.prompts], width, self._pad)


def _due(sent: int, ready: int, interval: int) -> range:
    """The widths of 1, 1 + k, 1 + 2k, ... that were not sent and are ready."""
    first = 1 if sent < 1 else sent + interval
    return range(first, ready + 1, interval)


def _check_whole(row: int, reason: FinishReason | None) -> None:
    """An engine that is shared may be closed, or told to abort, by somebody else."""
    if reason is FinishReason.ABORT:
        raise RequestFailed(f"row {row} was ended from outside, by close() or pause('abort')")
