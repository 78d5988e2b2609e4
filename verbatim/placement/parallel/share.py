"""This rank's share of a model's weights, read from its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from verbatim import kernels
from verbatim.model.adapters import adapter_for
from verbatim.model.anatomy import inner_model
from verbatim.model.borrow import threads
from verbatim.model.decoder import Decoder
from verbatim.model.experts import flat_experts, is_stacked
from verbatim.model.hidden import head_of
from verbatim.model.invariant import forward_for
from verbatim.model.loader import LoadedModel
from verbatim.model.shard import COLUMNS, Columns, RankExperts, Ranks, bounds_of, same_bits
from verbatim.placement.offload.files import read_whole
from verbatim.placement.offload.recipe import Recipe, cook
from verbatim.placement.parallel.heads import own_layers
from verbatim.placement.parallel.ranks import Gloo


@dataclass(slots=True)
class Cut:
    """What was cut, and what every rank holds for itself."""

    columns: list[str] = field(default_factory=list)  # names of the linears
    experts: list[str] = field(default_factory=list)
    whole: list[str] = field(default_factory=list)  # linears too narrow to be cut
    total_parameters: int = 0  # of the model
    total_bytes: int = 0


Where = tuple[int, slice]  # a dimension, and a range of it


def take_share(
    module: nn.Module,
    recipes: Mapping[nn.Parameter, Recipe],
    ranks: Ranks,
    *,
    head: nn.Module | None,
    linears: bool = True,
    share: type[Any] = RankExperts,
) -> Cut:
    """Read this rank's share of a model whose parameters have no memory yet; one tensor is whole at a time.

    Args:
        recipes: of all parameters.
        head: its columns are wanted on rank 0 alone; None: of a model that names none.
        linears: cut linears by columns; else only experts are shared.
        share: makes of (ranks, bounds) what runs the experts.

    Raises:
        TierFailed: a file can't be read.
    """
    cut = Cut()
    where: dict[tuple[int, str], Where] = {}  # (layer, its parameter) to what this rank keeps
    columns: list[tuple[nn.Module, nn.Module, str, list[int]]] = []
    made: dict[nn.Parameter, Tensor] = {}  # was read to ask something of it
    for name, layer in module.named_modules():
        if is_stacked(layer):
            _share_experts(layer, ranks, share, where)
            cut.experts.append(name)
            continue
        dimension = _output_dimension(layer)
        if dimension is None or not linears or not name:
            continue
        weight: Any = layer._parameters["weight"]
        bounds = bounds_of(weight.shape[dimension], ranks.size, COLUMNS)
        if bounds is not None and kernels.library() is None:
            made[weight] = cook(recipes[weight], read_whole)
            flat = made[weight] if dimension == 0 else made[weight].t()
            bounds = bounds if same_bits(flat, bounds) else None
        if bounds is None:
            cut.whole.append(name)
            continue
        own = slice(bounds[ranks.rank], bounds[ranks.rank + 1])
        where[id(layer), "weight"] = dimension, own
        where[id(layer), "bias"] = 0, own
        above = module.get_submodule(name.rpartition(".")[0])
        columns.append((above, layer, name.rpartition(".")[2], bounds))
        cut.columns.append(name)
    _read(module, recipes, where, cut, made)
    for above, layer, name, bounds in columns:
        for attribute in ("out_features", "nf"):  # what its own forward goes by
            if hasattr(layer, attribute):
                setattr(layer, attribute, bounds[ranks.rank + 1] - bounds[ranks.rank])
        setattr(above, name, Columns(layer, ranks, bounds, 0 if layer is head else None))
    return cut


def _output_dimension(layer: nn.Module) -> int | None:
    """Along which dimension of its weight its columns lie; None: it is no linear that we know."""
    from transformers.pytorch_utils import Conv1D

    if "forward" in layer.__dict__:
        return None
    if type(layer) is nn.Linear and forward_for(layer) is not None:
        return 0
    if type(layer) is Conv1D:
        return 1
    if type(layer).__name__ == "FalconLinear" and adapter_for(layer) is not None:
        return 0
    return None


def _share_experts(
    layer: Any, ranks: Ranks, share: type[Any], where: dict[tuple[int, str], Where]
) -> None:
    number = int(layer.num_experts)
    bounds = bounds_of(number, ranks.size)
    if bounds is None:  # the last ranks have none
        bounds = [min(rank, number) for rank in range(ranks.size + 1)]
    for name, parameter in layer._parameters.items():
        if parameter is not None and parameter.shape[0] == number:
            where[id(layer), name] = 0, slice(bounds[ranks.rank], bounds[ranks.rank + 1])
    layer.expert_share = share(ranks, bounds)
    # Its own forward, which a trial of the model compares with, knows of no shares.
    layer.forward = partial(flat_experts, layer)


def _read(
    module: nn.Module,
    recipes: Mapping[nn.Parameter, Recipe],
    where: Mapping[tuple[int, str], Where],
    cut: Cut,
    made: dict[nn.Parameter, Tensor],
) -> None:
    """Give every parameter its numbers, or those of this rank's share of it."""
    uses: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for layer in module.modules():
        for name, parameter in layer._parameters.items():
            if parameter is not None:
                uses.setdefault(parameter, []).append((layer, name))
    with torch.inference_mode(False), torch.no_grad():
        for parameter, places in uses.items():
            cut.total_parameters += parameter.numel()
            cut.total_bytes += parameter.nbytes
            whole = made.pop(parameter, None)
            whole = cook(recipes[parameter], read_whole) if whole is None else whole
            kept = any((id(layer), name) not in where for layer, name in places)
            if kept:
                parameter.data = whole
            for layer, name in places:
                found = where.get((id(layer), name))
                if found is not None:
                    dimension, own = found
                    part = whole[own] if dimension == 0 else whole[:, own]
                    if not kept or kernels.library() is None:  # else a view of an embedding's rows
                        part = part.clone(memory_format=torch.contiguous_format)
                    layer._parameters[name] = nn.Parameter(part, requires_grad=False)


@dataclass(slots=True)
class Shared:
    """A rank's share, ready to run but for K and V."""

    ranks: Gloo
    decoder: Decoder
    cut: Cut

    @property
    def weight_bytes(self) -> int:
        """What it holds itself; what is seen through two names counts once."""
        found = {p.untyped_storage().data_ptr(): p for p in self.decoder.module.parameters()}
        return sum(p.untyped_storage().nbytes() for p in found.values())


def open_share(loaded: LoadedModel, ranks: Gloo, num_threads: int) -> Shared:
    """Read a rank's share and look at the model; all ranks do so at once.

    Raises:
        UnsupportedModel: it can't be run on flat batches, on any rank.
        NotSupported: its layers for attention have heads that can't be shared by so many.
        TierFailed: a file can't be read, or another rank is gone.
    """
    assert loaded.recipes is not None
    head = head_of(inner_model(loaded.module))
    cut = take_share(loaded.module, loaded.recipes, ranks, head=head)
    with threads(num_threads), ranks.everywhere():
        decoder = Decoder(loaded.module, fused=False)  # its products are shared
    anatomy = decoder.anatomy
    own_layers(anatomy.layers, anatomy.query_heads, ranks.rank, ranks.size)
    return Shared(ranks, decoder, cut)
