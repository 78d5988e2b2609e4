"""The command on a terminal, whose state is restored however the command ends or stops."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios

import pytest

from support.programs import environment, state_of, until
from verbatim.cli.terminal import write_json

# The commands on a scripted engine that generates as long as a test needs.
SCRIPT = """
import sys, time
import verbatim
from support.scripted_llm import ScriptedLLM
class Slow(ScriptedLLM):
    WORDS = ["Once "] * 100_000
    def _deltas(self, *args):
        for delta in super()._deltas(*args):
            time.sleep(0.02)
            yield delta
vars(verbatim)["LLM"] = Slow
from verbatim.cli import main
main()
"""
SHOW, HIDE = b"\x1b[?25h", b"\x1b[?25l"


class Terminal:
    """A command whose controlling terminal is a pty, in a session of its own."""

    def __init__(self, script, *args):
        self._end, self.fd = os.openpty()
        self.found = termios.tcgetattr(self.fd)
        self.output, self._seen = b"", 0
        self._begin = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
        line = [sys.executable, "-P", "-c", self._begin + script, *args]
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), self.fd)
        self.process = subprocess.Popen(line, start_new_session=True, **streams)

    def until(self, text):
        """Read the output until a text appears after the text that the last call waited for."""
        self._read_until(lambda: text in self.output[self._seen :])
        self._seen = self.output.index(text, self._seen) + len(text)

    def press(self, keys):
        os.write(self._end, keys)

    def resize(self, rows, columns):
        fcntl.ioctl(self._end, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def until_raw(self):
        """Wait until readline waits for a key; it misses a signal that comes just before that."""
        self._read_until(
            lambda: (
                not termios.tcgetattr(self.fd)[3] & termios.ICANON
                and state_of(os.tcgetpgrp(self._end)) == "S"
            )
        )

    def ended(self):
        """Return the exit status. The terminal's state must be restored and its cursor shown."""
        self._read_until(lambda: self.process.poll() is not None)
        self._read()
        assert termios.tcgetattr(self.fd) == self.found
        assert self.output.rfind(HIDE) <= self.output.rfind(SHOW)
        assert b"Traceback" not in self.output
        return self.process.returncode

    def _read_until(self, done):
        try:
            until(lambda: self._read() or done())
        except AssertionError:
            raise AssertionError(self.output) from None

    def _read(self):
        while select.select([self._end], [], [], 0)[0]:
            self.output += os.read(self._end, 65536)

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self._end)
        os.close(self.fd)


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    monkeypatch.setenv("TERM", "xterm")
    begun = []

    def start(*args, script=SCRIPT):
        begun.append(Terminal(script, *args))
        return begun[-1]

    yield start
    for each in begun:
        each.close()


def test_json_is_written_to_a_replaced_stdout(monkeypatch):
    monkeypatch.setattr("sys.stdout", io.StringIO())
    write_json({"text": "é"})
    assert json.loads(sys.stdout.getvalue()) == {"text": "é"}


@pytest.mark.slow
def test_ctrl_c_message_is_on_a_line_of_its_own(terminal):
    started = terminal("generate", "Hello")
    started.until(b"Once ")
    started.press(b"\x03")
    assert started.ended() == 130
    assert re.search(rb"\r\n\d+ new tokens? in .* interrupted\r\n$", started.output)


@pytest.mark.slow
def test_chat_handles_ctrl_c_resize_and_invalid_utf8(terminal, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "utf-8:strict")  # as in locales other than C
    started = terminal("chat")
    started.until(b"> ")
    started.until_raw()
    started.press(b"Hi\r")
    started.until(b"Once ")
    started.resize(20, 50)
    started.press(b"\x03")
    started.until(b"(interrupted, seed ")
    started.until(b"\r\n> ")
    started.until_raw()
    started.press(b"\xff\r")
    started.until(b"this line is not UTF-8 text\r\n> ")
    started.until_raw()
    started.press(b"half a line")
    started.until(b"line")
    started.until_raw()
    started.press(b"\x03")
    assert started.ended() == 0
    assert started.output.endswith(b"\r\n")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_at_chat_prompt_restores_the_terminal(terminal, number):
    started = terminal("chat")
    started.until(b"> ")
    started.until_raw()
    started.process.send_signal(number)
    assert started.ended() == -number


def test_stopped_chat_restores_the_terminal_and_continues(terminal):
    # A shell that waits until its foreground command stops, and then continues it in the foreground.
    shell = f"""
import os, signal, sys
pid = os.fork()
if pid == 0:
    os.setpgid(0, 0)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    os.tcsetpgrp(0, os.getpgrp())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    exec({SCRIPT!r})
_, status = os.waitpid(pid, os.WUNTRACED)
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
os.tcsetpgrp(0, os.getpgrp())
os.write(1, b"stopped" if os.WIFSTOPPED(status) else b"ended")
sys.stdin.buffer.raw.readline()
os.tcsetpgrp(0, pid)
os.kill(pid, signal.SIGCONT)
_, status = os.waitpid(pid, 0)
os._exit(os.waitstatus_to_exitcode(status))
"""
    started = terminal("chat", script=shell)
    started.until(b"> ")
    started.until_raw()
    started.press(b"Hi")
    started.until(b"Hi")
    started.until_raw()
    started.press(b"\x1a")
    started.until(b"stopped")
    assert termios.tcgetattr(started.fd) == started.found
    started.press(b"fg\n")
    started.until_raw()
    started.press(b"\r")
    started.until(b"Once ")
    started.press(b"\x03")
    started.until(b"\r\n> ")
    started.until_raw()
    started.press(b"\x04")
    assert started.ended() == 0
    assert started.output.endswith(b"> \r\n")


PROGRESS = """
from verbatim.cli import interrupts
interrupts.handle()
from verbatim.cli.verify import _shown
with _shown(["again"]):
    {}
"""


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)]
)
def test_signal_during_progress_display_shows_the_cursor_again(terminal, tmp_path, number, status):
    slow = "import os, time; os.write(2, b'begun'); time.sleep(3600)"
    (tmp_path / "slow_import.py").write_text(slow)
    body = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import slow_import"
    started = terminal(script=PROGRESS.format(body))
    started.until(HIDE)
    started.until(b"begun")
    started.process.send_signal(number)
    assert started.ended() == status
    if number == signal.SIGINT:
        assert started.output.endswith(b"\r\x1b[Kverbatim: interrupted\r\n")
