"""Batch-invariant versions of the torch functions that models call.

torch computes the tail of an elementwise loop with different code than the rest, so the bits of `silu`,
`sigmoid`, `softplus` and similar functions depend on the number of rows and threads, like those of matrix
products. The functions here use only operations without this problem (measured: `exp`, `expm1`, `log1p`,
`tanh`, `erf`, and those that IEEE rounds correctly); products are in `products.py`.

Modules of known classes are patched with these functions during the engine's forwards. Direct calls are
replaced by `InvariantMode`, which costs microseconds per call, so it is only active in modules that need it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily

from verbatim import kernels
from verbatim.errors import UnsupportedModel
from verbatim.kernels.options import Activation
from verbatim.model import elementwise, products
from verbatim.model.experts import is_stacked, parts_of
from verbatim.model.norms import norm_forward
from verbatim.model.router import router_forward
from verbatim.model.structs import NotFusable

_SQRT_HALF = 0.7071067811865476
_SQRT_2_OVER_PI = 0.7978845608028654


@kernels.without_overrides
def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)), computed in float32."""
    if elementwise.supports(x, Activation.SIGMOID):
        return elementwise.activate(x, Activation.SIGMOID)
    return (1.0 / (1.0 + torch.exp(-x.float()))).to(x.dtype)


@kernels.without_overrides
def silu(x: Tensor, inplace: bool = False) -> Tensor:
    """Return x / (1 + exp(-x)), computed in float32."""
    if elementwise.supports(x, Activation.SILU):
        return elementwise.activate(x, Activation.SILU)
    wide = x.float()
    return (wide / (1.0 + torch.exp(-wide))).to(x.dtype)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Gaussian error linear unit, exact by erf or with the tanh approximation (Hendrycks and Gimpel 2016)."""
    if elementwise.supports(x):
        tanh = approximate == "tanh"
        return elementwise.activate(x, Activation.GELU_TANH if tanh else Activation.GELU)
    wide = x.float()
    if approximate == "tanh":
        inner = _SQRT_2_OVER_PI * (wide + 0.044715 * (wide * wide * wide))
        return (0.5 * wide * (1.0 + torch.tanh(inner))).to(x.dtype)
    return (0.5 * wide * (1.0 + torch.erf(wide * _SQRT_HALF))).to(x.dtype)


@kernels.without_overrides
def softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """Return log(1 + exp(beta x)) / beta, or x if beta x exceeds the threshold."""
    if beta == 1.0 and threshold == 20.0 and elementwise.supports(x):
        return elementwise.activate(x, Activation.SOFTPLUS)
    scaled = x.float() * beta
    smooth = (torch.clamp(scaled, min=0.0) + torch.log1p(torch.exp(-scaled.abs()))) / beta
    return torch.where(scaled > threshold, x.float(), smooth).to(x.dtype)


def logsigmoid(x: Tensor) -> Tensor:
    """Return -softplus(-x)."""
    return -softplus(-x)


def elu(x: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    """Return x if positive, else alpha (exp(x) - 1)."""
    wide = x.float()
    return torch.where(wide > 0, wide, alpha * torch.expm1(wide)).to(x.dtype)


def selu(x: Tensor, inplace: bool = False) -> Tensor:
    """Return the scaled elu of Klambauer et al. 2017."""
    wide = 1.0507009873554805 * elu(x.float(), 1.6732632423543772)
    return wide.to(x.dtype)


def mish(x: Tensor, inplace: bool = False) -> Tensor:
    """Return x tanh(softplus(x))."""
    wide = x.float()
    return (wide * torch.tanh(softplus(wide))).to(x.dtype)


def glu(x: Tensor, dim: int = -1) -> Tensor:
    """Return the first half times the sigmoid of the second."""
    value, gate = x.chunk(2, dim)
    return value * sigmoid(gate)


@kernels.without_overrides
def exp(x: Tensor) -> Tensor:
    """Return exp(x) by the kernels, like fused recurrent layers; torch's is batch-invariant, too."""
    return elementwise.activate(x, Activation.EXP) if elementwise.supports(x) else torch.exp(x)


def rsqrt(x: Tensor) -> Tensor:
    """Return 1 / sqrt(x), computed in float32, as torch's bfloat16 loop and its tail round differently."""
    return torch.sqrt(x.float()).reciprocal().to(x.dtype)


@kernels.without_overrides
def exp2(x: Tensor) -> Tensor:
    """Return 2 ** x, computed by exp in float64."""
    return torch.exp(x.double() * 0.6931471805599453).to(x.dtype)


def power(x: Tensor, exponent: Any) -> Tensor:
    """Return `x ** exponent`, for exponents that torch does not compute batch-invariantly."""
    if isinstance(exponent, int | float) and exponent == -0.5:
        return rsqrt(x)
    return torch.pow(x.double(), exponent).to(x.dtype)


def _addmm(bias: Tensor, x: Tensor, w: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if beta == 1 and alpha == 1:
        return products.matmul(x, w) + bias
    return beta * bias + alpha * products.matmul(x, w)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    if b.dim() > 3:  # [..., M, K] and [..., K, N]
        batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        a, b = (x.expand(*batch, *x.shape[-2:]).flatten(0, -3) for x in (a, b))
        product: Tensor = products.matmul(a, b).unflatten(0, batch)
        return product
    if a.dim() == 2 and b.dim() == 3:  # a weight [M, K] and columns [B, K, N]
        return products.linear(b.transpose(1, 2), a).transpose(1, 2)
    return products.matmul(a, b)


def _complex_product(a: Tensor, b: Tensor, **out: Any) -> Tensor:
    real = a.real * b.real - a.imag * b.imag
    return torch.complex(real, a.real * b.imag + a.imag * b.real, **out)


def _refused(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedModel(f"it calls {name} directly, which has no batch-invariant version")

    return refuse


def functions(names: str) -> set[Any]:
    """Return all functions with these names in torch, torch.nn.functional and Tensor."""
    candidates = [vars(space).get(name) for name in names.split() for space in (torch, F)]
    candidates += [getattr(Tensor, name, None) for name in names.split()]
    return {function for function in candidates if callable(function)}


REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    function: ours
    for names, ours in (
        ("linear", products.linear),
        ("addmm", _addmm),
        ("mm bmm matmul __matmul__", _matmul),
        ("sigmoid", sigmoid),
        ("silu", silu),
        ("gelu", gelu),
        ("softplus", softplus),
        ("logsigmoid", logsigmoid),
        ("elu", elu),
        ("selu", selu),
        ("mish", mish),
        ("glu", glu),
        ("exp", exp),
        ("exp2", exp2),
        ("einsum", _refused("torch.einsum")),
        ("scaled_dot_product_attention", _refused("scaled_dot_product_attention")),
        ("conv1d", _refused("conv1d")),
    )
    for function in functions(names)
}

# Functions that torch computes with other bits on other processors, and replacements that call them.
_BY_PROCESSOR = functions(
    "tanh sqrt log log2 log10 log1p expm1 erf erfc tan atan atan2 asin acos sinh cosh softmax log_softmax "
    "logsumexp logaddexp norm hypot lgamma"
)
_CALL_TORCH = frozenset({elu, selu, mish, rsqrt, exp2, power})

# For half precision only: in float32 torch rounds correctly everywhere.
_HALF_ONLY: dict[Any, Callable[..., Any]] = dict.fromkeys(functions("rsqrt"), rsqrt)
_POWERS = frozenset({torch.pow, Tensor.pow, Tensor.__pow__})
_PRODUCTS = functions("mul multiply __mul__ __rmul__")


def replacement(func: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """Return the replacement for `func(*args)`, or None if torch's function is batch-invariant."""
    first = args[0] if args else None
    if func in _POWERS:
        if isinstance(first, Tensor) and first.is_floating_point() and len(args) > 1:
            exponent = args[1]
            exact = (0, 1, 2, 3, -1, -2, 0.5) + (
                () if first.dtype in (torch.bfloat16, torch.float16) else (-0.5,)
            )
            if not (isinstance(exponent, int | float) and exponent in exact):
                return power
        return None
    if func in _HALF_ONLY:
        half = isinstance(first, Tensor) and first.dtype in (torch.bfloat16, torch.float16)
        return _HALF_ONLY[func] if half else None
    if func in _PRODUCTS and len(args) > 1:
        if all(isinstance(x, Tensor) and x.is_complex() for x in args):
            return _complex_product  # torch rounds one time less in a loop's tail
        return None
    ours = REPLACEMENTS.get(func)
    if ours is _matmul and isinstance(first, Tensor):
        # A product with K = 1 (rotary embeddings) has one rounding per element.
        if first.shape[-1] == 1 or not first.is_floating_point():
            return None
    return ours


class InvariantMode(TorchFunctionMode):
    """Torch-function override that replaces every function that is not batch-invariant."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        ours = replacement(func, args)
        return (ours or func)(*args, **(kwargs or {}))


class LocalMode(InvariantMode):
    """`InvariantMode` for a module's own code; its children leave it (`overridden`)."""


def overridden(forward: Callable[..., Any], *, child: bool = False) -> Callable[..., Any]:
    """Return a forward that runs under `LocalMode`; with `child`, one that leaves a `LocalMode`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        mode = _get_current_function_mode()
        change: AbstractContextManager[object] = nullcontext()
        if child and isinstance(mode, LocalMode):
            change = _pop_mode_temporarily()
        elif not child and not isinstance(mode, InvariantMode):
            change = LocalMode()
        with change:
            return forward(*args, **kwargs)

    return call


class GateTensor(Tensor):
    """The output of a gate's linear layer; replaces the next non-batch-invariant function called on it.

    Attention layers and shared experts call an activation on gates in their own code. This avoids a
    torch-function mode, which would intercept every function of a forward.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            ours = replacement(func, args)
            out = (ours or func)(*args, **(kwargs or {}))
        if ours is not None or not isinstance(out, Tensor):
            return out
        return out.as_subclass(cls)


def is_gate(parent: nn.Module, name: str) -> bool:
    """Return whether the child `name` of `parent` is the linear layer of a gate."""
    if type(parent._modules.get(name)) is not nn.Linear:
        return False
    return name in ("g_proj", "shared_expert_gate") or (
        name == "gate_proj" and "q_proj" in parent._modules
    )


def gate_forward(linear: Any) -> Callable[..., Tensor]:
    """Return a batch-invariant forward for the linear layer of a gate."""
    forward = _linear_forward(linear)
    return lambda x: forward(x).as_subclass(GateTensor)


class Recorder(InvariantMode):
    """Records calls of functions that have a replacement, to determine which modules need `InvariantMode`.

    Attributes:
        swapped: names of the functions.
        callers: classes of the modules that call them, in their own forward or through a module that is not
            part of the model, such as those in transformers' table of activations.
        torch_functions: names of functions that torch computes with other bits on other processors, except in
            norms, routers and experts, which the kernels compute.

    Args:
        module: the module to be run.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.swapped: set[str] = set()
        self.callers: set[type[nn.Module]] = set()
        self.torch_functions: set[str] = set()
        self._parts = {id(part) for part in module.modules()}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, ours = getattr(func, "__name__", repr(func)), replacement(func, args)
        if ours is not None and not isinstance(args[0], GateTensor):
            self.swapped.add(name)
            self.callers.add(type(self._calling_module()))
        if self._rounds_by_processor(func, args, kwargs, ours):
            self.torch_functions.add(name)
        return super().__torch_function__(func, types, args, kwargs)

    def _rounds_by_processor(
        self, func: Any, args: tuple[Any, ...], kwargs: Any, ours: Any
    ) -> bool:
        if ours in _CALL_TORCH or (ours is softplus and (len(args) > 1 or kwargs)):
            return True
        root = func in _POWERS and isinstance(args[-1], float) and abs(args[-1]) == 0.5
        if not root and func not in _BY_PROCESSOR:
            return False
        return forward_for(self._calling_module(), batch_invariant=False) is None

    def _calling_module(self) -> nn.Module:
        """Return the innermost running module, even if it was called without its hooks."""
        frame = sys._getframe()
        while True:
            assert frame.f_back is not None
            frame = frame.f_back
            module: Any = frame.f_locals.get("self")
            runs = frame.f_code.co_name == "forward" or frame.f_code is _CALL
            if runs and id(module) in self._parts:
                return module  # type: ignore[no-any-return]


_CALL = nn.Module._call_impl.__code__


def _linear_forward(module: nn.Module, *, columns: bool = False) -> Callable[..., Tensor]:
    """Return a forward for a linear layer; with `columns` its weight is `[in, out]`, as in Conv1D."""
    parameters: Any = module._parameters
    linear = products.linear

    def forward(x: Tensor) -> Tensor:
        try:
            weight, bias = parameters["weight"], parameters["bias"]
        except KeyError:  # computed by hooks, such as those that prune
            weight, bias = module.weight, module.bias
        return linear(x, weight.t() if columns else weight, bias)

    return forward


@functools.cache
def _activations() -> dict[type[nn.Module], Callable[..., Any]]:
    """Return factories of batch-invariant forwards, by exact class."""
    from transformers import activations as hf
    from transformers.pytorch_utils import Conv1D

    def plain(function: Callable[..., Tensor]) -> Callable[..., Any]:
        return lambda module: function

    def tanh_gelu(x: Tensor) -> Tensor:
        return gelu(x, "tanh")

    makers: dict[type[nn.Module], Callable[..., Any]] = {
        nn.Linear: _linear_forward,
        Conv1D: functools.partial(_linear_forward, columns=True),
        nn.GELU: lambda m: tanh_gelu if m.approximate == "tanh" else gelu,
        nn.Softplus: lambda m: lambda x: softplus(x, m.beta, m.threshold),
        nn.ELU: lambda m: lambda x: elu(x, m.alpha),
    }
    by_name: dict[str, Callable[..., Tensor]] = {
        "SiLU": silu,
        "Sigmoid": sigmoid,
        "Mish": mish,
        "SELU": selu,
        "SiLUActivation": silu,
        "GELUActivation": gelu,
        "GELUTanh": tanh_gelu,
        "PytorchGELUTanh": tanh_gelu,
        "NewGELUActivation": tanh_gelu,
        "FastGELUActivation": tanh_gelu,
        "MishActivation": mish,
        "SqrtSoftplusActivation": lambda x: torch.sqrt(softplus(x)),
        "QuickGELUActivation": lambda x: x * sigmoid(1.702 * x),
    }
    for name, function in by_name.items():
        cls = getattr(nn, name, getattr(hf, name, None))  # names differ between supported versions
        if cls is not None:
            makers[cls] = plain(function)
    return makers


def forward_for(module: nn.Module, *, batch_invariant: bool = True) -> Callable[..., Any] | None:
    """Return a batch-invariant forward for a module of a known class, else None.

    Without `batch_invariant`, only norms, routers and experts are known. Subclasses are not, as they may do
    anything, and a forward replaced on the instance is kept.
    """
    if "forward" in module.__dict__:
        return None
    maker = _activations().get(type(module)) if batch_invariant else None
    if maker is not None:
        forward: Callable[..., Any] = maker(module)
        return forward
    if is_stacked(module):  # determine the gate of experts now, not during a forward
        with suppress(NotFusable):
            parts_of(module)
    return norm_forward(module) or router_forward(module)
