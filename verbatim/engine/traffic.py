"""Who comes to the engine, who waits, who goes; and whose turn it is to make a step for everybody."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import Enum
from typing import TypeVar

from verbatim.core import Delta, Request
from verbatim.engine.clients import Client
from verbatim.engine.engine import Engine
from verbatim.engine.loop import Loop, Wake
from verbatim.engine.seat import STEPS_FIRST_S, Seat
from verbatim.errors import (
    EngineClosed,
    InvalidRequest,
    RequestFailed,
    TierFailed,
    VerbatimError,
)
from verbatim.model.borrow import holds_exclusive

_T = TypeVar("_T")
_POLL_S = 0.05  # until an engine is asked again that has work and could not do any


class Mode(Enum):
    """What is done between two steps."""

    RUNNING = "running"
    DRAINING = "draining"  # steps are made, and nobody is let in
    PAUSED = "paused"  # everybody is let in, and no step is made


class Traffic:
    """Requests on their way in and out of one engine.

    A step may take long, so nobody waits for one just to come or to go: newcomers and leavers are put
    down here, and whoever sits at the engine next lets them in and out.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.seat = Seat()
        self.mode = Mode.RUNNING
        self.closed = False
        self._why_closed = "this LLM has been closed"
        self._lock = threading.RLock()  # for moments; re-entrant for the reason given in Seat
        self._clients: dict[Request, Client] = {}  # all that came and have not ended
        self._coming: dict[Client, None] = {}
        self._going: dict[Client, None] = {}  # to be aborted, or failed by what their reader raised
        self._ended: dict[Request, None] = {}  # that nobody was told of yet
        engine.on_end = self._ended.setdefault
        self._loop: Loop | None = None
        self._hosted: set[Client] = set()  # whose steps are the loop thread's business
        self._deadline: float | None = None  # while paused: when the next request's time is over

    def check_open(self) -> None:
        if self.closed:
            raise EngineClosed(self._why_closed)

    def refuse_inside(self) -> None:
        """Refuse a call that would wait for steps which can't be made while its caller waits.

        Raises:
            VerbatimError: the caller is inside of this engine's step, or of any engine's forward.
        """
        self.seat.refuse_mine()
        _refuse_to_wait()

    def change(self, mode: Mode) -> None:
        """Go on in another mode; everybody who waits looks again."""
        self.mode = mode
        self.seat.wake_all()

    # ---- coming, waiting, going: from any thread

    def enter(
        self,
        requests: list[Request],
        deliver: Callable[[Delta], None] | None,
        on_end: Callable[[], None] | None,
        *,
        hosted: bool = False,
    ) -> list[Client]:
        """Put requests down to be let in: all of them or, where one is refused, none."""
        clients = [Client(request, deliver, on_end, self._going) for request in requests]
        with self._lock:
            self.check_open()
            known = any(request.finished or request in self._clients for request in requests)
            if known or len(set(requests)) < len(requests):
                raise InvalidRequest("a request can't be submitted twice")
            self.engine.check_room(len(self._coming) + len(requests))
            loop = self._running_loop() if hosted else None
            for request in requests:
                request.streamed = deliver is not None
            self._clients.update(zip(requests, clients, strict=True))
            self._coming.update(dict.fromkeys(clients))
            if loop is not None:
                self._hosted.update(clients)
                self.seat.loop = loop.wake
        wake = self.seat.loop
        if wake is not None:
            wake.set()
        if self.mode is Mode.PAUSED:  # whoever waits must know of another request's time
            self.seat.pass_on()
        return clients

    def wait(self, done: Callable[[], bool], wake: Wake) -> None:
        """Make steps until `done`, or wait while somebody else makes them, who sets `wake`."""
        self.seat.refuse_mine()
        if done():
            return
        try:
            try:
                self.seat.join(wake)
                while not done():
                    patience = self.turn(wake)
                    if patience != 0:
                        wake.wait(patience)
            finally:
                self.seat.quit(wake)
        finally:  # again, for a Ctrl-C that hit the first one
            self.seat.quit(wake)

    def visit(self, work: Callable[[], _T], *, closed_too: bool = False) -> _T:
        """Do some work at the engine, between two steps.

        Raises:
            EngineClosed: the engine is closed, unless `closed_too`.
            VerbatimError: the calling thread sits there already, or is inside another engine's forward
                while somebody else sits there.
        """
        self.seat.refuse_mine()
        wake = Wake()
        try:
            try:
                self.seat.queue(wake)
                while not self.seat.take(wake, ahead=holds_exclusive()):
                    _refuse_to_wait()
                    wake.wait(STEPS_FIRST_S)
                if not closed_too:
                    self.check_open()
                return self._whole(work)
            finally:
                self.seat.quit(wake)
        finally:
            self.seat.quit(wake)
            self.tidy()

    def abort(self, requests: list[Request]) -> None:
        """End requests, now or after the step under way; those that have ended are left alone."""
        with self._lock:
            for request in requests:
                client = self._clients.get(request)
                if client is not None and not request.finished:
                    client.leaving = True
                    self._going[client] = None
        self.tidy()

    def tidy(self) -> None:
        """Let leavers out, unless somebody sits at the engine, who will do it when getting up.

        While no step is made, newcomers are let in here, so that their time can run out.
        """
        wake = Wake()
        sessions = self.engine.sessions
        while self._going or sessions.has_leavers or (self._coming and self.mode is Mode.PAUSED):
            try:
                try:
                    if self.closed or not self.seat.take(wake, ahead=True):
                        return
                    self.settle()
                finally:
                    self.seat.quit(wake)
            finally:
                self.seat.quit(wake)

    def turn(self, wake: Wake) -> float | None:
        """Make a step, if it is for this stepper to make.

        Returns:
            How long to wait for `wake` then: 0 means not at all, None until it is set.
        """
        loop = self.seat.loop
        if loop is not None and wake is not loop:
            _refuse_to_wait()
            return None
        try:
            if not self.seat.take(wake, ahead=holds_exclusive()):
                _refuse_to_wait()
                return None  # whoever sits there wakes the next on leaving
            # Ctrl-C in a caller's own step is its own; in the loop thread nobody would see it.
            if self.advance(Exception if wake is not loop else BaseException):
                return 0.0
        finally:
            self.seat.leave(wake)
            self.tidy()
        if self.mode is not Mode.PAUSED:
            return _POLL_S if self.engine.has_work else None
        return None if self._deadline is None else max(1e-3, self._deadline - time.monotonic())

    # ---- for whoever sits at the engine

    def advance(self, catch: type[BaseException] = Exception) -> bool:
        """Let everybody in and out and make a step; False if there was nothing to do.

        An error here is not one of a request, whose errors the engine catches. Nobody knows what it
        has broken, so everybody who is inside gets it, and newcomers are served.
        """
        made = False
        try:
            self._let_in_and_out()
            if self.mode is Mode.PAUSED:
                self.engine.expire(time.monotonic())
            else:
                made = self.engine.step()
                if self.mode is Mode.DRAINING and not self.engine.has_work:
                    self.change(Mode.PAUSED)
        except BaseException as error:
            self._find_ended()
            if not isinstance(error, catch):
                raise
            self.fail_all(_for_callers(error))
            if isinstance(error, TierFailed):
                self.shut(f"this LLM was closed when this happened: {error}")
                self.engine.close()
            made = True
        finally:
            self._reap()
        return made

    def settle(self) -> None:
        """Let everybody in and out, and tell whoever's request has ended, without a step."""
        self._whole(self._let_in_and_out)
        self._reap()

    def _whole(self, work: Callable[[], _T]) -> _T:
        """Do some work at the engine; where it is broken off, nobody's end is forgotten."""
        try:
            return work()
        except BaseException:
            self._find_ended()
            self._reap()
            raise

    def _find_ended(self) -> None:
        """Note requests that ended without a word, as something broke in between; looks at all there are."""
        with self._lock:
            ended = [request for request in self._clients if request.finished]
        self._ended.update(dict.fromkeys(ended))

    def fail_all(self, error: Exception) -> None:
        """End all that are inside with an error; they are told when things are settled."""
        with self._lock:
            clients = list(self._clients.values())
        for client in clients:
            if client.inside and not client.request.finished:
                self._fail(client, error)

    def shut(self, why: str = "this LLM has been closed") -> None:
        """Let nobody in any more; those who have come end as "abort"."""
        with self._lock:
            self.closed = True
            self._why_closed = why
        self.mode = Mode.RUNNING  # or newcomers would not be let in, and never end
        try:
            self._let_in_and_out()
            self.engine.abort_all()
        finally:
            self.fail_all(EngineClosed(why))
            self._find_ended()
            self._reap()

    def forked(self) -> None:
        """In the child of a fork: the threads that did something here don't exist any more.

        What was in use is in nobody knows what state, and is closed; else the child has an engine, too.
        A stepper that sits there when nobody is left has done its work.
        """
        in_use = self.seat.visited or not all(client.ended for client in self._clients.values())
        if in_use or getattr(self.engine.runner, "in_one_process", False):
            self.closed = True
            self._why_closed = "this LLM has been closed: it can't be used in a forked child"
        else:
            self._clients.clear()  # they have ended, and were about to be forgotten
            self._hosted.clear()
        self._lock, self.seat, self._loop = threading.RLock(), Seat(), None
        self.engine.sessions.forked()

    def _let_in_and_out(self) -> None:
        """Between two steps: sessions that ended, everybody who came, then everybody who left."""
        self.engine.sessions.settle()
        draining, now = self.mode is Mode.DRAINING, time.monotonic()
        # Taken out one by one, each when it is done: an interrupt in between must lose nobody.
        with self._lock:
            coming = list(self._coming)
        for client in coming:
            if not draining or client.is_over(now):
                self._let_in(client)
                del self._coming[client]
        with self._lock:
            going = list(self._going)
        for client in going:
            self._let_in(client)
            if client.problem is not None and not client.request.finished:
                self._fail(client, client.problem)
            else:
                try:
                    self.engine.abort(client.request)
                except Exception as error:
                    self._fail(client, error)
            del self._going[client]

    def _let_in(self, client: Client) -> None:
        if client.inside or client.request.finished:
            return
        client.inside = True
        try:
            self.engine.add(client.request, client.take)
        except Exception as error:
            self._fail(client, error)
        except BaseException:  # Ctrl-C of whoever lets it in: nothing was done yet, so try it again
            client.inside = False
            raise

    def _reap(self) -> None:
        """Tell whoever waits of each end."""
        # Only those that something happened to are looked at: a step must not cost more the more wait.
        # Each is taken out when it is done with: an interrupt in between must lose nobody.
        ended = {request: self._clients.get(request) for request in list(self._ended)}
        for client in filter(None, ended.values()):
            client.note_error()  # of all, before the first is told, who may raise it
        for request, known in ended.items():
            if known is not None:
                known.tell()
                self._forget(known)
            self._ended.pop(request, None)
        if self.mode is Mode.PAUSED:
            self._deadline = self.engine.next_deadline()

    def _fail(self, client: Client, error: Exception) -> None:
        try:
            self.engine.fail(client.request, error)
        except Exception:  # the engine itself is broken; its caller must know nevertheless
            client.request.error = error
            self._ended[client.request] = None

    def _forget(self, client: Client) -> None:
        with self._lock:
            self._hosted.discard(client)
            if not self._hosted:
                self.seat.loop = None
            self._clients.pop(client.request, None)

    # ---- the loop thread

    def _running_loop(self) -> Loop:
        """The loop thread, started where none is."""
        if self._loop is not None and self._loop.exited:
            raise EngineClosed("the interpreter is ending")
        if self._loop is None or not self._loop.alive():
            loop = Loop(self)
            loop.start()
            self._loop = loop
        return self._loop

    def needs(self, loop: Loop) -> bool:
        """Does anybody wait for steps of this thread? If not, the first of the others makes them."""
        if self.seat.loop is loop.wake:
            return True
        self.seat.pass_on()
        return False

    def crashed(self, error: BaseException) -> None:
        """The thread ends by a bug of ours; nobody must wait for its steps for ever."""
        self.seat.leave(self._loop.wake if self._loop is not None else Wake())

        def fail() -> None:
            self.fail_all(_for_callers(error))
            self._reap()

        self.visit(fail, closed_too=True)

    def let_go(self, loop: Loop, *, idle: bool) -> bool:
        """The loop thread wants to end because it is idle, or has to; False if it must stay."""
        with self._lock:
            if idle and self.seat.loop is loop.wake:
                return False
            if self._loop is loop and not loop.exited:
                self._loop = None
            if self.seat.loop is loop.wake:
                self.seat.loop = None
        if not loop.exited:
            self.seat.pass_on()
        return True

    def stop_loop(self) -> None:
        """End the loop thread; returns when it has ended. Not from a seat."""
        loop = self._loop
        if loop is not None:
            loop.stop()
        self.seat.wake_all()


def _refuse_to_wait() -> None:
    """Raise VerbatimError in a thread that is inside of a forward, and would wait for another one."""
    if holds_exclusive():
        raise VerbatimError(
            "a call from inside another engine's forward can't wait for an engine that somebody "
            "else is using: no other forward is made meanwhile"
        )


def _for_callers(error: BaseException) -> Exception:
    """What callers are given for an error in the middle of a step: never another thread's exit."""
    if isinstance(error, Exception):
        return error
    failed = RequestFailed(f"the step was broken off by {error!r}")
    failed.__cause__ = error
    return failed
