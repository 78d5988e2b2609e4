"""The forward context, and the attention function that transformers calls.

A transformers model gets the function named `IMPLEMENTATION` from `AttentionInterface`. It is
`flat_attention`, which passes the flat queries, keys and values to the forward context of this thread.
There is none outside of the engine's forwards, so a trainer's forward in the same process does not use it.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn

from verbatim import kernels
from verbatim.errors import UnsupportedModel
from verbatim.kernels.options import AnyOptions, AttentionOptions
from verbatim.kv.states import StateShape, Update

IMPLEMENTATION = "verbatim"  # name in transformers' registries of attention and experts

# Arguments that models pass to every attention function, without effect on attention.
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


class ForwardContext(Protocol):
    """The context of one forward.

    Attributes:
        positions: `[B, T]` of its rows, for models that count positions themselves.
    """

    @property
    def positions(self) -> Tensor: ...

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: AnyOptions
    ) -> Tensor:
        """Store `k` `[T, Hkv, Dk]` and `v` `[T, Hkv, Dv]`, attend with `q` `[T, H, Dk]`: `[T, H, Dv]`.

        With `IndexOptions`, choose the keys that rows attend to: `[T, G, k]`, by `choose_keys`.
        """
        ...

    def update_state(self, shape: StateShape, update: Update) -> Tensor:
        """Run the next recurrent operation on its state; return its outputs."""
        ...


_thread = threading.local()


def active_context() -> ForwardContext | None:
    """Return the forward context of this thread; None outside of the engine's forwards."""
    return getattr(_thread, "active", None)


@contextmanager
def activate(context: ForwardContext) -> Iterator[None]:
    """Make `context` the forward context of this thread, within a `with` block."""
    before = active_context()
    _thread.active = context
    try:
        yield
    finally:
        _thread.active = before


def in_forwards(ours: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `ours` within the engine's forwards, and `original` outside of them."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return (original if active_context() is None else ours)(*args, **kwargs)

    return call


def replace_function(owner: Any, name: str, ours: Callable[..., Any]) -> None:
    """Replace a function of a module or a class within the engine's forwards; do nothing the second time.

    Args:
        ours: is called as the original, which is its attribute `verbatim_original` then.
    """
    kept = inspect.getattr_static(owner, name)
    original = getattr(owner, name)
    if hasattr(original, "verbatim_original"):
        return

    call = functools.wraps(original)(in_forwards(ours, original))
    call.verbatim_original = original  # type: ignore[attr-defined]
    setattr(owner, name, staticmethod(call) if isinstance(kept, staticmethod) else call)


@kernels.without_overrides
def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: AnyOptions) -> Tensor:
    """Attend in the active context: `[T, H, Dk]`, `[T, Hkv, Dk]`, `[T, Hkv, Dv]` to `[T, H, Dv]`."""
    context = active_context()
    if context is None:
        raise RuntimeError("a module is set to Verbatim's attention outside of Verbatim's forward")
    return context.attend(module, q, k, v, options)


def route(experts: nn.Module, index: Tensor) -> None:
    """Record in the active context that tokens use the experts `index` `[T, k]`."""
    note = getattr(active_context(), "route", None)  # a context without routing has none
    if note is not None:
        note(experts, index)


def chunk_of_layer(module: Any) -> int:
    """Return the size of the chunks within which a layer attends; 0: everywhere. Layers do not pass it."""
    config: Any = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None) or ()
    if "chunked_attention" not in kinds:
        return 0
    layer = getattr(module, "layer_idx", None)
    if layer is None or layer >= len(kinds) or kinds[layer] != "chunked_attention":
        return 0
    return int(config.attention_chunk_size)


@kernels.without_overrides
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
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend over flat rows of tokens, with transformers' signature; B is 1 except in inspection.

    Args:
        query, key, value: `[B, H, T, Dk]`, `[B, Hkv, T, Dk]`, `[B, Hkv, T, Dv]`.
        s_aux: attention sinks, `[H]`.
        indices: the keys that an indexer has chosen for each row, `[B, T, k]`.
        block_indices: the same for each group of heads, `[B, T, G, k]`, which are keys here.

    Returns:
        The output `[B, T, H, Dv]`, and None for the weights.

    Raises:
        UnsupportedModel: a mask, a bias, bidirectional attention or an unknown argument, which flat batches
            do not support.
    """
    name = type(module).__name__
    chosen = block_indices
    if indices is not None:
        chosen = indices[:, :, None]
    if attention_mask is not None and chosen is None:  # an indexer has seen the mask
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
        chunk=chunk_of_layer(module),
        softcap=float(softcap or 0.0),
        sinks=None if s_aux is None else s_aux.detach().float(),
        chosen=None if chosen is None else chosen.flatten(0, 1),
    )
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    out = attend(module, q, k, v, options)
    return out.view(query.shape[0], query.shape[2], *out.shape[1:]), None
