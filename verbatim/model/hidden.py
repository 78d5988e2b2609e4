"""Hidden states: the head's inputs of rows that need logits, and the body's outputs of all rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
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


def head_inputs(
    head: nn.Module | None, contexts: Sequence[ForwardContext]
) -> AbstractContextManager[Seen]:
    """Record the inputs of `head` in each of these forward contexts, by a temporary hook.

    As the last hook, it sees the result of the owner's hooks and wrappers. None records nothing.
    """

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[0] if args else next(iter(kwargs.values()), None)

    register = None if head is None else partial(head.register_forward_pre_hook, with_kwargs=True)
    return _recorded(register, hook, contexts)


def body_outputs(
    body: nn.Module | None, contexts: Sequence[ForwardContext]
) -> AbstractContextManager[Seen]:
    """Record the last hidden states of `body` (the model's `get_decoder()`) in each forward context.

    It is a temporary hook, as in `head_inputs`, and sees all rows. None records nothing.
    """

    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return output[0] if isinstance(output, tuple) else output.last_hidden_state

    return _recorded(None if body is None else body.register_forward_hook, hook, contexts)


@contextmanager
def _recorded(
    register: Callable[..., Any] | None,
    hook: Callable[..., Any],
    contexts: Sequence[ForwardContext],
) -> Iterator[Seen]:
    """Record what a hook returns in the list of the active context, if it is one of `contexts`."""

    def note(*args: Any) -> None:
        active, value = active_context(), hook(*args)
        for context, found in zip(contexts, seen, strict=True):
            if context is active:
                found.append(value)

    seen: Seen = [[] for _ in contexts]
    handle = None if register is None else register(note)
    try:
        yield seen
    finally:
        if handle is not None:
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
