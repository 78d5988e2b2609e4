"""Ranks that the user started and that follow rank 0: what it tells them, and their runner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verbatim.batch import Choices
from verbatim.errors import NotSupported, TierFailed
from verbatim.placement.distributed.group import StageHandle
from verbatim.placement.distributed.stage import Stage
from verbatim.placement.distributed.wire import Message, encode
from verbatim.protocols import Runner

_END_S = 5.0
_ATTRIBUTES = (
    "vocab_size",
    "block_size",
    "num_blocks",
    "num_states",
    "has_hidden",
    "hidden_reason",
)


def described(runner: Runner) -> dict[str, Any]:
    """Return what `FollowingRunner` is made of, as plain data."""
    reason = None
    if runner.choices["routing"].layers:
        try:
            runner.check_replay("routing")
        except NotSupported as error:
            reason = str(error)
    return {
        **{name: getattr(runner, name) for name in _ATTRIBUTES},
        "choices": runner.choices,
        "replay_reason": reason,
        "info": runner.info(),
    }


class FollowingRunner:
    """A Runner for admission only: requests are checked here as on rank 0, and run there.

    Args:
        member: this rank's stage.
        told: what `described` made on rank 0.
    """

    num_forwards = 0

    def __init__(self, member: Follower, told: Mapping[str, Any]) -> None:
        self.vocab_size: int = told["vocab_size"]
        self.block_size: int = told["block_size"]
        self.num_blocks: int = told["num_blocks"]
        self.num_states: int = told["num_states"]
        self.has_hidden: bool = told["has_hidden"]
        self.hidden_reason: str | None = told["hidden_reason"]
        self.choices: Mapping[str, Choices] = told["choices"]
        self.member = member
        self._replay_reason: str | None = told["replay_reason"]
        self._info: dict[str, Any] = told["info"]

    def check_replay(self, name: str) -> None:
        self.choices[name].check(f"its {name} can't be replayed")
        if name == "routing" and self._replay_reason is not None:
            raise NotSupported(self._replay_reason)

    def refresh(self) -> None:
        """Do nothing: the module has no other users."""

    def _by_rank_0(self, *_: Any, **__: Any) -> None:
        """Do nothing: every rank makes this call, and rank 0's reaches all shares."""

    load_adapter = unload_adapter = sleep = wake = _by_rank_0

    def new_weights(self, *_: Any, **__: Any) -> Callable[[], None]:
        return self._by_rank_0

    def info(self) -> dict[str, Any]:
        return self._info

    def stats(self) -> dict[str, Any]:
        return {}

    def stamp(self) -> object:
        return None

    def close(self) -> None:
        self.member.close()

    def __getattr__(self, name: str) -> Any:
        """Refuse every other call of a `Runner`."""
        if name not in vars(Runner):
            raise AttributeError(name)

        def refuse(*_: Any, **__: Any) -> None:
            raise NotSupported(f"{name}: this rank follows rank 0, which is the one to ask")

        return refuse


class Followers:
    """Other ranks of the user's programs, which get the results of rank 0."""

    def __init__(self, members: Sequence[StageHandle]) -> None:
        self._members = members

    def tell(self, told: Mapping[str, Any]) -> None:
        """Send their programs a message; TierFailed if one is gone."""
        encoded = encode({"do": "tell", "told": told})
        for member in self._members:
            member.send(encoded)
        for member in self._members:
            if member.lost is not None:
                raise TierFailed(str(member))


class Follower:
    """This rank's stage, and what rank 0 tells its program."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def wait(self) -> Message:
        """Return what rank 0 tells next; TierFailed if it is gone."""
        message = self._stage.told.get()
        if message is None:
            raise TierFailed("rank 0 is gone")
        told: Message = message["told"]
        return told

    def close(self) -> None:
        """Close the stage, and wait until it has ended."""
        self._stage.close()
        self._stage.join(_END_S)
