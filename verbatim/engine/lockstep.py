"""Ranks that run side by side, with equally many forwards on each.

A model whose forward talks to other ranks hangs as soon as one of them makes a forward less. So nobody stops
while anybody has work: a rank whose requests are done runs the model for nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from verbatim.core import Request, Result
from verbatim.engine.driver import Driver
from verbatim.engine.dummy import dummy_forward
from verbatim.errors import InvalidRequest, RequestFailed


def run_together(begin: Callable[[], tuple[Driver, list[Request]]], group: Any) -> list[Result]:
    """What `Driver.run` does, on all ranks of a process group at once; each brings its own requests, or none.

    Nobody else may use the engine meanwhile.

    Args:
        begin: this rank's engine and requests. If it raises, all ranks raise.
        group: of torch.distributed, with a backend that reduces tensors on the CPU (gloo).

    Raises:
        RequestFailed: another rank couldn't go on. What a request of this rank ended with.
    """
    requests: list[Request] = []
    try:
        try:
            driver, requests = begin()
            for request in requests:
                driver.submit(request)
            while _anybody(group, [r for r in requests if not r.finished]):
                _one_forward(driver)
        except _AnotherRank as gone:
            raise RequestFailed(
                f"rank {gone.rank} of the process group could not go on, so no rank does"
            ) from None
        except BaseException:
            _agree(group, 0, failed=True)  # where the others are about to meet
            raise
    finally:
        for request in requests:
            driver.abort(request)  # those that have ended are left alone
    for request in requests:
        if request.error is not None:
            raise request.error
    return [request.result for request in requests if request.result is not None]


class _AnotherRank(Exception):
    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank


def _anybody(group: Any, left: list[Request]) -> bool:
    """Does any rank have work left?"""
    most, failed = _agree(group, len(left), failed=False)
    if failed >= 0:
        raise _AnotherRank(failed)
    return most > 0


def _agree(group: Any, left: int, *, failed: bool) -> tuple[int, int]:
    """The most that any rank has left, and a rank that failed; -1 where none did."""
    state = torch.tensor([left, dist.get_rank(group) if failed else -1])
    dist.all_reduce(state, op=dist.ReduceOp.MAX, group=group)
    most, rank = state.tolist()
    return most, rank


def _one_forward(driver: Driver) -> None:
    runner = driver.engine.runner
    before = runner.num_forwards
    driver.step()
    if runner.num_forwards == before:
        dummy_forward(driver)


def rank_of(group: Any) -> int:
    """This process's rank in a process group; 0 where there is none.

    Raises:
        InvalidRequest: it is no group, or this process is not in it.
    """
    if group is None:
        return 0
    if not dist.is_initialized():
        raise InvalidRequest("process_group: torch.distributed is not initialised")
    try:
        rank = dist.get_rank(group)
    except Exception as error:
        raise InvalidRequest(f"process_group={group!r} is no process group: {error}") from None
    if rank < 0:
        raise InvalidRequest("process_group: this process is not one of its ranks")
    return rank
