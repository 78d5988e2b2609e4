"""Opens the `model` argument of `LLM`: a hub id, a folder or a live module."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from verbatim.common.checks import check_kind
from verbatim.errors import InvalidRequest, NotSupported
from verbatim.kernels import uses_triton
from verbatim.model.loader import DTYPES, LoadedModel, ModelSource
from verbatim.model.spec import inner_model
from verbatim.options import dtype_name
from verbatim.placement.kv_caches import takes_kv_caches
from verbatim.placement.wrapped import check_runnable, unwrap
from verbatim.text.tokenizer import Tokenizer
from verbatim.weights.opening import open_files


def open_model(
    source: ModelSource, tokenizer: Any = None, *, in_memory: bool = True
) -> LoadedModel:
    """Open the module and tokenizer for `LLM`'s arguments. Weights in files are not loaded yet.

    Args:
        in_memory: whether the weights will be in this process's memory; only then is a live module accepted.
    """
    model, config = source.model, source.config
    if isinstance(tokenizer, str | os.PathLike):
        tokenizer = Tokenizer.open(
            os.fspath(tokenizer),
            revision=source.revision,
            trust_remote_code=source.trust_remote_code,
        ).hf
    if model is None or isinstance(model, str | os.PathLike):
        return open_files(source, tokenizer, in_memory=in_memory)
    if config is not None:
        raise InvalidRequest(
            f"config={config!r}: only for a torch.distributed.checkpoint, and model= is a module; leave it "
            "at None"
        )
    check_kind("model", model, nn.Module, "None, a folder, a hub id or a transformers module")
    if not in_memory:
        raise NotSupported(
            "placement: a live module is in memory; all placements but None take a folder with safetensors, "
            "such as save_pretrained writes, a torch.distributed.checkpoint or a GGUF file"
        )
    check_runnable(model)
    model = unwrap(model)
    _check_live(model, source.dtype)
    if takes_kv_caches(model):
        return LoadedModel(model, tokenizer, None, type(model).__name__, live=True)
    inner = inner_model(model)
    name = getattr(inner.config, "name_or_path", "") or type(inner).__name__
    generation_config = getattr(inner, "generation_config", None)
    return LoadedModel(model, tokenizer, generation_config, name, live=True)


def _check_live(module: nn.Module, dtype: str | torch.dtype) -> None:
    """Refuse a `dtype` with a live module, and parameters of unsupported dtypes."""
    if dtype != "auto":
        raise NotSupported(f"dtype={dtype!r}: a live module keeps its own; leave it at 'auto'")
    for name, parameter in module.named_parameters():
        on_gpu = uses_triton(parameter.device)
        allowed = DTYPES | ({"float16": torch.float16} if on_gpu else {})
        if parameter.is_floating_point() and parameter.dtype not in allowed.values():
            raise NotSupported(
                f"{name} is {dtype_name(parameter.dtype)}; a live module must be one of {sorted(allowed)} on "
                f"{parameter.device.type}"
            )
