"""PEFT adapter folders: read for use per request, or merged into the lazy weights of their base model.

The reference is the forward of `PeftModel.from_pretrained(base, folder)`. Config fields that may mean
anything other than "add `scaling * B A` to these weights" are rejected. A merged weight
`W + scaling * B A` is computed in float32 with the engine's own matrix product, which is bit-identical in
every placement, and rounded once to the weight's dtype.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.batch import LowRank
from verbatim.common.untrusted import check_stored, read_json
from verbatim.errors import InvalidRequest, ModelError, NotSupported
from verbatim.model import products
from verbatim.model.quantized import placeholder
from verbatim.model.stored import Stored, read_stored, stored_in
from verbatim.weights.lazy import Computed, LazyWeight

MAX_RANK = 256
_DTYPES = {torch.float32, torch.bfloat16, torch.float16}
_EXPERT = ".experts."
_PREFIX = "base_model.model."
_SUFFIXES = {
    ".lora_A.weight": "a",
    ".lora_B.weight": "b",
    ".lora_embedding_A": "a",
    ".lora_embedding_B": "b",
    ".lora_magnitude_vector": "magnitude",
}
# Config fields that are read here, describe only the training, or follow from the tensors' names.
_FIELDS = frozenset(
    "alpha_pattern auto_mapping base_model_name_or_path bias corda_config eva_config exclude_modules "
    "fan_in_fan_out inference_mode init_lora_weights layers_pattern layers_to_transform loftq_config "
    "lora_alpha lora_dropout lora_ga_config megatron_core modules_to_save peft_type peft_version "
    "qalora_group_size r rank_pattern revision target_modules task_type unsloth_fixed use_dora "
    "use_rslora".split()
)
# Initializations that don't change the base model's weights; others subtract the initial B A.
_INITS = {"true", "false", "none", "gaussian", "eva", "orthogonal", "mica"}
# A layer's name or its end; a regular expression from a file could take exponential time.
_PATTERN = re.compile(r"\^?[\w.-]+")
_MAX_FLOAT32 = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class Pair:
    """The matrices of one layer, which add `scaling * B A` `[N, K]` to its weight.

    Attributes:
        a: `[rank, K]`.
        b: `[N, rank]`.
        magnitude: `[N]`, DoRA only: the norm to which each row of the sum is scaled.
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
        ModelError: there is no adapter, or it is damaged.
        NotSupported: the adapter is not computed as `Pair` describes.
    """
    path = folder / "adapter_model.safetensors"
    for file in (folder / "adapter_config.json", path):
        if not file.is_file():
            old = (folder / "adapter_model.bin").is_file() and file is path
            hint = (
                "; load adapter_model.bin with peft and save it with save_pretrained" if old else ""
            )
            raise ModelError(f"{folder} holds no {file.name}{hint}")
        check_stored(file)
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
            raise ModelError(
                f"{path}: {name[:200]} is {tensor.dtype}: must be float32, bfloat16 or float16"
            )
    if not parts:
        raise ModelError(f"{path} holds no LoRA matrices")
    pairs = {name: _pair(path, name, of_layer, config) for name, of_layer in parts.items()}
    return AdapterFolder(folder, config, pairs, whole)


def _pair(path: Path, name: str, parts: Mapping[str, Stored], config: Mapping[str, Any]) -> Pair:
    dora = bool(config.get("use_dora"))
    expected = {"a", "b"} | ({"magnitude"} if dora else set())
    if parts.keys() != expected:
        names = ", ".join(
            f"lora_{part.upper() if len(part) == 1 else part}" for part in sorted(expected)
        )
        raise ModelError(f"{path}: {name[:200]} must have {names} (use_dora={dora})")
    a, b, magnitude = parts["a"], parts["b"], parts.get("magnitude")
    rank = a.shape[0] if len(a.shape) == len(b.shape) == 2 else 0
    if not rank or b.shape[1] != rank or (magnitude is not None and magnitude.shape != b.shape[:1]):
        raise ModelError(f"{path}: the matrices of {name[:200]} have inconsistent shapes")
    return Pair(a, b, _scaling(config, name, rank), magnitude)


def _read_config(folder: Path) -> dict[str, Any]:
    config = read_json(folder / "adapter_config.json")
    init = str(config.get("init_lora_weights", True))[:80]
    unknown = [name[:80] for name, value in config.items() if value and name not in _FIELDS]
    kind = config.get("peft_type")
    if kind != "LORA" or unknown:
        what = ", ".join(unknown[:3]) if kind == "LORA" else f"peft_type={str(kind)[:80]!r}"
        raise NotSupported(
            f"{folder}: adapter_config.json: {what} is not supported: must be plain LORA or DoRA, which "
            "change weights by B A; merge it with peft's merge_and_unload"
        )
    if init.lower() not in _INITS:
        raise NotSupported(
            f"{folder}: adapter_config.json: init_lora_weights={init!r}: its matrices are for "
            "base weights that peft modified when it initialized the adapter; save it with "
            "save_pretrained(..., path_initial_model_for_weight_conversion=...), or merge it "
            "with peft's merge_and_unload"
        )
    return config


def _scaling(config: Mapping[str, Any], layer: str, rank: int) -> float:
    """Return the factor of B A for a layer; raise ModelError if the config lacks it or has another rank."""
    if _layer_value(config, "r", "rank_pattern", layer) != rank:
        raise ModelError(
            f"adapter_config.json: r of {layer[:200]} is not {rank}, as its matrices have"
        )
    alpha = _layer_value(config, "lora_alpha", "alpha_pattern", layer)
    divisor = rank**0.5 if config.get("use_rslora") else rank
    # The factor is applied in float32, so it must be finite there.
    if not abs(alpha) <= _MAX_FLOAT32 * divisor:
        raise ModelError("adapter_config.json: lora_alpha must be a finite number")
    return float(alpha / divisor)


def _layer_value(config: Mapping[str, Any], field: str, pattern_field: str, layer: str) -> float:
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
    """Return the LoRA matrices of a folder, by layer name, for use per request.

    Raises:
        InvalidRequest: `folder` is not a path.
        ModelError, NotSupported: as for `read_folder`; or the adapter changes more than the products of
            linear layers, or has a rank above 256.
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
        if pair.a.shape[0] > MAX_RANK:
            raise NotSupported(
                f"{adapter.folder}: {name[:200]} has rank {pair.a.shape[0]}; at most {MAX_RANK} per request"
            )
        layers[name] = LowRank(read_stored(pair.a), read_stored(pair.b), pair.scaling)
    return layers


def merge_experts(
    adapter: AdapterFolder, table: Mapping[str, LazyWeight], dtype: torch.dtype
) -> tuple[AdapterFolder, dict[str, LazyWeight]]:
    """Merge an adapter's matrices for single experts into the lazy weights of a checkpoint.

    A module has one tensor for all experts; adapters made with transformers 4, like checkpoints, have
    separate matrices for each expert.

    Returns:
        The rest of the adapter, and the lazy weights with these matrices merged.

    Raises:
        ModelError: the shapes of the matrices do not fit.
        NotSupported: the adapter has `rank_pattern` or `alpha_pattern`, which PEFT overrides for experts.
    """
    merged, remaining = dict(table), dict(adapter.pairs)
    for layer in adapter.pairs:
        name = f"{layer}.weight"
        if _EXPERT not in layer or name not in table:
            continue
        if adapter.config.get("rank_pattern") or adapter.config.get("alpha_pattern"):
            raise NotSupported(
                f"{adapter.folder}: rank_pattern and alpha_pattern are not supported with experts"
            )
        base: Any = table[name]
        merged[name] = _merged(adapter, layer, base, base.shape, dtype, transposed=False)
        del remaining[layer]
    return replace(adapter, pairs=remaining), merged


def merge_adapter(
    adapter: AdapterFolder, module: nn.Module, weights: dict[nn.Parameter, LazyWeight]
) -> None:
    """Merge an adapter into a model's lazy weights.

    As with PEFT, a tied weight that the adapter changes in one place is not tied afterwards.

    Args:
        weights: the lazy weights of the module's parameters; both are modified.

    Raises:
        ModelError: the adapter is for another model.
    """
    from transformers.pytorch_utils import Conv1D

    layers = dict(module.named_modules())

    def parameter_of(layer: str, name: str) -> nn.Parameter:
        parameters: Any = layers[layer]._parameters if layer in layers else {}
        parameter: nn.Parameter | None = parameters.get(name)
        if parameter is None or parameter not in weights:
            raise _mismatch(adapter, f"{layer}.{name}")
        return parameter

    def assign(layer: str, name: str, lazy: LazyWeight) -> None:
        parameter = nn.Parameter(placeholder(parameter_of(layer, name)), requires_grad=False)
        layers[layer]._parameters[name] = parameter
        weights[parameter] = lazy

    for key, stored in adapter.whole.items():
        layer, _, name = key.rpartition(".")
        parameter = parameter_of(layer.removesuffix(".base_layer"), name)
        if stored.shape != parameter.shape:
            raise _mismatch(adapter, key)
        shape, dtype = tuple(parameter.shape), parameter.dtype
        convert = partial(_finite, adapter, key, dtype)
        lazy = Computed(convert, (stored,), shape=shape, dtype=dtype)
        if layer.endswith(".base_layer"):  # PEFT writes to the tensor, even if it is tied
            weights[parameter] = lazy
        else:
            assign(layer, name, lazy)
    for layer in adapter.pairs:
        parameter = parameter_of(layer, "weight")
        transposed = isinstance(layers[layer], nn.Embedding | Conv1D)
        if not transposed and not isinstance(layers[layer], nn.Linear):
            raise _mismatch(adapter, layer)
        base, shape, dtype = weights[parameter], parameter.shape, parameter.dtype
        merged = _merged(adapter, layer, base, shape, dtype, transposed=transposed)
        assign(layer, "weight", merged)
    used = set(module.parameters())
    for parameter in [p for p in weights if p not in used]:
        del weights[parameter]


def _mismatch(adapter: AdapterFolder, name: str) -> ModelError:
    return ModelError(f"{adapter.folder}: {name[:200]} does not fit the base model's weights")


def _finite(adapter: AdapterFolder, name: str, dtype: torch.dtype, values: Tensor) -> Tensor:
    values = values.to(dtype)
    if not values.isfinite().all():
        raise ModelError(f"{adapter.folder}: {name[:200]} has NaN or infinity in {dtype}")
    return values.contiguous()


def _merged(
    adapter: AdapterFolder,
    layer: str,
    base: LazyWeight,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    transposed: bool,
) -> Computed:
    """Return a weight `[N, K]`, or `[K, N]` if `transposed`, with the pair of a layer merged into it."""
    pair = adapter.pairs[layer]
    if tuple(shape[::-1] if transposed else shape) != (pair.b.shape[0], pair.a.shape[1]):
        raise _mismatch(adapter, layer)

    def merge(weight: Tensor, a: Tensor, b: Tensor, magnitude: Tensor | None) -> Tensor:
        added = products.linear(b.float(), a.float().t().contiguous(), None) * pair.scaling
        total = (weight.t() if transposed else weight).float().add(added)
        if magnitude is not None:
            norm = torch.linalg.vector_norm(total.double(), dim=1)
            total *= (magnitude.double() / norm).float()[:, None]
        return _finite(adapter, layer, dtype, total.t() if transposed else total)

    parts = base, pair.a, pair.b, pair.magnitude
    return Computed(merge, parts, shape=tuple(shape), dtype=dtype)
