"""Opens DCP checkpoints: their tensors become lazy weights under the names of a transformers model.

A chunk is stored as raw values, so it is read like a tensor of a safetensors file; a sharded tensor is a
concatenation of chunks. A DCP folder has no config, so `config=` is required:
KempnerForge's TOML or a transformers config.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verbatim.common.files import hub_arguments
from verbatim.errors import InvalidRequest, ModelError, NotSupported
from verbatim.model.dcp.checkpoint import DcpCheckpoint
from verbatim.model.kempner import layout
from verbatim.model.kempner.config import KempnerConfig
from verbatim.model.kempner.config import ModelConfig as KempnerModel
from verbatim.model.loader import (
    HUB_ID,
    LoadedModel,
    ModelSource,
    empty_module,
    read_config,
    resolve_dtype,
)
from verbatim.model.stored import read_stored
from verbatim.weights.lazy import lazy_of, materialize, sources, traced, usual_dtype
from verbatim.weights.skeleton import fill

ALLOWED = (
    "a KempnerForge TOML (a path that ends in .toml), a transformers config, or the folder, "
    "config.json or hub id of one"
)


def open_dcp(
    folder: Path, source: ModelSource, tokenizer: Any, *, with_config: bool
) -> LoadedModel:
    """Open a DCP checkpoint with lazy weights, and the tokenizer of KempnerForge's TOML, if any.

    `dtype="auto"` means the dtype of most stored weights, with bfloat16 in place of float16.

    Args:
        folder: the result of `find_dcp`.
        source: the model with its `config`, and the revision of a config that is a hub id.
        tokenizer: as for `open_files`.
        with_config: also return the config as plain data, for another process.

    Raises:
        InvalidRequest: the config is missing or invalid.
        ModelError: the checkpoint is damaged.
        UnsupportedModel: the architecture is not supported.
        NotSupported: the config is quantized; or, `with_config`, its class is not part of transformers.
    """
    config, kempner, generation = _config_of(folder, source)
    if getattr(config, "quantization_config", None) is not None:
        raise NotSupported("a config with a quantization_config: quantized DCP is not read")
    checkpoint = DcpCheckpoint(folder)
    plain_config = _as_dict(config, kempner) if with_config else None
    if tokenizer is None and kempner is not None and kempner.tokenizer_path:
        from verbatim.text.tokenizer import Tokenizer

        path, remote = kempner.tokenizer_path, source.trust_remote_code
        tokenizer = Tokenizer.open(path, trust_remote_code=remote).hf
    empty = empty_module(folder, config, source.trust_remote_code)
    names = checkpoint.names([layout.FIRST] if kempner is not None else [*empty.state_dict()])
    weights = stored_weights = {n: checkpoint.tensor(name, traced) for n, name in names.items()}
    stored = [part for tensor in weights.values() for part in sources(lazy_of(tensor))]
    files = sorted({part.path for part in stored})
    dtype = resolve_dtype(source.dtype, usual_dtype(weights.values()))
    if kempner is not None:
        weights = layout.renamed(folder, empty, kempner.model, stored_weights)
    _drop_copies(folder, empty, weights, dtype)
    loaded = LoadedModel(empty, tokenizer or None, generation, str(folder), folder=folder)
    loaded.files, loaded.wrapper, loaded.config = files, config, plain_config
    if kempner is None:
        return fill(folder, loaded, weights, source, dtype, in_memory=True)

    def adjust(module: Any) -> list[str]:
        layout.adjust(module, kempner.model, stored_weights)
        if tokenizer:
            module.generation_config.eos_token_id = tokenizer.eos_token_id
        return [names[short] for short in stored_weights]

    return fill(folder, loaded, weights, source, dtype, in_memory=True, adjust=adjust)


def _drop_copies(folder: Path, empty: Any, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Drop tensors that the config ties to others; raise ModelError if both are stored, and differ."""
    for copy_name, name in empty.all_tied_weights_keys.items():
        if copy_name in tensors and name in tensors:
            pair = [lazy_of(tensors.pop(copy_name)), lazy_of(tensors[name])]
            first, second = (materialize(lazy, read_stored).to(dtype) for lazy in pair)
            if not torch.equal(first, second):
                stored = sources(pair[0])[0].name.partition("[")[0]
                raise ModelError(
                    f"{folder}: by the config {stored} is shared with another tensor of the "
                    "model, but the two differ"
                )


def _config_of(folder: Path, source: ModelSource) -> tuple[Any, KempnerConfig | None, Any]:
    """Return the transformers config, and KempnerForge's and the generation config, if any."""
    from transformers import PretrainedConfig

    config = source.config
    if config is None:
        raise InvalidRequest(
            f"{folder} is a torch.distributed.checkpoint, which holds no config: config= must be "
            f"{ALLOWED}"
        )
    if isinstance(config, str | os.PathLike):
        named = os.path.expanduser(os.fspath(config))
        if not named.endswith(".toml"):
            where: dict[str, Any] = {"trust_remote_code": source.trust_remote_code}
            if os.path.exists(named):
                where["local_files_only"] = True
            elif HUB_ID.match(named):
                where |= hub_arguments(named, source.revision)
            else:
                raise InvalidRequest(
                    f"config={named!r}: does not exist and is not a hub id; must be {ALLOWED}"
                )
            return read_config(named, where), None, _generation(named, where)
        config = KempnerConfig.read(named)
    if isinstance(config, KempnerConfig):
        return layout.transformers_config(config.model), config, None
    if isinstance(config, PretrainedConfig):
        return copy.deepcopy(config), None, None  # copied, since the weights may be read again
    raise InvalidRequest(f"config={config!r}: must be {ALLOWED}")


def _generation(source: str, where: dict[str, Any]) -> Any:
    """Return the generation config in the folder of a config, or None."""
    from transformers import GenerationConfig

    if os.path.isfile(source):
        source = os.path.dirname(source) or "."
    try:
        return GenerationConfig.from_pretrained(source, **where)
    except (OSError, ValueError, TypeError):  # most folders have none
        return None


def _as_dict(config: Any, kempner: KempnerConfig | None) -> dict[str, Any]:
    """Return a config as plain data, for `config_from_dict`; refuse classes that transformers lacks."""
    from transformers import CONFIG_MAPPING

    if kempner is not None:
        return {"kempner": dataclasses.asdict(kempner.model)}
    kind = config.model_type
    if kind not in CONFIG_MAPPING or type(config) is not CONFIG_MAPPING[kind]:
        raise NotSupported(
            f"placement: a config of the class {type(config).__name__}, which is not from "
            "transformers, can't be used with a torch.distributed.checkpoint; save the model "
            "with save_pretrained"
        )
    return {"transformers": json.loads(config.to_json_string(use_diff=False))}


def config_from_dict(plain: Mapping[str, Any]) -> Any:
    """Reverse `_as_dict`: return the config for `ModelSource` from `LoadedModel.config`."""
    from transformers import CONFIG_MAPPING

    if "kempner" in plain:
        return KempnerConfig(KempnerModel(**plain["kempner"]))
    fields = dict(plain["transformers"])
    return CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
