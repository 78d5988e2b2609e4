"""Loads weights into a module: all or only parts of them, as they are stored or quantized."""

from __future__ import annotations

import hashlib
import json
import os
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from verbatim import kernels
from verbatim.common.files import atomic_write
from verbatim.common.heap import release_free_memory
from verbatim.errors import ModelError, first_line
from verbatim.kernels.packing import WeightPacking
from verbatim.model.loader import Checkpoint, LoadedModel, ModelSource
from verbatim.model.quantizable import matrices_of, owners
from verbatim.model.quantized import hold_quantized
from verbatim.model.stored import Stored, read_stored, stamp_of, stored_in
from verbatim.options import available_memory, dtype_name
from verbatim.quantization.formats import Quantization
from verbatim.quantization.matrix import interleave, pack_and_measure
from verbatim.quantization.report import PackingReport
from verbatim.weights.files import bytes_of
from verbatim.weights.identity import files_digest
from verbatim.weights.lazy import Cut, LazyWeight, materialize, packings_of, sources, stored_as

_THREADS = 2
_TRIM_BYTES = 1 << 20  # after larger weights, freed memory is returned to the system
_CACHE_LINE = 64  # bytes
_SMALL_BYTES = 1 << 16  # smaller weights stay in the L1 or L2 cache anyway
_FORMAT = 3  # version of the cache's file format and of the packed layouts
_MIN_BYTES = 32_000_000  # smaller models are not cached, since quantizing them takes only moments
_ABANDONED_S = 3600  # unfinished files older than this are left over from killed processes
_DAMAGE = (ValueError, LookupError, TypeError, AttributeError, RecursionError)  # of metadata
Place = tuple[int, str]  # (id of a module, name of its parameter)


def open_weights(
    open_: Callable[[ModelSource, Any], LoadedModel],
    source: ModelSource,
    quantization: Quantization | None,
    tokenizer: Any = None,
) -> LoadedModel:
    """Open a model with its weights, quantized or as they are stored.

    With `quantization`, the quantized weights of a safetensors or DCP folder are cached on disk. Weights that
    are stored packed stay packed (`packings_of`).

    Args:
        open_: opens `source` with lazy weights, or as a live module, given `tokenizer`.

    Raises:
        ModelError: the model can't be opened, or has NaN, an infinity or a number too large to quantize.
        NotSupported: the model has no weight that can be quantized.
    """
    loaded = open_(source, tokenizer)
    if loaded.live:
        return loaded
    source = source.resolved(loaded)
    assert loaded.lazy_weights is not None
    module, lazy_weights = loaded.module, dict(loaded.lazy_weights)
    original = module.state_dict(keep_vars=True)
    cache = None if quantization is None else _PackedCache(loaded, quantization)
    loaded.lazy_weights = loaded.config = None
    fits = 2 * sum(p.nbytes for p in lazy_weights) <= available_memory()
    read = read_stored if quantization is not None else mapped_reader(copy_unaligned=fits)
    loaded.packed = load_weights(module, lazy_weights, quantization, read=read, cache=cache)
    # Without quantized weights, the state dict is the module's own, and must be freed with the module.
    loaded.original = None if loaded.packed is None else original
    if fits and quantization is None:
        store_by_rows(module)
    loaded.checkpoint = Checkpoint(loaded, lambda: open_weights(open_, source, quantization, False))
    return loaded


def store_by_rows(module: nn.Module) -> None:
    """Store matrices of shape `[in, out]`, as in GPT-2, Llama 4 and gpt-oss, in the order `[out, in]`.

    Products read them faster, with bit-identical results. The parameters keep their shapes.
    """
    for parameter, columns in matrices_of(module).items():
        if columns and parameter.is_contiguous() and parameter.nbytes >= _SMALL_BYTES:
            parameter.data = parameter.data.mT.contiguous().mT


def mapped_reader(*, copy_unaligned: bool) -> Callable[[Stored], Tensor]:
    """Return a function that reads tensors of safetensors files as views of the memory-mapped files.

    Writes to the tensors don't reach the files. Tensors of other files, which training may overwrite, are
    copied. The function raises ModelError if a file has changed.

    Args:
        copy_unaligned: copy tensors that don't begin at a cache line. Their vectors span two lines, which
            slows products down by a tenth from 16 rows on (measured); fewer rows are memory-bound.
    """
    files: dict[Path, Tensor] = {}

    def read(stored: Stored) -> Tensor:
        unaligned = copy_unaligned and stored.offset % _CACHE_LINE
        if unaligned or stored.path.suffix != ".safetensors":
            return read_stored(stored)
        if stored.path not in files:
            stamp = stamp_of(stored.path)
            if stored.stamp not in (None, stamp):
                raise ModelError(f"{stored.path} changed while the model was opened")
            files[stored.path] = torch.from_file(
                str(stored.path), shared=False, size=stamp[2], dtype=torch.uint8
            )
        data = files[stored.path][stored.offset : stored.offset + stored.nbytes]
        if stored.offset % stored.dtype.itemsize:
            data = data.clone()
        return data.view(stored.dtype).view(stored.shape)

    return read


def load_weights(
    module: nn.Module,
    lazy_weights: dict[nn.Parameter, LazyWeight],
    quantization: Quantization | None,
    *,
    read: Callable[[Stored], Tensor] = read_stored,
    cuts: Mapping[Place, Cut] | None = None,
    cache: _PackedCache | None = None,
) -> PackingReport | None:
    """Read weights into a module, and quantize the matrices.

    Weights that are stored packed stay as they are, unless `quantization` has fewer bits. At most two
    whole, unquantized weights are in memory at the same time.

    Args:
        lazy_weights: the weights to read, by parameter; emptied. Other parameters are unchanged.
        read: returns the data of a stored tensor.
        cuts: the range to keep of each partially held weight, by place. Quantized values do not depend on it.
        cache: cache of the quantized weights, if all weights are read and none is cut.

    Returns:
        A report on the quantized weights; None if there are none.
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
    if cache is None or not cache.read(weights.values()):
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(lambda w: w.load(read), sorted(weights.values(), key=lambda w: w.place)))
        if cache is not None:
            cache.write(weights.values())
    for weight in weights.values():
        weight.assign()
    release_free_memory()
    packed = {w.name: w for w in weights.values() if w.packing is not None}
    if not packed:
        return None
    if next(module.parameters(), None) is None:
        # A module's dtype is that of its parameters; if its norms have no weights, none is left.
        dtype = [w.parameter.dtype for w in packed.values()][-1]
        nothing = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
        module.register_parameter("_dtype_holder", nothing)
    return PackingReport(
        quantization,
        {name: next(iter(w.parts.values()))[1] for name, w in packed.items()},
        [w.name for p, w in weights.items() if w.packing is None and p.ndim > 1],
        {name: w.squares for name, w in packed.items() if not w.is_stored},
    )


@dataclass(slots=True, eq=False)
class _Weight:
    """A weight to load, its parts to hold, and the layers that use them."""

    name: str
    parameter: nn.Parameter
    lazy: LazyWeight | None  # None once it is read
    packing: WeightPacking | None  # of the whole weight
    is_stored: bool = False  # whether `lazy` computes packed bytes
    # (layer, name of its parameter, range of the weight; None: the whole weight)
    uses: list[tuple[nn.Module, str, Cut | None]] = field(default_factory=list)
    parts: dict[Cut | None, tuple[Tensor, Any]] = field(default_factory=dict)  # (data, packing)
    squares: tuple[float, float] = (0.0, 0.0)

    @property
    def place(self) -> tuple[str, int]:
        """The file and offset of the data, as a sort key."""
        assert self.lazy is not None
        parts = sources(self.lazy)
        return (str(parts[0].path), parts[0].offset) if parts else ("", 0)

    def load(self, read: Callable[[Stored], Tensor]) -> None:
        """Read the weight, and hold the parts in use, quantized or not."""
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
                    self.parts[cut] = (part if cut is None else part.clone()).flatten(), packing
                elif self.packing is not None:
                    packing = replace(self.packing, shape=tuple(part.shape))
                    packed, self.squares = pack_and_measure(
                        part.contiguous(), packing.plain, self.name
                    )
                    self.parts[cut] = packed, packing
                elif cut is None or (None in cuts and kernels.library() is not None):
                    # An LM head that is tied to an embedding is a view of the embedding's rows.
                    self.parts[cut] = (part.contiguous() if cut is None else part), None
                else:
                    self.parts[cut] = part.clone(memory_format=torch.contiguous_format), None
            num_bytes = whole.nbytes
            del whole, part
        if self.packing is not None and num_bytes > _TRIM_BYTES:
            release_free_memory()

    def assign(self) -> None:
        """Assign the weight to its layers; tied layers share one tensor.

        A weight for quantized activations is converted to their layout, which the cache file does not have.
        """
        if self.packing is not None and self.packing.interleaved:
            with torch.inference_mode(False):
                self.parts = {
                    cut: (interleave(data, packing), packing)
                    for cut, (data, packing) in self.parts.items()
                }
        for layer, name, cut in self.uses:
            tensor, packing = self.parts[cut]
            if packing is not None:
                hold_quantized(layer, name, tensor, packing)
            elif cut is None:
                self.parameter.data = tensor
            else:
                layer._parameters[name] = nn.Parameter(tensor, requires_grad=False)


class _PackedCache:
    """A file with the quantized weights of one model, so that it is quantized only once.

    The user's cache (`$XDG_CACHE_HOME/verbatim`, else `~/.cache/verbatim`) has one safetensors file for each
    folder, format and dtype. Its metadata holds the checkpoint's fingerprint and a checksum of each tensor. A
    damaged file, or one of another checkpoint, is ignored and overwritten. Files are replaced atomically, so
    several processes may open the model at once.

    Args:
        loaded: a skeleton, with weights in safetensors files or a DCP checkpoint.
        quantization: the format of the quantized weights.

    Attributes:
        path: the cache file; None: nothing is cached, as the model is small or there is no home folder.
    """

    def __init__(self, loaded: LoadedModel, quantization: Quantization) -> None:
        self.path: Path | None = None
        assert loaded.lazy_weights is not None and loaded.folder is not None
        parts = [s for lazy in loaded.lazy_weights.values() for s in sources(lazy)]
        root = _cache_folder()
        if root is None or sum(s.nbytes for s in parts) < _MIN_BYTES:
            return
        dtype = dtype_name(next(iter(loaded.lazy_weights)).dtype)
        kind = quantization.of_weights.name  # the format of activations does not change the bytes
        identity = f"{loaded.folder}\n{kind}\n{dtype}"
        digest = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
        self.path = root / f"{loaded.folder.name[:80]}-{kind}-{digest}.safetensors"
        contents = f"{files_digest(loaded)} {_FORMAT} {kind} {dtype}"
        self._key = hashlib.blake2b(contents.encode(), digest_size=16).hexdigest()

    def read(self, weights: Iterable[_Weight]) -> bool:
        """Read the weights and their error sums; return False if they are not cached."""
        if self.path is None or not os.path.isfile(self.path):
            return False
        expected = {
            w.name: (w.parameter.dtype, tuple(w.parameter.shape))
            if w.packing is None
            else (torch.uint8, (w.packing.plain.nbytes,))
            for w in weights
        }
        try:
            with safe_open(self.path, framework="pt") as file:
                meta = json.loads(file.metadata()["packed"])
            stored = stored_in(self.path)
            found = {name: (s.dtype, s.shape) for name, s in stored.items()}
            if meta["key"] != self._key or expected != found:
                return False
            with ThreadPoolExecutor(_THREADS) as pool:
                tensors = dict(zip(stored, pool.map(read_stored, stored.values()), strict=True))
                checksums = dict(zip(tensors, pool.map(_checksum, tensors.values()), strict=True))
            squares = {name: (float(a), float(b)) for name, (a, b) in meta["error"].items()}
            if checksums != meta["crc32"]:
                return False
        except (*_DAMAGE, SafetensorError, ModelError, OSError):
            return False
        for weight in weights:
            weight.parts[None] = tensors[weight.name], weight.packing
            weight.squares = squares.get(weight.name, (0.0, 0.0))
        return True

    def write(self, weights: Iterable[_Weight]) -> None:
        """Write the weights to the cache, or warn with the reason if that fails."""
        if self.path is None:
            return
        tensors = {w.name: w.parts[None][0] for w in weights}
        with ThreadPoolExecutor(_THREADS) as pool:
            sums = dict(zip(tensors, pool.map(_checksum, tensors.values()), strict=True))
        error = {w.name: w.squares for w in weights if w.packing is not None}
        # A single entry: safetensors writes several in random order, and equal caches should be equal files.
        metadata = json.dumps({"key": self._key, "crc32": sums, "error": error})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _delete_abandoned(self.path.parent)
            with atomic_write(self.path) as file:
                save_file(tensors, file.name, {"packed": metadata})
        except (OSError, SafetensorError) as problem:
            why = getattr(problem, "strerror", None) or first_line(problem)
            warnings.warn(
                f"the packed weights can't be kept in {self.path} ({why}), so they are packed again whenever "
                "the model is opened",
                RuntimeWarning,
                stacklevel=2,
            )


def _delete_abandoned(folder: Path) -> None:
    """Delete unfinished files of processes that were killed."""
    for path in folder.glob("*.part"):
        with suppress(OSError):  # another process deleted it first
            if path.stat().st_mtime < time.time() - _ABANDONED_S:
                path.unlink()


def _cache_folder() -> Path | None:
    named = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):  # as the XDG standard requires
        return Path(named) / "verbatim"
    try:
        return Path.home() / ".cache" / "verbatim"
    except RuntimeError:
        return None


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(bytes_of(tensor)) if tensor.nbytes else 0
