"""LoRA adapters of an open model, applied per row to the outputs of its linear layers.

The output for a row is `y = round(W x + b)`, as without an adapter, and then `round(y + scaling * B (A x))`,
computed in float32 in a fixed order, so it is batch-invariant. A and B have the model's dtype. It runs in
`kernels/lora.cpp`, in one call per linear layer or within fused layers; without kernels, and on a GPU, in
`products.linear`.
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
from verbatim.kernels.functions import run, struct_layout
from verbatim.model import elementwise, products
from verbatim.model.context import active_context
from verbatim.model.layer import FusedLayer
from verbatim.model.patching import Forwards
from verbatim.model.quantized import QuantizedLinear
from verbatim.model.shard import Columns
from verbatim.model.spec import inner_model

_PANEL = 64  # LOW_RANK_PANEL of kernels/lora.h
_PLACES = 10  # of kernels/layer.cpp


class AdaptedRows(NamedTuple):
    """Consecutive rows of a forward with the same adapter."""

    begin: int
    end: int
    number: int  # `Adapter.number`


def groups_of(batch: Batch) -> list[AdaptedRows]:
    """Return the ranges of rows with an adapter, in ascending order."""
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


@struct_layout("P a b\nL rank\nF scaling")
class _LowRankStruct(ctypes.Structure):
    """`LowRank` of kernels/lora.h."""


@struct_layout("L begin end\nP matrices")
class _RowsStruct(ctypes.Structure):
    """`AdaptedRows` of kernels/lora.h."""


class _Matrices(NamedTuple):
    """A and B of one linear layer."""

    a: Tensor  # [rank, K]
    panels: Tensor  # [ceil(N / 64), rank, 64]: B.T in panels of 64 columns, padded with zeros
    scaling: float

    @property
    def struct(self) -> _LowRankStruct:
        return _LowRankStruct(
            self.a.data_ptr(), self.panels.data_ptr(), self.a.shape[0], self.scaling
        )

    def b(self, cols: int) -> Tensor:
        """Return B `[cols, rank]` in float32."""
        return self.panels.transpose(1, 2).flatten(0, 1)[:cols].float()


class _Loaded(NamedTuple):
    """A loaded adapter.

    Attributes:
        matrices: the matrices by the name of the linear layer.
        structs: the structs of the matrices for fused layers, by layer and place.
        fused: the names of the linear layers with matrices in `structs`.
        can_fuse: whether fused layers can apply it; key: whether all layers run in one kernel call.
    """

    name: str
    matrices: dict[str, _Matrices]
    structs: Any
    fused: frozenset[str]
    can_fuse: dict[bool, bool]


class Adapters:
    """The loaded adapters of one module, in the model's dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._loaded: dict[int, _Loaded] = {}
        self._modules: dict[str, nn.Module] = {}
        self._plain: Mapping[int, Callable[..., Any]] = {}
        self._layers: Sequence[FusedLayer] = ()

    def attach(self, module: nn.Module, plain: Forwards, layers: Sequence[FusedLayer]) -> None:
        """Set the module to which adapters apply; called again after it was edited.

        Args:
            plain: the forwards of its linear layers, as for `patched`.
            layers: its fused layers.

        Raises:
            NotSupported: a layer of a loaded adapter no longer exists.
        """
        self._modules = _linears_of(module)
        self._plain = {id(attributes): forward for attributes, forward in plain}
        self._layers = layers
        for index, layer in enumerate(layers):
            layer.struct.index = index
        for number, loaded in self._loaded.items():
            for name, matrices in loaded.matrices.items():
                self._check(loaded.name, name, matrices.a.shape[1], None)
            self._loaded[number] = self._with_structs(loaded.name, loaded.matrices)

    def load(self, adapter: Adapter, *, partial: bool = False) -> list[str]:
        """Load an adapter, for batches that refer to it by its number.

        Args:
            partial: the module has only some layers of the model; skip the matrices of other layers.

        Returns:
            The names of this module's layers for which the adapter has matrices.

        Raises:
            NotSupported, InvalidRequest, ModelError: the adapter does not fit the model, or has NaN or
                infinity in the model's dtype.
        """
        layers = adapter.layers
        if partial:
            layers = {name: low for name, low in layers.items() if name in self._modules}
        matrices_of: dict[str, _Matrices] = {}
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
            matrices_of[name] = _Matrices(a, panels, low.scaling)
        self._loaded[adapter.number] = self._with_structs(adapter.name, matrices_of)
        return list(matrices_of)

    def unload(self, number: int) -> None:
        """Drop an adapter; does nothing if it is not loaded."""
        self._loaded.pop(number, None)

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

    def _with_structs(self, adapter: str, matrices: dict[str, _Matrices]) -> _Loaded:
        """Return a loaded adapter, with the structs of its matrices in fused layers."""
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
        can_fuse = {True: not others, False: not others & inside}
        return _Loaded(adapter, matrices, structs, frozenset(fused), can_fuse)

    @property
    def numbers(self) -> list[int]:
        """The numbers of the loaded adapters."""
        return [*self._loaded]

    # ---- forwards

    def forwards(self, groups: Iterable[AdaptedRows]) -> Forwards:
        """Return the forwards of the layers affected by the adapters of these rows, as for `patched`."""
        names = {n for group in groups for n in self._of(group).matrices}
        return [
            (module.__dict__, self._forward(name, module))
            for name, module in self._modules.items()
            if name in names
        ]

    def _of(self, group: AdaptedRows) -> _Loaded:
        loaded = self._loaded.get(group.number)
        if loaded is None:
            raise NotSupported(f"adapter number {group.number} is not loaded here")
        return loaded

    def _forward(self, name: str, module: nn.Module) -> Callable[..., Any]:
        original = functools.partial(type(module).forward, module)
        plain = self._plain.get(id(module.__dict__), original)

        def forward(x: Tensor) -> Tensor:
            out: Tensor = plain(x)
            context: Any = active_context()
            if getattr(context, "adapted", None):
                context.changed.add(name)
                out = self._add(name, context, x, out)
            return out

        def low_rank(context: Any) -> list[tuple[int, int, Tensor, Tensor, float]]:
            """Return the first and last row, A, B and scaling of each adapter of the context's rows."""
            shape = shape_of(module)
            assert shape is not None
            context.changed.add(name)
            matches = [(g, m) for g in context.adapted if (m := self._of(g).matrices.get(name))]
            return [(g.begin, g.end, m.a, m.b(shape[0]), m.scaling) for g, m in matches]

        forward.low_rank = low_rank  # type: ignore[attr-defined]  # for `latent.py`
        return forward

    @kernels.without_overrides
    def _add(self, name: str, context: Any, x: Tensor, out: Tensor) -> Tensor:
        """Add a layer's adapter terms of all rows to `out`, in place if it is contiguous."""
        depth, cols = x.shape[-1], out.shape[-1]
        rows = x.reshape(-1, depth)
        if rows.shape[0] != context.batch.num_tokens:
            raise NotSupported(f"adapters: {name} is not called with one row for each token")
        if not out.is_contiguous():
            out = out.contiguous()
        matches = [(g, m) for g in context.adapted if (m := self._of(g).matrices.get(name))]
        if elementwise.supports(out) and rows.dtype is out.dtype is self._dtype:
            structs = [m.struct for _, m in matches]
            groups = _structs([g for g, _ in matches], structs)
            rows = rows if rows.stride(1) == 1 else rows.contiguous()
            at, sizes = (rows.data_ptr(), rows.stride(0)), (len(matches), cols, depth)
            run("vb_add_low_rank", out.dtype, *at, groups, *sizes, out.data_ptr(), cols)
            return out
        with torch._C.DisableTorchFunctionSubclass():
            target = out.as_subclass(Tensor).view(-1, cols)
            for (begin, end, _), m in matches:
                inner = products.linear(rows[begin:end].float(), m.a.float())
                delta = products.linear(inner, m.b(cols)) * m.scaling
                target[begin:end] = (target[begin:end].float() + delta).to(out.dtype)
        return out

    def check(self, groups: Iterable[AdaptedRows], changed: set[str], *, fused: bool) -> None:
        """Check after a forward that every layer of the adapters was run by its patched forward.

        Args:
            changed: names of the layers to which adapters were applied.
            fused: whether fused layers ran in place of their linear layers.

        Raises:
            NotSupported: the model computes with a layer's weights without calling it.
        """
        for group in groups:
            loaded = self._of(group)
            missed = loaded.matrices.keys() - changed - (loaded.fused if fused else frozenset())
            if missed:
                raise NotSupported(
                    f"adapter {loaded.name!r}: the model reads the weights of "
                    f"{min(missed)} without calling it, so an adapter per request can't change it; open "
                    "the model with the adapter merged instead"
                )

    # ---- fused layers

    def can_fuse(self, groups: Iterable[AdaptedRows], *, whole: bool) -> bool:
        """Return whether fused layers, or with `whole` one call for all layers, can apply these adapters."""
        return all(self._of(group).can_fuse[whole] for group in groups)

    def structs(self, groups: Sequence[AdaptedRows]) -> Any:
        """Return an array of the kernels' `AdaptedRows` with the matrices of all fused layers."""
        return _structs(groups, [self._of(group).structs for group in groups])


def _structs(groups: Sequence[AdaptedRows], matrices: Sequence[Any]) -> Any:
    """Return an array of row ranges with the addresses of their matrices, which the caller keeps alive."""
    pairs = zip(groups, matrices, strict=True)
    structs = [_RowsStruct(g.begin, g.end, ctypes.addressof(at)) for g, at in pairs]
    return (_RowsStruct * len(structs))(*structs)


def shape_of(module: nn.Module) -> tuple[int, int] | None:
    """Return the output and input width of a linear layer; None for other layers."""
    if type(module) is Columns:
        shape = shape_of(module.inner)
        return None if shape is None else (module.bounds[-1], shape[1])
    if type(module) is nn.Linear:
        return module.weight.shape[0], module.weight.shape[1]
    if type(module) is QuantizedLinear:
        return module.matrix.shape
    from transformers.pytorch_utils import Conv1D

    if type(module) is Conv1D:
        return module.weight.shape[1], module.weight.shape[0]
    return None


def _linears_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers of a model by name, except its head and layers nested in others."""
    inner = inner_model(module)
    head = inner.get_output_embeddings()
    linears: dict[str, nn.Module] = {}
    for name, layer in inner.named_modules():
        inside = name.rpartition(".")[0] in linears  # of `Columns`
        if layer is head or inside or ".experts." in f".{name}." or "forward" in layer.__dict__:
            continue
        if shape_of(layer) is not None:
            linears[name] = layer
    return linears
