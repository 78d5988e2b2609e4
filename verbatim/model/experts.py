"""Mixture-of-experts layers on flat batches.

`flat_experts` is registered in transformers' `ExpertsInterface`. It is batch-invariant: products are, and the
top-k outputs of a token are added in the order of its slots, in float32. One kernel call runs all experts of
a layer; on a GPU there is one call per product. The slow reference is `ExpertsParts.run_one`, which runs a
single expert. The chosen experts are reported to the active forward context (`routing.py`).
"""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from verbatim import kernels
from verbatim.kernels.functions import SUFFIX, addresses, has_kernels, run, struct_layout
from verbatim.kernels.options import Activation
from verbatim.kernels.packing import WeightPacking
from verbatim.model import elementwise
from verbatim.model.context import replaces, route
from verbatim.model.differential import noise, trial
from verbatim.model.elementwise import activation_of
from verbatim.model.fingerprint import Fingerprint, Place, numbers_of, place_of, tensors_of
from verbatim.model.norms import find_norm
from verbatim.model.products import linear
from verbatim.model.structs import NotFusable, matrix_at, norm_of
from verbatim.quantization.matrix import QuantizedMatrix

_T = TypeVar("_T")

# As `Glu` of kernels/experts.h.
UNGATED, SPLIT, SPLIT_WIDE, CLAMPED_PAIRS, CLAMPED_HALVES, CLAMPED_SPLIT, SOFTCAPPED = range(7)
_CLAMPED = (CLAMPED_PAIRS, CLAMPED_HALVES, CLAMPED_SPLIT)
_LIMITED = (*_CLAMPED, SOFTCAPPED)  # with limits, and an activation of their own


@struct_layout("Matrix first\nL data_step bias_step")
class StackStruct(ctypes.Structure):
    """`Stack` of kernels/experts.h."""


_EXPERTS = """
    StackStruct inputs[2] down
    NormStruct norm
    L count hidden inner
    I num_inputs glu activation
    F alpha limit
"""


@struct_layout(_EXPERTS, size="experts")
class ExpertsStruct(ctypes.Structure):
    """`Experts` of kernels/experts.h."""


class Stack(NamedTuple):
    """One matrix per expert, `[cols, depth]`, or `[depth, cols]` if transposed.

    Attributes:
        weight: place of the stacked parameter, or of the bytes of a quantized weight.
        bias: place of the biases `[experts, cols]`; they may be missing.
    """

    weight: Place
    bias: Place
    cols: int
    depth: int
    transposed: bool
    packing: WeightPacking | None

    @property
    def num_matrices(self) -> int:
        """Number of matrices in the stack."""
        numbers = self.cols * self.depth if self.packing is None else self.packing.single.nbytes
        size: int = self.weight.tensor.numel()
        return size // max(1, numbers)

    @property
    def matrices(self) -> Tensor:
        """The matrices, `[experts, cols, depth]`, unless they are quantized."""
        shape = (self.depth, self.cols) if self.transposed else (self.cols, self.depth)
        matrices: Tensor = self.weight.tensor.view(-1, *shape)
        return matrices.mT if self.transposed else matrices

    def project(self, expert: int, rows: Tensor) -> Tensor:
        """Multiply `rows` `[n, depth]` by the matrix of one expert: `[n, cols]`."""
        biases = self.bias.tensor
        bias = None if biases is None else biases[expert]
        if self.packing is None:
            return linear(rows, self.matrices[expert], bias)
        one = self.packing.single
        data = self.weight.tensor.view(-1, one.nbytes)
        return linear(rows, QuantizedMatrix(data[expert], one), bias)

    def project_sorted(self, starts: Tensor, rows: Tensor) -> Tensor:
        """Multiply rows `[n, depth]`, sorted by expert, by their experts' matrices on a GPU: `[n, cols]`."""
        from verbatim.kernels.triton.linear import linear_by_expert

        return linear_by_expert(rows, self.matrices, self.bias.tensor, starts)

    def struct(self, dtype: torch.dtype) -> StackStruct:
        """Return the stack for the kernels; raise NotFusable if they can't read it."""
        biases, tensor = self.bias.tensor, self.weight.tensor
        columns = self.packing is None and self.transposed
        if columns and tensor.ndim == 3 and tensor.mT.is_contiguous():  # by `store_by_rows`
            tensor, columns = tensor.data.mT, False
        first = matrix_at(tensor, biases, dtype, self.cols, self.depth, self.packing)
        if self.packing is not None:
            step = self.packing.single.nbytes
        else:
            step = self.cols * self.depth * tensor.element_size()
            first.transposed = columns
            first.stride = self.cols if columns else self.depth
        return StackStruct(first, step, 0 if biases is None else self.cols * biases.element_size())


def stack_of(layer: nn.Module, name: str, transposed: bool = False) -> Stack:
    """Return the stack of a parameter `[experts, cols, depth]`; `[experts, depth, cols]` if transposed."""
    packing: WeightPacking | None = layer.__dict__.get("packings", {}).get(name)
    bias = place_of(layer, f"{name}_bias")
    if packing is None:
        weight = place_of(layer, name)
        parameter = weight.tensor
        if parameter is None or parameter.ndim != 3:
            raise NotFusable(f"its experts have no stacked {name}")
        shape = parameter.shape[1:]
    else:
        weight, shape = Place(layer._buffers, f"{name}_packed"), torch.Size(packing.shape[1:])
    cols, depth = reversed(shape) if transposed else shape
    return Stack(weight, bias, cols, depth, transposed, packing)


def _struct_for(rows: Tensor, struct: Callable[[torch.dtype], _T]) -> _T | None:
    """Return the struct of experts or of a stack if the kernels can run `rows`, else None."""
    if rows.dtype not in SUFFIX or not has_kernels(rows.device):
        return None
    try:
        return struct(rows.dtype)
    except NotFusable:  # also placeholders without memory
        return None


def _triton_runs(places: Sequence[Place], dtype: torch.dtype | None) -> bool:
    """Return whether Triton multiplies rows of `dtype` by these tensors; None: the dtype of the first."""
    tensors = [tensor for place in places if (tensor := place.tensor) is not None]
    if not tensors or not kernels.uses_triton(tensors[0].device):
        return False
    from verbatim.kernels.triton.linear import supports

    sample = tensors[0].new_empty(0, dtype=dtype)
    return all(supports(sample, tensor.dtype, None) for tensor in tensors)


class ExpertsParts:
    """The matrices, the activation and the gate of an experts module; NotFusable: its kind is unknown."""

    def __init__(self, experts: Any) -> None:
        self._module = weakref.ref(experts)  # weak, as `_parts` maps the module to this object
        gated = _has_own_forward(experts) or bool(getattr(experts, "has_gate", False))
        if type(experts).__name__ == "DbrxExperts":
            self.inputs, self.down = _dbrx_stacks(experts)
        elif type(experts).__name__ == "JetMoeMoE":
            self.inputs = [stack_of(experts.input_linear, "weight")]
            self.down = stack_of(experts.output_linear, "weight")
        else:
            transposed = is_transposed(experts)
            self.inputs = [stack_of(experts, "gate_up_proj" if gated else "up_proj", transposed)]
            self.down = stack_of(experts, "down_proj", transposed)
        normed = getattr(experts, "has_post_expert_norm", False)
        self.norm: nn.Module | None = experts.post_expert_norm if normed else None
        self.glu, self.alpha, self.limit = _glu_of(experts) if gated else (UNGATED, 0.0, 0.0)
        self._act: Any = _act_of(experts)
        self._numbers = Fingerprint([], numbers_of([experts, *_modules_of(self._act)]))
        self.tensors: list[Place] = [
            p for s in (*self.inputs, self.down) for p in (s.weight, s.bias)
        ]
        if self.norm is not None:
            self.tensors += tensors_of([self.norm])
        self._recorded_state = self._state()
        self._struct = ExpertsStruct()
        self._fingerprint = Fingerprint(self.tensors)
        self._dtype: torch.dtype | None = None  # of activations that `_struct` is for

    @property
    def module(self) -> Any:
        """The experts module."""
        return self._module()

    @property
    def hidden(self) -> int:
        """Width of a hidden state."""
        return self.inputs[0].depth

    @cached_property
    def activation(self) -> Activation | None:
        """The activation, None if the kernels lack it. Determined by a trial of enabled kernels."""
        return None if self._act is None else activation_of(self._act)

    def is_current(self) -> bool:
        """Return whether the module was neither quantized nor pruned nor given another gate."""
        return self._state() == self._recorded_state

    def _state(self) -> tuple[Any, ...]:
        act, missing = _act_of(self.module), [place.tensor is None for place in self.tensors]
        return act, _modules_of(act), missing, self._numbers.values()

    def struct(self, dtype: torch.dtype) -> ExpertsStruct:
        """Return the kernels' struct for `dtype`, at a fixed address; raise NotFusable if unsupported."""
        if self._dtype is dtype and self._fingerprint.same_layouts():
            return self._struct
        self._dtype = None
        struct = self._struct
        if self.glu not in _LIMITED and self.activation is None:
            raise NotFusable("the activation of its experts is not SiLU, GELU or ReLU")
        for i, stack in enumerate(self.inputs):
            struct.inputs[i] = stack.struct(dtype)
        struct.down = self.down.struct(dtype)
        norm = None if self.norm is None else find_norm(self.norm)
        if norm is None and self.norm is not None:
            raise NotFusable("the norm after its experts is not a known kind of RMS norm")
        struct.norm = norm_of(norm, dtype, self.hidden, None)
        struct.count = self.down.num_matrices
        struct.hidden, struct.inner = self.hidden, self.down.depth
        struct.num_inputs, struct.glu = len(self.inputs), self.glu
        struct.activation = self.activation or 0
        struct.alpha, struct.limit = self.alpha, self.limit
        fits = sum(s.cols for s in self.inputs) == struct.inner * (1 + (self.glu != UNGATED))
        fits &= self.down.cols == self.hidden and all(s.depth == self.hidden for s in self.inputs)
        if not fits:
            raise NotFusable("the matrices of its experts have inconsistent shapes")
        self._fingerprint.record_layouts()
        self._dtype = dtype
        return struct

    def struct_for(self, rows: Tensor) -> ExpertsStruct | None:
        """Return the struct if the kernels can run `rows`, else None."""
        return _struct_for(rows, self.struct)

    def sorts_on_gpu(self, dtype: torch.dtype | None = None) -> bool:
        """Return whether `run_sorted` can run rows of `dtype`; None: the dtype of the weights."""
        stacks = (*self.inputs, self.down)
        return all(s.packing is None for s in stacks) and _triton_runs(self.tensors, dtype)

    def run_sorted(self, starts: Tensor, rows: Tensor) -> Tensor:
        """Run all experts on `rows` `[n, H]`, sorted by expert, on a GPU without synchronization.

        Args:
            starts: first row of each expert, `[experts + 1]` int64. Outputs from the last on are arbitrary.
        """
        return self._run(rows, lambda stack, x: stack.project_sorted(starts, x))

    def run_one(self, expert: int, rows: Tensor) -> Tensor:
        """Run one expert on `rows` `[n, H]`, product by product."""
        return self._run(rows, lambda stack, x: stack.project(expert, x))

    def _run(self, rows: Tensor, project: Callable[[Stack, Tensor], Tensor]) -> Tensor:
        mixed = torch.cat([project(stack, rows) for stack in self.inputs], -1)
        out = project(self.down, self._gate(mixed))
        if self.norm is not None:
            out = self.norm(out)
        return out

    def _gate(self, x: Tensor) -> Tensor:
        """Apply activation and gate to the input products `x` `[n, width]`; return the input of `down`."""
        if elementwise.supports(x) and (self.glu in _LIMITED or self.activation is not None):
            return self._gate_in_kernel(x)
        if self.glu in _LIMITED:
            return _limited(x, self.glu, self.alpha, self.limit)
        act = self._act
        if self.glu == UNGATED:
            return act(x)  # type: ignore[no-any-return]
        gate, up = x.chunk(2, -1)
        if self.glu == SPLIT:
            return act(gate) * up  # type: ignore[no-any-return]
        return (act(gate.float()) * up.float()).to(x.dtype)  # type: ignore[no-any-return]

    def _gate_in_kernel(self, x: Tensor) -> Tensor:
        inner = x.shape[1] // (1 if self.glu == UNGATED else 2)
        struct = ExpertsStruct(inner=inner, glu=self.glu, activation=self.activation or 0)
        struct.alpha, struct.limit = self.alpha, self.limit
        x = x.clone(memory_format=torch.contiguous_format)
        run("vb_glu", x.dtype, ctypes.byref(struct), x.data_ptr(), len(x))
        return x[:, :inner].contiguous()


class ExpertShare:
    """Runs experts that are not all in their module's parameters, for example if ranks share them.

    An instance is stored in the experts module's attribute `expert_share`.

    Attributes:
        location: description of the experts' placement for `llm.info()`.
        local_experts: module with the local experts' parameters; None: the experts module itself.
    """

    location = "each rank runs its own"
    local_experts: nn.Module | None = None

    def run(self, experts: Any, rows: Tensor, counts: list[int]) -> Tensor:
        """Run local and remote experts; `run_experts` does the same for local ones.

        Args:
            rows: `[n, H]`, sorted by expert; the rows of identity experts are last.
            counts: number of rows of each expert.
        """
        raise NotImplementedError


_parts: weakref.WeakKeyDictionary[nn.Module, ExpertsParts] = weakref.WeakKeyDictionary()


def parts_of(experts: nn.Module) -> ExpertsParts:
    """Return the parts of an experts module, cached; raise NotFusable if its class is unknown."""
    if "parametrizations" in experts._modules:
        return ExpertsParts(_with_values(experts))
    parts = _parts.get(experts)
    if parts is None or not parts.is_current():
        parts = _parts[experts] = ExpertsParts(experts)
    return parts


def _with_values(experts: nn.Module) -> nn.Module:
    """Return a copy of a module with the current values of its parametrized tensors."""
    plain = nn.Module()
    plain.__dict__ |= experts.__dict__
    plain.__class__ = type(experts).__bases__[0]
    parametrizations: Any = experts._modules["parametrizations"]
    values = {name: getattr(experts, name) for name in parametrizations}
    plain.__dict__["_parameters"] = experts._parameters | values
    return plain


def is_stacked(module: nn.Module) -> bool:
    """Return whether a module implements transformers' experts interface."""
    return all(hasattr(module, name) for name in ("num_experts", "has_gate", "is_transposed"))


def runs_flat(module: nn.Module) -> bool:
    """Return whether `flat_experts` runs this module."""
    return is_stacked(module) or _has_own_forward(module)


def needs_sync(module: nn.Module) -> bool:
    """Return whether `flat_experts` runs this module, but not by `run_sorted`, which needs no GPU sync."""
    if not runs_flat(module):
        return False
    with suppress(NotFusable):
        return hasattr(module, "expert_share") or not parts_of(module).sorts_on_gpu()
    return True


def how_run(experts: Any, dtype: torch.dtype) -> str | None:
    """Describe how an experts module runs outside of fused layers; None if `flat_experts` does not run it."""
    if not runs_flat(experts):
        return None
    share: ExpertShare | None = getattr(experts, "expert_share", None)
    where = "" if share is None else f", {share.location}"
    local = experts if share is None or share.local_experts is None else share.local_experts
    if not needs_sync(experts):
        return "all in one kernel call for each product"
    if kernels.library() is None or dtype not in SUFFIX:
        return f"expert by expert{where}: no compiled kernels for them"
    try:
        parts = parts_of(local)
        tensors = [place.tensor for place in parts.tensors]
        if any(t is not None and t.untyped_storage().nbytes() < t.nbytes for t in tensors):
            return "all in one kernel call, read with their layer"
        parts.struct(dtype)
    except NotFusable as reason:
        return f"expert by expert{where}: {reason}"
    return f"all in one kernel call{where}"


def is_transposed(module: nn.Module) -> bool:
    """Return whether an experts module stores its matrices transposed, `[experts, depth, cols]`."""
    return type(module).__name__ == "Llama4TextExperts" or getattr(module, "is_transposed", False)


def stacked_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the stacked matrices of a module that `flat_experts` runs; empty for other modules."""
    if not runs_flat(module):
        return []
    try:
        parts = ExpertsParts(module)
    except NotFusable:
        return []
    weights = [stack.weight.tensor for stack in (*parts.inputs, parts.down)]
    return [p for p in weights if isinstance(p, nn.Parameter)]


def flat_experts(
    experts: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Run the chosen experts of each token, and return the weighted sum of their outputs.

    Args:
        experts: a transformers experts module with weights stacked along the first dimension.
        hidden: `[T, H]`.
        top_k_index: `[T, k]` int64, the experts of each token; ids beyond the last expert are the identity.
        top_k_weights: `[T, k]`.

    Returns:
        `[T, H]` in `hidden`'s dtype.
    """
    route(experts, top_k_index)
    num_tokens, top_k = top_k_index.shape
    parts = parts_of(experts)
    share: ExpertShare | None = getattr(experts, "expert_share", None)
    struct = parts.struct_for(hidden) if share is None else None
    if struct is not None:
        hidden, weights = hidden.contiguous(), top_k_weights.float().contiguous()
        index, out = top_k_index.to(torch.int32).contiguous(), torch.empty_like(hidden)
        source, routing = (ctypes.byref(struct), hidden.data_ptr()), addresses(index, weights)
        run("vb_experts", hidden.dtype, *source, num_tokens, *routing, top_k, out.data_ptr())
        return out
    # Sort slots by expert, so that each expert has consecutive rows.
    sorted_index, by_expert = torch.sort(top_k_index.reshape(-1), stable=True)
    rows = hidden[by_expert // top_k]
    count = num_experts(experts)
    if share is None and parts.sorts_on_gpu(rows.dtype):
        out = parts.run_sorted(_starts(sorted_index, count), rows)
        out = torch.where((sorted_index < count)[:, None], out, rows)
    else:
        counts = torch.bincount(top_k_index.reshape(-1), minlength=count).tolist()[:count]
        if share is None:
            out = run_experts(experts, rows, counts)
        else:
            out = share.run(experts, rows, counts)
        out = torch.cat([out, rows[len(out) :]])
    slots = torch.empty_like(out)
    slots[by_expert] = out
    return weighted_sum(slots.view(num_tokens, top_k, -1), top_k_weights).to(hidden.dtype)


def _starts(sorted_index: Tensor, count: int) -> Tensor:
    """Return the first row of each expert, and the number of rows with experts, `[count + 1]` int64."""
    return torch.searchsorted(sorted_index, torch.arange(count + 1, device=sorted_index.device))


def weighted_sum(outputs: Tensor, weights: Tensor) -> Tensor:
    """Add up the outputs `[T, k, H]` of experts times `weights` `[T, k]`, in slot order: `[T, H]` float32."""
    weighted = outputs.float() * weights[..., None].float()
    total = weighted[:, 0]
    for k in range(1, weights.shape[1]):
        total = total + weighted[:, k]
    return total


def project_chosen(stack: Stack, rows: Tensor, chosen: Tensor) -> Tensor:
    """Multiply `rows` `[T, depth]` by the matrices of their experts `chosen` `[T, k]`: `[T, k, cols]`."""
    num_rows, top_k = chosen.shape
    count = stack.num_matrices
    out = rows.new_empty(num_rows, top_k, stack.cols)
    struct = _struct_for(rows, stack.struct)
    if struct is not None:
        rows = rows.contiguous()
        at, index = ctypes.byref(struct), chosen.to(torch.int32).contiguous()
        inputs, (indices, outputs) = rows.data_ptr(), addresses(index, out)
        run("vb_multiply_chosen", rows.dtype, at, count, inputs, num_rows, indices, top_k, outputs)
        return out
    sorted_index, by_expert = torch.sort(chosen.reshape(-1), stable=True)
    rows, slots = rows[by_expert // top_k], out.view(num_rows * top_k, -1)
    if stack.packing is None and _triton_runs([stack.weight, stack.bias], rows.dtype):
        slots[by_expert] = stack.project_sorted(_starts(sorted_index, count), rows)
        return out
    for expert in sorted_index.unique().tolist():
        ours = sorted_index == expert
        slots[by_expert[ours]] = stack.project(expert, rows[ours])
    return out


def run_experts(experts: Any, rows: Tensor, counts: list[int] | Tensor) -> Tensor:
    """Run the local experts on rows `[n, H]`, sorted by expert: `counts[e]` rows for expert `e`."""
    parts, counts = parts_of(experts), torch.as_tensor(counts, dtype=torch.int64)
    starts = torch.zeros(len(counts) + 1, dtype=torch.int64)
    torch.cumsum(counts, 0, out=starts[1:])
    out = rows.new_empty(int(starts[-1]), rows.shape[1])
    struct = parts.struct_for(rows)
    if struct is not None and struct.count == len(counts):
        rows = rows.contiguous()
        address = ctypes.byref(struct)
        run("vb_experts_sorted", rows.dtype, address, *addresses(rows, starts, out))
        return out
    for expert, (start, stop) in enumerate(pairwise(starts.tolist())):
        if start < stop:
            out[start:stop] = parts.run_one(expert, rows[start:stop])
    return out


def num_experts(experts: Any) -> int:
    """Return the number of experts with weights, on all ranks."""
    owner = experts.router if type(experts).__name__ == "JetMoeMoE" else experts
    return int(getattr(owner, "num_routed_experts", None) or owner.num_experts)


# ---- gates ----


def _act_of(experts: Any) -> Any:
    owner = getattr(experts, "mlp", experts)
    names = ("act_fn", "activation_fn", "activation")
    return next((act for name in names if (act := getattr(owner, name, None))), None)


def _modules_of(act: Any) -> list[nn.Module]:
    return list(act.modules()) if isinstance(act, nn.Module) else []


@kernels.without_overrides
def _limited(x: Tensor, glu: int, alpha: float, limit: float) -> Tensor:
    """Apply the gate of gpt-oss (in pairs or halves), HY V4 or Inkling 2, with a batch-invariant sigmoid."""
    if glu == SOFTCAPPED:
        gate, up = x.float().chunk(2, -1)
        gate = torch.tanh(gate / alpha) * alpha / (1.0 + torch.exp(-gate))
        return (gate * (torch.tanh(up / limit) * limit)).to(x.dtype)
    gate, up = (x[..., ::2], x[..., 1::2]) if glu == CLAMPED_PAIRS else x.chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    if glu == CLAMPED_SPLIT:
        wide = gate.float()
        return (wide / (1.0 + torch.exp(-wide))).to(x.dtype) * up
    sigmoid = (1.0 / (1.0 + torch.exp(-(gate * alpha).float()))).to(x.dtype)
    return (up + 1) * (gate * sigmoid)


def _glu_of(experts: Any) -> tuple[int, float, float]:
    """Return the kind of gate, determined by a trial, with alpha and limit if it is clamped, else zeros."""
    apply: Any = getattr(type(experts), "_apply_gate", None)
    if _has_own_forward(experts) or apply is None or apply.__name__ == "_default_apply_gate":
        return SPLIT, 0.0, 0.0
    numbers: list[Any] = [
        getattr(experts, f"swiglu_{name}", getattr(experts, name, None))
        for name in ("limit", "alpha")
    ]
    has_limit, has_alpha = (type(number) in (int, float) for number in numbers)
    limit, alpha = (float(n) if type(n) in (int, float) else 0.0 for n in numbers)
    kinds = () if not has_limit else _CLAMPED if has_alpha else (CLAMPED_SPLIT,)
    softcaps = (getattr(_act_of(experts), f"{name}_softcap", None) for name in ("gate", "up"))
    caps: list[Any] = [getattr(softcap, "softcap", None) for softcap in softcaps]
    if None not in caps:
        kinds = (SOFTCAPPED,)
        alpha, limit = map(float, caps)
    x = noise((16, 64), torch.float32) * 4
    x[::3] *= 100.0  # beyond limits
    with trial():
        for glu, dtype in itertools.product(kinds, (torch.bfloat16, torch.float32)):
            expected = apply(experts, x.to(dtype))
            if _close(_limited(x.to(dtype), glu, alpha, limit), expected):
                return glu, alpha, limit
        if not hasattr(experts, "act_fn"):
            raise NotFusable("the gate of its experts has an unknown form")
        gate, up = x.bfloat16().chunk(2, -1)
        expected = apply(experts, x.bfloat16())
        if torch.equal(expected, experts.act_fn(gate) * up):
            return SPLIT, 0.0, 0.0
        if torch.equal(expected, (experts.act_fn(gate.float()) * up.float()).bfloat16()):
            return SPLIT_WIDE, 0.0, 0.0
    raise NotFusable("the gate of its experts has an unknown form")


def _close(a: Tensor, b: Tensor) -> bool:
    tolerance = 2.0**-6 if a.dtype is torch.bfloat16 else 1e-5
    return a.shape == b.shape and torch.allclose(a.float(), b.float(), rtol=tolerance, atol=1e-3)


# ---- experts with a forward outside of transformers' experts interface ----

_OWN_FORWARD = {"DbrxExperts", "JetMoeMoE", "Llama4TextExperts", "LongcatFlashExperts"}


def _has_own_forward(module: nn.Module) -> bool:
    return type(module).__name__ in _OWN_FORWARD


def _dbrx_stacks(experts: Any) -> tuple[list[Stack], Stack]:
    """Return the input stacks and the down stack of DBRX, which joins matrices along rows."""
    inner, hidden, mlp = experts.ffn_hidden_size, experts.hidden_size, experts.mlp

    def stack(name: str, cols: int, depth: int, transposed: bool) -> Stack:
        return Stack(Place(mlp._parameters, name), Place({}, name), cols, depth, transposed, None)

    inputs = [stack("w1", inner, hidden, False), stack("v1", inner, hidden, False)]
    return inputs, stack("w2", hidden, inner, True)


@replaces("DbrxExperts", "Llama4TextExperts", "LongcatFlashExperts")
def _own_forward(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    return flat_experts(module, rows, top_k_index, top_k_weights).view(hidden_states.shape)
