"""Mixers of recurrent layers (delta rule, Mamba-2, convolution): their parts, and structs for the kernels.

Parts are found by their names. Whether they compute what the kernels do is tried (`layer_trial.py`).
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from verbatim.kernels.functions import struct_of
from verbatim.model.norms import Gate, Norm, find_norm, group_width
from verbatim.model.structs import NormStruct, NotFusable, address_of, norm_of

_POINTER, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


@dataclass(frozen=True, slots=True)
class Mixer:
    """The recurrent part of a layer, in place of attention.

    Attributes:
        field: of `LayerStruct`, for the address of the struct.
        num_states: recurrent operations, each of which keeps a state.
        kind: the struct's class.
        inputs: names of the linears of the layer's input.
        norm: beside those of the layer; None without.
        sizes: heads, key heads, and their widths; heads times value width is the width of the output.
    """

    field: ClassVar[str]
    kind: ClassVar[type[ctypes.Structure]]
    num_states: ClassVar[int] = 2
    module: nn.Module
    inputs: list[str]
    norm: Norm | None
    sizes: tuple[int, int, int, int]

    @property
    def widths(self) -> list[int]:
        """Columns of the inputs' products."""
        raise NotImplementedError

    def fill(self, struct: Any, dtype: torch.dtype) -> None:
        """Fill in a struct of its kind.

        Raises:
            NotFusable: its weights are of a kind that the kernels don't read where they are.
        """
        raise NotImplementedError


def _tensors_of(mixer: Mixer, conv: str, *names: str) -> list[Any]:
    """Return the convolution's weight and bias, and parameters of the mixer; None for a missing one."""
    child = mixer.module._modules[conv]
    assert child is not None
    found = [child._parameters["weight"], child._parameters.get("bias")]
    return [*found, *(mixer.module._parameters.get(name) for name in names)]


class _Slice(ctypes.Structure):
    _fields_ = [("at", _LONG), ("stride", _LONG)]


_ROLES = ("q", "k", "v", "gate", "beta", "decay")
# The linears of the input, each with what its product has.
_DELTA_INPUTS: tuple[dict[str, str], ...] = (
    {"in_proj_qkv": "q k v", "in_proj_z": "gate", "in_proj_b": "beta", "in_proj_a": "decay"},
    {"in_proj_qkvz": "q k v gate", "in_proj_ba": "beta decay"},
    dict(q_proj="q", k_proj="k", v_proj="v", g_proj="gate", b_proj="beta", a_proj="decay"),
)
_BY_KEY_HEAD = ("in_proj_qkvz", "in_proj_ba")  # all roles of one key head, then those of the next


@struct_of("delta")
class DeltaRuleStruct(ctypes.Structure):
    """`DeltaRule` of kernels/layer.cpp."""

    _fields_ = [
        *((role, _Slice) for role in _ROLES),
        *((name, _POINTER) for name in ("weight", "a_log", "dt_bias")),
        ("norm", NormStruct),
        ("taps", _LONG),
        *((name, _FLOAT) for name in ("eps", "q_scale", "k_scale", "beta_scale")),
    ]


class DeltaRule(Mixer):
    """A gated delta rule, as Qwen3-Next, Qwen3.5 and OLMo Hybrid have it, with a norm of a head's output."""

    __slots__ = ()
    field, kind = "delta", DeltaRuleStruct

    @property
    def roles(self) -> dict[str, str]:
        """The roles that the product of each input has."""
        return next(names for names in _DELTA_INPUTS if [*names] == self.inputs)

    @property
    def widths(self) -> list[int]:
        of, key_heads = self._widths(), self.sizes[1]
        return [key_heads * sum(of[role] for role in x.split()) for x in self.roles.values()]

    def _widths(self) -> dict[str, int]:
        """Columns of each key head, by role."""
        heads, key_heads, key_dim, value_dim = self.sizes
        group = heads // key_heads
        value = group * value_dim
        return dict(zip(_ROLES, (key_dim, key_dim, value, value, group, group), strict=True))

    def fill(self, struct: Any, dtype: torch.dtype) -> None:
        heads, key_heads, key_dim, value_dim = self.sizes
        of, at = self._widths(), 0
        for name, given in self.roles.items():
            roles = given.split()
            together = sum(of[role] for role in roles)
            for role in roles:
                by_head = name in _BY_KEY_HEAD
                setattr(struct, role, _Slice(at, together if by_head else of[role]))
                at += of[role] * (1 if by_head else key_heads)
            if name in _BY_KEY_HEAD:
                at += together * (key_heads - 1)
        weight, bias, a_log, dt_bias = _tensors_of(self, "conv1d", "A_log", "dt_bias")
        channels = 2 * key_heads * key_dim + heads * value_dim
        if bias is not None or a_log is None or dt_bias is None:
            raise NotFusable("its convolution has a bias, or parameters are missing")
        if not a_log.shape == dt_bias.shape == (heads,):
            raise NotFusable("its parameters do not fit together")
        struct.a_log, struct.dt_bias = address_of(a_log, dtype), address_of(dt_bias, dtype)
        struct.weight, struct.taps = _taps(weight, channels, dtype)
        struct.norm = norm_of(self.norm, dtype, value_dim, None)
        # As in `recurrent.py`: vectors of length 1, by a norm of their mean square.
        struct.eps = 1e-6 / key_dim
        struct.q_scale = key_dim**-0.5 / math.sqrt(key_dim)
        struct.k_scale = 1.0 / math.sqrt(key_dim)
        struct.beta_scale = 2.0 if getattr(self.module, "allow_neg_eigval", False) else 1.0


@struct_of("mamba2")
class Mamba2Struct(ctypes.Structure):
    """`Mamba2` of kernels/layer.cpp."""

    _fields_ = [
        *((name, _POINTER) for name in ("weight", "bias", "a_log", "dt_bias", "d", "norm_weight")),
        *((name, _LONG) for name in ("norm_width", "taps")),
        *((name, _FLOAT) for name in ("eps", "dt_min", "dt_max")),
    ]


class Mamba2(Mixer):
    """Mamba-2 with a norm behind its gate, as Bamba, Granite 4 and Nemotron-H have it."""

    __slots__ = ()
    field, kind = "mamba2", Mamba2Struct

    @property
    def widths(self) -> list[int]:
        heads, groups, key_dim, value_dim = self.sizes
        return [2 * heads * value_dim + 2 * groups * key_dim + heads]

    def fill(self, struct: Any, dtype: torch.dtype) -> None:
        heads, groups, key_dim, value_dim = self.sizes
        width = heads * value_dim
        channels = width + 2 * groups * key_dim
        weight, bias, *vectors = _tensors_of(self, "conv1d", "A_log", "dt_bias", "D")
        if any(x is None or x.shape != (heads,) for x in vectors):
            raise NotFusable("its parameters do not fit together")
        assert self.norm is not None
        norm_weight = self.norm.weight
        if norm_weight is None or norm_weight.shape != (width,):
            raise NotFusable("its norm has another width")
        struct.weight, struct.taps = _taps(weight, channels, dtype)
        struct.bias = _bias(bias, channels, dtype)
        struct.a_log, struct.dt_bias, struct.d = (address_of(x, dtype) for x in vectors)
        struct.norm_weight = address_of(norm_weight, dtype)
        struct.norm_width = group_width(self.norm.module)
        struct.eps = self.norm.eps
        struct.dt_min, struct.dt_max = getattr(self.module, "time_step_limit", (0.0, math.inf))


@struct_of("conv")
class ShortConvStruct(ctypes.Structure):
    """`ShortConv` of kernels/layer.cpp."""

    _fields_ = [("weight", _POINTER), ("bias", _POINTER), ("taps", _LONG)]


class ShortConv(Mixer):
    """A gated convolution, as LFM2 has it."""

    __slots__ = ()
    field, kind, num_states = "conv", ShortConvStruct, 1

    @property
    def widths(self) -> list[int]:
        return [3 * self.sizes[3]]

    def fill(self, struct: Any, dtype: torch.dtype) -> None:
        weight, bias = _tensors_of(self, "conv")
        struct.weight, struct.taps = _taps(weight, self.sizes[3], dtype)
        struct.bias = _bias(bias, self.sizes[3], dtype)


def _bias(bias: Any, channels: int, dtype: torch.dtype) -> int:
    """Return the address of the bias of a convolution, 0 without."""
    if bias is not None and bias.shape != (channels,):
        raise NotFusable("the bias of its convolution has another shape")
    return address_of(bias, dtype)


def _taps(weight: Any, channels: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return the address of the weight `[C, 1, K]` of a convolution, and K."""
    if weight is None or weight.ndim != 3 or weight.shape[:2] != (channels, 1):
        raise NotFusable("the weight of its convolution has another shape")
    return address_of(weight, dtype), weight.shape[2]


def recurs(module: nn.Module) -> bool:
    """Return whether a module has a convolution of its own, as recurrent ones do."""
    return any(isinstance(child, nn.Conv1d) for child in module._modules.values())


def mixer_of(module: Any) -> Mixer:
    """Return the parts of a recurrent module.

    Raises:
        NotFusable: it is of an unknown kind.
    """
    children, fields = module._modules, module.__dict__
    conv = children.get("conv")
    if children.keys() == {"conv", "in_proj", "out_proj"} and isinstance(conv, nn.Conv1d):
        return ShortConv(module, ["in_proj"], None, (1, 0, 0, conv.out_channels))
    if {"conv1d", "in_proj", "norm", "out_proj"} <= children.keys():
        gated = find_norm(children["norm"], Gate.BEFORE)
        sizes = _sizes(fields, "num_heads", "n_groups", "ssm_state_size", "head_dim")
        if gated is not None and sizes is not None:
            return Mamba2(module, ["in_proj"], gated, sizes)
    roles = next((names for names in _DELTA_INPUTS if names.keys() <= children.keys()), None)
    child = children.get("norm", children.get("o_norm"))
    norm = None if child is None else find_norm(child, Gate.AFTER)
    sizes = _sizes(fields, "num_v_heads", "num_k_heads", "head_k_dim", "head_v_dim")
    if roles is None or norm is None or sizes is None:
        raise NotFusable(f"the kernels don't have {type(module).__name__}")
    return DeltaRule(module, [*roles], norm, sizes)


def _sizes(fields: dict[str, Any], *names: str) -> tuple[int, int, int, int] | None:
    found = [size for name in names if isinstance(size := fields.get(name), int) and size > 0]
    if len(found) < len(names) or found[0] % found[1]:
        return None
    heads, key_heads, key_dim, value_dim = found
    return heads, key_heads, key_dim, value_dim
