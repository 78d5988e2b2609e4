"""A model skeleton: the module without weights in memory, and the lazy weight of each parameter."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.common.untrusted import check_dtypes, check_size, shards_of
from verbatim.errors import ModelError, NotSupported, VerbatimError, first_line
from verbatim.model.loader import LoadedModel, ModelSource, building
from verbatim.model.patching import quiet
from verbatim.model.quantizable import owners
from verbatim.model.quantized import placeholder
from verbatim.model.stored import read_stored, stored_in
from verbatim.model.unused import refuse_unused
from verbatim.weights.adapter import AdapterFolder, merge_adapter
from verbatim.weights.lazy import InMemory, LazyWeight, Traced, lazy_of, materialize, traced

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
INDEX = ".index.json"  # suffix of a sharded file's index


def fill(
    path: Path,
    loaded: LoadedModel,
    tensors: Mapping[str, Tensor] | None,
    source: ModelSource,
    dtype: torch.dtype,
    *,
    in_memory: bool,
    is_plain: bool = False,
    adapter: AdapterFolder | None = None,
    adjust: Callable[[Any], list[str]] | None = None,
) -> LoadedModel:
    """Let transformers assign the tensors of a checkpoint to the module of a model; return the model.

    The parameters then are lazy weights without memory; tied parameters share one lazy weight.

    Args:
        path: the folder of the checkpoint, or a GGUF file.
        loaded: the model, with its module on the meta device, `files` and `wrapper`. If its generation config
            is None, the module's own is used.
        tensors: the tensors by name, traced or in memory; None: transformers decodes the GGUF file.
        dtype: the module's dtype.
        in_memory: accept parameters that transformers computes in memory instead of reading them.
        is_plain: whether the config has no quantization.
        adapter: PEFT adapter to merge into the weights.
        adjust: function that changes the module before its weights become lazy, and returns the names of
            unused tensors; None: those are unused that transformers does not expect.

    Raises:
        ModelError: a file is damaged, weights are missing, unused or of another shape, or the adapter does
            not fit.
        NotSupported: a parameter is not read from a file.
    """
    empty: Any = loaded.module
    check_size(path, empty, sum(file.stat().st_size for file in loaded.files))
    kwargs: dict[str, Any]
    if tensors is None:
        kwargs = dict(pretrained_model_name_or_path=str(path.parent), gguf_file=path.name)
        kwargs |= dict(local_files_only=True)
    else:
        lazy = {n: t if isinstance(t, Traced) else traced(InMemory(t)) for n, t in tensors.items()}
        check_dtypes(path, empty, lazy)
        kwargs = dict(pretrained_model_name_or_path=None, state_dict=lazy)
    # `empty.config` is that of the language model, without other towers.
    kwargs |= dict(config=empty.config, dtype=dtype, output_loading_info=True)
    kwargs |= dict(ignore_mismatched_sizes=True)  # refused below
    try:
        with building, quiet():
            module, report = type(empty).from_pretrained(**kwargs)
    except VerbatimError:
        raise
    except Exception as error:  # damaged files and a model's own code may raise any type
        raise ModelError(f"{path}: can't be loaded: {first_line(error)}") from error
    _refuse_missing(path, report, is_plain=is_plain)
    unused = sorted(map(str, report["unexpected_keys"])) if adjust is None else adjust(module)
    loaded.module, loaded.lazy_weights = module, _hollow_parameters(module, in_memory)
    _read_buffers(module)
    if adapter is not None:
        merge_adapter(adapter, module, loaded.lazy_weights)
        loaded.adapter = adapter.folder
    if source.unused_weights == "error":
        refuse_unused(loaded.name, module, loaded.wrapper, unused)
    loaded.generation_config = loaded.generation_config or module.generation_config
    module.generation_config = loaded.generation_config
    module.eval()
    return loaded


def _refuse_missing(source: object, report: Mapping[str, Any], *, is_plain: bool) -> None:
    """Raise ModelError if transformers' loading report has missing weights or weights of another shape."""
    missing, unused = (
        sorted(map(str, report[f"{kind}_keys"])) for kind in ("missing", "unexpected")
    )
    if missing:
        hint = ""
        if unused and is_plain:
            hint = (
                f"; the files have {unused[0]} and others that are not used: does config.json lack its "
                "quantization_config?"
            )
        raise ModelError(
            f"{source}: {len(missing)} weights are missing, such as {missing[0]}{hint}"
        )
    for name, shape, expected in sorted(report["mismatched_keys"]):
        raise ModelError(
            f"{source}: {name} is {list(shape)}; by the config, it is {list(expected)}"
        )


def _hollow_parameters(module: nn.Module, in_memory: bool) -> dict[nn.Parameter, LazyWeight]:
    """Replace parameters by placeholders; tied ones stay tied. Return their lazy weights."""
    placeholders: dict[int, nn.Parameter] = {}
    lazy_weights: dict[nn.Parameter, LazyWeight] = {}
    for _, layer, name, parameter in [*owners(module)]:
        if id(parameter) not in placeholders:
            data = parameter if isinstance(parameter, Traced) else parameter.data
            if not isinstance(data, Traced) and not in_memory:
                raise NotSupported(
                    f"{type(layer).__name__}.{name} is a parameter that transformers does not read "
                    "from the checkpoint, so it can't be loaded later"
                )
            hollow = nn.Parameter(placeholder(data), requires_grad=False)
            placeholders[id(parameter)], lazy_weights[hollow] = hollow, lazy_of(data)
        layer._parameters[name] = placeholders[id(parameter)]
    return lazy_weights


def _read_buffers(module: nn.Module) -> None:
    """Read the buffers that are in the checkpoint; they are small."""
    for layer in module.modules():
        for name, buffer in layer._buffers.items():
            if isinstance(buffer, Traced):
                layer._buffers[name] = materialize(buffer.lazy, read_stored)


def tensors_of(files: Iterable[Path]) -> dict[str, Any]:
    """Return the lazy weight of every tensor in safetensors or torch.save files, by name.

    Raises:
        ModelError: a file is damaged, cut short or missing.
    """
    lazy_weights: dict[str, Any] = {}
    for path in files:
        lazy_weights.update(_unpickled(path) if is_pickle(path) else stored_in(path))
    return lazy_weights


def is_pickle(path: Path) -> bool:
    """Return whether a weight file was written by torch.save, instead of safetensors."""
    return path.suffix == ".bin"


def weight_files(folder: Path, named: str | None = None) -> list[Path]:
    """Return the weight files of a folder that transformers would read.

    Args:
        named: the file that the config names in place of the usual ones.

    Raises:
        ModelError: a shard is missing.
    """
    for name in WEIGHT_FILES if named is None else (named,):
        is_index = name.endswith(INDEX)
        if os.path.lexists(folder / name) and not is_index:
            return [folder / name]
        index = folder / (name if is_index else name + INDEX)
        if index.is_file():
            names = shards_of(index)
            missing = [shard for shard in names if not (folder / shard).is_file()]
            if missing:
                raise ModelError(
                    f"{folder} lacks {len(missing)} of {len(names)} shards: {missing[0]}"
                )
            return [folder / shard for shard in names]
    return []


def _unpickled(path: Path) -> dict[str, InMemory]:
    """Return the tensors of a torch.save file, memory-mapped."""
    try:
        try:
            tensors = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except RuntimeError:  # the format before torch 1.6
            tensors = torch.load(path, map_location="cpu", weights_only=True)
        plain_tensors = {name: t for name, t in tensors.items() if isinstance(t, Tensor)}
        nested = [name for name, value in tensors.items() if isinstance(value, Mapping)]
    except Exception as error:  # a damaged file may raise any exception
        raise ModelError(f"{path}: can't be loaded: {first_line(error)}") from None
    if nested and not plain_tensors:
        raise ModelError(
            f"{path}: its weights are nested under {str(nested[0])[:80]!r}; save that dict with "
            "torch.save"
        )
    for name, tensor in plain_tensors.items():
        if tensor.layout is not torch.strided or tensor.is_quantized or not tensor.is_cpu:
            raise ModelError(f"{path}: {name} is sparse, quantized or without data")
    return {name: InMemory(tensor) for name, tensor in plain_tensors.items()}
