"""Reading weights into a module: all or a share of them, as they are stored or quantized."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verbatim import kernels
from verbatim.errors import ModelError
from verbatim.heap import give_back_freed
from verbatim.model.loader import Checkpoint, LoadedModel
from verbatim.model.packed import hold_packed
from verbatim.model.packing import PackingReport, matrices_of, owners
from verbatim.model.quantization import Quantization
from verbatim.model.quantize import interleave, pack_and_measure
from verbatim.model.stored import Stored, read_stored, stamp_of
from verbatim.model.weight_packing import WeightPacking
from verbatim.options import available_memory
from verbatim.weights.formats.stored import packings_of, stored_as
from verbatim.weights.lazy import Cut, LazyWeight, materialize, sources
from verbatim.weights.packed_cache import THREADS, PackedCache

_TRIMMED = 1 << 20  # size of a weight after which freed memory is returned to the system
_LINE = 64  # bytes of a cache line
_SMALL = 1 << 16  # bytes of a weight that stays in the L1 or L2 cache anyway
Place = tuple[int, str]  # the id of a module, and the name of its parameter


def open_weights(
    open_: Callable[[Any], LoadedModel], quantization: Quantization | None, tokenizer: Any = None
) -> LoadedModel:
    """Open a model with its weights, quantized or as they are stored.

    With `quantization`, the quantized weights of a safetensors or DCP folder are cached on disk. Weights that
    are stored packed are kept as they are stored (`packings_of`).

    Args:
        open_: opens the model with lazy weights, or a live module, and with `tokenizer`.

    Raises:
        ModelError: it can't be opened, or has NaN, an infinity or a number too large to be quantized.
        NotSupported: nothing in it can be quantized.
    """
    loaded = open_(tokenizer)
    if loaded.live:
        return loaded
    assert loaded.lazy_weights is not None
    module, lazy_weights = loaded.module, dict(loaded.lazy_weights)
    original = module.state_dict(keep_vars=True)
    cache = None if quantization is None else PackedCache(loaded, quantization)
    loaded.lazy_weights = loaded.config = None
    fits = 2 * sum(p.nbytes for p in lazy_weights) <= available_memory()
    read = read_stored if quantization is not None else MappedFiles(copy_unaligned=fits)
    loaded.packed = load_weights(module, lazy_weights, quantization, read=read, cache=cache)
    # Without quantized weights it is the module's own, which must be freed with the module.
    loaded.original = None if loaded.packed is None else original
    if fits and quantization is None:
        store_by_rows(module)
    loaded.checkpoint = Checkpoint(loaded, lambda: open_weights(open_, quantization, False).module)
    return loaded


def store_by_rows(module: nn.Module) -> None:
    """Lay out matrices `[in, out]`, as GPT-2, Llama 4 and gpt-oss have them, as `[out, in]`.

    Products read them faster, bit-identically. The parameters keep their shapes.
    """
    for parameter, columns in matrices_of(module).items():
        if columns and parameter.is_contiguous() and parameter.nbytes >= _SMALL:
            parameter.data = parameter.data.mT.contiguous().mT


class MappedFiles:
    """Reads tensors of safetensors files as views of the files, which are mapped into memory.

    Writes to them don't reach the files. Those of other files, which training may overwrite, are copied.

    Args:
        copy_unaligned: copy those that begin within a cache line. A product reads their vectors across two
            lines, which costs nothing at a few rows, where memory is the limit, and a tenth from 16 rows on
            (measured).
    """

    def __init__(self, *, copy_unaligned: bool) -> None:
        self._copy_unaligned = copy_unaligned
        self._files: dict[Path, Tensor] = {}

    def __call__(self, stored: Stored) -> Tensor:
        """Return a tensor; ModelError if its file has changed."""
        unaligned = self._copy_unaligned and stored.offset % _LINE
        if unaligned or stored.path.suffix != ".safetensors":
            return read_stored(stored)
        if stored.path not in self._files:
            stamp = stamp_of(stored.path)
            if stored.stamp not in (None, stamp):
                raise ModelError(f"{stored.path} changed while the model was opened")
            self._files[stored.path] = torch.from_file(
                str(stored.path), shared=False, size=stamp[2], dtype=torch.uint8
            )
        data = self._files[stored.path][stored.offset : stored.offset + stored.nbytes]
        if stored.offset % stored.dtype.itemsize:
            data = data.clone()
        return data.view(stored.dtype).view(stored.shape)


def load_weights(
    module: nn.Module,
    lazy_weights: dict[nn.Parameter, LazyWeight],
    quantization: Quantization | None,
    *,
    read: Callable[[Stored], Tensor] = read_stored,
    cuts: Mapping[Place, Cut] | None = None,
    cache: PackedCache | None = None,
) -> PackingReport | None:
    """Read weights into a module, and quantize the matrices.

    Weights that are stored packed stay as they are stored, unless `quantization` has fewer bits. At most
    `THREADS` whole, unquantized weights are in memory at the same time.

    Args:
        lazy_weights: the weights to read, by parameter; emptied. Other parameters are unchanged.
        read: returns the data of a tensor in a file.
        cuts: the range to keep at some places of parameters. Quantization does not depend on the cut.
        cache: the cache of the quantized weights, if all are read and none is cut.

    Returns:
        The quantized weights; None if there are none.
    """
    cuts = cuts or {}
    packings = packings_of(module, lazy_weights, quantization)
    weights: dict[nn.Parameter, _Weight] = {}
    for name, parameter in module.named_parameters():
        if parameter in lazy_weights:
            lazy, packing = lazy_weights.pop(parameter), packings.get(parameter)
            stored = stored_as(lazy, packing)
            weights[parameter] = _Weight(
                name, parameter, stored or lazy, packing, stored is not None
            )
    for _, layer, name, parameter in owners(module):
        if parameter in weights:
            weights[parameter].uses.append((layer, name, cuts.get((id(layer), name))))
    _read_all(weights.values(), read, cache)
    give_back_freed()
    for weight in weights.values():
        weight.assign()
    packed = {w.name: w for w in weights.values() if w.packing is not None}
    if not packed:
        return None
    if next(module.parameters(), None) is None:
        # A model takes its dtype from its parameters; without gains in norms, none may be left.
        dtype = [w.parameter.dtype for w in packed.values()][-1]
        nothing = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
        module.register_parameter("_dtype_holder", nothing)
    return PackingReport(
        quantization,
        {name: next(iter(w.kept.values()))[1] for name, w in packed.items()},
        [w.name for p, w in weights.items() if w.packing is None and p.ndim > 1],
        {name: w.squares for name, w in packed.items() if not w.is_stored},
    )


@dataclass(slots=True, eq=False)
class _Weight:
    """A weight, the parts of it that are kept, and the layers that use them."""

    name: str
    parameter: nn.Parameter
    lazy: LazyWeight | None  # None once it is read
    packing: WeightPacking | None  # of the whole weight
    is_stored: bool = False  # `lazy` returns packed bytes
    # A layer, the name of its parameter, and the part of the weight; None: the whole.
    uses: list[tuple[nn.Module, str, Cut | None]] = field(default_factory=list)
    kept: dict[Cut | None, tuple[Tensor, Any]] = field(default_factory=dict)  # parts and packings
    squares: tuple[float, float] = (0.0, 0.0)

    @property
    def place(self) -> tuple[str, int]:
        """The file and offset of its data, a sort key."""
        assert self.lazy is not None
        parts = sources(self.lazy)
        return (str(parts[0].path), parts[0].offset) if parts else ("", 0)

    def load(self, read: Callable[[Stored], Tensor]) -> None:
        """Read the weight, and keep its cuts, quantized or not."""
        lazy, self.lazy = self.lazy, None
        assert lazy is not None
        with torch.inference_mode(False):
            whole = materialize(lazy, read)
            del lazy  # a weight in memory is freed here
            cuts = dict.fromkeys(cut for *_, cut in self.uses)
            for cut in cuts:
                part = whole if cut is None else whole.narrow(cut[0], cut[1], cut[2] - cut[1])
                if self.packing is not None and self.is_stored:
                    shape = (part.shape[0], *self.packing.shape[1:])
                    packing = replace(self.packing, shape=shape)
                    self.kept[cut] = (part if cut is None else part.clone()).flatten(), packing
                elif self.packing is not None:
                    packing = replace(self.packing, shape=tuple(part.shape))
                    packed, self.squares = pack_and_measure(
                        part.contiguous(), packing.plain, self.name
                    )
                    self.kept[cut] = packed, packing
                elif cut is None or (None in cuts and kernels.library() is not None):
                    # A head that is tied to an embedding is a view of the embedding's rows.
                    self.kept[cut] = (part.contiguous() if cut is None else part), None
                else:
                    self.kept[cut] = part.clone(memory_format=torch.contiguous_format), None
            num_bytes = whole.nbytes
            del whole, part
        if self.packing is not None and num_bytes > _TRIMMED:
            give_back_freed()

    def interleave(self) -> None:
        """Lay out the weights that multiply quantized activations."""
        if self.packing is not None and self.packing.interleaved:
            with torch.inference_mode(False):
                self.kept = {
                    cut: (interleave(data, packing), packing)
                    for cut, (data, packing) in self.kept.items()
                }

    def assign(self) -> None:
        """Give it to the layers; tied ones share one tensor."""
        for layer, name, cut in self.uses:
            tensor, packing = self.kept[cut]
            if packing is not None:
                hold_packed(layer, name, tensor, packing)
            elif cut is None:
                self.parameter.data = tensor
            else:
                layer._parameters[name] = nn.Parameter(tensor, requires_grad=False)


def _read_all(
    weights: Iterable[_Weight], read: Callable[[Stored], Tensor], cache: PackedCache | None
) -> None:
    expected = {w.name: _stored_as(w) for w in weights}
    found = None if cache is None else cache.read(expected)
    if found is not None:
        tensors, squares = found
        for weight in weights:
            weight.kept[None] = tensors[weight.name], weight.packing
            a, b = squares.get(weight.name, (0.0, 0.0))
            weight.squares = a, b
    else:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda w: w.load(read), sorted(weights, key=lambda w: w.place)))
        if cache is not None:
            cache.write(
                {w.name: w.kept[None][0] for w in weights},
                {w.name: w.squares for w in weights if w.packing is not None},
            )
    for weight in weights:
        weight.interleave()


def _stored_as(weight: _Weight) -> tuple[torch.dtype, tuple[int, ...]]:
    if weight.packing is not None:
        return torch.uint8, (weight.packing.plain.nbytes,)
    return weight.parameter.dtype, tuple(weight.parameter.shape)
