"""What a plan takes in memory, byte by byte."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from verbatim.placement.offload.choice import Percents
from verbatim.placement.offload.shape import ModelShape
from verbatim.placement.offload.visits import WINDOWS

READERS = 2  # threads that read weights
_ROOM_TO_GROW = 1.25  # of a window of K and V
_PROMPT_ROWS = 16  # of logits for prompt log-probs that a forward may have at least
_MOST_PROMPT_ROWS = 256


@dataclass(frozen=True, slots=True)
class Widths:
    """How much of a model computes at once.

    Attributes:
        sequences: that run at once.
        batch_size: of them in a micro-batch.
        micro_tokens: rows of a micro-batch at most.
        max_batch_tokens: rows of a forward at most.
        context: tokens of a sequence as the workload has them.
    """

    sequences: int
    batch_size: int
    micro_tokens: int
    max_batch_tokens: int
    context: int


def ring_bytes(shape: ModelShape, tiers: tuple[str, ...], *, roomy: bool) -> int:
    """Memory in which weights are read ahead.

    Args:
        roomy: two neighbours fit, so that one is read while the other is used; else the largest one does.
    """
    sizes = [size for unit in shape.units if (size := shape.streamed(unit, tiers))]
    if not roomy or len(sizes) < 2:
        return max(sizes, default=0)
    return max(a + b for a, b in zip(sizes, sizes[1:] + sizes[:1], strict=True))


def waiting_bytes(shape: ModelShape, rows: int) -> int:
    """Hidden states of rows that stand between two layers, with the residual and the rotary embeddings
    that their forwards hold on to."""
    rotary = 2 * 4 * min(shape.hidden, 256)
    return rows * (3 * shape.hidden * shape.itemsize + rotary + 64)


def working_bytes(shape: ModelShape, rows: int) -> int:
    """What a layer allocates while it computes `rows` rows, at the time at which it is most."""
    item = shape.itemsize
    norms = shape.hidden * (4 * item + 3 * 4)  # which are made in float32
    attention = 3 * shape.attention * item + shape.hidden * item
    mlp = shape.intermediate * (4 * item + 3 * 4)
    routed = shape.experts_per_token * shape.hidden * (3 * item + 2 * 4)
    return rows * (norms + max(attention, mlp) + routed)


def logits_bytes(shape: ModelShape, rows: int) -> int:
    """Logits of a forward: those of its parts, all of them together, and what the sampler makes of them."""
    return rows * shape.vocab * (2 * shape.itemsize + 2 * 4)


def window_bytes(shape: ModelShape, widths: Widths, kv: Percents) -> int:
    """K and V of one layer of a micro-batch, as often as they are there at the same time.

    They are as large as the sequences that run are long; here they are as long as the workload says.
    """
    if not kv[2]:
        return 0
    a_layer = ceil(shape.kv_bytes_per_token / shape.layers)
    return int(WINDOWS * _ROOM_TO_GROW * widths.batch_size * widths.context * a_layer)


def prompt_rows(shape: ModelShape, budget: int | None) -> int:
    """Rows of logits for prompt log-probs in a forward: what a thirtieth of the memory holds."""
    if budget is None:
        return _MOST_PROMPT_ROWS
    fitting = budget // 30 // logits_bytes(shape, 1)
    return max(_PROMPT_ROWS, min(_MOST_PROMPT_ROWS, fitting))


def slack_bytes(budget: int | None) -> int:
    """For all that has no name here, such as what the C library keeps: a sixteenth, and 100 MB at most."""
    return 0 if budget is None else min(100_000_000, budget // 16)


def resident_bytes(shape: ModelShape, tiers: tuple[str, ...], tier: str) -> int:
    """Weights that stay in a tier."""
    return sum(slot.nbytes for slot, at in zip(shape.slots, tiers, strict=True) if at == tier)


def expert_buffers(shape: ModelShape, tiers: tuple[str, ...]) -> int:
    """Memory in which experts are read."""
    if not shape.held_experts(tiers):
        return 0
    return READERS * max(unit.expert_buffer for unit in shape.units)


def weight_bytes(shape: ModelShape, tiers: tuple[str, ...]) -> dict[str, int]:
    """Return what weights take in memory: those that stay, and experts that come and go."""
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
    """What a plan takes beside its weights, K and V and waiting activations, by kind."""
    rows = min(widths.micro_tokens, widths.max_batch_tokens)
    return {
        "ring": ring_bytes(shape, tiers, roomy=roomy),
        "experts": shape.fewest_experts if shape.held_experts(tiers) else 0,
        "expert buffers": expert_buffers(shape, tiers),
        "unpacked weights": max((shape.made(unit, tiers) for unit in shape.units), default=0),
        "computation": working_bytes(shape, rows),
        "logits": logits_bytes(shape, widths.sequences + prompt_rows(shape, budget)),
        "windows": window_bytes(shape, widths, kv),
        "slack": slack_bytes(budget),
    }
