"""Options and constants that the kernels share with their references."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

NUM_LANES = 32  # partial sums of a row of logits
# 2**r = 1 + r * (c0 + r * (c1 + ...)) for |r| <= 1/2, to 3e-9 of its value.
EXP_COEFFICIENTS = (
    0.6931472067028326,
    0.24022650922288757,
    0.05550327226670302,
    0.009618056678524637,
    0.0013400428177615838,
    0.0001546144469856913,
)

HEAD_BYTES = 4  # of a group of quantized K or V: (scale, low), two bf16


@dataclass(frozen=True, slots=True)
class Packing:
    """A quantized format of K and V.

    Attributes:
        name: its value of `kv_dtype`.
        bits: bits per code.
        group: elements per (scale, low).
    """

    name: str
    bits: int
    group: int

    def code_bytes(self, width: int) -> int:
        return (width * self.bits + 7) // 8

    def row_bytes(self, width: int) -> int:
        """Return the bytes of one head's vector of `width` elements: codes, then (scale, low) of groups."""
        return self.code_bytes(width) + -(-width // self.group) * HEAD_BYTES


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Options of one layer's attention, besides the softmax.

    Attributes:
        scale: factor of every dot product.
        window: a query at position p sees the keys at positions above p - window; 0: all.
        chunk: a query at position p sees the keys at p // chunk * chunk and above; 0: all.
        softcap: scores become softcap * tanh(score / softcap), after the scale; 0: not.
        sinks: `[H]` float32; one more logit per head in the softmax's denominator, without a value.
        alibi: `[H]` float32 slopes; slope * (key position - query position) is added to a score.
        chosen: `[T, G, k]` int32; the positions that each row sees, ascending, then -1 if they are fewer, for
            each of G groups of heads. None: all up to its own.
        records: `[T, k]` int32; the positions of the records that each row attends to beside the keys in its
            window, ascending, then -1 if they are fewer. Keys are values too, and records lie where values
            do otherwise. None: there are none.
    """

    scale: float
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None
    alibi: Tensor | None = None
    chosen: Tensor | None = None
    records: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("window", "chunk", "softcap"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be 0 (off) or above")
        for name in ("sinks", "alibi"):
            values = getattr(self, name)
            if values is not None and (values.dtype != torch.float32 or values.dim() != 1):
                raise ValueError(
                    f"{name} must be float32 of shape [heads], not {values.dtype} of shape "
                    f"{list(values.shape)}"
                )

    def lowest_key(self, positions: Tensor) -> Tensor:
        """Return the position of the first key that queries at `positions` see."""
        lowest = torch.zeros_like(positions)
        if self.window:
            lowest = torch.maximum(lowest, positions + 1 - self.window)
        if self.chunk:
            lowest = torch.maximum(lowest, positions // self.chunk * self.chunk)
        return lowest


@dataclass(frozen=True, slots=True)
class IndexOptions:
    """Options of an indexer, which chooses the keys that rows attend to.

    Attributes:
        top_k: blocks of keys for each row.
        weights: `[T, H]` float32, of each head's scores, which are summed; None: each head chooses for
            itself, by its dot products.
        block: keys in a block; its score is the largest of theirs.
        num_local: last blocks, up to the row's own, that are always chosen.
        pooled: the score of a block is that of its last key. Whole blocks alone are chosen from, and a row
            sees the keys of its own unfinished block besides.
        records: with `pooled`, only the last key of each chosen block is seen: the record of the block.
    """

    top_k: int
    weights: Tensor | None
    block: int = 1
    num_local: int = 0
    pooled: bool = False
    records: bool = False

    @property
    def width(self) -> int:
        """Keys for each row."""
        if self.records:
            return self.top_k
        return self.top_k * self.block + (self.block - 1 if self.pooled else 0)

    def groups(self, num_heads: int) -> int:
        """Return how many choices are made for each row."""
        return num_heads if self.weights is None else 1


AnyOptions = AttentionOptions | IndexOptions  # of a call that attends, or that chooses keys


class NormKind(enum.IntEnum):
    """The roundings of a norm, x / rms(x) * weight; as in `kernels/elementwise.h`."""

    NONE = 0  # no norm at all
    BARE = 1  # no weight: round(x * inv)
    ROUNDED = 2  # Llama, Qwen: round(weight * round(x * inv))
    WIDE = 3  # Olmo 2, GPT-OSS: round(weight * (x * inv))
    ONE_PLUS = 4  # Gemma: round((x * inv) * (1 + weight))
    CENTERED = 5  # LayerNorm: of x minus its mean, round(weight * (x * inv) + bias)
    CENTERED_ONE_PLUS = 6  # Nemotron: the same with round(1 + weight)


class Activation(enum.IntEnum):
    """Functions of one number; as in `kernels/elementwise.h`."""

    SILU = 0
    GELU_TANH = 1
    SIGMOID = 2  # this and the next two: no MLP has it
    EXP = 3
    SOFTPLUS = 4
    GELU = 5
    RELU = 6
    RELU_SQUARED = 7
