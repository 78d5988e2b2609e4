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
    {
        Tensor.__getitem__,
        Tensor.to,
        Tensor.type,
        Tensor.float,
        Tensor.contiguous,
        Tensor.clone,
        Tensor.detach,
        Tensor.expand,
        Tensor.unsqueeze,
        Tensor.squeeze,
    }
)


class NotedMask(Tensor):
    """A mask with its window or chunk, until it is modified.

    Attributes:
        window: 0 for a causal mask, LATER for one with later tokens, None for others.
        chunk_size: where `window` is None, the chunk of `chunk_of`; 0 for another rule.
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
    window = None if padded else window_of(mask_function, reach, device)
    chunk = 0 if padded or window is not None else chunk_of(mask_function, reach, device)
    zeros = torch.zeros(batch_size, 1, q_length, kv_length, dtype=dtype, device=device)
    return _noted(zeros, window, chunk, reach)


def window_of(
    mask_function: Callable[..., Any], length: int, device: torch.device | str = "cpu"
) -> int | None:
    """Return the window of a rule `(batch, head, query, key) -> visible`, evaluated below `length`.

    Returns:
        0 if every query sees all keys up to itself, w if it sees the last w of them (itself included),
        LATER if it sees the next one, None for another rule or one that can't be evaluated.
    """
    # Adjacent queries distinguish windows from chunks: a window is equally wide at both.
    queries = {length - 1, length - 2, length // 2, length // 3, 1}
    widths = {q: _width_at(mask_function, q, device) for q in queries if q > 0}
    if None not in widths.values() and LATER in widths.values():
        return LATER
    far = widths.get(length - 1)
    window = 0 if far is None or far == length else far
    fits = all(wide == min(window or q + 1, q + 1) for q, wide in widths.items())
    return window if fits else None


def chunk_of(
    mask_function: Callable[..., Any], length: int, device: torch.device | str = "cpu"
) -> int:
    """Return the chunk of a rule as for `window_of`, evaluated below `length`.

    Returns:
        c if a query at p sees the keys from p // c * c up to itself; 0 for another rule.
    """
    # The query before the last chunk is the last one of a chunk, and sees all of it.
    wide = _width_at(mask_function, length - 1, device) or length
    chunk = _width_at(mask_function, length - wide - 1, device) if 0 < wide < length else None
    if chunk is None or chunk <= 0:
        return 0
    queries = {length - 1, length - 2, length // 2, length // 3, chunk, chunk - 1, 0}
    widths = {q: _width_at(mask_function, q, device) for q in queries}
    return chunk if all(wide == q % chunk + 1 for q, wide in widths.items()) else 0


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
