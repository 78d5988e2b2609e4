"""Python programs that tests start, with `tests` within reach and verbatim as installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
# The `verbatim` command, wherever its script is installed.
VERBATIM = [sys.executable, "-P", "-c", "from verbatim.cli import main; main()"]


def environment(*, within_reach: Path = TESTS, **more: str) -> dict[str, str]:
    """This process's, in which the modules of one more folder are found."""
    path = os.pathsep.join(filter(None, [str(within_reach), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **more}


def run_without_kernels(script: str, *arguments: object) -> None:
    """Run a script that may import tests, where no compiled kernel is loaded."""
    script = f"from verbatim import kernels\nassert kernels.library() is None\n{script}"
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, *map(str, arguments)],
        env=environment(VERBATIM_KERNELS="none"),
        check=True,
        timeout=240,
    )
