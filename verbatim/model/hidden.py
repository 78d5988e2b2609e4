"""Hidden states: what a model's head sees of the rows that need logits, what its body makes of all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from verbatim.errors import NotSupported
from verbatim.model.context import Pass, active_pass


def head_of(inner: Any) -> nn.Module | None:
    """The module that turns hidden states into logits; None where the model names none.

    Args:
        inner: a transformers model, not wrapped.
    """
    try:
        head = inner.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return head if isinstance(head, nn.Module) else None


@contextmanager
def head_inputs(head: nn.Module | None, walks: Sequence[Pass]) -> Iterator[list[list[Any]]]:
    """Note what `head` is called with in each of these passes; nothing is left behind on it.

    A hook, and the last one, sees what the owner's own hooks and wrappers made of it.
    """
    seen: list[list[Any]] = [[] for _ in walks]
    if head is None:
        yield seen
        return
    by_walk = {id(walk): found for walk, found in zip(walks, seen, strict=True)}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = by_walk.get(id(active_pass()))
        if found is not None:
            found.append(args[0] if args else next(iter(kwargs.values()), None))

    handle = head.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


@contextmanager
def body_outputs(body: nn.Module | None, walks: Sequence[Pass]) -> Iterator[list[list[Tensor]]]:
    """Note the last hidden states that a model's `body` (its `get_decoder()`) returns in each of these
    passes; nothing is left behind on it. None notes nothing.

    A hook, as in `head_inputs`. It sees all rows, whether or not any of them has logits.
    """
    made: list[list[Tensor]] = [[] for _ in walks]
    if body is None:
        yield made
        return
    by_walk = {id(walk): found for walk, found in zip(walks, made, strict=True)}

    def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        found = by_walk.get(id(active_pass()))
        if found is not None:
            found.append(output[0] if isinstance(output, tuple) else output.last_hidden_state)

    handle = body.register_forward_hook(note)
    try:
        yield made
    finally:
        handle.remove()


def why_no_hidden(head: nn.Module | None, seen: list[Any], num_rows: int) -> str | None:
    """Why the hidden states can't be handed back, from what `head` saw of `num_rows` rows; else None."""
    if head is None:
        return "it names no output embedding"
    if len(seen) != 1:
        return f"its output embedding runs {len(seen)} times in a forward"
    if not isinstance(seen[0], Tensor) or seen[0].shape[:-1].numel() != num_rows:
        return "its output embedding is not handed one hidden state a token"
    return None


def hidden_rows(seen: list[Any], logit_rows: Tensor) -> Tensor:
    """The hidden states `[R, H]` of `logit_rows` `[R]` of the T rows, in memory of their own."""
    if len(seen) != 1:
        raise NotSupported(f"the model's output embedding ran {len(seen)} times in a forward")
    hidden: Tensor = seen[0].detach().flatten(0, -2)
    if len(hidden) == len(logit_rows):  # all rows, or those that the model has picked itself
        return hidden.clone()
    return hidden[logit_rows]
