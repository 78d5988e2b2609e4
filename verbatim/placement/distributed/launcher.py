"""Worker processes on this machine: one interpreter imports all modules once, and is forked for each worker.

`python -m verbatim.placement.distributed.launcher MODULE:FUNCTION` is that interpreter. It reads orders from
stdin and writes reports to stdout, both as lines of JSON.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import IO, Any

from verbatim.errors import VerbatimError

HOST = "127.0.0.1"  # the address at which workers of this machine listen
_KILL_S = 5.0  # time limit until a killed worker is reaped
_CHECK_S = 1.0  # interval at which the launcher checks that its owner is alive
_PR_SET_PDEATHSIG = 1  # of prctl(2)
_log = logging.getLogger("verbatim.cluster")


def worker_environment() -> dict[str, str]:
    """Return environment variables for a process that imports this package."""
    home = str(Path(__file__).parents[3])
    path = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
    return {"OMP_WAIT_POLICY": "passive", **os.environ, "PYTHONPATH": path}


class WorkerProcess:
    """A process that a `Launcher` has forked or is about to fork."""

    machine = HOST

    def __init__(self, number: int, launcher: Launcher) -> None:
        self.number = number
        self.pid: int | None = None  # None until the process is forked
        self.message: Any = None  # the value sent by `report`; None until then
        self.returncode: int | None = None  # as in `subprocess.Popen`; None while it runs
        self.address = (HOST, 0)  # at which it listens, if it is a server
        self._launcher = launcher

    def wait_for_message(self, deadline: float) -> Any:
        """Return `message`; raise VerbatimError if the process ends without one, or `deadline` is over."""
        changed = self._launcher.changed
        with changed:
            changed.wait_for(
                lambda: self.message is not None or self.returncode is not None,
                max(0.0, deadline - time.monotonic()),
            )
        if self.message is None:
            ended = "no answer in time" if self.returncode is None else self.ended
            raise VerbatimError(f"no worker process started on this machine: {ended}")
        return self.message

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the process ends; return whether it has ended."""
        with self._launcher.changed:
            return self._launcher.changed.wait_for(lambda: self.returncode is not None, timeout_s)

    @property
    def ended(self) -> str:
        """The signal or exit status with which the process ended, as text."""
        code = self.returncode or 0
        return f"signal {-code}" if code < 0 else f"exit status {code}"

    def kill(self) -> None:
        """End the process at once; no effect if it has ended."""
        if self.returncode is None:
            self._launcher.order({"kill": self.number})
            if not self.wait(_KILL_S):
                _log.warning("process %s was killed %s s ago, and has not ended", self.pid, _KILL_S)


class Launcher:
    """Forks workers that call one function. All of them end with this process.

    Args:
        target: "module:function" or "module:class.method"; called with the arguments of `start`, and with
            `report`, a function that sets `WorkerProcess.message` to a short JSON value.
    """

    def __init__(self, target: str) -> None:
        self.changed = threading.Condition()
        self._target = target
        self._workers: list[WorkerProcess] = []
        self._launch()

    def _launch(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, self._target],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=worker_environment(),
            start_new_session=True,  # Ctrl-C is for this process only
        )
        self._ended = False
        assert self._process.stdout is not None
        threading.Thread(target=self._listen, args=(self._process.stdout,), daemon=True).start()

    def start(self, **arguments: Any) -> WorkerProcess:
        """Begin to fork a worker, with keyword arguments of the target that JSON can represent."""
        with self.changed:
            if self._ended:  # the interpreter was killed, and all workers with it
                self.close()
                self._launch()
            worker = WorkerProcess(len(self._workers), self)
            self._workers.append(worker)
            self.order({"start": worker.number, "arguments": arguments})
        return worker

    def order(self, order: dict[str, Any]) -> None:
        """Send an order to the interpreter that forks."""
        assert self._process.stdin is not None
        with self.changed, suppress(OSError, ValueError):  # it has ended, and all workers with it
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()

    def _listen(self, stdout: IO[bytes]) -> None:
        for line in stdout:
            report = json.loads(line)
            with self.changed:
                worker = self._workers[report.pop("worker")]
                for name, value in report.items():
                    setattr(worker, name, value)
                self.changed.notify_all()
        with self.changed:
            self._ended = True
            for worker in self._workers:
                if worker.returncode is None:
                    worker.returncode = -signal.SIGKILL
            self.changed.notify_all()

    def close(self) -> None:
        """End all workers."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):  # the last order was never read
                pipe.close()


def _report(worker: int, pipe: int = 1, **facts: Any) -> None:
    line = json.dumps({"worker": worker, **facts}).encode() + b"\n"
    assert len(line) <= select.PIPE_BUF, "lines of several processes could be mixed"
    try:
        os.write(pipe, line)
    except BrokenPipeError:  # the process that started this one is gone
        os._exit(0)


def main() -> None:
    """Fork workers until the process that started this one is gone."""
    owner = os.getppid()
    module, _, name = sys.argv[1].partition(":")
    target: Callable[..., object] = attrgetter(name)(importlib.import_module(module))
    gc.freeze()  # workers' garbage collections then don't touch (and copy) these pages
    prctl, launcher = ctypes.CDLL(None).prctl, os.getpid()
    # The pid and number of each worker, by a pipe that its end closes. Workers are reaped in this loop only,
    # so none of these pids is ever reused by another process.
    workers: dict[int, tuple[int, int]] = {}
    unread = b""
    while True:
        ready, _, _ = select.select([0, *workers], [], [], _CHECK_S)
        if os.getppid() != owner:  # stdin may still be held by a process that the owner has forked
            os._exit(0)
        for pipe in workers.keys() & ready:
            os.close(pipe)
            pid, number = workers.pop(pipe)
            _, status = os.waitpid(pid, 0)
            _report(number, returncode=os.waitstatus_to_exitcode(status))
        if 0 not in ready:
            continue
        data = os.read(0, 65536)
        if not data:
            os._exit(0)
        *lines, unread = (unread + data).split(b"\n")
        for order in map(json.loads, lines):
            if "kill" in order:
                for pid, number in workers.values():
                    if number == order["kill"]:
                        os.kill(pid, signal.SIGKILL)
                continue
            number = order["start"]
            pipe, held = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # ends with the launcher, even if stopped
                if os.getppid() != launcher:  # it ended before the prctl
                    os._exit(0)
                _run(target, number, order["arguments"])
            os.close(held)
            workers[pipe] = pid, number
            _report(number, pid=pid)


def _run(target: Callable[..., object], number: int, arguments: dict[str, Any]) -> None:
    """Call the target in a worker, and end the process."""
    status = 1
    out = os.dup(1)
    os.dup2(2, 1)  # output of libraries must not mix with reports

    try:
        target(**arguments, report=lambda message: _report(number, out, message=message))
        status = 0
    except SystemExit:
        pass
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        # An orderly shutdown of torch and gloo would take seconds.
        os._exit(status)


if __name__ == "__main__":
    main()
