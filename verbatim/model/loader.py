"""Loading models from files: sources, configs and checkpoints."""

from __future__ import annotations

import copy
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.common.untrusted import check_config, parts_of, read_json, resolve_implementations
from verbatim.errors import (
    ModelChanged,
    ModelError,
    NotSupported,
    UnsupportedModel,
    VerbatimError,
    first_line,
)
from verbatim.model.quantized import drop_weights, moved_to, quantized_weights
from verbatim.quantization.formats import Quantization
from verbatim.quantization.report import PackingReport

HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
# Suffixes of files that determine the weights, besides `LoadedModel.files`; the last two are DCP's.
_FILES = (".safetensors", ".bin", ".index.json", "config.json", ".distcp", ".metadata")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# transformers patches its own and torch's functions while it builds a model. Two threads would restore them
# in the wrong order, and break every later model. Lock order: `exclusive`, then this.
building = threading.RLock()


@dataclass(slots=True)
class LoadedModel:
    """A module with its tokenizer and generation config."""

    module: nn.Module
    tokenizer: Any  # a transformers tokenizer, or None
    generation_config: Any  # transformers' GenerationConfig
    name: str
    live: bool = False  # the caller's module; its weights may change between calls
    checkpoint: Any = None  # a `Checkpoint`, or a substitute that frees and reads weights
    lazy_weights: Mapping[nn.Parameter, Any] | None = None  # sources of weights not loaded yet
    folder: Path | None = None  # the folder of the model's files
    # Other weight files: a GGUF file, or files in subfolders.
    files: Sequence[Path] = ()
    adapter: Path | None = None  # the folder of an adapter merged into the weights
    packed: PackingReport | None = None  # the quantized weights; None: none
    quantization: Quantization | None = None  # for lazy weights, when they are read
    layers: Sequence[int] | None = None  # indices of the layers present here; None: all
    # The transformers config in the folder, possibly of a multimodal model.
    wrapper: Any = None
    # The state dict before quantization, with its parameters.
    original: dict[str, Tensor] | None = None
    # The range of each weight that is held only in part, by name: dimension, begin and end.
    cuts: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None  # of a DCP folder, as plain data, for `ModelSource`

    def move(self, device: torch.device) -> None:
        """Move the module to a device, in place. Tied quantized weights (buffers) stay tied."""
        for _, packed, _ in quantized_weights(self.module):
            packed.data = moved_to(packed.data, device)
        self.module._apply(lambda tensor: moved_to(tensor, device))
        if self.checkpoint is not None:
            self.checkpoint.record_move(self.module)

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
        config: config of a DCP folder, as for `LLM` or as plain data; None for other models.
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

    def resolved(self, loaded: LoadedModel) -> ModelSource:
        """Return a source of the files of `loaded`, wherever ids, links and relative paths lead to later."""
        is_hub_id = isinstance(self.model, str) and not os.path.exists(
            os.path.expanduser(self.model)
        )
        named = loaded.adapter is not None or (self.config is None and not is_hub_id)
        model = self.model if named or loaded.folder is None else loaded.folder
        return replace(self, model=_resolved(model), config=_resolved(self.config))

    def plain(self, loaded: LoadedModel) -> ModelSource:
        """Return this source, opened as `loaded`, as plain data for another process."""
        # The resolved folder, as `latest` may change.
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


def _resolved(path: Any) -> Any:
    """Return the absolute path of a file, or of a folder without links; anything else as it is."""
    if not isinstance(path, str | os.PathLike):
        return path
    named = os.path.expanduser(path)
    if os.path.isdir(named):
        return os.path.realpath(named)
    # A file of the hub's cache is a link to one without a suffix.
    return os.path.abspath(named) if os.path.exists(named) else path


class Checkpoint:
    """The files of a module's weights, from which freed weights are restored.

    Only weights are freed, including quantized ones: other buffers are small, and some are in no file. The
    module and its parameter objects stay valid; only their memory is freed and allocated again.
    """

    def __init__(self, loaded: LoadedModel, read: Callable[[], LoadedModel]) -> None:
        """Create the checkpoint of a model that was just loaded; `read` loads it again."""
        self.folders, self._weights = loaded.folders, loaded.files
        self.dropped = False
        self._read = read
        self._files = file_times(self.folders, self._weights)
        self._state = _state(loaded.module)

    def drop(self, module: nn.Module) -> None:
        """Free the memory of the weights, which read as NaN until `restore`.

        Raises:
            NotSupported: the weights were changed since they were read, which would be lost.
            ModelChanged: the files were changed.
        """
        if self.dropped:
            return
        self._check_files()
        current, recorded = _state(module), self._state
        if current.keys() != recorded.keys() or any(
            current[n][0]() is not recorded[n][0]() or current[n][1:] != recorded[n][1:]
            for n in current
        ):
            raise NotSupported(
                "sleep(weights=True): the model's weights were changed since they were read from "
                f"{self.folders[0]}, and would be lost"
            )
        self.dropped = True
        drop_weights(module)

    def restore(self, module: nn.Module) -> None:
        """Read freed weights again.

        Raises:
            ModelChanged: the files were changed.
            ModelError: the files can't be read.
        """
        if not self.dropped:
            return
        self._check_files()
        with torch.inference_mode(False):
            read = self._read()
        if [*read.folders, *read.files] != [*self.folders, *self._weights]:
            raise ModelChanged(f"{self.folders[0]} is no longer where the model's name leads to")
        loaded = read.module
        weights = dict(loaded.named_parameters())
        for name, parameter in module.named_parameters():  # tied ones only once
            parameter.data = moved_to(weights[name].data, parameter.device)
        quantized = {name: packed for name, packed, _ in quantized_weights(loaded)}
        for name, packed, _ in quantized_weights(module):
            packed.data = moved_to(quantized[name], packed.device)
        self.dropped = False

    def record_move(self, module: nn.Module) -> None:
        """Record that the weights were moved in memory, with the same values."""
        self._state = _state(module)

    def _check_files(self) -> None:
        current = file_times(self.folders, self._weights)
        changed = sorted(n for n in current | self._files if current.get(n) != self._files.get(n))
        if changed:
            raise ModelChanged(f"{changed[0]} changed since the model was opened")


def file_times(folders: Iterable[Path], files: Iterable[Path]) -> dict[Path, tuple[int, int]]:
    """Return sizes and modification times of `files` and of the files in `folders` that affect weights."""
    entries = (path for folder in folders for at in ("*", "pp*/*") for path in folder.glob(at))
    paths = {path for path in entries if path.name.endswith(_FILES)}  # pp: stages of DCP
    stats = {path: path.stat() for path in paths.union(file for file in files if file.exists())}
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}


def _state(module: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Return a weak reference, shape, dtype and version counter for each weight."""
    weights = [*module.named_parameters(), *((n, p) for n, p, _ in quantized_weights(module))]
    return {n: (weakref.ref(p), p.shape, p.dtype, p._version) for n, p in weights}


def resolve_dtype(dtype: str | torch.dtype, stored_dtype: Any = None) -> torch.dtype:
    """Return the torch dtype of `dtype` for a model on a CPU; raise NotSupported if it is unsupported.

    Args:
        stored_dtype: the dtype that "auto" means, with bfloat16 in place of float16; None: float32.
    """
    if dtype == "auto":
        stored = str(stored_dtype or "float32").removeprefix("torch.")
        dtype = "bfloat16" if stored == "float16" else stored
        if dtype not in DTYPES:
            raise NotSupported(
                f"the checkpoint's dtype {stored} is not supported for computation; choose one of "
                f"{sorted(DTYPES)}"
            )
    resolved = DTYPES.get(str(dtype).removeprefix("torch."))
    if resolved is None:
        raise NotSupported(f"dtype={dtype!r}: must be 'auto' or one of {sorted(DTYPES)}")
    return resolved


def read_config(source: str, where: dict[str, Any]) -> Any:
    """Read the transformers config of a causal language model.

    Args:
        source: a folder, a config.json or a hub id.
        where: other arguments of transformers' `from_pretrained`.

    Raises:
        ModelError: the config can't be read.
        UnsupportedModel: the model is not a causal language model.
    """
    from transformers import AutoConfig, PretrainedConfig

    try:
        plain, _ = PretrainedConfig.get_config_dict(source, **where)
        check_config(source, plain, where["trust_remote_code"])
        config = AutoConfig.from_pretrained(source, **where)
        config = _text_generator(config)
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


def _text_generator(config: Any) -> Any:
    """Return the config of the part of a Qwen Omni model that generates text; other configs as they are."""
    thinker = getattr(config, "thinker_config", None)
    if thinker is None:
        return config
    # The whole model's end of a message, or the default of its own `generate` in transformers.
    defaults = {
        "eos_token_id": getattr(config, "im_end_token_id", None) or 151645,
        "quantization_config": getattr(config, "quantization_config", None),
        "dtype": getattr(config, "dtype", None),
    }
    for name, value in defaults.items():
        if value is not None and getattr(thinker, name, None) is None:
            setattr(thinker, name, value)
    return thinker


def read_modelopt_config(folder: Path, config: Any) -> None:
    """Add the `quantization_config` that ModelOpt writes to a file of its own; may raise ModelError."""
    path = folder / "hf_quant_config.json"
    if quantization_of(config) is not None or not path.is_file():
        return
    fields = read_json(path).get("quantization")
    if not isinstance(fields, dict):
        raise ModelError(f"{path}: quantization={str(fields)[:80]!r}: must be an object")
    config.quantization_config = fields | {"quant_method": "modelopt"}


def quantization_of(config: Any) -> dict[str, Any] | None:
    """Return the `quantization_config` of a transformers config, or of a nested config."""
    for part in parts_of(config):
        settings = getattr(part, "quantization_config", None)
        if settings is not None:
            return dict(settings) if isinstance(settings, Mapping) else dict(settings.to_dict())
    return None


def auto_class(config: Any) -> Any:
    """Return transformers' auto class that builds the model of a config.

    A multimodal model without a causal language model class is built as a whole, and run on text.
    """
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    causal: Any = AutoModelForCausalLM
    multimodal: Any = AutoModelForMultimodalLM
    if type(config) in causal._model_mapping or type(config) not in multimodal._model_mapping:
        return causal  # if in neither, for the checkpoint's own code
    return multimodal


def empty_module(source: object, config: Any, trust_remote_code: bool = False) -> Any:
    """Return the module of a transformers config on the meta device; raise ModelError if that fails."""
    from transformers.initialization import no_init_weights

    try:
        # With initialization, torch would import its compiler for meta tensors, which takes half a second.
        with building, torch.device("meta"), no_init_weights():
            return auto_class(config).from_config(
                copy.deepcopy(config), trust_remote_code=trust_remote_code
            )
    except Exception as error:  # config classes raise arbitrary exceptions
        what = first_line(error)
        raise ModelError(f"{source}: no model can be built from the config: {what}") from error
