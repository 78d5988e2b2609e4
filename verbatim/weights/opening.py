"""Opening the files of a model without reading its weights, also once more in another process."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from verbatim import storyteller
from verbatim.errors import InvalidRequest, ModelError, NotSupported, first_line
from verbatim.model.dcp.checkpoint import find_dcp
from verbatim.model.loader import HUB_ID, LoadedModel, ModelSource, read_config, resolve_dtype
from verbatim.model.quantization import Quantization
from verbatim.model.unused import refuse_unused
from verbatim.untrusted import read_json, refuse_lfs_pointer, shards_of
from verbatim.weights.dcp import config_from_dict, load_dcp
from verbatim.weights.gguf import find_gguf, load_gguf
from verbatim.weights.skeleton import INDEX, open_skeleton, weight_files

_ADAPTER = "adapter_config.json"


def open_files(
    model: str | os.PathLike[str] | None,
    *,
    tokenizer: Any = None,
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    config: Any = None,
    in_memory: bool = False,
    unused_weights: str = "error",
) -> LoadedModel:
    """Open a DCP folder, a GGUF file, a folder in Hugging Face's format or a hub id; None: the storyteller.

    Args:
        tokenizer: a transformers tokenizer; None: the model's own; False: none.
        in_memory: the weights will be in this process's memory, so formats that are read whole are accepted.
        dtype, revision, trust_remote_code, config, unused_weights: as in `LLM`.

    Raises:
        ModelError, UnsupportedModel, NotSupported: it can't be opened.
        InvalidRequest: a config for another format than DCP.
    """
    dcp = None if model is None else find_dcp(model)
    if config is not None and dcp is None:
        raise InvalidRequest(
            f"config={config!r:.60}: only for a torch.distributed.checkpoint, and "
            f"{'the storyteller' if model is None else model} holds no checkpoint of that kind: neither "
            ".metadata nor pp0, nor a link latest. Leave it at None"
        )
    if dcp is not None:
        return load_dcp(
            dcp,
            config,
            tokenizer=tokenizer,
            dtype=dtype,
            revision=revision,
            trust_remote_code=trust_remote_code,
            with_config=not in_memory,
            unused_weights=unused_weights,
        )
    gguf = None if model is None else find_gguf(model)
    own: dict[str, Any] = {
        "dtype": dtype,
        "with_tokenizer": tokenizer is None,
        "in_memory": in_memory,
        "unused_weights": unused_weights,
    }
    if gguf is not None:
        loaded = load_gguf(gguf, **own)
    else:
        source = os.fspath(storyteller.path() if model is None else model)
        loaded = _load(source, revision, trust_remote_code, **own)
    loaded.name = "storyteller" if model is None else loaded.name
    loaded.tokenizer = loaded.tokenizer if tokenizer is None else tokenizer or None
    return loaded


def _load(
    source: str,
    revision: str | None,
    trust_remote_code: bool,
    *,
    dtype: str | torch.dtype,
    with_tokenizer: bool,
    in_memory: bool,
    unused_weights: str,
    adapter: Path | None = None,
) -> LoadedModel:
    """Open a folder in Hugging Face's format or a hub id, with the weights of an adapter."""
    where: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    folder = Path(os.path.expanduser(source)) if os.path.isdir(os.path.expanduser(source)) else None
    if folder is not None:
        source, where["local_files_only"] = os.path.expanduser(source), True
        if (folder / _ADAPTER).is_file() and not (folder / "config.json").is_file():
            base, revision = _base_of(folder)
            loaded = _load(
                base,
                revision,
                trust_remote_code,
                dtype=dtype,
                with_tokenizer=with_tokenizer,
                in_memory=in_memory,
                unused_weights=unused_weights,
                adapter=folder.resolve(),
            )
            own = _tokenizer(source, where) if with_tokenizer else None
            tokenizer = loaded.tokenizer if own is None else own
            return replace(loaded, name=source, adapter=folder.resolve(), tokenizer=tokenizer)
        _check_folder(folder)
    elif not HUB_ID.match(source) or os.path.exists(source):
        raise ModelError(f"no model at {source!r}: neither a folder nor a hub id such as org/name")
    else:
        where["revision"] = revision
    config = read_config(source, where)
    resolved = resolve_dtype(dtype, config)
    tokenizer = _tokenizer(source, where) if with_tokenizer else None
    if folder is None:
        named = getattr(config, "transformers_weights", None)
        folder = _fetched(source, revision, in_memory, named)
    folder = folder.resolve()
    module, lazy_weights, unused = open_skeleton(
        folder, config, resolved, trust_remote_code, adapter, in_memory=in_memory
    )
    if unused_weights == "error":
        refuse_unused(source, module, config, unused)
    generation: Any = _generation_config(folder, config)
    module.generation_config = generation
    return LoadedModel(
        module,
        tokenizer,
        generation,
        source,
        lazy_weights=lazy_weights,
        folder=folder,
        wrapper=config,
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


def _check_folder(folder: Path) -> None:
    """Check a folder before anything is read: invalid JSON, missing shards."""
    config = folder / "config.json"
    if not config.is_file():
        raise ModelError(f"{folder} holds no config.json, so it is not a model folder")
    for path in folder.iterdir():
        refuse_lfs_pointer(path)
    read_json(config)
    if (folder / _ADAPTER).is_file():
        raise NotSupported(f"{folder} holds an adapter; merge it into the model")
    if not weight_files(folder)[0] and not any(folder.glob("*.safetensors")):
        raise ModelError(f"{folder} holds no weights (model.safetensors or pytorch_model.bin)")


def _fetched(source: str, revision: str | None, in_memory: bool, named: str | None) -> Path:
    """Return the folder of a hub id, with its weights, fetched if missing.

    Args:
        named: the file of weights that the config names instead of the usual ones.
    """
    from huggingface_hub import snapshot_download

    def fetch(*patterns: str) -> Path:
        return Path(snapshot_download(source, revision=revision, allow_patterns=list(patterns)))

    usual = ("model.safetensors", "pytorch_model.bin")[: 1 + in_memory]
    try:
        folder = fetch("*.json", "*.py")
        for name in usual if named is None else (named,):
            index = folder / (name if name.endswith(INDEX) else name + INDEX)
            fetch(*(shards_of(index) if index.is_file() else [name]))
            if weight_files(folder, named)[0]:
                break
        return folder
    except ModelError:
        raise
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


def reopen(source: ModelSource) -> LoadedModel:
    """Open a model with lazy weights and without a tokenizer.

    Raises:
        ModelError, NotSupported: it can't be opened here.
    """
    loaded = open_files(
        source.model,
        tokenizer=False,
        dtype=source.dtype,
        revision=source.revision,
        trust_remote_code=source.trust_remote_code,
        config=None if source.config is None else config_from_dict(source.config),
        unused_weights=source.unused_weights,
    )
    if source.quantization is not None:
        loaded.quantization = Quantization(**source.quantization)
    return loaded
