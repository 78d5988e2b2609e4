"""PEFT adapter folders: LoRA matrices, added to the lazy weights of the base model.

`W + scaling * B A`, computed in float32 by the engine's own product, so that it has the same bits in every
placement, and rounded once to the model's dtype.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verbatim.errors import ModelError, NotSupported
from verbatim.model import products
from verbatim.untrusted import read_json
from verbatim.weights.formats.stored import Decoded
from verbatim.weights.lazy import Computed, LazyWeight, Stored

_PREFIX = "base_model.model."
# Fields that change what is computed beside W + scaling * B A, and must be absent or false.
_OTHERS = (
    *("use_dora", "use_qalora", "lora_bias", "target_parameters", "trainable_token_indices"),
    *("alora_invocation_tokens", "arrow_config", "layer_replication", "megatron_config"),
)
# A name of a layer, or its end: other patterns of a file can take exponential time.
_PATTERN = re.compile(r"\^?[\w.-]+")
_MOST = torch.finfo(torch.float32).max


def add_adapter(
    folder: Path,
    stored: Mapping[str, Stored],
    table: Mapping[str, LazyWeight],
    dtype: torch.dtype,
) -> dict[str, LazyWeight]:
    """Return the lazy weights of a base model with an adapter.

    Args:
        folder: of the adapter.
        stored: its tensors.
        table: the lazy weights of the base model.

    Raises:
        NotSupported: another adapter than LoRA.
        ModelError: it is for another model.
    """
    config = read_config(folder)
    found, left = dict(table), dict(stored)
    for key in sorted(key for key in stored if key.endswith(".lora_A.weight")):
        a, b = left.pop(key), left.pop(key.replace(".lora_A.", ".lora_B."), None)
        module = layer_of(key)
        name = f"{module}.weight"
        base: Any = found.get(name)
        base = base.func if isinstance(base, Computed) else base
        turned = bool(config.get("fan_in_fan_out"))
        if b is None or base is None or b.shape[1:] != a.shape[:1]:
            raise _misfit(folder, key)
        shape = (b.shape[0], *a.shape[1:])
        if base.shape != (shape[::-1] if turned else shape):
            raise _misfit(folder, key)
        scaling = scaling_of(config, module, a.shape[0])
        merge = Decoded(base.shape, dtype, _merge(dtype, scaling, turned))
        found[name] = Computed(merge, (found[name], a, b), {}, None)
    for key, tensor in left.items():  # of modules that were trained whole
        name = key.removeprefix(_PREFIX)
        if "lora_" in key or name not in found:
            raise _misfit(folder, key)
        found[name] = tensor
    return found


def _misfit(folder: Path, name: str) -> ModelError:
    return ModelError(f"{folder}: {name} does not fit the base model's weights")


def read_config(folder: Path) -> dict[str, Any]:
    """Read the config of an adapter.

    Raises:
        ModelError: it can't be read.
        NotSupported: another adapter than LoRA.
    """
    config = read_json(folder / "adapter_config.json")
    others = [name for name in _OTHERS if config.get(name)]
    if config.get("peft_type") != "LORA" or others:
        what = ", ".join(others) or f"peft_type={str(config.get('peft_type'))[:80]!r}"
        raise NotSupported(
            f"{folder}: adapter_config.json: {what} is not supported: must be plain LORA; merge it "
            "with peft's merge_and_unload"
        )
    return config


def layer_of(key: str) -> str:
    """Return the name of the layer that a tensor `<layer>.lora_A.weight` is for."""
    return key.removesuffix(".lora_A.weight").removeprefix(_PREFIX)


def scaling_of(config: Mapping[str, Any], module: str, rank: int) -> float:
    """Return the factor of B A for a layer.

    Raises:
        ModelError: the config has no number for it.
        NotSupported: it has one by a pattern that isn't a name.
    """
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict) or not all(map(_PATTERN.fullmatch, patterns)):
        raise NotSupported(
            f"adapter_config.json: alpha_pattern={str(patterns)[:80]!r}: must be numbers by names of layers"
        )
    alpha = next(
        (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)),
        config.get("lora_alpha"),
    )
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise ModelError(f"adapter_config.json: lora_alpha={str(alpha)[:80]!r}: must be a number")
    divisor = rank**0.5 if config.get("use_rslora") else rank
    # Beyond float32, in which it is computed, it would be infinite.
    if not abs(alpha) <= _MOST * divisor:
        raise ModelError("adapter_config.json: lora_alpha must be a finite number")
    return float(alpha / divisor)


def _merge(dtype: torch.dtype, scaling: float, turned: bool) -> Any:
    def merge(weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        product = products.linear(b.float(), a.float().t().contiguous(), None)
        product = product.t() if turned else product
        return weight.float().add(product * scaling).to(dtype).contiguous()

    return merge
