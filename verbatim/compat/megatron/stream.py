"""`AsyncStream`: a request's partial results, for one reader in an event loop."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any

from verbatim.compat.megatron.request import InferenceRequest
from verbatim.engine.calls import TaskWaiter
from verbatim.errors import InvalidRequest


class AsyncStream:
    """Partial results as they come; `put` and `finish` may be called from any thread.

    Args:
        request_id: of the request it belongs to.
        cancel: called when the reader leaves before the end, with the request's id if it takes one.
        loop: the event loop it will be read in; None leaves that open.
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
        self._waiter: TaskWaiter | None = None
        self._finished = False

    def put(self, item: InferenceRequest | Exception) -> None:
        """Add a partial result, or an exception that the reader is to raise. After the end, nothing."""
        if not self._finished:
            self._items.append(item)
            self._tell()

    def finish(self, exception: BaseException | type[BaseException] | None = None) -> None:
        """The last call: the reader gets what is left, and then the exception if there is one."""
        if self._finished:
            return
        if exception is not None:
            self._items.append(exception() if isinstance(exception, type) else exception)
        self._finished = True
        self._tell()

    @property
    def finished(self) -> bool:
        """Nothing more will be put."""
        return self._finished

    async def generator(self) -> AsyncGenerator[InferenceRequest, None]:
        """What was put and what is yet to come. Leaving early cancels the request.

        Raises:
            InvalidRequest: read in another event loop than the one it was made for.
        """
        if self._loop is not None and self._loop is not asyncio.get_running_loop():
            raise InvalidRequest(
                f"the stream of request {self._request_id} was made for another event loop"
            )
        self._waiter = TaskWaiter()
        try:
            while True:
                finished = self._finished  # before it is emptied: afterwards nothing comes
                while self._items:
                    item = self._items.popleft()
                    if isinstance(item, BaseException):
                        raise item
                    yield item
                if finished:
                    return
                await self._waiter.wait()
        except (GeneratorExit, asyncio.CancelledError):
            if not self._finished:
                self._finished = True
                self._tell_caller()
            raise
        finally:
            self._waiter = None

    def _tell(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            waiter.wake()

    def _tell_caller(self) -> None:
        try:
            inspect.signature(self._cancel).bind(self._request_id)
        except (TypeError, ValueError):
            self._cancel()
        else:
            self._cancel(self._request_id)
