"""Python programs that tests start, with `tests` within reach and verbatim as installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
# The `verbatim` command, wherever its script is installed.
VERBATIM = [sys.executable, "-P", "-c", "from verbatim.cli import main; main()"]


def environment(*, within_reach: Path = TESTS, **more: str) -> dict[str, str]:
    """This process's, in which the modules of one more folder are found."""
    path = os.pathsep.join(filter(None, [str(within_reach), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **more}


def resident_bytes() -> int:
    """Return this process's resident memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run_without_kernels(script: str, *arguments: object) -> None:
    """Run a script that may import tests, where no compiled kernel is loaded."""
    script = f"from verbatim import kernels\nassert kernels.library() is None\n{script}"
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, *map(str, arguments)],
        env=environment(VERBATIM_KERNELS="none"),
        check=True,
        timeout=240,
    )


def run_ranks(world: int, program: str, *arguments: object) -> list[dict[str, Any]]:
    """Run `support/PROGRAM RANK WORLD ARGUMENTS` for each rank; return the JSON that each printed last."""
    command = [sys.executable, "-P", str(TESTS / "support" / program)]
    ranks = [
        subprocess.Popen(
            [*command, *map(str, (rank, world, *arguments))],
            env=environment(GLOO_SOCKET_IFNAME="lo"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    found = []
    try:
        for process in ranks:
            out, err = process.communicate(timeout=200)
            assert process.returncode == 0, err
            found.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    return found
