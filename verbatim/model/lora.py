"""LoRA adapters of an open model, added row by row to the products of its linear layers.

The result of a row is `y = round(W x + b)`, as without an adapter, and then `round(y + scaling * B (A x))`,
computed in float32 by a fixed order of the arithmetic. So its bits depend on the row and its adapter alone.
A and B are in the model's dtype.

`kernels/lora.cpp` computes it, in a call for each linear layer or in the calls of fused layers. Without
kernels, and on a GPU, `products.linear` does.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from verbatim import kernels
from verbatim.batch import Adapter, Batch
from verbatim.errors import InvalidRequest, ModelError, NotSupported
from verbatim.kernels.functions import run
from verbatim.model import elementwise, products
from verbatim.model.context import active_context
from verbatim.model.layer import FusedLayer
from verbatim.model.packed import PackedLinear
from verbatim.model.shard import Columns
from verbatim.model.spec import inner_model

_PANEL = 64  # LOW_RANK_PANEL of kernels/lora.h
_PLACES = 10  # of kernels/layer.cpp
_POINTER, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
Forwards = list[tuple[dict[str, Any], Callable[..., Any]]]


class AdaptedRows(NamedTuple):
    """Neighbouring rows of a forward with one adapter."""

    begin: int
    end: int
    number: int  # of the adapter


def groups_of(batch: Batch) -> list[AdaptedRows]:
    """Return the rows that have an adapter, in ascending order."""
    if batch.adapters is None:
        return []
    groups: list[AdaptedRows] = []
    bounds = itertools.pairwise(batch.query_starts.tolist())
    for (begin, end), number in zip(bounds, batch.adapters.tolist(), strict=True):
        if groups and groups[-1].end == begin and groups[-1].number == number:
            begin = groups.pop().begin
        if number:
            groups.append(AdaptedRows(begin, end, number))
    return groups


class _LowRankStruct(ctypes.Structure):
    """`LowRank` of kernels/lora.h."""

    _fields_ = (("a", _POINTER), ("b", _POINTER), ("rank", _LONG), ("scaling", _FLOAT))


class _RowsStruct(ctypes.Structure):
    """`AdaptedRows` of kernels/lora.h."""

    _fields_ = (("begin", _LONG), ("end", _LONG), ("matrices", _POINTER))


class _Matrices(NamedTuple):
    """A and B of one linear layer."""

    a: Tensor  # [rank, K]
    panels: Tensor  # [ceil(N / 64), rank, 64]: B's columns beside one another, filled up with zeros
    scaling: float

    @property
    def struct(self) -> _LowRankStruct:
        return _LowRankStruct(
            self.a.data_ptr(), self.panels.data_ptr(), self.a.shape[0], self.scaling
        )

    def b(self, cols: int) -> Tensor:
        """Return B `[cols, rank]` in float32."""
        return self.panels.transpose(1, 2).flatten(0, 1)[:cols].float()


class _Held(NamedTuple):
    """An adapter that is held.

    Attributes:
        matrices: of each linear layer, by its name.
        structs: the matrices for fused layers, by layer and place.
        fused: the names of those layers.
        serves: whether fused layers can run it: where all layers run in one call, and where others run
            between them.
    """

    name: str
    matrices: dict[str, _Matrices]
    structs: Any
    fused: frozenset[str]
    serves: dict[bool, bool]


class Adapters:
    """The adapters of one module.

    Args:
        dtype: of the model.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._held: dict[int, _Held] = {}
        self._modules: dict[str, nn.Module] = {}
        self._plain: Mapping[int, Callable[..., Any]] = {}
        self._layers: Sequence[FusedLayer] = ()

    def attach(self, module: nn.Module, plain: Forwards, layers: Sequence[FusedLayer]) -> None:
        """Use the layers of `module`, which may have been edited.

        Args:
            plain: the forwards of its linear layers, as for `patched`.
            layers: those that are fused.

        Raises:
            NotSupported: a layer of a loaded adapter is gone.
        """
        self._modules = _linears_of(module)
        self._plain = {id(attributes): forward for attributes, forward in plain}
        self._layers = layers
        for index, layer in enumerate(layers):
            layer.struct.index = index
        for number, held in self._held.items():
            for name, matrices in held.matrices.items():
                self._check(held.name, name, matrices.a.shape[1], None)
            self._held[number] = self._placed(held.name, held.matrices)

    def load(self, adapter: Adapter, *, partial: bool = False) -> list[str]:
        """Hold an adapter for the batches that name its number.

        Args:
            partial: the module has only some layers of the model; leave out the matrices of others.

        Returns:
            The names of the layers that it has matrices for here.

        Raises:
            NotSupported, InvalidRequest, ModelError: it does not fit the model, or has NaN or infinity in the
                model's dtype; nothing is held then.
        """
        layers = adapter.layers
        if partial:
            layers = {name: low for name, low in layers.items() if name in self._modules}
        made: dict[str, _Matrices] = {}
        for name, low in layers.items():
            module = self._check(adapter.name, name, low.a.shape[1], low.b.shape[0])
            device = next(iter([*module.parameters(), *module.buffers()])).device
            a = low.a.to(device, self._dtype).contiguous()
            b = F.pad(low.b.to(device, self._dtype), (0, 0, 0, -low.b.shape[0] % _PANEL))
            if not (a.isfinite().all() and b.isfinite().all()):
                raise ModelError(
                    f"adapter {adapter.name!r}: {name[:200]} has NaN or infinity in {self._dtype}"
                )
            panels = b.unflatten(0, (-1, _PANEL)).transpose(1, 2).contiguous()
            made[name] = _Matrices(a, panels, low.scaling)
        self._held[adapter.number] = self._placed(adapter.name, made)
        return list(made)

    def unload(self, number: int) -> None:
        """Drop an adapter; do nothing if it is not held."""
        self._held.pop(number, None)

    def _check(self, adapter: str, name: str, depth: int, cols: int | None) -> nn.Module:
        module = self._modules.get(name)
        shape = None if module is None else shape_of(module)
        if module is None or shape is None:
            raise NotSupported(
                f"adapter {adapter!r}: {name} is not a linear layer that each token goes through, so an "
                "adapter per request can't change it; open the model with the adapter merged instead"
            )
        if shape[1] != depth or cols not in (None, shape[0]):
            raise InvalidRequest(
                f"adapter {adapter!r}: its matrices for {name} map {depth} to {cols} numbers; the model's "
                f"layer maps {shape[1]} to {shape[0]}"
            )
        return module

    def _placed(self, adapter: str, matrices: dict[str, _Matrices]) -> _Held:
        """Put the matrices of an adapter in the places of fused layers, as far as these have any."""
        names = {id(module): name for name, module in self._modules.items()}
        structs = (_LowRankStruct * (_PLACES * max(1, len(self._layers))))()
        fused, inside = set[str](), set[str]()
        for layer in self._layers:
            for place, module in layer.matrices.items():
                name = names.get(id(module), "")
                if name in matrices:
                    structs[_PLACES * layer.struct.index + place] = matrices[name].struct
                    fused.add(name)
            inside |= {names[id(m)] for m in layer.parts.modules() if id(m) in names}
        others = matrices.keys() - fused
        serves = {True: not others, False: not others & inside}
        return _Held(adapter, matrices, structs, frozenset(fused), serves)

    @property
    def numbers(self) -> list[int]:
        """The numbers of the adapters that are held."""
        return [*self._held]

    # ---- forwards

    def forwards(self, groups: Iterable[AdaptedRows]) -> Forwards:
        """Return the forwards of the layers that the adapters of these rows change, as for `patched`."""
        names = {n for group in groups for n in self._of(group).matrices}
        return [
            (module.__dict__, self._forward(name, module))
            for name, module in self._modules.items()
            if name in names
        ]

    def _of(self, group: AdaptedRows) -> _Held:
        held = self._held.get(group.number)
        if held is None:
            raise NotSupported(f"adapter number {group.number} is not loaded here")
        return held

    def _forward(self, name: str, module: nn.Module) -> Callable[..., Any]:
        own = functools.partial(type(module).forward, module)
        plain = self._plain.get(id(module.__dict__), own)

        def forward(x: Tensor) -> Tensor:
            out: Tensor = plain(x)
            context: Any = active_context()
            if getattr(context, "adapted", None):
                context.changed.add(name)
                out = self._add(name, context, x, out)
            return out

        return forward

    @kernels.without_overrides
    def _add(self, name: str, context: Any, x: Tensor, out: Tensor) -> Tensor:
        """Add to `out`, in place where it is contiguous, what the adapters of its rows have for a layer."""
        depth, cols = x.shape[-1], out.shape[-1]
        rows = x.reshape(-1, depth)
        if rows.shape[0] != context.batch.num_tokens:
            raise NotSupported(f"adapters: {name} is not called with one row for each token")
        if not out.is_contiguous():
            out = out.contiguous()
        found = [(g, m) for g in context.adapted if (m := self._of(g).matrices.get(name))]
        if elementwise.served(out) and rows.dtype is out.dtype is self._dtype:
            structs = [m.struct for _, m in found]
            groups = _structs([g for g, _ in found], structs)
            rows = rows if rows.stride(1) == 1 else rows.contiguous()
            at, sizes = (rows.data_ptr(), rows.stride(0)), (len(found), cols, depth)
            run("vb_add_low_rank", out.dtype, *at, groups, *sizes, out.data_ptr(), cols)
            return out
        with torch._C.DisableTorchFunctionSubclass():
            into = out.as_subclass(Tensor).view(-1, cols)
            for (begin, end, _), m in found:
                inner = products.linear(rows[begin:end].float(), m.a.float())
                added = products.linear(inner, m.b(cols)) * m.scaling
                into[begin:end] = (into[begin:end].float() + added).to(out.dtype)
        return out

    def check(self, groups: Iterable[AdaptedRows], changed: set[str], *, fused: bool) -> None:
        """Check after a forward that every layer of the adapters was run by its patched forward.

        Args:
            fused: those in fused layers were run by these.

        Raises:
            NotSupported: the model computes with a layer's weights without calling it.
        """
        for group in groups:
            held = self._of(group)
            missed = held.matrices.keys() - changed - (held.fused if fused else frozenset())
            if missed:
                raise NotSupported(
                    f"adapter {held.name!r}: the model reads the weights of "
                    f"{min(missed)} without calling it, so an adapter per request can't change it; open "
                    "the model with the adapter merged instead"
                )

    # ---- fused layers

    def serves(self, groups: Iterable[AdaptedRows], *, whole: bool) -> bool:
        """Return whether fused layers can add the adapters of these rows.

        Args:
            whole: all layers run in one call, and nothing else.
        """
        return all(self._of(group).serves[whole] for group in groups)

    def structs(self, groups: Sequence[AdaptedRows]) -> Any:
        """Return the rows with their adapters' matrices for all fused layers, `AdaptedRows` in memory."""
        return _structs(groups, [self._of(group).structs for group in groups])


def _structs(groups: Sequence[AdaptedRows], matrices: Sequence[Any]) -> Any:
    """Return rows with the addresses of their matrices, which the caller keeps, as an array in memory."""
    pairs = zip(groups, matrices, strict=True)
    structs = [_RowsStruct(g.begin, g.end, ctypes.addressof(at)) for g, at in pairs]
    return (_RowsStruct * len(structs))(*structs)


def shape_of(module: nn.Module) -> tuple[int, int] | None:
    """Return the width of a linear layer's output and input; None for another layer."""
    if type(module) is Columns:
        shape = shape_of(module.inner)
        return None if shape is None else (module.bounds[-1], shape[1])
    if type(module) is nn.Linear:
        return module.weight.shape[0], module.weight.shape[1]
    if type(module) is PackedLinear:
        return module.packing.width, module.packing.depth
    from transformers.pytorch_utils import Conv1D

    if type(module) is Conv1D:
        return module.weight.shape[1], module.weight.shape[0]
    return None


def _linears_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers of a model by name, without its head and those inside of others."""
    inner = inner_model(module)
    head = inner.get_output_embeddings()
    found: dict[str, nn.Module] = {}
    for name, layer in inner.named_modules():
        inside = name.rpartition(".")[0] in found  # of `Columns`
        if layer is head or inside or ".experts." in f".{name}." or "forward" in layer.__dict__:
            continue
        if shape_of(layer) is not None:
            found[name] = layer
    return found
