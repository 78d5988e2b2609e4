"""Opens the model given by `LLM`'s first argument: a name, a folder, a live module."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from verbatim import storyteller
from verbatim.errors import InvalidRequest, NotSupported
from verbatim.model.dcp.folder import find_dcp
from verbatim.model.gguf import find_gguf, load_gguf
from verbatim.model.loader import DTYPES, LoadedModel, Skeleton, load
from verbatim.model.spec import inner_model
from verbatim.options import dtype_name
from verbatim.placement.kv_caches import speaks_kv_caches
from verbatim.placement.wrapped import check_runnable, unwrap
from verbatim.text.tokenizer import Tokenizer
from verbatim.weights.dcp_model import load_dcp
from verbatim.weights.skeleton import open_skeleton


def open_model(
    model: Any,
    tokenizer: Any,
    dtype: str | torch.dtype,
    revision: str | None,
    trust_remote_code: bool,
    config: Any = None,
    *,
    skeleton: Skeleton | None = None,
    unused_weights: str = "error",
) -> LoadedModel:
    """Load the module and tokenizer given by `LLM`'s arguments.

    The weights are left in their files with `skeleton`; those of a DCP checkpoint and quantized ones always.
    """
    dcp = find_dcp(model) if isinstance(model, str | os.PathLike) else None
    if config is not None and dcp is None:
        raise InvalidRequest(
            f"config={config!r:.60}: only for a torch.distributed.checkpoint, and {model} holds no "
            "checkpoint of that kind: neither .metadata nor pp0, nor a link latest. Leave it at None"
        )
    if isinstance(tokenizer, str | os.PathLike):
        tokenizer = Tokenizer.open(
            os.fspath(tokenizer), revision=revision, trust_remote_code=trust_remote_code
        ).hf
    gguf = None
    if dcp is None and isinstance(model, str | os.PathLike):
        gguf = find_gguf(model)
    if skeleton is not None and isinstance(model, nn.Module):
        raise NotSupported(
            "placement: a live module is in memory; all placements but None take a folder with safetensors, "
            "such as save_pretrained writes, a torch.distributed.checkpoint or a GGUF file"
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
        )
    if gguf is not None:
        loaded = load_gguf(
            gguf,
            dtype=dtype,
            with_tokenizer=tokenizer is None,
            skeleton=skeleton,
            decode=open_skeleton,
            unused_weights=unused_weights,
        )
        loaded.tokenizer = loaded.tokenizer if tokenizer is None else tokenizer
        return loaded
    if isinstance(model, nn.Module):
        check_runnable(model, gpu=True)
        model = unwrap(model)
        _check_live(model, dtype)
        if speaks_kv_caches(model):
            return LoadedModel(model, tokenizer, None, type(model).__name__, live=True)
        inner = inner_model(model)
        name = getattr(inner.config, "name_or_path", "") or type(inner).__name__
        generation_config = getattr(inner, "generation_config", None)
        return LoadedModel(model, tokenizer, generation_config, name, live=True)
    if model is not None and not isinstance(model, str | os.PathLike):
        raise InvalidRequest(
            f"model={model!r}: must be None, a folder, a hub id or a transformers module"
        )
    loaded = load(
        storyteller.path() if model is None else model,
        dtype=dtype,
        revision=revision,
        trust_remote_code=trust_remote_code,
        with_tokenizer=tokenizer is None,
        skeleton=skeleton,
        decode=open_skeleton,
        unused_weights=unused_weights,
    )
    loaded.name = "storyteller" if model is None else loaded.name
    loaded.tokenizer = loaded.tokenizer if tokenizer is None else tokenizer
    return loaded


def _check_live(module: nn.Module, dtype: str | torch.dtype) -> None:
    """Refuse a `dtype` with a live module, and parameters of unsupported dtypes."""
    if dtype != "auto":
        raise NotSupported(f"dtype={dtype!r}: a live module keeps its own; leave it at 'auto'")
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point() and parameter.dtype not in DTYPES.values():
            raise NotSupported(
                f"{name} is {dtype_name(parameter.dtype)}; a live module must be one of {sorted(DTYPES)}"
            )
