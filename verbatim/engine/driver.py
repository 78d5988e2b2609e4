"""Many callers, one engine.

Whoever waits for a request in a thread of its own makes steps for everybody, so that profilers, debuggers,
thread-local modes and Ctrl-C work where the call was made. Coroutines can't: while any of them waits, a
loop thread makes all the steps, and every other caller waits for what is its own.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

from verbatim.core import Delta, Request, Result
from verbatim.engine.clients import Client, Outbox
from verbatim.engine.engine import Engine
from verbatim.engine.loop import AsyncWake, Wake
from verbatim.engine.traffic import Mode, Traffic
from verbatim.errors import InvalidRequest, TierFailed, VerbatimError

_T = TypeVar("_T")
PAUSES = ("keep", "drain", "abort")
_drivers: weakref.WeakSet[Driver] = weakref.WeakSet()


class Driver:
    """Drives an engine for any number of threads and event loops at once.

    A step may take long, so nobody waits for one just to come or to go: newcomers and leavers are put
    down in lists, and whoever sits at the engine next lets them in and out.

    Args:
        max_unread: deltas that may wait for the reader of a stream; one more, and its request fails.
    """

    may_idle = False  # `run` is called with no requests, too, for the sake of others
    alone = True  # no other process makes the same calls

    def __init__(self, engine: Engine, *, max_unread: int = 65_536) -> None:
        self.engine = engine
        self._traffic = Traffic(engine)
        self._max_unread = max_unread
        self._asleep = False
        _drivers.add(self)

    @property
    def closed(self) -> bool:
        return self._traffic.closed

    # ---- for callers that wait

    def run(self, requests: list[Request]) -> list[Result]:
        """Step until all of `requests` have ended; then their results, or the first one's error."""
        self._traffic.seat.refuse_mine()
        wake = Wake()
        try:
            clients = self._traffic.enter(requests, None, wake.set)
            left = deque(clients)

            def done() -> bool:
                while left and left[0].ended:
                    left.popleft()
                return not left

            self._traffic.wait(done, wake)
            return _results(clients)
        finally:
            self._traffic.abort(requests)

    def deltas(self, request: Request) -> Iterator[Delta]:
        """What each step adds to one request. Leaving the loop aborts it."""
        self._traffic.seat.refuse_mine()
        wake = Wake()
        outbox = Outbox(request, self._max_unread, wake.set)
        try:
            (client,) = self._traffic.enter([request], outbox.put, wake.set)
            ended = False
            while not ended:
                self._traffic.wait(lambda: bool(outbox) or client.ended, wake)
                ended = client.ended  # before the outbox is emptied: afterwards nothing comes
                while outbox:
                    yield outbox.pop()
            client.result()
        finally:
            self._traffic.abort([request])

    def steps(self, requests: list[Request]) -> Iterator[None]:
        """Step until all of `requests` have ended, and stop after each step that let one of them grow.

        Leaving the loop aborts them. The last stop is followed by the first one's error, if it had one.
        """
        self._traffic.seat.refuse_mine()
        wake, news = Wake(), deque[Delta]()

        def note(delta: Delta) -> None:
            news.append(delta)
            wake.set()

        try:
            clients = self._traffic.enter(requests, note, wake.set)
            ended = False
            while not ended:
                self._traffic.wait(lambda: bool(news) or all(c.ended for c in clients), wake)
                ended = all(client.ended for client in clients)
                news.clear()
                yield
            _results(clients)
        finally:
            self._traffic.abort(requests)

    async def arun(self, requests: list[Request]) -> list[Result]:
        """`run` for asyncio: the loop thread makes the steps, and cancelling aborts."""
        self._traffic.refuse_inside()
        wake = AsyncWake()
        try:
            clients = self._traffic.enter(requests, None, wake.set, hosted=True)
            for client in clients:
                while not client.ended:
                    await wake.wait()
            return _results(clients)
        finally:
            self._traffic.abort(requests)

    async def adeltas(self, request: Request) -> AsyncIterator[Delta]:
        """`deltas` for asyncio: the loop thread makes the steps, and leaving or cancelling aborts."""
        self._traffic.refuse_inside()
        wake = AsyncWake()
        outbox = Outbox(request, self._max_unread, wake.set)
        try:
            (client,) = self._traffic.enter([request], outbox.put, wake.set, hosted=True)
            ended = False
            while not ended:
                ended = client.ended
                while outbox:
                    yield outbox.pop()
                if not ended:
                    await wake.wait()
            client.result()
        finally:
            self._traffic.abort([request])

    async def adeltas_of(self, requests: list[Request]) -> AsyncIterator[tuple[int, Delta]]:
        """`adeltas` of several requests that come in together, each delta with its request's index.

        The first error of one of them ends all.
        """
        self._traffic.refuse_inside()
        wake = AsyncWake()
        outboxes = [Outbox(request, self._max_unread, wake.set) for request in requests]
        by_id = {request.request_id: box for request, box in zip(requests, outboxes, strict=True)}
        try:
            clients = self._traffic.enter(
                requests, lambda delta: by_id[delta.request_id].put(delta), wake.set, hosted=True
            )
            ended = False
            while not ended:
                over = [client for client in clients if client.ended]
                ended = len(over) == len(clients)
                for index, outbox in enumerate(outboxes):
                    while outbox:
                        yield index, outbox.pop()
                _results(over)
                if not ended:
                    await wake.wait()
        finally:
            self._traffic.abort(requests)

    # ---- for servers, and for loops that count their steps

    def submit(
        self,
        request: Request,
        deliver: Callable[[Delta], None] | None = None,
        on_end: Callable[[], None] | None = None,
        *,
        hosted: bool = False,
    ) -> None:
        """Let a request come in at the next step, and return at once.

        Args:
            deliver: gets its deltas, in the thread that makes the step; what it raises ends the request.
                None where nobody reads them.
            on_end: called when it has ended: `request.result` or `request.error` is there.
            hosted: let the loop thread make the steps; else they are made by `step`, or by whoever waits.

        Raises:
            QueueFull: as many requests wait as may.
        """
        self._traffic.enter([request], deliver, on_end, hosted=hosted)

    def step(self) -> bool:
        """One step for everybody, by the caller; False if there was nothing to do, or it is paused.

        What goes wrong in a step is found in the requests that it ended.
        """
        return self._traffic.visit(self._traffic.advance)

    def abort(self, request: Request) -> None:
        """End a request now, keeping what it has; from any thread, harmless when it has ended."""
        self._traffic.abort([request])

    # ---- for sessions

    def visit(self, work: Callable[[], _T]) -> _T:
        """Do some work at the engine, between two steps.

        Raises:
            EngineClosed: the engine is closed.
            VerbatimError: called from inside a forward.
        """
        return self._traffic.visit(work)

    def let_out(self) -> None:
        """Take back the blocks of sessions that have ended, now or after the step under way."""
        self._traffic.tidy()

    # ---- for whoever runs the engine

    def pause(self, mode: str = "keep") -> None:
        """Make no more steps until `resume`; returns when that is so. The latest call decides.

        A request's `timeout_s` ends it nevertheless. Callers that wait go on waiting, so a program of a
        single thread that pauses and then generates waits until Ctrl-C.

        Args:
            mode: "keep": what runs keeps its KV and goes on later. "drain": what runs or waits is
                finished first, and newcomers wait. "abort": what runs or waits ends as "abort".

        Raises:
            InvalidRequest: another mode.
            VerbatimError: draining while asleep.
        """
        if mode not in PAUSES:
            raise InvalidRequest(f"mode={mode!r}: must be one of {', '.join(map(repr, PAUSES))}")
        before = self._traffic.mode
        try:
            self._traffic.visit(lambda: self._pause(mode))
            if mode == "drain":
                self._traffic.wait(
                    lambda: self._traffic.mode is not Mode.DRAINING or self._traffic.closed, Wake()
                )
        except KeyboardInterrupt:  # as if it had not been called
            self._traffic.change(before)
            raise

    def _pause(self, mode: str) -> None:
        if mode == "drain" and self._asleep:
            raise VerbatimError("an engine that sleeps can't be drained; call wake() first")
        self._traffic.settle()
        if mode == "abort":
            self.engine.abort_all()
        self._traffic.change(Mode.DRAINING if mode == "drain" else Mode.PAUSED)
        self._traffic.settle()

    def resume(self) -> None:
        """Go on after `pause`; harmless where nothing is paused.

        Raises:
            VerbatimError: the engine sleeps.
        """
        self._traffic.check_open()
        if self._asleep:
            raise VerbatimError("the engine sleeps; call wake(), which resumes as well")
        self._traffic.change(Mode.RUNNING)

    def sleep(self, weights: bool = False) -> None:
        """Pause, and give the KV memory back; what runs keeps its tokens and is recomputed later.

        Args:
            weights: drop the model's weights as well.

        Raises:
            NotSupported, ModelChanged: weights that can't be read again; nothing has happened then.
        """
        self._traffic.visit(lambda: self._sleep(weights))

    def _sleep(self, weights: bool) -> None:
        before = self._traffic.mode, self._asleep
        self._asleep = True  # first: whatever breaks this off half-way, nothing runs until wake()
        self._traffic.change(Mode.PAUSED)
        try:
            self.engine.sleep(weights)
        except VerbatimError:  # refused
            self._asleep = before[1]
            self._traffic.change(before[0])
            raise
        self.engine.evict_all()
        self._traffic.settle()

    def wake(self) -> None:
        """Take memory, read weights that were dropped, and resume; harmless where nothing sleeps.

        Raises:
            ModelChanged: the checkpoint is not what it was; the engine sleeps on.
        """
        self._traffic.visit(self._wake)

    def _wake(self) -> None:
        if self._asleep:
            self.engine.evict_all()  # again, for a sleep that was broken off
            self.engine.wake()
            self._asleep = False
            self._traffic.change(Mode.RUNNING)

    def check_awake(self) -> None:
        """Raise VerbatimError where the engine sleeps, or EngineClosed."""
        self._traffic.check_open()
        if self._asleep:
            raise VerbatimError("the engine sleeps; call wake() first")

    def update_weights(
        self, prepare: Callable[[], Callable[[], None]], *, version: int | None, restart: bool
    ) -> int:
        """Between two steps: change the model's weights; the new version.

        Args:
            prepare: checks them, and returns what writes them.
        """

        def update() -> int:
            self._traffic.settle()
            self.engine.update_weights(prepare(), version=version, restart=restart)
            return self.engine.weight_version

        return self._traffic.visit(update)

    def stats(self) -> dict[str, Any]:
        """The engine's, between two steps; and whether it is paused or asleep."""
        if self._traffic.seat.mine:  # called from inside a forward
            return self._stats()
        return self._traffic.visit(self._settled_stats, closed_too=True)

    def _settled_stats(self) -> dict[str, Any]:
        if not self._traffic.closed:
            self._traffic.settle()
        return self._stats()

    def _stats(self) -> dict[str, Any]:
        paused = self._traffic.mode is Mode.PAUSED
        return {**self.engine.stats(), "paused": paused, "asleep": self._asleep}

    def close(self) -> None:
        """End what is running ("abort") and close the runner; a second call does nothing."""
        self._traffic.visit(self._close, closed_too=True)
        self._traffic.stop_loop()

    def _close(self) -> None:
        if not self._traffic.closed:
            try:
                self._traffic.shut()
            finally:
                self.engine.close()


def _results(clients: list[Client]) -> list[Result]:
    """The results in order, or the first one's error; with TierFailed come those that had ended before."""
    try:
        return [client.result() for client in clients]
    except TierFailed as error:
        raise TierFailed(str(error), [client.request.result for client in clients]) from error


def _after_fork() -> None:
    for driver in list(_drivers):
        driver._traffic.forked()


os.register_at_fork(after_in_child=_after_fork)
