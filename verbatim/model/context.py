"""The forward context, and the attention function that transformers calls.

`flat_attention` is registered in transformers' `AttentionInterface` as `IMPLEMENTATION`. It passes queries,
keys and values to the thread's forward context, which is active only during the engine's forwards, so a
trainer's forward in the same process does not use it.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor, nn

from verbatim import kernels
from verbatim.errors import NotSupported, UnsupportedModel
from verbatim.kernels.options import AnyOptions, AttentionOptions
from verbatim.kv.states import StateShape, Update
from verbatim.model import latent

IMPLEMENTATION = "verbatim"  # name in transformers' registries of attention and experts

# Arguments that models pass to attention functions, although they have no effect on attention.
_IGNORED_ARGUMENTS = frozenset(
    "cache_position logits_to_keep output_attentions output_hidden_states output_router_logits "
    "position_ids return_dict use_cache".split()
)


class ForwardContext(Protocol):
    """The context of one forward.

    Attributes:
        positions: positions of the rows, `[B, T]`, for models that otherwise compute them themselves.
    """

    @property
    def positions(self) -> Tensor: ...

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: AnyOptions
    ) -> Tensor:
        """Store `k` `[T, Hkv, Dk]` and `v` `[T, Hkv, Dv]`; attend with `q` `[T, H, Dk]`: `[T, H, Dv]`.

        With `IndexOptions`, store `k` and return the chosen keys, `[T, G, k]`, as `choose_keys` does.
        """
        ...

    def update_state(self, shape: StateShape, update: Update) -> Tensor:
        """Run the next recurrent operation on its state; return its outputs."""
        ...

    def stores_latent(self, module: nn.Module) -> bool:
        """Return whether an attention module's latent vectors are stored, not its keys and values."""
        ...


_thread = threading.local()


def active_context() -> ForwardContext | None:
    """Return this thread's forward context; None outside the engine's forwards."""
    return getattr(_thread, "active", None)


@contextmanager
def activate(context: ForwardContext) -> Iterator[None]:
    """Make `context` this thread's forward context within a `with` block."""
    before = active_context()
    _thread.active = context
    try:
        yield
    finally:
        _thread.active = before


def in_forwards(
    replacement: Callable[..., Any], original: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function that calls `replacement` in the engine's forwards, and `original` elsewhere."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return (original if active_context() is None else replacement)(*args, **kwargs)

    call.replaces = original  # type: ignore[attr-defined]
    return call


_F = TypeVar("_F", bound=Callable[..., Any])

# Replacements for forwards, by the name of a transformers class; called with the module and the arguments.
# Those of methods have the name of the class and the method.
FORWARDS: dict[str, Callable[..., Any]] = {}
RECURRENT: set[str] = set()  # those of models with recurrent states


def replaces(*names: str, recurrent: bool = False) -> Callable[[_F], _F]:
    """Return a decorator that registers a function as the forward of transformers classes.

    `recurrent`: whether models with these classes have recurrent states.
    """

    def register(forward: _F) -> _F:
        FORWARDS.update(dict.fromkeys(names, forward))
        RECURRENT.update(names if recurrent else ())
        return forward

    return register


def replace_function(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Patch a function of a Python module or class, for calls within the engine's forwards; idempotent.

    Args:
        replacement: function with the original's signature. The original remains as `verbatim_original`.
    """
    attribute = inspect.getattr_static(owner, name)
    original = getattr(owner, name)
    if hasattr(original, "verbatim_original"):
        return

    call = functools.wraps(original)(in_forwards(replacement, original))
    call.verbatim_original = original  # type: ignore[attr-defined]
    setattr(owner, name, staticmethod(call) if isinstance(attribute, staticmethod) else call)


@kernels.without_overrides
def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: AnyOptions) -> Tensor:
    """Attend in the active context: `[T, H, Dk]`, `[T, Hkv, Dk]`, `[T, Hkv, Dv]` to `[T, H, Dv]`.

    If `v` is `k`, they are latent vectors, which the context `stores_latent` (`adapters._keep_latent`).
    """
    context = active_context()
    if context is None:
        raise RuntimeError("Verbatim's attention was called outside of a Verbatim forward")
    if v is not k:
        return context.attend(module, q, k, v, options)
    projection = latent.UpProjection.of(module, context)
    out = context.attend(module, projection.absorb_keys(q), k, v, options)
    return projection.expand_values(out)


def _is_latent(module: nn.Module, key: Tensor, value: Tensor) -> bool:
    context = active_context()
    return value is key and context is not None and context.stores_latent(module)


def route(experts: nn.Module, index: Tensor) -> None:
    """Report the experts `index` `[T, k]` of each token to the active context."""
    note = getattr(active_context(), "route", None)  # optional in a context
    if note is not None:
        note(experts, index)


def chunk_of_layer(module: Any) -> int:
    """Return a layer's attention chunk size, or 0; transformers does not pass it to attention functions."""
    config: Any = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None) or ()
    if "chunked_attention" not in kinds:
        return 0
    layer = getattr(module, "layer_idx", None)
    if layer is None or layer >= len(kinds) or kinds[layer] != "chunked_attention":
        return 0
    return int(config.attention_chunk_size)


class DistanceBias(NamedTuple):
    """Biases by the distance of a key, `[B, T, H, E]`, as in `AttentionOptions.bias`."""

    values: Tensor


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
    sinks: Tensor | None = None,
    position_bias: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend over flat rows of tokens, with transformers' signature; B is 1 except in inspection.

    Args:
        query, key, value: `[B, H, T, Dk]`, `[B, Hkv, T, Dk]`, `[B, Hkv, T, Dv]`.
        s_aux: attention sinks, `[H]`.
        indices: positions of the keys that an indexer has chosen for each row, `[B, T, k]`.
        block_indices: the same for each group of heads, `[B, T, G, k]`; positions of keys, not of blocks.
        sinks: attention sinks of each row, `[B, H, T, 1]`.
        position_bias: a `DistanceBias`.

    Returns:
        The output `[B, T, H, Dv]`, and None in place of attention weights.

    Raises:
        UnsupportedModel: the module uses a mask, a bias, bidirectional attention or an unknown argument,
            which flat batches do not support.
    """
    name = type(module).__name__
    chosen = block_indices
    if indices is not None:
        chosen = indices[:, :, None]
    if attention_mask is not None and chosen is None:  # indexers have already applied the mask
        raise UnsupportedModel(f"{name} builds an attention mask of its own")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModel(f"{name} attends to later tokens")
    if not isinstance(position_bias, DistanceBias):
        kwargs["position_bias"], position_bias = position_bias, None
    for key_name, extra in kwargs.items():
        if extra is not None and extra is not False and key_name not in _IGNORED_ARGUMENTS:
            raise UnsupportedModel(
                f"{name} passes {key_name!r} to attention, which is not supported"
            )
    if sinks is not None:
        if sinks.dim() != 4:
            raise UnsupportedModel(f"{name} passes sinks of shape {list(sinks.shape)} to attention")
        s_aux = sinks[..., 0].transpose(1, 2).flatten(0, 1).contiguous()
    options = AttentionOptions(
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=int(sliding_window or 0),
        chunk=chunk_of_layer(module),
        softcap=float(softcap or 0.0),
        sinks=None if s_aux is None else s_aux.detach().float(),
        bias=None if position_bias is None else position_bias.values.flatten(0, 1),
        chosen=None if chosen is None else chosen.flatten(0, 1),
    )
    q, k = (x.transpose(1, 2).flatten(0, 1) for x in (query, key))
    v = k if _is_latent(module, key, value) else value.transpose(1, 2).flatten(0, 1)
    out = attend(module, q, k, v, options)
    return out.view(query.shape[0], query.shape[2], *out.shape[1:]), None


# ---- recording of hidden states: inputs of the LM head for rows with logits, or the body's output for all


def head_of(inner: Any) -> nn.Module | None:
    """Return the LM head of an unwrapped transformers model, or None."""
    try:
        head = inner.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return head if isinstance(head, nn.Module) else None


Seen = list[list[Any]]  # the values recorded in each forward context


@contextmanager
def record_values(
    module: nn.Module | None, contexts: Sequence[ForwardContext], *, outputs: bool = False
) -> Iterator[Seen]:
    """Record the inputs of an LM head, or the outputs of a body, in each of `contexts`, by a temporary hook.

    The hook runs last, after the owner's hooks.

    Args:
        module: the LM head; None: record nothing.
        outputs: whether `module` is a model's body (its `get_decoder()`), and its output is recorded.
    """

    def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *result: Any) -> None:
        if result:
            value = result[0][0] if isinstance(result[0], tuple) else result[0].last_hidden_state
        else:
            value = args[0] if args else next(iter(kwargs.values()), None)
        active = active_context()
        for context, values in zip(contexts, seen, strict=True):
            if context is active:
                values.append(value)

    seen: Seen = [[] for _ in contexts]
    if module is None:
        yield seen
        return
    register: Any = module.register_forward_hook if outputs else module.register_forward_pre_hook
    handle = register(record, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def why_no_hidden(head: nn.Module | None, seen: list[Any], num_rows: int) -> str | None:
    """Return why `seen`, the inputs of `head`, are not hidden states of `num_rows` rows; None if they are."""
    if head is None:
        return "it has no LM head"
    if len(seen) != 1:
        return f"its LM head runs {len(seen)} times in a forward"
    if not isinstance(seen[0], Tensor) or seen[0].shape[:-1].numel() != num_rows:
        return "its LM head does not receive one hidden state per token"
    return None


def hidden_rows(seen: list[Any], logit_rows: Tensor) -> Tensor:
    """Return a copy of the hidden states `[R, H]` of `logit_rows` `[R]`."""
    if len(seen) != 1:
        raise NotSupported(f"the model's LM head ran {len(seen)} times in a forward")
    hidden: Tensor = seen[0].detach().flatten(0, -2)
    if len(hidden) == len(logit_rows):  # all rows, or already selected by the model
        return hidden.clone()
    return hidden[logit_rows]
