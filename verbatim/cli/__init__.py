"""The `verbatim` command: one file per command; `commands` collects them.

This module is the entry point. It imports next to nothing before Ctrl-C is handled.
"""

from __future__ import annotations

import os
import sys

from verbatim.cli import interrupts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def main() -> NoReturn:
    """Run the console script.

    The process exits as soon as its output is flushed: tearing torch down takes a second.
    """
    try:
        interrupts.handle()
        # A file that is opened in the place of a closed stream would get the messages of libraries.
        while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(fd)
        from verbatim.cli.commands import run

        status = run()
        try:
            if sys.stdout is not None:
                sys.stdout.flush()
        except OSError:
            status = status or 1
    except KeyboardInterrupt:
        interrupts.leave()
    except BaseException:  # a library may turn a KeyboardInterrupt into an error of its own
        if not interrupts.came():
            raise
        interrupts.leave()
    if status not in (0, interrupts.EXIT_INTERRUPTED) and interrupts.came():
        interrupts.leave()
    os._exit(status)
