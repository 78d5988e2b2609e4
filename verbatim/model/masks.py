"""What a model's attention masks say, read once when the model is opened.

A flat batch carries no masks: the attention contract knows causality and a window. What the model
itself believes stands in the masks that it asks transformers to make, so during the first look we make
them, and read each one's rule at far positions: a window longer than any prompt of the look shows, and
so do chunks, prefixes and whatever else is neither. The mask then travels to the attention call, where
a layer's own settings are held against it; one that the model changed on the way has lost its note.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.errors import UnsupportedModel
from verbatim.model.context import flat_attention
from verbatim.model.limits import max_length_of

LOOK = "verbatim_look"  # the implementation's name in transformers' registries during the look
LATER = -1  # the "window" of a mask that shows later tokens

_FARTHEST = (
    1 << 22
)  # positions to which rules are read, where the model has no limit or a larger one

# Operations after which a mask still says the same.
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
    """A mask with the window it stands for, until something changes it.

    Attributes:
        window: 0 for a causal mask, LATER for one that shows later tokens, None for another one.
        reach: positions to which that is known.
    """

    window: int | None
    reach: int

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        source = args[0] if args else None
        if isinstance(result, NotedMask):  # changed in place
            result.window = None
        elif isinstance(source, NotedMask) and func in _HARMLESS and isinstance(result, Tensor):
            return _noted(result, source.window, source.reach)
        return result


def _noted(mask: Tensor, window: int | None, reach: int) -> NotedMask:
    noted = mask.as_subclass(NotedMask)
    noted.window, noted.reach = window, reach
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
    """transformers' signature of a function that makes masks; ours is all zeros, with a note."""
    length = max_length_of(config)[0] if config is not None else None
    reach = min(length or _FARTHEST, _FARTHEST)
    padded = attention_mask is not None and not bool(attention_mask.all())
    rule = None if padded else window_of(mask_function, reach, device)
    zeros = torch.zeros(batch_size, 1, q_length, kv_length, dtype=dtype, device=device)
    return _noted(zeros, rule, reach)


def window_of(
    mask_function: Callable[..., Any], length: int, device: torch.device | str = "cpu"
) -> int | None:
    """The window of a rule `(batch, head, query, key) -> visible`, read at positions below `length`.

    Returns:
        0 where every query sees all keys up to itself, w where it sees the last w of them (itself
        included), LATER where it sees the next one, None where the rule is another one or can't be read.
    """
    window = 0
    zero = torch.zeros((), dtype=torch.int64, device=device)
    # Neighbours tell a window from chunks: a window is equally wide at both.
    queries = {length - 1, length - 2, length // 2, length // 3, 1}
    for query in sorted((q for q in queries if q > 0), reverse=True):
        keys = torch.arange(query + 2, device=device)
        try:
            rule = mask_function(zero, zero, zero + query, keys)
            visible = torch.as_tensor(rule, device=device).expand(query + 2)
        except Exception:  # it looks things up by position, in whatever way its author liked
            return None
        if bool(visible[query + 1]):
            return LATER
        wide = int(visible.sum())
        if not 0 < wide <= query + 1 or not bool(visible[query + 1 - wide : query + 1].all()):
            return None
        if not window and wide <= query:
            window = wide
            if query < length - 1:  # all was visible farther on
                return None
        if wide != (min(window, query + 1) if window else query + 1):
            return None
    return window


def noted_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`flat_attention` for the look: the mask must say what the layer's own settings say."""
    name = type(module).__name__
    if attention_mask is None:
        raise UnsupportedModel(f"{name} attends without a mask, so to later tokens as well")
    window = getattr(attention_mask, "window", None)
    if window == LATER:
        raise UnsupportedModel(f"{name} attends to later tokens")
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
    """Put the look's masks and attention into transformers' registries; harmless when repeated."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionMaskInterface.register(LOOK, noted_mask)
    AttentionInterface.register(LOOK, noted_attention)
