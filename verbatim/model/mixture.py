"""Mixtures of experts in fused layers: router, experts, and a shared expert."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from verbatim.kernels.functions import struct_of
from verbatim.model.experts import ExpertsParts, ExpertsStruct, parts_of
from verbatim.model.products import Matrix
from verbatim.model.router import CORRECTIONS, RouterParts, RouterStruct, fill_form, router_parts
from verbatim.model.structs import NotFusable, matrix_at, matrix_of

_INT, _FLOAT = ctypes.c_int32, ctypes.c_float


@struct_of("mixture")
class MixtureStruct(ctypes.Structure):
    """`Mixture` of kernels/experts.h."""

    _fields_ = (
        ("router", RouterStruct),
        ("experts", ExpertsStruct),
        ("shared_gates", Matrix * 2),
        ("shared_down", Matrix),
        ("shared_gate", Matrix),
        ("num_shared", _INT),
        ("scale", _FLOAT),
    )


@dataclass(frozen=True, slots=True)
class MixtureParts:
    """The parts of a mixture of experts.

    Attributes:
        router: with the correction that its block passes to it.
        shared_gates, shared_down: of the shared expert; empty and None without one.
        shared_gate: a linear to one number; its sigmoid scales the shared expert. None: no scale.
        scale: factor of the chosen experts' sum.
    """

    router: RouterParts
    experts: ExpertsParts
    shared_gates: list[nn.Module]
    shared_down: nn.Module | None
    shared_gate: nn.Module | None
    scale: float

    @property
    def numbers(self) -> int:
        """Number of expert weights per row."""
        stacks = (*self.experts.inputs, self.experts.down)
        return self.router.form.top_k * sum(stack.cols * stack.depth for stack in stacks)

    def fill(self, struct: MixtureStruct, dtype: torch.dtype) -> None:
        """Fill in the struct for the kernels; raise NotFusable if they can't run it."""
        router, form = struct.router, self.router.form
        fill_form(router, form)
        weight = self.router.weight[0][self.router.weight[1]]
        bias = None if self.router.bias is None else self.router.bias[0][self.router.bias[1]]
        count, depth = weight.shape
        kind = weight.dtype if form.wide and dtype is torch.bfloat16 else dtype
        router.weight = matrix_at(weight, bias, kind, count, depth, None)
        router.correction = None
        if self.router.correction is not None:
            tensor = self.router.correction[0][self.router.correction[1]]
            if tensor.numel() != count or not tensor.is_contiguous() or not tensor.is_cpu:
                raise NotFusable("its router's correction is not one number for each expert")
            if tensor.dtype not in (torch.float32, dtype):
                raise NotFusable(f"its router's correction is {tensor.dtype}")
            router.correction = tensor.data_ptr()
            router.correction_f32 = tensor.dtype is torch.float32
        struct.experts = self.experts.struct(dtype)
        struct.scale, struct.num_shared = self.scale, len(self.shared_gates)
        struct.shared_gate = Matrix()
        if self.shared_down is None:
            return
        for i, module in enumerate(self.shared_gates):
            struct.shared_gates[i] = matrix_of(module, dtype)
        struct.shared_down = down = matrix_of(self.shared_down, dtype)
        gates = struct.shared_gates[: len(self.shared_gates)]
        hidden = self.experts.hidden
        fits = sum(m.cols for m in gates) == 2 * down.depth and down.cols == hidden
        if not fits or any(m.depth != hidden for m in gates):
            raise NotFusable("the matrices of its shared expert do not fit together")
        if self.shared_gate is not None:
            struct.shared_gate = gate = matrix_of(self.shared_gate, dtype)
            if (gate.cols, gate.depth) != (1, hidden):
                raise NotFusable("the gate of its shared expert is not one number")


def mixtures_of(block: nn.Module) -> Iterator[MixtureParts]:
    """Yield possible structures of a block, the likeliest first, to be verified by a trial."""
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
        held = [(t, n) for t in (block._parameters, block._buffers) for n in CORRECTIONS if n in t]
        if len(held) != 1:
            return
        router = replace(router, correction=held[0])
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
