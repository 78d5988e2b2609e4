"""Parts of fused layers, and structs for the kernels: mixers of recurrent layers (delta rule, Mamba-2,
convolution), and mixtures of experts (router, experts and a shared expert).

Parts are found by name; a trial verifies that the kernels compute the same as the layer (`layer_trial.py`).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from verbatim.kernels.functions import struct_layout
from verbatim.model.experts import ExpertsParts, parts_of
from verbatim.model.fingerprint import Place
from verbatim.model.norms import Gate, Norm, find_norm, group_width
from verbatim.model.products import Matrix
from verbatim.model.router import CORRECTIONS, RouterParts, fill_form, router_parts
from verbatim.model.structs import (
    NotFusable,
    Slice,
    address_and_f32,
    address_of,
    matrix_at,
    matrix_of,
    norm_of,
)


@dataclass(frozen=True, slots=True)
class Mixer:
    """The recurrent part of a layer, in place of attention.

    Attributes:
        kind: class of the struct for the kernels.
        inputs: by name of an input projection, the roles in its output, separated by spaces.
        latent: names of the up-projections, if the last of `inputs` are down-projections.
        widths: output widths of `inputs`; for a down-projection, of its up-projection.
        norm: the norm inside the mixer, or None.
        sizes: number of heads, number of key heads, key width per head, value width per head.
    """

    kind: type[MixerStruct]
    module: nn.Module
    inputs: Mapping[str, str]
    latent: list[str]
    widths: list[int]
    norm: Norm | None
    sizes: tuple[int, int, int, int]

    def tensors(self, conv: str, *names: str) -> list[Any]:
        """Return the convolution's weight and bias, then parameters of the module; None if missing."""
        child = self.module._modules[conv]
        assert child is not None
        weights = [child._parameters["weight"], child._parameters.get("bias")]
        owner = self.module._modules.get("forget_gate") or self.module
        return [*weights, *(owner._parameters.get(name) for name in names)]


class MixerStruct(ctypes.Structure):
    """A mixer in the kernels.

    Attributes:
        field: name of the field of `LayerStruct` that holds the struct's address.
        num_states: number of recurrent operations, each of which has a state.
    """

    field: ClassVar[str]
    num_states: ClassVar[int] = 2

    def fill(self, mixer: Mixer, dtype: torch.dtype) -> None:
        """Fill in the struct; raise NotFusable if the kernels can't read a weight in place."""
        raise NotImplementedError


_ROLES = ("q", "k", "v", "gate", "beta", "decay")
_QKV = {"q_proj": "q", "k_proj": "k", "v_proj": "v"}
# Input projections of known delta rules, with the roles in their outputs.
_DELTA_INPUTS: tuple[dict[str, str], ...] = (
    {"in_proj_qkv": "q k v", "in_proj_z": "gate", "in_proj_b": "beta", "in_proj_a": "decay"},
    {"in_proj_qkvz": "q k v gate", "in_proj_ba": "beta decay"},
    {**_QKV, "g_proj": "gate", "b_proj": "beta", "a_proj": "decay"},
    {**_QKV, "b_proj": "beta", "forget_gate.f_a_proj": "decay", "g_a_proj": "gate"},
    {**_QKV, "b_proj": "beta", "forget_gate.f_proj": "decay", "g_proj": "gate"},
)
# Up-projections of low-rank projections, by down-projection.
_UP_PROJECTIONS = {"forget_gate.f_a_proj": "forget_gate.f_b_proj", "g_a_proj": "g_b_proj"}
_BY_KEY_HEAD = ("in_proj_qkvz", "in_proj_ba")  # ordered by key head, then by role


def _delta_widths(module: nn.Module, sizes: tuple[int, int, int, int]) -> dict[str, int]:
    """Return the number of columns per key head in a delta rule's projections, by role."""
    heads, key_heads, key_dim, value_dim = sizes
    group = heads // key_heads
    value, decays = group * value_dim, group * (key_dim if "forget_gate" in module._modules else 1)
    return dict(zip(_ROLES, (key_dim, key_dim, value, value, group, decays), strict=True))


_DELTA = f"""
    Slice {" ".join(_ROLES)}
    P weight a_log dt_bias
    NormStruct norm
    L taps decays
    F eps q_scale k_scale beta_scale floor
    I rounds_decays weight_f32 a_log_f32 dt_bias_f32 sigmoid
"""


@struct_layout(_DELTA, size="delta")
class DeltaRule(MixerStruct):
    """`DeltaRule` of kernels/layer.cpp: a gated delta rule, with a norm of each head's output.

    In Qwen3-Next, Qwen3.5 and OLMo Hybrid there is one decay per head; in Kimi Linear and Bailing Hybrid
    (Kimi delta attention) one for each row of the state.
    """

    field = "delta"

    def fill(self, mixer: Mixer, dtype: torch.dtype) -> None:
        heads, key_heads, key_dim, value_dim = mixer.sizes
        of, at = _delta_widths(mixer.module, mixer.sizes), 0
        inputs, firsts = [*mixer.inputs.items()], len(mixer.inputs) - len(mixer.latent)
        for name, roles_of in inputs[firsts:] + inputs[:firsts]:
            roles = roles_of.split()
            group_width = sum(of[role] for role in roles)
            for role in roles:
                by_head = name in _BY_KEY_HEAD
                setattr(self, role, Slice(at, group_width if by_head else of[role]))
                at += of[role] * (1 if by_head else key_heads)
            if name in _BY_KEY_HEAD:
                at += group_width * (key_heads - 1)
        weight, bias, a_log, dt_bias = mixer.tensors("conv1d", "A_log", "dt_bias")
        channels = 2 * key_heads * key_dim + heads * value_dim
        if bias is not None or a_log is None or dt_bias is None:
            raise NotFusable("its convolution has a bias, or parameters are missing")
        self.decays = of["decay"] * key_heads // heads
        if a_log.numel() != heads or dt_bias.shape != (heads * self.decays,):
            raise NotFusable("its parameters have inconsistent shapes")
        self.a_log, self.a_log_f32 = address_and_f32(a_log, dtype)
        self.dt_bias, self.dt_bias_f32 = address_and_f32(dt_bias, dtype)
        self.taps = _taps(weight, channels)
        self.weight, self.weight_f32 = address_and_f32(weight, dtype)
        self.norm = norm_of(mixer.norm, dtype, value_dim, None)
        self.sigmoid = mixer.norm is not None and mixer.norm.gate is Gate.SIGMOID
        gate: Any = mixer.module._modules.get("forget_gate")
        self.floor = gate.lower_bound if getattr(gate, "safe_gate", False) else 0.0
        self.rounds_decays = "forget_gate.f_proj" in mixer.inputs  # as Bailing Hybrid does
        # As in `recurrent_ops.py`: an RMS norm, scaled to unit length.
        self.eps = 1e-6 / key_dim
        self.q_scale = key_dim**-0.5 / math.sqrt(key_dim)
        self.k_scale = 1.0 / math.sqrt(key_dim)
        self.beta_scale = 2.0 if getattr(mixer.module, "allow_neg_eigval", False) else 1.0


_MAMBA2 = """
    P weight bias a_log dt_bias d norm_weight
    L norm_width taps
    F eps dt_min dt_max
"""


@struct_layout(_MAMBA2, size="mamba2")
class Mamba2(MixerStruct):
    """`Mamba2` of kernels/layer.cpp, with a norm after the gate, as in Bamba, Granite 4 and Nemotron-H."""

    field = "mamba2"

    def fill(self, mixer: Mixer, dtype: torch.dtype) -> None:
        heads, groups, key_dim, value_dim = mixer.sizes
        width = heads * value_dim
        channels = width + 2 * groups * key_dim
        weight, bias, *vectors = mixer.tensors("conv1d", "A_log", "dt_bias", "D")
        if any(x is None or x.shape != (heads,) for x in vectors):
            raise NotFusable("its parameters have inconsistent shapes")
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


@struct_layout("P weight bias\nL taps", size="conv")
class ShortConv(MixerStruct):
    """`ShortConv` of kernels/layer.cpp, the gated convolution of LFM2."""

    field, num_states = "conv", 1

    def fill(self, mixer: Mixer, dtype: torch.dtype) -> None:
        weight, bias = mixer.tensors("conv")
        self.weight, self.taps = address_of(weight, dtype), _taps(weight, mixer.sizes[3])
        self.bias = _bias(bias, mixer.sizes[3], dtype)


def _bias(bias: Any, channels: int, dtype: torch.dtype) -> int:
    if bias is not None and bias.shape != (channels,):
        raise NotFusable("the bias of its convolution has another shape")
    return address_of(bias, dtype)


def _taps(weight: Any, channels: int) -> int:
    """Return the width K of a convolution's weight `[C, 1, K]`."""
    if weight is None or weight.ndim != 3 or weight.shape[:2] != (channels, 1):
        raise NotFusable("the weight of its convolution has another shape")
    taps: int = weight.shape[2]
    return taps


def is_recurrent(module: nn.Module) -> bool:
    """Return whether a module is recurrent, that is, has a convolution as a direct child."""
    return any(isinstance(child, nn.Conv1d) for child in module._modules.values())


_ONE_INPUT = {"in_proj": ""}


def mixer_of(module: Any) -> Mixer | None:
    """Return the parts of a recurrent module, None if it attends; raise NotFusable if its kind is unknown."""
    if not is_recurrent(module):
        return None
    children, fields = module._modules, module.__dict__
    conv = children.get("conv")
    if children.keys() == {"conv", "in_proj", "out_proj"} and isinstance(conv, nn.Conv1d):
        width = conv.out_channels
        return Mixer(ShortConv, module, _ONE_INPUT, [], [3 * width], None, (1, 0, 0, width))
    if {"conv1d", "in_proj", "norm", "out_proj"} <= children.keys():
        gated = find_norm(children["norm"], Gate.BEFORE)
        sizes = _sizes(fields, "num_heads", "n_groups", "ssm_state_size", "head_dim")
        if gated is not None and sizes is not None:
            heads, groups, key_dim, value_dim = sizes
            width = 2 * heads * value_dim + 2 * groups * key_dim + heads
            return Mixer(Mamba2, module, _ONE_INPUT, [], [width], gated, sizes)
    names = {name for name, _ in module.named_modules()}
    roles = next((inputs for inputs in _DELTA_INPUTS if inputs.keys() <= names), None)
    child = children.get("norm", children.get("o_norm"))
    norm = None if child is None else find_norm(child, None)
    size_names = ("num_v_heads", "num_k_heads", "head_k_dim", "head_v_dim")
    if "forget_gate" in children:
        size_names = ("num_heads", "num_heads", "head_dim", "head_dim")
    sizes = _sizes(fields, *size_names)
    after = norm is not None and norm.gate in (Gate.AFTER, Gate.SIGMOID)
    if roles is None or not after or sizes is None:
        raise NotFusable(f"the kernels don't support {type(module).__name__}")
    widths_of = _delta_widths(module, sizes)
    widths = [sizes[1] * sum(widths_of[role] for role in text.split()) for text in roles.values()]
    latent = [_UP_PROJECTIONS[name] for name in roles if name in _UP_PROJECTIONS]
    return Mixer(DeltaRule, module, roles, latent, widths, norm, sizes)


def _sizes(fields: dict[str, Any], *names: str) -> tuple[int, int, int, int] | None:
    values = [size for name in names if isinstance(size := fields.get(name), int) and size > 0]
    if len(values) < len(names) or values[0] % values[1]:
        return None
    heads, key_heads, key_dim, value_dim = values
    return heads, key_heads, key_dim, value_dim


# ---- mixtures of experts

_MIXTURE = """
    RouterStruct router
    ExpertsStruct experts
    Matrix shared_gates[2] shared_down shared_gate
    I num_shared
    F scale
"""


@struct_layout(_MIXTURE, size="mixture")
class MixtureStruct(ctypes.Structure):
    """`Mixture` of kernels/experts.h."""


@dataclass(frozen=True, slots=True)
class MixtureParts:
    """The parts of an MoE block.

    Attributes:
        router: the router, including the correction that the block passes to it.
        shared_gates, shared_down: projections of the shared expert; empty and None without one.
        shared_gate: linear layer with one output, the sigmoid of which scales the shared expert; or None.
        scale: factor of the sum of the chosen experts.
    """

    router: RouterParts
    experts: ExpertsParts
    shared_gates: list[nn.Module]
    shared_down: nn.Module | None
    shared_gate: nn.Module | None
    scale: float

    @property
    def numbers(self) -> int:
        """Number of expert weights that a row is multiplied with."""
        stacks = (*self.experts.inputs, self.experts.down)
        return self.router.form.top_k * sum(stack.cols * stack.depth for stack in stacks)

    def fill(self, struct: MixtureStruct, dtype: torch.dtype) -> None:
        """Fill in the struct for the kernels. Raises NotFusable if they can't run it."""
        router, form = struct.router, self.router.form
        fill_form(router, form)
        weight, bias = self.router.weight.tensor, self.router.bias.tensor
        count, depth = weight.shape
        kind = weight.dtype if form.wide and dtype is torch.bfloat16 else dtype
        router.weight = matrix_at(weight, bias, kind, count, depth, None)
        router.correction = None
        if self.router.correction is not None:
            tensor = self.router.correction.tensor
            if tensor.numel() != count or not tensor.is_contiguous() or not tensor.is_cpu:
                raise NotFusable("its router's correction does not have one value per expert")
            if tensor.dtype not in (torch.float32, dtype):
                raise NotFusable(f"its router's correction is {tensor.dtype}")
            router.correction = tensor.data_ptr()
            router.correction_f32 = tensor.dtype is torch.float32
        struct.experts = self.experts.struct(dtype)
        struct.scale, struct.num_shared = self.scale, len(self.shared_gates)
        struct.shared_gate = Matrix()
        if self.shared_down is None:
            return
        hidden, gates = self.experts.hidden, [matrix_of(m, dtype) for m in self.shared_gates]
        struct.shared_gates[: len(gates)] = gates
        struct.shared_down = down = matrix_of(self.shared_down, dtype)
        fits = sum(m.cols for m in gates) == 2 * down.depth and down.cols == hidden
        if not fits or any(m.depth != hidden for m in gates):
            raise NotFusable("the matrices of its shared expert have inconsistent shapes")
        if self.shared_gate is not None:
            struct.shared_gate = gate = matrix_of(self.shared_gate, dtype)
            if (gate.cols, gate.depth) != (1, hidden):
                raise NotFusable("the gate of its shared expert is not a scalar")


def mixtures_of(block: nn.Module) -> Iterator[MixtureParts]:
    """Yield the possible structures of an MoE block, the most likely first; a trial verifies them."""
    children = [m for m in block._modules.values() if m is not None]
    routers = [parts for m in children if (parts := router_parts(m)) is not None]
    others = [m for m in children if not any(m is r.module for r in routers)]
    experts = [m for m in others if hasattr(m, "num_experts") or "Experts" in type(m).__name__]
    if len(routers) != 1 or len(experts) != 1:
        return
    (router,) = routers
    others = [m for m in others if m is not experts[0]]
    gate = next((m for m in others if isinstance(m, nn.Linear)), None)
    shared = [m for m in others if m is not gate]
    if len(shared) > 1 or (gate is not None and not shared):
        return
    if router.takes_correction:
        corrections = [
            Place(t, n) for t in (block._parameters, block._buffers) for n in CORRECTIONS if n in t
        ]
        if len(corrections) != 1:
            return
        router = replace(router, correction=corrections[0])
    if hasattr(experts[0], "expert_share"):
        return
    try:
        held_experts = parts_of(experts[0])
    except NotFusable:
        return
    gates, down = list[nn.Module](), None
    if shared:
        within = shared[0]._modules
        names = ["gate_up_proj"] if "gate_up_proj" in within else ["gate_proj", "up_proj"]
        gates = [part for name in names if (part := within.get(name)) is not None]
        down = within.get("down_proj")
        if len(gates) != len(names) or down is None:
            return
    scale = block.__dict__.get("routed_scaling_factor")
    scales = {1.0, float(scale)} if isinstance(scale, int | float) else {1.0}
    for factor in sorted(scales):
        yield MixtureParts(router, held_experts, gates, down, gate, factor)
