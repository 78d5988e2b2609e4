"""Tensor parallelism without all-reduce: each rank has some columns of linear layers, and some experts.

Each rank computes its output columns from the whole input, with the same arithmetic as without a split, and
the columns are gathered. So every rank has all activations, bit-identical to those of a single process. (The
usual split of every second layer along its input halves communication, but its sums change bits.)
Attention is split by heads, in the KV cache (`placement/distributed/columns.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from verbatim.model import products
from verbatim.model.device import Device
from verbatim.model.experts import ExpertShare, run_experts

# With the CPU kernels, columns are bit-identical in any slice of 2 or more. Triton specializes products with
# a multiple of 16 columns, and torch uses other algorithms for few columns. Slices of multiples of 16 were
# bit-identical in all tests (`splits_exactly` checks).
COLUMNS = 16
_CHECKED_ROWS = 16  # number of rows in the check


class Ranks(Protocol):
    """The ranks that a model is split over."""

    rank: int
    size: int

    def columns(
        self, local: Tensor, bounds: Sequence[int], destination: int | None = None
    ) -> Tensor:
        """Gather columns: `[..., local]` of each rank to `[..., bounds[-1]]`.

        Args:
            bounds: rank r has the columns from `bounds[r]` to `bounds[r + 1]`.
            destination: the only rank that needs the result; others return zeros without memory. None: all.
        """
        ...

    def rows(self, local: Tensor, counts: Sequence[int]) -> Tensor:
        """Gather rows: `[counts[rank], W]` of each rank to `[sum(counts), W]`."""
        ...


def bounds_of(count: int, size: int, unit: int = 1) -> list[int] | None:
    """Return the bounds of `size` nearly equal shares of `count` items, in multiples of `unit` but the last.

    Returns None if there are fewer units than shares.
    """
    units = count // unit
    if units < size:
        return None
    return [units * rank // size * unit for rank in range(size)] + [count]


class Columns(nn.Module):
    """A linear layer that computes this rank's columns, and gathers the others.

    Args:
        inner: linear layer with this rank's columns.
        bounds, destination: as for `Ranks.columns`.
    """

    def __init__(
        self, inner: nn.Module, ranks: Ranks, bounds: Sequence[int], destination: int | None = None
    ) -> None:
        super().__init__()
        self.inner = inner
        self.bounds = list(bounds)
        self._ranks, self._destination = ranks, destination

    def forward(self, x: Tensor) -> Tensor:
        return self._ranks.columns(self.inner(x), self.bounds, self._destination)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # some models read a linear layer's weight, for its dtype
            return getattr(super().__getattr__("inner"), name)


class RankExperts(ExpertShare):
    """Whole experts split over ranks with the same tokens: rank r has `bounds[r]` to `bounds[r + 1]`."""

    def __init__(self, ranks: Ranks, bounds: Sequence[int]) -> None:
        self.bounds = list(bounds)
        self._ranks = ranks

    def run(self, experts: Any, rows: Tensor, counts: list[int]) -> Tensor:
        """Run `run_experts` on rows `[n, H]` sorted by expert, with `counts[e]` rows for expert e."""
        shares = [sum(counts[a:b]) for a, b in pairwise(self.bounds)]
        rank = self._ranks.rank
        first, stop = self.bounds[rank], self.bounds[rank + 1]
        start = sum(shares[:rank])
        output = run_experts(experts, rows[start : start + shares[rank]], counts[first:stop])
        return self._ranks.rows(output, shares)


def splits_exactly(like: Tensor, dimension: int, bounds: Sequence[int], device: Device) -> bool:
    """Return whether a product split by columns is bit-identical to the whole product on a device.

    Args:
        like: a tensor with the weight's shape and dtype: `[N, K]`, or `[K, N]` if `dimension` is 1.
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
    weight, x = noise(shape), noise((_CHECKED_ROWS, shape[1 - dimension]))

    def product(first: int, end: int) -> Tensor:
        part = weight.narrow(dimension, first, end - first).contiguous()
        return products.linear(x, part if dimension == 0 else part.t())

    whole = product(0, bounds[-1])
    return all(torch.equal(product(a, b), whole[:, a:b]) for a, b in pairwise(bounds))
