"""The interpreter that forks workers."""

from __future__ import annotations

import json
import subprocess
import sys

from support.programs import PATIENCE_S, run_program, started
from verbatim.placement.distributed.launcher import Launcher


def test_workers_that_end_together_end_no_other() -> None:
    """The signal of one may come while another is reaped or killed, and end the launcher with all of them."""
    launcher = Launcher("builtins:dict")
    try:
        for ends in ([], ["signal 9"], ["signal 9"]):
            workers = [launcher.start() for _ in range(40)]
            for number in [worker.number for worker in workers if ends] * 3:
                launcher.order({"kill": number})
            assert all(worker.wait(PATIENCE_S) for worker in workers)
            assert {worker.ended for worker in workers} <= {"exit status 0", *ends}
    finally:
        launcher.close()


def test_what_is_imported_before_a_fork_uses_no_gpu() -> None:
    """CUDA can't be used in a fork of a process that has used it."""
    run_program(
        "-c",
        "import torch\n"
        "def used(*_): raise AssertionError('CUDA')\n"
        "for name in ('is_available', 'device_count', 'init', '_lazy_init', 'current_device'):\n"
        "    assert hasattr(torch.cuda, name)\n"
        "    setattr(torch.cuda, name, used)\n"
        "import verbatim.placement.distributed.stage_share\n"
        "import verbatim.placement.distributed.rank_share\n",
    )


def test_a_launcher_that_its_owner_has_left_ends_without_a_word() -> None:
    line = [sys.executable, "-P", "-m", "verbatim.placement.distributed.launcher", "builtins:dict"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started(line, **pipes) as process:
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None
        order = json.dumps({"start": 0, "arguments": {}}).encode() + b"\n"
        assert process.communicate(order)[1] == b""
    assert process.returncode == 0
