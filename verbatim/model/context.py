"""What a forward in progress knows, and the attention that transformers calls back into it.

Attention is one contract: a transformers model asks `AttentionInterface` for the function named
`IMPLEMENTATION`, and finds `flat_attention`, which hands the flat queries, keys and values of this
call to the pass that is active on this thread. Nothing is active outside of our own forwards, so a
trainer's forward in the same process never comes here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn

from verbatim.errors import UnsupportedModel
from verbatim.kernels.options import AttentionOptions

IMPLEMENTATION = "verbatim"  # our name in transformers' registries of attention and experts

# What models hand to every attention function without meaning attention by it.
_HARMLESS = frozenset(
    {
        "cache_position",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


class Pass(Protocol):
    """One walk through a model's modules."""

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Store `k` `[T, Hkv, Dk]` and `v` `[T, Hkv, Dv]`, attend with `q` `[T, H, Dk]`: `[T, H, Dv]`."""
        ...


_thread = threading.local()


def active_pass() -> Pass | None:
    """The pass that runs on this thread, or None where a model is used by somebody else."""
    return getattr(_thread, "active", None)


@contextmanager
def activate(walk: Pass) -> Iterator[None]:
    """Make `walk` the pass of this thread for the length of the block."""
    before = active_pass()
    _thread.active = walk
    try:
        yield
    finally:
        _thread.active = before


def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    """Attention of the active pass: `[T, H, Dk]`, `[T, Hkv, Dk]`, `[T, Hkv, Dv]` to `[T, H, Dv]`."""
    walk = active_pass()
    if walk is None:
        raise RuntimeError("a module is set to Verbatim's attention outside of Verbatim's forward")
    return walk.attend(module, q, k, v, options)


def route(experts: nn.Module, index: Tensor) -> None:
    """Tell the active pass that `experts` serve `index` `[T, k]`."""
    note = getattr(active_pass(), "route", None)  # a pass that does not care has none
    if note is not None:
        note(experts, index)


def flat_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature over flat rows of tokens: one row, but in the look.

    Args:
        query, key, value: `[B, H, T, Dk]`, `[B, Hkv, T, Dk]`, `[B, Hkv, T, Dv]`.
        s_aux: attention sinks, `[H]`.

    Returns:
        The output `[B, T, H, Dv]`, and None for the weights.

    Raises:
        UnsupportedModel: a mask, a bias, bidirectional attention or an argument that is not known,
            which flat batches can't carry.
    """
    name = type(module).__name__
    if attention_mask is not None:
        raise UnsupportedModel(f"{name} builds an attention mask of its own")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModel(f"{name} attends to later tokens")
    for key_name, extra in kwargs.items():
        if extra is not None and extra is not False and key_name not in _HARMLESS:
            raise UnsupportedModel(
                f"{name} hands its attention {key_name!r}, which is not known here"
            )
    options = AttentionOptions(
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=int(sliding_window or 0),
        softcap=float(softcap or 0.0),
        sinks=None if s_aux is None else s_aux.detach().float(),
    )
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    out = attend(module, q, k, v, options)
    return out.view(query.shape[0], query.shape[2], *out.shape[1:]), None
