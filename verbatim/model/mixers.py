"""Mixers of recurrent layers (delta rule, Mamba-2, convolution): their parts, and structs for the kernels.

Parts are found by their names. Whether they compute what the kernels do is tried (`layer_trial.py`).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from verbatim.kernels.functions import struct_of
from verbatim.model.elementwise import NormStruct
from verbatim.model.norms import Gate, Norm, find_norm, group_width
from verbatim.model.structs import NotFusable, Slice, address_and_f32, address_of, norm_of

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


@dataclass(frozen=True, slots=True)
class Mixer:
    """The recurrent part of a layer, in place of attention.

    Attributes:
        kind: the struct's class.
        inputs: names of the linears of the layer's input, each with what its product has.
        latent: names of the linears of the products of the last of these, which make what these have.
        widths: columns of the products of `inputs`, or of `latent` in place of the last ones.
        norm: beside those of the layer; None without.
        sizes: heads, key heads, and their widths; heads times value width is the width of the output.
    """

    kind: type[MixerStruct]
    module: nn.Module
    inputs: Mapping[str, str]
    latent: list[str]
    widths: list[int]
    norm: Norm | None
    sizes: tuple[int, int, int, int]

    def tensors(self, conv: str, *names: str) -> list[Any]:
        """Return the convolution's weight and bias, and parameters of the module; None for a missing one."""
        child = self.module._modules[conv]
        assert child is not None
        found = [child._parameters["weight"], child._parameters.get("bias")]
        owner = self.module._modules.get("forget_gate") or self.module
        return [*found, *(owner._parameters.get(name) for name in names)]


class MixerStruct(ctypes.Structure):
    """A mixer in the kernels.

    Attributes:
        field: of `LayerStruct`, for the address of the struct.
        num_states: recurrent operations, each of which keeps a state.
    """

    field: ClassVar[str]
    num_states: ClassVar[int] = 2

    def fill(self, mixer: Mixer, dtype: torch.dtype) -> None:
        """Fill in a mixer of this kind.

        Raises:
            NotFusable: its weights are of a kind that the kernels don't read where they are.
        """
        raise NotImplementedError


_ROLES = ("q", "k", "v", "gate", "beta", "decay")
_QKV = {"q_proj": "q", "k_proj": "k", "v_proj": "v"}
# The linears of the input, each with what its product has.
_DELTA_INPUTS: tuple[dict[str, str], ...] = (
    {"in_proj_qkv": "q k v", "in_proj_z": "gate", "in_proj_b": "beta", "in_proj_a": "decay"},
    {"in_proj_qkvz": "q k v gate", "in_proj_ba": "beta decay"},
    {**_QKV, "g_proj": "gate", "b_proj": "beta", "a_proj": "decay"},
    {**_QKV, "b_proj": "beta", "forget_gate.f_a_proj": "decay", "g_a_proj": "gate"},
    {**_QKV, "b_proj": "beta", "forget_gate.f_proj": "decay", "g_proj": "gate"},
)
# The second linears of low-rank products, by the first ones.
_SECOND = {"forget_gate.f_a_proj": "forget_gate.f_b_proj", "g_a_proj": "g_b_proj"}
_BY_KEY_HEAD = ("in_proj_qkvz", "in_proj_ba")  # all roles of one key head, then those of the next


def _delta_widths(module: nn.Module, sizes: tuple[int, int, int, int]) -> dict[str, int]:
    """Return the columns of each key head in the products of a delta rule, by role."""
    heads, key_heads, key_dim, value_dim = sizes
    group = heads // key_heads
    value, decays = group * value_dim, group * (key_dim if "forget_gate" in module._modules else 1)
    return dict(zip(_ROLES, (key_dim, key_dim, value, value, group, decays), strict=True))


@struct_of("delta")
class DeltaRule(MixerStruct):
    """A gated delta rule, as Qwen3-Next, Qwen3.5 and OLMo Hybrid have it, with a norm of a head's output; or
    Kimi delta attention, as Kimi Linear and Bailing Hybrid have it, with a decay for each row of the state.

    `DeltaRule` of kernels/layer.cpp.
    """

    field = "delta"
    _fields_ = [
        *((role, Slice) for role in _ROLES),
        *((name, _POINTER) for name in ("weight", "a_log", "dt_bias")),
        ("norm", NormStruct),
        *((name, _LONG) for name in ("taps", "decays")),
        *((name, _FLOAT) for name in ("eps", "q_scale", "k_scale", "beta_scale", "floor")),
        *(
            (name, _INT)
            for name in ("rounds_decays", "weight_f32", "a_log_f32", "dt_bias_f32", "sigmoid")
        ),
    ]

    def fill(self, mixer: Mixer, dtype: torch.dtype) -> None:
        heads, key_heads, key_dim, value_dim = mixer.sizes
        of, at = _delta_widths(mixer.module, mixer.sizes), 0
        inputs, firsts = [*mixer.inputs.items()], len(mixer.inputs) - len(mixer.latent)
        for name, given in inputs[firsts:] + inputs[:firsts]:
            roles = given.split()
            together = sum(of[role] for role in roles)
            for role in roles:
                by_head = name in _BY_KEY_HEAD
                setattr(self, role, Slice(at, together if by_head else of[role]))
                at += of[role] * (1 if by_head else key_heads)
            if name in _BY_KEY_HEAD:
                at += together * (key_heads - 1)
        weight, bias, a_log, dt_bias = mixer.tensors("conv1d", "A_log", "dt_bias")
        channels = 2 * key_heads * key_dim + heads * value_dim
        if bias is not None or a_log is None or dt_bias is None:
            raise NotFusable("its convolution has a bias, or parameters are missing")
        self.decays = of["decay"] * key_heads // heads
        if a_log.numel() != heads or dt_bias.shape != (heads * self.decays,):
            raise NotFusable("its parameters do not fit together")
        self.a_log, self.a_log_f32 = address_and_f32(a_log, dtype)
        self.dt_bias, self.dt_bias_f32 = address_and_f32(dt_bias, dtype)
        self.taps = _taps(weight, channels)
        self.weight, self.weight_f32 = address_and_f32(weight, dtype)
        self.norm = norm_of(mixer.norm, dtype, value_dim, None)
        self.sigmoid = mixer.norm is not None and mixer.norm.gate is Gate.SIGMOID
        gate: Any = mixer.module._modules.get("forget_gate")
        self.floor = gate.lower_bound if getattr(gate, "safe_gate", False) else 0.0
        self.rounds_decays = "forget_gate.f_proj" in mixer.inputs  # as Bailing Hybrid does
        # As in `recurrent_ops.py`: vectors of length 1, by a norm of their mean square.
        self.eps = 1e-6 / key_dim
        self.q_scale = key_dim**-0.5 / math.sqrt(key_dim)
        self.k_scale = 1.0 / math.sqrt(key_dim)
        self.beta_scale = 2.0 if getattr(mixer.module, "allow_neg_eigval", False) else 1.0


@struct_of("mamba2")
class Mamba2(MixerStruct):
    """Mamba-2 with a norm behind its gate, as Bamba, Granite 4 and Nemotron-H have it.

    `Mamba2` of kernels/layer.cpp.
    """

    field = "mamba2"
    _fields_ = [
        *((name, _POINTER) for name in ("weight", "bias", "a_log", "dt_bias", "d", "norm_weight")),
        *((name, _LONG) for name in ("norm_width", "taps")),
        *((name, _FLOAT) for name in ("eps", "dt_min", "dt_max")),
    ]

    def fill(self, mixer: Mixer, dtype: torch.dtype) -> None:
        heads, groups, key_dim, value_dim = mixer.sizes
        width = heads * value_dim
        channels = width + 2 * groups * key_dim
        weight, bias, *vectors = mixer.tensors("conv1d", "A_log", "dt_bias", "D")
        if any(x is None or x.shape != (heads,) for x in vectors):
            raise NotFusable("its parameters do not fit together")
        assert mixer.norm is not None
        norm_weight = mixer.norm.weight
        if norm_weight is None or norm_weight.shape != (width,):
            raise NotFusable("its norm has another width")
        self.weight, self.taps = address_of(weight, dtype), _taps(weight, channels)
        self.bias = _bias(bias, channels, dtype)
        self.a_log, self.dt_bias, self.d = (address_of(x, dtype) for x in vectors)
        self.norm_weight = address_of(norm_weight, dtype)
        self.norm_width = group_width(mixer.norm.module)
        self.eps = mixer.norm.eps
        limits: tuple[float, float] = getattr(mixer.module, "time_step_limit", (0.0, math.inf))
        self.dt_min, self.dt_max = limits


@struct_of("conv")
class ShortConv(MixerStruct):
    """A gated convolution, as LFM2 has it; `ShortConv` of kernels/layer.cpp."""

    field, num_states = "conv", 1
    _fields_ = [("weight", _POINTER), ("bias", _POINTER), ("taps", _LONG)]

    def fill(self, mixer: Mixer, dtype: torch.dtype) -> None:
        weight, bias = mixer.tensors("conv")
        self.weight, self.taps = address_of(weight, dtype), _taps(weight, mixer.sizes[3])
        self.bias = _bias(bias, mixer.sizes[3], dtype)


def _bias(bias: Any, channels: int, dtype: torch.dtype) -> int:
    """Return the address of the bias of a convolution, 0 without."""
    if bias is not None and bias.shape != (channels,):
        raise NotFusable("the bias of its convolution has another shape")
    return address_of(bias, dtype)


def _taps(weight: Any, channels: int) -> int:
    """Return K of the weight `[C, 1, K]` of a convolution."""
    if weight is None or weight.ndim != 3 or weight.shape[:2] != (channels, 1):
        raise NotFusable("the weight of its convolution has another shape")
    taps: int = weight.shape[2]
    return taps


def recurs(module: nn.Module) -> bool:
    """Return whether a module has a convolution of its own, as recurrent ones do."""
    return any(isinstance(child, nn.Conv1d) for child in module._modules.values())


_IN = {"in_proj": ""}


def mixer_of(module: Any) -> Mixer:
    """Return the parts of a recurrent module.

    Raises:
        NotFusable: it is of an unknown kind.
    """
    children, fields = module._modules, module.__dict__
    conv = children.get("conv")
    if children.keys() == {"conv", "in_proj", "out_proj"} and isinstance(conv, nn.Conv1d):
        width = conv.out_channels
        return Mixer(ShortConv, module, _IN, [], [3 * width], None, (1, 0, 0, width))
    if {"conv1d", "in_proj", "norm", "out_proj"} <= children.keys():
        gated = find_norm(children["norm"], Gate.BEFORE)
        sizes = _sizes(fields, "num_heads", "n_groups", "ssm_state_size", "head_dim")
        if gated is not None and sizes is not None:
            heads, groups, key_dim, value_dim = sizes
            width = 2 * heads * value_dim + 2 * groups * key_dim + heads
            return Mixer(Mamba2, module, _IN, [], [width], gated, sizes)
    names = {name for name, _ in module.named_modules()}
    roles = next((inputs for inputs in _DELTA_INPUTS if inputs.keys() <= names), None)
    child = children.get("norm", children.get("o_norm"))
    norm = None if child is None else find_norm(child, None)
    of_sizes = ("num_v_heads", "num_k_heads", "head_k_dim", "head_v_dim")
    if "forget_gate" in children:
        of_sizes = ("num_heads", "num_heads", "head_dim", "head_dim")
    sizes = _sizes(fields, *of_sizes)
    after = norm is not None and norm.gate in (Gate.AFTER, Gate.SIGMOID)
    if roles is None or not after or sizes is None:
        raise NotFusable(f"the kernels don't have {type(module).__name__}")
    of = _delta_widths(module, sizes)
    widths = [sizes[1] * sum(of[role] for role in given.split()) for given in roles.values()]
    latent = [_SECOND[name] for name in roles if name in _SECOND]
    return Mixer(DeltaRule, module, roles, latent, widths, norm, sizes)


def _sizes(fields: dict[str, Any], *names: str) -> tuple[int, int, int, int] | None:
    found = [size for name in names if isinstance(size := fields.get(name), int) and size > 0]
    if len(found) < len(names) or found[0] % found[1]:
        return None
    heads, key_heads, key_dim, value_dim = found
    return heads, key_heads, key_dim, value_dim
