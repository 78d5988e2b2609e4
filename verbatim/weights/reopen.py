"""Opening the files of a model, also once more in another process, without reading its weights."""

from __future__ import annotations

import os
from typing import Any

import torch

from verbatim import storyteller
from verbatim.errors import InvalidRequest
from verbatim.model.dcp.checkpoint import find_dcp
from verbatim.model.gguf import find_gguf, load_gguf
from verbatim.model.loader import LoadedModel, ModelSource, Skeleton, load
from verbatim.model.quantization import Quantization
from verbatim.weights.dcp import config_from_dict, load_dcp
from verbatim.weights.skeleton import open_skeleton


def open_files(
    model: str | os.PathLike[str] | None,
    *,
    tokenizer: Any = None,
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    config: Any = None,
    skeleton: Skeleton | None = open_skeleton,
    unused_weights: str = "error",
) -> LoadedModel:
    """Open a DCP folder, a GGUF file, a folder in Hugging Face's format or a hub id; None: the storyteller.

    Args:
        tokenizer: a transformers tokenizer; None: the model's own; False: none.
        skeleton: leaves the weights in their files; None reads those that are not quantized.
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
            with_config=skeleton is not None,
            unused_weights=unused_weights,
        )
    gguf = None if model is None else find_gguf(model)
    own: dict[str, Any] = {
        "with_tokenizer": tokenizer is None,
        "skeleton": skeleton,
        "decode": open_skeleton,
    }
    if gguf is not None:
        loaded = load_gguf(gguf, dtype=dtype, unused_weights=unused_weights, **own)
    else:
        loaded = load(
            storyteller.path() if model is None else model,
            dtype=dtype,
            revision=revision,
            trust_remote_code=trust_remote_code,
            unused_weights=unused_weights,
            **own,
        )
    loaded.name = "storyteller" if model is None else loaded.name
    loaded.tokenizer = loaded.tokenizer if tokenizer is None else tokenizer or None
    return loaded


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
