"""Calls of an engine: waiters, and the requests of a call."""

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
    leave it locked, as they can a `threading.Event`.

    Attributes:
        thread: the thread that waits.
        first: served before other waiters.
    """

    __slots__ = ("_lock", "first", "thread")

    def __init__(self, *, first: bool = False) -> None:
        self.first = first
        self.thread = threading.get_ident()
        self._lock = threading.Lock()
        self._lock.acquire()

    def wake(self) -> None:
        """Wake the thread, or let its next `wait` return at once; from any thread."""
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
        waiter: woken when all of them have ended, and after each step whose deltas are kept.
        max_unread: keep the deltas for `take`, up to this number, but always those of one step. None: keep
            none.

    Attributes:
        keeps: deltas are kept.
        driven: a coroutine waits, so the handle's background thread runs the steps. False: the caller runs
            them.
        num_open: requests that have not ended.
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
        at_once = sum(max(r.params.n, r.params.num_beams) for r in requests)
        self._max_unread = max(max_unread or 0, at_once)
        self.keeps = max_unread is not None
        self.driven = isinstance(waiter, TaskWaiter)
        self.num_open = len(requests)
        self._tracebacks: dict[Request, TracebackType | None] = {}

    def keep(self, delta: Delta) -> None:
        """Keep a delta.

        Raises:
            RequestFailed: `max_unread` deltas are kept.
        """
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
        # One exception may end several requests, each of which raises it.
        if request.error is not None:
            self._tracebacks[request] = request.error.__traceback__
        if request.on_end is not None:
            with suppress(BaseException):  # this thread may belong to another caller
                request.on_end()

    def raise_error(self) -> None:
        """Raise the error of the first request that failed, if one did.

        Raises:
            TierFailed: with the results of the requests that had ended before.
        """
        for request in self.requests:
            if request in self._tracebacks and request.error is not None:
                error = request.error.with_traceback(self._tracebacks[request])
                if isinstance(error, TierFailed):
                    raise TierFailed(str(error), [r.result for r in self.requests]) from error
                raise error

    def results(self) -> list[Result]:
        """Return the results in the order of the requests, all of which have ended; or raise an error."""
        self.raise_error()
        return [request.result for request in self.requests if request.result is not None]


def as_exception(error: BaseException) -> Exception:
    """Return a step's error as other callers get it: an Exception, which wraps SystemExit and the like."""
    if isinstance(error, Exception):
        return error
    failed = RequestFailed(f"the step was interrupted by {error!r}")
    failed.__cause__ = error
    return failed
