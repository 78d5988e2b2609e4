"""In-place weight updates of an open model: all tensors, or none if one is invalid."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.errors import InvalidRequest, ModelError, NotSupported
from verbatim.model.borrow import exclusive
from verbatim.model.packed import packed_buffers

Weights = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | str | os.PathLike[str] | nn.Module

# Prefixes that wrappers add to parameter names.
_WRAPPERS = re.compile(
    r"(^|(?<=\.))(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.|^(module\.)+"
)
_SHOWN = 3  # names in an error message


def named_weights(weights: Weights) -> dict[str, Tensor]:
    """Return the tensors of `weights`, by name.

    An iterator is consumed, and its plain tensors are copied, as the sender may reuse one buffer.

    Raises:
        InvalidRequest: an unsupported type, or a duplicate name.
        ModelError: a folder or file that can't be read.
    """
    if isinstance(weights, nn.Module):
        return dict(weights.state_dict())
    if isinstance(weights, str | os.PathLike):
        return _read(Path(os.path.expanduser(weights)))
    if isinstance(weights, Mapping):
        return dict(weights)
    if isinstance(weights, Tensor) or not isinstance(weights, Iterable):
        raise InvalidRequest(
            f"weights={type(weights).__name__}: must be a state dict, pairs of a name and a tensor, a "
            "folder of safetensors files, or a module"
        )
    is_iterator = isinstance(weights, Iterator)
    found: dict[str, Tensor] = {}
    for pair in weights:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InvalidRequest("weights must come as pairs of a name and a tensor")
        if pair[0] in found:
            raise InvalidRequest(f"weights name {pair[0]} twice")
        reused = is_iterator and type(pair[1]) is Tensor
        found[pair[0]] = pair[1].clone() if reused else pair[1]
    return found


def _read(path: Path) -> dict[str, Tensor]:
    if (path / "config.json").is_file():
        # transformers may rename a checkpoint's tensors, or merge several of them.
        from verbatim.model.loader import load

        return dict(load(path, with_tokenizer=False).module.state_dict())
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not all(f.is_file() and f.suffix == ".safetensors" for f in files):
        raise ModelError(f"{path} is neither a folder of safetensors files nor one such file")
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    found: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors = load_file(file)
        except (SafetensorError, OSError):  # their messages may quote the file
            raise ModelError(f"{file} can't be read: damaged or cut short") from None
        twice = sorted(found.keys() & tensors.keys())
        if twice:
            raise ModelError(f"{file} holds {twice[0]}, which another file holds as well")
        found |= tensors
    return found


class NewWeights:
    """Weights checked against a module before any is written.

    Args:
        module: the module to update in place; parameters keep their memory.
        tensors: one for every entry of its state dict, by the same names; prefixes of wrappers such as
            DistributedDataParallel and torch.compile are ignored. One of several tied weights is enough.
        check_finite: refuse NaN and infinity, also after conversion to the module's dtype.

    Raises:
        InvalidRequest: a name is missing or unknown, a shape or dtype doesn't fit, tied weights differ, or a
            number is not finite.
        NotSupported: tensors that are sharded, quantized, sparse or without data; a parameter of the module
            with overlapping elements.
    """

    def __init__(
        self, module: nn.Module, tensors: Mapping[str, Tensor], *, check_finite: bool
    ) -> None:
        targets = {_plain(n): t for n, t in module.state_dict(keep_vars=True).items()}
        given: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if not isinstance(name, str):
                raise InvalidRequest(f"weights: {name!r} is not a name")
            if _plain(name) in given:
                raise InvalidRequest(f"weights name {_plain(name)} twice")
            given[_plain(name)] = _plain_tensor(name, tensor)
        _check_names(given, targets)
        self._pairs: list[tuple[Tensor, Tensor]] = []
        tied: dict[tuple[Any, ...], tuple[str, Tensor]] = {}
        for name, tensor in given.items():
            target = targets[name]
            _check_fit(name, tensor, target, check_finite)
            first = tied.setdefault(_place(target), (name, tensor))
            if first[1] is tensor:
                self._pairs.append((target, tensor))
            elif not _same(first[1], tensor):
                raise InvalidRequest(f"weights: {first[0]} and {name} are tied here, and differ")
        self._untangle()

    def _untangle(self) -> None:
        """Copy new tensors that share memory with the module's, which will be overwritten."""
        owned = [_extent(target) for target, _ in self._pairs]

        def apart(tensor: Tensor) -> Tensor:
            start, end = _extent(tensor)
            inside = any(start < other_end and first < end for first, other_end in owned)
            return tensor.clone() if inside else tensor

        self._pairs = [
            (target, apart(tensor))
            for target, tensor in self._pairs
            if _place(tensor) != _place(target)
        ]

    def write(self) -> None:
        """Write all tensors, while no other engine and no signal handler runs the module."""
        with exclusive:
            for inference in (False, True):
                pairs = [(t, new) for t, new in self._pairs if t.is_inference() is inference]
                if pairs:
                    targets, tensors = zip(*pairs, strict=True)
                    with torch.inference_mode(inference), torch.no_grad():
                        torch._foreach_copy_(targets, tensors)


def writes_to(module: nn.Module) -> object:
    """Return the identity and the version counter of each parameter, to detect changes."""
    found: list[tuple[int, int]] = []
    # Not `parameters()`, which takes twice as long: this runs at every step.
    layers = [module]
    for layer in layers:
        found.extend(
            (id(p), 0 if p.is_inference() else p._version)
            for p in layer._parameters.values()
            if p is not None
        )
        layers.extend(inner for inner in layer._modules.values() if inner is not None)
    return found


def _plain(name: str) -> str:
    return _WRAPPERS.sub("", name)


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
    """Return the location of a tensor, which identifies it."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _plain_tensor(name: str, tensor: Any) -> Tensor:
    """Return a plain tensor in RAM; refuse tensors that can't be copied bit for bit."""
    if hasattr(tensor, "full_tensor"):
        raise NotSupported(f"weights: {name} is sharded; hand over what its full_tensor() returns")
    if type(tensor) not in (Tensor, nn.Parameter):
        raise InvalidRequest(f"weights: {name} is a {type(tensor).__name__}, not a plain tensor")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise NotSupported(f"weights: {name} is sparse, quantized or without data")
    plain: Tensor = tensor.detach().cpu()
    return plain


def _check_names(given: dict[str, Tensor], targets: dict[str, Tensor]) -> None:
    unknown = sorted(given.keys() - targets.keys())
    if unknown:
        raise InvalidRequest(
            f"weights: {len(unknown)} names are not the model's, such as {_some(unknown)}"
        )
    covered = {_place(targets[name]) for name in given}
    missing = sorted(name for name, target in targets.items() if _place(target) not in covered)
    if missing:
        raise InvalidRequest(
            f"weights: {len(missing)} of {len(targets)} tensors are missing, such as {_some(missing)}"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def _check_fit(name: str, tensor: Tensor, target: Tensor, check_finite: bool) -> None:
    if tensor.shape != target.shape:
        raise InvalidRequest(
            f"weights: {name} has shape {list(tensor.shape)}; the model's has {list(target.shape)}"
        )
    both = tensor.is_floating_point() and target.is_floating_point()
    if not both and tensor.dtype != target.dtype:
        raise InvalidRequest(
            f"weights: {name} is {tensor.dtype}; the model's {target.dtype} can't be made of it"
        )
    if torch._debug_has_internal_overlap(target) == 1:
        raise NotSupported(
            f"weights: the model's {name} lies in shared memory and can't be written"
        )
    if check_finite and both and not _is_finite(tensor, target.dtype):
        raise InvalidRequest(f"weights: {name} holds NaN or infinity")


def _is_finite(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Return whether every number is finite in `dtype`.

    It checks the extremes: both are NaN if any element is, and rounding keeps their order. One pass without
    writes takes a tenth of the time of `torch.isfinite`.
    """
    if not tensor.numel():
        return True
    if tensor.itemsize == 1:  # float8, without aminmax in torch
        tensor = tensor.float()
    return bool(torch.stack(torch.aminmax(tensor)).to(dtype).isfinite().all())


def weight_info(module: nn.Module) -> dict[str, int]:
    """Return the number and bytes of a module's parameters: tied ones once, quantized ones as stored."""
    parameters, packed = list(module.parameters()), list(packed_buffers(module))
    return {
        "parameters": sum(p.numel() for p in parameters)
        + sum(math.prod(packing.shape) for _, _, packing in packed),
        "weight_bytes": sum(p.nbytes for p in parameters) + sum(len(data) for _, data, _ in packed),
    }
