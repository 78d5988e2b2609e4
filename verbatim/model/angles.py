"""Rotary cosines and sines, computed by the model's own module."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.kernels.functions import struct_of
from verbatim.model.differential import bit_equal

_FIRST = 1024  # smallest table, in positions
_MOST = 1 << 15  # largest table: 16 MB for heads of 128
# Rotary types with angles that depend only on the position, not on the context length.
_FIXED = frozenset({"default", "linear", "llama3", "yarn", "proportional"})


def rotary(
    forward: Callable[..., tuple[Tensor, Tensor]], hidden: Tensor, positions: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Call a rotary module's forward on `hidden` `[1, T, H]` and `positions` `[1, T]`."""
    try:
        return forward(hidden, positions, **options)
    except IndexError:
        # transformers 5.17's module of Qwen 3.5 needs time, height and width.
        return forward(hidden, positions.expand(3, *positions.shape), **options)


@struct_of("angles")
class AnglesStruct(ctypes.Structure):
    """`Angles` of kernels/layer.cpp."""

    _fields_ = (
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("width", ctypes.c_int64),
        ("rows", ctypes.c_void_p),
        ("is_f32", ctypes.c_int32),
    )


def cos_and_sin(embeddings: Any, *, sin_first: bool = False) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, `[T, N]` each, of what layers are handed: a pair, or complex numbers."""
    pair = (embeddings.real, embeddings.imag) if isinstance(embeddings, Tensor) else embeddings
    cos, sin = (x.flatten(0, -2).contiguous() for x in (pair[::-1] if sin_first else pair))
    return cos, sin


class Angles:
    """Rotary cosines and sines by position, with a cached table.

    Attributes:
        layer_type: the argument.

    Args:
        rotary: the model's rotary module.
        forward: its forward: `(hidden [1, T, H], positions [1, T])` to cosines and sines `[1, T, N]`.
        dtype: dtype of the model; cosines and sines have it, or float32.
        layer_type: of the layers that they are for; None where the module has one kind for all.
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
        self._is_cacheable = isinstance(kind, str) and kind in _FIXED
        if kind == "longrope":  # unless its two lists of factors are the same
            rope: Any = rotary.config.rope_parameters  # type: ignore[union-attr]
            rope = rope if layer_type is None else rope[layer_type]
            self._is_cacheable = rope["short_factor"] == rope["long_factor"]
        self._table: tuple[Tensor, Tensor] | None = None

    def of(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return cosines and sines, `[T, N]` each, for `positions` `[T]`; None for another dtype.

        `hidden` `[1, T, H]` gives the module the dtype and the device.
        """
        cos, sin = cos_and_sin(rotary(self._forward, hidden, positions[None], **self._options))
        fits = cos.dtype is sin.dtype and cos.dtype in (torch.float32, self._dtype)
        return (cos, sin) if fits and cos.shape == sin.shape else None

    def table(self, hidden: Tensor, length: int) -> tuple[Tensor, Tensor] | None:
        """Return a cached table for at least all positions below `length`.

        The module must not be edited. Returns None if angles may depend on more than the position, or if
        the table would be too large.
        """
        if length > _MOST:
            self._table = None
            return None
        if self._table is None or len(self._table[0]) < length:
            self._table = self._build_table(hidden, length) if self._is_cacheable else None
        return self._table

    def _build_table(self, hidden: Tensor, length: int) -> tuple[Tensor, Tensor] | None:
        size = max(_FIRST, 1 << (length - 1).bit_length())
        made, one = (self.of(hidden, x) for x in (torch.arange(size), torch.tensor([length - 1])))
        last = [x[length - 1 : length] for x in made or ()]
        self._is_cacheable = bool(made and one) and all(map(bit_equal, last, one or ()))
        return made if self._is_cacheable else None

    def forget(self) -> None:
        """Drop the cached table."""
        self._table = None
