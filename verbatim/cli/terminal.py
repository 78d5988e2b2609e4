"""Exit statuses, one-line errors, closed pipes and Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from importlib.util import find_spec
from types import FrameType
from typing import Any, NoReturn

import typer

from verbatim.cli.interrupts import EXIT_BROKEN_PIPE, EXIT_INTERRUPTED
from verbatim.errors import VerbatimError

EXIT_ERROR = 1
EXIT_USAGE = 2


class WrongUsage(VerbatimError):
    """An invalid command line; exit status 2."""


def need_packages(command: str, *packages: str) -> None:
    """Refuse a command if the extra of the server is not installed."""
    for name in packages:
        if find_spec(name) is None:
            raise WrongUsage(f"{command} needs {name}: pip install '.[serve]'")


def note(message: str) -> None:
    """Print one line on stderr, apart from the text on stdout. Nothing depends on its being written."""
    with suppress(OSError):
        typer.echo(message, err=True)


def end_line(written: str) -> None:
    """End the line on stdout that a text broke off in, before its error goes to stderr."""
    if written and not written.endswith("\n"):
        sys.stdout.write("\n")
        sys.stdout.flush()


def one_line(error: BaseException) -> str:
    """Return an error's message without line breaks."""
    return "verbatim: " + (" ".join(str(error).split()) or type(error).__name__)


@contextmanager
def reported() -> Iterator[None]:
    """Turn the errors of a command into one line and an exit status."""
    if sys.stdout is None:
        note("verbatim: stdout is closed: can't write the output")
        raise typer.Exit(EXIT_ERROR)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:  # a terminal that can't show a character shows a "?"
            reconfigure(errors="replace")
    try:
        yield
        sys.stdout.flush()
    except VerbatimError as error:
        note(one_line(error))
        wrong = isinstance(error, WrongUsage)
        raise typer.Exit(EXIT_USAGE if wrong else EXIT_ERROR) from None
    except KeyboardInterrupt:
        note("verbatim: interrupted")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:
        _leave(EXIT_BROKEN_PIPE)
    except OSError as error:
        note(f"verbatim: can't write to stdout: {error.strerror or error}")
        _leave(EXIT_ERROR)


def exit_status(function: Callable[..., object], *arguments: object) -> int:
    """Run a function as a command, and return its exit status."""
    try:
        with reported():
            function(*arguments)
    except typer.Exit as end:
        return end.exit_code
    return 0


def _leave(status: int) -> NoReturn:
    """Exit without the error that Python prints when it flushes a broken stdout."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        pass
    raise typer.Exit(status) from None


@contextmanager
def interruptible(stream: Any, *, at_once: bool = False) -> Iterator[Iterator[Any]]:
    """Give the deltas of a stream up to the first Ctrl-C, so that it ends between two steps of the engine.

    A second Ctrl-C raises KeyboardInterrupt, also in the middle of a step. At the end of the block the
    stream is closed, which aborts its request.

    Args:
        at_once: the first Ctrl-C raises KeyboardInterrupt.
    """
    pressed, before = False, signal.getsignal(signal.SIGINT)

    def press(_number: int, _frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    def deltas() -> Iterator[Any]:
        for delta in stream:
            yield delta
            if pressed:
                return

    if not at_once:
        signal.signal(signal.SIGINT, press)
    try:
        with closing(stream):
            yield deltas()
    finally:
        signal.signal(signal.SIGINT, before)


def size_text(nbytes: float) -> str:
    """Format bytes, such as "1.236 GB"."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} TB"
