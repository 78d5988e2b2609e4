"""Calls that all ranks make at once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

from verbatim.core import Delta, Request, Result
from verbatim.engine.driver import Driver
from verbatim.engine.engine import Engine
from verbatim.engine.lockstep import run_together
from verbatim.errors import InvalidRequest, NotSupported, RequestFailed, TierFailed
from verbatim.placement.cluster.link import LinkLost
from verbatim.placement.parallel.crew import Crew
from verbatim.placement.parallel.exchange import Group
from verbatim.placement.parallel.member import Member
from verbatim.placement.parallel.results import pack_results, unpack_results


class _AllAtOnce(Driver):
    """Only whole calls can be made by all ranks at once."""

    alone = False

    def deltas(self, request: Request) -> Iterator[Delta]:
        raise self._refused("stream")

    def steps(self, requests: list[Request]) -> Iterator[None]:
        raise self._refused("a loop over steps")

    async def arun(self, requests: list[Request]) -> list[Result]:
        raise self._refused("agenerate")

    def adeltas(self, request: Request) -> AsyncIterator[Delta]:
        raise self._refused("astream")

    def adeltas_of(self, requests: list[Request]) -> AsyncIterator[tuple[int, Delta]]:
        raise self._refused("astream")

    @staticmethod
    def _refused(what: str) -> NotSupported:
        return NotSupported(
            f"{what}: where each rank is a process of the user's, they make their calls together, and "
            "generate, score and chat are what they can make"
        )


class LeadingDriver(_AllAtOnce):
    """Rank 0 of ranks that the user started: runs the calls, and hands the results to the others."""

    def __init__(self, engine: Engine, crew: Crew, max_unread: int) -> None:
        super().__init__(engine, max_unread=max_unread)
        self._crew = crew

    def run(self, requests: list[Request]) -> list[Result]:
        try:
            results = super().run(requests)
        except BaseException as error:
            if not isinstance(error, TierFailed):
                self._crew.tell({"do": "failed", "error": f"{type(error).__name__}: {error}"})
            raise
        self._crew.tell({"do": "results", "results": pack_results(results)})
        return results


class FollowingDriver(_AllAtOnce):
    """Another rank: does as rank 0 tells until its call is over, and returns the same."""

    def __init__(self, engine: Engine, member: Member, max_unread: int) -> None:
        super().__init__(engine, max_unread=max_unread)
        self._member = member

    def run(self, requests: list[Request]) -> list[Result]:
        self.check_awake()
        try:
            told = self._member.serve("results", "failed", "close")
        except LinkLost as error:
            raise TierFailed(f"rank 0 is gone: {error}") from None
        if told["do"] == "close":
            raise TierFailed("rank 0 has closed its LLM in the middle of this call")
        if told["do"] == "failed":
            raise RequestFailed(f"rank 0: {told['error']}")
        results = unpack_results(told["results"])
        if len(results) != len(requests):
            raise InvalidRequest(
                f"this rank has {len(requests)} prompts and rank 0 has {len(results)}: all ranks must make "
                "the same calls"
            )
        return results

    def close(self) -> None:
        self._member.close()
        super().close()


class LockstepDriver(_AllAtOnce):
    """A rank with requests of its own, which makes as many forwards as the others."""

    may_idle = True  # a call may bring nothing

    def __init__(self, engine: Engine, group: Group, max_unread: int) -> None:
        super().__init__(engine, max_unread=max_unread)
        self._group = group

    def run(self, requests: list[Request]) -> list[Result]:
        self._traffic.check_open()
        return run_together(lambda: (self, requests), self._group.group)

    def close(self) -> None:
        super().close()
        self._group.close()


MakeDriver = Callable[[Engine, int], Driver]
