"""The rules of a model's attention masks, read once when the model is opened.

Flat batches have no masks: attention is causal, with an optional window or chunks. The model's intention is
in the masks that it requests from transformers, so inspection provides these masks, and evaluates each one's
rule at far positions, which reveals windows longer than the prompt, chunks and prefixes. The mask is then
passed to the attention call and compared with the layer's settings; a mask modified on the way loses its
rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.errors import UnsupportedModel
from verbatim.model.context import chunk_of_layer, flat_attention
from verbatim.model.limits import max_length_of

LOOK = "verbatim_look"  # name in transformers' registries during inspection
LATER = -1  # the "window" of a mask with later tokens

# Rules are evaluated up to this position, if the model has no limit or a larger one.
_FARTHEST = 1 << 22

# Operations that do not change a mask's rule.
_HARMLESS = frozenset(
    getattr(Tensor, name)
    for name in "__getitem__ to type float contiguous clone detach expand unsqueeze squeeze".split()
)


class NotedMask(Tensor):
    """A mask with its window or chunk, until it is modified.

    Attributes:
        window: 0 for a causal mask, LATER for one with later tokens, None for others.
        chunk_size: where `window` is None, the chunk of `mask_rule`; 0 for another rule.
        reach: number of positions for which the rule is known.
    """

    window: int | None
    chunk_size: int
    reach: int

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        source = args[0] if args else None
        if isinstance(result, NotedMask):  # changed in place
            result.window, result.chunk_size = None, 0
        elif isinstance(source, NotedMask) and func in _HARMLESS and isinstance(result, Tensor):
            return _noted(result, source.window, source.chunk_size, source.reach)
        return result


def _noted(mask: Tensor, window: int | None, chunk: int, reach: int) -> NotedMask:
    noted = mask.as_subclass(NotedMask)
    noted.window, noted.chunk_size, noted.reach = window, chunk, reach
    return noted


def noted_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    config: Any = None,
    attention_mask: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **_: Any,
) -> NotedMask:
    """Return an all-zero mask with its window, with transformers' signature for mask functions."""
    length = max_length_of(config)[0] if config is not None else None
    reach = min(length or _FARTHEST, _FARTHEST)
    padded = attention_mask is not None and not bool(attention_mask.all())
    window, chunk = (None, 0) if padded else mask_rule(mask_function, reach, device)
    zeros = torch.zeros(batch_size, 1, q_length, kv_length, dtype=dtype, device=device)
    return _noted(zeros, window, chunk, reach)


def mask_rule(
    mask_function: Callable[..., Any], length: int, device: torch.device | str = "cpu"
) -> tuple[int | None, int]:
    """Return the window and the chunk of a rule `(batch, head, query, key) -> visible`.

    The rule is evaluated at a few positions below `length`.

    Returns:
        (0, 0) if every query sees all keys up to itself; (w, 0) if it sees the last w of them, itself
        included; (LATER, 0) if it sees the next one; (None, c) if a query at p sees the keys from
        p // c * c on; (None, 0) for another rule, or one that can't be evaluated.
    """

    def widths(*more: int) -> dict[int, int | None]:
        # Adjacent queries distinguish windows from chunks: a window is equally wide at both.
        queries = {length - 1, length - 2, length // 2, length // 3, *more}
        return {q: _width_at(mask_function, q, device) for q in queries if q >= 0}

    found = widths(1)
    if None not in found.values() and LATER in found.values():
        return LATER, 0
    far = found[length - 1]
    window = 0 if far is None or far == length else far
    if all(wide == min(window or q + 1, q + 1) for q, wide in found.items()):
        return window, 0
    # The query before the last chunk is the last one of a chunk, and sees all of it.
    before = length - (far or length) - 1
    chunk = _width_at(mask_function, before, device) if 0 <= before < length - 1 else None
    if chunk is None or chunk <= 0:
        return None, 0
    fits = all(wide == q % chunk + 1 for q, wide in widths(chunk, chunk - 1, 0).items())
    return None, chunk if fits else 0


def _width_at(
    mask_function: Callable[..., Any], query: int, device: torch.device | str
) -> int | None:
    """Return how many keys up to itself a query sees, LATER, or None where a rule skips some of them."""
    zero = torch.zeros((), dtype=torch.int64, device=device)
    keys = torch.arange(query + 2, device=device)
    try:
        rule = mask_function(zero, zero, zero + query, keys)
        visible = torch.as_tensor(rule, device=device).expand(query + 2)
    except Exception:  # rules are arbitrary code
        return None
    if bool(visible[query + 1]):
        return LATER
    wide = int(visible.sum())
    if not 0 < wide <= query + 1 or not bool(visible[query + 1 - wide : query + 1].all()):
        return None
    return wide


def noted_attention(
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
    window = getattr(attention_mask, "window", None)
    if window == LATER:
        raise UnsupportedModel(f"{name} attends to later tokens")
    chunk, own_chunk = getattr(attention_mask, "chunk_size", 0), chunk_of_layer(module)
    # A mask over fewer positions than a chunk has is causal.
    if chunk != own_chunk and not (window == 0 and own_chunk >= attention_mask.reach):
        raise UnsupportedModel(
            f"{name} attends in chunks of {own_chunk}, while its mask has {chunk or 'none'}"
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


def register() -> None:
    """Register the masks and attention of inspection in transformers; idempotent."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionMaskInterface.register(LOOK, noted_mask)
    AttentionInterface.register(LOOK, noted_attention)
