"""Positions of the batch for models that count positions themselves.

Some models take no `position_ids`, or count only ids that are not padding, from the start of a row. A flat
batch has rows of many sequences, so the functions in which they count are replaced: within a forward of the
engine they return the positions of the forward context. Padding ids in a prompt count like any other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.model.context import active_context, replace_function

_BY_PADDING = "create_position_ids_from_input_ids"  # of RoBERTa's kind
# Arguments of a position embedding of BART's kind; `cache_length` since transformers 5.24.
_EMBEDS = {("past_key_values_length", "position_ids"), ("cache_length", "position_ids")}
_FIRST = ("input_ids", "input_ids_shape")
# Attention whose temperature counts positions from the tokens in its cache on.
_COUNT_CACHED = ("Llama4TextAttention",)


def patch_positions(module: nn.Module) -> None:
    """Replace the functions in which a model's classes count positions; does nothing the second time."""
    for cls in {type(layer) for layer in module.modules()}:
        if _counts_by_padding(cls):
            replace_function(cls, _BY_PADDING, partial(_at_positions, _after_padding))
        elif _counts_from_the_start(cls):
            replace_function(cls, "forward", partial(_at_positions, _embed))
        elif cls.__name__ in _COUNT_CACHED:
            replace_function(cls, "forward", partial(_at_positions, _after_cached))


def counts_by_padding(module: nn.Module) -> bool:
    """Return whether positions begin behind the padding id, as RoBERTa's do."""
    return any(_counts_by_padding(type(layer)) for layer in module.modules())


def _counts_by_padding(cls: type) -> bool:
    return hasattr(cls, _BY_PADDING)


def _counts_from_the_start(cls: type) -> bool:
    if not issubclass(cls, nn.Embedding) or cls is nn.Embedding:
        return False
    _, *names = inspect.signature(cls.forward).parameters
    return tuple(names[1:]) in _EMBEDS and names[0] in _FIRST


def _at_positions(ours: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function with the positions of the forward context in front of its arguments."""
    context = active_context()
    assert context is not None
    device = next((a.device for a in args if isinstance(a, Tensor)), context.positions.device)
    return ours(context.positions.to(device), *args, **kwargs)


def _after_padding(positions: Tensor, input_ids: Tensor, padding_idx: int, *_: Any) -> Tensor:
    return positions + (padding_idx + 1)


def _embed(positions: Tensor, layer: Any, *_: Any, **__: Any) -> Tensor:
    return nn.Embedding.forward(layer, positions + getattr(layer, "offset", 0))


class _Cached:
    """A cache with as many tokens as a flat row needs before each token to be at its position."""

    def __init__(self, positions: Tensor) -> None:
        self._before = positions - torch.arange(len(positions), device=positions.device)

    def get_seq_length(self, *_: Any) -> Tensor:
        return self._before

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return keys, values


def _after_cached(
    positions: Tensor, layer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any
) -> Any:
    if layer.use_rope:
        return type(layer).forward.verbatim_original(layer, hidden_states, *args, **kwargs)
    kwargs |= {n: _Cached(positions.flatten()) for n in ("cache", "past_key_values") if n in kwargs}
    rows = hidden_states.flatten(0, 1)[None]
    out, *others = type(layer).forward.verbatim_original(layer, rows, *args, **kwargs)
    return out.view(hidden_states.shape), *others
