"""Options and constants shared by the kernels and their references."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

NUM_LANES = 32  # partial sums of a row of logits
# 2**r = 1 + r * (c0 + r * (c1 + ...)) for |r| <= 1/2, with a relative error of 3e-9.
EXP_COEFFICIENTS = (
    0.6931472067028326,
    0.24022650922288757,
    0.05550327226670302,
    0.009618056678524637,
    0.0013400428177615838,
    0.0001546144469856913,
)


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Options of one layer's attention.

    Attributes:
        scale: factor of every dot product.
        window: a query at position p sees the keys at positions above p - window; 0: no limit.
        chunk: a query at position p sees the keys at p // chunk * chunk and above; 0: no limit.
        softcap: scores become softcap * tanh(score / softcap), after the scale; 0: off.
        sinks: `[H]` float32; one additional logit per head in the softmax's denominator, without a value.
        alibi: `[H]` float32 slopes; slope * (key position - query position) is added to scores.
        chosen: `[T, G, k]` int32; positions of the keys that each row sees, for each of G groups of heads,
            ascending, padded with -1. None: all keys up to the row's own position.
        records: `[T, k]` int32; positions of the records that each row attends to besides the keys in its
            window, ascending, padded with -1. An int: all records, of windows of that many tokens. The keys
            are also the values, and records are stored in place of values. None: no records.
    """

    scale: float
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None
    alibi: Tensor | None = None
    chosen: Tensor | None = None
    records: Tensor | int | None = None

    @property
    def is_sparse(self) -> bool:
        """Return whether rows attend to chosen keys or to records."""
        return self.chosen is not None or self.records is not None

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
        top_k: number of blocks of keys chosen for each row.
        weights: `[T, H]` float32; weights of the heads' scores in their sum. None: each head chooses
            separately, by its dot products.
        block: keys per block; a block's score is the largest score of its keys.
        num_local: number of most recent blocks, including the row's own, that are always chosen.
        pooled: a block's score is that of its last key. Only full blocks are chosen, and a row also sees the
            keys of its own unfinished block.
        records: with `pooled`; only the last key of each chosen block is seen, which is the block's record.
    """

    top_k: int
    weights: Tensor | None
    block: int = 1
    num_local: int = 0
    pooled: bool = False
    records: bool = False
    is_sparse = True

    @property
    def width(self) -> int:
        """Maximum number of keys chosen for a row."""
        if self.records:
            return self.top_k
        return self.top_k * self.block + (self.block - 1 if self.pooled else 0)

    def groups(self, num_heads: int) -> int:
        """Return the number of separate choices per row."""
        return num_heads if self.weights is None else 1


AnyOptions = AttentionOptions | IndexOptions


class NormKind(enum.IntEnum):
    """The rounding steps of a norm x / rms(x) * weight, as in `kernels/elementwise.h`. inv is 1 / rms(x)."""

    NONE = 0  # no norm
    BARE = 1  # no weight: round(x * inv)
    ROUNDED = 2  # Llama, Qwen: round(weight * round(x * inv))
    WIDE = 3  # Olmo 2, GPT-OSS: round(weight * (x * inv))
    ONE_PLUS = 4  # Gemma: round((x * inv) * (1 + weight))
    CENTERED = 5  # LayerNorm, of x minus its mean: round(weight * (x * inv) + bias)
    CENTERED_ONE_PLUS = 6  # Nemotron: the same with round(1 + weight)


class Activation(enum.IntEnum):
    """Elementwise functions; as in `kernels/elementwise.h`."""

    SILU = 0
    GELU_TANH = 1
    SIGMOID = 2  # this and the next two are not used by MLPs
    EXP = 3
    SOFTPLUS = 4
    GELU = 5
    RELU = 6
    RELU_SQUARED = 7
