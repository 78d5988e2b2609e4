"""The Runner: where the model lives, and the only room that knows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from verbatim.batch import Batch, Draws, SamplePlan


@dataclass(slots=True)
class Forward:
    """A handle on what a forward computed, still lying where it was computed."""

    logits: Tensor  # [R, V], rows in the order of the batch's logit_rows
    hidden: Tensor | None = None  # [R, H], what the head saw in them; where the batch wants it


class Forwarder(Protocol):
    """Something that computes a `Batch` and draws from what it computed."""

    def forward(self, batch: Batch) -> Forward:
        """Run the model on `batch`, writing K and V to the blocks it names."""
        ...

    def sample(self, forward: Forward, plan: SamplePlan) -> Draws:
        """Draw one id for each row of `forward`, where its logits are."""
        ...


class Runner(Forwarder, Protocol):
    """Where a model lives: whatever can be asked of it."""

    vocab_size: int
    block_size: int
    num_blocks: int  # scratch included
    num_forwards: int  # since it was opened
    has_hidden: bool  # a batch may want hidden states
    hidden_reason: str | None  # why not
    routed_layers: int  # mixture-of-experts layers whose routing is recorded, in the order they run
    experts_per_token: int  # in each of them; 0 where there are none
    num_experts: int
    routing_reason: str | None  # why no layer is recorded

    def logits(self, forward: Forward, rows: list[int]) -> Tensor:
        """Some rows of the logits, as `[len(rows), V]` float32 on the CPU; a copy."""
        ...

    def routing(self, block_table: list[int], num_tokens: int) -> Tensor:
        """The experts that the first `num_tokens` tokens of a sequence went to, from its blocks.

        Returns:
            `[num_tokens, routed_layers, experts_per_token]` int16, a copy; slots in the router's order.

        Raises:
            NotSupported: the model has no routed layers, or they can't be recorded.
        """
        ...

    def check_replay(self) -> None:
        """Find out once whether a batch may force experts; call it before the first one that does.

        Raises:
            NotSupported: the model's routers can't be made to choose; the message tells why.
        """
        ...

    def look_again(self) -> None:
        """Follow a live module that was edited since it was opened.

        Raises:
            ModelChanged: it can't be followed; it must be opened again.
        """
        ...

    def info(self) -> dict[str, Any]:
        """What a user may want to know of this placement, as plain values.

        `architecture`, `placement`, `parameters`, `weight_bytes`, `dtype`, `layers`, `kv_bytes`,
        `kv_dtype` and `kv_bytes_per_token`, and what the placement has besides.
        """
        ...

    def stats(self) -> dict[str, Any]:
        """What this placement adds to `LLM.stats`: counts since it was opened, as plain values."""
        ...

    def new_weights(
        self, tensors: Mapping[str, Tensor], *, check_finite: bool
    ) -> Callable[[], None]:
        """Check new weights, down to the last; what is returned writes them in place, and can't fail.

        Raises:
            InvalidRequest, NotSupported: as `NewWeights`.
            VerbatimError: the weights sleep.
        """
        ...

    def stamp(self) -> object:
        """Something that is another one when the weights are, as far as can be seen at once.

        An optimizer's step shows, and whatever else writes to a parameter; writing through `.data` does not.
        """
        ...

    def sleep(self, weights: bool) -> None:
        """Give the memory of K and V back, and with `weights` that of the model; what was in it is lost.

        Raises:
            NotSupported: weights that can't be had again; nothing has happened then.
            ModelChanged: the checkpoint they came from is not what it was; nothing has happened then.
        """
        ...

    def wake(self) -> None:
        """Take everything again that `sleep` gave back; the weights have the same bits.

        Raises:
            ModelChanged: the checkpoint is not what it was. It sleeps on.
        """
        ...

    def close(self) -> None:
        """Give back memory, processes and files."""
        ...
