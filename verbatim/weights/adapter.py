"""Reading of PEFT adapter folders: the config, and the matrices of each layer.

The reference is the forward of `PeftModel.from_pretrained(base, folder)`. Config fields that may mean
anything but "add `scaling * B A` to these weights" are rejected.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from verbatim.batch import LowRank
from verbatim.errors import InvalidRequest, ModelError, NotSupported
from verbatim.model.stored import Stored, read_stored, stored_in
from verbatim.untrusted import read_json, refuse_lfs_pointer

MOST_RANK = 256
_DTYPES = {torch.float32, torch.bfloat16, torch.float16}
_PREFIX = "base_model.model."
_SUFFIXES = {
    ".lora_A.weight": "a",
    ".lora_B.weight": "b",
    ".lora_embedding_A": "a",
    ".lora_embedding_B": "b",
    ".lora_magnitude_vector": "magnitude",
}
# Fields that are read here, that describe the training only, or that follow from the tensors' names.
_FIELDS = frozenset(
    "alpha_pattern auto_mapping base_model_name_or_path bias corda_config eva_config exclude_modules "
    "fan_in_fan_out inference_mode init_lora_weights layers_pattern layers_to_transform loftq_config "
    "lora_alpha lora_dropout lora_ga_config megatron_core modules_to_save peft_type peft_version "
    "qalora_group_size r rank_pattern revision target_modules task_type unsloth_fixed use_dora "
    "use_rslora".split()
)
# Initializations that leave the base model's weights as they are; others subtract the first B A.
_INITS = {"true", "false", "none", "gaussian", "eva", "orthogonal", "mica"}
# A name of a layer, or its end: other patterns of a file can take exponential time.
_PATTERN = re.compile(r"\^?[\w.-]+")
_MOST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class Pair:
    """The matrices of one layer, which add `scaling * B A` `[N, K]` to its weight.

    Attributes:
        a: `[rank, K]`.
        b: `[N, rank]`.
        magnitude: `[N]`, DoRA only: the norm of each row of the sum after scaling.
    """

    a: Stored
    b: Stored
    scaling: float
    magnitude: Stored | None = None


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """The tensors of an adapter.

    Attributes:
        pairs: LoRA matrices, by layer name.
        whole: tensors that replace a parameter, by parameter name.
    """

    folder: Path
    config: Mapping[str, Any]
    pairs: dict[str, Pair]
    whole: dict[str, Stored]


def read_folder(folder: Path) -> AdapterFolder:
    """Read the config of an adapter, and the locations of its tensors.

    Raises:
        ModelError: no adapter, or a damaged one.
        NotSupported: an adapter that PEFT computes in another way than `Pair` describes.
    """
    path = folder / "adapter_model.safetensors"
    for file in (folder / "adapter_config.json", path):
        if not file.is_file():
            old = (folder / "adapter_model.bin").is_file() and file is path
            hint = (
                "; load adapter_model.bin with peft and save it with save_pretrained" if old else ""
            )
            raise ModelError(f"{folder} holds no {file.name}{hint}")
        refuse_lfs_pointer(file)
    config = _read_config(folder)
    parts: dict[str, dict[str, Stored]] = {}
    whole: dict[str, Stored] = {}
    for key, tensor in sorted(stored_in(path).items()):
        if not key.startswith(_PREFIX):
            raise ModelError(
                f"{path}: {key[:200]!r} does not begin with {_PREFIX}, as peft's names do"
            )
        name = key.removeprefix(_PREFIX)
        suffix = next((suffix for suffix in _SUFFIXES if name.endswith(suffix)), None)
        if suffix is not None:
            of_layer = parts.setdefault(name.removesuffix(suffix), {})
            if of_layer.setdefault(_SUFFIXES[suffix], tensor) is not tensor:
                raise ModelError(f"{path} holds matrices of {name[:200]} twice")
        elif "lora_" in name or "token_adapter" in name:
            raise NotSupported(f"{path}: {key[:200]!r} is not a tensor of LoRA or DoRA")
        else:
            whole[name] = tensor
        if tensor.dtype not in _DTYPES:
            raise ModelError(f"{path}: the dtypes of {name[:200]} do not fit together")
    if not parts:
        raise ModelError(f"{path} holds no LoRA matrices")
    pairs = {name: _pair(path, name, of_layer, config) for name, of_layer in parts.items()}
    return AdapterFolder(folder, config, pairs, whole)


def _pair(path: Path, name: str, parts: Mapping[str, Stored], config: Mapping[str, Any]) -> Pair:
    dora = bool(config.get("use_dora"))
    wanted = {"a", "b"} | ({"magnitude"} if dora else set())
    if parts.keys() != wanted:
        names = ", ".join(
            f"lora_{part.upper() if len(part) == 1 else part}" for part in sorted(wanted)
        )
        raise ModelError(f"{path}: {name[:200]} must have {names} (use_dora={dora})")
    a, b, magnitude = parts["a"], parts["b"], parts.get("magnitude")
    rank = a.shape[0] if len(a.shape) == len(b.shape) == 2 else 0
    if not rank or b.shape[1] != rank or (magnitude is not None and magnitude.shape != b.shape[:1]):
        raise ModelError(f"{path}: the matrices of {name[:200]} do not fit together")
    return Pair(a, b, _scaling(config, name, rank), magnitude)


def _read_config(folder: Path) -> dict[str, Any]:
    config = read_json(folder / "adapter_config.json")
    init = str(config.get("init_lora_weights", True))[:80]
    others = [name[:80] for name, value in config.items() if value and name not in _FIELDS]
    kind = config.get("peft_type")
    if kind != "LORA" or others:
        what = ", ".join(others[:3]) if kind == "LORA" else f"peft_type={str(kind)[:80]!r}"
        raise NotSupported(
            f"{folder}: adapter_config.json: {what} is not supported: must be plain LORA or DoRA, which "
            "change weights by B A; merge it with peft's merge_and_unload"
        )
    if init.lower() not in _INITS:
        raise NotSupported(
            f"{folder}: adapter_config.json: init_lora_weights={init!r}: its matrices are for a base model "
            "whose weights peft changed when it made them; save it with save_pretrained(..., "
            "path_initial_model_for_weight_conversion=...), or merge it with peft's merge_and_unload"
        )
    return config


def _scaling(config: Mapping[str, Any], layer: str, rank: int) -> float:
    """Return the factor of B A for a layer.

    Raises:
        ModelError: the config has no number for it, or another rank.
        NotSupported: it has one by a pattern that isn't a name.
    """
    if _of_layer(config, "r", "rank_pattern", layer) != rank:
        raise ModelError(
            f"adapter_config.json: r of {layer[:200]} is not {rank}, as its matrices have"
        )
    alpha = _of_layer(config, "lora_alpha", "alpha_pattern", layer)
    divisor = rank**0.5 if config.get("use_rslora") else rank
    # Beyond float32, in which it is computed, it would be infinite.
    if not abs(alpha) <= _MOST * divisor:
        raise ModelError("adapter_config.json: lora_alpha must be a finite number")
    return float(alpha / divisor)


def _of_layer(config: Mapping[str, Any], field: str, pattern_field: str, layer: str) -> float:
    patterns = config.get(pattern_field) or {}
    if not isinstance(patterns, dict) or not all(map(_PATTERN.fullmatch, patterns)):
        raise NotSupported(
            f"adapter_config.json: {pattern_field}={str(patterns)[:80]!r}: must be numbers by names of layers"
        )
    value = next(
        (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", layer)),
        config.get(field),
    )
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelError(f"adapter_config.json: {field}={str(value)[:80]!r}: must be a number")
    return value


def read_adapter(folder: str | os.PathLike[str]) -> dict[str, LowRank]:
    """Read the LoRA matrices of a folder, by layer name, for adapters that are chosen per request.

    Raises:
        InvalidRequest: not a path.
        ModelError, NotSupported: as `read_folder`; or it changes more than the products of linear layers,
            or has a rank above 256.
    """
    if not isinstance(folder, str | os.PathLike):
        raise InvalidRequest(f"adapter={folder!r:.80}: must be the path of a folder")
    adapter = read_folder(Path(os.path.expanduser(folder)))
    if adapter.config.get("use_dora"):
        raise NotSupported(
            f"{adapter.folder}: use_dora scales the base model's weights, so it can't be used per request; "
            "open the folder as a model, which merges it"
        )
    for name in adapter.whole:
        raise NotSupported(
            f"{adapter.folder}: {name[:200]!r} is not a LoRA matrix of a linear layer, so it can't be used "
            "per request; open the folder as a model, which merges it"
        )
    layers = {}
    for name, pair in adapter.pairs.items():
        if pair.a.shape[0] > MOST_RANK:
            raise NotSupported(
                f"{adapter.folder}: {name[:200]} has rank {pair.a.shape[0]}; at most {MOST_RANK} per request"
            )
        layers[name] = LowRank(read_stored(pair.a), read_stored(pair.b), pair.scaling)
    return layers
