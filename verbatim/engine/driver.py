"""Many callers, one engine: whoever waits for a request makes a step for everybody."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

from verbatim.core import Delta, Request, Result
from verbatim.engine.engine import Engine
from verbatim.errors import EngineClosed, VerbatimError


class Driver:
    """Drives an engine from any thread or event loop, without a thread of its own.

    A step may take long, so nobody waits for one just to come or to go: newcomers and leavers are put
    down in queues, and whoever holds the lock next lets them in and out.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._coming: deque[tuple[Request, Callable[[Delta], None]]] = deque()
        self._going: deque[Request] = deque()
        self._lock = threading.RLock()
        self._stepping = False
        self._closed = False

    def run(self, requests: list[Request]) -> list[Result]:
        """Step until all of `requests` have ended; then their results, or the first one's error."""
        try:
            self._add(requests, lambda delta: None)
            for request in requests:
                while not request.finished:
                    self._step(request)
        finally:
            self._abort(requests)
        return [_result_of(request) for request in requests]

    def deltas(self, request: Request) -> Iterator[Delta]:
        """What each step adds to one request. Leaving the loop aborts it."""
        outbox: deque[Delta] = deque()
        try:
            self._add([request], outbox.append)
            while outbox or not request.finished:
                if outbox:
                    yield outbox.popleft()
                else:
                    self._step(request)
            _result_of(request)
        finally:
            self._abort([request])

    async def adeltas(self, request: Request) -> AsyncIterator[Delta]:
        """`deltas` for asyncio: the steps run in threads."""
        outbox: deque[Delta] = deque()
        try:
            self._add([request], outbox.append)
            while outbox or not request.finished:
                if outbox:
                    yield outbox.popleft()
                else:
                    await asyncio.to_thread(self._step, request)
            _result_of(request)
        finally:
            self._abort([request])

    def stats(self) -> dict[str, Any]:
        """The engine's, between two steps."""
        with self._lock:
            self._let_in_and_out()
            return self.engine.stats()

    def close(self) -> None:
        """End what is running ("abort") and close the runner; a second call does nothing."""
        with self._lock:
            if not self._closed:
                self._let_in_and_out()
                self._closed = True
                self.engine.abort_all()
                self.engine.runner.close()

    def _add(self, requests: Iterable[Request], deliver: Callable[[Delta], None]) -> None:
        self._check_open()
        self._coming.extend((request, deliver) for request in requests)

    def _step(self, request: Request) -> None:
        """One step for everybody, unless `request` was finished by another caller's meanwhile."""
        with self._lock:
            if self._stepping:  # the lock lets its own thread in: a hook of the model calls us
                raise VerbatimError("an engine can't be called from inside its own forward")
            self._let_in_and_out()
            if request.finished:
                return
            self._check_open()
            self._stepping = True
            try:
                self.engine.step()
            finally:
                self._stepping = False

    def _abort(self, requests: Iterable[Request]) -> None:
        self._going.extend(request for request in requests if not request.finished)
        if self._going and self._lock.acquire(blocking=False):
            try:
                self._let_in_and_out()
            finally:
                self._lock.release()

    def _let_in_and_out(self) -> None:
        """Between two steps: everybody who came, then everybody who left."""
        if self._stepping or self._closed:
            return
        while self._coming:
            self.engine.add(*self._coming.popleft())
        while self._going:
            self.engine.abort(self._going.popleft())

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("this LLM has been closed")


def _result_of(request: Request) -> Result:
    if request.error is not None:
        raise request.error
    assert request.result is not None
    return request.result
