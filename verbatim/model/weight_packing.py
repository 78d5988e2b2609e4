"""`WeightPacking`: the byte layout of a quantized parameter."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from verbatim.model.quantization import Quantization

HEAD_BYTES = 4  # (scale, low) of a group, two bf16


@dataclass(frozen=True, slots=True)
class WeightPacking:
    """The byte layout of one quantized parameter.

    `[..., N, K]` (as in nn.Linear) is stored row by row: the codes of a row, then (scale, low) of each of
    its groups. `[..., K, N]` (as in GPT-2) is stored group by group: N scales, N lows, then the codes row
    by row. With 4 bits, byte i of a group has its elements i (low half) and i + ceil(size / 2).

    Attributes:
        shape, dtype: of the parameter.
        columns: K is the second to last dimension; else the last.
        interleaved: the layout for integer products (`integers.py`), matrix by matrix. `pack` and `unpack`
            do not support it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    quantization: Quantization
    columns: bool = False
    interleaved: bool = False

    def __post_init__(self) -> None:
        assert len(self.shape) >= 2 and self.dtype.is_floating_point

    @property
    def multiplies_codes(self) -> bool:
        """True if activations are quantized, too."""
        return self.quantization.activation_bits is not None

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
        groups = -(-self.depth // self.quantization.group_size)
        return (self.depth * self.quantization.bits + 7) // 8 + groups * HEAD_BYTES

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
            blocks = math.prod(self.shape[:-2]) * -(-self.width // 32)
            return blocks * 32 * self.vector_words * 4
        return self.vectors * self.vector_bytes


def stretches(depth: int, group: int) -> list[tuple[int, int]]:
    """Return (groups, size of each): the whole groups, then the short one."""
    found = [(depth // group, group), (1, depth % group)]
    return [(count, size) for count, size in found if count and size]
