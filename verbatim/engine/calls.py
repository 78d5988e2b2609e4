"""The requests of one call to an engine, and the events that its caller waits for."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType

from verbatim.core import Delta, Request, Result
from verbatim.errors import RequestFailed, TierFailed


class ThreadWaiter:
    """An event that one thread waits for.

    Each method makes a single call into C, so neither Ctrl-C nor a finalizer run by the garbage collector can
    leave it locked, which they can do to a `threading.Event`.

    Attributes:
        thread: id of the thread that waits.
        first: whether it goes to the front of its queue: the background thread does.
    """

    __slots__ = ("_lock", "first", "thread")

    def __init__(self, *, first: bool = False) -> None:
        self.first = first
        self.thread = threading.get_ident()
        self._lock = threading.Lock()
        self._lock.acquire()

    def wake(self) -> None:
        """Wake the thread, or make its next `wait` return immediately; from any thread."""
        with suppress(RuntimeError):  # already woken
            self._lock.release()

    def wait(self, timeout_s: float = -1) -> None:
        """Wait to be woken, for at most `timeout_s` seconds if that is not -1."""
        self._lock.acquire(timeout=timeout_s)


class TaskWaiter:
    """An event that one coroutine waits for; created in its event loop."""

    __slots__ = ("event", "loop")

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.event = asyncio.Event()

    async def wait(self) -> None:
        """Wait to be woken."""
        await self.event.wait()
        self.event.clear()


Waiter = ThreadWaiter | TaskWaiter


def wake_all(waiters: Iterable[Waiter]) -> None:
    """Wake waiters. Each event loop is called once, since every call writes to the loop's pipe."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}
    for waiter in waiters:
        if isinstance(waiter, ThreadWaiter):
            waiter.wake()
        else:
            by_loop.setdefault(waiter.loop, []).append(waiter.event)
    for loop, events in by_loop.items():
        with suppress(RuntimeError):  # the loop is closed, so no coroutine waits in it
            loop.call_soon_threadsafe(_set_all, events)


def _set_all(events: list[asyncio.Event]) -> None:
    for event in events:
        event.set()


class Call:
    """The requests of one caller.

    Args:
        waiter: woken when all requests have ended, and after each step with deltas to keep.
        max_unread: maximum number of deltas to keep for `take`; those of one step are always kept. None: keep
            none.

    Attributes:
        keeps: whether deltas are kept.
        driven: whether the handle's background thread runs the steps, because the caller is a coroutine.
            False: the caller runs them.
        num_open: number of requests that have not ended.
        unread: the kept deltas.
    """

    def __init__(
        self,
        requests: list[Request],
        waiter: Waiter | None = None,
        max_unread: float | None = None,
    ) -> None:
        self.requests, self.waiter = requests, waiter
        self.unread: deque[Delta] = deque()
        max_per_step = sum(max(r.params.n, r.params.num_beams) for r in requests)
        self._max_unread = max(max_unread or 0, max_per_step)
        self.keeps = max_unread is not None
        self.driven = isinstance(waiter, TaskWaiter)
        self.num_open = len(requests)
        self._tracebacks: dict[Request, TracebackType | None] = {}

    def keep(self, delta: Delta) -> None:
        """Keep a delta; raise RequestFailed if `max_unread` are already kept."""
        if delta.result is None and len(self.unread) >= self._max_unread:
            raise RequestFailed(
                f"request {delta.request_id}: its stream was not read; {len(self.unread)} deltas wait, and "
                f"max_unread is {self._max_unread}"
            )
        self.unread.append(delta)

    def take(self) -> list[Delta]:
        """Remove and return the unread deltas."""
        return [self.unread.popleft() for _ in range(len(self.unread))]

    def end(self, request: Request) -> None:
        """Count an ended request, and keep its traceback."""
        self.num_open -= 1
        # One exception may fail several requests and is raised for each, so its traceback is kept.
        if request.error is not None:
            self._tracebacks[request] = request.error.__traceback__
        if request.on_end is not None:
            with suppress(BaseException):  # this thread may belong to another caller
                request.on_end()

    def raise_error(self) -> None:
        """Raise the first error of a request, if any; a TierFailed has the results of the ended requests."""
        for request in self.requests:
            if request in self._tracebacks and request.error is not None:
                error = request.error.with_traceback(self._tracebacks[request])
                if isinstance(error, TierFailed):
                    raise TierFailed(str(error), [r.result for r in self.requests]) from error
                raise error

    def results(self) -> list[Result]:
        """Return the results of the requests in order, after all have ended; or raise the first error."""
        self.raise_error()
        return [request.result for request in self.requests if request.result is not None]
