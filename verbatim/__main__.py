"""`python -m verbatim`: the `verbatim` command if its script is not on the path."""

from __future__ import annotations

from verbatim.cli import main

if __name__ == "__main__":
    main()
