"""A rank's share of the weights, and of attention: some heads with their K and V."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.batch import AttentionBatch
from verbatim.errors import NotSupported
from verbatim.kernels.functions import has_kernels
from verbatim.kernels.options import AnyOptions, IndexOptions
from verbatim.kv.store import KVStore, LayerShape
from verbatim.model.device import Device
from verbatim.model.experts import flat_experts, is_stacked
from verbatim.model.loader import Checkpoint, LoadedModel, ModelSource
from verbatim.model.patching import replacement_of
from verbatim.model.recurrent_ops import reads_weight
from verbatim.model.shard import COLUMNS, Columns, RankExperts, Ranks, bounds_of, splits_exactly
from verbatim.quantization.formats import KVDtype
from verbatim.weights.files import read_whole
from verbatim.weights.lazy import Cut
from verbatim.weights.load import Place, load_weights
from verbatim.weights.opening import reopen


def take_share(
    loaded: LoadedModel,
    source: ModelSource,
    ranks: Ranks,
    device: Device,
    *,
    head: nn.Module | None,
    linears: bool = True,
    share: type[Any] = RankExperts,
) -> dict[str, Any]:
    """Read this rank's share of a model's lazy weights into its module.

    Args:
        loaded: the model. Its `packed` (report on this rank's quantized weights), `original` (state dict of
            the whole model), `cuts` and `checkpoint` are set.
        source: the source from which the weights are read again after `sleep`.
        device: the device of the computation; the weights are read into CPU memory.
        head: the LM head; only rank 0 needs its logits. None: the model has no known head.
        linears: whether linear layers are split by columns; otherwise only experts are split.
        share: the `ExpertShare` of experts, called with (ranks, bounds).

    Returns:
        Properties of the whole model and its division, for `Runner.info`.

    Raises:
        TierFailed: a file can't be read.
    """
    module, lazy_weights = loaded.module, loaded.lazy_weights
    assert lazy_weights is not None
    info: dict[str, Any] = {
        "parameters": sum(p.numel() for p in lazy_weights),
        "weight_bytes": sum(p.nbytes for p in lazy_weights),
    }
    cuts: dict[Place, Cut] = {}  # the range that this rank holds
    columns: dict[str, list[int]] = {}  # the bounds of split linears, by name
    experts: list[str] = []
    whole: list[str] = []  # linears that can't be split, or are too narrow
    names = {id(layer): name for name, layer in module.named_modules()}
    trial = device.batch_invariant and not has_kernels(device.torch)
    for name, layer in module.named_modules():
        if is_stacked(layer):
            _share_experts(layer, ranks, share, cuts)
            experts.append(name)
            continue
        dimension = _output_dimension(layer)
        if dimension is None or not linears or not name:
            continue
        weight: Any = layer._parameters["weight"]
        parent, _, own_name = name.rpartition(".")
        bounds = bounds_of(weight.shape[dimension], ranks.size, COLUMNS)
        if (
            bounds is None
            or reads_weight(module.get_submodule(parent), own_name)
            or (trial and not splits_exactly(weight, dimension, bounds, device))
        ):
            whole.append(name)
            continue
        own = bounds[ranks.rank], bounds[ranks.rank + 1]
        cuts[id(layer), "weight"] = dimension, *own
        cuts[id(layer), "bias"] = 0, *own
        columns[name] = bounds
    loaded.original = module.state_dict(keep_vars=True)
    loaded.packed = load_weights(
        module, dict(lazy_weights), loaded.quantization, read=read_whole, cuts=cuts
    )
    for name, bounds in columns.items():
        inner: Any = module.get_submodule(name)
        for attribute in ("out_features", "nf"):  # used by its own forward
            if hasattr(inner, attribute):
                setattr(inner, attribute, bounds[ranks.rank + 1] - bounds[ranks.rank])
        to = 0 if name == names.get(id(head)) else None
        module.set_submodule(name, Columns(inner, ranks, bounds, to))

    resolved = source.resolved(loaded)

    def read() -> LoadedModel:
        reloaded = reopen(resolved)
        take_share(reloaded, source, ranks, device, head=None, linears=linears, share=share)
        return reloaded

    loaded.checkpoint = Checkpoint(loaded, read)
    loaded.cuts = {f"{names[owner]}.{name}": cut for (owner, name), cut in cuts.items()}
    division = {
        "split_linears": len(columns),
        "split_experts": len(experts),
        "whole_linears": whole,
    }
    return info | division


def _output_dimension(layer: nn.Module) -> int | None:
    """Return the output dimension of a linear layer's weight; None for any other layer."""
    from transformers.pytorch_utils import Conv1D

    if "forward" in layer.__dict__:
        return None
    if type(layer) is nn.Linear:
        return 0
    if type(layer) is Conv1D:
        return 1
    if type(layer).__name__ == "FalconLinear" and replacement_of(layer) is not None:
        return 0
    return None


def _share_experts(layer: Any, ranks: Ranks, share: type[Any], cuts: dict[Place, Cut]) -> None:
    number = int(layer.num_experts)
    bounds = bounds_of(number, ranks.size)
    if bounds is None:  # the last ranks have none
        bounds = [min(rank, number) for rank in range(ranks.size + 1)]
    for name, parameter in layer._parameters.items():
        if parameter is not None and parameter.shape[0] == number:
            cuts[id(layer), name] = 0, bounds[ranks.rank], bounds[ranks.rank + 1]
    layer.expert_share = share(ranks, bounds)
    # A trial compares with the layer's own forward, which would ignore `expert_share`.
    layer.forward = partial(flat_experts, layer)


@functools.cache
def split_heads(query_heads: int, kv_heads: int, size: int) -> tuple[list[int], list[slice]]:
    """Return the bounds of the query heads (rank r: from entry r to r + 1), and each rank's KV heads.

    KV heads are split with their query heads. If there are fewer KV heads than ranks, several ranks hold the
    same KV head and split its query heads. Raises NotSupported if the heads can't be divided evenly.
    """
    group = query_heads // kv_heads
    bounds = bounds_of(kv_heads, size)
    if bounds is not None:
        slices = [slice(a, b) for a, b in pairwise(bounds)]
        return [bound * group for bound in bounds], slices
    ranks_per_head, remainder = divmod(size, kv_heads)
    parts = None if remainder else bounds_of(group, ranks_per_head)
    if parts is None:
        raise NotSupported(
            f"TensorParallel(size={size}): a layer has {query_heads} query heads on {kv_heads} KV heads; "
            f"size must be at most {kv_heads}, or a multiple of it up to {query_heads}"
        )
    query = [head * group + part for head in range(kv_heads) for part in parts[:-1]]
    slices = [slice(rank // ranks_per_head, rank // ranks_per_head + 1) for rank in range(size)]
    return [*query, query_heads], slices


def split_layer(query_heads: int, shape: LayerShape, size: int) -> tuple[list[int], list[slice]]:
    """Split the heads of a layer by `split_heads`; an indexer's keys are replicated on every rank."""
    if not shape.value_dim:
        return [0] * size + [query_heads], [slice(0, shape.kv_heads)] * size
    return split_heads(query_heads, shape.kv_heads, size)


class HeadStore(KVStore):
    """A `KVStore` that stores and computes this rank's heads, and gathers the outputs of all ranks.

    Args:
        layers: shapes of the whole model's layers.
        query_heads: number of query heads of each layer.

    Raises:
        NotSupported: the heads can't be split over this number of ranks.
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
        shapes = own_layers(layers, query_heads, ranks.rank, ranks.size)
        super().__init__(shapes, num_blocks, block_size, dtype, device)

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        heads = self._heads[layer][1][self._ranks.rank]
        super().write(layer, k[:, heads], v[:, heads], slots)

    def attend(self, layer: int, q: Tensor, batch: AttentionBatch, options: AnyOptions) -> Tensor:
        if isinstance(options, IndexOptions):
            return super().attend(layer, q, batch, options)
        rank, bounds = self._ranks.rank, self._heads[layer][0]
        heads, width = slice(bounds[rank], bounds[rank + 1]), self.shapes[layer].value_dim
        options = options.of_heads(heads)
        chosen = options.chosen
        if chosen is not None and chosen.shape[1] > 1:  # chosen separately for each KV head
            options = replace(options, chosen=chosen[:, self._heads[layer][1][rank]])
        out = super().attend(layer, q[:, heads], batch, options)
        columns = [bound * width for bound in bounds]
        return self._ranks.columns(out.flatten(1), columns).view(len(out), -1, width)


def own_layers(
    layers: Sequence[LayerShape], query_heads: Sequence[int], rank: int, size: int
) -> list[LayerShape]:
    """Return the shapes of the layers in the KV store of `rank`; raises the errors of `split_heads`."""
    shapes = []
    for shape, heads in zip(layers, query_heads, strict=True):
        kv_heads = split_layer(heads, shape, size)[1][rank]
        shapes.append(replace(shape, kv_heads=kv_heads.stop - kv_heads.start))
    return shapes
