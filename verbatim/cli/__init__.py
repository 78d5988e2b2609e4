"""The entry point of the `verbatim` command; it imports almost nothing before Ctrl-C is handled.

Each command has its own file; `commands` collects them.
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
        # Fill the descriptors of closed standard streams: a file opened there would get libraries' messages.
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
    except BaseException:  # a library may convert a KeyboardInterrupt to another error
        if not interrupts.interrupted():
            raise
        interrupts.leave()
    if status not in (0, interrupts.EXIT_INTERRUPTED) and interrupts.interrupted():
        interrupts.leave()
    os._exit(status)
