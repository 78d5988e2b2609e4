"""Opens the files of a model without reading its weights, here or again in another process."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from verbatim import storyteller
from verbatim.common.files import hub_arguments
from verbatim.common.untrusted import check_stored, read_json, shards_of
from verbatim.errors import InvalidRequest, ModelError, NotSupported, first_line
from verbatim.model.dcp.checkpoint import find_dcp
from verbatim.model.loader import (
    HUB_ID,
    LoadedModel,
    ModelSource,
    empty_module,
    quantization_of,
    read_config,
    read_modelopt_config,
    resolve_dtype,
)
from verbatim.quantization.formats import Quantization
from verbatim.weights.adapter import merge_experts, read_folder
from verbatim.weights.dcp import config_from_dict, open_dcp
from verbatim.weights.formats import decode, forget_quantization, reader_of
from verbatim.weights.formats.gguf import find_gguf, open_gguf
from verbatim.weights.lazy import traced, usual_dtype
from verbatim.weights.skeleton import (
    INDEX,
    WEIGHT_FILES,
    fill,
    is_pickle,
    tensors_of,
    weight_files,
)

ADAPTER = "adapter_config.json"


def open_files(
    source: ModelSource, tokenizer: Any = None, *, in_memory: bool = False
) -> LoadedModel:
    """Open a DCP folder, a GGUF file, a Hugging Face folder or a hub id, or by default the storyteller.

    Args:
        tokenizer: a transformers tokenizer; None: the model's own; False: none.
        in_memory: whether this process will hold all weights, so that formats that can only be read whole
            are accepted.

    Raises:
        ModelError, UnsupportedModel, NotSupported: the model can't be opened.
        InvalidRequest: `source.config` is given for another format than DCP.
    """
    model = source.model
    if model is not None and (dcp := find_dcp(model)) is not None:
        return open_dcp(dcp, source, tokenizer, with_config=not in_memory)
    if source.config is not None:
        raise InvalidRequest(
            f"config={source.config!r:.60}: only for a torch.distributed.checkpoint, and "
            f"{'the storyteller' if model is None else model} holds no checkpoint of that kind: "
            "neither .metadata nor pp0, nor a link latest. Leave it at None"
        )
    if model is None:
        loaded = _open_folder(replace(source, model=storyteller.path()), tokenizer, in_memory)
        loaded.name = "storyteller"
        return loaded
    if (gguf := find_gguf(model)) is not None:
        return open_gguf(gguf, source, tokenizer, in_memory=in_memory)
    return _open_folder(source, tokenizer, in_memory)


def _open_folder(
    source: ModelSource, tokenizer: Any, in_memory: bool, adapter: Path | None = None
) -> LoadedModel:
    """Open a Hugging Face folder or a hub id, possibly with the folder of an adapter to merge into it."""
    named = os.fspath(source.model)
    where: dict[str, Any] = {"trust_remote_code": source.trust_remote_code}
    folder, hub = None, dict[str, Any]()
    if os.path.isdir(os.path.expanduser(named)):
        named, where["local_files_only"] = os.path.expanduser(named), True
        folder = Path(named).resolve()
        if (folder / ADAPTER).is_file() and not (folder / "config.json").is_file():
            base, revision = _base_of(folder)
            if tokenizer is None:
                tokenizer = _tokenizer(named, where)  # if it has none, its base model's is used
            base_source = replace(source, model=base, revision=revision)
            loaded = _open_folder(base_source, tokenizer, in_memory, folder)
            loaded.name = named
            return loaded
        _check_folder(Path(named))
    elif not HUB_ID.match(named) or os.path.exists(named):
        raise ModelError(f"no model at {named!r}: neither a folder nor a hub id such as org/name")
    else:
        hub = hub_arguments(named, source.revision)
        where |= hub
    config = read_config(named, where)
    if (quantization := quantization_of(config)) is not None:
        reader_of(named, quantization)  # refuses a format before anything is fetched
    config_dtype = getattr(config, "dtype", None)
    dtype = resolve_dtype(source.dtype, config_dtype)
    # The config may name a weight file in place of the usual ones.
    file = getattr(config, "transformers_weights", None)
    if folder is None:
        folder = _download(named, hub, in_memory, file).resolve()
        read_modelopt_config(folder, config)
    weights, quantization = weight_files(folder, file), quantization_of(config)
    is_plain = quantization is None
    if not weights or (is_pickle(weights[0]) and not (is_plain and in_memory)):
        reader = "this placement needs" if is_plain else "a quantized checkpoint needs"
        raise NotSupported(
            f"{reader} {file or 'model.safetensors or its shards'}, which {folder} lacks; load "
            "the model with transformers and save it with save_pretrained"
        )
    if quantization is not None:
        forget_quantization(config)
    merged = None if adapter is None else read_folder(adapter)
    if tokenizer is None:
        tokenizer = _tokenizer(named, where)
    empty = empty_module(folder, config, source.trust_remote_code)
    table = tensors_of(weights)
    if config_dtype is None:
        dtype = resolve_dtype(source.dtype, usual_dtype(map(traced, table.values())))
    if quantization is not None:
        table = decode(folder, table, quantization, dtype)
    if merged is not None:
        merged, table = merge_experts(merged, table, dtype)
    tensors = {name: traced(lazy) for name, lazy in table.items()}
    generation = _generation_config(folder, config)
    loaded = LoadedModel(empty, tokenizer or None, generation, named, folder=folder)
    loaded.files, loaded.wrapper = weights, config
    return fill(
        folder,
        loaded,
        tensors,
        source,
        dtype,
        in_memory=in_memory,
        is_plain=is_plain,
        adapter=merged,
    )


def _base_of(adapter: Path) -> tuple[str, str | None]:
    """Return the base model of a PEFT adapter, a folder or hub id, and its revision."""
    for path in adapter.iterdir():
        check_stored(path)
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
    """Refuse a folder without config or weights, or with an adapter, invalid JSON, pipes or LFS pointers."""
    config = folder / "config.json"
    if not config.is_file():
        raise ModelError(f"{folder} holds no config.json, so it is not a model folder")
    for path in folder.iterdir():
        check_stored(path)
    named = read_json(config).get("transformers_weights")
    if (folder / ADAPTER).is_file():
        raise NotSupported(f"{folder} holds an adapter; merge it into the model")
    if not named and not weight_files(folder):
        raise ModelError(
            f"{folder} holds no weights: neither {' nor '.join(WEIGHT_FILES)}, nor {WEIGHT_FILES[0]}{INDEX} "
            "with its shards"
        )


def _download(source: str, hub: dict[str, Any], in_memory: bool, named: str | None) -> Path:
    """Return the local folder of a hub id, after downloading what is missing; `hub`: see `hub_arguments`."""
    from huggingface_hub import snapshot_download

    def fetch(*patterns: str) -> Path:
        return Path(snapshot_download(source, allow_patterns=list(patterns), **hub))

    try:
        folder = fetch("*.json", "*.py")
        for name in WEIGHT_FILES[: 1 + in_memory] if named is None else (named,):
            index = folder / (name if name.endswith(INDEX) else name + INDEX)
            fetch(*(shards_of(index) if index.is_file() else [name]))
            if weight_files(folder, named):
                break
        return folder
    except ModelError:
        raise
    except Exception as error:  # from the network, the hub or the disk
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
    """Return the tokenizer of a folder or hub id, or None if the folder has no tokenizer files."""
    from verbatim.text.tokenizer import Tokenizer, has_tokenizer_files

    if os.path.isdir(source) and not has_tokenizer_files(Path(source)):
        return None
    return Tokenizer.open(
        source,
        revision=where.get("revision"),
        trust_remote_code=where["trust_remote_code"],
    ).hf


def reopen(source: ModelSource) -> LoadedModel:
    """Open a model that another process has opened, with lazy weights and no tokenizer."""
    config = None if source.config is None else config_from_dict(source.config)
    loaded = open_files(replace(source, config=config), False)
    if source.quantization is not None:
        loaded.quantization = Quantization(**source.quantization)
    return loaded
