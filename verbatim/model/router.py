"""MoE routers: from a token's logits to its experts and their weights.

transformers has a router class for nearly every model, of a few forms. The form of a class is determined by
a trial, which compares its forward, on random rows with random weights, with each form's formula. A router of
a known form runs `choose`, which is batch-invariant and accepts forced experts. Others keep their forward,
and can't replay routing.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from verbatim import kernels
from verbatim.kernels.functions import SUFFIX, addresses, has_kernels, run, struct_layout
from verbatim.model import products
from verbatim.model.context import active_context, replaces
from verbatim.model.differential import copy_of, noise, trial
from verbatim.model.fingerprint import Place, place_of

# As `Score` of kernels/experts.h.
AS_IS, SOFTMAX, SIGMOID = range(3)

_ROWS, _MANY_ROWS = 64, 4096  # per trial
_GROUPS = ("num_group", "n_group")
_SCALES = ("routed_scaling_factor", "router_scaling_factor", "route_scale")
CORRECTIONS = ("e_score_correction_bias", "expert_bias")


@dataclass(frozen=True, slots=True)
class RouterForm:
    """The form of a router: the fields of `Router` in kernels/experts.h.

    Attributes:
        score: function from logits to scores: AS_IS, SOFTMAX or SIGMOID. The largest scores are chosen.
        chosen_score: function from the logits of the chosen experts to weights; AS_IS: their `score`.
        normalized: whether a row's weights are divided by their sum.
        groups, top_groups: number of groups of experts, and limit per row; 0: no groups.
        best_two: whether a group's score is the sum of its two best scores, not the best.
        scale: factor of the weights.
        softcap: cap of the logits; 0.0: none.
        wide: whether logits are computed in float32, for any dtype of the activations.
        rounded: whether weights are rounded to the dtype of the activations; else float32.
        rounded_scores: whether scores are, too, before a correction is added.
    """

    top_k: int
    score: int = SOFTMAX
    chosen_score: int = AS_IS
    normalized: bool = False
    groups: int = 0
    top_groups: int = 0
    best_two: bool = False
    scale: float = 1.0
    softcap: float = 0.0
    wide: bool = False
    rounded: bool = False
    rounded_scores: bool = False


@dataclass(frozen=True, slots=True)
class RouterParts:
    """A router of a known form, and references to its tensors.

    Attributes:
        correction: bias added to the scores for the choice only, or None.
        takes_correction: whether the forward takes a correction as an argument.
        returns: the outputs of the forward, in order: "weights", "experts", and usually "logits".
    """

    module: nn.Module
    form: RouterForm
    weight: Place
    bias: Place
    correction: Place | None
    takes_correction: bool
    returns: tuple[str, ...]


_ROUTER = """
    Matrix weight
    P correction
    I correction_f32 wide score chosen_score normalized rounded rounded_scores
    I groups top_groups best_two top_k
    F scale softcap
"""


@struct_layout(_ROUTER, size="router")
class RouterStruct(ctypes.Structure):
    """`Router` of kernels/experts.h."""


def fill_form(struct: RouterStruct, form: RouterForm) -> None:
    """Copy the fields of `form`."""
    for name in RouterForm.__dataclass_fields__:
        setattr(struct, name, getattr(form, name))


@kernels.without_overrides
def choose(
    logits: Tensor,
    form: RouterForm,
    correction: Tensor | None = None,
    forced: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each row.

    Args:
        logits: `[T, E]` float32.
        correction: `[E]`, added to the scores for the choice only.
        forced: `[T, k]`, experts to use, in slot order; -1: the router chooses.
        dtype: dtype of the activations, to which weights are rounded if `form.rounded`.

    Returns:
        The weights `[T, k]` and the experts `[T, k]` int64, best first; of equal ones the lowest id first.
    """
    if has_kernels(logits.device) and dtype in SUFFIX:
        rows, k = len(logits), form.top_k
        struct = RouterStruct()
        fill_form(struct, form)
        struct.weight.cols = logits.shape[1]
        if correction is not None:
            correction = correction.float().contiguous()
            struct.correction, struct.correction_f32 = correction.data_ptr(), True
        if forced is not None:
            forced = forced.to(torch.int16).contiguous()
        logits = logits.clone(memory_format=torch.contiguous_format)  # the kernel writes to it
        weights = torch.empty(rows, k, dtype=torch.float32)  # the default dtype may differ
        experts = torch.empty(rows, k, dtype=torch.int32)
        inputs, outputs = addresses(logits, forced), addresses(experts, weights)
        at = ctypes.byref(struct)
        run("vb_choose", dtype, at, inputs[0], rows, None, inputs[1], k, *outputs)
        return weights.to(dtype) if form.rounded else weights, experts.long()
    if form.softcap:
        logits = torch.tanh(logits / form.softcap) * form.softcap
    scores = _scores(logits, form.score)
    scores = scores.to(dtype).float() if form.rounded_scores else scores
    choice = scores if correction is None else scores + correction.float()
    if form.groups > 1:
        grouped = choice.unflatten(1, (form.groups, -1))
        best = grouped.sort(-1, descending=True)[0][..., : 2 if form.best_two else 1].sum(-1)
        selected = torch.zeros_like(best, dtype=torch.bool)
        selected.scatter_(
            1, best.sort(dim=-1, descending=True, stable=True)[1][:, : form.top_groups], True
        )
        choice = grouped.masked_fill(~selected[..., None], -torch.inf).flatten(1)
    experts = choice.sort(dim=-1, descending=True, stable=True)[1][:, : form.top_k]
    if forced is not None:
        experts = torch.where(forced >= 0, forced.long(), experts)
    if form.chosen_score == AS_IS:
        weights = scores.gather(1, experts)
    else:
        weights = _scores(logits.gather(1, experts), form.chosen_score)
    if form.normalized:
        total = weights[:, 0]
        for j in range(1, form.top_k):  # in a fixed order
            total = total + weights[:, j]
        weights = weights / (total[:, None] + 1e-20)
    weights = weights * form.scale if form.scale != 1.0 else weights
    return weights.to(dtype) if form.rounded else weights, experts


def _scores(logits: Tensor, score: int) -> Tensor:
    if score == SOFTMAX:
        return torch.softmax(logits, -1)
    return 1.0 / (1.0 + torch.exp(-logits)) if score == SIGMOID else logits


def forced_experts() -> Tensor | None:
    """Return the forced experts of the current layer, `[T, k]`, or None."""
    getter: Any = getattr(active_context(), "forced_experts", None)  # None without routing
    return None if getter is None else getter()


def router_forward(module: nn.Module) -> Callable[..., Any] | None:
    """Return a batch-invariant forward for a router of a known form, else None."""
    parts = router_parts(module)
    if parts is None:
        return None
    form = parts.form
    original, has_bias = type(module).forward, parts.bias.tensor is not None

    def forward(hidden_states: Tensor, correction: Tensor | None = None) -> Any:
        weight, bias = parts.weight.tensor, parts.bias.tensor
        pruned = weight is None or (bias is not None) != has_bias
        if pruned or type(module).forward is not original:
            arguments = () if correction is None else (correction,)
            return type(module).forward(module, hidden_states, *arguments)
        hidden = hidden_states.reshape(-1, weight.shape[1])
        if parts.correction is not None:
            correction = parts.correction.tensor.reshape(-1)
        if form.wide:
            logits = products.linear(hidden.float(), weight.float())
        else:
            logits = products.linear(hidden, weight, bias).float()
        weights, experts = choose(logits, form, correction, forced_experts(), hidden.dtype)
        outputs = {"logits": logits, "weights": weights, "experts": experts}
        return tuple(outputs[part] for part in parts.returns)

    return forward


# ---- routers with additional steps ----

_form = functools.cache(RouterForm)


@replaces("Gemma4TextRouter")
def _gemma4(module: Any, hidden_states: Tensor) -> Any:
    """Gemma 4's router: norm and scales before the projection, expert scales after the choice."""
    scaled = module.norm(hidden_states) * module.scale * module.scalar_root_size
    logits = module.proj(scaled).float()
    form = _form(module.config.top_k_experts, normalized=True)
    weights, experts = choose(logits, form, None, forced_experts())
    return logits, weights * module.per_expert_scale[experts], experts


@replaces("PhimoeTopKRouter")
def _phimoe(module: Any, hidden_states: Tensor) -> Any:
    """PhiMoE's router, with transformers' `sparsemixer`; no forced experts."""
    mix = sys.modules[type(module).__module__].sparsemixer
    logits = products.linear(hidden_states, module._parameters["weight"])
    weights, experts = mix(logits, module.router_jitter_noise, False, module.top_k)
    return logits, weights, experts


@replaces("DeepseekV4HashRouter", "DeepseekV4TopKRouter")
def _deepseek_v4(module: Any, hidden_states: Tensor, input_ids: Tensor | None = None) -> Any:
    """DeepSeek V4's routers, which choose by score or by a table of token ids."""
    rows = hidden_states.reshape(-1, module.hidden_dim)
    logits = products.linear(rows, module.weight)
    scores = module.score_fn(logits.float())
    forced = forced_experts()
    if input_ids is not None:
        listed = module.tid2eid[input_ids.reshape(-1)].long()
        forced = listed if forced is None else torch.where(forced >= 0, forced, listed)
    correction = module._buffers.get("e_score_correction_bias")
    form = _form(module.top_k, AS_IS, normalized=True, scale=float(module.routed_scaling_factor))
    weights, experts = choose(scores, form, correction, forced)
    return logits, weights, experts


# ---- the form of a router ----


def router_parts(module: nn.Module) -> RouterParts | None:
    """Return the form of a router and its tensors, or None for an unknown form."""
    fields, forward = module.__dict__, type(module).forward
    if type(fields.get("top_k")) is not int or "forward" in fields or isinstance(module, nn.Linear):
        return None
    linears = [m for m in module.children() if type(m) is nn.Linear]
    holder = module if module._parameters.get("weight") is not None else None
    if holder is None and len(linears) == 1:
        holder = linears[0]
    weight = None if holder is None else holder._parameters.get("weight")
    if holder is None or weight is None or weight.ndim != 2:
        return None
    corrections = [
        Place(tensors, name)
        for part in module.modules()
        for tensors in (part._parameters, part._buffers)
        for name in CORRECTIONS
        if tensors.get(name) is not None
    ]
    arguments = [*inspect.signature(forward).parameters.values()][2:]  # besides self and the rows
    num_required = sum(p.default is p.empty for p in arguments)
    if len(corrections) > 1 or num_required > 1:
        return None
    variants = [True] if num_required else [False]
    if not num_required and arguments and arguments[0].name in CORRECTIONS:
        variants = [True, False]
    numbers = _numbers_of(module)
    tensors = [*module.named_parameters(), *module.named_buffers()]
    layout = tuple((name, tensor.dtype, tensor.shape) for name, tensor in tensors)
    # Submodules may compute the scores.
    parts = tuple((type(part), *_numbers_of(part).items()) for part in module.modules())
    case = forward, parts, layout
    if case not in _forms:
        with trial(), kernels.using("none"):  # in torch's own arithmetic
            try:
                matches = (_find_form(module, numbers, weight.shape, t) for t in variants)
                _forms[case] = next(filter(None, matches), None)
            except Exception:  # an unrelated module with such names
                _forms[case] = None
    match, bias = _forms[case], place_of(holder, "bias")
    if match is None or (match[0].wide and bias.tensor is not None):
        return None
    form, takes_correction, returns = match
    correction = corrections[0] if corrections else None
    weights = place_of(holder, "weight")
    return RouterParts(module, form, weights, bias, correction, takes_correction, returns)


def _numbers_of(module: nn.Module) -> dict[str, Any]:
    """Return a module's numbers and strings, sorted by name."""
    return {
        name: value
        for name, value in sorted(module.__dict__.items())
        if name != "training" and type(value) in (int, float, bool, str)
    }


# `form`, `takes_correction` and `returns` of the parts.
_Match = tuple[RouterForm, bool, tuple[str, ...]]
# Keys: everything that determines the form (forward, classes, numbers, layout of the tensors).
_forms: dict[tuple[Any, ...], _Match | None] = {}


def _find_form(
    module: nn.Module, numbers: dict[str, Any], shape: tuple[int, ...], takes_correction: bool
) -> _Match | None:
    experts, depth = shape
    groups = _groups(numbers)
    x = noise((_MANY_ROWS if len(groups) > 1 else _ROWS, depth), torch.float32, 1)
    extra = noise((experts,), torch.float32, 2) * 0.2 if takes_correction else None
    expected, tensors = _run_twin(module, torch.float32, x, extra)
    logits = nn.functional.linear(x, tensors["weight"], tensors.get("bias"))
    correction = tensors.get("correction", extra)
    first = expected["weights"][:_ROWS], expected["experts"][:_ROWS]

    def differences(form: RouterForm) -> int:
        """Return the number of rows for which other experts are chosen; near ties count too."""
        chosen = choose(logits, form, correction)[1].sort(-1)[0]
        return int((chosen != expected["experts"].sort(-1)[0]).any(-1).sum())

    for form in _candidates(numbers):
        forms = [replace(form, **group) for group in groups]
        forms = [form for form in forms if _agree(choose(logits[:_ROWS], form, correction), first)]
        if forms:
            # Groups may exclude the best experts of few rows only.
            form = min(forms, key=differences) if len(forms) > 1 else forms[0]
            form = _with_roundings(module, x[:_ROWS], form, extra)
            return form, takes_correction, tuple(expected)
    return None


def _groups(numbers: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the possible groups of a router with these attributes, as fields of its form."""
    groups = next((numbers[n] for n in _GROUPS if type(numbers.get(n)) is int), 0)
    grouped: list[dict[str, Any]] = [dict(groups=0)]
    if groups > 1 and type(numbers.get("topk_group")) is int:
        grouped += [
            dict(groups=groups, top_groups=numbers["topk_group"], best_two=two)
            for two in (True, False)
        ]
    return grouped


def _candidates(numbers: dict[str, Any]) -> Iterator[RouterForm]:
    """Yield the possible forms of a router with these attributes, without groups."""
    scales = [numbers[n] for n in _SCALES if type(numbers.get(n)) in (int, float)]
    softcap = float(numbers.get("router_logit_softcapping") or 0.0)
    scores = [(AS_IS, SOFTMAX), (AS_IS, SIGMOID), (SOFTMAX, AS_IS), (SIGMOID, AS_IS)]
    for (score, chosen), normalized, scale in itertools.product(
        scores, (False, True), (1.0, *map(float, scales))
    ):
        yield RouterForm(
            top_k=numbers["top_k"],
            score=score,
            chosen_score=chosen,
            normalized=normalized,
            scale=scale,
            softcap=softcap,
        )


def _agree(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    """Return whether experts and weights are equal up to order."""
    pairs = []
    for weights, chosen in (actual, expected):
        order = chosen.sort(-1)
        pairs.append((order[0], weights.float().gather(1, order[1])))
    (a, u), (b, v) = pairs
    return a.shape == b.shape and torch.equal(a, b) and torch.allclose(u, v, rtol=1e-4, atol=1e-7)


def _with_roundings(
    module: nn.Module, x: Tensor, form: RouterForm, extra: Tensor | None
) -> RouterForm:
    """Return the form with its roundings set, by forwards with bfloat16 activations."""
    try:
        outputs, tensors = _run_twin(module, None, x.bfloat16(), extra)
    except RuntimeError:  # float32 weights and activations
        return form
    form = replace(form, rounded=outputs["weights"].dtype is torch.bfloat16)
    if "logits" in outputs:
        logits = outputs["logits"]
        form = replace(form, wide=not torch.equal(logits.float(), logits.bfloat16().float()))
        return replace(form, rounded_scores=_rounds_scores(module, x, form, extra))
    logits = x.bfloat16().float() @ tensors["weight"].float().t()
    correction = tensors.get("correction", extra)
    actual = choose(logits, form, correction, None, torch.bfloat16)
    return replace(form, wide=_agree(actual, (outputs["weights"], outputs["experts"])))


def _rounds_scores(module: nn.Module, x: Tensor, form: RouterForm, extra: Tensor | None) -> bool:
    """Return whether more rows choose the module's experts if scores are rounded to bfloat16."""
    x = noise((_MANY_ROWS, x.shape[1]), torch.bfloat16, 3)
    outputs, tensors = _run_twin(module, None, x, extra)
    expected, correction = outputs["experts"].sort(-1)[0], tensors.get("correction", extra)
    differences = []
    for rounded in (False, True):
        variant = replace(form, rounded_scores=rounded)
        logits = outputs["logits"].float()
        chosen = choose(logits, variant, correction, None, torch.bfloat16)[1].sort(-1)[0]
        differences.append(int((chosen != expected).any(-1).sum()))
    return differences[1] < differences[0]


def _run_twin(
    module: nn.Module, dtype: torch.dtype | None, x: Tensor, extra: Tensor | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Run a router's own forward with random tensors; return its outputs and the tensors, by name.

    Args:
        dtype: dtype of the random tensors; None: the dtypes of the router's tensors.
    """
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}

    def tensor_of(name: str, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        is_matrix = tensor.ndim == 2 and len(tensor) > 1
        spread = 2.0 / tensor.shape[-1] ** 0.5 if is_matrix else 0.2
        random = torch.randn(tensor.shape, generator=generator, dtype=torch.float32) * spread
        random = random.to(dtype or tensor.dtype)
        if name in CORRECTIONS:
            tensors["correction"] = random.reshape(-1)
        else:
            tensors[name] = random
        return nn.Parameter(random, False) if isinstance(tensor, nn.Parameter) else random

    twin, arguments = copy_of(module, tensor_of), () if extra is None else (extra,)
    try:
        outputs = type(module).forward(twin, x, *arguments)
    except ValueError:  # it expects three dimensions
        outputs = type(module).forward(twin, x[None], *arguments)
    named_outputs: dict[str, Tensor] = {}
    for tensor in outputs:
        name = "experts"
        if tensor.is_floating_point():
            name = "logits" if tensor.shape[-1] == len(tensors["weight"]) else "weights"
        named_outputs[name] = tensor.flatten(0, -2)
    if len(named_outputs) != len(outputs) or not {"weights", "experts"} <= set(named_outputs):
        raise ValueError(f"it returns {[*named_outputs]}")
    return named_outputs, tensors
