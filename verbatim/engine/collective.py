"""Calls that several processes make together."""

from __future__ import annotations

from typing import Any

from verbatim.core import Request, Result
from verbatim.engine.handle import Collective, EngineHandle
from verbatim.engine.lockstep import run_together
from verbatim.errors import InvalidRequest, RequestFailed, TierFailed
from verbatim.placement.cluster.link import LinkLost
from verbatim.placement.parallel.exchange import Group
from verbatim.placement.parallel.group import RankGroup
from verbatim.placement.parallel.rank_worker import RankWorker


class Leading:
    """Rank 0 of ranks that the user started: runs the calls, and sends the results to the others."""

    may_be_empty = False

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    def run(self, handle: EngineHandle, requests: list[Request]) -> list[Result]:
        try:
            results = handle.run_here(requests)
        except BaseException as error:
            if not isinstance(error, TierFailed):
                self._group.tell({"do": "failed", "error": f"{type(error).__name__}: {error}"})
            raise
        self._group.tell({"do": "results", "results": results})
        return results

    def close(self) -> None:
        """Do nothing: the runner ends the other ranks."""


class Following:
    """Another rank: serves rank 0 until its call is over, and returns the same results."""

    may_be_empty = False

    def __init__(self, member: RankWorker) -> None:
        self._member = member

    def run(self, handle: EngineHandle, requests: list[Request]) -> list[Result]:
        handle.check_awake()
        try:
            message = self._member.serve("results", "failed", "close")
        except LinkLost as error:
            raise TierFailed(f"rank 0 is gone: {error}") from None
        if message["do"] == "close":
            raise TierFailed("rank 0 has closed its LLM in the middle of this call")
        if message["do"] == "failed":
            raise RequestFailed(f"rank 0: {message['error']}")
        results: list[Result] = message["results"]
        if len(results) != len(requests):
            raise InvalidRequest(
                f"this rank has {len(requests)} prompts and rank 0 has {len(results)}: all ranks must make "
                "the same calls"
            )
        return results

    def close(self) -> None:
        self._member.close()


class Lockstep:
    """A rank with requests of its own, which makes as many forwards as the others."""

    may_be_empty = True

    def __init__(self, group: Group) -> None:
        self._group = group

    def run(self, handle: EngineHandle, requests: list[Request]) -> list[Result]:
        handle.check_open()
        return run_together(lambda: (handle, requests), self._group.group)

    def close(self) -> None:
        self._group.close()


def collective_of(together: Any) -> Collective | None:
    """Return how calls are made with what a placement was opened with; None: by this process alone."""
    if isinstance(together, RankGroup):
        return Leading(together)
    if isinstance(together, RankWorker):
        return Following(together)
    return None if together is None else Lockstep(together)
