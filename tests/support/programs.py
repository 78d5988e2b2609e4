"""Python programs that tests start, with `tests` within reach and verbatim as installed; and threads."""

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
# The `verbatim` command, wherever its script is installed.
VERBATIM = [sys.executable, "-P", "-c", "from verbatim.cli import main; main()"]

# The same; Ctrl-C may come at any time after the dot, which it writes as soon as it handles signals.
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
    """This process's, in which the modules of one more folder are found."""
    path = os.pathsep.join(filter(None, [str(within_reach), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **more}


PATIENCE_S = 240.0  # with what a busy machine does late


def until(done: Callable[[], Any]) -> None:
    """Wait for a condition."""
    end = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.002)


def in_thread(call: Callable[..., Any], *args: Any) -> Future[Any]:
    """Make a call in a thread of its own, which a failed test leaves behind."""
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
    """Start a program, which ends with the block at the latest, and so do its pipes."""
    with subprocess.Popen(line, **settings) as process:
        try:
            yield process
        finally:
            process.kill()


def state_of(pid: int) -> str:
    """Return the letter of a process's state, such as "T" of a stopped one; "Z" where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "Z"


def wait_for_a_signal(report: Callable[[str], None]) -> None:
    """Report as a worker, and wait for a signal."""
    report("ready")
    signal.pause()


def resident_bytes() -> int:
    """Return this process's resident memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run_program(*arguments: object, **more: str) -> str:
    """Return what a program prints that may import tests; `more` goes over its environment."""
    done = subprocess.run(
        [sys.executable, "-P", *map(str, arguments)],
        env=environment(**more),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def run_without_kernels(script: str, *arguments: object) -> None:
    """Run a script that may import tests, where no compiled kernel is loaded."""
    script = f"from verbatim import kernels\nassert kernels.library() is None\n{script}"
    run_program("-W", "ignore", "-c", script, *arguments, VERBATIM_KERNELS="none")


def run_ranks(world: int, folder: Path, module: str, *arguments: object) -> list[Any]:
    """Return what `main` of `support.MODULE` returns in each rank of a group of gloo's.

    Args:
        folder: for what ranks find each other by, and for their results.
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
    """Join the group, and report a file with what the module's `main(rank, world, *arguments)` returns.

    When the group has ended, call its `ended`, if it has one.
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
    dist.barrier()  # or one is gone while another still talks to it
    dist.destroy_process_group()
    if ended := getattr(module, "ended", None):
        ended()
