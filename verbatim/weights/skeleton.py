"""A model without its weights in memory: the module, and the location of each weight."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.errors import ModelError, NotSupported, VerbatimError, first_line
from verbatim.model.loader import auto_class, building, empty_module, quantization_of
from verbatim.model.packed import placeholder
from verbatim.model.patching import quiet
from verbatim.model.stored import read_stored
from verbatim.untrusted import check_dtypes, check_size, shards_of
from verbatim.weights.adapter import read_folder
from verbatim.weights.formats import decode, forget_quantization
from verbatim.weights.formats.gguf import read_gguf
from verbatim.weights.headers import stored_in
from verbatim.weights.lazy import Held, LazyWeight, Traced, materialize, traced
from verbatim.weights.lora import merge_adapter, merge_experts

USUAL = ("model.safetensors", "pytorch_model.bin")  # names of files of weights
INDEX = ".index.json"  # behind the name of a file that is in shards


def open_skeleton(
    folder: Path,
    config: Any,
    dtype: torch.dtype,
    trust_remote_code: bool,
    adapter_folder: Path | None = None,
    *,
    in_memory: bool = False,
) -> tuple[nn.Module, dict[nn.Parameter, LazyWeight], list[str]]:
    """Build the module that transformers would load from `folder`, without reading a weight.

    Args:
        folder: with weights; or a GGUF file.
        adapter_folder: a PEFT adapter, which is merged into the weights.
        in_memory: the model will be in this process's memory, so formats that are read whole are accepted.

    Returns:
        The module with parameters without memory; the lazy weight of each parameter, tied ones once; and
        the names of unused tensors.

    Raises:
        ModelError: a damaged or missing file, weights that are missing or of another shape.
        NotSupported: weights in another format than safetensors, unless `in_memory`.
    """
    adapter = None if adapter_folder is None else read_folder(adapter_folder)
    is_gguf = folder.suffix == ".gguf"
    quantization = None if is_gguf else quantization_of(config)
    if quantization is not None:
        config = copy.deepcopy(config)
        forget_quantization(config)
    empty = empty_module(folder, config, trust_remote_code)
    if is_gguf:
        nbytes = folder.stat().st_size
        try:
            tensors = read_gguf(folder, config, empty, dtype)
        except NotSupported:
            if not in_memory:
                raise
            check_size(folder, empty, nbytes)
            where: dict[str, Any] = {"gguf_file": folder.name, "local_files_only": True}
            where |= {"config": config, "dtype": dtype}
            return _filled(folder, auto_class(config), str(folder.parent), **where)
    else:
        table, nbytes = _tensors_of(folder, config, quantization is not None, in_memory)
        if quantization is not None:
            table = decode(folder, table, quantization, dtype)
        if adapter is not None:
            adapter, table = merge_experts(adapter, table, dtype)
        tensors = {name: traced(lazy) for name, lazy in table.items()}
    module, lazy_weights, unused = load_traced(
        folder,
        empty,
        dtype,
        tensors,
        nbytes,
        is_plain=quantization is None and not is_gguf,
        in_memory=in_memory,
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
    in_memory: bool = True,
    adjust: Callable[[Any], None] | None = None,
) -> tuple[Any, dict[nn.Parameter, LazyWeight], list[str]]:
    """Let transformers assign the traced tensors of a checkpoint to a module.

    Args:
        empty: the module of the config on the meta device.
        tensors: by the checkpoint's names. Plain ones are in memory.
        nbytes: size of the checkpoint.
        is_plain: the config says nothing of quantization.
        in_memory: accept parameters that transformers makes and does not read.
        adjust: changes the module, whose parameters are traced, after it got the tensors.

    Returns:
        As `open_skeleton`.
    """
    tensors = {n: t if isinstance(t, Traced) else traced(Held(t)) for n, t in tensors.items()}
    check_size(source, empty, nbytes)
    check_dtypes(source, empty, {name: str(tensor.dtype) for name, tensor in tensors.items()})
    return _filled(
        source,
        type(empty),
        None,
        # The language model's, if the folder's also has towers.
        config=empty.config,
        state_dict=tensors,
        dtype=dtype,
        is_plain=is_plain,
        in_memory=in_memory,
        adjust=adjust,
    )


def _filled(
    source: Path,
    kind: Any,
    *args: Any,
    is_plain: bool = False,
    in_memory: bool = True,
    adjust: Callable[[Any], None] | None = None,
    **options: Any,
) -> tuple[Any, dict[nn.Parameter, LazyWeight], list[str]]:
    """Return what `kind.from_pretrained` makes, as `open_skeleton`; the other arguments are its own."""
    try:
        with building, quiet(progress=False):
            module, report = kind.from_pretrained(*args, output_loading_info=True, **options)
    except VerbatimError:
        raise
    except Exception as error:  # damaged files and modules' own code raise any type
        raise ModelError(f"{source}: can't be loaded: {first_line(error)}") from error
    _refuse_missing(source, report, is_plain=is_plain)
    if adjust is not None:
        adjust(module)
    lazy_weights = _hollow_parameters(module, in_memory)
    _read_buffers(module)
    return module.eval(), lazy_weights, sorted(map(str, report["unexpected_keys"]))


def _refuse_missing(source: object, report: Mapping[str, Any], *, is_plain: bool) -> None:
    """Raise ModelError if weights are missing or of another shape.

    Args:
        report: transformers' report of loading.
        is_plain: the config says nothing of quantization.
    """
    for kind in ("missing_keys", "mismatched_keys"):
        names, unused = (sorted(map(str, report[of])) for of in (kind, "unexpected_keys"))
        if names:
            what, hint = kind.replace("_keys", ""), ""
            if unused and is_plain:
                hint = (
                    f"; the files have {unused[0]} and others that are not used: does config.json lack its "
                    "quantization_config?"
                )
            raise ModelError(f"{source}: {len(names)} weights are {what}, such as {names[0]}{hint}")


def _hollow_parameters(module: nn.Module, in_memory: bool) -> dict[nn.Parameter, LazyWeight]:
    """Replace traced parameters by placeholders; tied ones stay tied."""
    placed: dict[int, nn.Parameter] = {}
    lazy_weights: dict[nn.Parameter, LazyWeight] = {}
    for layer in module.modules():
        for name, parameter in layer._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in placed:
                found = parameter if isinstance(parameter, Traced) else parameter.data
                if not isinstance(found, Traced) and not in_memory:
                    raise NotSupported(
                        f"{type(layer).__name__}.{name} is a parameter that transformers does not read from "
                        "the checkpoint, so it can't be loaded later"
                    )
                placed[id(parameter)] = nn.Parameter(placeholder(found), requires_grad=False)
                lazy = found.lazy if isinstance(found, Traced) else Held(found)
                lazy_weights[placed[id(parameter)]] = lazy
            layer._parameters[name] = placed[id(parameter)]
    return lazy_weights


def _read_buffers(module: nn.Module) -> None:
    """Read the buffers of the checkpoint, which are small."""
    for layer in module.modules():
        for name, buffer in layer._buffers.items():
            if isinstance(buffer, Traced):
                layer._buffers[name] = materialize(buffer.lazy, read_stored)


def _tensors_of(
    folder: Path, config: Any, is_quantized: bool, in_memory: bool
) -> tuple[dict[str, Any], int]:
    """Return the lazy weight of every tensor of a folder, and the bytes of their files.

    The files are those that transformers would read. A pickled tensor may be larger than its file: its
    strides may be 0.

    Raises:
        ModelError: a file is damaged, cut short or missing.
        NotSupported: the weights are not in safetensors files.
    """
    named = weights_name(config)
    files, is_pickle = weight_files(folder, named)
    if not files or (is_pickle and (is_quantized or not in_memory)):
        reader = "a quantized checkpoint is read from" if is_quantized else "this placement reads"
        raise NotSupported(
            f"{reader} {named or 'model.safetensors or its shards'}, and {folder} has none; load the model "
            "with transformers and save it with save_pretrained"
        )
    found: dict[str, Any] = {}
    for path in files:
        found.update(_unpickled(path) if is_pickle else stored_in(path))
    return found, sum(path.stat().st_size for path in files)


def weights_name(config: Any) -> str | None:
    """Return the name of the file of weights that a config has instead of the usual ones."""
    return getattr(config, "transformers_weights", None)


def weight_files(folder: Path, named: str | None = None) -> tuple[list[Path], bool]:
    """Return the files with a folder's weights, and whether they are torch.save's instead of safetensors.

    Args:
        named: the file that the config names instead of the usual ones.

    Raises:
        ModelError: a shard is missing.
    """
    for name in USUAL if named is None else (named,):
        is_index = name.endswith(INDEX)
        if os.path.lexists(folder / name) and not is_index:
            return [folder / name], name.endswith(".bin")
        index = folder / (name if is_index else name + INDEX)
        if index.is_file():
            names = shards_of(index)
            missing = [shard for shard in names if not (folder / shard).is_file()]
            if missing:
                raise ModelError(
                    f"{folder} lacks {len(missing)} of {len(names)} shards: {missing[0]}"
                )
            return [folder / shard for shard in names], names[0].endswith(".bin")
    return [], False


def _unpickled(path: Path) -> dict[str, Held]:
    """Return the tensors of a file of torch.save, mapped into memory."""
    try:
        try:
            tensors = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except RuntimeError:  # from before torch 1.6
            tensors = torch.load(path, map_location="cpu", weights_only=True)
        found = {name: t for name, t in tensors.items() if isinstance(t, Tensor)}
    except Exception as error:  # a damaged file leads to arbitrary exceptions
        raise ModelError(f"{path}: can't be loaded: {first_line(error)}") from None
    for name, tensor in found.items():
        if tensor.layout is not torch.strided or tensor.is_quantized or not tensor.is_cpu:
            raise ModelError(f"{path}: {name} is sparse, quantized or without data")
    return {name: Held(tensor) for name, tensor in found.items()}
