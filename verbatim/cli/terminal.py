"""Exit statuses, one-line errors, closed pipes and Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from importlib.util import find_spec
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from verbatim.cli.interrupts import EXIT_BROKEN_PIPE, EXIT_INTERRUPTED
from verbatim.common.plain import to_json
from verbatim.errors import VerbatimError

if TYPE_CHECKING:
    from verbatim.core import Result

EXIT_ERROR = 1
EXIT_USAGE = 2


class WrongUsage(VerbatimError):
    """An invalid command line; exit status 2."""


def need_packages(command: str, *packages: str) -> None:
    """Refuse a command if a package of the extra `serve` is not installed."""
    for name in packages:
        if find_spec(name) is None:
            raise WrongUsage(f"{command} needs {name}: pip install '.[serve]'")


def note(message: str) -> None:
    """Print a line on stderr; write errors are ignored."""
    with suppress(OSError):
        typer.echo(message, err=True)


def write_json(value: Any) -> None:
    """Write a value to stdout as one line of JSON, which is UTF-8 in any locale."""
    line = f"{to_json(value)}\n"
    if hasattr(sys.stdout, "buffer"):
        sys.stdout.buffer.write(line.encode(errors="replace"))
    else:  # stdout was replaced
        sys.stdout.write(line)


def one_line(error: BaseException) -> str:
    """Return an error's message without line breaks."""
    return "verbatim: " + (" ".join(str(error).split()) or type(error).__name__)


@contextmanager
def reporting_errors() -> Iterator[None]:
    """Report errors in the block as one line and an exit status."""
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
        is_usage = isinstance(error, WrongUsage)
        raise typer.Exit(EXIT_USAGE if is_usage else EXIT_ERROR) from None
    except KeyboardInterrupt:
        note("verbatim: interrupted")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:
        _leave(EXIT_BROKEN_PIPE)
    except OSError as error:
        what = "can't write to stdout" if error.filename is None else error.filename
        note(f"verbatim: {what}: {error.strerror or error}")
        _leave(EXIT_ERROR)


def exit_status(function: Callable[..., object], *arguments: object) -> int:
    """Run a function as a command, and return its exit status."""
    try:
        with reporting_errors():
            function(*arguments)
    except typer.Exit as end:
        return end.exit_code
    return 0


def _leave(status: int) -> NoReturn:
    """Exit without the error that Python prints when it flushes a broken stdout."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise typer.Exit(status) from None


def read_stream(stream: Any, *, live: bool = False) -> tuple[dict[int, str], int, Result | None]:
    """Read a stream up to the first Ctrl-C, which takes effect at the next delta.

    Before the first delta, which a long prompt or a beam search delays, it takes effect at once, even in the
    middle of a step. A second Ctrl-C raises KeyboardInterrupt. At the end the stream is closed, which aborts
    its request.

    Args:
        live: whether to write the text to stdout as it arrives, with a final newline after an error.

    Returns:
        The text of each completion, the number of new tokens, and the result, or None after Ctrl-C.
    """
    texts, num_new, result = defaultdict[int, str](str), 0, None
    begun, num_presses, before = False, 0, signal.getsignal(signal.SIGINT)

    def press(_number: int, _frame: FrameType | None) -> None:
        nonlocal num_presses
        num_presses += 1
        if num_presses > 1 or not begun:
            raise KeyboardInterrupt

    def end_line() -> None:
        if live and texts[0] and not texts[0].endswith("\n"):
            sys.stdout.write("\n")
            sys.stdout.flush()

    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, press)
    try:
        with closing(stream):
            for delta in stream:
                begun = True
                texts[delta.index] += delta.text
                num_new += len(delta.token_ids)
                result = delta.result or result
                if live and delta.text:
                    sys.stdout.write(delta.text)
                    sys.stdout.flush()
                if num_presses:
                    break
    except KeyboardInterrupt:
        if begun or num_presses != 1:
            end_line()
            raise
    except VerbatimError:
        end_line()
        raise
    finally:
        signal.signal(signal.SIGINT, before)
    return texts, num_new, result


def size_text(nbytes: float) -> str:
    """Format bytes, such as "1.236 GB"."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} TB"
