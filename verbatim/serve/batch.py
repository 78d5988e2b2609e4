"""Batch runs: a file of requests in OpenAI's batch format, answered without HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from verbatim.api.llm import LLM
from verbatim.common.checks import integer
from verbatim.common.files import lines_of
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
from verbatim.params import MAX_N
from verbatim.serve.bodies import model_of, refusal_of_body
from verbatim.serve.chat import ChatRequest
from verbatim.serve.completions import CompletionRequest
from verbatim.serve.errors import RETRY_AFTER_S, Refusal, refusal_of
from verbatim.serve.fields import Strict
from verbatim.serve.records import Records
from verbatim.serve.responses import ResponsesRequest
from verbatim.serve.service import Client, Service
from verbatim.serve.settings import ServeSettings

MAX_LINE_BYTES = 64 << 20
MAX_RESPONSE_BYTES = 1 << 30
_ENDPOINTS: dict[str, Callable[[Service, Any], Any]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
}
_CODES = {"method": "invalid_method", "url": "invalid_url"}
_LINES_PER_YIELD = 1024  # lines between two yields to the event loop


class _Line(Strict):
    """A line with a valid request."""

    custom_id: str
    method: Literal["POST"]
    url: Literal["/v1/completions", "/v1/chat/completions", "/v1/responses"]
    body: dict[str, Any]


class _InvalidLine(NamedTuple):
    """A line without a valid request; `custom_id` is None if missing or not unique."""

    code: str
    message: str
    custom_id: str | None = None


class BatchRun:
    """Answers the requests that have no answer in `records` yet.

    An invalid or refused line gets an error record, and the run continues. A line that is refused only until
    others have finished is tried again. Answers equal those of `verbatim serve`.

    Args:
        name: model name in the requests; None takes the engine's.
        in_flight: maximum requests read and not yet answered; None: twice `max_sequences`.

    Attributes:
        num_bytes: size of the request file.
        bytes_done: size of the lines answered now or before.
        bytes_skipped: size of the lines answered before.
        num_skipped: lines answered by earlier runs.
        num_done: lines answered by this run.

    Raises:
        InvalidRequest: `in_flight` out of range.
        NotSupported: an engine that several ranks of the caller drive together.
    """

    def __init__(
        self,
        llm: LLM,
        records: Records,
        *,
        name: str | None = None,
        in_flight: int | None = None,
    ) -> None:
        default = 2 * llm.engine.scheduler.max_sequences
        self.in_flight = default if in_flight is None else integer("in_flight", in_flight)
        settings = ServeSettings(
            name=name,
            max_requests=self.in_flight,
            max_choices=MAX_N,
            max_response_bytes=MAX_RESPONSE_BYTES,
            negative_priorities=True,
        )
        self.service = Service(llm, settings)
        self.records = records
        self.num_bytes = records.source.stat().st_size
        self.bytes_done = self.bytes_skipped = 0
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

    async def run(self, on_record: Callable[[], object] = lambda: None) -> None:
        """Answer all lines; `on_record` is called after each. Cancelling aborts requests, but keeps records.

        Raises:
            VerbatimError: the engine failed, or the records can't be written. Running requests then have
                no record, so another run answers them.
        """
        gate = asyncio.Semaphore(self.in_flight)

        async def answer(line: _Line, nbytes: int) -> None:
            try:
                status, body = await self._answer(line)
                self.records.answer(line.custom_id, status, body)
                self._count_done(nbytes, on_record)
            finally:
                gate.release()

        try:
            with open(self.records.source, "rb") as file:
                async with asyncio.TaskGroup() as group:
                    lines = enumerate(lines_of(file, MAX_LINE_BYTES), start=1)
                    for number, (text, nbytes) in lines:
                        if number % _LINES_PER_YIELD == 0:
                            await asyncio.sleep(0)
                        line = self._line(number, text)
                        if isinstance(line, _Line):
                            await gate.acquire()
                            group.create_task(answer(line, nbytes))
                        # Answered before, or empty.
                        elif line is None or number in self.records.answered_lines:
                            self.num_skipped += text is None or bool(text.strip())
                            self.bytes_skipped += nbytes
                            self.bytes_done += nbytes
                        else:
                            message = f"line {number}: {line.message}"
                            self.records.fault(line.custom_id, line.code, message, number)
                            self._count_done(nbytes, on_record)
        except BaseExceptionGroup as failed:
            error = failed.exceptions[0]
            if isinstance(error, OSError) and not isinstance(error, VerbatimError):
                error = VerbatimError(f"can't read {self.records.source}: {error.strerror}")
            raise error from None
        finally:
            self.service.close()

    def _count_done(self, nbytes: int, on_record: Callable[[], object]) -> None:
        self.bytes_done += nbytes
        self.num_done += 1
        on_record()

    def _line(self, number: int, text: bytes | None) -> _Line | _InvalidLine | None:
        """Parse a line; return None if it is empty or has a record already."""
        if text is None:
            return _InvalidLine("invalid_line", f"longer than {MAX_LINE_BYTES} bytes")
        if number == 1:
            text = text.removeprefix(b"\xef\xbb\xbf")
        if not text.strip():
            return None
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            why = str(error) if isinstance(error, json.JSONDecodeError) else "it can't be read"
            return _InvalidLine("invalid_line", f"not JSON: {why}")
        if not isinstance(fields, dict):
            names = ", ".join(_Line.model_fields)
            return _InvalidLine("invalid_line", f"must be a JSON object, with {names}")
        custom_id = fields.get("custom_id")
        if not isinstance(custom_id, str) or not custom_id:
            return _InvalidLine("invalid_line", f"custom_id={custom_id!r:.80}: must be a string")
        custom_id = custom_id.encode(errors="replace").decode()  # as it is written and read back
        if custom_id in self._seen:
            return _InvalidLine(
                "duplicate_custom_id", "an earlier line has this custom_id", custom_id
            )
        self._seen.add(custom_id)
        if custom_id in self.records.done:
            return None
        try:
            return _Line.model_validate(fields | {"custom_id": custom_id})
        except ValidationError as error:
            refusal = refusal_of_body(error.errors(), _Line)
            code = _CODES.get(refusal.param or "", "invalid_request")
            return _InvalidLine(code, refusal.message, custom_id)

    async def _answer(self, line: _Line) -> tuple[int, dict[str, Any]]:
        """Return the status and the body of a response."""
        handler = _ENDPOINTS[line.url]
        model = model_of(handler)
        try:
            body: Any = model.model_validate({"model": self.service.name} | line.body)
            if body.stream:
                raise Refusal(400, "stream: not supported in a batch", param="stream")
            return 200, await self._wait_and_answer(handler(self.service, body))
        except (EngineClosed, StageFailed, TierFailed):
            raise  # affects all requests
        except ValidationError as error:
            refusal = refusal_of_body(error.errors(), model)
        except (Refusal, InvalidRequest, NotSupported, QueueFull, OutOfBlocks) as error:
            refusal = refusal_of(error)
        except Exception as error:  # with its message, which the server would hide
            refusal = Refusal(500, f"{type(error).__name__}: {error}")
        return refusal.status_code, refusal.body()

    async def _wait_and_answer(self, request: Any) -> dict[str, Any]:
        """Return the answer to an `ApiRequest`; retry while other requests use up the limits."""
        while True:
            try:
                answer: dict[str, Any] = await request.answer(Client())
                return answer
            except (Refusal, QueueFull, OutOfBlocks) as error:
                if refusal_of(error).status_code != 429 or not self.service.num_in_progress:
                    raise
            await asyncio.sleep(RETRY_AFTER_S)
