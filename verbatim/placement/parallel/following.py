"""The runner of a rank other than 0 of ranks that the user started."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from verbatim.batch import Adapter, Batch, Choices, Draws, SamplePlan
from verbatim.errors import NotSupported
from verbatim.placement.parallel.rank_worker import RankWorker
from verbatim.protocols import Forward, Runner

_ATTRIBUTES = (
    "vocab_size",
    "block_size",
    "num_blocks",
    "num_states",
    "has_hidden",
    "hidden_reason",
)


def described(runner: Runner) -> dict[str, Any]:
    """Return what `Following` is made of, as plain data."""
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


class Following:
    """A Runner for admission only: requests are checked here as on rank 0, and run there.

    Args:
        member: what does rank 0's work here.
        told: what `described` made on rank 0.
    """

    num_forwards = 0

    def __init__(self, member: RankWorker, told: Mapping[str, Any]) -> None:
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

    def forward(self, batch: Batch) -> Forward:
        raise self._refused("a forward")

    def sample(self, forward: Forward, plan: SamplePlan) -> Draws:
        raise self._refused("a draw")

    def logits(self, forward: Forward, rows: list[int]) -> Tensor:
        raise self._refused("logits")

    def record(self, name: str, block_table: list[int], num_tokens: int) -> Tensor:
        raise self._refused(name)

    def check_replay(self, name: str) -> None:
        self.choices[name].check(f"its {name} can't be replayed")
        if name == "routing" and self._replay_reason is not None:
            raise NotSupported(self._replay_reason)

    def read_cache(self, kind: str, numbers: list[int]) -> Tensor | None:
        raise self._refused("K and V")

    def write_cache(self, kind: str, numbers: list[int], rows: Tensor) -> bool:
        raise self._refused("K and V")

    def refresh(self) -> None:
        """Do nothing: the module has no other users."""

    def info(self) -> dict[str, Any]:
        return self._info

    def stats(self) -> dict[str, Any]:
        return {}

    def new_weights(
        self, tensors: Mapping[str, Tensor], *, check_finite: bool
    ) -> Callable[[], None]:
        raise self._refused("new weights")

    def load_adapter(self, adapter: Adapter) -> None:
        raise self._refused("an adapter")

    def unload_adapter(self, number: int) -> None:
        """Do nothing: none is held."""

    def stamp(self) -> object:
        return None

    def sleep(self, weights: bool) -> None:
        raise self._refused("sleep")

    def wake(self) -> None:
        """Do nothing: it never sleeps by itself."""

    def close(self) -> None:
        self.member.close()

    @staticmethod
    def _refused(what: str) -> NotSupported:
        return NotSupported(f"{what}: this rank follows rank 0, which is the one to ask")
