"""Ranks that run side by side, with equally many forwards on each.

A model whose forward talks to other ranks hangs as soon as one of them makes a forward less. So nobody stops
while anybody has work: a rank whose requests are done runs the model for nobody. Before each forward all
meet, and whoever can't go on says so there and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# Default arguments of this module hold the process group that is the default one at its first import, by
# transformers if not here. That group outlives destroy_process_group, and its threads free tensors while
# the interpreter ends, which aborts the process.
if dist.is_available():
    import torch.distributed.nn

from verbatim.core import Request, Result
from verbatim.engine.handle import EngineHandle
from verbatim.errors import NotSupported, RequestFailed
from verbatim.options import rank_of
from verbatim.shield import Shield


def run_together(
    begin: Callable[[], tuple[EngineHandle, list[Request]]], group: Any
) -> list[Result]:
    """Run requests to their end on all ranks of a process group at once; a rank may have none.

    Nobody else may use the engine meanwhile. Ctrl-C counts at the next meeting, a step later at most. A
    forward that fails before its own talk to the other ranks leaves them waiting in theirs, until the
    group's timeout.

    Args:
        begin: this rank's engine and requests. If it raises, all ranks raise.
        group: of torch.distributed, with a backend that reduces tensors on the CPU (gloo); None stands for
            this process alone.

    Raises:
        InvalidRequest: it is no group, or this process is not in it.
        NotSupported: drafts for which somebody else's module makes forwards of its own.
        RequestFailed: another rank couldn't go on. What a request of this rank ended with.
    """
    if group is None:
        handle, requests = begin()
        return handle.run(requests)
    rank_of(group)
    requests, error, gone = [], None, None
    shield = Shield()
    with shield.up():
        try:
            try:
                handle, requests = begin()
                handle.check_awake()
                _check_drafts(handle)
                for request in requests:
                    handle.submit(request)
            except BaseException as raised:
                error = raised
            while True:
                left = sum(not request.finished for request in requests)
                most, gone = _meet(group, left, failed=error is not None or shield.held)
                if gone is not None or not most:
                    break
                try:
                    _one_forward(handle)
                except BaseException as raised:
                    error = raised
        finally:
            for request in requests:
                handle.abort(request)  # those that have ended are left alone
        if error is not None:
            raise error
    if gone is not None:
        raise RequestFailed(f"rank {gone} could not go on, so no rank of its process group does")
    for request in requests:
        if request.error is not None:
            raise request.error
    return [request.result for request in requests if request.result is not None]


def _check_drafts(handle: EngineHandle) -> None:
    """Forwards of drafts differ in number from rank to rank, and nobody can know if they talk to others."""
    drafting = handle.drafting
    if drafting is not None and drafting.runs_live_module:
        raise NotSupported(
            f"a process group with drafts by {type(drafting.proposer).__name__}: they run a live module "
            "more often on some ranks than on others; leave draft at None, or take 'ngram'"
        )


def _meet(group: Any, left: int, *, failed: bool) -> tuple[int, int | None]:
    """The most that any rank has left, and a rank of the world that can't go on, if there is one."""
    state = torch.tensor([left, dist.get_rank() if failed else -1])
    dist.all_reduce(state, op=dist.ReduceOp.MAX, group=group)
    most, rank = state.tolist()
    return most, None if rank < 0 else rank


def _one_forward(handle: EngineHandle) -> None:
    before = handle.runner.num_forwards
    handle.step()
    if handle.runner.num_forwards == before:
        handle.dummy_forward()
