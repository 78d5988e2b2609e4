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
        self._reader: AsyncGenerator[InferenceRequest, None] | None = None  # of `__anext__`
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
        if self._reader is None:
            self._reader = self.generator()
        return await anext(self._reader)

    async def aclose(self) -> None:
        """Stop reading: end the stream, and cancel its request unless it has ended."""
        reader = self._reader or self.generator()
        if not self._finished:
            self._finished = True
            self._cancel_request()
        self._items.clear()
        await reader.aclose()

    def __aiter__(self) -> AsyncGenerator[InferenceRequest, None]:
        return self.generator()

    async def generator(self) -> AsyncGenerator[InferenceRequest, None]:
        """Yield the results as they arrive. Leaving early cancels the request.

        Raises:
            InvalidRequest: called in another event loop than `loop`.
        """
        if self._loop is not None and self._loop is not asyncio.get_running_loop():
            raise InvalidRequest(
                f"the stream of request {self._request_id} was made for another event loop"
            )
        news = asyncio.Event()
        self._waiting = asyncio.get_running_loop(), news
        try:
            while True:
                # Read before emptying the queue: nothing is added once it is set.
                finished = self._finished
                while self._items:
                    item = self._items.popleft()
                    if isinstance(item, BaseException):
                        raise item
                    yield item
                if finished:
                    return
                await news.wait()
                news.clear()
        except (GeneratorExit, asyncio.CancelledError):
            if not self._finished:
                self._finished = True
                self._cancel_request()
            raise
        finally:
            self._waiting = None

    def _wake_reader(self) -> None:
        if (waiting := self._waiting) is not None:
            loop, news = waiting
            with suppress(RuntimeError):  # the loop is closed, so no reader waits
                loop.call_soon_threadsafe(news.set)

    def _cancel_request(self) -> None:
        if accepts(self._cancel, self._request_id):
            self._cancel(self._request_id)
        else:
            self._cancel()
