"""The exchange of tensors between ranks in shared memory, and its errors when a rank is gone."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from support.pairwise import slow_but
from verbatim.errors import TierFailed
from verbatim.placement.distributed import exchange
from verbatim.placement.distributed.exchange import Exchange, meeting_place


@pytest.fixture(params=["kernel", "torch"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(exchange, "kernel", lambda name: None)


def on_ranks(size: int, work: Callable[[Exchange], Any], timeout_s: float = 30.0) -> list[Any]:
    """Run `work` on `size` ranks, each in a thread, and return the results by rank."""

    def run(rank: int) -> Any:
        ranks = Exchange(meeting, rank, size, timeout_s)
        try:
            return work(ranks)
        finally:
            ranks.close()

    with meeting_place(size) as meeting, ThreadPoolExecutor(size) as pool:
        return [*pool.map(run, range(size))]


@pytest.mark.parametrize("size", slow_but([3], [1, 2, 3]))
def test_columns_are_gathered_from_all_ranks(size: int, backend: None) -> None:
    cases = [(1, [7] * size), (5, [3 + 2 * r for r in range(size)]), (3, [300_000] * size)]
    cases += [(0, [4] * size), (70, [9_001 + r for r in range(size)])]  # larger than a slot

    def work(ranks: Exchange) -> list[bool]:
        right = []
        for turn in range(4):
            for number, (rows, widths) in enumerate(cases):
                bounds = [0, *accumulate(widths)]
                noise = torch.Generator().manual_seed(10 * turn + number)
                whole = torch.randn(rows, bounds[-1], generator=noise)
                whole = whole.bfloat16() if number % 2 else whole
                own = whole[:, bounds[ranks.rank] : bounds[ranks.rank + 1]]
                right.append(torch.equal(ranks.columns(own, bounds), whole))
                last = ranks.columns(own[None], bounds, destination=size - 1)
                expected = whole if ranks.rank == size - 1 else torch.zeros_like(whole)
                right.append(torch.equal(last, expected[None]))
                with ranks.on_all_ranks():
                    right.append(torch.equal(ranks.columns(own, bounds, destination=0), whole))
        return right

    for right in on_ranks(size, work):
        assert len(right) == 60 and all(right)


def test_rows_are_gathered_from_all_ranks(backend: None) -> None:
    def work(ranks: Exchange) -> list[bool]:
        right = []
        for counts in ([2, 0, 5], [0, 0, 0], [0, 1, 0], [900, 3, 1200]):  # larger than a slot
            whole = torch.randn(sum(counts), 500, generator=torch.Generator().manual_seed(1))
            starts = [0, *accumulate(counts)]
            own = whole[starts[ranks.rank] : starts[ranks.rank + 1]]
            right.append(torch.equal(ranks.rows(own, counts), whole))
        return right

    assert on_ranks(3, work) == [[True] * 4] * 3


def test_departed_rank_raises_tier_failed_before_timeout(backend: None) -> None:
    def work(ranks: Exchange) -> str:
        if ranks.rank == 1:
            return ""
        start = time.monotonic()
        with pytest.raises(TierFailed, match=r"rank [02] lost rank [012]") as error:
            ranks.columns(torch.ones(1, 2), [0, 2, 4, 6])
        assert time.monotonic() - start < 20
        return str(error.value)

    assert all(on_ranks(3, work)[::2])


@pytest.mark.skipif(sys.platform != "linux", reason="processes are named by Linux")
def test_process_name_cut_inside_a_character_is_read() -> None:
    set_name, get_name = 15, 16  # PR_SET_NAME, PR_GET_NAME
    prctl, before = ctypes.CDLL(None).prctl, ctypes.create_string_buffer(16)
    prctl(get_name, before)
    prctl(set_name, b"abcdefgmod\xc3\xa8le\xc3\xa9")
    try:
        assert Path("/proc/self/comm").read_bytes() == b"abcdefgmod\xc3\xa8le\xc3\n"
        assert not exchange._has_ended(os.getpid())
    finally:
        prctl(set_name, before)


def test_missing_rank_raises_tier_failed_after_timeout(backend: None) -> None:
    with meeting_place(2) as meeting, pytest.raises(TierFailed, match=r"waited 0.2 s for rank 1"):
        Exchange(meeting, 0, 2, 0.2)


def test_closed_meeting_place_is_not_written_to(tmp_path: Path) -> None:
    """Another file may have its descriptor number by then."""
    with meeting_place(2) as meeting:
        pass
    path = tmp_path / "weights"
    path.write_bytes(bytes(1 << 20))
    with open(path, "rb") as file:
        where, _, name = meeting.partition(" ")
        where = f"{where.rpartition('/')[0]}/{file.fileno()}"
        with pytest.raises(TierFailed, match="the exchange is closed"):
            Exchange(f"{where} {name}", 1, 2, 0.2)
    assert path.read_bytes() == bytes(1 << 20)
    with pytest.raises(TierFailed, match="No such file"):
        Exchange(meeting, 1, 2, 0.2)


@pytest.mark.parametrize("turn", [2**31 - 3, 2**32 - 3])
def test_turn_counter_wraps_around(turn: int, backend: None) -> None:
    def work(ranks: Exchange) -> list[bool]:
        barrier.wait()
        ranks._turn = turn
        ranks._lines(ranks._memory)[ranks.rank, 0] = exchange._wrapped(turn)
        barrier.wait()
        whole = torch.arange(6.0)[None]
        own = whole[:, 3 * ranks.rank : 3 * ranks.rank + 3]
        return [torch.equal(ranks.columns(own + n, [0, 3, 6]), whole + n) for n in range(9)]

    barrier = threading.Barrier(2)
    assert on_ranks(2, work) == [[True] * 9] * 2


def test_closed_exchange_raises_tier_failed() -> None:
    def work(ranks: Exchange) -> None:
        ranks.close()
        with pytest.raises(TierFailed, match="has left the exchange"):
            ranks.columns(torch.ones(1, 2), [0, 2])

    on_ranks(1, work)


def test_killed_rank_raises_tier_failed() -> None:
    other = (
        "import sys, time, torch\n"
        "from verbatim.placement.distributed.exchange import Exchange\n"
        "ranks = Exchange(sys.argv[1], 1, 2, 60.0)\n"
        "ranks.columns(torch.ones(1, 1), [0, 1, 2])\n"
        "time.sleep(600)\n"
    )
    with (
        meeting_place(2) as meeting,
        subprocess.Popen([sys.executable, "-c", other, meeting]) as process,
    ):
        ranks = Exchange(meeting, 0, 2, 60.0)
        assert ranks.columns(torch.zeros(1, 1), [0, 1, 2]).tolist() == [[0.0, 1.0]]
        process.send_signal(signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(TierFailed, match="lost rank 1, which has ended"):
            ranks.columns(torch.ones(1, 1), [0, 1, 2])
        assert time.monotonic() - start < 30
        ranks.close()
