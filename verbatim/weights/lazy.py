"""Lazy weights: the tensors of a checkpoint from which a parameter is computed, and the computation.

The tensors of a checkpoint rarely match a model's parameters: they have old names, experts are stored one by
one and must be stacked, dtypes are converted. transformers implements all of that. It is given a state dict
of `Traced` tensors, which have no data and record the operators applied to them. The parameters that it
assigns to the module are then lazy weights, which `materialize` reads and computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from verbatim.kernels.packing import WeightPacking
from verbatim.model.quantizable import choose_packings, packable_of
from verbatim.model.stored import Stored as Stored
from verbatim.quantization.formats import Quantization
from verbatim.quantization.matrix import unpack


@dataclass(frozen=True, slots=True)
class Computed:
    """The result of `func(*args, **kwargs)`, with lazy weights in place of tensor arguments.

    Attributes:
        index: index of this result if `func` returns several; None if it returns one.
        shape, dtype: shape and dtype of the result, if known.
        packing: how the bytes that `func` returns are unpacked; None: `func` returns the values.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    index: int | None = None
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    packing: WeightPacking | None = None

    def __hash__(self) -> int:
        return id(self)


@dataclass(frozen=True, slots=True, eq=False)
class InMemory:
    """A tensor in memory."""

    tensor: Tensor


LazyWeight = Stored | Computed | InMemory
Cut = tuple[int, int, int]  # (dimension of a weight, begin and end of the range to keep)

_COMPARED_BYTES = 1 << 20  # per comparison
_aten = torch.ops.aten
_IDENTITIES = frozenset({_aten.alias.default, _aten.detach.default, _aten.lift_fresh.default})
_VIEWS = frozenset({_aten.view.default, _aten._unsafe_view.default})
_JOINS = frozenset({_aten.stack.default, _aten.cat.default})
# These may rearrange each entry of the first dimension in itself.
_WITHIN_ENTRIES = _VIEWS | {_aten._to_copy.default, _aten.clone.default, _aten.transpose.int}
_REARRANGEMENTS = (
    _JOINS | _VIEWS | {_aten.clone.default, _aten.index_select.default, _aten.transpose.int}
)


class Traced(Tensor):
    """A tensor without data that records the operators it was computed with."""

    lazy: LazyWeight

    @staticmethod
    def __new__(cls, lazy: LazyWeight, like: Tensor) -> Traced:
        tensor: Traced = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=torch.device("cpu")
        )
        tensor.lazy = lazy
        return tensor

    def __init__(self, lazy: LazyWeight, like: Tensor) -> None: ...

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Traced({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is _aten.equal.default:  # transformers compares weights that may be tied
            return same_weights(*map(lazy_of, args))
        shapes = tree_map(_meta_like, (args, kwargs))
        if "device" in kwargs:
            shapes[1]["device"] = torch.device("meta")
            del kwargs["device"]  # the device is chosen when the weight is read
        kwargs.pop("pin_memory", None)
        out = func(*shapes[0], **shapes[1])
        of_args, of_kwargs = tree_map(lazy_of, (args, kwargs))

        def computed(like: Tensor, index: int | None = None) -> Traced:
            lazy = Computed(func, of_args, of_kwargs, index, tuple(like.shape), like.dtype)
            return Traced(lazy, like)

        if not isinstance(out, Tensor):
            return type(out)(computed(like, i) for i, like in enumerate(out))
        copies = func is _aten._to_copy.default and out.dtype == args[0].dtype
        return Traced(of_args[0], out) if copies or func in _IDENTITIES else computed(out)


def _meta_like(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def lazy_of(x: Any) -> Any:
    """Return the lazy weight of a tensor; return any other value unchanged."""
    in_memory = InMemory(x) if isinstance(x, Tensor) else x
    return x.lazy if isinstance(x, Traced) else in_memory


def same_weights(a: LazyWeight, b: LazyWeight) -> bool:
    """Return whether two lazy weights have equal values, so that transformers ties them.

    Computed weights count as equal only if the same computation is applied to the same tensors.
    """
    if a == b:
        return True
    if isinstance(a, InMemory) and isinstance(b, InMemory):
        return a.tensor.dtype == b.tensor.dtype and torch.equal(a.tensor, b.tensor)
    if not (isinstance(a, Stored) and isinstance(b, Stored)):
        return False
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    # Read in pieces: a file larger than memory can't be mapped, and reading a map of one that is cut short
    # would end the process.
    with a.path.open("rb") as a_file, b.path.open("rb") as b_file:
        a_file.seek(a.offset)
        b_file.seek(b.offset)
        for begin in range(0, a.nbytes, _COMPARED_BYTES):
            count = min(_COMPARED_BYTES, a.nbytes - begin)
            if a_file.read(count) != b_file.read(count):
                return False
    return True


def traced(lazy: LazyWeight) -> Traced:
    """Return a tensor without data for a lazy weight with a shape and a dtype."""
    like: Any = lazy.tensor if isinstance(lazy, InMemory) else lazy
    return Traced(lazy, torch.empty(like.shape, dtype=like.dtype, device="meta"))


def usual_dtype(tensors: Iterable[Tensor]) -> torch.dtype | None:
    """Return the dtype of most elements, without those of quantized matrices; None: there are none."""
    counts = Counter[torch.dtype]()
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.itemsize > 1:
            counts[tensor.dtype] += tensor.numel()
    return max(counts, key=lambda dtype: counts[dtype], default=None)


def sources(lazy: LazyWeight) -> list[Stored]:
    """Return the stored tensors that a lazy weight reads, once each, in the order of use."""
    return list(dict.fromkeys(_walk(lazy)))


def _walk(*parts: Any) -> Iterator[Stored]:
    for part in tree_leaves(parts):
        if isinstance(part, Stored):
            yield part
        elif isinstance(part, Computed):
            yield from _walk(part.args, part.kwargs)


def materialize(lazy: LazyWeight, read: Callable[[Stored], Tensor]) -> Tensor:
    """Compute a parameter; `read` returns the data of a stored tensor."""
    results: dict[int, Any] = {}

    def run(part: Computed) -> Any:
        # Only this call refers to the arguments, so they are freed when it returns.
        result = part.func(
            *(value(a) for a in part.args), **{name: value(a) for name, a in part.kwargs.items()}
        )
        return result if part.packing is None else unpack(result.flatten(), part.packing)

    def value(part: Any) -> Any:
        if isinstance(part, Stored):
            return read(part)
        if isinstance(part, InMemory):
            return part.tensor
        if isinstance(part, Computed):
            if part.index is None:
                return run(part)
            key = id(part.args)  # shared by all results of a call, which runs once
            if key not in results:
                results[key] = run(part)
            return results[key][part.index]
        if isinstance(part, list | tuple):
            return type(part)(value(inner) for inner in part)
        return part

    try:
        with torch.no_grad():
            output: Tensor = value(lazy)
    finally:
        results.clear()  # `value` is a reference cycle, which would keep the tensors alive
    return output


def rows_can_be_read(lazy: LazyWeight) -> bool:
    """Return whether each row of a matrix is a row of a stored tensor, or one converted to another dtype."""
    row = rows_of(lazy, 0, 1)
    while isinstance(row, Computed) and row.func is _aten._to_copy.default:
        row = row.args[0]
    return isinstance(row, Stored) and len(row.shape) > 1


def rows_of(lazy: LazyWeight, begin: int, end: int) -> LazyWeight | None:
    """Return the entries `begin` to `end` of the first dimension; None if they can't be read separately."""
    if isinstance(lazy, Stored):
        width = lazy.nbytes // lazy.shape[0]
        return replace(
            lazy,
            name=f"{lazy.name}[{begin}:{end}]",
            offset=lazy.offset + begin * width,
            nbytes=(end - begin) * width,
            shape=(end - begin, *lazy.shape[1:]),
        )
    if not isinstance(lazy, Computed) or not lazy.args:
        return None
    source: Any = lazy.args[0]
    shape = lazy.shape and (end - begin, *lazy.shape[1:])
    if lazy.func in _WITHIN_ENTRIES:
        cut, more = rows_of(source, begin, end), lazy.args[1:]
        if cut is None or (lazy.func is _aten.transpose.int and min(more) <= 0):
            return None
        if lazy.func in _VIEWS:
            if more[0][0] != source.shape[0]:
                return None
            more = ([end - begin, *more[0][1:]],)
        return replace(lazy, args=(cut, *more), shape=shape)
    if lazy.func not in _JOINS:
        return None
    dim = lazy.args[1] if len(lazy.args) > 1 else 0
    if lazy.func is _aten.stack.default:
        return None if dim else replace(lazy, args=(source[begin:end],), shape=shape)
    if dim < 0:
        return None
    if dim > 0:
        cuts = [rows_of(part, begin, end) for part in source]
        return None if None in cuts else replace(lazy, args=(cuts, dim), shape=shape)
    if not all(isinstance(part, Stored) for part in source):
        return None
    pieces, at = [], 0
    for part in source:
        first, last = max(begin - at, 0), min(end - at, part.shape[0])
        if first < last:
            pieces.append(rows_of(part, first, last))
        at += part.shape[0]
    return pieces[0] if len(pieces) == 1 else replace(lazy, args=(pieces,), shape=shape)


def pieces_of(lazy: LazyWeight, leading: int = 1) -> list[LazyWeight]:
    """Split one entry of `rows_of` into lazy weights that contain the same data when concatenated.

    Args:
        leading: number of leading dimensions of size 1.
    """
    if not isinstance(lazy, Computed) or lazy.func not in _JOINS:
        return [lazy]
    parts, dim = lazy.args if len(lazy.args) > 1 else (lazy.args[0], 0)
    if dim > leading or (dim and lazy.func is _aten.stack.default):
        return [lazy]
    inside = 0 if lazy.func is _aten.stack.default else leading
    return [piece for part in parts for piece in pieces_of(part, inside)]


def stored_packing(lazy: LazyWeight) -> tuple[WeightPacking, LazyWeight] | None:
    """Return the packing of a weight in its file, and the lazy weight of its packed bytes; None if unpacked.

    Packed matrices may be stacked, joined, viewed, transposed and reordered, if all rows stay whole: the same
    operators then rearrange the rows of bytes.
    """
    if not isinstance(lazy, Computed):
        return None
    if (packing := lazy.packing) is not None:
        shape = *packing.shape[:-2], packing.width, packing.row_bytes
        return packing, replace(lazy, packing=None, shape=shape, dtype=torch.uint8)
    if lazy.func not in _REARRANGEMENTS or lazy.shape is None:
        return None
    source, more = lazy.args[0], tree_map(_in_memory, lazy.args[1:])
    parts = source if lazy.func in _JOINS else [source]
    pairs = [pair for part in parts if (pair := stored_packing(part)) is not None]
    if len(pairs) < len(parts):
        return None
    first = pairs[0][0]
    is_alike = all(replace(packing, shape=first.shape) == first for packing, _ in pairs)
    # Rows of as many bytes as values could not be told from columns below.
    if not is_alike or first.columns or not lazy.shape[-1] == first.depth != first.row_bytes:
        return None
    shape = *lazy.shape[:-1], first.row_bytes
    rows = [traced(part) for _, part in pairs]
    more = (shape,) if lazy.func in _VIEWS else more
    joined = lazy.func(rows if lazy.func in _JOINS else rows[0], *more, **lazy.kwargs)
    return (replace(first, shape=lazy.shape), joined.lazy) if joined.shape == shape else None


def _in_memory(x: Any) -> Any:
    return x.tensor if isinstance(x, InMemory) else x


def packings_of(
    module: nn.Module,
    lazy_weights: Mapping[nn.Parameter, LazyWeight],
    quantization: Quantization | None,
) -> dict[nn.Parameter, WeightPacking]:
    """Return the packing of every weight to be held packed, without reading data.

    A weight that is stored packed keeps its packing if its layer supports it, unless `quantization` has fewer
    bits for it, or quantizes activations. Raises the errors of `choose_packings`.
    """
    packings = {} if quantization is None else choose_packings(module, quantization)
    packable = packable_of(module)
    for parameter, lazy in lazy_weights.items():
        stored, requested = stored_packing(lazy), packings.get(parameter)
        if stored is None or stored[0].columns is not packable.get(parameter):
            continue
        fewer = requested and requested.rows.bits < stored[0].rows.bits
        if not fewer and not (requested and requested.interleaved):
            packings[parameter] = stored[0]
    return packings


def stored_as(lazy: LazyWeight, packing: WeightPacking | None) -> LazyWeight | None:
    """Return the lazy weight of a weight's packed bytes, if it is stored in this packing; else None."""
    stored = stored_packing(lazy)
    return stored[1] if stored is not None and stored[0] == packing else None
