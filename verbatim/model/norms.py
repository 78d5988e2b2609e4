"""RMS norms and LayerNorms by the compiled kernels, some of them with a gate.

transformers has a class of its own for nearly every model, of a few families that differ in where they
round. Which one a class belongs to is tried and not read: its own forward on random rows against each
family's formula in torch. A class that is of none keeps its forward.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from verbatim import kernels
from verbatim.kernels.options import Activation, NormKind
from verbatim.model import elementwise
from verbatim.model.differential import differential_check

_EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps")
_WEIGHT_NAMES = ("weight", "scale", "gamma")
_TRIED = (torch.float32, torch.bfloat16)
_WIDTH = 96  # of a trial, for a norm without a weight


class Gate(enum.IntEnum):
    """The use of the gate in a norm."""

    NONE = 0
    AFTER = 1  # it multiplies its output with the gate's SiLU
    BEFORE = 2  # it multiplies its input with the gate's SiLU
    SIGMOID = 3  # as AFTER, with the gate's sigmoid, and rounds nothing in between


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm of a known family.

    Attributes:
        gate: what it does with a gate, which it is given beside its input.
        weight_name: of its parameter; None without one.
        eps_name: of an attribute; None: OLMo's has none, and is 1e-5.
    """

    module: nn.Module
    kind: NormKind
    gate: Gate
    weight_name: str | None
    eps_name: str | None

    @property
    def weight(self) -> Tensor | None:
        """Its weight at the moment."""
        return None if self.weight_name is None else self.module._parameters[self.weight_name]

    @property
    def bias(self) -> Tensor | None:
        """Its bias at the moment."""
        return self.module._parameters.get("bias")

    @property
    def eps(self) -> float:
        """The number that is added to the mean square."""
        return 1e-5 if self.eps_name is None else float(self.module.__dict__[self.eps_name])


def find_norm(module: nn.Module, gate: Gate | None = Gate.NONE) -> Norm | None:
    """Return a norm of a known family; None for other modules.

    Args:
        gate: what it does with a gate; None: anything.
    """
    fields = module.__dict__
    if "Norm" not in type(module).__name__ or "forward" in fields or module._modules:
        return None
    if not _has_kernels(module):
        return None
    eps = next((n for n in _EPS_NAMES if type(fields.get(n)) in (float, int)), None)
    held = {name: p for name, p in module._parameters.items() if p is not None}
    weight = next((name for name in _WEIGHT_NAMES if name in held), None)
    if module._buffers or held.keys() - {weight, "bias"}:
        return None
    if any(p.ndim != 1 for p in held.values()) or ("bias" in held and weight is None):
        return None
    # What else a class may look at: a flag that turns its weight off, a number of groups, a factor.
    width = None if weight is None else len(held[weight])
    flags = tuple(
        sorted(
            (n, v)
            for n, v in fields.items()
            if n not in ("training", eps) and type(v) in (bool, str, int, float) and v != width
        )
    )
    # A caller may put another forward into the class.
    case = type(module), type(module).forward, weight, "bias" in held, eps, flags
    if case not in _families:
        # A mode that watches torch functions must not see the trial.
        with torch._C.DisableTorchFunction(), torch.no_grad(), torch.inference_mode(False):
            _families[case] = _tried(module, weight, "bias" in held, eps)
    family = _families[case]
    if family is None or gate not in (None, family[1]):
        return None
    return Norm(module, *family, weight, eps)


def group_width(module: Any) -> int:
    """Return how many elements a gated norm norms together."""
    width: int = module.__dict__.get("group_size") or module.weight.shape[-1]
    return width


def _has_kernels(module: nn.Module) -> bool:
    """Return whether kernels exist for its device; a norm without a weight may be on any."""
    if kernels.library() is not None or torch.cuda.is_initialized():
        return True
    return any(
        kernels.triton_serves(p.device) for p in module._parameters.values() if p is not None
    )


def norm_forward(module: nn.Module) -> Callable[..., Any] | None:
    """Return a forward by the kernels for a norm of a known family, else None."""
    norm = find_norm(module, None)
    if norm is None:
        return None
    original, kind, gate = type(module).forward, norm.kind, norm.gate

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        weight, bias = norm.weight, norm.bias
        if kind is NormKind.WIDE and weight is not None and weight.dtype is torch.float32:
            if x.dtype is not torch.float32 and not args and not kwargs:  # it is kept in float32
                return forward(x.float()).to(x.dtype)
        fits = type(module).forward is original and all(
            p is None or (p.dtype is x.dtype and p.is_contiguous() and x.shape[-1:] == p.shape)
            for p in (weight, bias)
        )
        if fits and not kwargs and len(args) == (gate is not Gate.NONE):
            if elementwise.served(x):
                if gate is Gate.NONE:
                    return elementwise.norm(x, weight, norm.eps, kind, bias)
                activation = Activation.SIGMOID if gate is Gate.SIGMOID else Activation.SILU
                factor = elementwise.activate(args[0].float(), activation)
                return _gated(elementwise.norm, norm, x, weight, factor)
            on_gpu = kind < NormKind.CENTERED and bias is None and kernels.triton_serves(x.device)
            if gate is Gate.NONE and on_gpu:
                from verbatim.kernels.triton import norm as triton_norm

                if triton_norm.served(x, weight):
                    return triton_norm.rms_norm(x, weight, norm.eps, kind)[0]
        return type(module).forward(module, x, *args, **kwargs)

    return forward


def _gated(
    function: Callable[..., Tensor], norm: Norm, x: Tensor, weight: Tensor | None, factor: Tensor
) -> Tensor:
    """Compute a norm with the SiLU or sigmoid of its gate, by a function like `formula`."""
    if norm.gate is Gate.AFTER:
        return (function(x, weight, norm.eps, norm.kind) * factor).to(x.dtype)
    assert weight is not None
    if norm.gate is Gate.SIGMOID:
        return (function(x.float(), weight.float(), norm.eps, norm.kind) * factor).to(x.dtype)
    grouped = (x.float() * factor).unflatten(-1, (-1, group_width(norm.module)))
    return weight * function(grouped, None, norm.eps, NormKind.BARE).flatten(-2).to(x.dtype)


_Family = tuple[NormKind, Gate]
_families: dict[tuple[Any, ...], _Family | None] = {}


def _tried(
    module: nn.Module, weight_name: str | None, has_bias: bool, eps_name: str | None
) -> _Family | None:
    """Compare a twin of `module` that has a random weight with the families, on random rows."""
    shape: Any = module.__dict__.get("normalized_shape", (_WIDTH,))
    held = None if weight_name is None else module._parameters[weight_name]
    width = shape[-1] if held is None else len(held)
    rows = max(8, 4096 // max(1, width))
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    forward: Callable[..., Tensor] = type(module).forward
    gated = "gate" in signature(forward).parameters

    def operands(dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        """Return the rows, the weight, the bias and the gate."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(rows, width, generator=generator)
        x *= torch.logspace(-3, 1, rows)[:, None]  # the small ones show where eps stands
        weight = torch.randn(width, generator=generator).to(dtype) if weight_name else None
        gate = torch.randn(rows, width, generator=generator).to(dtype)
        bias = torch.randn(width, generator=generator).to(dtype) if has_bias else None
        return x.to(dtype), weight, bias, gate

    def theirs(dtype: torch.dtype) -> list[Tensor]:
        x, weight, bias, gate = operands(dtype)
        parameters = {weight_name or "weight": weight, "bias": bias}
        twin.__dict__["_parameters"] = {
            name: None if p is None else nn.Parameter(p, False) for name, p in parameters.items()
        }
        return [forward(twin, x, gate) if gated else forward(twin, x)]

    def ours(family: _Family, dtype: torch.dtype) -> list[Tensor]:
        x, weight, bias, gate = operands(dtype)
        norm = Norm(module, *family, weight_name, eps_name)
        if not gated:
            return [formula(x, weight, norm.eps, norm.kind, bias)]
        activate = torch.sigmoid if norm.gate is Gate.SIGMOID else nn.functional.silu
        return [_gated(formula, norm, x, weight, activate(gate.float()))]

    kinds = [NormKind.BARE, NormKind.CENTERED] if weight_name is None else list(NormKind)[2:]
    families = [(kind, Gate.AFTER if gated else Gate.NONE) for kind in kinds]
    if gated and weight_name is not None:  # the other ones are not met
        families += [(NormKind.ROUNDED, Gate.BEFORE), (NormKind.WIDE, Gate.SIGMOID)]

    def fits(family: _Family) -> bool:
        close = partial(_close, near=1e-7 if family[0] < NormKind.CENTERED else 1e-5)
        return not differential_check(partial(ours, family), theirs, _TRIED, close)

    try:
        found = [family for family in families if fits(family)]
    except Exception:  # it is whatever bears such a name
        return None
    # In float32 two families round alike; in bfloat16 they don't.
    return found[0] if len(found) == 1 else None


def _close(ours: Tensor, theirs: Any, near: float) -> bool:
    """Return whether two norms are equal but for some roundings, and for `near` around zero."""
    if not isinstance(theirs, Tensor) or theirs.dtype != ours.dtype or theirs.shape != ours.shape:
        return False
    if ours.dtype is torch.float32:
        return torch.allclose(theirs, ours, rtol=1e-5, atol=near)
    # An implementation may add in another order, which turns a rounding now and then. Another
    # family turns every tenth.
    close = torch.allclose(theirs.float(), ours.float(), rtol=2.0**-7, atol=near)
    return close and float((theirs != ours).float().mean()) < 0.01


def formula(
    x: Tensor, weight: Tensor | None, eps: float, kind: NormKind, bias: Tensor | None = None
) -> Tensor:
    """Compute a family's norm over the last dimension of `x`, in torch."""
    wide = x.float()
    if kind >= NormKind.CENTERED:
        wide = wide - wide.mean(-1, keepdim=True)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None:
        if kind is NormKind.ROUNDED:
            normed = normed.to(x.dtype).float()
        if kind is NormKind.CENTERED_ONE_PLUS:
            weight = 1.0 + weight
        normed = normed * (weight.float() + (1.0 if kind is NormKind.ONE_PLUS else 0.0))
    return (normed if bias is None else normed + bias.float()).to(x.dtype)
