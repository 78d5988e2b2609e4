"""Comparison of two ways to compute the same, by which every fast path is held to the plain one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

Case = TypeVar("Case")


class Mismatch(NamedTuple):
    """The first tensors that differ."""

    case: Any
    place: int  # among the tensors of that case
    ours: Tensor
    theirs: Tensor


def differential_check(
    ours: Callable[[Case], Sequence[Tensor]],
    theirs: Callable[[Case], Sequence[Tensor]],
    cases: Iterable[Case],
    same: Callable[[Tensor, Tensor], bool] | None = None,
) -> Mismatch | None:
    """Compare what two functions compute for each case; return the first difference, or None.

    Args:
        same: returns whether two tensors are equal; None: `bit_equal`.
    """
    same = bit_equal if same is None else same
    for case in cases:
        pairs = zip(ours(case), theirs(case), strict=True)
        for place, (a, b) in enumerate(pairs):
            if not same(a, b):
                return Mismatch(case, place, a, b)
    return None


def bit_equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal bit for bit, with the same dtype and shape."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    whole = {4: torch.int32, 2: torch.int16}.get(a.element_size())
    if whole is None or not a.is_floating_point():
        return torch.equal(a, b)
    return torch.equal(a.contiguous().view(whole), b.contiguous().view(whole))


def largest_error(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of logits `[..., T, V]`.

    In half precision that of the median row, as a rounding may send a token to another expert.
    """
    if not a.numel():
        return 0.0
    rows = (a - b).abs().amax(-1).float()
    return float(rows.max() if a.dtype == torch.float32 else rows.median())


def tolerance(logits: Tensor, scale: float) -> float:
    """Return the error that roundings explain in logits whose largest is `scale`."""
    return scale * (1e-3 if logits.dtype == torch.float32 else 1e-1)


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return random numbers, the same for the same arguments."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
