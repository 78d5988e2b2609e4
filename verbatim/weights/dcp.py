"""Opening of a DCP checkpoint: its tensors become lazy weights by the names of a transformers model.

torch.save stores the raw numbers of a chunk, so a chunk is read like a tensor of a safetensors file, and a
sharded tensor is a concatenation of chunks. A DCP folder has no config, so `config=` is required:
KempnerForge's TOML or a transformers config.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

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
from verbatim.model.unused import refuse_unused
from verbatim.weights.lazy import materialize, sources, traced
from verbatim.weights.skeleton import load_traced

ALLOWED = (
    "a KempnerForge TOML (a path that ends in .toml), a transformers config, or the folder, "
    "config.json or hub id of one"
)


def load_dcp(
    folder: Path, source: ModelSource, tokenizer: Any, *, with_config: bool
) -> LoadedModel:
    """Open a DCP checkpoint with lazy weights.

    With `dtype="auto"` it is the dtype of most stored weights (float16: bfloat16).

    Args:
        folder: the result of `find_dcp`.
        source: with the config of the checkpoint's model, and its revision, if it is a hub id.
        tokenizer: a transformers tokenizer; None takes that of KempnerForge's TOML, if any; False: none.
        with_config: return the config as plain data, too, for another process.

    Raises:
        InvalidRequest: a missing or invalid config.
        ModelError: the checkpoint is damaged, or does not fit the config.
        UnsupportedModel: an unsupported architecture.
        NotSupported: a quantized config; `with_config`, a config of a foreign class.
    """
    trust_remote_code = source.trust_remote_code
    where = {"trust_remote_code": trust_remote_code, "revision": source.revision}
    config, kempner, generation = _config_of(folder, source.config, where)
    if getattr(config, "quantization_config", None) is not None:
        raise NotSupported("a config with a quantization_config: quantized DCP is not read")
    if kempner is not None and tokenizer is None and kempner.tokenizer_path:
        from verbatim.text.tokenizer import Tokenizer

        path = kempner.tokenizer_path
        tokenizer = Tokenizer.open(path, trust_remote_code=trust_remote_code).hf
    checkpoint = DcpCheckpoint(folder)
    empty = empty_module(folder, config, trust_remote_code)
    module, lazy_weights, unused = _open(checkpoint, empty, kempner, source.dtype)
    if source.unused_weights == "error":
        refuse_unused(folder, module, config, unused)
    if generation is not None:
        module.generation_config = generation
    if kempner is not None and tokenizer:
        module.generation_config.eos_token_id = tokenizer.eos_token_id
    return LoadedModel(
        module,
        tokenizer or None,
        module.generation_config,
        str(folder),
        lazy_weights=lazy_weights,
        folder=folder,
        files=[*{part.path for lazy in lazy_weights.values() for part in sources(lazy)}],
        config=_as_dict(config, kempner) if with_config else None,
    )


def _open(
    checkpoint: DcpCheckpoint, empty: Any, kempner: KempnerConfig | None, dtype: str | torch.dtype
) -> tuple[Any, dict[Any, Any], list[str]]:
    """Return the module, its lazy weights, and the names of tensors that it does not use."""
    keys = [layout.FIRST] if kempner is not None else list(empty.state_dict())
    names = checkpoint.names(keys)
    resolved = resolve_dtype(dtype, SimpleNamespace(dtype=_dtype_of(checkpoint, names.values())))
    tensors = {short: checkpoint.tensor(name, traced) for short, name in names.items()}
    if kempner is None:
        _drop_copies(checkpoint, empty, tensors, resolved)
        return load_traced(checkpoint.folder, empty, resolved, tensors, checkpoint.nbytes)
    found = layout.renamed(checkpoint.folder, empty, kempner.model, tensors)
    _drop_copies(checkpoint, empty, found, resolved)
    module, lazy_weights, _ = load_traced(
        checkpoint.folder,
        empty,
        resolved,
        found,
        checkpoint.nbytes,
        adjust=lambda module: layout.adjust(module, kempner.model, tensors),
    )
    return module, lazy_weights, [names[short] for short in tensors]


def _dtype_of(checkpoint: DcpCheckpoint, names: Iterable[str]) -> torch.dtype:
    """Return the floating dtype of most of the stored weights; float32 if there is none."""
    amount: dict[torch.dtype, int] = {}
    for name in names:
        if (dtype := checkpoint.dtype(name)).is_floating_point:
            amount[dtype] = amount.get(dtype, 0) + prod(checkpoint.size(name))
    return max(amount, key=lambda dtype: amount[dtype], default=torch.float32)


def _drop_copies(
    checkpoint: DcpCheckpoint, empty: Any, tensors: dict[str, Tensor], dtype: torch.dtype
) -> None:
    """Drop tensors that the config ties to others.

    Raises:
        ModelError: one is stored twice, with other numbers.
    """
    for copy_name, name in empty.all_tied_weights_keys.items():
        if copy_name in tensors and name in tensors:
            pair: list[Any] = [tensors.pop(copy_name), tensors[name]]
            first, second = (materialize(x.lazy, read_stored).to(dtype) for x in pair)
            if not torch.equal(first, second):
                stored = sources(pair[0].lazy)[0].name.partition("[")[0]
                raise ModelError(
                    f"{checkpoint.folder}: by the config {stored} is shared with another tensor of the "
                    "model, and the two are not equal"
                )


def _config_of(
    folder: Path, config: Any, where: dict[str, Any]
) -> tuple[Any, KempnerConfig | None, Any]:
    """Return a transformers config, KempnerForge's, and the generation config beside it, if any."""
    from transformers import PretrainedConfig

    if config is None:
        raise InvalidRequest(
            f"{folder} is a torch.distributed.checkpoint, which holds no config: config= must be "
            f"{ALLOWED}"
        )
    if isinstance(config, str | os.PathLike):
        source = os.path.expanduser(os.fspath(config))
        if not source.endswith(".toml"):
            if not os.path.exists(source) and not HUB_ID.match(source):
                raise InvalidRequest(
                    f"config={source!r}: it is not there, and no hub id; it must be {ALLOWED}"
                )
            if os.path.exists(source):
                where = {"trust_remote_code": where["trust_remote_code"], "local_files_only": True}
            return read_config(source, where), None, _generation(source, where)
        config = KempnerConfig.read(source)
    if isinstance(config, KempnerConfig):
        return layout.transformers_config(config.model), config, None
    if isinstance(config, PretrainedConfig):
        return copy.deepcopy(config), None, None  # the weights may be read again
    raise InvalidRequest(f"config={config!r}: must be {ALLOWED}")


def _generation(source: str, where: dict[str, Any]) -> Any:
    """Return the generation config beside a config, or None."""
    from transformers import GenerationConfig

    if os.path.isfile(source):
        source = os.path.dirname(source) or "."
    try:
        return GenerationConfig.from_pretrained(source, **where)
    except (OSError, ValueError, TypeError):  # most have none
        return None


def _as_dict(config: Any, kempner: KempnerConfig | None) -> dict[str, Any]:
    """Return a config as plain data, the input of `config_from_dict`.

    Raises:
        NotSupported: its class is not transformers'.
    """
    from transformers import CONFIG_MAPPING

    if kempner is not None:
        return {"kempner": dataclasses.asdict(kempner.model)}
    kind = config.model_type
    if kind not in CONFIG_MAPPING or type(config) is not CONFIG_MAPPING[kind]:
        raise NotSupported(
            f"placement: a config of the class {type(config).__name__}, which is none of "
            "transformers' own, is not handed on with a torch.distributed.checkpoint; save the model "
            "with save_pretrained"
        )
    return {"transformers": json.loads(config.to_json_string(use_diff=False))}


def config_from_dict(plain: Mapping[str, Any]) -> Any:
    """Return `load_dcp`'s config from a `LoadedModel.config`."""
    from transformers import CONFIG_MAPPING

    if "kempner" in plain:
        return KempnerConfig(KempnerModel(**plain["kempner"]))
    fields = dict(plain["transformers"])
    return CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
