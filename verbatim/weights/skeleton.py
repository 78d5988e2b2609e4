"""A model without its weights in memory: the module, and the location of each weight."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.errors import ModelError, NotSupported, VerbatimError, first_line
from verbatim.model.loader import building, empty_module, refuse_missing
from verbatim.model.packed import placeholder
from verbatim.model.patching import quiet
from verbatim.untrusted import check_dtypes, check_size, shards_of
from verbatim.weights.adapter import read_folder
from verbatim.weights.files import read_whole
from verbatim.weights.formats import decode, forget_quantization, quantization_of
from verbatim.weights.formats.gguf import read_gguf
from verbatim.weights.headers import stored_in
from verbatim.weights.lazy import Held, LazyWeight, Stored, Traced, materialize, traced
from verbatim.weights.lora import merge_adapter, merge_experts


def open_skeleton(
    folder: Path,
    config: Any,
    dtype: torch.dtype,
    trust_remote_code: bool,
    adapter_folder: Path | None = None,
) -> tuple[nn.Module, dict[nn.Parameter, LazyWeight], list[str]]:
    """Build the module that transformers would load from `folder`, without reading a weight.

    Args:
        folder: with safetensors; or a GGUF file.
        adapter_folder: a PEFT adapter, which is merged into the weights.

    Returns:
        The module with parameters without memory; the lazy weight of each parameter, tied ones once; and
        the names of unused tensors.

    Raises:
        ModelError: a damaged or missing file, weights that are missing or of another shape.
        NotSupported: weights in another format than safetensors.
    """
    adapter = None if adapter_folder is None else read_folder(adapter_folder)
    quantization = None if folder.suffix == ".gguf" else quantization_of(config)
    if folder.suffix == ".gguf":
        tensors, nbytes = read_gguf(folder, config, dtype), folder.stat().st_size
    else:
        stored = tensors_of(folder, config)
        table: Mapping[str, LazyWeight] = stored
        nbytes = sum(tensor.nbytes for tensor in stored.values())
        if quantization is not None:
            config = copy.deepcopy(config)
            forget_quantization(config)
            table = decode(folder, stored, quantization, dtype)
        if adapter is not None:
            adapter, table = merge_experts(adapter, table, dtype)
        tensors = {name: traced(lazy) for name, lazy in table.items()}
    empty = empty_module(folder, config, trust_remote_code)
    is_plain = quantization is None and folder.is_dir()
    module, lazy_weights, unused = load_traced(
        folder, empty, dtype, tensors, nbytes, is_plain=is_plain
    )
    if adapter is not None:
        merge_adapter(adapter, module, lazy_weights)
    return module, lazy_weights, unused


def load_traced(
    source: Path,
    empty: Any,
    dtype: torch.dtype,
    tensors: Mapping[str, Tensor],
    nbytes: int,
    *,
    is_plain: bool = False,
    adjust: Callable[[Any], None] | None = None,
) -> tuple[Any, dict[nn.Parameter, LazyWeight], list[str]]:
    """Let transformers assign the traced tensors of a checkpoint to a module.

    Args:
        empty: the module of the config on the meta device.
        tensors: by the checkpoint's names. Plain ones are in memory.
        nbytes: size of the checkpoint.
        is_plain: the config says nothing of quantization.
        adjust: changes the module, whose parameters are traced, after it got the tensors.

    Returns:
        As `open_skeleton`.
    """
    tensors = {n: t if isinstance(t, Traced) else traced(Held(t)) for n, t in tensors.items()}
    check_size(source, empty, nbytes)
    check_dtypes(source, empty, {name: str(tensor.dtype) for name, tensor in tensors.items()})
    try:
        with building, quiet(progress=False):
            module, report = type(empty).from_pretrained(
                None,
                config=empty.config,  # the language model's, if the folder's also has towers
                state_dict=tensors,
                dtype=dtype,
                output_loading_info=True,
            )
    except VerbatimError:
        raise
    except Exception as error:  # damaged files and modules' own code raise any type
        raise ModelError(f"{source}: can't be loaded: {first_line(error)}") from error
    refuse_missing(source, report, is_plain=is_plain)
    if adjust is not None:
        adjust(module)
    lazy_weights = _hollow_parameters(module)
    _read_buffers(module)
    return module.eval(), lazy_weights, sorted(map(str, report["unexpected_keys"]))


def _hollow_parameters(module: nn.Module) -> dict[nn.Parameter, LazyWeight]:
    """Replace traced parameters by placeholders; tied ones stay tied."""
    placed: dict[int, nn.Parameter] = {}
    lazy_weights: dict[nn.Parameter, LazyWeight] = {}
    for layer in module.modules():
        for name, parameter in layer._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in placed:
                found = parameter if isinstance(parameter, Traced) else parameter.data
                if not isinstance(found, Traced):
                    raise NotSupported(
                        f"{type(layer).__name__}.{name} is a parameter that transformers does not read from "
                        "the checkpoint, so it can't be loaded later"
                    )
                placed[id(parameter)] = nn.Parameter(placeholder(found), requires_grad=False)
                lazy_weights[placed[id(parameter)]] = found.lazy
            layer._parameters[name] = placed[id(parameter)]
    return lazy_weights


def _read_buffers(module: nn.Module) -> None:
    """Read the buffers of the checkpoint, which are small."""
    for layer in module.modules():
        for name, buffer in layer._buffers.items():
            if isinstance(buffer, Traced):
                layer._buffers[name] = materialize(buffer.lazy, read_whole)


def tensors_of(folder: Path, config: Any = None) -> dict[str, Stored]:
    """Return the location of every tensor of a folder, in the files that transformers would read.

    Raises:
        ModelError: a file is damaged, cut short or missing.
        NotSupported: the weights are not in safetensors files.
    """
    named = getattr(config, "transformers_weights", None)
    if named is not None:
        raise NotSupported(
            f"{folder}: config.json names its weights ({named}); model.safetensors or its shards are read"
        )
    one, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if one.is_file():
        files = [one]
    elif index.is_file():
        files = [folder / name for name in shards_of(index)]
    else:
        is_quantized = config is not None and quantization_of(config) is not None
        reader = "a quantized checkpoint is read from" if is_quantized else "this placement reads"
        raise NotSupported(
            f"{reader} model.safetensors or its shards, and {folder} has none; load the model "
            "with transformers and save it with save_pretrained"
        )
    found: dict[str, Stored] = {}
    for path in files:
        found.update(stored_in(path))
    return found
