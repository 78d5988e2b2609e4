"""Defers Ctrl-C to the parts of a step in which no state changes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Shield:
    """Defers SIGINT in an `up` block, except in a `down` block inside it.

    Python raises KeyboardInterrupt between any two instructions of the main thread. During the allocation
    of blocks or the commit of a step, that would leave the engine inconsistent. Other threads, and SIGINT
    handlers that are not Python functions, are not affected.
    """

    def __init__(self) -> None:
        self._handler: Callable[..., Any] | None = None
        self._pending: tuple[Any, ...] | None = None  # arguments of the deferred handler call

    @property
    def pending(self) -> bool:
        """True if a SIGINT is deferred."""
        return self._pending is not None

    @contextmanager
    def up(self) -> Iterator[Shield]:
        """Defer SIGINT during the block, and handle it at the end of the block."""
        handler = None
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
        if not callable(handler) or handler == self._defer:
            yield self
            return
        self._handler, self._pending = handler, None
        signal.signal(signal.SIGINT, self._defer)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, handler)
            pending, self._handler, self._pending = self._pending, None, None
            if pending is not None:
                handler(*pending)

    def down(self) -> _Lowered:
        """Allow SIGINT during a block within `up`; a deferred one is handled at its beginning."""
        return _Lowered(self)

    def _defer(self, *args: Any) -> None:
        self._pending = args


class _Lowered:
    """The context manager of `Shield.down`.

    Not a generator: if Ctrl-C came between its `yield` and the block, it would be finalized at some later
    time, and its `finally` would defer SIGINT permanently.
    """

    def __init__(self, shield: Shield) -> None:
        self._shield = shield

    def __enter__(self) -> None:
        shield = self._shield
        if shield._handler is None:
            return
        try:
            signal.signal(signal.SIGINT, shield._handler)
            if shield._pending is not None:
                pending, shield._pending = shield._pending, None
                shield._handler(*pending)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        if self._shield._handler is not None:
            signal.signal(signal.SIGINT, self._shield._defer)
