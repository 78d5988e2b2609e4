"""The seat at the engine: one thread at a time, and who comes next."""

from __future__ import annotations

import threading
import time

from verbatim.engine.loop import Wake
from verbatim.errors import VerbatimError

# How long guests wait for a stepper whose turn it is. Not for ever: it may be further down in the guest's
# own stack, where a signal's handler looks at the statistics.
STEPS_FIRST_S = 0.25


class Seat:
    """Who sits here may touch the engine.

    *Steppers* wait for something that steps bring about, and would make them: the loop thread where
    there is one with work, else any of the callers that wait. *Guests* need the seat once, between two
    steps, and go first; but after one of them a step comes first, or guests who come again and again
    would let nobody else sit down. Nobody waits for the seat but guests; a stepper that finds it taken
    waits for what it wants, and is woken when whoever made the steps stops.

    Everybody is known by a `Wake`. The lock is held for moments, never during a step. It is re-entrant
    because the collector may run the finaliser of a stream, which aborts its request, in the middle of
    any of these methods. Ctrl-C may hit any of them as well, so `quit` is called twice by all.
    """

    def __init__(self) -> None:
        self.loop: Wake | None = None  # of the loop thread, while steps are its business
        self._lock = threading.RLock()
        self._owner: tuple[Wake, int] | None = None  # with its thread
        self._guests: dict[Wake, None] = {}  # the first to come first
        self._steppers: dict[Wake, None] = {}  # likewise
        self._steps_first = 0.0  # until when, on the monotonic clock, guests let steppers go first

    @property
    def mine(self) -> bool:
        """Does the calling thread sit here?"""
        owner = self._owner
        return owner is not None and owner[1] == threading.get_ident()

    @property
    def visited(self) -> bool:
        """Does a guest sit here?"""
        return self._owner is not None and self._owner[0] in self._guests

    def refuse_mine(self) -> None:
        """Raise VerbatimError for a call that would wait for the step in which it is made."""
        if self.mine:
            raise VerbatimError("an engine can't be called from inside its own forward")

    def join(self, stepper: Wake) -> None:
        """Wait as one of those that would make steps."""
        with self._lock:
            self._steppers[stepper] = None

    def queue(self, guest: Wake) -> None:
        """Wait for the seat itself."""
        with self._lock:
            self._guests[guest] = None

    def take(self, who: Wake, *, ahead: bool = False) -> bool:
        """Sit down if the seat is free and nobody else comes first; `ahead` goes before all."""
        with self._lock:
            if self._owner is not None or not (ahead or self._is_next(who)):
                return False
            self._owner = who, threading.get_ident()
            if who is self.loop or who in self._steppers:
                self._steps_first = 0.0
            return True

    def _is_next(self, who: Wake) -> bool:
        if self._steps_come_first():
            return who is self.loop or who in self._steppers
        return next(iter(self._guests), who) is who

    def _steps_come_first(self) -> bool:
        wanted = self.loop is not None or bool(self._steppers)
        return wanted and time.monotonic() < self._steps_first

    def leave(self, stepper: Wake) -> None:
        """Get up until the next step, if `stepper` sits here: let guests in, and wake no other stepper."""
        with self._lock:
            if self._owner is not None and self._owner[0] is stepper:
                self._owner = None
                self.pass_on(stepper)

    def quit(self, who: Wake) -> None:
        """Be neither here nor waiting any more, and wake the next; doing it again is harmless."""
        with self._lock:
            if self._owner is not None and self._owner[0] is who:
                if who in self._guests:
                    self._steps_first = time.monotonic() + STEPS_FIRST_S
                self._owner = None
            self._steppers.pop(who, None)
            self._guests.pop(who, None)
            self.pass_on()

    def pass_on(self, stepper: Wake | None = None) -> None:
        """Wake who is next: the first guest, else the loop thread, else the first that waits."""
        with self._lock:
            if self._guests and not self._steps_come_first():
                next(iter(self._guests)).set()
            elif self.loop is not None:
                if self.loop is not stepper:
                    self.loop.set()
            elif stepper is None and self._steppers:
                next(iter(self._steppers)).set()

    def wake_all(self) -> None:
        """Let everybody look again; for rare events."""
        with self._lock:
            for wake in [*self._guests, *self._steppers, *filter(None, [self.loop])]:
                wake.set()
