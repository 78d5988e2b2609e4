"""Merging a LoRA adapter into the lazy weights of its base model.

`W + scaling * B A` is computed in float32 by the engine's own product, which is bit-identical in every
placement, and rounded once to the weight's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.errors import ModelError, NotSupported
from verbatim.model import products
from verbatim.model.packed import placeholder
from verbatim.weights.adapter import AdapterFolder
from verbatim.weights.lazy import Computed, LazyWeight

_EXPERT = ".experts."


def merge_experts(
    adapter: AdapterFolder, table: Mapping[str, LazyWeight], dtype: torch.dtype
) -> tuple[AdapterFolder, dict[str, LazyWeight]]:
    """Add the matrices of single experts to the lazy weights of a checkpoint.

    A module has one tensor for all experts; adapters made with transformers 4 name each of them, as
    checkpoints do.

    Returns:
        The rest of the adapter, and the lazy weights.

    Raises:
        ModelError: the matrices do not fit.
        NotSupported: ranks or alphas by names, which PEFT replaces for experts.
    """
    merged, left = dict(table), dict(adapter.pairs)
    for layer, pair in adapter.pairs.items():
        name = f"{layer}.weight"
        if _EXPERT not in layer or name not in table:
            continue
        if adapter.config.get("rank_pattern") or adapter.config.get("alpha_pattern"):
            raise NotSupported(
                f"{adapter.folder}: rank_pattern and alpha_pattern are not supported with experts"
            )
        base: Any = table[name]
        merge = _merge(adapter, layer, base.shape, dtype, transposed=False)
        parts = base, pair.a, pair.b, pair.magnitude
        merged[name] = Computed(merge, parts, shape=base.shape, dtype=dtype)
        del left[layer]
    return replace(adapter, pairs=left), merged


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
            raise _misfit(adapter, f"{layer}.{name}")
        return parameter

    def put(layer: str, name: str, lazy: LazyWeight) -> None:
        parameter = nn.Parameter(placeholder(parameter_of(layer, name)), requires_grad=False)
        layers[layer]._parameters[name] = parameter
        weights[parameter] = lazy

    for key, stored in adapter.whole.items():
        layer, _, name = key.rpartition(".")
        parameter = parameter_of(layer.removesuffix(".base_layer"), name)
        if stored.shape != parameter.shape:
            raise _misfit(adapter, key)
        lazy = Computed(partial(_finite, adapter, key, parameter.dtype), (stored,))
        if layer.endswith(".base_layer"):  # PEFT writes into the tensor, tied or not
            weights[parameter] = lazy
        else:
            put(layer, name, lazy)
    for layer, pair in adapter.pairs.items():
        parameter = parameter_of(layer, "weight")
        transposed = isinstance(layers[layer], nn.Embedding | Conv1D)
        if not transposed and not isinstance(layers[layer], nn.Linear):
            raise _misfit(adapter, layer)
        merge = _merge(adapter, layer, parameter.shape, parameter.dtype, transposed=transposed)
        parts = weights[parameter], pair.a, pair.b, pair.magnitude
        put(layer, "weight", Computed(merge, parts))
    used = set(module.parameters())
    for parameter in [p for p in weights if p not in used]:
        del weights[parameter]


def _misfit(adapter: AdapterFolder, name: str) -> ModelError:
    return ModelError(f"{adapter.folder}: {name[:200]} does not fit the base model's weights")


def _finite(adapter: AdapterFolder, name: str, dtype: torch.dtype, values: Tensor) -> Tensor:
    values = values.to(dtype)
    if not values.isfinite().all():
        raise ModelError(f"{adapter.folder}: {name[:200]} has NaN or infinity in {dtype}")
    return values.contiguous()


def _merge(
    adapter: AdapterFolder,
    layer: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    transposed: bool,
) -> Callable[..., Tensor]:
    """Return the function that adds a pair to a weight, `[N, K]`, or `[K, N]` if it is transposed."""
    pair = adapter.pairs[layer]
    if tuple(shape[::-1] if transposed else shape) != (pair.b.shape[0], pair.a.shape[1]):
        raise _misfit(adapter, layer)

    def merge(weight: Tensor, a: Tensor, b: Tensor, magnitude: Tensor | None) -> Tensor:
        added = products.linear(b.float(), a.float().t().contiguous(), None) * pair.scaling
        total = (weight.t() if transposed else weight).float().add(added)
        if magnitude is not None:
            norm = torch.linalg.vector_norm(total.double(), dim=1)
            total *= (magnitude.double() / norm).float()[:, None]
        return _finite(adapter, layer, dtype, total.t() if transposed else total)

    return merge
