"""Responses, whole or streamed, that are cancelled when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.concurrency import iterate_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from verbatim.serve.errors import (
    JSON,
    PIECE_BYTES,
    ClientGone,
    json_pieces,
    refusal_of,
    to_bytes,
)

T = TypeVar("T")
# Events as `data: {...}`, with an `event: name` line if named, as in /v1/responses.
Event = dict[str, Any] | tuple[str, dict[str, Any]]
DONE = b"data: [DONE]\n\n"


async def while_there(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of `work`; cancel it when the client disconnects.

    Raises:
        ClientGone: the client disconnected.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
            with suppress(BaseException):  # the result of a cancelled task is not used
                await each


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def answered(http: HttpRequest, work: Awaitable[dict[str, Any]]) -> Response:
    """Return a JSON response, encoded and sent in pieces if it is large."""
    pieces = json_pieces(await while_there(http.receive, work))
    first = next(pieces)
    if len(first) < PIECE_BYTES:
        return Response(first, media_type=JSON)
    return _PiecewiseResponse(_chain(first, pieces, http.app.state.service.trim_soon), http, JSON)


async def streamed(
    http: HttpRequest, events: AsyncGenerator[Event, None], *, done: bool = True
) -> Response:
    """Return a stream of events. An error before the first one has its own status.

    Args:
        done: end with `[DONE]`, as OpenAI's older endpoints do.
    """
    try:
        first = await while_there(http.receive, anext(events))
    except BaseException:
        await events.aclose()
        raise
    return _PiecewiseResponse(_lines(first, events, done), http, "text/event-stream")


class _PiecewiseResponse(Response):
    """A response sent in pieces, until the client disconnects."""

    def __init__(
        self, pieces: AsyncGenerator[bytes, None], http: HttpRequest, media_type: str
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type=media_type)
        del self.headers["content-length"]
        self._pieces = pieces
        self._on_gone = http.app.state.service.metrics.left.inc

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._pieces):
            try:
                await while_there(receive, self._write(send))
            except ClientGone:
                self._on_gone()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _chain(
    first: bytes, rest: Iterator[bytes], on_end: Callable[[], None]
) -> AsyncGenerator[bytes, None]:
    try:
        yield first
        async for piece in iterate_in_threadpool(rest):
            yield piece
    finally:
        on_end()


async def _lines(
    first: Event, events: AsyncGenerator[Event, None], done: bool
) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        try:
            for line in _line(first):
                yield line
            async for event in events:
                for line in _line(event):
                    yield line
        except Exception as error:
            body = refusal_of(error).body()
            yield next(_line(body if done else ("error", body)))
        else:
            if done:
                yield DONE


def _line(event: Event) -> Iterator[bytes]:
    """Yield an event in pieces, nearly always in one."""
    if not isinstance(event, tuple):
        yield b"data: " + to_bytes(event) + b"\n\n"
        return
    name, content = event
    line = b"event: " + name.encode() + b"\ndata: "
    for piece in json_pieces(content):
        if len(line) >= PIECE_BYTES:
            yield line
            line = b""
        line += piece
    yield line + b"\n\n"
