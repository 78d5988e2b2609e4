"""Coati's helper functions: hooks for models with a cache, logits processors, the end over all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from verbatim.errors import InvalidRequest
from verbatim.placement.actor import field_of
from verbatim.placement.hooked import positions_of

if TYPE_CHECKING:
    from transformers import LogitsProcessorList


def prepare_inputs_fn(input_ids: Tensor, **model_kwargs: Any) -> dict[str, Any]:
    """The inputs of a model's next forward.

    Works as the `prepare_inputs_fn` of `generate`, with a cache if the model kept one: then only the ids
    that it does not hold are passed on.

    Args:
        input_ids: `[B, L]`, everything so far.
        model_kwargs: handed on. `past`, or else `past_key_values`, is the cache; `position_ids` are made of
            `attention_mask` where they are not given.

    Returns:
        A new dict with `input_ids`.
    """
    past = model_kwargs.pop("past", None)
    cache = model_kwargs.get("past_key_values") if past is None else past
    mask, num_cached = model_kwargs.get("attention_mask"), _length_of(cache)
    inputs = {**model_kwargs, "input_ids": input_ids[:, num_cached:], "past_key_values": cache}
    if cache is None:  # of a model that may not even take one
        del inputs["past_key_values"]
    types = model_kwargs.get("token_type_ids")
    if isinstance(types, Tensor):
        inputs["token_type_ids"] = types[:, num_cached:]
    if isinstance(mask, Tensor) and mask.dim() == 2 and inputs.get("position_ids") is None:
        inputs["position_ids"] = positions_of(mask)[:, num_cached:]
    return inputs


def _length_of(cache: Any) -> int:
    """Tokens that a transformers cache holds, or pairs of keys and values `[B, heads, length, width]`."""
    if cache is None:
        return 0
    if hasattr(cache, "get_seq_length"):
        return int(cache.get_seq_length())
    return int(cache[0][0].shape[-2]) if len(cache) else 0


def update_model_kwargs_fn(
    outputs: Any, new_mask: Any = None, **model_kwargs: Any
) -> dict[str, Any]:
    """What is carried from one step to the next.

    Works as the `update_model_kwargs_fn` of `generate`, which calls it as `f(outputs, model_kwargs)`.

    Args:
        outputs: of the model; its `past_key_values` are kept (None where it has none).
        new_mask: `[B, 1]`, the attention mask of the new token; or the `model_kwargs` as a dict, which
            means a mask of ones.
        model_kwargs: as they were before the step.

    Returns:
        A new dict, with `attention_mask` and `token_type_ids`, where there are any, a column wider.
    """
    if isinstance(new_mask, Mapping):
        model_kwargs, new_mask = {**new_mask, **model_kwargs}, None
    updated = {**model_kwargs, "past_key_values": field_of(outputs, "past_key_values")}
    types, mask = updated.get("token_type_ids"), updated.get("attention_mask")
    if types is not None:
        updated["token_type_ids"] = torch.cat([types, types[:, -1:]], dim=-1)
    if mask is not None:
        new = mask.new_ones(mask.shape[0], 1) if new_mask is None else new_mask
        updated["attention_mask"] = torch.cat([mask, new], dim=-1)
    return updated


def _prepare_logits_processor(
    top_k: int | None = None, top_p: float | None = None, temperature: float | None = None
) -> LogitsProcessorList:
    """transformers' processors for temperature, top-k and top-p, in this order, without those that are off.

    For loops of your own; `generate` itself has the house's sampler.

    Raises:
        ValueError: a number out of range.
    """
    from transformers import (
        LogitsProcessorList,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    found = LogitsProcessorList()
    if temperature is not None and temperature != 1.0:
        found.append(TemperatureLogitsWarper(float(temperature)))
    if top_k is not None and top_k != 0:
        found.append(TopKLogitsWarper(top_k))
    if top_p is not None and top_p != 1.0:
        found.append(TopPLogitsWarper(float(top_p)))
    return found


def _is_sequence_finished(unfinished_sequences: Tensor) -> bool:
    """Has every row of every rank ended?

    Args:
        unfinished_sequences: `[B]`, 0 for each row that has; left as it is.
    """
    if not isinstance(unfinished_sequences, Tensor):
        raise InvalidRequest(f"unfinished_sequences={unfinished_sequences!r}: must be a tensor")
    left = unfinished_sequences.count_nonzero()
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(left)
    return int(left) == 0
