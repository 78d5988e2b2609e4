"""Signals, closed streams and full disks at any time while the command runs."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from support.programs import FROM_THE_DOT, VERBATIM, started

COMMANDS = {
    "help": ["--help"],
    "usage": ["generate", "x", "--n", "two"],
    "generate": ["generate", "Once", "--max-tokens", "900", "--ignore-eos"],
    "info": ["info"],
    "serve": ["serve", "--port", "0", "--log-level", "warning"],
}


def signalled(command, delay_s, number=signal.SIGINT):
    """Send a signal some time after the start; return the exit status and the lines on stderr."""
    line = [sys.executable, "-P", "-c", FROM_THE_DOT, *COMMANDS[command]]
    pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with started(line, text=True, **pipes) as process:
        assert process.stdout.read(1) == "."
        time.sleep(delay_s)
        process.send_signal(number)
        _, stderr = process.communicate()
    return process.returncode, [x for x in stderr.splitlines() if "compiled kernels" not in x]


def check_interrupted(command, delay_s):
    status, lines = signalled(command, delay_s)
    context = command, delay_s, status, lines
    if status != 130:  # it had ended, or is a server, which shuts down
        assert status == {"serve": 0, "usage": 2}.get(command, 0), context
        assert not any("Traceback" in line for line in lines), context
        return
    if command == "usage" and lines:  # the usage message, complete or cut by Ctrl-C
        lines = lines[-1:]
    if len(lines) > 1 and "finish: length" in lines[0]:  # it had generated and was exiting
        lines = lines[1:]
    assert len(lines) <= 1, context
    assert not lines or lines[0].endswith("interrupted"), context


@pytest.mark.parametrize(
    ("command", "delay_s"),
    [("help", 0), ("help", 0.03), ("usage", 0.06), ("generate", 0.2), ("info", 0.7)],
)
def test_ctrl_c_during_startup_prints_one_line(command, delay_s):
    check_interrupted(command, delay_s)


# What libraries may do with the exception that Ctrl-C raises.
TURNED = {
    "another error": "raise RuntimeError from error",
    "a status": "sys.exit(1)",
    "said by the command": "print('verbatim: interrupted', file=sys.stderr); sys.exit(130)",
    "swallowed before the model is open": "interrupts.restore_default(); sys.exit(0)",
    "ignored in a destructor": "A.__del__ = lambda self: throw(error); A()",
}


@pytest.mark.parametrize("turned", TURNED)
def test_ctrl_c_swallowed_or_converted_by_libraries_prints_one_line(turned):
    code = f"""
import signal, sys
from verbatim.cli import commands, interrupts, main
def throw(error): raise error
class A: pass
def app(prog_name):
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt as error:
        {TURNED[turned]}
    sys.exit(1)
commands.app = app
main()"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "verbatim: interrupted\n")


def test_second_ctrl_c_does_not_interrupt_shutdown():
    code = """
import signal
from verbatim.cli import commands, interrupts, main
interrupts._terminal.restore = lambda: signal.raise_signal(signal.SIGINT)
commands.app = lambda prog_name: signal.raise_signal(signal.SIGINT)
main()"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "verbatim: interrupted\n")


def test_ctrl_c_in_destructor_interrupts_the_following_code():
    code = """
import signal, time
from verbatim.cli import commands, interrupts, main
class A:
    def __del__(self): signal.raise_signal(signal.SIGINT)
def app(prog_name):
    interrupts.restore_default()
    try:
        A()
        time.sleep(3600)
    finally:
        print("closed")
commands.app = app
main()"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (130, "closed\n")
    assert done.stderr == "verbatim: interrupted\n"


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_at_any_time_prints_one_line(command):
    end, step = (0.25, 0.02) if command in ("help", "usage") else (3.5, 0.25)
    for i in range(round(end / step)):
        check_interrupted(command, i * step + random.random() * step)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name)
def test_other_signals_during_startup_print_nothing(number):
    assert signalled("generate", 0.1, number) == (-number, [])


def test_importing_cli_package_imports_no_large_modules():
    code = "import sys; import verbatim.cli; print({'typing', 're', 'typer'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-P", "-S", "-c", f"sys = __import__('sys'); sys.path[:] = {sys.path}\n{code}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    "start",
    [
        "from verbatim.cli import main; main()",
        "import runpy; runpy.run_module('verbatim.compat.kempnerforge', run_name='__main__')",
    ],
    ids=["verbatim", "kempnerforge"],
)
def test_entry_point_handles_ctrl_c_before_its_imports(start):
    code = (
        "import sys; from verbatim.cli import interrupts\n"
        f"interrupts.handle = lambda: sys.exit('typer' in sys.modules)\n{start}"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code]).returncode == 0


def test_ignored_sigint_stays_ignored():
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + FROM_THE_DOT
    code = code.replace("main()\n", "os.kill(os.getpid(), signal.SIGINT); main()\n")
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, "--version"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def shell(line):
    """Run a shell command line in which "$@" is `verbatim`."""
    return subprocess.run(["bash", "-c", line, "bash", *VERBATIM], capture_output=True, text=True)


@pytest.mark.parametrize("args", ["--help", "--version"])
def test_help_into_closed_pipe_exits_with_141(args):
    done = shell(f'"$@" {args} | true; exit ${{PIPESTATUS[0]}}')
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("args", ["--help", "--version"])
def test_help_on_full_disk_prints_one_line(args):
    done = shell(f'"$@" {args} > /dev/full')
    assert done.returncode == 1
    assert done.stderr == "verbatim: can't write to stdout: No space left on device\n"


@pytest.mark.slow
@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
def test_generated_text_does_not_depend_on_stderr(redirection):
    done = shell(f'"$@" generate hi --max-tokens 2 --seed 3 {redirection}')
    assert done.returncode == 0
    assert done.stdout == shell('"$@" generate hi --max-tokens 2 --seed 3').stdout


def test_opened_files_do_not_reuse_closed_standard_descriptors(tmp_path):
    code = (
        "import os\nfrom verbatim.cli import commands, main\n"
        f"commands.run = lambda: os.open({str(tmp_path / 'x')!r}, os.O_CREAT | os.O_WRONLY)\nmain()"
    )
    line = f'exec "{sys.executable}" -P -c "$0" <&- >&- 2>&-'
    done = subprocess.run(["bash", "-c", line, code], env=os.environ)
    assert done.returncode > 2  # the descriptor of the file
