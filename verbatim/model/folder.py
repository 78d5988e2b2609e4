"""Checks of a checkpoint's folder, which may come from anybody, before anything is built from it."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import nn

from verbatim.errors import ModelError, UnsupportedModel, first_line

WEIGHTS = (".safetensors", ".bin")
MAX_LAYERS = 10_000
MAX_EXPERTS = 100_000
_PARAMETERS_PER_BYTE = 8  # of the densest quantization, one bit each
_COUNTS = {
    "num_hidden_layers": MAX_LAYERS,
    "num_layers": MAX_LAYERS,
    "n_layers": MAX_LAYERS,
    "n_layer": MAX_LAYERS,
    "num_experts": MAX_EXPERTS,
    "n_routed_experts": MAX_EXPERTS,
    "num_local_experts": MAX_EXPERTS,
    "moe_num_experts": MAX_EXPERTS,
}
_INTEGERS = frozenset("I64 I32 I16 I8 U64 U32 U16 U8 BOOL".split())


def check_folder(folder: Path) -> None:
    """Find damage before minutes of loading.

    Raises:
        ModelError: no config or weights, a file that can't be read, shards that are missing, cut short or
            outside of the folder.
    """
    config = folder / "config.json"
    if not config.is_file():
        raise ModelError(f"{folder} holds no config.json, so it is not a model folder")
    try:
        if not isinstance(json.loads(config.read_text(encoding="utf-8")), dict):
            raise ValueError("it holds no object")
    except (ValueError, OSError, RecursionError) as error:
        raise ModelError(f"{config} can't be read: {error}") from None
    indices = sorted(folder.glob("*.index.json"))
    for index in indices:
        names = shard_names(index)
        missing = [name for name in names if not (folder / name).is_file()]
        if missing and index.name == "model.safetensors.index.json":
            raise ModelError(f"{folder} lacks {len(missing)} of {len(names)} shards: {missing[0]}")
    shards = sorted(folder.glob("*.safetensors"))
    if not indices and not shards and not any(folder.glob("pytorch_model*.bin*")):
        raise ModelError(f"{folder} holds no weights (model.safetensors or pytorch_model.bin)")
    for shard in shards:
        _check_shard(shard)


def shard_names(index: Path) -> list[str]:
    """Return the names of the files that an index lists.

    Raises:
        ModelError: the index can't be read, or names a file outside of its folder.
    """
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        if not names or not all(isinstance(name, str) for name in names):
            raise ValueError("its weight_map names no files")
    except (ValueError, KeyError, AttributeError, TypeError, OSError, RecursionError) as error:
        raise ModelError(f"{index} can't be read: {error}") from None
    for name in names:
        if not is_file_name(name):
            raise ModelError(f"{index} names {name!r:.200}: must be a file in the same folder")
    return sorted(names)


def is_file_name(name: str) -> bool:
    """Return whether a name from a checkpoint's file stays in its folder."""
    return name == PurePosixPath(name).name and "\\" not in name and name not in ("", ".", "..")


def _check_shard(path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            file.keys()
    except (SafetensorError, OSError) as error:
        size = f"{path.stat().st_size} bytes" if path.exists() else "a link to nothing"
        raise ModelError(f"{path} ({size}) is damaged or cut short: {error}") from None


def check_config(source: str, plain: Mapping[str, Any], trust_remote_code: bool) -> None:
    """Refuse a config that would load code, or build more than a model has.

    Args:
        plain: config.json as a dictionary; those in it are checked, too.

    Raises:
        ModelError: a number of layers or experts beyond `MAX_LAYERS` or `MAX_EXPERTS`.
        UnsupportedModel: attention or experts from a package or a hub repository.
    """
    for key, value in _entries(plain):
        limit = _COUNTS.get(key)
        if limit is not None and isinstance(value, int | float) and not 0 <= value <= limit:
            raise ModelError(f"{source}: config.json has {key}={value:.10g}; must be 0 to {limit}")
        if (
            key.endswith(("attn_implementation", "experts_implementation"))
            and not trust_remote_code
        ):
            names = value.values() if isinstance(value, dict) else [value]
            for name in names:
                if name is not None and not str(name).replace("_", "").isalnum():
                    raise UnsupportedModel(
                        f"{source}: config.json has {key}={name!r:.100}, which loads code; remove it, "
                        "or pass trust_remote_code=True"
                    )


def _entries(plain: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in plain.items():
        yield str(key), value
        if isinstance(value, Mapping):
            yield from _entries(value)


def check_size(folder: Path, config: Any, trust_remote_code: bool) -> None:
    """Refuse a config with far more parameters than the files of a folder can hold.

    Transformers would allocate and initialise those that are missing. What is no folder, such as a hub id,
    is not checked.

    Raises:
        ModelError: more than 8 parameters for each byte of weights, or the model can't be built.
    """
    from transformers import AutoModelForCausalLM

    if not folder.is_dir():
        return
    suffixes = (*WEIGHTS, ".gguf")
    num_bytes = sum(path.stat().st_size for path in folder.iterdir() if path.suffix in suffixes)
    try:
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(
                copy.deepcopy(config), trust_remote_code=trust_remote_code
            )
    except Exception as error:  # a config's own class raises whatever it likes
        raise ModelError(f"{folder}: can't be loaded: {first_line(error)}") from error
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    if num_parameters > _PARAMETERS_PER_BYTE * num_bytes:
        raise ModelError(
            f"{folder}: config.json describes a model of {num_parameters:,} parameters, and the files of "
            f"weights have {num_bytes:,} bytes"
        )


def check_floating(folder: Path, module: nn.Module, config: Any) -> None:
    """Refuse integers in place of weights, which transformers would convert.

    Raises:
        ModelError: a weight that is stored as integers, and is not quantized.
    """
    from safetensors import safe_open

    if getattr(config, "quantization_config", None) is not None:
        return
    names = {name for name, _ in module.named_parameters()}
    prefix = getattr(module, "base_model_prefix", "")
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                if name in names or f"{prefix}.{name}" in names:
                    dtype = file.get_slice(name).get_dtype()
                    if dtype in _INTEGERS:
                        raise ModelError(
                            f"{path}: {name} is stored as {dtype}, and config.json has no "
                            "quantization_config; weights must be floating-point"
                        )
