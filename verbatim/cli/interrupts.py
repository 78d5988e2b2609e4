"""Ctrl-C in the whole of the command, from the first milliseconds on: this module imports little."""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn

EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE, as shells report it


def handle() -> None:
    """Handle Ctrl-C until a model is open."""
    # A shell starts background jobs with Ctrl-C ignored: then it stays ignored.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def opened() -> None:
    """Raise KeyboardInterrupt on every Ctrl-C from here on, as asyncio expects it: a model is open."""
    if signal.getsignal(signal.SIGINT) is _interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupt(_number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, except within an import.

    There it would be printed as a traceback, be caught by a library, or turn into an ImportError.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            leave()
        frame = frame.f_back
    raise KeyboardInterrupt


def leave() -> NoReturn:
    """Exit at once, with the status and the line of an interrupted command."""
    try:
        os.write(2, b"verbatim: interrupted\n")
    except OSError:  # stderr is closed
        pass
    os._exit(EXIT_INTERRUPTED)
