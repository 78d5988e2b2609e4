"""What was chosen before the first byte is read."""

from __future__ import annotations

from dataclasses import dataclass

from verbatim.placement.offload.choice import Percents


@dataclass(frozen=True, slots=True)
class Plan:
    """Where everything of a model lies and how much of it computes at once.

    Attributes:
        weights, kv, activations: percents in (gpu, cpu, disk).
        ring_bytes: memory in which weights are read ahead.
        kv_bytes: of K and V in all tiers together.
        batch_size: sequences of a micro-batch.
        micro_batches: of them in a block, whose sequences share each reading of a layer.
        micro_tokens: rows of a micro-batch at most, which bounds activations.
        max_batch_tokens: rows of a forward at most.
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

    @property
    def block_size(self) -> int:
        """Sequences that run at once."""
        return self.batch_size * self.micro_batches
