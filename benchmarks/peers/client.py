"""The driver's side of the protocol: the process of one system, stopped except in its turns."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import decode

ROOT = Path(__file__).parent.parent.parent


def environment() -> dict[str, str]:
    """Return the environment variables of a process that runs a module of this package."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}


class PeerFailed(Exception):
    """A command failed or its process died; the message is the system's."""


class Peer:
    """One system's process. Use it in a `with` block, which ends it.

    Args:
        command: command line of the process.
        timeout_s: maximum seconds of a call; then the process is killed.
    """

    def __init__(self, name: str, command: list[str], *, timeout_s: float = 600.0) -> None:
        self.name = name
        self._timeout_s = timeout_s
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        try:
            self._process = self._start(command)
        except OSError:
            self._log.close()
            raise

    def _start(self, command: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=ROOT,
            env=environment(),
        )

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGCONT)
        assert self._process.stdin is not None
        with suppress(OSError):  # it may have ended before
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def call(self, do: str, **arguments: Any) -> Any:
        """Resume the process, send it a command, and stop it again once it has answered.

        Raises:
            PeerFailed: the command failed, or the process died or took more than `timeout_s`.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        self._process.send_signal(signal.SIGCONT)
        watchdog = threading.Timer(self._timeout_s, self._process.kill)
        watchdog.start()
        try:
            stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            watchdog.cancel()
        if not line:
            self._process.wait(10)
            raise PeerFailed(f"{self.name} ended in {do!r}: {self._last_output()}")
        self._process.send_signal(signal.SIGSTOP)
        answer = json.loads(line)
        if "error" in answer:
            raise PeerFailed(f"{self.name}, {do}: {answer['error']}")
        return decode(answer["answer"])

    def _last_output(self) -> str:
        self._log.seek(0)
        lines = [line for line in self._log.read().splitlines() if line.strip()]
        return " / ".join(lines[-3:]) or f"exit status {self._process.returncode}"
