"""Fixtures shared by all tests: engines over poisoned KV, a thread count that is put back."""

from __future__ import annotations

import os

# Threads that wait by sleeping: where other work shares the processors, spinning costs far more than
# it saves at toy sizes. Must be said before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A second thread computes nothing of a toy and costs a fifth of the processors' time. Tests of threads set
# their number.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Programs that tests start import what was installed, as the tests do, and not the sources beside them,
# which have kernels only where somebody built them there.
os.environ.setdefault("PYTHONSAFEPATH", "1")

# Triton's kernels run under its interpreter where there is no GPU. Must be said before Triton is imported.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import gc
import random
import signal
import sys
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

# A run looks at the examples that it looked at before, so that one that fails fails again. `pytest
# --hypothesis-profile=search` looks at others.
settings.register_profile(
    "same", settings.get_profile("default"), derandomize=True, deadline=None, print_blob=True
)
settings.register_profile(
    "search", settings.get_profile("default"), derandomize=False, deadline=None, print_blob=True
)
settings.load_profile("same")

# A shell starts background jobs with Ctrl-C ignored, nohup ignores SIGHUP, and Python and the programs that
# it starts leave it at that. Tests that send these signals need them, wherever they are run.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without the garbage collector, and exempt from it what is there by then.

    That is millions of objects which live to the end. Going through them took a third of the time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def _failures_stay_apart() -> Iterator[None]:
    """What a failed test left open ends here. Else it would in the next one, which would fail as well."""
    yield
    if hasattr(sys, "last_value"):  # with the frames of the failed test
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            vars(sys).pop(name, None)
        with warnings.catch_warnings(action="ignore"):
            gc.collect()


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Whatever ran before, a test that draws from torch's or Python's own generator draws the same."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _threads_put_back() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def poisoned_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch, freed and newly taken blocks, and slots of states, hold NaN, which shows in the answer."""
    from support.poison import poison, poison_blocks
    from verbatim import opening

    plain = opening.open_engine

    def poisoned(*args: Any, **kwargs: Any) -> Any:
        opened = plain(*args, **kwargs)
        store, pool = getattr(opened.runner, "store", None), opened.scheduler.pool
        if store is None:  # it lies elsewhere, and is poisoned there (tests/support/stages.py)
            return opened
        if store.nbytes > 64 * 2**20:  # reserved memory that is not touched stays free of charge
            return opened
        poison_blocks(pool, store, partial(poison, store), store.num_blocks)
        if (states := store.states) is not None:
            slots = opened.scheduler.states.pool
            poison_blocks(slots, store, partial(poison, states), states.num_slots, states)
        return opened

    monkeypatch.setattr(opening, "open_engine", poisoned)
    monkeypatch.setattr("verbatim.llm.open_engine", poisoned)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Compute by the kernels of each instruction set, and by torch ("none")."""
    with kernels.using(request.param):
        yield request.param


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Toys on the disk, each saved once."""
    from support import toys

    return toys.saver(tmp_path_factory, toys.make_toy)
