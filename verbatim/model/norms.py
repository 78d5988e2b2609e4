"""RMS norms by the compiled kernels, some of them followed by a gate.

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
from typing import Any, NamedTuple

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
    """The place where a norm multiplies with the SiLU of its gate."""

    NONE = 0
    AFTER = 1
    BEFORE = 2


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm of a known family.

    Attributes:
        gate: where it multiplies with the SiLU of a gate, which it is given beside its input.
        weight_name: of its parameter; None without one.
        eps_name: of an attribute.
    """

    module: nn.Module
    kind: NormKind
    gate: Gate
    weight_name: str | None
    eps_name: str

    @property
    def weight(self) -> Tensor | None:
        """Its weight at the moment."""
        return None if self.weight_name is None else self.module._parameters[self.weight_name]

    @property
    def eps(self) -> float:
        """The number that is added to the mean square."""
        eps: float = self.module.__dict__[self.eps_name]
        return eps


def find_norm(module: nn.Module, gate: Gate | None = Gate.NONE) -> Norm | None:
    """Return an RMS norm of a known family; None for other modules.

    Args:
        gate: where it multiplies with a gate; None: anywhere.
    """
    fields = module.__dict__
    if "Norm" not in type(module).__name__ or "forward" in fields or module._modules:
        return None
    if type(module) is nn.LayerNorm or not _has_kernels(module):
        return None
    eps = next((n for n in _EPS_NAMES if type(fields.get(n)) in (float, int)), None)
    names = [name for name, p in module._parameters.items() if p is not None]
    if eps is None or module._buffers or not set(names) <= set(_WEIGHT_NAMES) or len(names) > 1:
        return None
    weight = names[0] if names else None
    if weight is not None and module._parameters[weight].ndim != 1:  # type: ignore[union-attr]
        return None
    # What else a class may look at: a flag that turns its weight off, a number of groups.
    width = None if weight is None else len(module._parameters[weight])  # type: ignore[arg-type]
    flags = tuple(
        sorted(
            (n, v)
            for n, v in fields.items()
            if n != "training" and type(v) in (bool, str, int) and v != width
        )
    )
    case = _Case(type(module), type(module).forward, weight, eps, flags)
    if case not in _families:
        # A mode that watches torch functions must not see the trial.
        with torch._C.DisableTorchFunction(), torch.no_grad(), torch.inference_mode(False):
            _families[case] = _tried(case, module)
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
        weight = norm.weight
        if kind is NormKind.WIDE and weight is not None and weight.dtype is torch.float32:
            if x.dtype is not torch.float32 and not args and not kwargs:  # it is kept in float32
                return forward(x.float()).to(x.dtype)
        fits = type(module).forward is original and (
            weight is None
            or (weight.dtype is x.dtype and weight.is_contiguous() and x.shape[-1:] == weight.shape)
        )
        if fits and not kwargs and len(args) == (gate is not Gate.NONE):
            if elementwise.served(x):
                if gate is Gate.NONE:
                    return elementwise.rms_norm(x, weight, norm.eps, kind)
                factor = elementwise.activate(args[0].float(), Activation.SILU)
                return _gated(elementwise.rms_norm, norm, x, weight, factor)
            if gate is Gate.NONE and kernels.triton_serves(x.device):
                from verbatim.kernels.triton import norm as triton_norm

                if triton_norm.served(x, weight):
                    return triton_norm.rms_norm(x, weight, norm.eps, kind)[0]
        return type(module).forward(module, x, *args, **kwargs)

    return forward


def _gated(
    rms_norm: Callable[..., Tensor], norm: Norm, x: Tensor, weight: Tensor | None, factor: Tensor
) -> Tensor:
    """Compute a norm with the SiLU of its gate, by a function like `formula`."""
    if norm.gate is Gate.AFTER:
        return (rms_norm(x, weight, norm.eps, norm.kind) * factor).to(x.dtype)
    assert weight is not None
    grouped = (x.float() * factor).unflatten(-1, (-1, group_width(norm.module)))
    return weight * rms_norm(grouped, None, norm.eps, NormKind.BARE).flatten(-2).to(x.dtype)


class _Case(NamedTuple):
    """The properties that determine a norm's family."""

    cls: type[nn.Module]
    forward: Any  # of the class: a caller may put another one there
    weight: str | None
    eps: str
    flags: tuple[tuple[str, Any], ...]


_Family = tuple[NormKind, Gate]
_families: dict[_Case, _Family | None] = {}


def _tried(case: _Case, module: nn.Module) -> _Family | None:
    """Compare a twin of `module` that has a random weight with the families, on random rows."""
    parameter = None if case.weight is None else module._parameters[case.weight]
    width = _WIDTH if parameter is None else parameter.shape[0]
    rows = max(8, 4096 // max(1, width))
    twin = object.__new__(case.cls)
    twin.__dict__.update(module.__dict__)
    gated = "gate" in signature(case.forward).parameters

    def operands(dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the rows, the weight and the gate."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(rows, width, generator=generator)
        x *= torch.logspace(-3, 1, rows)[:, None]  # the small ones show where eps stands
        weight = torch.randn(width, generator=generator).to(dtype) if case.weight else None
        return x.to(dtype), weight, torch.randn(rows, width, generator=generator).to(dtype)

    def theirs(dtype: torch.dtype) -> list[Tensor]:
        x, weight, gate = operands(dtype)
        parameters = {} if weight is None else {case.weight: nn.Parameter(weight, False)}
        twin.__dict__["_parameters"] = parameters
        return [case.forward(twin, x, gate) if gated else case.forward(twin, x)]

    def ours(family: _Family, dtype: torch.dtype) -> list[Tensor]:
        x, weight, gate = operands(dtype)
        norm = Norm(module, *family, case.weight, case.eps)
        if not gated:
            return [formula(x, weight, norm.eps, norm.kind)]
        return [_gated(formula, norm, x, weight, nn.functional.silu(gate.float()))]

    kinds = [NormKind.BARE] if case.weight is None else list(NormKind)[2:]
    families = [(kind, Gate.AFTER if gated else Gate.NONE) for kind in kinds]
    if gated and case.weight is not None:  # the other ones are not met
        families.append((NormKind.ROUNDED, Gate.BEFORE))
    try:
        found = [
            family
            for family in families
            if not differential_check(partial(ours, family), theirs, _TRIED, _close)
        ]
    except Exception:  # it is whatever bears such a name
        return None
    # In float32 two families round alike; in bfloat16 they don't.
    return found[0] if len(found) == 1 else None


def _close(ours: Tensor, theirs: Any) -> bool:
    if not isinstance(theirs, Tensor) or theirs.dtype != ours.dtype or theirs.shape != ours.shape:
        return False
    if ours.dtype is torch.float32:
        return torch.allclose(theirs, ours, rtol=1e-5, atol=1e-7)
    # An implementation may add in another order, which turns a rounding now and then. Another
    # family turns every tenth.
    close = torch.allclose(theirs.float(), ours.float(), rtol=2.0**-7, atol=1e-7)
    return close and float((theirs != ours).float().mean()) < 0.01


def formula(x: Tensor, weight: Tensor | None, eps: float, kind: NormKind) -> Tensor:
    """Compute a family's norm over the last dimension of `x`, in torch."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if kind is NormKind.BARE:
        return normed.to(x.dtype)
    assert weight is not None
    if kind is NormKind.ROUNDED:
        return weight * normed.to(x.dtype)
    factor = weight.float() if kind is NormKind.WIDE else 1.0 + weight.float()
    return (normed * factor).to(x.dtype)
