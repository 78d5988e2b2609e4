"""Cosines and sines of rotary embeddings, computed by the model's own module and cached."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.kernels.functions import struct_layout
from verbatim.model.differential import bit_equal

_MIN_LENGTH = 1024  # smallest table, in positions
_MAX_LENGTH = 1 << 15  # largest table: 16 MB for heads of 128
# Rotary types with angles that depend only on the position, not on the context length.
_FIXED_TYPES = frozenset({"default", "linear", "llama3", "yarn", "proportional"})


def rotary(
    forward: Callable[..., tuple[Tensor, Tensor]], hidden: Tensor, positions: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Call a rotary module's forward on `hidden` `[1, T, H]` and `positions` `[1, T]`."""
    try:
        return forward(hidden, positions, **options)
    except IndexError:
        # transformers 5.17's module of Qwen 3.5 needs positions of time, height and width.
        return forward(hidden, positions.expand(3, *positions.shape), **options)


@struct_layout("P cos sin\nL width\nP rows\nI is_f32", size="angles")
class AnglesStruct(ctypes.Structure):
    """`Angles` of kernels/layer.cpp."""


def cos_and_sin(embeddings: Any, *, sin_first: bool = False) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines, `[T, N]` each, of position embeddings: a pair or complex numbers."""
    pair = (embeddings.real, embeddings.imag) if isinstance(embeddings, Tensor) else embeddings
    cos, sin = (x.flatten(0, -2).contiguous() for x in (pair[::-1] if sin_first else pair))
    return cos, sin


class Angles:
    """Cosines and sines of a rotary embedding by position, with a cached table.

    Args:
        rotary: the model's rotary module.
        forward: the module's forward: `(hidden [1, T, H], positions [1, T])` to cos and sin `[1, T, N]`.
        dtype: the model's dtype. Cosines and sines in other dtypes than this and float32 are unsupported.
        layer_type: type of the layers that use the table (also an attribute); None if there is only one.
    """

    def __init__(
        self,
        rotary: nn.Module,
        forward: Callable[..., tuple[Tensor, Tensor]],
        dtype: torch.dtype,
        layer_type: str | None = None,
    ) -> None:
        self._forward, self._dtype, self.layer_type = forward, dtype, layer_type
        self._options = {} if layer_type is None else {"layer_type": layer_type}
        kind: Any = rotary.__dict__.get("rope_type")
        kind = kind if layer_type is None else kind[layer_type]
        self._is_cacheable = isinstance(kind, str) and kind in _FIXED_TYPES
        if kind == "longrope":  # fixed only if its two lists of factors are equal
            rope: Any = rotary.config.rope_parameters  # type: ignore[union-attr]
            rope = rope if layer_type is None else rope[layer_type]
            self._is_cacheable = rope["short_factor"] == rope["long_factor"]
        self._table: tuple[Tensor, Tensor] | None = None

    def of(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return cosines and sines, `[T, N]` each, for `positions` `[T]`; None if their dtype is unsupported.

        `hidden` `[1, T, H]` sets dtype and device.
        """
        cos, sin = cos_and_sin(rotary(self._forward, hidden, positions[None], **self._options))
        fits = cos.dtype is sin.dtype and cos.dtype in (torch.float32, self._dtype)
        return (cos, sin) if fits and cos.shape == sin.shape else None

    def table(self, hidden: Tensor, length: int) -> tuple[Tensor, Tensor] | None:
        """Return a cached table that covers at least the positions below `length`.

        The module must not have been edited. Returns None if the angles depend on more than the position,
        or if the table would be too large.
        """
        if length > _MAX_LENGTH:
            self._table = None
            return None
        if self._table is None or len(self._table[0]) < length:
            self._table = self._build_table(hidden, length) if self._is_cacheable else None
        return self._table

    def _build_table(self, hidden: Tensor, length: int) -> tuple[Tensor, Tensor] | None:
        size = max(_MIN_LENGTH, 1 << (length - 1).bit_length())
        table, row = (self.of(hidden, x) for x in (torch.arange(size), torch.tensor([length - 1])))
        table_row = [x[length - 1 : length] for x in table or ()]
        self._is_cacheable = bool(table and row) and all(map(bit_equal, table_row, row or ()))
        return table if self._is_cacheable else None

    def forget(self) -> None:
        """Drop the cached table."""
        self._table = None
