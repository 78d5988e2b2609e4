"""Positions of the batch for models that count positions themselves.

Some models take no `position_ids`, or count only ids that are not padding, from the start of a row. A flat
batch has rows of many sequences, so within a forward of the engine the functions in which they count return
the positions of the forward context. Padding ids in a prompt count like any other.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.model.context import active_context

BY_PADDING = "create_position_ids_from_input_ids"  # of RoBERTa's kind
# Arguments of a position embedding of BART's kind; `cache_length` since transformers 5.24.
_EMBEDS = {("past_key_values_length", "position_ids"), ("cache_length", "position_ids")}
_FIRST = ("input_ids", "input_ids_shape")


def counts_by_padding(cls: type) -> bool:
    """Return whether positions of a class begin behind the padding id, as RoBERTa's do."""
    return hasattr(cls, BY_PADDING)


def counts_from_the_start(cls: type) -> bool:
    """Return whether a class embeds positions that it counts from the start of a row, as BART's do."""
    if not issubclass(cls, nn.Embedding) or cls is nn.Embedding:
        return False
    _, *names = inspect.signature(cls.forward).parameters
    return tuple(names[1:]) in _EMBEDS and names[0] in _FIRST


def _positions(*args: Any) -> Tensor:
    """Return the positions of the forward context, on the device of the first tensor."""
    context = active_context()
    assert context is not None
    device = next((a.device for a in args if isinstance(a, Tensor)), context.positions.device)
    return context.positions.to(device)


def after_padding(input_ids: Tensor, padding_idx: int, *_: Any) -> Tensor:
    """Return positions as `create_position_ids_from_input_ids`."""
    return _positions(input_ids) + (padding_idx + 1)


def embed(layer: Any, *args: Any, **_: Any) -> Tensor:
    """Embed positions as BART does."""
    return nn.Embedding.forward(layer, _positions(*args) + getattr(layer, "offset", 0))


class _Cached:
    """A cache with as many tokens as a flat row needs before each token to be at its position."""

    def __init__(self, positions: Tensor) -> None:
        self._before = positions - torch.arange(len(positions), device=positions.device)

    def get_seq_length(self, *_: Any) -> Tensor:
        return self._before

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return keys, values


def counting_attention(layer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Llama 4's attention, whose temperature counts positions from the tokens in its cache on."""
    if layer.use_rope:
        return type(layer).forward(layer, hidden_states, *args, **kwargs)
    cached = _Cached(_positions(hidden_states).flatten())
    kwargs |= {n: cached for n in ("cache", "past_key_values") if n in kwargs}
    rows = hidden_states.flatten(0, 1)[None]
    out, *others = type(layer).forward(layer, rows, *args, **kwargs)
    return out.view(hidden_states.shape), *others
