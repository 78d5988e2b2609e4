"""Modules that are called as `model(tokens, kv_caches=[...])`, KempnerForge's protocol."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from verbatim.errors import UnsupportedModel
from verbatim.placement.foreign import Foreign
from verbatim.placement.options import EngineOptions

_FIELDS = ("n_layers", "n_kv_heads", "head_dim", "max_seq_len")


def speaks_kv_caches(module: nn.Module) -> bool:
    """Does `module` take `kv_caches`, and does its config tell what they must hold?"""
    config: Any = getattr(module, "config", None)
    if not all(hasattr(config, field) for field in _FIELDS):
        return False
    return "kv_caches" in inspect.signature(module.forward).parameters


def open_kv_caches(
    module: nn.Module, options: EngineOptions, max_length: int | None, *, weak: bool
) -> Foreign:
    """A runner for `module`, held weakly on request."""
    raise UnsupportedModel("kv_caches modules: being built")
