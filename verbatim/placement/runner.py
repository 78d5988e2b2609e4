"""The Runner: where the model lives, and the only room that knows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from verbatim.batch import Batch, Draws, SamplePlan


@dataclass(slots=True)
class Forward:
    """A handle on what a forward computed, still lying where it was computed."""

    logits: Tensor  # [R, V], rows in the order of the batch's logit_rows


class Runner(Protocol):
    """Something that runs a `Batch`."""

    vocab_size: int
    block_size: int
    num_blocks: int  # scratch included
    num_forwards: int  # since it was opened

    def forward(self, batch: Batch) -> Forward:
        """Run the model on `batch`, writing K and V to the blocks it names."""
        ...

    def sample(self, forward: Forward, plan: SamplePlan) -> Draws:
        """Draw one id for each row of `forward`, where its logits are."""
        ...

    def info(self) -> dict[str, Any]:
        """What a user may want to know of this placement, as plain values."""
        ...

    def close(self) -> None:
        """Give back memory, processes and files."""
        ...
