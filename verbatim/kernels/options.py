"""Options and constants shared by the kernels and their references."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

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
            `[T, H]` if each row has its own.
        alibi: `[H]` float32 slopes; slope * (key position - query position) is added to scores.
        bias: `[T, H, E]` in the dtype of queries; `bias[t, h, d]` is added to the score of the key that is d
            positions before the row's own, after the soft cap. Keys E or more positions back have none.
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
    bias: Tensor | None = None
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
        for name, dims in ("sinks", 2), ("alibi", 1):
            values = getattr(self, name)
            if values is not None and (
                values.dtype != torch.float32 or not 1 <= values.dim() <= dims
            ):
                raise ValueError(
                    f"{name} must be float32 of shape [heads]{', or [rows, heads]' * (dims > 1)}, not "
                    f"{values.dtype} of shape {list(values.shape)}"
                )
        bias = self.bias
        if bias is not None and (bias.dim() != 3 or not bias.is_floating_point()):
            raise ValueError(
                f"bias must be of shape [rows, heads, distances], not {bias.dtype} of shape "
                f"{list(bias.shape)}"
            )

    @property
    def differs_by_row(self) -> bool:
        """Return whether rows have sinks or biases of their own."""
        return self.bias is not None or (self.sinks is not None and self.sinks.dim() > 1)

    def of_rows(self, rows: Tensor | slice) -> AttentionOptions:
        """Return the options of some rows."""
        if not self.differs_by_row:
            return self
        sinks, bias = self.sinks, self.bias
        return replace(
            self,
            sinks=sinks[rows] if sinks is not None and sinks.dim() > 1 else sinks,
            bias=None if bias is None else bias[rows],
        )

    def of_heads(self, heads: slice) -> AttentionOptions:
        """Return the options of some query heads; `chosen` stays as it is."""
        sinks, alibi, bias = self.sinks, self.alibi, self.bias
        if sinks is None and alibi is None and bias is None:
            return self
        return replace(
            self,
            sinks=None if sinks is None else sinks[..., heads].contiguous(),
            alibi=None if alibi is None else alibi[heads].contiguous(),
            bias=None if bias is None else bias[:, heads].contiguous(),
        )

    def with_biases(self, scores: Tensor, positions: Tensor, keys: Tensor) -> Tensor:
        """Return `scores` `[R, H, L]` with ALiBi and `bias`, for rows at `positions` and `keys` `[L]`."""
        behind = (positions[:, None] - keys)[:, None]  # [R, 1, L]
        if self.alibi is not None:
            scores = scores + self.alibi[:, None] * -behind
        if self.bias is not None and (size := self.bias.shape[2]):
            near = (behind >= 0) & (behind < size)
            bias = self.bias.float().gather(2, behind.clamp(0, size - 1).expand(scores.shape))
            scores = scores + torch.where(near, bias, 0.0)
        return scores

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
    ONE_PLUS_ROUNDED = 5  # Muse Spark: round((x * inv) * round(1 + weight))
    SCALED_FIRST = 6  # Muse Spark's experts: BARE of round(x * round(1 + weight))
    CENTERED = 7  # LayerNorm, of x minus its mean: round(weight * (x * inv) + bias)
    CENTERED_ONE_PLUS = 8  # Nemotron: the same with round(1 + weight)


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
