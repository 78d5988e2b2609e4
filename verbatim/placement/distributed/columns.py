"""Reading of a rank's share of a model's weights."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from torch import nn

from verbatim.device import Device
from verbatim.kernels.functions import has_kernels
from verbatim.model.experts import flat_experts, is_stacked
from verbatim.model.loader import Checkpoint, LoadedModel, ModelSource
from verbatim.model.patching import replacement_of
from verbatim.model.recurrent_layers import reads_weight
from verbatim.model.shard import COLUMNS, Columns, RankExperts, Ranks, bounds_of, splits_exactly
from verbatim.weights.files import read_whole
from verbatim.weights.lazy import Cut as Range
from verbatim.weights.load import Place, load_weights
from verbatim.weights.opening import reopen


class Cut(NamedTuple):
    """A rank's share of the weights of a model."""

    ranges: dict[str, Range]  # what the rank holds of a weight
    info: dict[str, Any]  # of the whole model, for `Runner.info`


def take_share(
    loaded: LoadedModel,
    source: ModelSource,
    ranks: Ranks,
    device: Device,
    *,
    head: nn.Module | None,
    linears: bool = True,
    share: type[Any] = RankExperts,
) -> Cut:
    """Read this rank's share of a model's lazy weights into its module.

    Args:
        loaded: gets the report of what this rank holds quantized, the state dict of the whole model as
            `original`, and a checkpoint.
        source: where the weights are read again after they slept.
        device: where products are computed; the weights stay in memory.
        head: its columns are wanted on rank 0 alone; None: of a model that names none.
        linears: cut linears by columns; else only experts are shared.
        share: makes of (ranks, bounds) what runs the experts.

    Raises:
        TierFailed: a file can't be read.
    """
    module, lazy_weights = loaded.module, loaded.lazy_weights
    assert lazy_weights is not None
    info: dict[str, Any] = {
        "parameters": sum(p.numel() for p in lazy_weights),
        "weight_bytes": sum(p.nbytes for p in lazy_weights),
    }
    cuts: dict[Place, Range] = {}  # what this rank keeps
    columns: dict[str, list[int]] = {}  # the bounds of linears
    experts: list[str] = []
    whole: list[str] = []  # linears that can't be cut, or are too narrow
    names = {id(layer): name for name, layer in module.named_modules()}
    tried = device.batch_invariant and not has_kernels(device.torch)
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
        if reads_weight(module.get_submodule(parent), own_name):
            bounds = None
        if bounds is not None and tried and not splits_exactly(weight, dimension, bounds, device):
            bounds = None
        if bounds is None:
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
        for attribute in ("out_features", "nf"):  # what its own forward goes by
            if hasattr(inner, attribute):
                setattr(inner, attribute, bounds[ranks.rank + 1] - bounds[ranks.rank])
        to = 0 if name == names.get(id(head)) else None
        module.set_submodule(name, Columns(inner, ranks, bounds, to))

    def read() -> nn.Module:
        again = reopen(source)
        take_share(again, source, ranks, device, head=None, linears=linears, share=share)
        return again.module

    loaded.checkpoint = Checkpoint(loaded, read)
    info |= {"split_linears": len(columns), "split_experts": len(experts), "whole_linears": whole}
    return Cut({f"{names[owner]}.{name}": kept for (owner, name), kept in cuts.items()}, info)


def _output_dimension(layer: nn.Module) -> int | None:
    """Return the dimension of a linear layer's output in its weight; None if it is no known linear layer."""
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


def _share_experts(layer: Any, ranks: Ranks, share: type[Any], cuts: dict[Place, Range]) -> None:
    number = int(layer.num_experts)
    bounds = bounds_of(number, ranks.size)
    if bounds is None:  # the last ranks have none
        bounds = [min(rank, number) for rank in range(ranks.size + 1)]
    for name, parameter in layer._parameters.items():
        if parameter is not None and parameter.shape[0] == number:
            cuts[id(layer), name] = 0, bounds[ranks.rank], bounds[ranks.rank + 1]
    layer.expert_share = share(ranks, bounds)
    # Its own forward, which a trial of the model compares with, knows of no shares.
    layer.forward = partial(flat_experts, layer)
