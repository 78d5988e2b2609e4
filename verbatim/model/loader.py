"""Loading of models from a folder or a hub id.

transformers builds the module on the meta device and fills it from the checkpoint; this module checks that
the checkpoint is complete.
"""

from __future__ import annotations

import copy
import os
import re
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
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
from verbatim.model.lines import begin_at_lines
from verbatim.model.packed import drop_weights, packed_buffers
from verbatim.model.patching import quiet
from verbatim.model.quantization import Quantization
from verbatim.model.unused import refuse_unused
from verbatim.untrusted import (
    check_config,
    check_dtypes,
    check_size,
    read_json,
    refuse_lfs_pointer,
    resolve_implementations,
    shards_of,
)

if TYPE_CHECKING:
    from verbatim.model.packing import PackingReport

HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
_WEIGHTS = frozenset({".safetensors", ".bin"})
_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_BESIDE = (".index.json", "config.json", ".distcp", ".metadata")  # the latter two of DCP
_ADAPTER = "adapter_config.json"
_BIG = 500_000_000  # bytes of weights above which a progress bar is shown
# Returns a module, its lazy weights, and the names of tensors that it does not use.
Skeleton = Callable[..., tuple[nn.Module, Mapping[nn.Parameter, Any], list[str]]]
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
    checkpoint: Checkpoint | None = None  # None for a live one
    lazy_weights: Mapping[nn.Parameter, Any] | None = None  # if not loaded
    folder: Path | None = None  # their folder
    adapter: Path | None = None  # the folder of an adapter that is added to them
    packed: PackingReport | None = None  # the quantized weights; None: none
    quantization: Quantization | None = None  # for lazy weights, when they are read
    layers: Sequence[int] | None = None  # of the module's list, those that are here; None: all
    # The transformers config of the folder, which may be that of a model of images, too.
    wrapper: Any = None
    # The state dict before quantization, with its parameters.
    original: dict[str, Tensor] | None = None
    config: Mapping[str, Any] | None = None  # of a DCP folder, as plain data, for `ModelSource`


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The arguments of `LLM` for a model, to open it in another process.

    Attributes:
        model: an absolute path, a hub id, or None for the small model inside the package.
        config: the config of a DCP folder, as plain data; None for other models.
        quantization: the fields of a `Quantization`, as plain data.
    """

    model: str | None
    dtype: str
    revision: str | None
    trust_remote_code: bool
    config: Mapping[str, Any] | None = None
    quantization: Mapping[str, Any] | None = None
    unused_weights: str = "error"

    @classmethod
    def of(
        cls,
        model: Any,
        dtype: str | torch.dtype,
        revision: str | None,
        trust_remote_code: bool,
        loaded: LoadedModel,
        unused_weights: str = "error",
    ) -> ModelSource:
        """Return the source of `LLM`'s arguments, after they were opened as `loaded`."""
        if loaded.config is not None:
            model = loaded.folder  # `latest` may change later
        if model is not None:
            named = os.path.expanduser(os.fspath(model))
            is_local = os.path.isdir(named) or named.endswith(".gguf")
            model = os.path.abspath(named) if is_local else os.fspath(model)
        name = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
        quantized = None if loaded.quantization is None else asdict(loaded.quantization)
        return cls(
            model, name, revision, trust_remote_code, loaded.config, quantized, unused_weights
        )


class Checkpoint:
    """The files of a module's weights, from which freed weights are read again.

    Only weights are freed, also quantized ones; other buffers are small, and some are in no file. The module
    and its parameters stay valid; only their memory is freed and allocated again.
    """

    def __init__(
        self,
        folder: Path,
        module: nn.Module,
        *,
        read: Callable[[], nn.Module],
        fingerprints: Callable[[Path], dict[str, tuple[int, int]]],
    ) -> None:
        """Args:
        module: just read from `folder`.
        read: reads the module again.
        fingerprints: returns size and time of the files that determine the weights.
        """
        self.folder = folder
        self.dropped = False
        self._read = read
        self.fingerprints = fingerprints
        self._files = fingerprints(folder)
        self._state = _state(module)

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
                f"{self.folder}, and would be lost"
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
            parameter.data = weights[name].data.to(parameter.device)
        in_few_bits = {name: packed for name, packed, _ in packed_buffers(again)}
        for name, packed, _ in packed_buffers(module):
            packed.data = in_few_bits[name]
        self.dropped = False

    def moved(self, module: nn.Module) -> None:
        """Update after the weights moved in memory, unchanged."""
        self._state = _state(module)

    def _check_files(self) -> None:
        now = self.fingerprints(self.folder)
        changed = sorted(n for n in now | self._files if now.get(n) != self._files.get(n))
        if changed:
            raise ModelChanged(f"{self.folder / changed[0]} changed since the model was opened")


def fingerprints(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of the files that determine the weights, by their path in `folder`."""
    found = {}
    for path in (*folder.glob("*"), *folder.glob("pp*/*")):  # stages of DCP
        if path.suffix in (*_WEIGHTS, ".gguf") or path.name.endswith(_BESIDE):
            stat = path.stat()
            found[str(path.relative_to(folder))] = (stat.st_size, stat.st_mtime_ns)
    return found


def _state(module: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Return weak references and version counters of the parameters."""
    weights = [*module.named_parameters(), *((n, p) for n, p, _ in packed_buffers(module))]
    return {n: (weakref.ref(p), p.shape, p.dtype, p._version) for n, p in weights}


def load(
    source: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    with_tokenizer: bool = True,
    skeleton: Skeleton | None = None,
    decode: Skeleton | None = None,
    unused_weights: str = "error",
) -> LoadedModel:
    """Load a causal language model and its tokenizer.

    Args:
        source: a folder in Hugging Face's format, or a hub id.
        dtype: "auto" takes the checkpoint's (float16 becomes bfloat16, which CPUs support).
        revision: a branch, tag or commit of a hub id.
        trust_remote_code: run the checkpoint's Python code.
        skeleton: builds the module without its weights, from a folder, a config, a dtype and
            `trust_remote_code`; it also returns lazy weights. None loads the weights.
        decode: the skeleton of a quantized checkpoint or an adapter, if `skeleton` is None.
        unused_weights: as of `LLM`.

    Raises:
        ModelError: no model, a damaged file, missing or unused weights.
        UnsupportedModel: not a causal LM of transformers.
        NotSupported: a quantized checkpoint or an adapter, without `skeleton` and `decode`.
    """
    source = os.fspath(source)
    where: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if os.path.isdir(os.path.expanduser(source)):
        source = os.path.expanduser(source)
        adapter = Path(source).resolve()
        if (adapter / _ADAPTER).is_file() and not (adapter / "config.json").is_file():
            base, base_revision = _base_of(adapter)
            open_ = decode if skeleton is None else skeleton
            if open_ is None:
                raise NotSupported(f"{source}: an adapter; only LLM(model=...) opens it")
            loaded = load(
                base,
                dtype=dtype,
                revision=base_revision,
                trust_remote_code=trust_remote_code,
                with_tokenizer=with_tokenizer,
                skeleton=partial(open_, adapter_folder=adapter),
                unused_weights=unused_weights,
            )
            where["local_files_only"] = True
            own = _tokenizer(source, where) if with_tokenizer else None
            loaded.tokenizer = loaded.tokenizer if own is None else own
            loaded.name, loaded.adapter = source, adapter
            return loaded
        _check_folder(Path(source))
        where["local_files_only"] = True
    elif not HUB_ID.match(source) or os.path.exists(source):
        raise ModelError(f"no model at {source!r}: neither a folder nor a hub id such as org/name")
    else:
        where["revision"] = revision
    config = read_config(source, where)
    resolved = resolve_dtype(dtype, config)
    tokenizer = _tokenizer(source, where) if with_tokenizer else None
    if skeleton is None and is_quantized(config):
        if decode is None:
            raise NotSupported(f"{source}: a quantized checkpoint; only LLM(model=...) opens it")
        skeleton = decode
    if skeleton is not None:
        folder = _all_files(source, where)
        module, lazy_weights, unused = skeleton(folder, config, resolved, trust_remote_code)
        if unused_weights == "error":
            refuse_unused(source, module, config, unused)
        generation = _generation_config(folder, config)
        return LoadedModel(
            module,
            tokenizer,
            generation,
            source,
            lazy_weights=lazy_weights,
            folder=folder,
            wrapper=config,
        )
    module = built_module(source, config, resolved, where, unused_weights)
    folder = _folder(source, where)

    def read() -> nn.Module:
        here = {"trust_remote_code": trust_remote_code, "local_files_only": True}
        again = read_config(str(folder), here)
        module: nn.Module = built_module(str(folder), again, resolved, here, unused_weights)
        return module

    checkpoint = Checkpoint(folder, module, read=read, fingerprints=fingerprints)
    return LoadedModel(
        module, tokenizer, module.generation_config, source, checkpoint=checkpoint, wrapper=config
    )


def _base_of(adapter: Path) -> tuple[str, str | None]:
    """Return the base model of a PEFT adapter, and its revision.

    Raises:
        ModelError: adapter_config.json names none that is there.
    """
    for path in adapter.iterdir():
        refuse_lfs_pointer(path)
    config = read_json(adapter / _ADAPTER)
    base, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(base, str) or not isinstance(revision, str | None):
        raise ModelError(f"{adapter / _ADAPTER}: it names no base_model_name_or_path")
    folder = os.path.expanduser(base)
    if not os.path.isdir(folder) and not HUB_ID.match(base):
        raise ModelError(
            f"{adapter}: its base model {base[:200]!r} is neither a folder nor a hub id"
        )
    if (Path(folder) / _ADAPTER).is_file():
        raise NotSupported(
            f"{adapter}: its base model {base[:200]!r} is an adapter, too; merge it first"
        )
    return base, revision


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


def _check_folder(folder: Path) -> None:
    """Check a folder before minutes of loading: invalid JSON, missing or truncated shards."""
    config = folder / "config.json"
    if not config.is_file():
        raise ModelError(f"{folder} holds no config.json, so it is not a model folder")
    for path in folder.iterdir():
        refuse_lfs_pointer(path)
    read_json(config)
    if (folder / _ADAPTER).is_file():
        raise NotSupported(f"{folder} holds an adapter; merge it into the model")
    shards = sorted(folder.glob("*.safetensors"))
    indices = [index for name in _INDICES if (index := folder / name).is_file()]
    for index in indices:
        names = shards_of(index)
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ModelError(f"{folder} lacks {len(missing)} of {len(names)} shards: {missing[0]}")
    if not indices and not shards and not any(folder.glob("pytorch_model*.bin")):
        raise ModelError(f"{folder} holds no weights (model.safetensors or pytorch_model.bin)")
    for shard in shards:
        stored_dtypes(shard)


def stored_dtypes(path: Path) -> dict[str, str]:
    """Return the dtype of each tensor of a safetensors file, by the format's names.

    Raises:
        ModelError: it is damaged or truncated.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError):
        size = f"{path.stat().st_size} bytes" if path.exists() else "a link to nothing"
        raise ModelError(f"{path} ({size}) is damaged or cut short") from None


def _pickled_dtypes(path: Path) -> dict[str, str]:
    """Return the dtype of each tensor of a torch.save file; {} if transformers will refuse it."""
    try:
        tensors = torch.load(path, map_location="meta", mmap=True, weights_only=True)
        return {name: str(tensor.dtype) for name, tensor in tensors.items()}
    except Exception:  # damaged, or from before torch 1.6
        return {}


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
    of_modelopt = (
        Path(source) / "hf_quant_config.json"
    )  # where it has not written config.json's field
    if not is_quantized(config) and of_modelopt.is_file():
        fields = read_json(of_modelopt).get("quantization")
        config.quantization_config = {"quant_method": "modelopt", **(fields or {})}
    if not where["trust_remote_code"]:
        resolve_implementations(config)
    return config


def is_quantized(config: Any) -> bool:
    """Return whether a transformers config, or one of its parts, declares quantized weights."""
    parts = (config, *(getattr(config, name, None) for name in config.sub_configs))
    return any(getattr(part, "quantization_config", None) is not None for part in parts)


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


def built_module(
    source: str,
    config: Any,
    dtype: torch.dtype,
    where: dict[str, Any],
    unused_weights: str = "error",
) -> Any:
    """Load the module with its weights by transformers; arguments as in `read_config`.

    Raises:
        ModelError: it can't be loaded, or weights are missing or not used.
    """
    try:
        with building, quiet(progress=_weight_bytes(source) > _BIG):
            _check_fit(source, config, where)
            loaded: Any = auto_class(config).from_pretrained(
                source, config=config, dtype=dtype, output_loading_info=True, **where
            )
    except VerbatimError:
        raise
    except Exception as error:  # a damaged file leads to arbitrary exceptions
        raise ModelError(f"{source}: can't be loaded: {first_line(error)}") from error
    module, report = loaded
    refuse_missing(source, report, is_plain=not hasattr(config, "quantization_config"))
    if unused_weights == "error":
        refuse_unused(source, module, config, report["unexpected_keys"])
    begin_at_lines(module)
    return module.eval()


def refuse_missing(source: object, report: Mapping[str, Any], *, is_plain: bool) -> None:
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


def _check_fit(source: str, config: Any, where: dict[str, Any]) -> None:
    """Compare the config with the checkpoint, before memory is allocated.

    Raises:
        ModelError: a model far larger than the files, or integer weights.
    """
    folder = Path(source)
    if "gguf_file" not in where and not folder.is_dir():
        from transformers.utils.hub import cached_file

        for name in _INDICES:  # transformers fetches and opens the files that they name
            index = cached_file(
                source,
                name,
                revision=where["revision"],
                _raise_exceptions_for_missing_entries=False,
            )
            if index is not None:
                shards_of(Path(index))
        return
    module = empty_module(source, config, where["trust_remote_code"])
    if "gguf_file" in where:
        check_size(source, module, (folder / where["gguf_file"]).stat().st_size)
        return
    check_size(source, module, _weight_bytes(source))
    for path in folder.rglob("*"):
        if path.suffix == ".safetensors":
            check_dtypes(path, module, stored_dtypes(path))
        elif path.match("pytorch_model*.bin"):
            check_dtypes(path, module, _pickled_dtypes(path))


def _folder(source: str, where: dict[str, Any]) -> Path:
    """Return the folder that a folder or a hub id was just loaded from."""
    from transformers.utils.hub import cached_file

    if os.path.isdir(source):
        return Path(source).resolve()
    revision = where["revision"] or "main"
    config = cached_file(source, "config.json", revision=revision, local_files_only=True)
    assert config is not None
    return Path(config).parent  # the snapshot of one commit


def _all_files(source: str, where: dict[str, Any]) -> Path:
    """Return the folder with the weights of a folder or a hub id, fetched if missing."""
    if os.path.isdir(source):
        return Path(source).resolve()
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                source,
                revision=where["revision"],
                allow_patterns=["*.json", "*.safetensors", "*.py"],
            )
        )
    except Exception as error:  # of the network, the hub or the disk
        raise ModelError(f"{source}: {first_line(error)}") from error


def _generation_config(folder: Path, config: Any) -> Any:
    from transformers import GenerationConfig

    if (folder / "generation_config.json").is_file():
        try:
            return GenerationConfig.from_pretrained(str(folder))
        except Exception as error:
            raise ModelError(f"{folder}: generation_config.json: {first_line(error)}") from error
    return GenerationConfig.from_model_config(config)


def _weight_bytes(source: str) -> int:
    """Return the bytes of a folder's weights; more than `_BIG` for a hub id."""
    if not os.path.isdir(source):
        return _BIG + 1
    return sum(f.stat().st_size for f in Path(source).rglob("*") if f.suffix in _WEIGHTS)


def _tokenizer(source: str, where: dict[str, Any]) -> Any:
    """Return the folder's tokenizer, or None without tokenizer files.

    Raises:
        ModelError: the files can't be read.
    """
    from verbatim.text.tokenizer import Tokenizer, has_tokenizer_files

    if os.path.isdir(source) and not has_tokenizer_files(Path(source)):
        return None
    return Tokenizer.open(
        source,
        revision=where.get("revision"),
        trust_remote_code=where["trust_remote_code"],
    ).hf
