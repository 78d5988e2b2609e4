"""Models that are opened from files: their sources, configs and checkpoints."""

from __future__ import annotations

import copy
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from verbatim.errors import (
    ModelChanged,
    ModelError,
    NotSupported,
    UnsupportedModel,
    VerbatimError,
    first_line,
)
from verbatim.model.packed import drop_weights, moved_to, packed_buffers
from verbatim.model.quantization import Quantization
from verbatim.untrusted import check_config, parts_of, read_json, resolve_implementations

if TYPE_CHECKING:
    from verbatim.model.packing import PackingReport

HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
# Ends of the names of files that determine the weights, apart from `LoadedModel.files`; the last two of DCP.
_FILES = (".safetensors", ".bin", ".index.json", "config.json", ".distcp", ".metadata")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# transformers patches its own and torch's functions while it builds a model. Two threads at once would
# restore them in the wrong order, and break every later model. Acquire `exclusive` before this lock.
building = threading.RLock()


@dataclass(slots=True)
class LoadedModel:
    """A module with its tokenizer and generation config."""

    module: nn.Module
    tokenizer: Any  # a transformers tokenizer, or None
    generation_config: Any  # transformers' GenerationConfig
    name: str
    live: bool = False  # the caller's module; its weights may change between calls
    checkpoint: Any = None  # a `Checkpoint`, or what frees and reads weights in its place
    lazy_weights: Mapping[nn.Parameter, Any] | None = None  # if not loaded
    folder: Path | None = None  # of its files
    files: Sequence[
        Path
    ] = ()  # of weights: a GGUF file, or those that may lie deeper in the folder
    adapter: Path | None = None  # the folder of an adapter that is added to them
    packed: PackingReport | None = None  # the quantized weights; None: none
    quantization: Quantization | None = None  # for lazy weights, when they are read
    layers: Sequence[int] | None = None  # of the module's list, those that are here; None: all
    # The transformers config of the folder, which may be that of a model of images, too.
    wrapper: Any = None
    # The state dict before quantization, with its parameters.
    original: dict[str, Tensor] | None = None
    config: Mapping[str, Any] | None = None  # of a DCP folder, as plain data, for `ModelSource`

    def move(self, device: torch.device) -> None:
        """Move the module to a device, in place; tied quantized weights, which are buffers, stay tied."""
        for _, packed, _ in packed_buffers(self.module):
            packed.data = moved_to(packed.data, device)
        self.module._apply(lambda tensor: moved_to(tensor, device))
        if self.checkpoint is not None:
            self.checkpoint.moved(self.module)

    @property
    def folders(self) -> list[Path]:
        """The folders of the files that determine the weights."""
        return [folder for folder in (self.folder, self.adapter) if folder is not None]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The source of a model: the arguments of `LLM`.

    Attributes:
        model: a path, a hub id, or None for the small model inside the package; or a live module.
        dtype: "auto" takes the checkpoint's (float16 becomes bfloat16, which CPUs support).
        revision: a branch, tag or commit of a hub id.
        trust_remote_code: run the checkpoint's Python code.
        config: of a DCP folder, as `LLM` takes it, or as plain data for another process; None for other
            models.
        unused_weights: "error" or "ignore".
        quantization: the fields of a `Quantization`, as plain data.
    """

    model: Any
    dtype: str | torch.dtype = "auto"
    revision: str | None = None
    trust_remote_code: bool = False
    config: Any = None
    unused_weights: str = "error"
    quantization: Mapping[str, Any] | None = None

    def plain(self, loaded: LoadedModel) -> ModelSource:
        """Return the source of a model that was opened as `loaded`, for another process."""
        # `latest` may change later.
        model = self.model if loaded.config is None else loaded.folder
        if model is not None:
            named = os.path.expanduser(os.fspath(model))
            is_local = os.path.isdir(named) or named.endswith(".gguf")
            model = os.path.abspath(named) if is_local else os.fspath(model)
        return replace(
            self,
            model=model,
            dtype=str(self.dtype).removeprefix("torch."),
            config=loaded.config,
            quantization=None if loaded.quantization is None else asdict(loaded.quantization),
        )


class Checkpoint:
    """The files of a module's weights, from which freed weights are read again.

    Only weights are freed, also quantized ones; other buffers are small, and some are in no file. The module
    and its parameters stay valid; only their memory is freed and allocated again.
    """

    def __init__(self, loaded: LoadedModel, read: Callable[[], nn.Module]) -> None:
        """Args:
        loaded: a model whose weights were just read.
        read: reads its module again.
        """
        self.folders, self._weights = loaded.folders, loaded.files
        self.dropped = False
        self._read = read
        self._files = file_times(self.folders, self._weights)
        self._state = _state(loaded.module)

    def drop(self, module: nn.Module) -> None:
        """Free the memory of the parameters, which are NaN until `restore`.

        Raises:
            NotSupported: the weights were changed since they were read, and would be lost.
            ModelChanged: the files were changed.
        """
        if self.dropped:
            return
        self._check_files()
        now, then = _state(module), self._state
        if now.keys() != then.keys() or any(
            now[n][0]() is not then[n][0]() or now[n][1:] != then[n][1:] for n in now
        ):
            raise NotSupported(
                "sleep(weights=True): the model's weights were changed since they were read from "
                f"{self.folders[0]}, and would be lost"
            )
        self.dropped = True
        drop_weights(module)

    def restore(self, module: nn.Module) -> None:
        """Read freed weights again, bit for bit.

        Raises:
            ModelChanged: the files were changed.
            ModelError: they can't be read.
        """
        if not self.dropped:
            return
        self._check_files()
        with torch.inference_mode(False):
            again = self._read()
        weights = dict(again.named_parameters())
        for name, parameter in module.named_parameters():  # tied ones come once
            parameter.data = moved_to(weights[name].data, parameter.device)
        in_few_bits = {name: packed for name, packed, _ in packed_buffers(again)}
        for name, packed, _ in packed_buffers(module):
            packed.data = moved_to(in_few_bits[name], packed.device)
        self.dropped = False

    def moved(self, module: nn.Module) -> None:
        """Update after the weights moved in memory, unchanged."""
        self._state = _state(module)

    def _check_files(self) -> None:
        now = file_times(self.folders, self._weights)
        changed = sorted(n for n in now | self._files if now.get(n) != self._files.get(n))
        if changed:
            raise ModelChanged(f"{changed[0]} changed since the model was opened")


def file_times(folders: Iterable[Path], files: Iterable[Path]) -> dict[Path, tuple[int, int]]:
    """Return size and time of the files that determine the weights.

    Args:
        folders, files: of a `LoadedModel`.
    """
    inside = (path for folder in folders for at in ("*", "pp*/*") for path in folder.glob(at))
    paths = {path for path in inside if path.name.endswith(_FILES)}  # pp: stages of DCP
    there = {path: path.stat() for path in paths.union(file for file in files if file.exists())}
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in there.items()}


def _state(module: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Return weak references and version counters of the parameters."""
    weights = [*module.named_parameters(), *((n, p) for n, p, _ in packed_buffers(module))]
    return {n: (weakref.ref(p), p.shape, p.dtype, p._version) for n, p in weights}


def resolve_dtype(dtype: str | torch.dtype, config: Any = None) -> torch.dtype:
    """Return the torch dtype of `dtype` for a model on a CPU.

    Raises:
        NotSupported: an unsupported dtype.
    """
    if dtype == "auto":
        own = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
        dtype = "bfloat16" if own == "float16" else own
        if dtype not in DTYPES:
            raise NotSupported(
                f"the checkpoint's dtype is {own}, which is not computed in; ask for one of "
                f"{sorted(DTYPES)}"
            )
    found = DTYPES.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise NotSupported(f"dtype={dtype!r}: must be 'auto' or one of {sorted(DTYPES)}")
    return found


def read_config(source: str, where: dict[str, Any]) -> Any:
    """Read the transformers config of a causal language model.

    Args:
        source: a folder, a config.json or a hub id.
        where: other arguments of transformers' `from_pretrained`.

    Raises:
        ModelError: it can't be read.
        UnsupportedModel: not a causal language model.
    """
    from transformers import AutoConfig, PretrainedConfig

    try:
        plain, _ = PretrainedConfig.get_config_dict(source, **where)
        check_config(source, plain, where["trust_remote_code"])
        config = AutoConfig.from_pretrained(source, **where)
    except VerbatimError:
        raise
    except Exception as error:  # config classes raise arbitrary exceptions
        first = first_line(error)
        if "model type" in first or "Unrecognized model" in first:
            raise UnsupportedModel(f"{source}: {first}") from None
        raise ModelError(f"{source}: {first}") from None
    remote = where["trust_remote_code"] and "AutoModelForCausalLM" in (
        getattr(config, "auto_map", None) or {}
    )
    if type(config) not in auto_class(config)._model_mapping and not remote:
        raise UnsupportedModel(
            f"{source}: model type {config.model_type!r} is not a causal language model in transformers"
        )
    read_modelopt_config(Path(source), config)
    if not where["trust_remote_code"]:
        resolve_implementations(config)
    return config


def read_modelopt_config(folder: Path, config: Any) -> None:
    """Add the `quantization_config` that ModelOpt wrote to a file of its own instead of config.json.

    Raises:
        ModelError: the file can't be read.
    """
    path = folder / "hf_quant_config.json"
    if quantization_of(config) is not None or not path.is_file():
        return
    fields = read_json(path).get("quantization")
    if not isinstance(fields, dict):
        raise ModelError(f"{path}: quantization={str(fields)[:80]!r}: must be an object")
    config.quantization_config = fields | {"quant_method": "modelopt"}


def quantization_of(config: Any) -> dict[str, Any] | None:
    """Return the `quantization_config` of a transformers config, or of a model inside it."""
    for part in parts_of(config):
        found = getattr(part, "quantization_config", None)
        if found is not None:
            return dict(found) if isinstance(found, Mapping) else dict(found.to_dict())
    return None


def auto_class(config: Any) -> Any:
    """Return transformers' auto class that builds the model of a config.

    A model of images or sound without a causal class of its own is built whole, and run on text.
    """
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    causal: Any = AutoModelForCausalLM
    multimodal: Any = AutoModelForMultimodalLM
    if type(config) in causal._model_mapping or type(config) not in multimodal._model_mapping:
        return causal  # the checkpoint's own code, where it is in neither
    return multimodal


def empty_module(source: object, config: Any, trust_remote_code: bool = False) -> Any:
    """Return the module of a transformers config on the meta device.

    Raises:
        ModelError: the config can't be built.
    """
    from transformers.initialization import no_init_weights

    try:
        # Without it, torch draws meta tensors through its compiler, whose import takes half a second.
        with building, torch.device("meta"), no_init_weights():
            return auto_class(config).from_config(
                copy.deepcopy(config), trust_remote_code=trust_remote_code
            )
    except Exception as error:  # config classes raise arbitrary exceptions
        what = first_line(error)
        raise ModelError(f"{source}: no model can be built by the config: {what}") from error
