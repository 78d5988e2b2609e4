"""Calls that several processes make together: rank 0, the other ranks, and ranks in lockstep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from verbatim.core import Request, Result
from verbatim.engine.handle import Collective, EngineHandle
from verbatim.engine.lockstep import run_together
from verbatim.errors import InvalidRequest, RequestFailed, TierFailed
from verbatim.placement.distributed.experts import ExpertGroup
from verbatim.placement.distributed.following import Follower, Followers

_T = TypeVar("_T")


class Leading:
    """Rank 0 of the ranks that a user started: runs the calls, and sends the results to the others."""

    may_be_empty = False

    def __init__(self, group: Followers) -> None:
        self._group = group

    def run(self, handle: EngineHandle, requests: list[Request]) -> list[Result]:
        return self.agree(lambda: handle.run_here(requests))

    def agree(self, work: Callable[[], _T]) -> _T:
        try:
            result = work()
        except BaseException as error:
            if not isinstance(error, TierFailed):
                self._group.tell({"do": "failed", "error": f"{type(error).__name__}: {error}"})
            raise
        self._group.tell({"do": "results", "results": result})
        return result

    def close(self) -> None:
        """Do nothing: the runner ends the other ranks."""


class Following:
    """Another rank: waits until rank 0's call is over, and returns the same results."""

    may_be_empty = False

    def __init__(self, member: Follower) -> None:
        self._member = member

    def run(self, handle: EngineHandle, requests: list[Request]) -> list[Result]:
        handle.check_awake()
        results: list[Result] = self._outcome()
        if len(results) != len(requests):
            raise InvalidRequest(
                f"this rank has {len(requests)} prompts and rank 0 has {len(results)}: all ranks must make "
                "the same calls"
            )
        return results

    def agree(self, work: Callable[[], _T]) -> _T:
        self._outcome()
        return work()

    def _outcome(self) -> Any:
        """Return what rank 0's call returned, or raise its error."""
        message = self._member.wait()
        if message["do"] == "close":
            raise TierFailed("rank 0 has closed its LLM in the middle of this call")
        if message["do"] == "failed":
            raise RequestFailed(f"rank 0: {message['error']}")
        return message["results"]

    def close(self) -> None:
        self._member.close()


class Lockstep:
    """A rank with its own requests that runs as many forwards as the others."""

    may_be_empty = True

    def __init__(self, group: ExpertGroup) -> None:
        self._group = group

    def run(self, handle: EngineHandle, requests: list[Request]) -> list[Result]:
        handle.check_open()
        return run_together(lambda: (handle, requests), self._group.group)

    def agree(self, work: Callable[[], _T]) -> _T:
        return work()  # each rank makes the same call

    def close(self) -> None:
        self._group.close()


def collective_of(together: Any) -> Collective | None:
    """Return the kind of calls for the connection of a placement (`Placed.together`); None: one process."""
    if isinstance(together, Followers):
        return Leading(together)
    if isinstance(together, Follower):
        return Following(together)
    return None if together is None else Lockstep(together)
