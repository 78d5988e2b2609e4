"""Responses, whole or streamed, that are cancelled when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, suppress
from typing import Any

from starlette.concurrency import iterate_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from verbatim.serve.errors import JSON, PIECE_BYTES, json_pieces, refusal_of, to_bytes

DONE = b"data: [DONE]\n\n"


def json_response(http: Request, ask: Callable[[], Awaitable[dict[str, Any]]]) -> Response:
    """Return a JSON response, encoded and sent in pieces if it is large."""
    return _CancellableResponse(http, _encoded_answer(ask, http.app.state.service.trim_soon), JSON)


def event_response(
    http: Request, events: AsyncGenerator[dict[str, Any], None], *, done: bool = True
) -> Response:
    """Return a stream of events.

    With `done`, it ends with `[DONE]`, as in OpenAI's older endpoints; otherwise events are named by type.
    """
    return _CancellableResponse(http, _encoded_events(events, done), "text/event-stream")


class _CancellableResponse(Response):
    """A response that is computed while it is sent, and cancelled when the client disconnects.

    An error before the first piece is sent sets the response's status.
    """

    def __init__(self, http: Request, pieces: AsyncGenerator[bytes, None], media_type: str) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type=media_type)
        del self.headers["content-length"]
        self._pieces = pieces
        self._on_disconnect = http.app.state.service.metrics.disconnected.inc

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def until_disconnect() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        write = asyncio.ensure_future(self._write(scope, receive, send))
        watch = asyncio.ensure_future(until_disconnect())
        async with aclosing(self._pieces):
            try:
                await asyncio.wait({write, watch}, return_when=asyncio.FIRST_COMPLETED)
                if write.done():
                    write.result()
                else:
                    self._on_disconnect()
            finally:
                for task in (write, watch):
                    task.cancel()
                    with suppress(BaseException):  # the result of a cancelled task is not used
                        await task

    async def _write(self, scope: Scope, receive: Receive, send: Send) -> None:
        piece = await anext(self._pieces)
        if self.media_type == JSON and len(piece) < PIECE_BYTES:
            await Response(piece, media_type=JSON)(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        async for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _encoded_answer(
    ask: Callable[[], Awaitable[dict[str, Any]]], on_large: Callable[[], None]
) -> AsyncGenerator[bytes, None]:
    pieces = json_pieces(await ask())
    piece = next(pieces)
    yield piece
    if len(piece) >= PIECE_BYTES:
        try:
            async for piece in iterate_in_threadpool(pieces):
                yield piece
        finally:
            on_large()


async def _encoded_events(
    events: AsyncGenerator[dict[str, Any], None], done: bool
) -> AsyncGenerator[bytes, None]:
    begun = False
    async with aclosing(events):
        try:
            async for event in events:
                for piece in _encoded_event(event, named=not done):
                    begun = True
                    yield piece
        except Exception as error:
            if not begun:
                raise
            yield next(_encoded_event(refusal_of(error).body(), named=not done))
        else:
            if done:
                yield DONE


def _encoded_event(event: dict[str, Any], *, named: bool) -> Iterator[bytes]:
    """Return the pieces of an encoded event, nearly always one."""
    if named and "type" in event:
        return json_pieces(event, f"event: {event['type']}\ndata: ".encode(), b"\n\n")
    return iter([b"data: " + to_bytes(event) + b"\n\n"])
