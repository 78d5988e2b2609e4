"""This rank's share of attention: some heads with their K and V."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from verbatim.batch import AttentionBatch
from verbatim.errors import NotSupported
from verbatim.kernels.options import AnyOptions, IndexOptions
from verbatim.kv.quantized import KVDtype
from verbatim.kv.store import KVStore, LayerShape
from verbatim.model.shard import Ranks, bounds_of


@functools.cache
def split_heads(query_heads: int, kv_heads: int, size: int) -> tuple[list[int], list[slice]]:
    """Split heads over ranks: whole KV heads with their query heads, or, if there are too few, each KV
    head to several ranks, which share its query heads.

    Returns:
        Rank r has the query heads from entry r to entry r + 1, on the KV heads in its slice.

    Raises:
        NotSupported: that does not come out even.
    """
    group = query_heads // kv_heads
    bounds = bounds_of(kv_heads, size)
    if bounds is not None:
        slices = [slice(a, b) for a, b in pairwise(bounds)]
        return [bound * group for bound in bounds], slices
    sharing, left = divmod(size, kv_heads)
    parts = None if left else bounds_of(group, sharing)
    if parts is None:
        raise NotSupported(
            f"TensorParallel(size={size}): a layer has {query_heads} query heads on {kv_heads} KV heads; "
            f"size must be at most {kv_heads}, or a multiple of it up to {query_heads}"
        )
    query = [head * group + part for head in range(kv_heads) for part in parts[:-1]]
    slices = [slice(rank // sharing, rank // sharing + 1) for rank in range(size)]
    return [*query, query_heads], slices


def split_layer(query_heads: int, shape: LayerShape, size: int) -> tuple[list[int], list[slice]]:
    """Split the heads of a layer as `split_heads` does; every rank has all keys of an indexer."""
    if not shape.value_dim:
        return [0] * size + [query_heads], [slice(0, shape.kv_heads)] * size
    return split_heads(query_heads, shape.kv_heads, size)


class HeadStore(KVStore):
    """A `KVStore` that keeps and attends with this rank's heads, and gathers the others' results.

    Args:
        layers: of the whole model.
        query_heads: in each of them.

    Raises:
        NotSupported: its heads can't be shared by so many ranks.
    """

    in_place = False

    def __init__(
        self,
        layers: list[LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: KVDtype,
        device: torch.device,
        *,
        query_heads: Sequence[int],
        ranks: Ranks,
    ) -> None:
        self._heads = [
            split_layer(heads, shape, ranks.size)
            for heads, shape in zip(query_heads, layers, strict=True)
        ]
        self._ranks = ranks
        own = own_layers(layers, query_heads, ranks.rank, ranks.size)
        super().__init__(own, num_blocks, block_size, dtype, device)

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        own = self._heads[layer][1][self._ranks.rank]
        super().write(layer, k[:, own], v[:, own], slots)

    def attend(self, layer: int, q: Tensor, batch: AttentionBatch, options: AnyOptions) -> Tensor:
        if isinstance(options, IndexOptions):
            return super().attend(layer, q, batch, options)
        rank, bounds = self._ranks.rank, self._heads[layer][0]
        own, width = slice(bounds[rank], bounds[rank + 1]), self.shapes[layer].value_dim
        if options.sinks is not None or options.alibi is not None:
            options = replace(
                options,
                sinks=None if options.sinks is None else options.sinks[own].contiguous(),
                alibi=None if options.alibi is None else options.alibi[own].contiguous(),
            )
        chosen = options.chosen
        if chosen is not None and chosen.shape[1] > 1:  # one choice for each KV head
            options = replace(options, chosen=chosen[:, self._heads[layer][1][rank]])
        out = super().attend(layer, q[:, own], batch, options)
        columns = [bound * width for bound in bounds]
        return self._ranks.columns(out.flatten(1), columns).view(len(out), -1, width)


def own_layers(
    layers: Sequence[LayerShape], query_heads: Sequence[int], rank: int, size: int
) -> list[LayerShape]:
    """Return what `rank` keeps of each token.

    Raises:
        NotSupported: the heads can't be shared by so many ranks.
    """
    found = []
    for shape, heads in zip(layers, query_heads, strict=True):
        own = split_layer(heads, shape, size)[1][rank]
        found.append(replace(shape, kv_heads=own.stop - own.start))
    return found
