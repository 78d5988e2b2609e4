"""The callers of an engine, one for each request: where its deltas go, and who is told of its end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType

from verbatim.core import Delta, Request, Result
from verbatim.errors import RequestFailed


@dataclass(slots=True, eq=False)
class Client:
    """One request from its submission to its end.

    Attributes:
        deliver: gets the deltas, in the thread that makes the step; None where nobody reads them.
        on_end: called once it has ended, with a result or an error.
        going: where it puts itself down when it has a problem.
        inside: the engine has it.
        leaving: it is to be aborted.
        problem: what `deliver` raised, which ends the request.
        ended: nothing more will come.
    """

    request: Request
    deliver: Callable[[Delta], None] | None
    on_end: Callable[[], None] | None
    going: dict[Client, None]
    inside: bool = False
    leaving: bool = False
    problem: Exception | None = None
    ended: bool = False
    _traceback: TracebackType | None = field(default=None, init=False)

    def take(self, delta: Delta) -> None:
        """Hand a delta on; called by the engine in the middle of a step, which must go on."""
        if self.problem is None and self.deliver is not None:
            try:
                self.deliver(delta)
            except Exception as error:
                self.problem = error
                self.going[self] = None

    def note_error(self) -> None:
        """Keep what ended it as it was when it happened; one error may end several requests."""
        if self.request.error is not None and not self.ended:
            self._traceback = self.request.error.__traceback__

    def tell(self) -> None:
        """Tell whoever waits that the request has ended."""
        self.ended = True
        if self.on_end is not None:
            with suppress(Exception):  # of an event loop that is closed: nobody waits any more
                self.on_end()

    def result(self) -> Result:
        """The result, or the error that ended the request."""
        error = self.request.error
        if error is not None:
            raise error.with_traceback(self._traceback)
        assert self.request.result is not None
        return self.request.result

    def is_over(self, now: float) -> bool:
        """Has it no time left to wait until it is let in?"""
        timeout_s = self.request.params.timeout_s
        over = timeout_s is not None and now >= self.request.arrival + timeout_s
        return self.leaving or over


class Outbox:
    """The deltas of a stream that its reader has not read yet.

    Args:
        max_unread: what may wait; never less than what one step can bring.
        wake: tells the reader that there is something.
    """

    def __init__(self, request: Request, max_unread: int, wake: Callable[[], None]) -> None:
        self._deltas: deque[Delta] = deque()
        self._request = request
        self._max_unread = max(max_unread, request.params.n, request.params.num_beams)
        self._wake = wake

    def put(self, delta: Delta) -> None:
        """Take a delta in.

        Raises:
            RequestFailed: too many wait already.
        """
        if len(self._deltas) >= self._max_unread:
            raise RequestFailed(
                f"request {self._request.request_id}: its stream was not read; "
                f"{len(self._deltas)} deltas wait, and max_unread is {self._max_unread}"
            )
        self._deltas.append(delta)
        self._wake()

    def __bool__(self) -> bool:
        return bool(self._deltas)

    def pop(self) -> Delta:
        return self._deltas.popleft()
