"""Waiting for one's turn: threads, coroutines, and the thread that makes steps for coroutines."""

from __future__ import annotations

import asyncio
import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verbatim.engine.traffic import Traffic

IDLE_S = 10.0  # how long a loop thread without anything to do stays
_LONGEST_WAIT_S = 3600.0  # the platform's own limit is finite, too; whoever waits looks again


class Wake:
    """What one thread waits for; setting it again before it wakes changes nothing.

    Every call is one call into C. So neither Ctrl-C nor a finaliser that the garbage collector runs in
    the middle of another call can leave it locked, as they can an `Event`.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Let the waiting thread go on, or the next wait return at once; from any thread."""
        try:
            self._lock.release()
        except RuntimeError:
            pass  # it was set already

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is set, and take that back; False if `timeout_s` were over first."""
        seconds = _LONGEST_WAIT_S if timeout_s is None else min(timeout_s, _LONGEST_WAIT_S)
        return self._lock.acquire(timeout=max(0.0, seconds))


class AsyncWake:
    """`Wake` for one coroutine; made in the event loop in which it waits."""

    __slots__ = ("_bell", "_event", "_told")

    def __init__(self) -> None:
        self._bell = _bell_of(asyncio.get_running_loop())
        self._event = asyncio.Event()
        self._told = False  # so that a step which brings many deltas wakes its reader once

    def set(self) -> None:
        """Let the coroutine go on; from any thread.

        Raises:
            RuntimeError: its event loop is closed.
        """
        if self._told and self._bell.rung:
            return
        self._told = True
        try:
            self._bell.ring(self._wake)
        except BaseException:  # Ctrl-C as well: who is told again must get it then
            self._told = False
            raise

    def _wake(self) -> None:
        self._told = False
        self._event.set()

    async def wait(self) -> None:
        """Wait until it is set, and take that back; look at what it stands for afterwards."""
        await self._event.wait()
        self._event.clear()


class _Bell:
    """Wakes an event loop once for all that it is told before it looks: a step that brings something for
    each of many streams would otherwise write to the loop's pipe for each.

    Ctrl-C may hit any line of it, in any thread: a call is made twice rather than forgotten.
    """

    __slots__ = ("__weakref__", "_calls", "_loop", "_rung")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls = deque[Callable[[], None]]()
        self._rung = False

    @property
    def rung(self) -> bool:
        """Will the loop look?"""
        return self._rung and not self._loop.is_closed()

    def is_of(self, loop: asyncio.AbstractEventLoop) -> bool:
        return self._loop is loop

    def ring(self, call: Callable[[], None]) -> None:
        """Have the loop make a call; from any thread.

        Raises:
            RuntimeError: the loop is closed.
        """
        self._calls.append(call)
        if self.rung:
            return
        try:
            self._rung = True
            self._loop.call_soon_threadsafe(self._answer)
        except BaseException:
            if self._loop.is_closed():
                self._calls.clear()
            else:  # others have relied on this
                self._loop.call_soon_threadsafe(self._answer)
            self._rung = False
            raise

    def _answer(self) -> None:
        self._rung = False  # before it looks: whoever comes while it does may ring again
        try:
            for _ in range(len(self._calls)):
                self._calls[0]()
                self._calls.popleft()
        finally:
            if self._calls:
                self._loop.call_soon(self._answer)


_bells = threading.local()


def _bell_of(loop: asyncio.AbstractEventLoop) -> _Bell:
    """That of the loop which this thread runs, which it keeps no longer than its wakes do."""
    last: Callable[[], _Bell | None] = getattr(_bells, "last", lambda: None)
    bell = last()
    if bell is None or not bell.is_of(loop):
        bell = _Bell(loop)
        _bells.last = weakref.ref(bell)
    return bell


class Loop:
    """A thread that makes the steps while asynchronous callers wait for them.

    It holds the traffic weakly between two steps, and ends with it. When the interpreter ends, the step
    under way is waited for: a thread that comes back from a forward into a finalised interpreter
    crashes the process.
    """

    def __init__(self, traffic: Traffic) -> None:
        self.wake = wake = Wake()
        self.exited = False  # the interpreter is ending
        self._stopped = False
        self._traffic = weakref.ref(traffic, lambda _: wake.set())
        self._thread = threading.Thread(target=self._run, name="verbatim-steps", daemon=True)

    def start(self) -> None:
        self._thread.start()
        atexit.register(self._exit)

    def alive(self) -> bool:
        """False when it was stopped, or is a forked parent's."""
        return self._thread.is_alive() and not self._stopped

    def stop(self) -> None:
        """End after the step under way; returns when that is done."""
        self._stopped = True
        self.wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _exit(self) -> None:
        self.exited = True
        self.stop()

    def _run(self) -> None:
        idle = False
        try:
            while not self._stopped and (traffic := self._traffic()) is not None:
                needed = traffic.needs(self)
                if idle and not needed and traffic.let_go(self, idle=True):
                    return
                patience = traffic.turn(self.wake) if needed else IDLE_S
                del traffic  # or the engine could not be collected while this thread waits
                idle = not self.wake.wait(patience) and not needed
        except BaseException as error:
            if (traffic := self._traffic()) is not None:
                traffic.crashed(error)
            raise
        finally:
            if (traffic := self._traffic()) is not None:
                traffic.let_go(self, idle=False)
            if not self.exited:  # atexit's list is not to be changed while it is worked off
                atexit.unregister(self._exit)
