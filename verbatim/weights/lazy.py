"""Lazy weights: which tensors of a checkpoint a parameter is computed from, and how.

A checkpoint seldom holds a model's parameters as they are: names changed over the years, experts are stored
one by one and stacked, dtypes are converted. transformers implements all of that. It is therefore given a
state dict of `Traced` tensors, which have no data and record the operators that are applied to them. What it
then assigns to the module are lazy weights, which `materialize` reads and computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from verbatim.model.stored import Stored as Stored


@dataclass(frozen=True, slots=True)
class Computed:
    """The result of a function, `func(*args, **kwargs)`, with lazy weights in place of tensors.

    Attributes:
        index: of several results; None: there is one.
        shape, dtype: of the result; None of torch's operators, which are traced.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    index: int | None = None
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None

    def __hash__(self) -> int:
        return id(self)


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A tensor in memory."""

    tensor: Tensor


LazyWeight = Stored | Computed | Held
Cut = tuple[int, int, int]  # a dimension of a weight, and the range of it that is kept

_AT_ONCE = 1 << 20  # bytes that are compared
_aten = torch.ops.aten
_SAME = frozenset({_aten.alias.default, _aten.detach.default, _aten.lift_fresh.default})


class Traced(Tensor):
    """A tensor without data that records the operators it comes from."""

    lazy: LazyWeight

    @staticmethod
    def __new__(cls, lazy: LazyWeight, like: Tensor) -> Traced:
        made: Traced = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=torch.device("cpu")
        )
        made.lazy = lazy
        return made

    def __init__(self, lazy: LazyWeight, like: Tensor) -> None: ...

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Traced({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is _aten.equal.default:  # transformers compares weights that may be tied
            return same_numbers(*map(lazy_of, args))
        shapes = tree_map(_without_numbers, (args, kwargs))
        if "device" in kwargs:
            shapes[1]["device"] = torch.device("meta")
            del kwargs["device"]  # the device is chosen when the weight is read
        kwargs.pop("pin_memory", None)
        out = func(*shapes[0], **shapes[1])
        of_args, of_kwargs = tree_map(lazy_of, (args, kwargs))
        if isinstance(out, Tensor):
            if func in _SAME:
                return Traced(of_args[0], out)
            if func is _aten._to_copy.default and out.dtype == args[0].dtype:
                return Traced(of_args[0], out)
            return Traced(Computed(func, of_args, of_kwargs), out)
        return type(out)(
            Traced(Computed(func, of_args, of_kwargs, i), o) for i, o in enumerate(out)
        )


def _without_numbers(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def lazy_of(x: Any) -> Any:
    """Return the lazy weight of a tensor, which may be in memory; anything else as it is."""
    held = Held(x) if isinstance(x, Tensor) else x
    return x.lazy if isinstance(x, Traced) else held


def same_numbers(a: LazyWeight, b: LazyWeight) -> bool:
    """Return whether two lazy weights are equal, which transformers then ties.

    False for two computed ones, which stay apart.
    """
    if a == b:
        return True
    if isinstance(a, Held) and isinstance(b, Held):
        return a.tensor.dtype == b.tensor.dtype and torch.equal(a.tensor, b.tensor)
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


def traced(lazy: LazyWeight) -> Traced:
    """Return a tensor without data for one in a file or in memory, or one that a decoder computes."""
    like: Any = lazy.tensor if isinstance(lazy, Held) else lazy
    return Traced(lazy, torch.empty(like.shape, dtype=like.dtype, device="meta"))


def sources(lazy: LazyWeight) -> list[Stored]:
    """Return the tensors that must be read, once each, in the order of use."""
    return list(dict.fromkeys(_walk(lazy)))


def _walk(part: Any) -> Iterator[Stored]:
    if isinstance(part, Stored):
        yield part
    elif isinstance(part, Computed):
        yield from _walk(part.args)
        yield from _walk(tuple(part.kwargs.values()))
    elif isinstance(part, tuple | list):
        for inner in part:
            yield from _walk(inner)


def materialize(lazy: LazyWeight, read: Callable[[Stored], Tensor]) -> Tensor:
    """Compute a parameter; `read` returns the data of a tensor in a file."""
    done: dict[int, Any] = {}

    def run(part: Computed) -> Any:
        # Nothing else holds its arguments, which are freed when it returns.
        return part.func(
            *(value(a) for a in part.args), **{name: value(a) for name, a in part.kwargs.items()}
        )

    def value(part: Any) -> Any:
        if isinstance(part, Stored):
            return read(part)
        if isinstance(part, Held):
            return part.tensor
        if isinstance(part, Computed):
            if part.index is None:
                return run(part)
            key = id(part.args)  # shared by all results of one call, which runs once
            if key not in done:
                done[key] = run(part)
            return done[key][part.index]
        if isinstance(part, list | tuple):
            return type(part)(value(inner) for inner in part)
        return part

    try:
        with torch.no_grad():
            made: Tensor = value(lazy)
    finally:
        done.clear()  # `value` is a reference cycle, which would keep the tensors alive
    return made


def rows_can_be_read(lazy: LazyWeight) -> bool:
    """Return whether each row of a matrix is a row of a stored one, or a row in another dtype.

    The rows of several tensors may follow one another.
    """
    row = rows_of(lazy, 0, 1)
    while isinstance(row, Computed) and row.func is _aten._to_copy.default:
        row = row.args[0]
    return isinstance(row, Stored) and len(row.shape) > 1


def rows_of(lazy: LazyWeight, begin: int, end: int) -> LazyWeight | None:
    """Return the lazy weight of the entries `begin` to `end` of the first dimension.

    None if they are not separate in the file.
    """
    if isinstance(lazy, Stored):
        width = lazy.nbytes // lazy.shape[0]
        return Stored(
            f"{lazy.name}[{begin}:{end}]",
            lazy.path,
            lazy.offset + begin * width,
            (end - begin) * width,
            lazy.dtype,
            (end - begin, *lazy.shape[1:]),
            lazy.stamp,
        )
    if not isinstance(lazy, Computed) or not lazy.args:
        return None
    source: Any = lazy.args[0]
    if lazy.func is _aten._to_copy.default:
        cut = rows_of(source, begin, end)
        return cut and Computed(lazy.func, (cut, *lazy.args[1:]), lazy.kwargs)
    if lazy.func not in (_aten.stack.default, _aten.cat.default):
        return None
    dim = lazy.args[1] if len(lazy.args) > 1 else 0
    if lazy.func is _aten.stack.default:
        return None if dim else Computed(lazy.func, (source[begin:end],))
    if dim < 0:
        return None
    if dim > 0:
        cuts = [rows_of(part, begin, end) for part in source]
        return None if None in cuts else Computed(lazy.func, (cuts, dim))
    if not all(isinstance(part, Stored) for part in source):
        return None
    pieces, at = [], 0
    for part in source:
        first, last = max(begin - at, 0), min(end - at, part.shape[0])
        if first < last:
            pieces.append(rows_of(part, first, last))
        at += part.shape[0]
    return pieces[0] if len(pieces) == 1 else Computed(lazy.func, (pieces,))


def pieces_of(lazy: LazyWeight, leading: int = 1) -> list[LazyWeight]:
    """Return the lazy weights whose data, concatenated, is that of one entry of `rows_of`.

    Args:
        leading: number of first dimensions of size 1.
    """
    if not isinstance(lazy, Computed) or lazy.func not in (_aten.stack.default, _aten.cat.default):
        return [lazy]
    parts, dim = lazy.args if len(lazy.args) > 1 else (lazy.args[0], 0)
    if dim > leading or (dim and lazy.func is _aten.stack.default):
        return [lazy]
    inside = 0 if lazy.func is _aten.stack.default else leading
    return [piece for part in parts for piece in pieces_of(part, inside)]
