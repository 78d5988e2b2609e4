"""Chooses the weights to quantize, independently of the placement."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from verbatim.errors import NotSupported
from verbatim.kernels.packing import WeightPacking
from verbatim.model.context import head_of
from verbatim.model.experts import is_stacked, is_transposed, stacked_parameters
from verbatim.model.spec import inner_model
from verbatim.quantization.formats import Quantization

# Routers are small, and stay exact.
_ROUTER = re.compile(r"(^|\.)(gate|\w+_gate|\w*router\w*)(\.|$)")
# Its parts multiply queries and attention outputs, and one of them is read by columns (`model/latent.py`).
_LATENT = re.compile(r"(^|\.)kv_b_proj$")
_WIDTH = 16  # minimum width of stacked matrices; narrower ones may be convolutions


def choose_packings(
    module: nn.Module, quantization: Quantization
) -> dict[nn.Parameter, WeightPacking]:
    """Return the layout of every weight to quantize, without reading data.

    These are the matrices of linear layers (also GPT-2's) and of stacked experts, and with `head_bits` the
    token embedding and the LM head. Other embeddings, norms, biases, routers and the up-projection of latent
    attention stay exact, as do matrices that would not become smaller. `activation_bits` applies to matrices
    of `nn.Linear` and `flat_experts`.

    Args:
        module: a transformers model, possibly without weights in memory.

    Raises:
        NotSupported: there are no weights to quantize.
    """
    # Not of subclasses, which may use their weights in other ways.
    integer = {m.weight for m in module.modules() if type(m) is nn.Linear}
    integer |= {p for m in module.modules() if is_stacked(m) for p in stacked_parameters(m)}
    exact = {m.weight for m in module.modules() if isinstance(m, nn.Embedding)}
    tables = _tables(inner_model(module))
    chosen = {p: (quantization, by_k) for p, by_k in matrices_of(module).items() if p not in exact}
    for table in tables:
        chosen.pop(table, None)
        if quantization.of_head is not None:
            chosen[table] = quantization.of_head, False
    packings: dict[nn.Parameter, WeightPacking] = {}
    for parameter, (kind, columns) in chosen.items():
        packing = kind.packing(parameter.shape, parameter.dtype, columns)
        if packing.plain.nbytes < parameter.nbytes:
            packings[parameter] = packing if parameter in integer else packing.plain
    if not packings:
        raise NotSupported(
            f"quantization={quantization.name!r}: the model has no linear layers or stacked experts that "
            "would be smaller for it"
        )
    if quantization.activation_bits and not any(p.interleaved for p in packings.values()):
        raise NotSupported(
            f"quantization={quantization.name!r}: the model has no nn.Linear layers, which 8-bit "
            f"activations require; use quantization={quantization.of_weights}"
        )
    return packings


def matrices_of(module: nn.Module) -> dict[nn.Parameter, bool]:
    """Return the matrices that multiply hidden states, except routers; values: whether it is `[K, N]`."""
    return {
        parameter: columns
        for path, layer in module.named_modules()
        for name, parameter in layer.named_parameters(recurse=False)
        if (columns := _columns(path, layer, name, parameter)) is not None
    }


def packable_of(module: nn.Module) -> dict[nn.Parameter, bool]:
    """Return `matrices_of` and the embedding tables: the weights that can stay as quantized in a file."""
    embeddings = (m for m in module.modules() if isinstance(m, nn.Embedding))
    tables: list[Any] = [layer.weight for layer in embeddings if layer.max_norm is None]
    return dict.fromkeys(tables, False) | matrices_of(module)


def _tables(inner: Any) -> list[nn.Parameter]:
    """Return the weights of the token embedding and the head if supported; only one if tied."""
    try:
        embedding = inner.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        embedding = None
    tables: list[Any] = []
    if isinstance(embedding, nn.Embedding) and embedding.max_norm is None:
        tables.append(embedding.weight)
    head = head_of(inner)
    if isinstance(head, nn.Linear):
        tables.append(head.weight)
    return [w for w in dict.fromkeys(tables) if w.is_floating_point() and w.ndim == 2]


def _columns(path: str, layer: nn.Module, name: str, parameter: nn.Parameter) -> bool | None:
    """Return whether a parameter is `[K, N]` (True) or `[N, K]` (False); None if it stays exact."""
    if not parameter.is_floating_point() or _ROUTER.search(path) or _LATENT.search(path):
        return None
    if isinstance(layer, nn.Linear):
        return False if name == "weight" else None
    if type(layer).__name__ == "Conv1D":  # transformers' class, used by GPT-2
        return True if name == "weight" else None
    stacked = parameter.ndim == 3 and min(parameter.shape[1:]) >= _WIDTH
    return is_transposed(layer) if stacked else None


def owners(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield (layer path, layer, name in the layer, parameter) for each use of a parameter."""
    for path, layer in module.named_modules():
        for name, parameter in layer._parameters.items():
            if parameter is not None:
                yield path, layer, name, parameter
