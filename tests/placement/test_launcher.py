"""The interpreter that forks workers."""

from __future__ import annotations

import json
import subprocess
import sys

from verbatim.placement.distributed.launcher import Launcher


def test_workers_that_end_together_end_no_other() -> None:
    """The signal of one may come while another is reaped, and end the launcher with all that it started."""
    launcher = Launcher("builtins:dict")
    try:
        for _ in range(3):
            workers = [launcher.start() for _ in range(40)]
            assert all(worker.wait(30.0) for worker in workers)
            assert {worker.ended for worker in workers} == {"exit status 0"}
    finally:
        launcher.close()


def test_a_launcher_that_its_owner_has_left_ends_without_a_word() -> None:
    line = [sys.executable, "-P", "-m", "verbatim.placement.distributed.launcher", "builtins:dict"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(line, **pipes)  # type: ignore[call-overload]
    process.stdout.close()
    process.stdout = None
    order = json.dumps({"start": 0, "arguments": {}}).encode() + b"\n"
    assert process.communicate(order, timeout=60)[1] == b""
    assert process.returncode == 0
