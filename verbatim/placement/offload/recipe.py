"""How a parameter is made of the tensors in a checkpoint, learned from transformers' own loading.

A checkpoint seldom holds a model's parameters as they are: names changed over the years, experts lie one
by one and are stacked, a dtype is converted. transformers knows all of that. It is therefore handed a state
dict of `Traced` tensors, which hold no numbers and note what is done to them; what it then puts into the
module tells, parameter by parameter, which tensors to read and what to do with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file."""

    name: str
    path: Path
    offset: int  # of its first byte
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Made:
    """What a torch operator makes: `func(*args, **kwargs)`, in which recipes stand for tensors."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int | None  # of several results

    def __hash__(self) -> int:
        return id(self)


Recipe = Stored | Made

_aten = torch.ops.aten
_SAME = frozenset({_aten.alias.default, _aten.detach.default, _aten.lift_fresh.default})


class Traced(Tensor):
    """A tensor without numbers that notes how it came to be."""

    recipe: Recipe

    @staticmethod
    def __new__(cls, recipe: Recipe, like: Tensor) -> Traced:
        made: Traced = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=torch.device("cpu")
        )
        made.recipe = recipe
        return made

    def __init__(self, recipe: Recipe, like: Tensor) -> None: ...

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Traced({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        shapes = tree_map(_without_numbers, (args, kwargs))
        if "device" in kwargs:
            shapes[1]["device"] = torch.device("meta")
            del kwargs["device"]  # made where it is needed
        kwargs.pop("pin_memory", None)
        out = func(*shapes[0], **shapes[1])
        of_args, of_kwargs = tree_map(_recipe_of, (args, kwargs))
        if isinstance(out, Tensor):
            if func in _SAME:
                return Traced(of_args[0], out)
            if func is _aten._to_copy.default and out.dtype == args[0].dtype:
                return Traced(of_args[0], out)
            return Traced(Made(func, of_args, of_kwargs, None), out)
        return type(out)(Traced(Made(func, of_args, of_kwargs, i), o) for i, o in enumerate(out))


def _without_numbers(x: Any) -> Any:
    if not isinstance(x, Traced):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _recipe_of(x: Any) -> Any:
    return x.recipe if isinstance(x, Traced) else x


def traced(stored: Stored) -> Traced:
    """A stand-in for what lies in a file."""
    return Traced(stored, torch.empty(stored.shape, dtype=stored.dtype, device="meta"))


def ingredients(recipe: Recipe) -> list[Stored]:
    """Every tensor that must be read, once each, in the order of use."""
    return list(dict.fromkeys(_walk(recipe)))


def _walk(part: Any) -> Iterator[Stored]:
    if isinstance(part, Stored):
        yield part
    elif isinstance(part, Made):
        yield from _walk(part.args)
        yield from _walk(tuple(part.kwargs.values()))
    elif isinstance(part, tuple | list):
        for inner in part:
            yield from _walk(inner)


def cook(recipe: Recipe, read: Callable[[Stored], Tensor]) -> Tensor:
    """The parameter itself; `read` hands over what was read of a file."""
    done: dict[int, Any] = {}

    def value(part: Any) -> Any:
        if isinstance(part, Stored):
            return read(part)
        if isinstance(part, Made):
            key = id(part.args)  # all results of one call share it: it is made once
            if key not in done:
                done[key] = part.func(
                    *(value(a) for a in part.args),
                    **{name: value(a) for name, a in part.kwargs.items()},
                )
            made = done[key]
            return made if part.index is None else made[part.index]
        if isinstance(part, list | tuple):
            return type(part)(value(inner) for inner in part)
        return part

    with torch.no_grad():
        made: Tensor = value(recipe)
    return made


def rows_can_be_read(recipe: Recipe) -> bool:
    """Is each row of the parameter a row of one stored tensor, or of it in another dtype?"""
    if isinstance(recipe, Stored):
        return len(recipe.shape) > 1
    is_cast = recipe.func is _aten._to_copy.default
    return is_cast and rows_can_be_read(recipe.args[0])
