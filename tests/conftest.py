"""Fixtures shared by all tests: engines with poisoned KV blocks, restored thread counts and seeds."""

from __future__ import annotations

import os

# Waiting OpenMP threads sleep: on shared processors, spinning costs far more than it saves at toy sizes.
# Must be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A second thread gets no work from a toy and costs a fifth of the processor time. Tests of threads set their
# number.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Programs started by tests import the installed package, like the tests do, instead of the source tree,
# which may have no compiled kernels.
os.environ.setdefault("PYTHONSAFEPATH", "1")

# Without a GPU, Triton's kernels run in its interpreter. Must be set before Triton is imported.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import gc
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from support.backends import BACKENDS
from verbatim import kernels

# Every run tries the same examples, so that failures are reproducible. `pytest
# --hypothesis-profile=search` tries others.
settings.register_profile(
    "same", settings.get_profile("default"), derandomize=True, deadline=None, print_blob=True
)
settings.register_profile(
    "search", settings.get_profile("default"), derandomize=False, deadline=None, print_blob=True
)
settings.load_profile("same")

# Shells start background jobs with SIGINT ignored, nohup ignores SIGHUP, and Python and its child processes
# inherit that. Tests that send these signals need the default handlers.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests with the garbage collector off, then exempt all existing objects from it.

    Those are millions of objects that live until the end. Scanning them took a third of the time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def _failures_stay_apart() -> Iterator[None]:
    """Collect what a failed test left open, or it would be collected in the next test and fail that too."""
    yield
    if hasattr(sys, "last_value"):  # it holds the frames of the failed test
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            vars(sys).pop(name, None)
        with warnings.catch_warnings(action="ignore"):
            gc.collect()


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Seed torch's and Python's generators, so that the draws of a test don't depend on earlier tests."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _threads_put_back() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def poisoned_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill scratch, freed and new KV blocks and state slots with NaN, so that stale reads show in outputs."""
    from support.poison import poison, poison_blocks
    from verbatim.api import opening

    plain = opening.open_engine

    def poisoned(*args: Any, **kwargs: Any) -> Any:
        opened = plain(*args, **kwargs)
        store, pool = getattr(opened.runner, "store", None), opened.scheduler.pool
        if store is None:  # it is elsewhere, and poisoned there (tests/support/stages.py)
            return opened
        if store.nbytes > 64 * 2**20:  # writing would commit memory that is only reserved
            return opened
        poison_blocks(pool, store, partial(poison, store), store.num_blocks)
        if (states := store.states) is not None:
            slots = opened.scheduler.states.pool
            poison_blocks(slots, store, partial(poison, states), states.num_slots, states)
        return opened

    monkeypatch.setattr(opening, "open_engine", poisoned)
    monkeypatch.setattr("verbatim.api.llm.open_engine", poisoned)


@pytest.fixture(scope="session", autouse=True)
def _quick_measurements() -> Iterator[None]:
    """Measure a machine's speeds with few bytes: each process and each folder of a disk tier is measured."""
    from verbatim.placement.offload import machine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "_MATRIX", (256, 256))
        patch.setattr(machine, "_WEIGHT_BYTES", 1_000_000)
        patch.setattr(machine, "_WRITE_BYTES", 1_000_000)
        yield


@pytest.fixture
def no_thread_left() -> Iterator[None]:
    """Check that a test leaves no thread of Verbatim that it started."""
    before = threading.enumerate()  # including those of other tests' engines, not collected yet
    yield
    left = set(threading.enumerate()).difference(before)
    assert not [thread.name for thread in left if thread.name.startswith("verbatim")]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test with the kernels of each instruction set, and with torch only ("none")."""
    with kernels.using(request.param):
        yield request.param


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function to the folder of a toy, which is saved on first use."""
    from support import toys

    return toys.saver(tmp_path_factory, toys.make_toy)
