"""Python programs that tests start, which can import `tests` and the installed verbatim; and threads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from verbatim.placement.distributed.launcher import Launcher

TESTS = Path(__file__).parents[1]
# The `verbatim` command, independent of where its script is installed.
VERBATIM = [sys.executable, "-P", "-c", "from verbatim.cli import main; main()"]

# The same, but it writes a dot to stdout as soon as it handles signals; Ctrl-C may be sent from then on.
FROM_THE_DOT = """
import os
from verbatim.cli import interrupts, main
handle = interrupts.handle
def handle_from_the_dot():
    handle()
    os.write(1, b".")
interrupts.handle = handle_from_the_dot
main()
"""


def environment(*, within_reach: Path = TESTS, **more: str) -> dict[str, str]:
    """Return this process's environment, with one more folder on PYTHONPATH."""
    path = os.pathsep.join(filter(None, [str(within_reach), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **more}


PATIENCE_S = 240.0  # timeout that a busy machine does not reach


def until(done: Callable[[], Any]) -> None:
    """Wait for a condition."""
    end = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.002)


def in_thread(call: Callable[..., Any], *args: Any) -> Future[Any]:
    """Make a call in a daemon thread, which does not keep a failed test from ending."""
    future = Future[Any]()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(call(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


@contextmanager
def started(line: list[str], **settings: Any) -> Iterator[subprocess.Popen[Any]]:
    """Run a program during a block; it is killed and its pipes are closed at the end."""
    with subprocess.Popen(line, **settings) as process:
        try:
            yield process
        finally:
            process.kill()


def state_of(pid: int) -> str:
    """Return the letter of a process's state, such as "T" for stopped; "Z" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "Z"


def wait_for_a_signal(report: Callable[[str], None]) -> None:
    """Report "ready" like a worker, and wait for a signal."""
    report("ready")
    signal.pause()


def resident_bytes() -> int:
    """Return this process's resident memory in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run_program(*arguments: object, **more: str) -> str:
    """Run a program that can import tests, and return its stdout; `more` overrides its environment."""
    done = subprocess.run(
        [sys.executable, "-P", *map(str, arguments)],
        env=environment(**more),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def run_without_kernels(script: str, *arguments: object) -> None:
    """Run a script that can import tests, in a process without compiled kernels."""
    script = f"from verbatim import kernels\nassert kernels.library() is None\n{script}"
    run_program("-W", "ignore", "-c", script, *arguments, VERBATIM_KERNELS="none")


def run_ranks(world: int, folder: Path, module: str, *arguments: object) -> list[Any]:
    """Return what `main` of `support.MODULE` returns in each rank of a gloo process group.

    Args:
        folder: folder for the rendezvous file and the results.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        launcher = Launcher("support.programs:be_rank")
    try:
        given = [module, *map(str, (folder / f"store-{module}", *arguments))]
        ranks = [launcher.start(rank=rank, world=world, arguments=given) for rank in range(world)]
        files = [rank.wait_for_message(time.monotonic() + 800.0) for rank in ranks]
        assert all(rank.wait(PATIENCE_S) for rank in ranks)
        assert [rank.ended for rank in ranks] == ["exit status 0"] * world
        return [json.loads(Path(file).read_text()) for file in files]
    finally:
        launcher.close()


def be_rank(rank: int, world: int, arguments: list[str], report: Callable[[object], None]) -> None:
    """Join the group, and report a file with the result of the module's `main(rank, world, *arguments)`.

    After the group is destroyed, call the module's `ended`, if it has one.
    """
    import torch
    import torch.distributed as dist

    name, store, *rest = arguments
    module = import_module(f"support.{name}")
    torch.set_num_threads(1)
    group = dict(rank=rank, world_size=world, timeout=timedelta(seconds=240))
    dist.init_process_group("gloo", store=dist.FileStore(store, world), **group)
    file = Path(f"{store}-{rank}.json")
    file.write_text(json.dumps(module.main(rank, world, *rest)))
    report(str(file))
    dist.barrier()  # no rank may leave while another still communicates with it
    dist.destroy_process_group()
    if ended := getattr(module, "ended", None):
        ended()
