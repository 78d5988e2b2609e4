"""Hidden states: the head's inputs of rows that need logits, and the body's outputs of all rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from verbatim.errors import NotSupported
from verbatim.model.context import ForwardContext, active_context


def head_of(inner: Any) -> nn.Module | None:
    """Return the module that turns hidden states into logits, or None.

    Args:
        inner: an unwrapped transformers model.
    """
    try:
        head = inner.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return head if isinstance(head, nn.Module) else None


Seen = list[list[Any]]  # what was recorded in each forward context


@contextmanager
def recorded(
    module: nn.Module | None, contexts: Sequence[ForwardContext], *, outputs: bool = False
) -> Iterator[Seen]:
    """Record the inputs of a head in each of these forward contexts, by a temporary hook.

    As the last hook, it sees the result of the owner's hooks and wrappers.

    Args:
        module: None records nothing.
        outputs: record what a model's body (its `get_decoder()`) returns, which are all rows, instead.
    """

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *made: Any) -> None:
        if made:
            value = made[0][0] if isinstance(made[0], tuple) else made[0].last_hidden_state
        else:
            value = args[0] if args else next(iter(kwargs.values()), None)
        active = active_context()
        for context, found in zip(contexts, seen, strict=True):
            if context is active:
                found.append(value)

    seen: Seen = [[] for _ in contexts]
    if module is None:
        yield seen
        return
    register: Any = module.register_forward_hook if outputs else module.register_forward_pre_hook
    handle = register(note, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def why_no_hidden(head: nn.Module | None, seen: list[Any], num_rows: int) -> str | None:
    """Return why hidden states are not available, from the inputs of `head` for `num_rows` rows, or None."""
    if head is None:
        return "it names no output embedding"
    if len(seen) != 1:
        return f"its output embedding runs {len(seen)} times in a forward"
    if not isinstance(seen[0], Tensor) or seen[0].shape[:-1].numel() != num_rows:
        return "its output embedding is not handed one hidden state a token"
    return None


def hidden_rows(seen: list[Any], logit_rows: Tensor) -> Tensor:
    """Return a copy of the hidden states `[R, H]` of `logit_rows` `[R]`."""
    if len(seen) != 1:
        raise NotSupported(f"the model's output embedding ran {len(seen)} times in a forward")
    hidden: Tensor = seen[0].detach().flatten(0, -2)
    if len(hidden) == len(logit_rows):  # all rows, or already selected by the model
        return hidden.clone()
    return hidden[logit_rows]
