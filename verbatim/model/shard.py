"""A model of which this process holds a share: some columns of each product, some of the experts.

Nothing is ever added up over processes. A product is cut by output columns: each rank computes its own
from the whole input, every one by the very arithmetic that it has where all are computed together, and the
columns are put side by side. So every rank has every activation, and all bits are those of one process. (To
cut along the input and add, as is usual for every second product, is half the talk and other bits.)

Attention is cut by heads, in the store of K and V (`placement/distributed/heads.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from verbatim.device import Device
from verbatim.model import products
from verbatim.model.experts import ExpertShare, run_experts

# With the kernels of a CPU, a column's bits are the same in any slice of 2 or more. Triton compiles a product
# of columns in sixteens apart from others, and torch's own products have other methods for few columns; cut
# in sixteens they held wherever they were tried (`splits_exactly` checks).
COLUMNS = 16
_ASKED_ROWS = 16


class Ranks(Protocol):
    """The processes that hold a model together."""

    rank: int
    size: int

    def columns(self, own: Tensor, bounds: Sequence[int], to: int | None = None) -> Tensor:
        """The columns of all ranks, side by side: `[..., own]` of each rank to `[..., bounds[-1]]`.

        Args:
            bounds: rank r has the columns from `bounds[r]` to `bounds[r + 1]`.
            to: the only rank that needs them; the others get zeros of the same shape, in no memory.
        """
        ...

    def rows(self, own: Tensor, counts: Sequence[int]) -> Tensor:
        """The rows of all ranks, one below the other: `[counts[rank], W]` of each rank to `[sum, W]`."""
        ...


def bounds_of(count: int, size: int, unit: int = 1) -> list[int] | None:
    """Return the bounds of `size` nearly equal shares of `count` items, each of whole units but the last.

    None: there are fewer units than shares.
    """
    units = count // unit
    if units < size:
        return None
    return [units * rank // size * unit for rank in range(size)] + [count]


class Columns(nn.Module):
    """A linear layer of which this rank computes some columns, and receives the others.

    Args:
        inner: holds the parameters of these columns.
        bounds, to: as `Ranks.columns` takes them.
    """

    def __init__(
        self, inner: nn.Module, ranks: Ranks, bounds: Sequence[int], to: int | None = None
    ) -> None:
        super().__init__()
        self.inner = inner
        self.bounds = list(bounds)
        self._ranks, self._to = ranks, to

    def forward(self, x: Tensor) -> Tensor:
        return self._ranks.columns(self.inner(x), self.bounds, self._to)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # a model that looks at its linear's weight, for its dtype
            return getattr(super().__getattr__("inner"), name)


class RankExperts(ExpertShare):
    """Whole experts, some on each rank; all ranks have the same tokens.

    Args:
        bounds: rank r has the experts from `bounds[r]` to `bounds[r + 1]`.
    """

    def __init__(self, ranks: Ranks, bounds: Sequence[int]) -> None:
        self.bounds = list(bounds)
        self._ranks = ranks

    def run(self, experts: Any, rows: Tensor, counts: list[int]) -> Tensor:
        """Run `run_experts` on rows `[n, H]` sorted by expert, `counts[e]` of each expert e."""
        shares = [sum(counts[a:b]) for a, b in pairwise(self.bounds)]
        rank = self._ranks.rank
        first, end = self.bounds[rank], self.bounds[rank + 1]
        start = sum(shares[:rank])
        own = run_experts(experts, rows[start : start + shares[rank]], counts[first:end])
        return self._ranks.rows(own, shares)


def splits_exactly(like: Tensor, dimension: int, bounds: Sequence[int], device: Device) -> bool:
    """Return whether shares of the columns of a product are computed bit-identically on a device.

    Args:
        like: has the shape and dtype of the weight, `[N, K]`, or `[K, N]` where `dimension` is 1.
    """
    return _splits_exactly(tuple(like.shape), like.dtype, dimension, tuple(bounds), device.torch)


@functools.cache
def _splits_exactly(
    shape: tuple[int, int],
    dtype: torch.dtype,
    dimension: int,
    bounds: tuple[int, ...],
    device: torch.device,
) -> bool:
    noise = partial(
        torch.randn, generator=torch.Generator(device).manual_seed(0), dtype=dtype, device=device
    )
    weight, x = noise(shape), noise((_ASKED_ROWS, shape[1 - dimension]))

    def product(first: int, end: int) -> Tensor:
        part = weight.narrow(dimension, first, end - first).contiguous()
        return products.linear(x, part if dimension == 0 else part.t())

    whole = product(0, bounds[-1])
    return all(torch.equal(product(a, b), whole[:, a:b]) for a, b in pairwise(bounds))
