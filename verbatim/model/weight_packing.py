"""How a parameter in few bits lies in bytes: `WeightPacking`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from verbatim.model.quantization import Quantization

HEAD_BYTES = 4  # (scale, low) of a group, two bf16


@dataclass(frozen=True, slots=True)
class WeightPacking:
    """How one parameter lies in bytes.

    Rows that are multiplied (`[..., N, K]`, as nn.Linear has them) lie one after another: the codes of a
    row, then (scale, low) of each of its groups. Columns that are (`[..., K, N]`, as GPT-2 has them) lie
    group by group: N scales, N lows, then the codes row by row. In 4 bits, byte i of a group holds its
    elements i (low half) and i + ceil(size / 2).

    Attributes:
        shape, dtype: of the parameter.
        columns: K is the last dimension but one; else it is the last.
        interleaved: matrices laid out anew for products of whole numbers (`integers.py`), one after another,
            which is how their activations are multiplied then. `pack` and `unpack` don't know of it.
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
        """Does it multiply activations in few bits, as it will when it is interleaved?"""
        return self.quantization.activation_bits is not None

    @property
    def depth(self) -> int:
        """K."""
        return self.shape[-2 if self.columns else -1]

    @property
    def width(self) -> int:
        """N, of one matrix."""
        return self.shape[-1 if self.columns else -2]

    @property
    def vectors(self) -> int:
        """How many runs of K elements there are."""
        return math.prod(self.shape[:-2]) * self.width

    @property
    def vector_bytes(self) -> int:
        """What K elements take."""
        groups = -(-self.depth // self.quantization.group_size)
        return (self.depth * self.quantization.bits + 7) // 8 + groups * HEAD_BYTES

    @property
    def vector_words(self) -> int:
        """What K elements take where they are interleaved, in words of four bytes."""
        bits = self.quantization.bits
        groups = stretches(self.depth, self.quantization.group_size)
        return sum(count * (1 + -(-size * bits // 32)) for count, size in groups)

    @property
    def nbytes(self) -> int:
        """Packed."""
        if self.interleaved:
            blocks = math.prod(self.shape[:-2]) * -(-self.width // 32)
            return blocks * 32 * self.vector_words * 4
        return self.vectors * self.vector_bytes


def stretches(depth: int, group: int) -> list[tuple[int, int]]:
    """(groups, size of each): the whole ones, then the short one."""
    found = [(depth // group, group), (1, depth % group)]
    return [(count, size) for count, size in found if count and size]
