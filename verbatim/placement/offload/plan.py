"""`Plan`: the tiers of an offloaded model's parts, its batch sizes, and the memory that they take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import ceil
from typing import Any

from verbatim.placement.offload.choice import Percents
from verbatim.placement.offload.kv_disk import NUM_STAGED
from verbatim.placement.offload.shape import ModelShape
from verbatim.placement.offload.stream import READERS

_ROOM_TO_GROW = 1.25  # of a staging buffer for K and V
_PROMPT_ROWS = 16  # of logits for prompt log-probs that a forward may have at least
_MOST_PROMPT_ROWS = 256


@dataclass(frozen=True, slots=True)
class Plan:
    """A placement of weights, K and V and activations, with the sizes of batches and buffers.

    Attributes:
        weights, kv, activations: percents in (gpu, cpu, disk).
        kv_bytes: bytes of K and V in all tiers together.
        batch_size: sequences of a micro-batch.
        micro_batches: micro-batches that share each read of a layer.
        micro_tokens: maximal rows of a micro-batch, which bounds activations.
        max_batch_tokens: maximal rows of a forward.
        workload: prompt tokens and new tokens of a typical request, within the model's limit.
        tiers: tier of each parameter, in the order of `Units.slots`.
        kv_block: token positions in a block of K and V.
        prompt_rows: maximal rows of logits for prompt log-probs and drafts in a forward.
        overlap: read and write while computing.
        budget: bytes of memory, a GPU's and RAM together; None: unlimited.
        memory: maximal bytes in memory, by kind. "ring" and "GPU ring" are the staging buffers for weights.
        reasons: sentences that explain the choice.
    """

    weights: Percents
    kv: Percents
    activations: Percents
    kv_bytes: int
    batch_size: int
    micro_batches: int
    micro_tokens: int
    max_batch_tokens: int
    workload: tuple[int, int]
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

    def as_dict(self) -> dict[str, Any]:
        """Return JSON values, without the tier of each parameter."""
        found = {k: v for k, v in asdict(self).items() if k not in ("tiers", "kv_block")}
        for name in ("weights", "kv", "activations"):
            found[name] = [round(share, 1) for share in found[name]]
        return {**found, "memory_bytes": self.memory_bytes, "reasons": list(self.reasons)}


def ring_bytes(sizes: list[int], *, roomy: bool) -> int:
    """Return the size of the staging buffer for weights.

    Args:
        sizes: bytes of the units in the order of a forward.
        roomy: two neighbours fit, so that one is read while the other is used; else the largest one does.
    """
    sizes = [size for size in sizes if size]
    if not roomy or len(sizes) < 2:
        return max(sizes, default=0)
    return max(a + b for a, b in zip(sizes, sizes[1:] + sizes[:1], strict=True))


# Kinds of memory that are in RAM beside a GPU; all others are on it, but for weights, K and V and activations
# in the cpu tier.
IN_RAM = ("ring", "converted weights", "experts", "expert buffers", "K and V buffers")


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


def prompt_rows(shape: ModelShape, budget: int | None) -> int:
    """Return the rows of logits for prompt log-probs: as many as a thirtieth of the budget holds."""
    if budget is None:
        return _MOST_PROMPT_ROWS
    fitting = budget // 30 // logits_bytes(shape, 1)
    return max(_PROMPT_ROWS, min(_MOST_PROMPT_ROWS, fitting))


def memory_of(
    shape: ModelShape,
    plan: Plan,
    tiers: tuple[str, ...],
    *,
    kv_away: bool,
    roomy: bool,
    device_roomy: bool | None,
    budget: int | None,
) -> dict[str, int]:
    """Return the bytes by kind that a plan takes beside K and V, states and waiting activations.

    Args:
        plan: with its batch sizes. K and V have staging buffers for its workload.
        tiers: of each parameter.
        kv_away: K and V of some layers are not used where they are.
        roomy: as of `ring_bytes`, in RAM.
        device_roomy: the same on the GPU; None: there is none.
        budget: of the memory that computation takes from; None: unlimited.
    """
    held, pairs = shape.held_experts(tiers), zip(shape.slots, tiers, strict=True)
    stay = sum(slot.nbytes for slot, tier in pairs if tier != "disk")
    tokens = plan.batch_size * sum(plan.workload)
    staged = NUM_STAGED * _ROOM_TO_GROW * tokens * ceil(shape.layer_kv_bytes)
    buffers = READERS * max(unit.expert_buffer for unit in shape.units)
    on_gpu = device_roomy is not None
    copied = [shape.copied(unit, tiers) if on_gpu else 0 for unit in shape.units]
    return {
        "weights": stay - max(0, held - shape.fewest_experts),
        "ring": ring_bytes([shape.streamed(unit, tiers) for unit in shape.units], roomy=roomy),
        "GPU ring": ring_bytes(copied, roomy=bool(device_roomy)),
        "experts": held,
        "expert buffers": buffers if held else 0,
        "unpacked weights": max(map(shape.unpacked, shape.units), default=0),
        "converted weights": max((shape.converted(unit, tiers) for unit in shape.units), default=0),
        "computation": working_bytes(shape, min(plan.micro_tokens, plan.max_batch_tokens)),
        "logits": logits_bytes(shape, plan.block_size + plan.prompt_rows),
        "K and V buffers": int(staged) // (NUM_STAGED if on_gpu else 1) if kv_away else 0,
        "GPU K and V buffers": int(staged) if kv_away and on_gpu else 0,
        "MTP layers": shape.draft_bytes,
        # What is not tracked, such as malloc's: a sixteenth, at most 100 MB.
        "slack": 0 if budget is None else min(100_000_000, budget // 16),
    }
