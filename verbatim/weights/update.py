"""In-place weight updates of an open model: all tensors, or none if one is invalid.

`NewWeights` checks tensors against the whole model. A `WeightWriter` writes them to a module, which may hold
only some of the weights, ranges of them, or quantized weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.errors import InvalidRequest, ModelError, NotSupported
from verbatim.kernels.packing import WeightPacking
from verbatim.model.dcp.checkpoint import plain_name
from verbatim.model.loader import ModelSource
from verbatim.model.patching import exclusive
from verbatim.model.quantized import quantized_weights
from verbatim.model.shard import Columns
from verbatim.model.stored import read_stored, stored_in
from verbatim.quantization.matrix import pack_and_measure
from verbatim.weights.lazy import Cut
from verbatim.weights.load import open_weights
from verbatim.weights.opening import ADAPTER, open_files

Weights = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | str | os.PathLike[str] | nn.Module

_THREADS = 2
_MESSAGE_BYTES = 256 * 2**20
_MAX_SHOWN = 3  # names in an error message


def named_weights(weights: Weights, dtype: Callable[[], str]) -> dict[str, Tensor]:
    """Return the tensors of `weights`, by name.

    An iterator is consumed, and its plain tensors are copied, since the sender may reuse one buffer.

    Args:
        dtype: returns the dtype in which a model's folder is opened.

    Raises:
        InvalidRequest: the type is not supported, or a name occurs twice.
        ModelError: a folder or file can't be read.
    """
    if isinstance(weights, nn.Module):
        return dict(weights.state_dict())
    if isinstance(weights, str | os.PathLike):
        return _read(Path(os.path.expanduser(weights)), dtype)
    if isinstance(weights, Mapping):
        return dict(weights)
    if isinstance(weights, Tensor) or not isinstance(weights, Iterable):
        raise InvalidRequest(
            f"weights={type(weights).__name__}: must be a state dict, pairs of a name and a tensor, a "
            "folder of safetensors files, or a module"
        )
    is_iterator = isinstance(weights, Iterator)
    tensors: dict[str, Tensor] = {}
    for pair in weights:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise InvalidRequest("weights must come as pairs of a name and a tensor")
        if pair[0] in tensors:
            raise InvalidRequest(f"weights name {pair[0]} twice")
        reused = is_iterator and type(pair[1]) is Tensor
        tensors[pair[0]] = pair[1].clone() if reused else pair[1]
    return tensors


def _read(path: Path, dtype: Callable[[], str]) -> dict[str, Tensor]:
    if any((path / name).is_file() for name in ("config.json", ADAPTER)):
        # transformers may rename a checkpoint's tensors, or merge several of them.
        source = ModelSource(path, dtype())
        loaded = open_weights(partial(open_files, in_memory=True), source, None, False)
        if loaded.packed is not None:
            raise NotSupported(f"{path}: a quantized checkpoint; only LLM(model=...) opens it")
        return dict(loaded.module.state_dict())
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not all(f.is_file() and f.suffix == ".safetensors" for f in files):
        raise ModelError(f"{path} is neither a folder of safetensors files nor one such file")
    tensors: dict[str, Tensor] = {}
    for file in files:
        stored = stored_in(file)
        for name in sorted(tensors.keys() & stored.keys()):
            raise ModelError(f"{file} holds {name}, which another file holds as well")
        tensors |= {name: read_stored(one) for name, one in stored.items()}
    return tensors


class NewWeights:
    """New weights, checked against a whole model before any is written.

    Args:
        targets: the model or its skeleton, or its state dict with the module's own tensors
            (`keep_vars=True`).
        tensors: a new tensor for each target, by the same names; prefixes of wrappers such as
            DistributedDataParallel and torch.compile are ignored. One of several tied weights is enough.
        check_finite: refuse NaN and infinity, also after conversion to the model's dtype.

    Attributes:
        tensors: the new tensor of each name; tied weights share one.

    Raises:
        InvalidRequest: a name is missing or unknown, a shape or dtype doesn't fit, tied weights differ, or a
            number is not finite.
        NotSupported: a tensor is sharded, quantized, sparse or without data.
    """

    def __init__(
        self,
        targets: Mapping[str, Tensor] | nn.Module,
        tensors: Mapping[str, Tensor],
        *,
        check_finite: bool,
    ) -> None:
        if isinstance(targets, nn.Module):
            targets = targets.state_dict(keep_vars=True)
        targets = {plain_name(name): target for name, target in targets.items()}
        new_tensors: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if not isinstance(name, str):
                raise InvalidRequest(f"weights: {name!r} is not a name")
            if plain_name(name) in new_tensors:
                raise InvalidRequest(f"weights name {plain_name(name)} twice")
            new_tensors[plain_name(name)] = _plain_tensor(name, tensor)
        _check_names(new_tensors, targets)
        tied: dict[tuple[Any, ...], tuple[str, Tensor]] = {}
        for name, tensor in new_tensors.items():
            _check_fit(name, tensor, targets[name], check_finite)
            first = tied.setdefault(_place(targets[name]), (name, tensor))
            if not _same(first[1], tensor):
                raise InvalidRequest(
                    f"weights: {first[0]} and {name} are tied in this model, but differ"
                )
        self.tensors = {name: tied[_place(target)][1] for name, target in targets.items()}

    def messages(self, names: Iterable[str]) -> Iterator[dict[str, Tensor]]:
        """Yield the tensors of `names` in dicts of bounded size; tied weights come under each name."""
        piece: dict[str, Tensor] = {}
        size = 0
        for name in names:
            tensor = self.tensors[name]
            if piece and size + tensor.nbytes > _MESSAGE_BYTES:
                yield piece
                piece, size = {}, 0
            piece[name] = tensor
            size += tensor.nbytes
        yield piece  # even if it is empty: there is at least one message


class WeightWriter:
    """Writes new weights to a module in place; its tensors keep their memory.

    Args:
        module: module that holds some of a model's weights, under the model's names.
        cuts: the range of each weight that the module holds only in part, by name.
        whole: whether the module holds all weights; otherwise, weights without memory are skipped.

    Attributes:
        packed: names of the weights that are held quantized.
        exact: names of all other weights.
        squares: error sums of the last quantization, as in `PackingReport.squares`.

    Raises:
        NotSupported: elements of a parameter overlap in memory.
    """

    def __init__(
        self,
        module: nn.Module,
        cuts: Mapping[str, Cut] | None = None,
        *,
        whole: bool = True,
    ) -> None:
        self._cuts = cuts or {}
        self._packings: dict[str, tuple[Tensor, WeightPacking]] = {}
        self._targets: dict[str, Tensor] = {}
        self._prepared: dict[str, Tensor] = {}
        self.squares: dict[str, tuple[float, float]] = {}
        wrapped = [f"{n}.inner." for n, m in module.named_modules() if isinstance(m, Columns)]

        def original(name: str) -> str:
            for prefix in wrapped:
                if name.startswith(prefix):
                    return plain_name(name.replace(".inner.", ".", 1))
            return plain_name(name)

        for path, packed, packing in quantized_weights(module):
            self._packings[original(path)] = packed, packing
        written: set[int] = set()
        for name, tensor in module.state_dict(keep_vars=True).items():
            if id(tensor) in written:  # tied weights are written once
                continue
            written.add(id(tensor))
            if torch._debug_has_internal_overlap(tensor) != 1:
                self._targets[original(name)] = tensor
            elif whole:
                raise NotSupported(
                    f"weights: the model's {name} is in shared memory and can't be written"
                )
        self.packed, self.exact = list(self._packings), list(self._targets)

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Quantize the new values of quantized weights, and hold them until `write`; on an error, hold none.

        Raises:
            ModelError: a tensor holds NaN, an infinity or too large a number.
        """

        def pack(name: str) -> tuple[Tensor, tuple[float, float]]:
            _, packing = self._packings[name]
            part = self._part(name, tensors[name]).to(packing.dtype).contiguous()
            return pack_and_measure(part, packing, name)

        names = [name for name in self.packed if name in tensors]
        try:
            with ThreadPoolExecutor(_THREADS) as pool:
                for name, (packed, squares) in zip(names, pool.map(pack, names), strict=True):
                    self._prepared[name], self.squares[name] = packed, squares
        except BaseException:
            self.drop()
            raise

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Write the new values of unquantized weights, and everything that was prepared.

        No other engine and no signal handler runs the module meanwhile.
        """
        pairs = [
            (target, self._part(name, tensors[name]))
            for name, target in self._targets.items()
            if name in tensors
        ]
        pairs += [(self._packings[name][0], packed) for name, packed in self._prepared.items()]
        self._prepared = {}
        overwrite(pairs)

    def drop(self) -> None:
        """Discard the prepared weights."""
        self._prepared = {}

    def _part(self, name: str, tensor: Tensor) -> Tensor:
        cut = self._cuts.get(name)
        return tensor if cut is None else tensor.narrow(cut[0], cut[1], cut[2] - cut[1])


def overwrite(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy tensors, in pairs (target, new); no other engine and no signal handler runs meanwhile."""
    pairs = _without_overlaps(pairs)
    with exclusive:
        for inference in (False, True):
            group = [pair for pair in pairs if pair[0].is_inference() is inference]
            if group:
                targets, new = zip(*group, strict=True)
                with torch.inference_mode(inference), torch.no_grad():
                    torch._foreach_copy_(targets, new)


def _without_overlaps(pairs: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Clone new tensors that share memory with targets; drop pairs that are the same tensor."""
    target_extents = [_extent(target) for target, _ in pairs]

    def apart(tensor: Tensor) -> Tensor:
        start, end = _extent(tensor)
        inside = any(start < other_end and first < end for first, other_end in target_extents)
        return tensor.clone() if inside else tensor

    return [(target, apart(tensor)) for target, tensor in pairs if _place(tensor) != _place(target)]


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the start and end address of a tensor's storage."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _same(a: Tensor, b: Tensor) -> bool:
    """Return whether shapes and values are equal; NaN equals NaN."""
    if _place(a) == _place(b):
        return True
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Return the location and layout of a tensor, which identify it."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _plain_tensor(name: str, tensor: Any) -> Tensor:
    """Return the tensor in RAM; refuse tensors that can't be copied bit for bit."""
    if hasattr(tensor, "full_tensor"):
        raise NotSupported(f"weights: {name} is sharded; pass its full_tensor()")
    if type(tensor) not in (Tensor, nn.Parameter):
        raise InvalidRequest(f"weights: {name} is a {type(tensor).__name__}, not a plain tensor")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise NotSupported(f"weights: {name} is sparse, quantized or without data")
    plain: Tensor = tensor.detach().cpu()
    return plain


def _check_names(new_tensors: dict[str, Tensor], targets: dict[str, Tensor]) -> None:
    unknown = sorted(new_tensors.keys() - targets.keys())
    if unknown:
        raise InvalidRequest(
            f"weights: {len(unknown)} names are not the model's, such as {_some(unknown)}"
        )
    covered = {_place(targets[name]) for name in new_tensors}
    missing = sorted(name for name, target in targets.items() if _place(target) not in covered)
    if missing:
        raise InvalidRequest(
            f"weights: {len(missing)} of {len(targets)} tensors are missing, such as {_some(missing)}"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:_MAX_SHOWN]) + (", ..." if len(names) > _MAX_SHOWN else "")


def _check_fit(name: str, tensor: Tensor, target: Tensor, check_finite: bool) -> None:
    if tensor.shape != target.shape:
        raise InvalidRequest(
            f"weights: {name} has shape {list(tensor.shape)}; the model's has {list(target.shape)}"
        )
    both_float = tensor.is_floating_point() and target.is_floating_point()
    if not both_float and tensor.dtype != target.dtype:
        raise InvalidRequest(
            f"weights: {name} is {tensor.dtype}; the model's {target.dtype} can't be converted "
            "from it"
        )
    if check_finite and both_float and not _is_finite(tensor, target.dtype):
        raise InvalidRequest(f"weights: {name} holds NaN or infinity")


def _is_finite(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Return whether every number is finite in `dtype`.

    Only the extremes are checked: both are NaN if any element is, and rounding preserves order. This single
    pass without writes takes a tenth of the time of `torch.isfinite`.
    """
    if not tensor.numel():
        return True
    if tensor.itemsize == 1:  # float8, without aminmax in torch
        tensor = tensor.float()
    return bool(torch.stack(torch.aminmax(tensor)).to(dtype).isfinite().all())
