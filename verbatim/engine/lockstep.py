"""Ranks in lockstep: every rank of a process group runs the same number of forwards.

A model with collectives in its forward hangs if one rank runs fewer forwards than the others. So a rank
without requests runs dummy forwards while any rank has work. Before each forward, an all-reduce synchronizes
the ranks, and reports a rank that failed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

# Imported here, before a process group exists: default arguments in torch.distributed.nn capture the default
# group at the first import, which transformers would trigger later. That group would outlive
# destroy_process_group, and its threads would free tensors at interpreter exit, which aborts the process.
if dist.is_available():
    import torch.distributed.nn

from verbatim.common.shield import Shield
from verbatim.core import Request, Result
from verbatim.engine.handle import Collective, EngineHandle
from verbatim.errors import NotSupported, RequestFailed
from verbatim.options import rank_of
from verbatim.placement.distributed.experts import ExpertGroup

_T = TypeVar("_T")


class Lockstep:
    """The `Collective` of ranks that have their own requests, and run the same number of forwards."""

    may_be_empty = True

    def __init__(self, group: ExpertGroup) -> None:
        self._group = group

    def run(self, handle: EngineHandle, admit: Callable[[], list[Request]]) -> list[Result]:
        handle.check_open()
        return run_together(lambda: (handle, admit()), self._group.group)

    def agree(self, work: Callable[[], _T]) -> _T:
        return work()  # each rank makes the same call

    def close(self) -> None:
        self._group.close()


def collective_of(collective: Any) -> Collective | None:
    """Return the `Collective` of a placement, from its `Placed.collective`; None for a single process."""
    return Lockstep(collective) if isinstance(collective, ExpertGroup) else collective


def run_together(
    begin: Callable[[], tuple[EngineHandle, list[Request]]], group: Any
) -> list[Result]:
    """Run requests to completion on all ranks of a process group; a rank may have none.

    The engine must not be used in any other way meanwhile. Ctrl-C takes effect at the next synchronization,
    at most one step later. If a forward fails before its collectives, the other ranks wait in theirs until
    the group's timeout.

    Args:
        begin: returns this rank's engine and requests. If it raises, all ranks raise.
        group: a torch.distributed group with a backend that reduces CPU tensors (gloo); None for this
            process alone.

    Raises:
        InvalidRequest: `group` is not a group, or this process is not in it.
        NotSupported: the proposer runs forwards of a live module.
        RequestFailed: another rank failed. The error of this rank's own request is raised unchanged.
    """
    if group is None:
        handle, requests = begin()
        return handle.run(requests)
    rank_of(group)
    requests, error, failed_rank = [], None, None
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
                unfinished = sum(not request.finished for request in requests)
                failed = error is not None or shield.pending
                max_unfinished, failed_rank = _synchronize(group, unfinished, failed=failed)
                if failed_rank is not None or not max_unfinished:
                    break
                try:
                    before = handle.runner.num_forwards
                    handle.step()
                    if handle.runner.num_forwards == before:
                        handle.dummy_forward()
                except BaseException as raised:
                    error = raised
        finally:
            for request in requests:
                handle.abort(request)  # no effect if it is finished
        if error is not None:
            try:
                raise error
            finally:
                error = None  # its traceback refers to this frame, and so to the group
    if failed_rank is not None:
        raise RequestFailed(f"rank {failed_rank} failed, so all ranks of its process group stop")
    for request in requests:
        if request.error is not None:
            raise request.error
    return [request.result for request in requests if request.result is not None]


def _check_drafts(handle: EngineHandle) -> None:
    """Refuse proposers that run forwards of a live module: the number of forwards differs between ranks."""
    drafting = handle.drafting
    if drafting is not None and drafting.runs_live_module:
        raise NotSupported(
            f"a process group with drafts by {type(drafting.proposer).__name__}: they run a live module "
            "more often on some ranks than on others; use draft=None or 'ngram'"
        )


def _synchronize(group: Any, unfinished: int, *, failed: bool) -> tuple[int, int | None]:
    """Return the maximum of `unfinished` over all ranks, and the world rank of a failed rank, if any."""
    state = torch.tensor([unfinished, dist.get_rank() if failed else -1], device="cpu")
    dist.all_reduce(state, op=dist.ReduceOp.MAX, group=group)
    max_unfinished, rank = state.tolist()
    return max_unfinished, None if rank < 0 else rank
