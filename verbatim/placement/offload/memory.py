"""The memory of a plan, in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from verbatim.placement.offload.choice import Percents
from verbatim.placement.offload.kv_disk import NUM_BUFFERS
from verbatim.placement.offload.shape import ModelShape

READERS = 2  # prefetch threads
_ROOM_TO_GROW = 1.25  # of a staging buffer for K and V
_PROMPT_ROWS = 16  # of logits for prompt log-probs that a forward may have at least
_MOST_PROMPT_ROWS = 256


@dataclass(frozen=True, slots=True)
class Widths:
    """Batch sizes.

    Attributes:
        sequences: number that runs at once.
        batch_size: sequences of a micro-batch.
        micro_tokens: maximal rows of a micro-batch.
        max_batch_tokens: maximal rows of a forward.
        context: tokens of a sequence in the workload.
    """

    sequences: int
    batch_size: int
    micro_tokens: int
    max_batch_tokens: int
    context: int


def ring_bytes(shape: ModelShape, tiers: tuple[str, ...], *, roomy: bool) -> int:
    """Return the size of the staging buffer for weights.

    Args:
        roomy: two neighbours fit, so that one is read while the other is used; else the largest one does.
    """
    sizes = [size for unit in shape.units if (size := shape.streamed(unit, tiers))]
    if not roomy or len(sizes) < 2:
        return max(sizes, default=0)
    return max(a + b for a, b in zip(sizes, sizes[1:] + sizes[:1], strict=True))


def waiting_bytes(shape: ModelShape, rows: int) -> int:
    """Return the bytes of hidden states between two layers, with their residuals and rotary embeddings."""
    rotary = 2 * 4 * min(shape.hidden, 256)
    return rows * (3 * shape.hidden * shape.itemsize + rotary + 64)


def working_bytes(shape: ModelShape, rows: int) -> int:
    """Return the peak of a layer's allocations for `rows` rows."""
    item = shape.itemsize
    norms = shape.hidden * (4 * item + 3 * 4)  # which are made in float32
    attention = 3 * shape.attention * item + shape.hidden * item
    mlp = shape.intermediate * (4 * item + 3 * 4)
    routed = shape.experts_per_token * shape.hidden * (3 * item + 2 * 4)
    return rows * (norms + max(attention, mlp) + routed)


def logits_bytes(shape: ModelShape, rows: int) -> int:
    """Return the bytes of logits: of the micro-batches, concatenated, and the sampler's copies."""
    return rows * shape.vocab * (2 * shape.itemsize + 2 * 4)


def kv_buffer_bytes(shape: ModelShape, widths: Widths, kv: Percents) -> int:
    """Return the bytes of staging buffers for K and V, for sequences as long as the workload's."""
    if not kv[2]:
        return 0
    a_layer = ceil(shape.kv_bytes_per_token / shape.layers)
    return int(NUM_BUFFERS * _ROOM_TO_GROW * widths.batch_size * widths.context * a_layer)


def prompt_rows(shape: ModelShape, budget: int | None) -> int:
    """Return the rows of logits for prompt log-probs: as many as a thirtieth of the budget holds."""
    if budget is None:
        return _MOST_PROMPT_ROWS
    fitting = budget // 30 // logits_bytes(shape, 1)
    return max(_PROMPT_ROWS, min(_MOST_PROMPT_ROWS, fitting))


def slack_bytes(budget: int | None) -> int:
    """Return the reserve for untracked allocations, such as malloc's: a sixteenth, at most 100 MB."""
    return 0 if budget is None else min(100_000_000, budget // 16)


def resident_bytes(shape: ModelShape, tiers: tuple[str, ...], tier: str) -> int:
    """Return the bytes of weights in a tier."""
    return sum(slot.nbytes for slot, at in zip(shape.slots, tiers, strict=True) if at == tier)


def expert_buffers(shape: ModelShape, tiers: tuple[str, ...]) -> int:
    """Return the bytes of the staging buffers for experts."""
    if not shape.held_experts(tiers):
        return 0
    return READERS * max(unit.expert_buffer for unit in shape.units)


def weight_bytes(shape: ModelShape, tiers: tuple[str, ...]) -> dict[str, int]:
    """Return the bytes of resident weights and of the expert cache."""
    held = shape.held_experts(tiers)
    stay = resident_bytes(shape, tiers, "gpu") + resident_bytes(shape, tiers, "cpu")
    return {"weights": stay - max(0, held - shape.fewest_experts), "experts": held}


def fixed_bytes(
    shape: ModelShape,
    tiers: tuple[str, ...],
    widths: Widths,
    kv: Percents,
    budget: int | None,
    *,
    roomy: bool,
) -> dict[str, int]:
    """Return bytes by kind, without weights, K and V and waiting activations."""
    rows = min(widths.micro_tokens, widths.max_batch_tokens)
    return {
        "ring": ring_bytes(shape, tiers, roomy=roomy),
        "experts": shape.fewest_experts if shape.held_experts(tiers) else 0,
        "expert buffers": expert_buffers(shape, tiers),
        "unpacked weights": max((shape.made(unit, tiers) for unit in shape.units), default=0),
        "computation": working_bytes(shape, rows),
        "logits": logits_bytes(shape, widths.sequences + prompt_rows(shape, budget)),
        "K and V buffers": kv_buffer_bytes(shape, widths, kv),
        "slack": slack_bytes(budget),
    }
