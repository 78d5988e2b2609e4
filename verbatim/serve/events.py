"""Answers that are given up when nobody waits for them any more, whole or event by event."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from verbatim.serve.errors import ClientGone, Json, refusal_of, to_bytes

T = TypeVar("T")
# Events as `data: {...}`; a name makes it `event: name` besides, as /v1/responses has them.
Event = dict[str, Any] | tuple[str, dict[str, Any]]
DONE = b"data: [DONE]\n\n"


async def while_there(receive: Receive, work: Awaitable[T]) -> T:
    """What `work` gives; it is cancelled when the client goes away.

    Raises:
        ClientGone: it did.
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
            with suppress(BaseException):  # of what was cancelled, and nobody waits for
                await each


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def answered(http: HttpRequest, work: Awaitable[dict[str, Any]]) -> Response:
    """One JSON answer."""
    return Json(await while_there(http.receive, work))


async def streamed(
    http: HttpRequest, events: AsyncGenerator[Event, None], *, done: bool = True
) -> Response:
    """Events as they come. What goes wrong before the first one still has a status of its own.

    Args:
        done: end with `[DONE]`, as OpenAI's older endpoints do.
    """
    try:
        first = await while_there(http.receive, anext(events))
    except BaseException:
        await events.aclose()
        raise
    service = http.app.state.service
    return _Events(first, events, done, service.settings.read_timeout_s, service.metrics.left.inc)


class _Events(Response):
    media_type = "text/event-stream"

    def __init__(
        self,
        first: Event,
        rest: AsyncGenerator[Event, None],
        done: bool,
        patience_s: float,
        on_gone: Callable[[], None],
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first, self._rest, self._done = first, rest, done
        self._patience_s = patience_s
        self._on_gone = on_gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._rest):
            try:
                await while_there(receive, self._write(send))
            except ClientGone:
                self._on_gone()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await self._send(send, _line(self._first))
            async for event in self._rest:
                await self._send(send, _line(event))
        except ClientGone:
            raise
        except Exception as error:
            await self._send(send, _line(refusal_of(error).body()))
        else:
            if self._done:
                await self._send(send, DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, body: bytes) -> None:
        """Returns when there is room for more; whoever reads nothing counts as gone."""
        try:
            async with asyncio.timeout(self._patience_s):
                await send({"type": "http.response.body", "body": body, "more_body": True})
        except TimeoutError:
            raise ClientGone from None


def _line(event: Event) -> bytes:
    if isinstance(event, tuple):
        return b"event: " + event[0].encode() + b"\ndata: " + to_bytes(event[1]) + b"\n\n"
    return b"data: " + to_bytes(event) + b"\n\n"
