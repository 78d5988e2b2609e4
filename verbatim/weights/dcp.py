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
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from verbatim.errors import InvalidRequest, ModelError, NotSupported
from verbatim.files import hub_arguments
from verbatim.model.dcp.checkpoint import DcpCheckpoint
from verbatim.model.kempner import layout
from verbatim.model.kempner.config import KempnerConfig
from verbatim.model.kempner.config import ModelConfig as KempnerModel
from verbatim.model.loader import HUB_ID, ModelSource, read_config, resolve_dtype
from verbatim.model.stored import read_stored
from verbatim.weights.lazy import lazy_of, materialize, sources, traced
from verbatim.weights.skeleton import ModelFiles

ALLOWED = (
    "a KempnerForge TOML (a path that ends in .toml), a transformers config, or the folder, "
    "config.json or hub id of one"
)


def dcp_files(folder: Path, source: ModelSource, *, with_config: bool) -> ModelFiles:
    """Return the model of a DCP checkpoint, and the tokenizer of KempnerForge's TOML, if any.

    With `dtype="auto"` it is the dtype of most stored weights (float16: bfloat16).

    Args:
        folder: the result of `find_dcp`.
        source: with the config of the checkpoint's model, and its revision, if it is a hub id.
        with_config: return the config as plain data, too, for another process.

    Raises:
        InvalidRequest: a missing or invalid config.
        ModelError: the checkpoint is damaged.
        UnsupportedModel: an unsupported architecture.
        NotSupported: a quantized config; `with_config`, a config of a foreign class.
    """
    trust_remote_code = source.trust_remote_code
    where = {"trust_remote_code": trust_remote_code, "revision": source.revision}
    config, kempner, generation = _config_of(folder, source.config, where)
    if getattr(config, "quantization_config", None) is not None:
        raise NotSupported("a config with a quantization_config: quantized DCP is not read")
    checkpoint = DcpCheckpoint(folder)

    def tensors(empty: Any) -> tuple[dict[str, Tensor], torch.dtype]:
        names = checkpoint.names([layout.FIRST] if kempner is not None else [*empty.state_dict()])
        found = {short: checkpoint.tensor(name, traced) for short, name in names.items()}
        stored = [part for tensor in found.values() for part in sources(lazy_of(tensor))]
        files.weights = sorted({part.path for part in stored})
        dtype = resolve_dtype(source.dtype, SimpleNamespace(dtype=_dtype_of(found.values())))
        if kempner is not None:
            left = found
            found = layout.renamed(folder, empty, kempner.model, left)

            def adjust(module: Any) -> list[str]:
                layout.adjust(module, kempner.model, left)
                return [names[short] for short in left]

            files.adjust = adjust
        _drop_copies(folder, empty, found, dtype)
        return found, dtype

    def open_tokenizer() -> Any:
        if kempner is None or not kempner.tokenizer_path:
            return None
        from verbatim.text.tokenizer import Tokenizer

        return Tokenizer.open(kempner.tokenizer_path, trust_remote_code=trust_remote_code).hf

    def generation_of(module: Any, tokenizer: Any) -> Any:
        if kempner is not None and tokenizer:
            module.generation_config.eos_token_id = tokenizer.eos_token_id
        return generation or module.generation_config

    files = ModelFiles(
        str(folder),
        folder,
        config,
        tensors,
        open_tokenizer,
        generation_of,
        plain_config=_as_dict(config, kempner) if with_config else None,
    )
    return files


def _dtype_of(tensors: Iterable[Tensor]) -> torch.dtype:
    """Return the floating dtype of most of the stored weights; float32 if there is none."""
    amount: dict[torch.dtype, int] = {}
    for tensor in tensors:
        if tensor.is_floating_point():
            amount[tensor.dtype] = amount.get(tensor.dtype, 0) + tensor.numel()
    return max(amount, key=lambda dtype: amount[dtype], default=torch.float32)


def _drop_copies(folder: Path, empty: Any, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Drop tensors that the config ties to others.

    Raises:
        ModelError: one is stored twice, with other numbers.
    """
    for copy_name, name in empty.all_tied_weights_keys.items():
        if copy_name in tensors and name in tensors:
            pair = [lazy_of(tensors.pop(copy_name)), lazy_of(tensors[name])]
            first, second = (materialize(lazy, read_stored).to(dtype) for lazy in pair)
            if not torch.equal(first, second):
                stored = sources(pair[0])[0].name.partition("[")[0]
                raise ModelError(
                    f"{folder}: by the config {stored} is shared with another tensor of the "
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
            remote, revision = where["trust_remote_code"], where["revision"]
            is_here = os.path.exists(source)
            found = {"local_files_only": True} if is_here else hub_arguments(source, revision)
            where = {"trust_remote_code": remote, **found}
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
    """Return the config of `dcp_files` from a `LoadedModel.config`."""
    from transformers import CONFIG_MAPPING

    if "kempner" in plain:
        return KempnerConfig(KempnerModel(**plain["kempner"]))
    fields = dict(plain["transformers"])
    return CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
