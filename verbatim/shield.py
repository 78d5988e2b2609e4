"""Ctrl-C at the right moment: a step is broken off where nothing counts yet, or not at all."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Shield:
    """Holds SIGINT back, but for the moments when it is let through.

    Python raises KeyboardInterrupt between any two instructions of the main thread. While blocks change
    hands or a request grows, that would leave the engine in a state that no other caller could go on
    from. Other threads, and programs whose handler is not Python's, are left alone.
    """

    def __init__(self) -> None:
        self._handler: Callable[..., Any] | None = None
        self._held: tuple[Any, ...] | None = None  # what the handler is to be called with

    @property
    def held(self) -> bool:
        """Has somebody pressed Ctrl-C, which is held back?"""
        return self._held is not None

    @contextmanager
    def up(self) -> Iterator[Shield]:
        """Hold SIGINT back for the length of the block; what came meanwhile is handled at its end."""
        handler = None
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
        if not callable(handler) or handler == self._hold:
            yield self
            return
        self._handler, self._held = handler, None
        signal.signal(signal.SIGINT, self._hold)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, handler)
            held, self._handler, self._held = self._held, None, None
            if held is not None:
                handler(*held)

    @contextmanager
    def down(self) -> Iterator[None]:
        """Let it through for the length of a block inside of `up`."""
        handler = self._handler
        if handler is None:
            yield
            return
        try:
            signal.signal(signal.SIGINT, handler)
            if self._held is not None:
                held, self._held = self._held, None
                handler(*held)
            yield
        finally:
            signal.signal(signal.SIGINT, self._hold)

    def _hold(self, *args: Any) -> None:
        self._held = args
