"""Python programs that tests start, with `tests` within reach and verbatim as installed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from verbatim.placement.distributed.launcher import Launcher

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


def run_ranks(world: int, module: str, *arguments: object) -> list[Any]:
    """Return what `main` of `support.MODULE` reports, called in a process for each rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        launcher = Launcher(f"support.{module}:main")
    try:
        said = [str(argument) for argument in arguments]
        ranks = [launcher.start(rank=rank, world=world, arguments=said) for rank in range(world)]
        found = [rank.wait_for_message(time.monotonic() + 200.0) for rank in ranks]
        assert all(rank.wait(60.0) for rank in ranks)
        assert [rank.ended for rank in ranks] == ["exit status 0"] * world
        return found
    finally:
        launcher.close()
