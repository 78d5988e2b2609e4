"""The launcher, an interpreter that forks workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from support.programs import PATIENCE_S, environment, run_program, started, state_of, until
from verbatim.placement.distributed import launcher as launchers
from verbatim.placement.distributed.launcher import Launcher, WorkerProcess


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    launcher = Launcher("support.programs:wait_for_a_signal")
    yield launcher
    launcher.close()


def stopped(worker: WorkerProcess) -> int:
    """Stop a worker once it has reported; return its pid when it has stopped."""
    pid = reported(worker)
    stop(pid)
    return pid


def reported(worker: WorkerProcess) -> int:
    """Wait for the reports of a worker and of the launcher, and return the worker's pid."""
    assert worker.wait_for_message(time.monotonic() + PATIENCE_S)
    until(lambda: worker.pid is not None)
    return worker.pid or 0


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    until(lambda: state_of(pid) == "T")


@pytest.mark.parametrize("ends", ["is closed", "is killed", "loses its owner"])
def test_stopped_worker_ends_with_its_launcher(launcher: Launcher, ends: str) -> None:
    pid = stopped(launcher.start())
    if ends == "is closed":
        launcher.close()
    elif ends == "is killed":
        launcher._process.kill()
    else:
        assert launcher._process.stdin is not None
        launcher._process.stdin.close()
    until(lambda: state_of(pid) == "Z")


def test_workers_end_with_their_owner_while_its_fork_lives() -> None:
    """The fork holds the pipe to the launcher open."""
    script = (
        "import os, signal, time\n"
        "from verbatim.placement.distributed.launcher import Launcher\n"
        "worker = Launcher('support.programs:wait_for_a_signal').start()\n"
        f"worker.wait_for_message(time.monotonic() + {PATIENCE_S})\n"
        "while worker.pid is None: time.sleep(0.01)\n"
        "if child := os.fork():\n"
        "    print(worker.pid, child, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        f"time.sleep({PATIENCE_S})\n"
    )
    line = [sys.executable, "-P", "-c", script]
    with started(line, env=environment(), stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        worker, child = map(int, owner.stdout.readline().split())
        try:
            until(lambda: state_of(worker) == "Z")
            assert state_of(child) != "Z"
        finally:
            os.kill(child, signal.SIGKILL)


def test_worker_that_survives_kill_is_logged(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launchers, "_KILL_S", 0.1)
    worker = launcher.start()
    pid = reported(worker)
    stop(launcher._process.pid)
    worker.kill()
    assert f"process {pid} was killed" in caplog.text


def test_workers_ending_together_do_not_end_the_launcher() -> None:
    """A SIGCHLD that arrives while another worker is reaped or killed must not end the launcher."""
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


def test_imports_before_fork_do_not_use_cuda() -> None:
    """CUDA can't be used in a fork of a process that has used it."""
    run_program(
        "-c",
        "import torch\n"
        "def used(*_): raise AssertionError('CUDA')\n"
        "for name in ('is_available', 'device_count', 'init', '_lazy_init', 'current_device'):\n"
        "    assert hasattr(torch.cuda, name)\n"
        "    setattr(torch.cuda, name, used)\n"
        "import verbatim.placement.distributed.stage_share\n"
        "import verbatim.placement.distributed.tensor\n",
    )


def test_launcher_without_owner_ends_silently() -> None:
    line = [sys.executable, "-P", "-m", "verbatim.placement.distributed.launcher", "builtins:dict"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started(line, **pipes) as process:
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None
        order = json.dumps({"start": 0, "arguments": {}}).encode() + b"\n"
        assert process.communicate(order)[1] == b""
    assert process.returncode == 0
