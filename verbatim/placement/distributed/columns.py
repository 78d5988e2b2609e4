"""Reading of a rank's share of a model's weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from verbatim import kernels
from verbatim.errors import NotSupported
from verbatim.model.decoder import Decoder
from verbatim.model.draft_layers import DraftLayers
from verbatim.model.early_exit import EarlyExit, open_draft_layers
from verbatim.model.experts import flat_experts, is_stacked
from verbatim.model.hidden import head_of
from verbatim.model.loader import Checkpoint, LoadedModel, ModelSource
from verbatim.model.mtp_source import Mtp
from verbatim.model.packing import PackingReport
from verbatim.model.patching import replacement_of, threads
from verbatim.model.recurrent_layers import reads_weight
from verbatim.model.shard import COLUMNS, Columns, RankExperts, Ranks, bounds_of, splits_exactly
from verbatim.model.spec import inner_model
from verbatim.numerics import numerics_key
from verbatim.options import dtype_name
from verbatim.placement.distributed.gloo import Gloo
from verbatim.placement.distributed.heads import own_layers
from verbatim.placement.distributed.wire import dtype_named
from verbatim.placement.options import EngineOptions
from verbatim.weights.files import read_whole
from verbatim.weights.lazy import Cut as Range
from verbatim.weights.lazy import materialize
from verbatim.weights.load import Place, load_weights
from verbatim.weights.opening import reopen


@dataclass(slots=True)
class Cut:
    """The split of a model over ranks."""

    columns: list[str] = field(default_factory=list)  # names of the linears
    experts: list[str] = field(default_factory=list)
    whole: list[str] = field(default_factory=list)  # linears that can't be cut, or are too narrow
    total_parameters: int = 0  # of the model
    total_bytes: int = 0
    checkpoint: Checkpoint | None = None
    report: PackingReport | None = None  # of what this rank holds
    original: dict[str, Tensor] = field(default_factory=dict)  # the state dict of the whole model
    ranges: dict[str, Range] = field(default_factory=dict)  # what this rank holds of a weight


def key_of(loaded: LoadedModel, options: EngineOptions) -> str:
    """Return the numerics key of a model that is about to be opened, which all ranks must have in common."""
    kv_dtype, kind = options.kv_dtype, loaded.quantization
    return numerics_key(
        dtype_name(inner_model(loaded.module).config.dtype),
        "auto" if kv_dtype is None else dtype_named(kv_dtype),
        None if kind is None else kind.name,
    )


def check_keys(keys: Sequence[str]) -> None:
    """Check that all ranks have the same numerics key.

    Raises:
        NotSupported: they don't, so their results would not be bit-identical.
    """
    for rank, key in enumerate(keys):
        if key != keys[0]:
            raise NotSupported(
                f"rank {rank} has the numerics key {key!r} and rank 0 {keys[0]!r}: together they would not "
                "give the bits of either; all ranks need the same processor features, kernels and dtypes"
            )


def take_share(
    loaded: LoadedModel,
    source: ModelSource,
    ranks: Ranks,
    *,
    head: nn.Module | None,
    linears: bool = True,
    share: type[Any] = RankExperts,
) -> Cut:
    """Read this rank's share of a model's lazy weights.

    Args:
        source: where the weights are read again after they slept.
        head: its columns are wanted on rank 0 alone; None: of a model that names none.
        linears: cut linears by columns; else only experts are shared.
        share: makes of (ranks, bounds) what runs the experts.

    Raises:
        TierFailed: a file can't be read.
    """
    module, lazy_weights = loaded.module, loaded.lazy_weights
    assert lazy_weights is not None
    cut = Cut()
    cut.total_parameters = sum(p.numel() for p in lazy_weights)
    cut.total_bytes = sum(p.nbytes for p in lazy_weights)
    cuts: dict[Place, Range] = {}  # what this rank keeps
    columns: list[tuple[nn.Module, str, list[int], bool]] = []
    for name, layer in module.named_modules():
        if is_stacked(layer):
            _share_experts(layer, ranks, share, cuts)
            cut.experts.append(name)
            continue
        dimension = _output_dimension(layer)
        if dimension is None or not linears or not name:
            continue
        weight: Any = layer._parameters["weight"]
        parent, _, own_name = name.rpartition(".")
        bounds = bounds_of(weight.shape[dimension], ranks.size, COLUMNS)
        if reads_weight(module.get_submodule(parent), own_name):
            bounds = None
        if bounds is not None and kernels.library() is None:
            whole = materialize(lazy_weights[weight], read_whole)
            bounds = (
                bounds if splits_exactly(whole if dimension == 0 else whole.t(), bounds) else None
            )
        if bounds is None:
            cut.whole.append(name)
            continue
        own = bounds[ranks.rank], bounds[ranks.rank + 1]
        cuts[id(layer), "weight"] = dimension, *own
        cuts[id(layer), "bias"] = 0, *own
        above = module.get_submodule(name.rpartition(".")[0])
        columns.append((above, name.rpartition(".")[2], bounds, layer is head))
        cut.columns.append(name)
    cut.original = module.state_dict(keep_vars=True)
    paths = {id(layer): path for path, layer in module.named_modules()}
    cut.ranges = {f"{paths[owner]}.{name}": kept for (owner, name), kept in cuts.items()}
    cut.report = load_weights(
        module, dict(lazy_weights), loaded.quantization, read=read_whole, cuts=cuts
    )
    for above, name, bounds, is_head in columns:
        inner: Any = above._modules[name]  # quantized, it is another module
        for attribute in ("out_features", "nf"):  # what its own forward goes by
            if hasattr(inner, attribute):
                setattr(inner, attribute, bounds[ranks.rank + 1] - bounds[ranks.rank])
        setattr(above, name, Columns(inner, ranks, bounds, 0 if is_head else None))

    def read() -> nn.Module:
        again = reopen(source)
        take_share(again, source, ranks, head=None, linears=linears, share=share)
        return again.module

    cut.checkpoint = Checkpoint(loaded, read)
    return cut


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


def open_share(
    loaded: LoadedModel,
    source: ModelSource,
    ranks: Gloo,
    num_threads: int,
    draft: Mtp | EarlyExit | None,
) -> tuple[Cut, Decoder, DraftLayers]:
    """Read a rank's share, inspect the model, and open its draft layers; all ranks do so at once.

    Raises:
        UnsupportedModel: it can't be run on flat batches, on any rank.
        NotSupported: its layers for attention have heads that can't be shared by so many.
        TierFailed: a file can't be read, or another rank is gone.
    """
    cut = take_share(loaded, source, ranks, head=head_of(inner_model(loaded.module)))
    with threads(num_threads), ranks.everywhere():
        decoder = Decoder(loaded.module, fused=False)  # its products are shared
        spec = decoder.spec
        own_layers(spec.layers, spec.query_heads, ranks.rank, ranks.size)
        layers = open_draft_layers(draft, decoder, loaded)
    return cut, decoder, layers
