"""Waiting of callers for an engine, and waking them."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any

from verbatim.core import Delta, Request, Result
from verbatim.errors import RequestFailed, TierFailed

_LONGEST_WAIT_S = 3600.0  # the platform limits the timeout of a lock; callers look and wait again


class ThreadWaiter:
    """Lets one thread wait for an event.

    Each method makes a single call into C. Neither Ctrl-C nor a finalizer that the garbage collector runs in
    the middle can leave it locked, as they can a `threading.Event`.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def wake(self) -> None:
        """Wake the thread, or let its next `wait` return at once; from any thread."""
        with suppress(RuntimeError):  # it was woken already
            self._lock.release()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait to be woken; False after `timeout_s` seconds without."""
        seconds = _LONGEST_WAIT_S if timeout_s is None else min(timeout_s, _LONGEST_WAIT_S)
        return self._lock.acquire(timeout=max(0.0, seconds))


class TaskWaiter:
    """Lets one coroutine wait for an event; made in its event loop."""

    __slots__ = ("event", "loop")

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.event = asyncio.Event()

    def wake(self) -> None:
        """Wake the coroutine; from any thread. Does nothing once its event loop is closed."""
        wake_all([self])

    async def wait(self, timeout_s: float | None = None) -> None:
        """Wait to be woken, for at most `timeout_s` seconds."""
        if timeout_s is None:
            await self.event.wait()
        else:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.event.wait(), timeout_s)
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
        waiter: woken when all of them have ended and, with `deliver`, after each step that added to one.
        deliver: gets their deltas in the thread that makes the steps; an exception ends the request. None:
            the deltas are not read.
        driven: the engine's own thread makes steps until they have ended; else the caller does.

    Attributes:
        num_open: requests that have not ended.
    """

    def __init__(
        self,
        requests: list[Request],
        waiter: Waiter | None = None,
        *,
        deliver: Callable[[Delta], None] | None = None,
        driven: bool = True,
    ) -> None:
        self.requests, self.waiter, self.deliver = requests, waiter, deliver
        self.driven = driven
        self.num_open = len(requests)
        self._tracebacks: dict[Request, TracebackType | None] = {}

    def end(self, request: Request) -> None:
        """Note that a request has ended."""
        self.num_open -= 1
        # One exception may end several requests, each of which raises it.
        if request.error is not None:
            self._tracebacks[request] = request.error.__traceback__
        if request.on_end is not None:
            with suppress(BaseException):  # the thread that makes the steps is not its caller's
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
        """Return the results in the order of the requests, once all have ended; or raise."""
        self.raise_error()
        return [request.result for request in self.requests if request.result is not None]


class Job:
    """Work for the thread that owns the engine, on behalf of a caller who waits."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._caller = threading.get_ident()
        self._waiter = ThreadWaiter()
        self._begun = self._cancelled = self._done = self._returned = False
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do it, unless it was cancelled."""
        if self._cancelled:
            return
        self._begun = True
        try:
            self._result = self._work()
        except KeyboardInterrupt as error:
            # Ctrl-C in this thread, which may be another one than the caller's.
            if threading.get_ident() != self._caller:
                self._begun, self._returned = False, True
                self._waiter.wake()
                raise
            self._error = error
        except BaseException as error:
            own = threading.get_ident() == self._caller
            self._error = error if own else as_exception(error)
        self._done = True
        self._waiter.wake()

    def returned(self) -> bool:
        """Return whether it was interrupted in another thread, and has to be sent again."""
        returned, self._returned = self._returned, False
        return returned

    def cancel(self) -> bool:
        """Don't do it any more; return False if it has begun."""
        self._cancelled = True
        return not self._begun

    def wake(self) -> None:
        """Let the caller look if it can do it itself."""
        self._waiter.wake()

    def wait(self, timeout_s: float) -> bool:
        """Wait to be woken, for some time; return whether it is done."""
        if not self._done:
            self._waiter.wait(timeout_s)
        return self._done

    def finish(self) -> None:
        """Wait until work that has begun is done, or has come back."""
        while self._begun and not self._done:
            self._waiter.wait()

    def result(self) -> Any:
        """Return what it returned, or raise what it raised."""
        if self._error is not None:
            raise self._error
        return self._result


def as_exception(error: BaseException) -> Exception:
    """Return what other callers get for an error of a step: never another thread's exit."""
    if isinstance(error, Exception):
        return error
    failed = RequestFailed(f"the step was broken off by {error!r}")
    failed.__cause__ = error
    return failed


class Unread:
    """The deltas of a stream that its reader has not taken yet.

    Args:
        limit: deltas that may be unread; at least what a step can bring is allowed.
    """

    def __init__(self, requests: list[Request], limit: int) -> None:
        self._deltas: deque[Delta] = deque()
        self._limit = max(limit, sum(max(r.params.n, r.params.num_beams) for r in requests))

    def put(self, delta: Delta) -> None:
        """Add a delta.

        Raises:
            RequestFailed: too many are unread.
        """
        if delta.result is None and len(self._deltas) >= self._limit:
            raise RequestFailed(
                f"request {delta.request_id}: its stream was not read; {len(self._deltas)} deltas wait, and "
                f"max_unread is {self._limit}"
            )
        self._deltas.append(delta)

    def __bool__(self) -> bool:
        return bool(self._deltas)

    def __iter__(self) -> Iterator[Delta]:
        """Take out what is there."""
        while self._deltas:
            yield self._deltas.popleft()
