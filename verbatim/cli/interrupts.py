"""Signal handling of all commands, from startup on; this module imports little."""

from __future__ import annotations

import os
import signal
import sys
import termios

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any, NoReturn

EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE, as shells report it

_SHOW_CURSOR = b"\x1b[?25h"
_interrupted = False


def handle() -> None:
    """Handle Ctrl-C until a model is open and, on a terminal, the signals that end or stop a process."""
    # A shell starts background jobs with SIGINT ignored; it stays ignored.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
        sys.unraisablehook = _interrupted_in_destructor
    if _terminal.open():
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _restore_and_signal)


def restore_default() -> None:
    """Restore Python's own handling of Ctrl-C, which asyncio expects, once a model is open.

    Raises:
        KeyboardInterrupt: Ctrl-C came earlier, and a library swallowed the exception.
    """
    if signal.getsignal(signal.SIGINT) is _interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if _interrupted:
            raise KeyboardInterrupt


def leave() -> NoReturn:
    """Exit at once, with the status and the message of an interrupted command."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = b"verbatim: interrupted\n"
    if _terminal.restore():
        line = b"\r\x1b[K" + line  # overwrites a progress display
    try:
        os.write(2, line)
    except OSError:  # stderr is closed
        pass
    os._exit(EXIT_INTERRUPTED)


def _interrupt(_number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, or exit at once within an import.

    There, the exception would be printed, caught by a library, or converted to an ImportError.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            leave()
        frame = frame.f_back
    global _interrupted
    _interrupted = True
    raise KeyboardInterrupt


def interrupted() -> bool:
    """Return whether Ctrl-C came before a model was open, even if a library swallowed the exception."""
    return _interrupted


def _interrupted_in_destructor(unraisable: sys.UnraisableHookArgs) -> None:
    """Handle a KeyboardInterrupt in a destructor or weakref callback, which Python would print and ignore."""
    if not isinstance(unraisable.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)
    elif signal.getsignal(signal.SIGINT) is _interrupt:
        leave()
    else:  # raise it again outside the destructor, so that open resources are closed
        import threading

        # Sent to the process, not the timer's thread, so that it interrupts a wait of the main thread.
        threading.Timer(0.01, os.kill, [os.getpid(), signal.SIGINT]).start()


def _restore_and_signal(number: int, _frame: FrameType | None) -> None:
    """Restore the terminal before a signal takes its effect, and change it back after a stop."""
    changed = _terminal.restore()
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
    # Only a stopped process reaches this point, once it is continued.
    signal.signal(number, _restore_and_signal)
    _terminal.change(changed)


class _Terminal:
    """The terminal of the process, if it has one, and its state at the start.

    readline turns off echo and line mode; progress displays hide the cursor.
    """

    def __init__(self) -> None:
        self._fd = -1
        self._initial: list[Any] = []

    def open(self) -> bool:
        """Save the terminal's state; return whether there is a terminal."""
        self._fd = next((fd for fd in (2, 1, 0) if os.isatty(fd)), -1)
        if self._fd >= 0:
            self._initial = termios.tcgetattr(self._fd)
        return self._fd >= 0

    def restore(self) -> list[Any]:
        """Restore the initial state; return the state before."""
        changed = self.change(self._initial)
        if changed:
            os.write(self._fd, _SHOW_CURSOR)
        return changed

    def change(self, state: list[Any]) -> list[Any]:
        """Set the terminal's state if this process is in the foreground; return the state before, or []."""
        try:
            # In the background, another process has the terminal, and setting it stops this one.
            if not state or os.tcgetpgrp(self._fd) != os.getpgrp():
                return []
            before = termios.tcgetattr(self._fd)
            termios.tcsetattr(self._fd, termios.TCSANOW, state)
            return before
        except (OSError, termios.error):  # the terminal was closed
            return []


_terminal = _Terminal()
