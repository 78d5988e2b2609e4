"""How a parameter is made of the tensors in a checkpoint, learned from transformers' own loading.

A checkpoint seldom holds a model's parameters as they are: names changed over the years, experts lie one
by one and are stacked, a dtype is converted. transformers knows all of that. It is therefore handed a state
dict of `Traced` tensors, which hold no numbers and note what is done to them; what it then puts into the
module tells, parameter by parameter, which tensors to read and what to do with them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

Stamp = tuple[int, int, int, int]


def stamp_of(fd: int) -> Stamp:
    """What changes when a file is written to, or is another one: device, number, size and time."""
    stat = os.fstat(fd)
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file.

    Attributes:
        offset: of its first byte.
        stamp: of the file when its header was read; None of one that nobody else can change.
    """

    name: str
    path: Path
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stamp: Stamp | None = None


@dataclass(frozen=True, slots=True)
class Made:
    """What a torch operator makes: `func(*args, **kwargs)`, in which recipes stand for tensors."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int | None  # of several results

    def __hash__(self) -> int:
        return id(self)


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A tensor in memory: there is nothing to read."""

    tensor: Tensor


Recipe = Stored | Made | Held

_AT_ONCE = 1 << 20  # bytes that are compared
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
        if func is _aten.equal.default:  # of two that may be tied
            return same_numbers(*map(_recipe_of, args))
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


def same_numbers(a: Recipe, b: Recipe) -> bool:
    """Do two recipes give the same, as far as their files tell? transformers ties what does.

    False for two that are made of something: they stay apart, and give the same words.
    """
    if a == b:
        return True
    if not (isinstance(a, Stored) and isinstance(b, Stored)):
        return False
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    with a.path.open("rb") as one, b.path.open("rb") as other:
        one.seek(a.offset)
        other.seek(b.offset)
        for begin in range(0, a.nbytes, _AT_ONCE):
            wanted = min(_AT_ONCE, a.nbytes - begin)
            if one.read(wanted) != other.read(wanted):
                return False
    return True


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
        if isinstance(part, Held):
            return part.tensor
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

    try:
        with torch.no_grad():
            made: Tensor = value(recipe)
    finally:
        done.clear()  # `value` holds itself, and so would keep what was made until garbage is collected
    return made


def rows_can_be_read(recipe: Recipe) -> bool:
    """Is each row of the parameter a row of a stored tensor, or of it in another dtype?

    The tensors may be several, whose rows come one after another.
    """
    if isinstance(recipe, Stored):
        return len(recipe.shape) > 1
    if isinstance(recipe, Held):
        return False
    if recipe.func is _aten.cat.default:
        (parts,) = recipe.args
        return all(isinstance(part, Stored) and len(part.shape) > 1 for part in parts)
    return recipe.func is _aten._to_copy.default and rows_can_be_read(recipe.args[0])


def from_rows(recipe: Recipe, rows: Tensor) -> Tensor:
    """Rows as the parameter has them, from `rows` as they are stored; of one whose rows can be read."""
    if isinstance(recipe, Made) and recipe.func is _aten._to_copy.default:
        cast: Tensor = recipe.func(from_rows(recipe.args[0], rows), **recipe.kwargs)
        return cast
    return rows


def rows_of(recipe: Recipe, begin: int, end: int) -> Recipe | None:
    """Return the recipe of the entries `begin` to `end` of the first dimension.

    None where they cannot be told apart in what is stored.
    """
    if isinstance(recipe, Stored):
        width = recipe.nbytes // recipe.shape[0]
        return Stored(
            f"{recipe.name}[{begin}:{end}]",
            recipe.path,
            recipe.offset + begin * width,
            (end - begin) * width,
            recipe.dtype,
            (end - begin, *recipe.shape[1:]),
            recipe.stamp,
        )
    if not isinstance(recipe, Made) or not recipe.args:
        return None
    source: Any = recipe.args[0]
    if recipe.func is _aten._to_copy.default:
        cut = rows_of(source, begin, end)
        return cut and Made(recipe.func, (cut, *recipe.args[1:]), recipe.kwargs, None)
    if recipe.func not in (_aten.stack.default, _aten.cat.default):
        return None
    dim = recipe.args[1] if len(recipe.args) > 1 else 0
    if recipe.func is _aten.stack.default:
        return None if dim else Made(recipe.func, (source[begin:end],), {}, None)
    if dim < 0:
        return None
    if dim > 0:
        cuts = [rows_of(part, begin, end) for part in source]
        return None if None in cuts else Made(recipe.func, (cuts, dim), {}, None)
    if not all(isinstance(part, Stored) for part in source):
        return None
    pieces, at = [], 0
    for part in source:
        first, last = max(begin - at, 0), min(end - at, part.shape[0])
        if first < last:
            pieces.append(rows_of(part, first, last))
        at += part.shape[0]
    return pieces[0] if len(pieces) == 1 else Made(recipe.func, (pieces,), {}, None)


def pieces_of(recipe: Recipe) -> list[Recipe]:
    """Return the recipes whose results, one behind the other in memory, are that of `recipe`.

    `recipe` is of one entry of the first dimension, as `rows_of` cuts it.
    """
    if not isinstance(recipe, Made) or recipe.func not in (_aten.stack.default, _aten.cat.default):
        return [recipe]
    parts, *dim = recipe.args
    return (
        [recipe] if dim and dim[0] > 1 else [piece for part in parts for piece in pieces_of(part)]
    )
