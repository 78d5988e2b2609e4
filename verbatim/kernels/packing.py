"""Byte layouts of quantized rows and matrices, which the kernels and their torch references read.

A row has groups of adjacent elements; the last may be short. It consists of the codes of its elements, then
the heads of its groups (scale, and minimum or zero point if the encoding has one). With 4 bits, byte i of a
group has the elements i (low half) and i + ceil(size / 2). In encodings with blocks (`BLOCKS`), a row is a
sequence of blocks of 256 elements. `verbatim/quantization/` converts between rows of numbers and of bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import IntEnum

import torch


class Encoding(IntEnum):
    """The formula that decodes a value to float32 from its code and the head of its group.

    A weight is that value, rounded once to the model's dtype.
    """

    # low + scale * code; scale and low are bf16. Of K and V, and of the option `quantization`.
    AFFINE = 0
    # scale * (code - zero); a float32 scale, in which the lowest 8 bits are replaced by the zero point.
    ZERO_POINT = 1
    # scale * (code - 2^(bits - 1)); scale is float32.
    SIGNED = 2
    # scale * one of 256 or 16 numbers (`TABLES`); scale is float32, for MXFP4 bf16. FP8 is E4M3.
    FP8 = 3
    NF4 = 4
    FP4 = 5
    MXFP4 = 6
    # scale * (code - 2^(bits - 1)); scale is float16.
    HALF = 7
    # scale * (code - 8) + zero; scale and zero are bf16.
    CENTERED = 9
    # GGUF's types, as stored in a file (`quantization/blocks.py`).
    Q4_K = 8
    Q5_K = 10
    Q6_K = 11
    Q3_K = 12
    Q2_K = 13
    # float32 factor * FP8 scale (E4M3) per 16 elements * FP4 code (E2M1), also in blocks of 256.
    NVFP4 = 14


INTERLEAVED = 32  # rows in a block of the layout for integer products
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
# Dtypes of scales of 16 bits, without a zero; heads of other encodings have 32 bits.
HALVES = {Encoding.HALF: torch.float16, Encoding.MXFP4: torch.bfloat16}
_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
_POSITIVE_FP4 = torch.tensor(
    (
        *(0.0, 0.0052083334885537624, 0.6666666865348816, 1.0),
        *(0.3333333432674408, 0.5, 0.1666666716337204, 0.25),
    )
)
_POSITIVE_E2M1 = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
E2M1 = torch.cat([_POSITIVE_E2M1, -_POSITIVE_E2M1])
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
# The numbers by code; of NVFP4, those of codes, then those of scales.
TABLES = {
    Encoding.FP8: _E4M3,
    Encoding.NF4: torch.tensor(_NF4),
    Encoding.FP4: torch.cat([_POSITIVE_FP4, -_POSITIVE_FP4]),
    Encoding.MXFP4: E2M1,
    Encoding.NVFP4: torch.cat([E2M1, _E4M3]),
}


@dataclass(frozen=True, slots=True)
class Packing:
    """The format of quantized rows: vectors of K or V of one head, or of a weight along its contraction.

    Attributes:
        bits: bits per code.
        group: elements per group, except in encodings with blocks.
    """

    bits: int
    group: int
    encoding: Encoding = Encoding.AFFINE

    @property
    def name(self) -> str:
        """The name without the group size, such as "int8", "fp8" or "q4_k"; the value of `kv_dtype`."""
        is_named = self.encoding in TABLES or self.encoding in BLOCKS
        return self.encoding.name.lower() if is_named else f"int{self.bits}"

    @property
    def head_dtype(self) -> torch.dtype:
        """The integer dtype of a group's head."""
        return torch.int16 if self.encoding in HALVES else torch.int32

    def group_sizes(self, width: int) -> list[tuple[int, int]]:
        """Return (number of groups, group size) for the full groups, then for the short one, if any."""
        sizes = [(width // self.group, self.group), (1, width % self.group)]
        return [(count, size) for count, size in sizes if count and size]

    def code_bytes(self, width: int) -> int:
        """Return the bytes of a row's codes."""
        return (width * self.bits + 7) // 8

    def row_bytes(self, width: int) -> int:
        """Return the bytes of a row of `width` elements."""
        if self.encoding in BLOCKS:
            return width // BLOCK * BLOCKS[self.encoding]
        return self.code_bytes(width) + -(-width // self.group) * self.head_dtype.itemsize

    def row_words(self, width: int) -> int:
        """Return the int32 words of an interleaved row of `width` elements."""
        groups = self.group_sizes(width)
        return sum(count * (1 + -(-size * self.bits // 32)) for count, size in groups)


@dataclass(frozen=True, slots=True)
class WeightPacking:
    """The byte layout of one quantized parameter.

    `[..., N, K]` (as in nn.Linear) is stored row by row, and `[..., K, N]` (as in GPT-2) as its transpose.

    Attributes:
        shape, dtype: shape and dtype of the parameter.
        rows: format of the rows of K elements.
        columns: whether K is the second to last dimension of `shape` instead of the last.
        interleaved: whether it has the layout for integer products (`quantization/integers.py`); activations
            are quantized, too.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: Packing
    columns: bool = False
    interleaved: bool = False

    def __post_init__(self) -> None:
        assert len(self.shape) >= 2 and self.dtype.is_floating_point
        assert self.rows.encoding not in BLOCKS or not (self.columns or self.depth % BLOCK)

    @property
    def single(self) -> WeightPacking:
        """The layout of one matrix of a stack."""
        return replace(self, shape=self.shape[-2:])

    @property
    def plain(self) -> WeightPacking:
        """This layout, but not interleaved."""
        return replace(self, interleaved=False)

    @property
    def name(self) -> str:
        """The format's name, such as "fp8-g128"."""
        group = "" if self.rows.encoding in BLOCKS else f"-g{self.rows.group}"
        return f"{self.rows.name}{group}{'-a8' if self.interleaved else ''}"

    @property
    def format(self) -> int:
        """`vb::Format` of kernels/matrix.h."""
        return self.rows.bits + 16 * self.interleaved + 256 * self.rows.encoding

    @property
    def depth(self) -> int:
        """K."""
        return self.shape[-2 if self.columns else -1]

    @property
    def width(self) -> int:
        """N of one matrix."""
        return self.shape[-1 if self.columns else -2]

    @property
    def num_rows(self) -> int:
        """The number of rows of K elements."""
        return math.prod(self.shape[:-2]) * self.width

    @property
    def row_bytes(self) -> int:
        """Bytes per row of K elements, if not interleaved."""
        return self.rows.row_bytes(self.depth)

    @property
    def row_words(self) -> int:
        """Number of int32 words per row of K elements, if interleaved."""
        return self.rows.row_words(self.depth)

    @property
    def nbytes(self) -> int:
        """Bytes of the quantized parameter."""
        if self.interleaved:
            width = -(-self.width // INTERLEAVED) * INTERLEAVED
            return math.prod(self.shape[:-2]) * width * self.row_words * 4
        return self.num_rows * self.row_bytes
