"""Batch runs: a file of requests in OpenAI's batch format, answered without HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from verbatim.errors import (
    EngineClosed,
    InvalidRequest,
    NotSupported,
    OutOfBlocks,
    QueueFull,
    StageFailed,
    TierFailed,
    VerbatimError,
)
from verbatim.files import lines_of
from verbatim.llm import LLM
from verbatim.params import MAX_N
from verbatim.serve.bodies import refusal_of_body
from verbatim.serve.chat import ChatRequest
from verbatim.serve.completions import CompletionRequest
from verbatim.serve.errors import Refusal, refusal_of
from verbatim.serve.fields import ChatCompletions, Completions
from verbatim.serve.records import Records, check_source
from verbatim.serve.responses import ResponsesRequest
from verbatim.serve.responses_fields import Responses
from verbatim.serve.service import Client, Service
from verbatim.serve.settings import ServeSettings

MAX_LINE_BYTES = 64 << 20
MAX_RESPONSE_BYTES = 1 << 30
_ENDPOINTS: dict[str, tuple[type[BaseModel], Callable[[Service, Any], Any]]] = {
    "/v1/completions": (Completions, CompletionRequest),
    "/v1/chat/completions": (ChatCompletions, ChatRequest),
    "/v1/responses": (Responses, ResponsesRequest),
}
_FIELDS = ("custom_id", "method", "url", "body")
_SKIPS = 1024  # skipped lines between two rounds of the event loop


@dataclass(frozen=True, slots=True)
class _Line:
    """A line with a valid request."""

    custom_id: str
    url: str
    body: dict[str, Any]
    nbytes: int


class _Fault(Exception):
    """A line without a valid request; `custom_id` is None if missing or not unique."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code, self.custom_id = code, custom_id


class BatchRun:
    """Answers the lines of `source` that have no answer in `records` yet.

    An invalid or refused line gets an error record, and the run continues.
    Every answer equals that of `verbatim serve`, with the tokens of a request run alone.

    Args:
        name: model name in the requests; None takes the engine's.
        in_flight: maximum requests read and not yet answered; None: twice `max_sequences`.

    Attributes:
        num_bytes: size of the source.
        bytes_done: size of the lines answered now or before.
        num_skipped: lines answered by earlier runs.
        num_done: lines answered by this run.

    Raises:
        InvalidRequest: `in_flight` out of range, or a source that is not a regular file.
        NotSupported: an engine driven by all ranks together.
        VerbatimError: the source can't be read.
    """

    def __init__(
        self,
        llm: LLM,
        source: str | os.PathLike[str],
        records: Records,
        *,
        name: str | None = None,
        in_flight: int | None = None,
    ) -> None:
        if llm.engine.collective is not None:
            raise NotSupported("a batch for an engine driven by every rank; use Cluster(...)")
        scheduler = llm.engine.scheduler
        self.in_flight = 2 * scheduler.max_sequences if in_flight is None else in_flight
        if self.in_flight < 1:
            raise InvalidRequest(f"in_flight={in_flight}: must be 1 or more")
        settings = ServeSettings(
            name=name,
            max_requests=self.in_flight,
            max_choices=MAX_N,
            max_response_bytes=MAX_RESPONSE_BYTES,
            negative_priorities=True,
        )
        self.service = Service(llm, settings)
        self.source = check_source(source)
        if records.path.samefile(self.source):
            raise InvalidRequest(f"{source}: answers can't be written to the request file")
        self.records = records
        self.num_bytes = self.source.stat().st_size
        self.bytes_done = self._bytes_skipped = 0
        self.num_skipped = self.num_done = 0
        self._begin = time.perf_counter()
        self._tokens_before = llm.engine.num_tokens
        self._seen: set[str] = set()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._begin

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far, including those of unfinished answers."""
        return self.service.llm.engine.num_tokens - self._tokens_before

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds left, at the speed so far; None before the first answer."""
        worked = self.bytes_done - self._bytes_skipped
        if not worked:
            return None
        return (self.num_bytes - self.bytes_done) * self.seconds / worked

    async def run(self, on_record: Callable[[], object] = lambda: None) -> None:
        """Answer all lines. Cancelling it aborts running requests, and keeps written records.

        Args:
            on_record: called after each record.

        Raises:
            VerbatimError: the engine failed, or the records can't be written. Running requests then have
                no record, so another run answers them.
        """
        gate = asyncio.Semaphore(self.in_flight)

        async def answer(line: _Line) -> None:
            try:
                status, body = await self._answer(line)
                self.records.answer(line.custom_id, status, body)
                self._count_done(line.nbytes, on_record)
            finally:
                gate.release()

        try:
            with open(self.source, "rb") as file:
                async with asyncio.TaskGroup() as group:
                    lines = enumerate(lines_of(file, MAX_LINE_BYTES), start=1)
                    for number, (text, nbytes) in lines:
                        if number % _SKIPS == 0:
                            await asyncio.sleep(0)
                        try:
                            line = self._line(number, text, nbytes)
                        except _Fault as fault:
                            if number in self.records.answered_lines:
                                self._skip(text, nbytes)
                                continue
                            message = f"line {number}: {fault}"
                            self.records.fault(fault.custom_id, fault.code, message, number)
                            self._count_done(nbytes, on_record)
                        else:
                            if line is None:
                                self._skip(text, nbytes)
                                continue
                            await gate.acquire()
                            group.create_task(answer(line))
        except BaseExceptionGroup as failed:
            error = _first(failed)
            if isinstance(error, OSError) and not isinstance(error, VerbatimError):
                error = VerbatimError(f"can't read {self.source}: {error.strerror}")
            raise error from None

    def _skip(self, text: bytes | None, nbytes: int) -> None:
        """Count a line that was answered before, or an empty one."""
        self.num_skipped += text is None or bool(text.strip())
        self._bytes_skipped += nbytes
        self.bytes_done += nbytes

    def _count_done(self, nbytes: int, on_record: Callable[[], object]) -> None:
        self.bytes_done += nbytes
        self.num_done += 1
        on_record()

    def _line(self, number: int, text: bytes | None, nbytes: int) -> _Line | None:
        """Parse a line; return None if it is empty or has a record already.

        Raises:
            _Fault: the line is not a valid request.
        """
        if text is None:
            raise _Fault("invalid_line", f"longer than {MAX_LINE_BYTES} bytes")
        if number == 1:
            text = text.removeprefix(b"\xef\xbb\xbf")
        if not text.strip():
            return None
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            why = str(error) if isinstance(error, json.JSONDecodeError) else "it can't be read"
            raise _Fault("invalid_line", f"not JSON: {why}") from None
        if not isinstance(fields, dict):
            raise _Fault("invalid_line", f"must be a JSON object, with {', '.join(_FIELDS)}")
        custom_id = fields.get("custom_id")
        if not isinstance(custom_id, str) or not custom_id:
            raise _Fault("invalid_line", f"custom_id={custom_id!r:.80}: must be a string")
        custom_id = custom_id.encode(errors="replace").decode()  # as it is written and read back
        if custom_id in self._seen:
            raise _Fault("duplicate_custom_id", "an earlier line has this custom_id", custom_id)
        self._seen.add(custom_id)
        if custom_id in self.records.done:
            return None
        return self._checked(fields, custom_id, nbytes)

    def _checked(self, fields: dict[str, Any], custom_id: str, nbytes: int) -> _Line:
        unknown = next((name for name in fields if name not in _FIELDS), None)
        if unknown is not None:
            message = f"{unknown!r:.80}: unsupported field; allowed are {', '.join(_FIELDS)}"
            raise _Fault("invalid_request", message, custom_id)
        method, url, body = (fields.get(name) for name in _FIELDS[1:])
        if method != "POST":
            raise _Fault("invalid_method", f"method={method!r:.80}: must be 'POST'", custom_id)
        if not isinstance(url, str) or url not in _ENDPOINTS:
            allowed = ", ".join(_ENDPOINTS)
            raise _Fault("invalid_url", f"url={url!r:.80}: must be one of {allowed}", custom_id)
        if not isinstance(body, dict):
            raise _Fault("invalid_request", "body must be a JSON object", custom_id)
        return _Line(custom_id, url, body, nbytes)

    async def _answer(self, line: _Line) -> tuple[int, dict[str, Any]]:
        """Return the status and the body of a response."""
        model, handler = _ENDPOINTS[line.url]
        try:
            try:
                fields = {"model": self.service.name} | line.body
                body: Any = model.model_validate(fields)
            except ValidationError as error:
                raise refusal_of_body(error.errors(), model) from None
            if body.stream:
                raise Refusal(400, "stream: not supported in a batch", param="stream")
            return 200, await handler(self.service, body).answer(Client())
        except (EngineClosed, StageFailed, TierFailed):
            raise  # affects all requests
        except Exception as error:
            refusal = _refusal(error)
            return refusal.status_code, refusal.body()


_EXPECTED = (Refusal, InvalidRequest, NotSupported, QueueFull, OutOfBlocks)


def _refusal(error: Exception) -> Refusal:
    """Return the server's error response, but with the message of unexpected errors, too."""
    if isinstance(error, _EXPECTED):
        return refusal_of(error)
    return Refusal(500, f"{type(error).__name__}: {error}")


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
