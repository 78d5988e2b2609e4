"""Ranks that the user started and that follow rank 0: the calls that all make, and their runner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from verbatim.batch import Choices
from verbatim.core import Request, Result
from verbatim.errors import InvalidRequest, NotSupported, RequestFailed, TierFailed
from verbatim.placement.distributed.group import StageGroup, StageHandle
from verbatim.placement.distributed.served import Served
from verbatim.placement.distributed.wire import Message
from verbatim.protocols import Runner

_END_S = 5.0
_T = TypeVar("_T")
_ATTRIBUTES = (
    "vocab_size",
    "block_size",
    "num_blocks",
    "num_states",
    "hidden_reason",
    "choices",
    "draft_info",
)


def described(runner: Runner) -> dict[str, Any]:
    """Return what `FollowingRunner` is made of, as plain data."""
    return {**{name: getattr(runner, name) for name in _ATTRIBUTES}, "info": runner.info()}


class FollowingRunner:
    """A Runner for admission only: requests are checked here as on rank 0, and run there.

    Args:
        rank: this one.
        told: what `described` made on rank 0.
    """

    num_forwards = 0
    choices: Mapping[str, Choices]

    def __init__(self, rank: Following, told: Mapping[str, Any]) -> None:
        self.__dict__.update({name: told[name] for name in _ATTRIBUTES})
        self._rank = rank
        self._info: dict[str, Any] = told["info"]

    def _by_rank_0(self, *_: Any, **__: Any) -> None:
        """Do nothing: every rank makes this call, and rank 0's reaches all shares."""

    load_adapter = unload_adapter = sleep = wake = _by_rank_0

    def new_weights(self, *_: Any, **__: Any) -> Callable[[], None]:
        return self._by_rank_0

    def info(self) -> dict[str, Any]:
        return self._info

    def stats(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self._rank.close()

    def __getattr__(self, name: str) -> Any:
        """Refuse every other call of a `Runner`."""
        if name not in vars(Runner):
            raise AttributeError(name)

        def refuse(*_: Any, **__: Any) -> None:
            raise NotSupported(f"{name}: this rank follows rank 0, which is the one to ask")

        return refuse


class Leading:
    """Rank 0 of the ranks that a user started: runs the calls, and sends the results to the others."""

    may_be_empty = False

    def __init__(self, group: StageGroup, members: list[StageHandle]) -> None:
        self._group, self._members = group, members

    def tell(self, told: Mapping[str, Any]) -> None:
        """Send the programs of the other ranks a message; TierFailed if one is gone."""
        self._group.tell("tell", self._members, told=told)
        for member in self._members:
            if member.lost is not None:
                raise TierFailed(str(member))

    def run(self, handle: Any, requests: list[Request]) -> list[Result]:
        return self.agree(lambda: handle.run_here(requests))

    def agree(self, work: Callable[[], _T]) -> _T:
        try:
            result = work()
        except BaseException as error:
            if not isinstance(error, TierFailed):
                self.tell({"do": "failed", "error": f"{type(error).__name__}: {error}"})
            raise
        self.tell({"do": "results", "results": result})
        return result

    def close(self) -> None:
        """Do nothing: the runner ends the other ranks."""


class Following:
    """Another rank, with its share: waits until rank 0's call is over, and returns the same results."""

    may_be_empty = False

    def __init__(self, share: Served) -> None:
        self._share = share

    def wait(self) -> Message:
        """Return what rank 0 tells this program next; TierFailed if it is gone, or has closed its LLM."""
        told = self._share.told.get()
        if told is None:
            raise TierFailed("rank 0 is gone")
        if told.get("do") == "close":
            raise TierFailed("rank 0 has closed its LLM in the middle of this call")
        return told

    def run(self, handle: Any, requests: list[Request]) -> list[Result]:
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
        told = self.wait()
        if told["do"] == "failed":
            raise RequestFailed(f"rank 0: {told['error']}")
        return told["results"]

    def close(self) -> None:
        """Close the share, and wait until it has ended."""
        self._share.hang_up()
        self._share.join(_END_S)
