"""`python -m verbatim.compat.kempnerforge`."""

from __future__ import annotations

import sys

from verbatim.cli import interrupts

if __name__ == "__main__":
    interrupts.handle()  # before anything large is imported
    from verbatim.compat.kempnerforge.command import main

    sys.exit(main(sys.argv[1:]))
