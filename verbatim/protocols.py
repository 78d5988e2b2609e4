"""The interfaces of the engine: a `Runner` runs the model and samples, a `Proposer` drafts tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from verbatim.batch import Adapter, Batch, Choices, Draws, SamplePlan
from verbatim.core import Sequence
from verbatim.errors import StageFailed


class CacheLost(StageFailed):
    """The K and V of all sequences were lost with a stage; they are evicted, and the step is repeated.

    Attributes:
        limit: maximum number of consecutive steps that a request can lose before it fails with this
            message. None: the stage was moved on purpose, and the lost step does not count.
    """

    def __init__(self, message: str, limit: int | None = None) -> None:
        super().__init__(message)
        self.limit = limit


@dataclass(slots=True)
class Forward:
    """The output of a forward, on the device where it was computed."""

    logits: Tensor  # [R, V], rows in the order of the batch's logit_rows
    hidden: Tensor | None = None  # [R, H], inputs of the LM head, if `Batch.wants_hidden`


class Runner(Protocol):
    """The engine's interface to a model in its placement.

    Methods with a body are defaults for models that callers can't edit. `forward`, `sample` and `logits` may
    raise CacheLost.
    """

    vocab_size: int
    block_size: int
    num_blocks: int  # including the scratch block
    num_states: int  # slots of recurrent states, including the zero state; 0 without such layers
    num_forwards: int  # since the runner was opened
    hidden_reason: str | None  # why `Batch.wants_hidden` is not supported; None if it is
    draft_info: dict[str, int]  # `DraftLayers.info` of the model's own draft layers

    @property
    def choices(self) -> Mapping[str, Choices]:
        """The choices that layers make for each token, by the names in `params.CHOICES`."""
        ...

    def forward(self, batch: Batch) -> Forward:
        """Run the model on `batch`, and write K and V to the blocks in its block tables."""
        ...

    def sample(self, forward: Forward, plan: SamplePlan) -> Draws:
        """Draw one id for each row of `forward`, on the device of its logits."""
        ...

    def draft(
        self, k: int, batch: Batch, plan: SamplePlan | None, lengths: list[int]
    ) -> list[list[int]]:
        """Run draft layer `k`, and draw from its logits with `plan`; without a plan nothing is drawn.

        Args:
            lengths: number of tokens to draft for each row of logits; empty: one.

        Returns:
            For each row of logits one token, or all of its tokens if the runner can draft them in one call;
            -1 if none can be drawn.
        """
        ...

    def logits(self, forward: Forward, rows: list[int]) -> Tensor:
        """Return a copy of some rows of the logits: `[len(rows), V]`, float32 on the CPU."""
        ...

    def record(self, name: str, block_table: list[int], num_tokens: int) -> Tensor:
        """Return the recorded choices for the first `num_tokens` tokens of a sequence, from its blocks.

        Args:
            name: "routing": the experts, in the router's order; "indices": the keys, if the forwards
                recorded them.

        Returns:
            `[num_tokens, layers, k]`, int16 experts or int32 positions, a copy. No rows while a
            stage is lost.

        Raises:
            NotSupported: the model has no such layers, or they can't be recorded.
        """
        ...

    def read_cache(self, kind: str, numbers: list[int], used: int | None = None) -> Tensor | None:
        """Return a copy of cached blocks or states, between two steps.

        Args:
            kind: "blocks": K, V and records; "states": slots of recurrent states.
            numbers: block or slot numbers.
            used: number of leading positions of the last block to copy; the others are zero. None: all.

        Returns:
            `[n, bytes]` uint8 on the CPU; None while a stage is lost.

        Raises:
            NotSupported: this placement can't copy its cache.
        """
        ...

    def write_cache(self, kind: str, numbers: list[int], rows: Tensor) -> bool:
        """Write rows from `read_cache` to these blocks or slots; return False while a stage is lost."""
        ...

    def refresh(self) -> None:
        """Adapt to edits of a live module; raise ModelChanged if it must be opened again."""
        return

    def info(self) -> dict[str, Any]:
        """Return the model's properties as plain values.

        Every placement has `architecture`, `placement`, `parameters`, `weight_bytes`, `dtype`, `layers`,
        `kv_bytes`, `kv_dtype`, `kv_bytes_per_token` and `torch_functions`; each adds its own keys.
        """
        ...

    def stats(self) -> dict[str, Any]:
        """Return counters since the runner was opened, as plain values; `LLM.stats` includes them."""
        return {}

    def new_weights(
        self, tensors: Mapping[str, Tensor], *, check_finite: bool
    ) -> Callable[[], None]:
        """Check all new weights; return a function that writes them in place and can't fail.

        Raises:
            InvalidRequest, NotSupported: as `NewWeights`.
            VerbatimError: the weights are asleep.
        """
        ...

    def load_adapter(self, adapter: Adapter) -> object:
        """Load an adapter for batches that have its number; after an error, `unload_adapter` frees the rest.

        Raises:
            NotSupported: a layer or the placement does not support adapters.
            InvalidRequest: the adapter's matrices do not fit the model.
        """
        ...

    def unload_adapter(self, number: int) -> None:
        """Unload an adapter that no later batch uses; no effect if it is not loaded."""
        ...

    def stamp(self) -> object:
        """Return a value that changes with a live module, as far as that can be detected cheaply.

        In-place writes to parameters, such as an optimizer's, are detected, and edits of hooks, layers,
        buffers and numbers between two forwards; writes through `.data` are not.
        """
        return None

    def sleep(self, weights: bool) -> None:
        """Free the memory of K and V, and with `weights` that of the model; the contents are lost.

        Raises:
            NotSupported: the weights can't be reloaded; nothing is freed.
            ModelChanged: their checkpoint has changed; nothing is freed.
        """
        ...

    def wake(self) -> None:
        """Allocate the memory that `sleep` freed, and restore the weights bit-identically.

        Raises:
            ModelChanged: the checkpoint has changed; the runner stays asleep.
        """
        ...

    def close(self) -> None:
        """Release memory, processes and files."""
        ...


@runtime_checkable
class Proposer(Protocol):
    """Proposes draft tokens.

    Outputs do not depend on the drafts: the engine draws every token from the model's own logits, with the
    request's noise, and accepts the draft tokens that equal its draws. Drafts that are drawn in the same way
    (`Sequence.draw_row`: same seed, position and noise) are accepted far more often than others.
    """

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> SequenceOf[SequenceOf[int]]:
        """Return a draft for each sequence.

        Called before a forward in which each of `sequences` computes its last token. Blocks for that token
        and for the draft are allocated. Sequences must not be changed. Keep the state of a sequence in a
        `weakref.WeakKeyDictionary`, so that it is freed with the sequence. Ctrl-C may be raised inside of a
        call; the same sequences may come again with more tokens, or not at all.

        Args:
            sequences: the sequences to draft for; `token_ids(0, num_tokens)` returns a sequence's ids.
            lengths: maximum number of draft ids for each sequence, 1 or more.

        Returns:
            A list of ids for each sequence, in order; it may be shorter than the length, or empty.
        """
        ...
