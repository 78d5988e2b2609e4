"""`python -m verbatim.compat.kempnerforge`."""

from __future__ import annotations

import sys

from verbatim.compat.kempnerforge.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
