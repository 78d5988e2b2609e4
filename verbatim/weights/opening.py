"""Opening the files of a model without reading its weights, also once more in another process."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from verbatim import storyteller
from verbatim.errors import InvalidRequest, ModelError, NotSupported, first_line
from verbatim.files import hub_arguments
from verbatim.model.dcp.checkpoint import find_dcp
from verbatim.model.loader import (
    HUB_ID,
    LoadedModel,
    ModelSource,
    quantization_of,
    read_config,
    read_modelopt_config,
    resolve_dtype,
)
from verbatim.model.quantization import Quantization
from verbatim.untrusted import read_json, refuse_lfs_pointer, shards_of
from verbatim.weights.adapter import read_folder
from verbatim.weights.dcp import config_from_dict, dcp_files
from verbatim.weights.formats import decode, forget_quantization, reader_of
from verbatim.weights.gguf import find_gguf, gguf_files
from verbatim.weights.lazy import Traced, traced
from verbatim.weights.lora import merge_experts
from verbatim.weights.skeleton import INDEX, USUAL, ModelFiles, is_pickle, tensors_of, weight_files

ADAPTER = "adapter_config.json"


def open_files(
    source: ModelSource, tokenizer: Any = None, *, in_memory: bool = False
) -> LoadedModel:
    """Open a DCP folder, a GGUF file, a folder in Hugging Face's format or a hub id; None: the storyteller.

    Args:
        tokenizer: a transformers tokenizer; None: the model's own; False: none.
        in_memory: the weights will be in this process's memory, so formats that are read whole are accepted.

    Raises:
        ModelError, UnsupportedModel, NotSupported: it can't be opened.
        InvalidRequest: a config for another format than DCP.
    """
    model, is_default = source.model, source.model is None
    dcp = None if is_default else find_dcp(model)
    if source.config is not None and dcp is None:
        raise InvalidRequest(
            f"config={source.config!r:.60}: only for a torch.distributed.checkpoint, and "
            f"{'the storyteller' if is_default else model} holds no checkpoint of that kind: neither "
            ".metadata nor pp0, nor a link latest. Leave it at None"
        )
    gguf = None if is_default or dcp is not None else find_gguf(model)
    if dcp is not None:
        files = dcp_files(dcp, source, with_config=not in_memory)
    elif gguf is not None:
        source = replace(source, trust_remote_code=False)
        files = gguf_files(gguf, source.dtype, in_memory=in_memory)
    elif is_default:
        files = _folder(replace(source, model=storyteller.path()), in_memory)
        files.name = "storyteller"
    else:
        files = _folder(source, in_memory)
    return files.open(source, tokenizer, in_memory=in_memory or dcp is not None)


def _folder(source: ModelSource, in_memory: bool) -> ModelFiles:
    """Return the files of a folder in Hugging Face's format, of a hub id, or of an adapter and its base."""
    named = os.fspath(source.model)
    where: dict[str, Any] = {"trust_remote_code": source.trust_remote_code}
    folder, hub = None, dict[str, Any]()
    if os.path.isdir(os.path.expanduser(named)):
        named, where["local_files_only"] = os.path.expanduser(named), True
        folder = Path(named).resolve()
        if (folder / ADAPTER).is_file() and not (folder / "config.json").is_file():
            base, revision = _base_of(folder)
            files = _folder(replace(source, model=base, revision=revision), in_memory)
            base_tokenizer = files.open_tokenizer
            files.name, files.adapter = named, read_folder(folder)
            files.open_tokenizer = lambda: _tokenizer(named, where) or base_tokenizer()
            return files
        _check_folder(Path(named))
    elif not HUB_ID.match(named) or os.path.exists(named):
        raise ModelError(f"no model at {named!r}: neither a folder nor a hub id such as org/name")
    else:
        hub = hub_arguments(named, source.revision)
        where |= hub
    config = read_config(named, where)
    if (quantization := quantization_of(config)) is not None:
        reader_of(named, quantization)  # refused before anything is fetched
    dtype = resolve_dtype(source.dtype, config)
    # The file of weights that the config names instead of the usual ones.
    file = getattr(config, "transformers_weights", None)
    if folder is None:
        folder = _fetched(named, hub, in_memory, file).resolve()
        read_modelopt_config(folder, config)
    weights, quantization = weight_files(folder, file), quantization_of(config)
    if not weights or (is_pickle(weights[0]) and (quantization is not None or not in_memory)):
        is_plain = quantization is None
        reader = "this placement reads" if is_plain else "a quantized checkpoint is read from"
        raise NotSupported(
            f"{reader} {file or 'model.safetensors or its shards'}, and {folder} has none; load the model "
            "with transformers and save it with save_pretrained"
        )
    if quantization is not None:
        forget_quantization(config)

    def tensors(_: Any) -> tuple[dict[str, Traced], torch.dtype]:
        table = tensors_of(weights)
        if quantization is not None:
            table = decode(folder, table, quantization, dtype)
        if files.adapter is not None:
            files.adapter, table = merge_experts(files.adapter, table, dtype)
        return {name: traced(lazy) for name, lazy in table.items()}, dtype

    files = ModelFiles(
        named,
        folder,
        config,
        tensors,
        lambda: _tokenizer(named, where),
        lambda *_: _generation_config(folder, config),
        weights=weights,
        is_plain=quantization is None,
    )
    return files


def _base_of(adapter: Path) -> tuple[str, str | None]:
    """Return the base model of a PEFT adapter, and its revision.

    Raises:
        ModelError: adapter_config.json names none that is there.
    """
    for path in adapter.iterdir():
        refuse_lfs_pointer(path)
    config = read_json(adapter / ADAPTER)
    base, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(base, str) or not isinstance(revision, str | None):
        raise ModelError(f"{adapter / ADAPTER}: it names no base_model_name_or_path")
    folder = os.path.expanduser(base)
    if not os.path.isdir(folder) and not HUB_ID.match(base):
        raise ModelError(
            f"{adapter}: its base model {base[:200]!r} is neither a folder nor a hub id"
        )
    if (Path(folder) / ADAPTER).is_file():
        raise NotSupported(
            f"{adapter}: its base model {base[:200]!r} is an adapter, too; merge it first"
        )
    return base, revision


def _check_folder(folder: Path) -> None:
    """Check a folder before anything is read: pointers of Git LFS, invalid JSON, missing shards."""
    config = folder / "config.json"
    if not config.is_file():
        raise ModelError(f"{folder} holds no config.json, so it is not a model folder")
    for path in folder.iterdir():
        refuse_lfs_pointer(path)
    read_json(config)
    if (folder / ADAPTER).is_file():
        raise NotSupported(f"{folder} holds an adapter; merge it into the model")
    if not weight_files(folder) and not any(folder.glob("*.safetensors")):
        raise ModelError(f"{folder} holds no weights (model.safetensors or pytorch_model.bin)")


def _fetched(source: str, hub: dict[str, Any], in_memory: bool, named: str | None) -> Path:
    """Return the folder of a hub id, with its weights, fetched if missing.

    Args:
        hub: the result of `hub_arguments`.
        named: the file of weights that the config names instead of the usual ones.
    """
    from huggingface_hub import snapshot_download

    def fetch(*patterns: str) -> Path:
        return Path(snapshot_download(source, allow_patterns=list(patterns), **hub))

    try:
        folder = fetch("*.json", "*.py")
        for name in USUAL[: 1 + in_memory] if named is None else (named,):
            index = folder / (name if name.endswith(INDEX) else name + INDEX)
            fetch(*(shards_of(index) if index.is_file() else [name]))
            if weight_files(folder, named):
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
    config = None if source.config is None else config_from_dict(source.config)
    loaded = open_files(replace(source, config=config), False)
    if source.quantization is not None:
        loaded.quantization = Quantization(**source.quantization)
    return loaded
