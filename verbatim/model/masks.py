"""Infers the rules of a model's attention masks when it is opened.

Flat batches have no masks: attention is causal, with an optional window or chunks. A model requests its masks
from transformers. Inspection provides them, and evaluates the rule of each at distant positions, which
reveals windows longer than the prompt, chunks and prefixes. In the attention call, the mask is compared with
the layer's settings. A mask that the model modifies loses its rule.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.errors import UnsupportedModel
from verbatim.model.context import (
    IMPLEMENTATION,
    chunk_of_layer,
    flat_attention,
    replace_function,
    replaces,
)
from verbatim.model.experts import flat_experts
from verbatim.model.limits import max_length_of

INSPECTION = "verbatim_look"  # name in transformers' registries during inspection
NOT_CAUSAL = -1  # the "window" of a mask that shows later tokens

# Rules are evaluated up to this position, if the model has no limit or a larger one.
_MAX_REACH = 1 << 22

# Operations that do not change a mask's rule.
_RULE_PRESERVING = frozenset(
    getattr(Tensor, name)
    for name in "__getitem__ to type float contiguous clone detach expand unsqueeze squeeze".split()
)


Rule = tuple[int | None, int]  # a window and a chunk, as `mask_rule` returns them


class RecordedMask(Tensor):
    """A mask that carries its rule until it is modified.

    Attributes:
        rule: the window and the chunk, as returned by `mask_rule`.
        reach: number of positions for which the rule is known.
    """

    rule: Rule
    reach: int

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        source = args[0] if args else None
        if isinstance(result, RecordedMask):  # modified in place
            result.rule = None, 0
        elif (
            isinstance(source, RecordedMask)
            and func in _RULE_PRESERVING
            and isinstance(result, Tensor)
        ):
            return _recorded(result, source.rule, source.reach)
        return result


def _recorded(mask: Tensor, rule: Rule, reach: int) -> RecordedMask:
    mask_with_rule = mask.as_subclass(RecordedMask)
    mask_with_rule.rule, mask_with_rule.reach = rule, reach
    return mask_with_rule


def recorded_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    config: Any = None,
    attention_mask: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **_: Any,
) -> RecordedMask:
    """Return an all-zero mask with its rule; has transformers' signature for mask functions."""
    length = max_length_of(config)[0] if config is not None else None
    reach = min(length or _MAX_REACH, _MAX_REACH)
    padded = attention_mask is not None and not bool(attention_mask.all())
    rule = (None, 0) if padded else mask_rule(mask_function, reach, device)
    zeros = torch.zeros(batch_size, 1, q_length, kv_length, dtype=dtype, device=device)
    return _recorded(zeros, rule, reach)


def mask_rule(
    mask_function: Callable[..., Any], length: int, device: torch.device | str = "cpu"
) -> Rule:
    """Return the window and the chunk of a rule `(batch, head, query, key) -> visible`.

    The rule is evaluated at a few positions below `length`.

    Returns:
        (0, 0) if every query sees all keys up to itself; (w, 0) if it sees the last w of them, including
        itself; (NOT_CAUSAL, 0) if it sees the next one; (None, c) if a query at p sees the keys from
        p // c * c on; (None, 0) for other rules, or if evaluation fails.
    """

    def widths(*more: int) -> dict[int, int | None]:
        # Adjacent queries distinguish windows from chunks: a window has the same width at both.
        queries = {length - 1, length - 2, length // 2, length // 3, *more}
        return {q: _width_at(mask_function, q, device) for q in queries if q >= 0}

    width_of = widths(1)
    if None not in width_of.values() and NOT_CAUSAL in width_of.values():
        return NOT_CAUSAL, 0
    last_width = width_of[length - 1]
    window = 0 if last_width is None or last_width == length else last_width
    if all(width == min(window or q + 1, q + 1) for q, width in width_of.items()):
        return window, 0
    # The query just before the last chunk is the last one of its chunk, and sees all of it.
    query = length - (last_width or length) - 1
    chunk = _width_at(mask_function, query, device) if 0 <= query < length - 1 else None
    if chunk is None or chunk <= 0:
        return None, 0
    fits = all(width == q % chunk + 1 for q, width in widths(chunk, chunk - 1, 0).items())
    return None, chunk if fits else 0


def _width_at(
    mask_function: Callable[..., Any], query: int, device: torch.device | str
) -> int | None:
    """Return the number of keys up to itself that a query sees; NOT_CAUSAL; or None if they have gaps."""
    zero = torch.zeros((), dtype=torch.int64, device=device)
    keys = torch.arange(query + 2, device=device)
    try:
        rule = mask_function(zero, zero, zero + query, keys)
        visible = torch.as_tensor(rule, device=device).expand(query + 2)
    except Exception:  # rules are arbitrary code
        return None
    if bool(visible[query + 1]):
        return NOT_CAUSAL
    wide = int(visible.sum())
    if not 0 < wide <= query + 1 or not bool(visible[query + 1 - wide : query + 1].all()):
        return None
    return wide


def checked_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Run `flat_attention` for inspection, if the mask agrees with the layer's settings."""
    name = type(module).__name__
    if attention_mask is None:
        raise UnsupportedModel(f"{name} attends without a mask, so to later tokens as well")
    window, chunk = getattr(attention_mask, "rule", (None, 0))
    if window == NOT_CAUSAL:
        raise UnsupportedModel(f"{name} attends to later tokens")
    layer_chunk = chunk_of_layer(module)
    # A mask that covers less than a chunk is causal.
    if chunk != layer_chunk and not (window == 0 and layer_chunk >= attention_mask.reach):
        raise UnsupportedModel(
            f"{name} attends in chunks of {layer_chunk}, while its mask has {chunk or 'none'}"
        )
    if chunk:
        window = 0
    if window is None:
        raise UnsupportedModel(
            f"{name} attends by a mask that is neither causal nor a sliding window, and exists only "
            "as a mask"
        )
    if (sliding_window or 0) != window and not (
        window == 0 and sliding_window >= attention_mask.reach
    ):
        raise UnsupportedModel(
            f"{name} attends with a sliding window of {sliding_window}, while its mask has "
            f"{window or 'none'}"
        )
    return flat_attention(module, query, key, value, None, sliding_window=window, **kwargs)


def attends(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that `replaces` forwards of attention and indexers, which get no other mask.

    They are causal, with the module's window or none. Masks are only passed during inspection.
    """

    def register(forward: Callable[..., Any]) -> Callable[..., Any]:
        replaces(*names)(partial(_attend_causally, forward))
        return forward

    return register


def _attend_causally(
    forward: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    windows = (0, getattr(module, "sliding_window", None))
    for value in (*args, *kwargs.values()):
        if isinstance(value, RecordedMask) and value.rule[0] not in windows:
            problem = (
                "attends to later tokens" if value.rule[0] == NOT_CAUSAL else "has another mask"
            )
            raise UnsupportedModel(f"{type(module).__name__} {problem}")
    return forward(module, *args, **kwargs)


def register() -> None:
    """Register Verbatim's attention and experts, and those for inspection, in transformers; idempotent."""
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    def blockwise_overlay(block_sequence_ids: Tensor) -> Callable[..., Any]:
        """Return the rule that lets tokens of one block see each other; all ids are -1 in text."""
        if bool((block_sequence_ids < 0).all()):
            return lambda batch, head, query, key: query < 0
        overlay: Callable[..., Any] = blocks_of(block_sequence_ids)
        return overlay

    blocks_of: Any = getattr(masking_utils, "blockwise_overlay", None)
    if blocks_of is not None:
        replace_function(masking_utils, "blockwise_overlay", blockwise_overlay)

    AttentionInterface.register(IMPLEMENTATION, flat_attention)
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, flat_experts)
    AttentionMaskInterface.register(INSPECTION, recorded_mask)
    AttentionInterface.register(INSPECTION, checked_attention)
