"""Protocols between rooms: a `Runner` runs the model and samples, a `Proposer` drafts tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from verbatim.batch import Adapter, Batch, Choices, Draws, SamplePlan
from verbatim.core import Sequence


@dataclass(slots=True)
class Forward:
    """The output of a forward, on the device where it was computed."""

    logits: Tensor  # [R, V], rows in the order of the batch's logit_rows
    hidden: Tensor | None = None  # [R, H], what the head saw in them; where the batch wants it


class Runner(Protocol):
    """A model in its placement: everything that the engine may ask of it."""

    vocab_size: int
    block_size: int
    num_blocks: int  # scratch included
    num_states: (
        int  # slots of recurrent states, that of the zero state included; 0: it has no such layers
    )
    num_forwards: int  # since it was opened
    has_hidden: bool  # a batch may want hidden states
    hidden_reason: str | None  # why not
    choices: Mapping[str, Choices]  # what its layers choose for each token, by `params.CHOICES`

    def forward(self, batch: Batch) -> Forward:
        """Run the model on `batch`, writing K and V to the blocks it names."""
        ...

    def sample(self, forward: Forward, plan: SamplePlan) -> Draws:
        """Draw one id for each row of `forward`, on the device of its logits."""
        ...

    def logits(self, forward: Forward, rows: list[int]) -> Tensor:
        """Copy some rows of the logits: `[len(rows), V]`, float32 on the CPU."""
        ...

    def record(self, name: str, block_table: list[int], num_tokens: int) -> Tensor:
        """Return what was chosen for the first `num_tokens` tokens of a sequence, from its blocks.

        Args:
            name: "routing": the experts, in the router's order; "indices": the keys, of forwards that
                recorded them.

        Returns:
            `[num_tokens, layers, k]`, int16 experts or int32 positions, a copy.

        Raises:
            NotSupported: the model has no such layers, or they can't be recorded.
        """
        ...

    def check_replay(self, name: str) -> None:
        """Find out once whether a batch may force such choices; call it before the first one that does.

        Raises:
            NotSupported: the model's layers can't be made to choose; the message tells why.
        """
        ...

    def read_cache(self, kind: str, numbers: list[int], used: int | None = None) -> Tensor | None:
        """Copy what is kept between two steps, to be kept elsewhere.

        Args:
            kind: "blocks": K, V and records by block; "states": states of recurrent layers by slot.
            used: positions of the last block to copy; the others are zero. None: all.

        Returns:
            `[n, bytes]` uint8 on the CPU; None: a part of the model is lost just now.

        Raises:
            NotSupported: this placement can't.
        """
        ...

    def write_cache(self, kind: str, numbers: list[int], rows: Tensor) -> bool:
        """Write what `read_cache` returned, of any blocks or slots; return False where it returns None."""
        ...

    def refresh(self) -> None:
        """Follow a live module that was edited since it was opened.

        Raises:
            ModelChanged: it can't be followed; it must be opened again.
        """
        ...

    def info(self) -> dict[str, Any]:
        """Describe this placement in plain values.

        `architecture`, `placement`, `parameters`, `weight_bytes`, `dtype`, `layers`, `kv_bytes`,
        `kv_dtype` and `kv_bytes_per_token`, and keys of the placement's own.
        """
        ...

    def stats(self) -> dict[str, Any]:
        """Return counts since it was opened, in plain values; `LLM.stats` includes them."""
        ...

    def new_weights(
        self, tensors: Mapping[str, Tensor], *, check_finite: bool
    ) -> Callable[[], None]:
        """Check all new weights; return a function that writes them in place and can't fail.

        Raises:
            InvalidRequest, NotSupported: as `NewWeights`.
            VerbatimError: the weights sleep.
        """
        ...

    def load_adapter(self, adapter: Adapter) -> None:
        """Hold an adapter for batches that name its number; nothing is held after an error.

        Raises:
            NotSupported: an adapter of layers that can't have one, or no adapters in this placement.
            InvalidRequest: its matrices do not fit the model's.
        """
        ...

    def unload_adapter(self, number: int) -> None:
        """Drop an adapter that no later batch names; do nothing if it is not held."""
        ...

    def stamp(self) -> object:
        """Return a value that changes when the weights do, as far as that can be seen cheaply.

        An in-place write to a parameter is seen, so an optimizer's step is; a write through `.data` is not.
        """
        ...

    def sleep(self, weights: bool) -> None:
        """Release the memory of K and V, and with `weights` that of the model; its contents are lost.

        Raises:
            NotSupported: the weights can't be read again; nothing is released then.
            ModelChanged: the checkpoint they came from has changed; nothing is released then.
        """
        ...

    def wake(self) -> None:
        """Allocate again what `sleep` released; the weights have the same bits.

        Raises:
            ModelChanged: the checkpoint has changed; the runner stays asleep.
        """
        ...

    def close(self) -> None:
        """Release memory, processes and files."""
        ...


class DraftRunner(Runner, Protocol):
    """A runner of a model with layers that draft for it.

    Attributes:
        draft_info: `info` of these layers, `model.draft_layers.DraftLayers`.
    """

    draft_info: dict[str, int]

    def drafting(self) -> AbstractContextManager[None]:
        """Return the context of all `draft` calls of one proposal."""
        ...

    def draft(self, k: int, batch: Batch, plan: SamplePlan | None) -> Draws | None:
        """Run draft layer `k`, and draw by `plan` from its logits; without a plan nothing is drawn."""
        ...


@runtime_checkable
class Proposer(Protocol):
    """Proposes draft tokens for sequences.

    Outputs do not depend on the drafts: the model draws every token itself, with its own logits and noise,
    and keeps the drafts that equal its draws. A draft that is drawn as the engine draws
    (`verbatim.sampling.rows.draw_row`: same seed, position and noise) is kept far more often than any other.
    """

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> SequenceOf[SequenceOf[int]]:
        """Return ids that may follow each sequence.

        Called before a forward in which each of `sequences` computes its last token. Blocks for that token
        and for the draft are allocated. A sequence must not be changed. Keep state of a sequence in a
        `weakref.WeakKeyDictionary`, so that it ends with the sequence.

        Args:
            sequences: those to draft for in this step; `token_ids(0, num_tokens)` are the ids of one.
            lengths: the most ids for each, 1 or more.

        Returns:
            One list for each sequence, in their order; a list may be shorter, or empty.
        """
        ...
