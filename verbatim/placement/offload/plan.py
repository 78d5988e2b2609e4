"""`Plan`: the tiers of an offloaded model's parts, and its batch sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verbatim.placement.offload.choice import Percents
from verbatim.placement.offload.memory import Widths


@dataclass(frozen=True, slots=True)
class Plan:
    """A placement of weights, K and V and activations, with the sizes of batches and buffers.

    Attributes:
        weights, kv, activations: percents in (gpu, cpu, disk).
        ring_bytes: memory of the staging buffer for weights.
        kv_bytes: bytes of K and V in all tiers together.
        batch_size: sequences of a micro-batch.
        micro_batches: micro-batches that share each read of a layer.
        micro_tokens: maximal rows of a micro-batch, which bounds activations.
        max_batch_tokens: maximal rows of a forward.
        tiers: tier of each parameter, in the order of `Units.slots`.
        kv_block: token positions in a block of K and V.
        prompt_rows: maximal rows of logits for prompt log-probs and drafts in a forward.
        overlap: read and write while computing.
        budget: bytes of memory; None: unlimited.
        memory: maximal bytes in memory, by kind.
        reasons: sentences that explain the choice.
    """

    weights: Percents
    kv: Percents
    activations: Percents
    ring_bytes: int
    kv_bytes: int
    batch_size: int
    micro_batches: int
    micro_tokens: int
    max_batch_tokens: int
    tiers: tuple[str, ...] = ()
    kv_block: int = 16
    prompt_rows: int = 16
    overlap: bool = True
    budget: int | None = None
    memory: Mapping[str, int] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()

    @property
    def block_size(self) -> int:
        """Sequences that run at once."""
        return self.batch_size * self.micro_batches

    @property
    def state_bytes(self) -> int:
        """Bytes of recurrent states."""
        return self.memory.get("recurrent states", 0)

    @property
    def memory_bytes(self) -> int:
        """Maximal bytes in memory."""
        return sum(self.memory.values())

    @property
    def heap_bytes(self) -> int | None:
        """Bytes that may stay free in the heap between two layers: the next one's allocations and slack."""
        if self.budget is None:
            return None
        return self.memory.get("computation", 0) + self.memory.get("slack", 0) // 2

    def widths(self, context: int) -> Widths:
        """Return the batch sizes for sequences of `context` tokens."""
        return Widths(
            self.block_size, self.batch_size, self.micro_tokens, self.max_batch_tokens, context
        )

    def as_dict(self) -> dict[str, Any]:
        """Return JSON values, without the tier of each parameter."""
        return {
            "weights": [round(share, 1) for share in self.weights],
            "kv": [round(share, 1) for share in self.kv],
            "activations": [round(share, 1) for share in self.activations],
            "batch_size": self.batch_size,
            "micro_batches": self.micro_batches,
            "micro_tokens": self.micro_tokens,
            "max_batch_tokens": self.max_batch_tokens,
            "prompt_rows": self.prompt_rows,
            "ring_bytes": self.ring_bytes,
            "kv_bytes": self.kv_bytes,
            "overlap": self.overlap,
            "budget": self.budget,
            "memory": dict(self.memory),
            "memory_bytes": self.memory_bytes,
            "reasons": list(self.reasons),
        }
