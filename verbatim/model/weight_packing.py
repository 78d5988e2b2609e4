"""`WeightPacking`: the byte layout of a quantized parameter."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

from verbatim.kernels.packed_rows import join, split, stretches
from verbatim.model.quantization import Quantization


class Encoding(IntEnum):
    """The number that a code and the head of its group stand for; exact for the formats it is named after.

    A weight is the float32 value, rounded once to the model's dtype.
    """

    # low + scale * code, both bf16: `pack`, of `quantization=`.
    AFFINE = 0
    # scale * (code - zero): a float32 whose lowest 8 bits are zero, and hold the zero point instead.
    ZERO_POINT = 1
    # scale * (code - 2^(bits - 1)), float32.
    SIGNED = 2
    # scale * FP8 (E4M3), float32.
    FP8 = 3
    # scale * one of 16 numbers (`TABLES`), float32; MXFP4: bf16.
    NF4 = 4
    FP4 = 5
    MXFP4 = 6
    # scale * (code - 2^(bits - 1)), float16.
    HALF = 7
    # scale * (code - 8) + zero, both bf16.
    CENTERED = 9
    # GGUF's types of these names, as they lie in a file (`blocks.py`).
    Q4_K = 8
    Q5_K = 10
    Q6_K = 11
    Q3_K = 12
    Q2_K = 13
    # float32 * FP8 (E4M3) of 16 elements * FP4 (E2M1), in blocks as well.
    NVFP4 = 14


INTERLEAVED = 32  # columns of the product in a block of the layout for integer products
BLOCK = 256  # elements of a block
# Bytes of a block.
BLOCKS = {
    Encoding.Q2_K: 84,
    Encoding.Q3_K: 110,
    Encoding.Q4_K: 144,
    Encoding.Q5_K: 176,
    Encoding.Q6_K: 210,
    Encoding.NVFP4: 148,
}
_TWO_BYTES = (Encoding.MXFP4, Encoding.HALF)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4 = (
    *(0.0, 0.0052083334885537624, 0.6666666865348816, 1.0),
    *(0.3333333432674408, 0.5, 0.1666666716337204, 0.25),
)
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
TABLES = {
    Encoding.NF4: torch.tensor(_NF4),
    Encoding.FP4: torch.tensor((*_FP4, *(-x for x in _FP4))),
    Encoding.MXFP4: torch.tensor((*_E2M1, *(-x for x in _E2M1))),
}
E2M1 = TABLES[Encoding.MXFP4]


@dataclass(frozen=True, slots=True)
class WeightPacking:
    """The byte layout of one quantized parameter.

    `[..., N, K]` (as in nn.Linear) is stored row by row (`kernels/packed_rows.py`), and `[..., K, N]` (as in
    GPT-2) as its transpose is. A row of blocks (`BLOCKS`) has one after another.

    Attributes:
        shape, dtype: of the parameter.
        columns: K is the second to last dimension of `shape`; else the last.
        encoding: of codes and heads.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    quantization: Quantization
    columns: bool = False
    encoding: Encoding = Encoding.AFFINE

    def __post_init__(self) -> None:
        assert len(self.shape) >= 2 and self.dtype.is_floating_point
        assert self.encoding not in BLOCKS or not (self.columns or self.depth % BLOCK)

    @property
    def one(self) -> WeightPacking:
        """The layout of one matrix of a stack."""
        return replace(self, shape=self.shape[-2:])

    @property
    def interleaved(self) -> bool:
        """True if activations are quantized, too: the layout for integer products (`integers.py`)."""
        return self.quantization.activation_bits is not None

    @property
    def plain(self) -> WeightPacking:
        """This layout without quantized activations, and so not interleaved."""
        return replace(self, quantization=self.quantization.of_weights)

    @property
    def name(self) -> str:
        """The format's name, such as "fp8-g128"."""
        kind = self.quantization
        if self.encoding is Encoding.AFFINE:
            return kind.name
        if self.encoding in BLOCKS:
            return self.encoding.name.lower()
        named = self.encoding in (Encoding.FP8, *TABLES)
        name = self.encoding.name.lower() if named else f"int{kind.bits}"
        return f"{name}-g{kind.group_size}"

    @property
    def format(self) -> int:
        """`vb::Format` of kernels/matrix.h."""
        return self.quantization.bits + 16 * self.interleaved + 256 * self.encoding

    @property
    def head_bytes(self) -> int:
        """Bytes of a group's scale, and what goes with it."""
        return 2 if self.encoding in _TWO_BYTES else 4

    def join(self, code: Tensor, heads: Tensor) -> Tensor:
        """Return the bytes of rows, not interleaved: of codes, uint8 `[n, K]`, and heads `[n, groups]`."""
        return join(code, heads, self.quantization.bits, self.quantization.group_size)

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes and heads of rows that `join` made."""
        kind, head = self.quantization, torch.int16 if self.head_bytes == 2 else torch.int32
        return split(rows, self.depth, kind.bits, kind.group_size, head)

    @property
    def depth(self) -> int:
        """K."""
        return self.shape[-2 if self.columns else -1]

    @property
    def width(self) -> int:
        """N of one matrix."""
        return self.shape[-1 if self.columns else -2]

    @property
    def vectors(self) -> int:
        """Number of vectors of K elements."""
        return math.prod(self.shape[:-2]) * self.width

    @property
    def vector_bytes(self) -> int:
        """Bytes per vector of K elements."""
        if self.encoding in BLOCKS:
            return self.depth // BLOCK * BLOCKS[self.encoding]
        groups = -(-self.depth // self.quantization.group_size)
        return (self.depth * self.quantization.bits + 7) // 8 + groups * self.head_bytes

    @property
    def vector_words(self) -> int:
        """Words of four bytes per vector of K elements, if interleaved."""
        bits = self.quantization.bits
        groups = stretches(self.depth, self.quantization.group_size)
        return sum(count * (1 + -(-size * bits // 32)) for count, size in groups)

    @property
    def nbytes(self) -> int:
        """Bytes of the quantized parameter."""
        if self.interleaved:
            columns = -(-self.width // INTERLEAVED) * INTERLEAVED
            return math.prod(self.shape[:-2]) * columns * self.vector_words * 4
        return self.vectors * self.vector_bytes


def nearest(x: Tensor, table: Tensor) -> Tensor:
    """Return the place in a table of the number that is nearest to each of `x`."""
    order = table.argsort()
    middles = (table[order][1:] + table[order][:-1]) / 2
    return order[torch.bucketize(x.contiguous(), middles)]
