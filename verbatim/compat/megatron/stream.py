"""`AsyncStream`: a request's partial results, for one reader in an event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any

from verbatim.compat.batches import accepts
from verbatim.compat.megatron.request import InferenceRequest
from verbatim.errors import InvalidRequest


class AsyncStream:
    """A queue of partial results; `put` and `finish` may be called from any thread.

    Args:
        request_id: of the streamed request.
        cancel: called if the reader leaves before the end, with the request's id if it takes an argument.
        loop: the event loop of the reader; None allows any.
    """

    def __init__(
        self,
        request_id: int | str,
        cancel: Callable[..., Any],
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._request_id = request_id
        self._cancel = cancel
        self._loop = loop
        self._items: deque[InferenceRequest | BaseException] = deque()
        self._waiting: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._finished = False

    def put(self, item: InferenceRequest | Exception) -> None:
        """Add a partial result, or an exception for the reader; ignored after `finish`."""
        if not self._finished:
            self._items.append(item)
            self._wake_reader()

    @property
    def request_id(self) -> int | str:
        """The id of the streamed request."""
        return self._request_id

    def finish(self, exception: Any = None) -> None:
        """End the stream; the reader gets the remaining items, then the exception if there is one.

        Args:
            exception: an exception or a class of one; any other object ends the stream without an error.
        """
        if self._finished:
            return
        if isinstance(exception, type) and issubclass(exception, BaseException):
            exception = exception()
        if isinstance(exception, BaseException):
            self._items.append(exception)
        self._finished = True
        self._wake_reader()

    @property
    def finished(self) -> bool:
        """True once `finish` was called or the reader left."""
        return self._finished

    async def __anext__(self) -> InferenceRequest:
        """Return the next item; `aclose` ends a reader that reads so."""
        item = await self._next()
        if item is None:
            raise StopAsyncIteration
        return item

    async def aclose(self) -> None:
        """Stop reading: end the stream, and cancel its request unless it has ended."""
        self._leave()
        self._items.clear()
        self._wake_reader()

    def __aiter__(self) -> AsyncGenerator[InferenceRequest, None]:
        return self.generator()

    async def generator(self) -> AsyncGenerator[InferenceRequest, None]:
        """Yield the results as they arrive. Leaving early cancels the request.

        Raises:
            InvalidRequest: called in another event loop than `loop`.
        """
        try:
            while (item := await self._next()) is not None:
                yield item
        except GeneratorExit:
            self._leave()
            raise

    async def _next(self) -> InferenceRequest | None:
        """Wait for the next item; None at the end."""
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            raise InvalidRequest(
                f"the stream of request {self._request_id} was made for another event loop"
            )
        while True:
            news = asyncio.Event()
            self._waiting = loop, news
            # Read before the queue: nothing is added once it is set.
            finished = self._finished
            if self._items:
                item = self._items.popleft()
                if isinstance(item, BaseException):
                    raise item
                return item
            if finished:
                return None
            try:
                await news.wait()
            except asyncio.CancelledError:
                self._leave()
                raise

    def _wake_reader(self) -> None:
        if (waiting := self._waiting) is not None:
            loop, news = waiting
            with suppress(RuntimeError):  # the loop is closed, so no reader waits
                loop.call_soon_threadsafe(news.set)

    def _leave(self) -> None:
        """End the stream, and cancel its request unless it has ended."""
        if self._finished:
            return
        self._finished = True
        if accepts(self._cancel, self._request_id):
            self._cancel(self._request_id)
        else:
            self._cancel()
