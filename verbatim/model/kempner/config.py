"""KempnerForge's TOML config: the validated fields that describe a model.

This module does not import torch, so that commands can refuse a config at once.
"""

from __future__ import annotations

import dataclasses
import math
import os
import reprlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verbatim.common.files import read_file
from verbatim.errors import InvalidRequest, ModelError, UnsupportedModel

# Fields of [model] that only affect training or choose between equivalent kernels.
_TRAINING = frozenset(
    {
        "init_std",
        "sdpa_backend",
        "moe_aux_loss_weight",
        "moe_sequence_aux_loss_weight",
        "moe_gradient_scale",
        "moe_bias_schedule",
        "moe_router_z_loss_weight",
    }
)
# Sections of other kinds of models.
_OTHER_MODELS = ("vlm", "vision_encoder", "adapter", "video")
_CHOICES = {
    "norm_type": ("rmsnorm", "layernorm"),
    "activation": ("silu", "gelu", "relu"),
    "model_type": ("transformer",),
    "moe_router": ("softmax_topk", "sigmoid_topk"),
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The fields of `[model]` that describe the architecture, with KempnerForge's names and defaults.

    Raises:
        ModelError: a value is out of range; the message names it.
        UnsupportedModel: the kind of model is not supported.
    """

    dim: int = 4096
    n_layers: int = 32
    n_heads: int = 32
    n_kv_heads: int | None = None  # None: as many as n_heads
    vocab_size: int = 32000
    ffn_dim_multiplier: float = 1.0
    ffn_hidden_dim: int | None = None  # None: follows from dim
    norm_type: str = "rmsnorm"
    norm_eps: float = 1e-5
    activation: str = "silu"
    max_seq_len: int = 2048
    rope_theta: float = 10000.0
    tie_embeddings: bool = False
    qk_norm: bool = False
    model_type: str = "transformer"
    num_experts: int = 0  # 0: dense
    moe_top_k: int = 2
    moe_frequency: int = 1  # every n-th layer has experts
    moe_router: str = "softmax_topk"
    moe_shared_experts: int = 0  # any number above 0 is one shared expert
    moe_capacity_factor: float = 0.0
    moe_packed_experts: bool = False
    moe_expert_ffn_multiplier: float = 1.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, has_none = getattr(self, field.name), field.default == 0
            value = _converted(field.name, str(field.type), value)
            object.__setattr__(self, field.name, value)
            is_unused = field.name.startswith("moe_") and not (self.num_experts or has_none)
            if isinstance(value, bool | str | None) or is_unused:
                continue
            if not 0 <= value < 2**40 or not (value or has_none):
                least = "0 or more" if has_none else "above 0"
                raise ModelError(
                    f"[model] {field.name}={shown(value)}: must be {least} and below 2**40"
                )
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise UnsupportedModel(
                    f"[model] {name}={shown(getattr(self, name))}: must be one of {list(allowed)}"
                )
        if self.dim % self.n_heads or self.head_dim % 2:
            raise ModelError(
                f"[model] dim={self.dim}: must be n_heads={self.n_heads} times an even number"
            )
        if self.n_heads % self.kv_heads:
            raise ModelError(
                f"[model] n_heads={self.n_heads}: must be a multiple of n_kv_heads={self.kv_heads}"
            )
        if self.num_experts and self.moe_top_k > self.num_experts:
            raise ModelError(
                f"[model] moe_top_k={self.moe_top_k}: at most num_experts={self.num_experts}"
            )

    @property
    def kv_heads(self) -> int:
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def ffn_width(self) -> int:
        """Width of a dense layer: two thirds of 4 * dim, times the multiplier, rounded up to 256."""
        if self.ffn_hidden_dim is not None:
            return self.ffn_hidden_dim
        return 256 * math.ceil(int(4 * self.dim * (2 / 3) * self.ffn_dim_multiplier) / 256)

    @property
    def expert_width(self) -> int:
        """Width of one expert, rounded to a multiple of 16."""
        return max(16, 16 * round(int(self.ffn_width * self.moe_expert_ffn_multiplier) / 16))

    def has_experts(self, layer: int) -> bool:
        return self.num_experts > 0 and (layer + 1) % self.moe_frequency == 0

    @property
    def is_moe(self) -> bool:
        """True if any layer has experts; none if the frequency exceeds the number of layers."""
        return self.num_experts > 0 and self.n_layers >= self.moe_frequency


@dataclass(frozen=True, slots=True)
class KempnerConfig:
    """The model settings of a KempnerForge TOML and its overrides.

    Attributes:
        model: the architecture.
        tokenizer_path: `[data] tokenizer_path`, a folder or a hub id, or None.
        load_path: `[checkpoint] load_path`, or None.
    """

    model: ModelConfig
    tokenizer_path: str | None = None
    load_path: str | None = None

    @classmethod
    def read(
        cls, path: str | os.PathLike[str], overrides: Mapping[str, Mapping[str, Any]] | None = None
    ) -> KempnerConfig:
        """Read a TOML file, with `overrides` by section and field.

        Raises:
            ModelError: the file can't be read, `[model]` has an unknown field, or a value is out of range.
            UnsupportedModel: the kind of model is not supported.
        """
        file = Path(os.path.expanduser(path))
        try:
            text = read_file(str(file), file)
        except InvalidRequest as error:
            raise ModelError(str(error)) from None
        try:
            tables = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, or nested too deeply
            raise ModelError(f"{file} is not TOML: {error}") from None
        try:
            return cls._of(tables, overrides or {})
        except (ModelError, UnsupportedModel) as error:
            raise type(error)(f"{file}: {error}") from None

    @classmethod
    def _of(
        cls, tables: dict[str, Any], overrides: Mapping[str, Mapping[str, Any]]
    ) -> KempnerConfig:
        for section in _OTHER_MODELS:
            if section in tables or section in overrides:
                raise UnsupportedModel(
                    f"[{section}] is for models of images or video; only text models are supported"
                )
        known = {field.name for field in dataclasses.fields(ModelConfig)}
        if "model" not in tables and tables.keys() & known:
            # Files in configs/model/ have no sections; all fields belong to [model].
            tables = {"model": tables}
        model = _merged(tables, overrides, "model")
        unknown = sorted(model.keys() - known - _TRAINING)
        if unknown:
            raise ModelError(
                f"[model] has no field {unknown[0]!r}; known fields are {sorted(known | _TRAINING)}"
            )
        paths = []
        for section, name in (("data", "tokenizer_path"), ("checkpoint", "load_path")):
            value = _merged(tables, overrides, section).get(name)
            if value is not None and not isinstance(value, str):
                raise ModelError(f"[{section}] {name}={shown(value)}: must be a string")
            paths.append(value or None)
        return cls(
            ModelConfig(**{k: v for k, v in model.items() if k in known}), paths[0], paths[1]
        )


def _merged(
    tables: Mapping[str, Any], overrides: Mapping[str, Mapping[str, Any]], section: str
) -> dict[str, Any]:
    table = tables.get(section, {})
    if not isinstance(table, dict):
        raise ModelError(f"{section}={shown(table)}: must be a section")
    return {**table, **overrides.get(section, {})}


def _converted(name: str, kind: str, value: Any) -> Any:
    """Return `value` converted to `kind`, an annotation of `ModelConfig`."""
    if value is None and kind.endswith("| None"):
        return None
    kind = kind.removesuffix(" | None")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and -(2**63) <= value < 2**63:  # TOML's integers; neither inf nor nan
        if kind == "float":
            return float(value)
        if kind == "int" and int(value) == value:
            return int(value)
    if {"bool": bool, "str": str}.get(kind) is type(value):
        return value
    raise ModelError(f"[model] {name}={shown(value)}: must be {_DESCRIPTIONS[kind]}")


_DESCRIPTIONS = {
    "int": "an integer of 64 bits",
    "float": "a number below 2**63",
    "bool": "true or false",
    "str": "a string",
}


class _ShortRepr(reprlib.Repr):
    """Short representations of arbitrary values, for messages."""

    maxstring = 100

    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() > 64:  # repr refuses thousands of digits
            return f"an integer of {x.bit_length()} bits"
        return repr(x)


shown = _ShortRepr().repr
