"""Coati's helper functions: cache hooks, logits processors, and the end of generation on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from verbatim.errors import InvalidRequest
from verbatim.placement.actor import field_of

if TYPE_CHECKING:
    from transformers import LogitsProcessorList


def prepare_inputs_fn(input_ids: Tensor, **model_kwargs: Any) -> dict[str, Any]:
    """Return the inputs of a model's next forward.

    Usable as `generate`'s `prepare_inputs_fn`. If the model returned a cache, only the ids that
    are not cached are passed on.

    Args:
        input_ids: `[B, L]`, prompt and completion so far.
        model_kwargs: passed on. The cache is `past`, or else `past_key_values` or `cache` (transformers
            5.24); `position_ids` default to those of `attention_mask`.

    Returns:
        A new dict with `input_ids`.
    """
    past, name = model_kwargs.pop("past", None), _cache_name(model_kwargs)
    cache = model_kwargs.pop(name, None) if past is None else past
    model_kwargs.pop(name, None)
    mask, num_cached = model_kwargs.get("attention_mask"), 0
    if hasattr(cache, "get_seq_length"):
        num_cached = int(cache.get_seq_length())
    elif cache:  # (K, V) pairs [B, heads, length, width]
        num_cached = int(cache[0][0].shape[-2])
    inputs = {**model_kwargs, "input_ids": input_ids[:, num_cached:]}
    if cache is not None:  # the model may not accept one
        inputs[name] = cache
    types = model_kwargs.get("token_type_ids")
    if isinstance(types, Tensor):
        inputs["token_type_ids"] = types[:, num_cached:]
    if isinstance(mask, Tensor) and mask.dim() == 2 and inputs.get("position_ids") is None:
        positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
        inputs["position_ids"] = positions[:, num_cached:]
    return inputs


def _cache_name(values: Any) -> str:
    """Return the name of the cache among a model's arguments or outputs."""
    return "past_key_values" if field_of(values, "cache") is None else "cache"


def update_model_kwargs_fn(
    outputs: Any, new_mask: Any = None, **model_kwargs: Any
) -> dict[str, Any]:
    """Return the `model_kwargs` of the next step.

    Usable as `generate`'s `update_model_kwargs_fn`, called as `f(outputs, model_kwargs)`.

    Args:
        outputs: the model's output; its `past_key_values` or `cache` is kept (None if it has none).
        new_mask: `[B, 1]`, the attention mask of the new token; or the `model_kwargs` as a dict, which
            means a mask of ones.
        model_kwargs: of the step just made.

    Returns:
        A new dict; `attention_mask` and `token_type_ids`, if present, are one column wider.
    """
    if isinstance(new_mask, Mapping):
        model_kwargs, new_mask = {**new_mask, **model_kwargs}, None
    name = _cache_name(outputs)
    updated = {**model_kwargs, name: field_of(outputs, name)}
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
    """Return transformers' processors for temperature, top-k and top-p, in this order, if enabled.

    For custom loops; `generate` itself uses Verbatim's sampler.

    Raises:
        ValueError: a number out of range.
    """
    from transformers import (
        LogitsProcessorList,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    processors = LogitsProcessorList()
    if temperature is not None and temperature != 1.0:
        processors.append(TemperatureLogitsWarper(float(temperature)))
    if top_k is not None and top_k not in (0, -1):
        processors.append(TopKLogitsWarper(top_k))
    if top_p is not None and top_p != 1.0:
        processors.append(TopPLogitsWarper(float(top_p)))
    return processors


def _is_sequence_finished(unfinished_sequences: Tensor) -> bool:
    """Return whether every row of every rank has ended.

    Args:
        unfinished_sequences: `[B]`, 0 for finished rows; not modified.
    """
    if not isinstance(unfinished_sequences, Tensor):
        raise InvalidRequest(f"unfinished_sequences={unfinished_sequences!r}: must be a tensor")
    left = unfinished_sequences.count_nonzero()
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(left)
    return int(left) == 0
