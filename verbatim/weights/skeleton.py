"""A model without its weights in memory: the module, and the location of each weight."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.errors import ModelError, NotSupported, VerbatimError, first_line
from verbatim.model.loader import LoadedModel, ModelSource, building, empty_module
from verbatim.model.packed import placeholder
from verbatim.model.patching import quiet
from verbatim.model.stored import read_stored, stored_in
from verbatim.model.unused import refuse_unused
from verbatim.untrusted import check_dtypes, check_size, shards_of
from verbatim.weights.adapter import AdapterFolder
from verbatim.weights.lazy import Held, LazyWeight, Traced, materialize, traced
from verbatim.weights.lora import merge_adapter

USUAL = ("model.safetensors", "pytorch_model.bin")  # names of files of weights
INDEX = ".index.json"  # behind the name of a file that is in shards


@dataclass(slots=True)
class ModelFiles:
    """A model on disk, before its module is built.

    Attributes:
        name: of the model.
        path: the folder of its files, or a GGUF file.
        config: transformers', without a `quantization_config`.
        tensors: returns the tensors by the names of a checkpoint (plain ones are in memory) and the module's
            dtype, given the module on the meta device. None in place of the tensors: transformers decodes
            the GGUF file. It may set other attributes.
        open_tokenizer: returns transformers' tokenizer, or None.
        generation: returns the generation config, given the module and the tokenizer.
        weights: its files of weights, without the adapter's.
        adapter: a PEFT adapter that is merged into the weights.
        plain_config: as `LoadedModel.config`.
        adjust: changes the module, whose parameters are traced, after it got the tensors, and returns the
            names of those that are not used.
        is_plain: the config says nothing of quantization.
    """

    name: str
    path: Path
    config: Any
    tensors: Callable[[Any], tuple[Mapping[str, Tensor] | None, torch.dtype]]
    open_tokenizer: Callable[[], Any]
    generation: Callable[[Any, Any], Any]
    weights: Sequence[Path] = ()
    adapter: AdapterFolder | None = None
    plain_config: Mapping[str, Any] | None = None
    adjust: Callable[[Any], list[str]] | None = None
    is_plain: bool = False

    def open(self, source: ModelSource, tokenizer: Any, *, in_memory: bool) -> LoadedModel:
        """Build the module that transformers would load, without reading a weight.

        Its parameters have no memory, and tied ones have one lazy weight.

        Args:
            tokenizer: None: the model's own; False: none.
            in_memory: accept parameters that transformers makes and does not read, which are held in memory.

        Raises:
            ModelError: a damaged or missing file, weights that are missing, not used or of another shape.
        """
        if tokenizer is None:
            tokenizer = self.open_tokenizer()
        empty = empty_module(self.path, self.config, source.trust_remote_code)
        tensors, dtype = self.tensors(empty)
        check_size(self.path, empty, sum(path.stat().st_size for path in self.weights))
        module, unused = self._filled(empty, tensors, dtype)
        lazy_weights = _hollow_parameters(module, in_memory)
        _read_buffers(module)
        if self.adapter is not None:
            merge_adapter(self.adapter, module, lazy_weights)
        if source.unused_weights == "error":
            refuse_unused(self.name, module, self.config, unused)
        module.generation_config = self.generation(module, tokenizer)
        return LoadedModel(
            module.eval(),
            tokenizer or None,
            module.generation_config,
            self.name,
            lazy_weights=lazy_weights,
            folder=self.path if self.path.is_dir() else self.path.parent,
            files=self.weights,
            adapter=None if self.adapter is None else self.adapter.folder,
            wrapper=self.config,
            config=self.plain_config,
        )

    def _filled(
        self, empty: Any, tensors: Mapping[str, Tensor] | None, dtype: torch.dtype
    ) -> tuple[Any, list[str]]:
        """Let transformers assign the tensors to a module; return the names of those that it has none for."""
        source = self.path
        where: dict[str, Any]
        if tensors is None:
            where = dict(pretrained_model_name_or_path=str(source.parent), gguf_file=source.name)
            where |= dict(local_files_only=True)
        else:
            lazy = {n: t if isinstance(t, Traced) else traced(Held(t)) for n, t in tensors.items()}
            check_dtypes(source, empty, lazy)
            where = dict(pretrained_model_name_or_path=None, state_dict=lazy)
        # The language model's config, if the folder's also has towers.
        where |= dict(config=empty.config, dtype=dtype, output_loading_info=True)
        try:
            with building, quiet():
                module, report = type(empty).from_pretrained(**where)
        except VerbatimError:
            raise
        except Exception as error:  # damaged files and modules' own code raise any type
            raise ModelError(f"{source}: can't be loaded: {first_line(error)}") from error
        _refuse_missing(source, report, is_plain=self.is_plain)
        unused = sorted(map(str, report["unexpected_keys"]))
        return module, unused if self.adjust is None else self.adjust(module)


def _refuse_missing(source: object, report: Mapping[str, Any], *, is_plain: bool) -> None:
    """Raise ModelError if weights are missing or of another shape.

    Args:
        report: transformers' report of loading.
        is_plain: the config says nothing of quantization.
    """
    for kind in ("missing_keys", "mismatched_keys"):
        names, unused = (sorted(map(str, report[of])) for of in (kind, "unexpected_keys"))
        if names:
            what, hint = kind.replace("_keys", ""), ""
            if unused and is_plain:
                hint = (
                    f"; the files have {unused[0]} and others that are not used: does config.json lack its "
                    "quantization_config?"
                )
            raise ModelError(f"{source}: {len(names)} weights are {what}, such as {names[0]}{hint}")


def _hollow_parameters(module: nn.Module, in_memory: bool) -> dict[nn.Parameter, LazyWeight]:
    """Replace traced parameters by placeholders; tied ones stay tied."""
    placed: dict[int, nn.Parameter] = {}
    lazy_weights: dict[nn.Parameter, LazyWeight] = {}
    for layer in module.modules():
        for name, parameter in layer._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in placed:
                found = parameter if isinstance(parameter, Traced) else parameter.data
                if not isinstance(found, Traced) and not in_memory:
                    raise NotSupported(
                        f"{type(layer).__name__}.{name} is a parameter that transformers does not read from "
                        "the checkpoint, so it can't be loaded later"
                    )
                placed[id(parameter)] = nn.Parameter(placeholder(found), requires_grad=False)
                lazy = found.lazy if isinstance(found, Traced) else Held(found)
                lazy_weights[placed[id(parameter)]] = lazy
            layer._parameters[name] = placed[id(parameter)]
    return lazy_weights


def _read_buffers(module: nn.Module) -> None:
    """Read the buffers of the checkpoint, which are small."""
    for layer in module.modules():
        for name, buffer in layer._buffers.items():
            if isinstance(buffer, Traced):
                layer._buffers[name] = materialize(buffer.lazy, read_stored)


def tensors_of(files: Iterable[Path]) -> dict[str, Any]:
    """Return the lazy weight of every tensor of some files of safetensors or of torch.save.

    Raises:
        ModelError: a file is damaged, cut short or missing.
    """
    found: dict[str, Any] = {}
    for path in files:
        found.update(_unpickled(path) if is_pickle(path) else stored_in(path))
    return found


def is_pickle(path: Path) -> bool:
    """Return whether a file of weights is torch.save's instead of safetensors."""
    return path.suffix == ".bin"


def weight_files(folder: Path, named: str | None = None) -> list[Path]:
    """Return the files with a folder's weights, which transformers would read.

    Args:
        named: the file that the config names instead of the usual ones.

    Raises:
        ModelError: a shard is missing.
    """
    for name in USUAL if named is None else (named,):
        is_index = name.endswith(INDEX)
        if os.path.lexists(folder / name) and not is_index:
            return [folder / name]
        index = folder / (name if is_index else name + INDEX)
        if index.is_file():
            names = shards_of(index)
            missing = [shard for shard in names if not (folder / shard).is_file()]
            if missing:
                raise ModelError(
                    f"{folder} lacks {len(missing)} of {len(names)} shards: {missing[0]}"
                )
            return [folder / shard for shard in names]
    return []


def _unpickled(path: Path) -> dict[str, Held]:
    """Return the tensors of a file of torch.save, mapped into memory."""
    try:
        try:
            tensors = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except RuntimeError:  # from before torch 1.6
            tensors = torch.load(path, map_location="cpu", weights_only=True)
        found = {name: t for name, t in tensors.items() if isinstance(t, Tensor)}
        inner = [name for name, value in tensors.items() if isinstance(value, Mapping)]
    except Exception as error:  # a damaged file leads to arbitrary exceptions
        raise ModelError(f"{path}: can't be loaded: {first_line(error)}") from None
    if inner and not found:
        raise ModelError(
            f"{path}: its weights lie under {str(inner[0])[:80]!r}; save what is there with torch.save"
        )
    for name, tensor in found.items():
        if tensor.layout is not torch.strided or tensor.is_quantized or not tensor.is_cpu:
            raise ModelError(f"{path}: {name} is sparse, quantized or without data")
    return {name: Held(tensor) for name, tensor in found.items()}
