"""A model in memory with its weights in few bits: each is read, packed and dropped before the next."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.errors import NotSupported
from verbatim.model.dcp.folder import fingerprints as dcp_fingerprints
from verbatim.model.integers import interleave
from verbatim.model.loader import Checkpoint, LoadedModel, Skeleton, fingerprints
from verbatim.model.packed import hold_packed
from verbatim.model.packing import PackingReport, choose_packings, owners
from verbatim.model.quantization import Quantization
from verbatim.model.quantize import pack_and_measure
from verbatim.model.weight_packing import WeightPacking
from verbatim.placement.offload.checkpoint import open_skeleton, placeholder
from verbatim.placement.offload.recipe import Held, Recipe, cook, ingredients
from verbatim.placement.packed_cache import THREADS, PackedCache, read_stored
from verbatim.placement.resident import give_back_freed

_TIDIED = 1 << 20  # bytes of a weight; the C library would keep those that were dropped
Opener = Callable[
    [Skeleton | None], LoadedModel
]  # with a skeleton: leaves the weights where they are


def open_packed(open_: Opener, quantization: Quantization) -> LoadedModel:
    """A model with its weights in few bits.

    Of a folder with safetensors and of a DCP folder, one weight at a time is in memory as it was (two, as two
    threads work), and what is packed is kept for the next time; of any other, the model is loaded first.

    Raises:
        ModelError: it can't be opened, or holds NaN, an infinity or a number too large to be packed.
        NotSupported: nothing in it can be packed.
    """
    loaded, recipes, cache = _left_there(open_, quantization)
    assert not loaded.live
    module, folder = loaded.module, loaded.folder
    loaded.packed = fill(module, recipes, quantization, cache)
    checkpoint = loaded.checkpoint
    marks: Callable[[Path], dict[str, tuple[int, int]]]
    marks = fingerprints if loaded.config is None else dcp_fingerprints
    if checkpoint is not None:
        folder, marks = checkpoint.folder, checkpoint.fingerprints
    assert folder is not None
    loaded.recipes = loaded.folder = loaded.config = None
    loaded.checkpoint = Checkpoint(
        folder,
        module,
        read=lambda: open_packed(open_, quantization).module,
        fingerprints=marks,
    )
    return loaded


def _left_there(
    open_: Opener, quantization: Quantization
) -> tuple[LoadedModel, dict[nn.Parameter, Recipe], PackedCache | None]:
    """The model with its weights in their files, or in memory where they must be read as a whole."""
    try:
        loaded = open_(open_skeleton)
    except NotSupported:
        loaded = open_(None)
    if loaded.recipes is not None:
        return loaded, dict(loaded.recipes), PackedCache(loaded, quantization)
    held: dict[nn.Parameter, Recipe] = {p: Held(p.data) for p in loaded.module.parameters()}
    for parameter in held:
        parameter.data = placeholder(parameter)
    return loaded, held, None


def fill(
    module: nn.Module,
    recipes: dict[nn.Parameter, Recipe],
    quantization: Quantization,
    cache: PackedCache | None,
) -> PackingReport:
    """Put the weights into `module`, packed or as they are; `recipes` is empty then."""
    packings = choose_packings(module, quantization)
    names = {parameter: name for name, parameter in module.named_parameters()}
    report = PackingReport(
        quantization,
        {name: packings[p] for p, name in names.items() if p in packings},
        [name for p, name in names.items() if p not in packings and p.ndim > 1],
    )
    expected = {name: _kept_as(parameter, packings) for parameter, name in names.items()}
    found = None if cache is None else cache.read(expected)
    if found is None:
        tensors = _pack_all(recipes, packings, names, report)
        if cache is not None:
            cache.write(tensors, report.squares)
    else:
        tensors = found[0]
        report.squares = {name: (a, b) for name, (a, b) in found[1].items()}
    recipes.clear()
    for parameter, name in names.items():
        if parameter in packings and packings[parameter].multiplies_codes:
            with torch.inference_mode(False):
                tensors[name], laid = interleave(tensors[name], packings[parameter])
            packings[parameter] = report.packed[name] = laid
    give_back_freed()
    _put(module, {p: tensors[name] for p, name in names.items()}, packings)
    return report


def _kept_as(
    parameter: nn.Parameter, packings: dict[nn.Parameter, WeightPacking]
) -> tuple[torch.dtype, tuple[int, ...]]:
    if parameter in packings:
        return torch.uint8, (packings[parameter].nbytes,)
    return parameter.dtype, tuple(parameter.shape)


def _pack_all(
    recipes: dict[nn.Parameter, Recipe],
    packings: dict[nn.Parameter, WeightPacking],
    names: dict[nn.Parameter, str],
    report: PackingReport,
) -> dict[str, Tensor]:
    """Every weight as it will be kept, read in the order of the files."""

    def make(parameter: nn.Parameter) -> Tensor:
        with torch.inference_mode(False):
            # Let go of as soon as it is made: a weight in memory lives no longer than this.
            weight = cook(recipes.pop(parameter), read_stored)
            if parameter not in packings:
                return weight.contiguous()
            packing, name = packings[parameter], names[parameter]
            packed, report.squares[name] = pack_and_measure(weight, packing, name)
            nbytes = weight.nbytes
            del weight
            if nbytes > _TIDIED:
                give_back_freed()
            return packed

    def place(parameter: nn.Parameter) -> tuple[Any, ...]:
        parts = ingredients(recipes[parameter])
        return (str(parts[0].path), parts[0].offset) if parts else ("", 0)

    order = sorted(names, key=place)
    with ThreadPoolExecutor(THREADS) as pool:
        made = {names[p]: tensor for p, tensor in zip(order, pool.map(make, order), strict=True)}
    report.squares = {name: report.squares[name] for name in report.packed}
    return made


def _put(
    module: nn.Module,
    tensors: dict[nn.Parameter, Tensor],
    packings: dict[nn.Parameter, WeightPacking],
) -> None:
    """Give every layer its weights; those that are tied share one tensor."""
    replaced: dict[nn.Module, nn.Module] = {}
    for _, layer, name, parameter in list(owners(module)):
        if parameter in packings:
            here = replaced.get(layer, layer)
            made = hold_packed(here, name, tensors[parameter], packings[parameter])
            if made is not here:
                replaced[layer] = made
        else:
            parameter.data = tensors[parameter]
    for layer in list(module.modules()):
        for name, child in layer._modules.items():
            if child in replaced:
                layer._modules[name] = replaced[child]
    if next(module.parameters(), None) is None:
        # Models ask their parameters for their dtype, and one without gains in its norms has none left.
        dtype = next(iter(packings)).dtype
        nothing = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
        module.register_parameter("_dtype_holder", nothing)


def refuse_unpacked(model: Any, placement: Any, quantization: Quantization) -> None:
    """Refuse by name what is not held in few bits; `Offload` is, and has its own way.

    Raises:
        NotSupported: the message tells what serves.
    """
    asked = f"quantization={quantization.name!r}"
    if placement is not None:
        raise NotSupported(
            f"{asked}: not supported with placement={placement!r}; only without a placement or with "
            "placement=Offload(...)"
        )
    if isinstance(model, nn.Module):
        raise NotSupported(
            f"{asked}: not supported for a live module, which is used in place; save it with "
            "save_pretrained and open the folder"
        )
