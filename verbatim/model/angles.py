"""Cosines and sines of positions, as a model's own module makes them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from verbatim.model.layer_trial import same_bits

_FIRST = 1024  # positions of a new table
_MOST = 1 << 15  # of the largest: 16 MB for heads of 128
# Kinds of rotation in which an angle depends on its position alone, not on how long the context is.
_FIXED = frozenset({"default", "linear", "llama3", "yarn", "proportional"})


class Angles:
    """What the rotary module of a model gives for positions.

    Args:
        rotary: it.
        forward: what it computes: `(hidden [1, T, H], positions [1, T])` to cosines and sines `[1, T, N]`.
        dtype: of the model; angles are in it or in float32.
    """

    def __init__(
        self, rotary: nn.Module, forward: Callable[..., tuple[Tensor, Tensor]], dtype: torch.dtype
    ) -> None:
        self._forward, self._dtype = forward, dtype
        kind = rotary.__dict__.get("rope_type")
        self._may_keep = isinstance(kind, str) and kind in _FIXED
        self._kept: tuple[Tensor, Tensor] | None = None

    def of(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        """`[T, N]` each for `positions` `[T]`; None where they are in another dtype.

        `hidden` `[1, T, H]` is what the module looks at for a dtype and a device.
        """
        cos, sin = (x.flatten(0, -2).contiguous() for x in self._forward(hidden, positions[None]))
        fits = cos.dtype is sin.dtype and cos.dtype in (torch.float32, self._dtype)
        return (cos, sin) if fits and cos.shape == sin.shape else None

    def table(self, hidden: Tensor, length: int) -> tuple[Tensor, Tensor] | None:
        """Those of all positions below `length`, and of some more, kept from call to call.

        For a module that nobody edits. None where an angle may depend on more than its position, and where
        so many would take memory that nobody counts.
        """
        if length > _MOST:
            self._kept = None
            return None
        if self._kept is None or len(self._kept[0]) < length:
            self._kept = self._made(hidden, length) if self._may_keep else None
        return self._kept

    def _made(self, hidden: Tensor, length: int) -> tuple[Tensor, Tensor] | None:
        size = _FIRST
        while size < length:
            size *= 2
        made = self.of(hidden, torch.arange(size))
        one = self.of(hidden, torch.tensor([length - 1]))
        self._may_keep = (
            made is not None
            and one is not None
            and all(same_bits(a[length - 1 : length], b) for a, b in zip(made, one, strict=True))
        )
        return made if self._may_keep else None

    def forget(self) -> None:
        """Make the table anew when it is asked for."""
        self._kept = None
