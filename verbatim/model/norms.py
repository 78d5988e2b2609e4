"""RMS norms and LayerNorms, plain or gated, computed by the compiled kernels.

transformers has a norm class for nearly every model. They form a few families, which differ in where they
round. The family of a class is found by comparing its own forward on random rows with each family's formula
in torch. A class that matches none keeps its forward.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from verbatim import kernels
from verbatim.kernels.options import Activation, NormKind
from verbatim.model import elementwise
from verbatim.model.differential import copy_of, noise, trial

_EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps")
_WEIGHT_NAMES = ("weight", "scale", "gamma")
_DTYPES = (torch.float32, torch.bfloat16)
_WIDTH = 96  # width of the random rows for a norm without a weight


class Gate(enum.IntEnum):
    """The position of the gate in a gated norm."""

    NONE = 0
    AFTER = 1  # multiplies the output by SiLU of the gate
    BEFORE = 2  # multiplies the input by SiLU of the gate
    SIGMOID = 3  # as AFTER, with the sigmoid of the gate, and without rounding in between


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm of a known family.

    Attributes:
        gate: how the gate, the forward's second argument, is applied.
        weight_name: name of the weight parameter; None without a weight.
        eps_name: name of the attribute with eps; None: eps is 1e-5, as in OLMo's norm.
    """

    module: nn.Module
    kind: NormKind
    gate: Gate
    weight_name: str | None
    eps_name: str | None

    @property
    def is_complete(self) -> bool:
        """Return False if a tensor is not a parameter, but for example computed by hooks that prune."""
        own: Any = self.module._parameters
        has_bias = "bias" in own or getattr(self.module, "bias", None) is None
        return has_bias and (self.weight_name is None or self.weight_name in own)

    @property
    def weight(self) -> Tensor | None:
        """The current weight."""
        return None if self.weight_name is None else self.module._parameters[self.weight_name]

    @property
    def bias(self) -> Tensor | None:
        """The current bias."""
        return self.module._parameters.get("bias")

    @property
    def eps(self) -> float:
        """The number added to the mean square."""
        return 1e-5 if self.eps_name is None else float(self.module.__dict__[self.eps_name])


def find_norm(module: nn.Module, gate: Gate | None = Gate.NONE) -> Norm | None:
    """Return `module` as a norm of a known family with the given kind of gate (None: any), else None."""
    fields = module.__dict__
    own_forward = "forward" in fields and not hasattr(fields["forward"], "replaces")  # not a patch
    if "Norm" not in type(module).__name__ or own_forward or module._modules:
        return None
    if not _has_kernels(module):
        return None
    eps = next((n for n in _EPS_NAMES if type(fields.get(n)) in (float, int)), None)
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    weight = next((name for name in _WEIGHT_NAMES if name in parameters), None)
    if module._buffers or parameters.keys() - {weight, "bias"}:
        return None
    if any(p.ndim != 1 for p in parameters.values()) or ("bias" in parameters and weight is None):
        return None
    # Other attributes that a forward may read, such as a flag that disables the weight, or a factor.
    width = None if weight is None else len(parameters[weight])
    flags = tuple(
        sorted(
            (n, v)
            for n, v in fields.items()
            if n not in ("training", eps) and type(v) in (bool, str, int, float) and v != width
        )
    )
    # The forward is part of the key, as callers may replace it.
    case = type(module), type(module).forward, weight, "bias" in parameters, eps, flags
    if case not in _families:
        with trial():
            _families[case] = _family_of(module, weight, "bias" in parameters, eps)
    family = _families[case]
    if family is None or gate not in (None, family[1]):
        return None
    return Norm(module, *family, weight, eps)


def group_width(module: Any) -> int:
    """Return the number of elements that a gated norm normalizes together."""
    width: int = module.__dict__.get("group_size") or module.weight.shape[-1]
    return width


def _has_kernels(module: nn.Module) -> bool:
    """Return whether kernels exist for the module's device; a norm without a weight may be on any."""
    if kernels.library() is not None or torch.cuda.is_initialized():
        return True
    return any(kernels.uses_triton(p.device) for p in module._parameters.values() if p is not None)


def norm_forward(module: nn.Module) -> Callable[..., Any] | None:
    """Return a forward that uses the kernels for a norm of a known family; None for other modules."""
    norm = find_norm(module, None)
    if norm is None:
        return None
    original, kind, gate = type(module).forward, norm.kind, norm.gate

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not norm.is_complete:
            return type(module).forward(module, x, *args, **kwargs)
        weight, bias = norm.weight, norm.bias
        if kind is NormKind.WIDE and weight is not None and weight.dtype is torch.float32:
            if x.dtype is not torch.float32 and not args and not kwargs:  # weight kept in float32
                return forward(x.float()).to(x.dtype)
        fits = type(module).forward is original and all(
            p is None or (p.dtype is x.dtype and p.is_contiguous() and x.shape[-1:] == p.shape)
            for p in (weight, bias)
        )
        if fits and not kwargs and len(args) == (gate is not Gate.NONE):
            if elementwise.supports(x):
                if gate is Gate.NONE:
                    return elementwise.norm(x, weight, norm.eps, kind, bias)
                activation = Activation.SIGMOID if gate is Gate.SIGMOID else Activation.SILU
                factor = elementwise.activate(args[0].float(), activation)
                return _gated(elementwise.norm, norm, x, weight, factor)
            on_gpu = kind < NormKind.CENTERED and bias is None and kernels.uses_triton(x.device)
            if gate is Gate.NONE and on_gpu:
                from verbatim.kernels.triton import norm as triton_norm

                if triton_norm.supports(x, weight):
                    return triton_norm.rms_norm(x, weight, norm.eps, kind)[0]
        return type(module).forward(module, x, *args, **kwargs)

    return forward


def _gated(
    function: Callable[..., Tensor], norm: Norm, x: Tensor, weight: Tensor | None, factor: Tensor
) -> Tensor:
    """Compute a gated norm by `formula` or a kernel; `factor` is SiLU or the sigmoid of the gate."""
    if norm.gate is Gate.AFTER:
        return (function(x, weight, norm.eps, norm.kind) * factor).to(x.dtype)
    assert weight is not None
    if norm.gate is Gate.SIGMOID:
        return (function(x.float(), weight.float(), norm.eps, norm.kind) * factor).to(x.dtype)
    grouped = (x.float() * factor).unflatten(-1, (-1, group_width(norm.module)))
    return weight * function(grouped, None, norm.eps, NormKind.BARE).flatten(-2).to(x.dtype)


_Family = tuple[NormKind, Gate]
_families: dict[tuple[Any, ...], _Family | None] = {}


def _family_of(
    module: nn.Module, weight_name: str | None, has_bias: bool, eps_name: str | None
) -> _Family | None:
    """Return the family that matches a copy of `module` with random weights, or None."""
    shape: Any = module.__dict__.get("normalized_shape", (_WIDTH,))
    parameter = None if weight_name is None else module._parameters[weight_name]
    width = shape[-1] if parameter is None else len(parameter)
    rows = max(8, 4096 // max(1, width))
    forward: Callable[..., Tensor] = type(module).forward
    gated = "gate" in signature(forward).parameters

    def operands(dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        """Return the rows, the weight, the bias and the gate."""
        x = noise((rows, width), torch.float32)
        x *= torch.logspace(-3, 1, rows)[:, None]  # small rows depend on eps
        weight, bias = (noise((width,), dtype, seed) for seed in (1, 2))
        gate = noise((rows, width), dtype, 3)
        return x.to(dtype), weight if weight_name else None, bias if has_bias else None, gate

    def theirs(dtype: torch.dtype) -> Tensor:
        x, weight, bias, gate = operands(dtype)
        tensors: dict[str | None, Any] = {weight_name: weight, "bias": bias}
        twin = copy_of(module, lambda name, _: nn.Parameter(tensors[name], False))
        return forward(twin, x, gate) if gated else forward(twin, x)

    def ours(family: _Family, dtype: torch.dtype) -> Tensor:
        x, weight, bias, gate = operands(dtype)
        norm = Norm(module, *family, weight_name, eps_name)
        if not gated:
            return formula(x, weight, norm.eps, norm.kind, bias)
        activate = torch.sigmoid if norm.gate is Gate.SIGMOID else nn.functional.silu
        return _gated(formula, norm, x, weight, activate(gate.float()))

    kinds = [NormKind.BARE, NormKind.CENTERED] if weight_name is None else list(NormKind)[2:]
    families = [(kind, Gate.AFTER if gated else Gate.NONE) for kind in kinds]
    if gated and weight_name is not None:  # other combinations don't occur
        families += [(NormKind.ROUNDED, Gate.BEFORE), (NormKind.WIDE, Gate.SIGMOID)]

    def fits(family: _Family) -> bool:
        atol = 1e-7 if family[0] < NormKind.CENTERED else 1e-5
        return all(_close(ours(family, dtype), theirs(dtype), atol) for dtype in _DTYPES)

    try:
        matches = [family for family in families if fits(family)]
    except Exception:  # an unrelated module with "Norm" in its name
        return None
    # Families that round alike in float32 differ in bfloat16.
    return matches[0] if len(matches) == 1 else None


def _close(ours: Tensor, theirs: Any, atol: float) -> bool:
    """Return whether two results are equal up to a few roundings, and to `atol` around zero."""
    if not isinstance(theirs, Tensor) or theirs.dtype != ours.dtype or theirs.shape != ours.shape:
        return False
    if ours.dtype is torch.float32:
        return torch.allclose(theirs, ours, rtol=1e-5, atol=atol)
    # Another order of additions changes few roundings; another family changes a tenth of them.
    close = torch.allclose(theirs.float(), ours.float(), rtol=2.0**-7, atol=atol)
    return close and float((theirs != ours).float().mean()) < 0.01


_ROUNDED_FACTORS = (NormKind.ONE_PLUS_ROUNDED, NormKind.SCALED_FIRST, NormKind.CENTERED_ONE_PLUS)


def formula(
    x: Tensor, weight: Tensor | None, eps: float, kind: NormKind, bias: Tensor | None = None
) -> Tensor:
    """Compute the norm of a family over the last dimension of `x`, in torch."""
    if weight is not None and kind in _ROUNDED_FACTORS:
        weight = 1.0 + weight
    if weight is not None and kind is NormKind.SCALED_FIRST:
        x, weight = (x.float() * weight.float()).to(x.dtype), None
    wide = x.float()
    if kind >= NormKind.CENTERED:
        wide = wide - wide.mean(-1, keepdim=True)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None:
        if kind is NormKind.ROUNDED:
            normed = normed.to(x.dtype).float()
        normed = normed * (weight.float() + (1.0 if kind is NormKind.ONE_PLUS else 0.0))
    return (normed if bias is None else normed + bias.float()).to(x.dtype)
