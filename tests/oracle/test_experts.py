"""Mixture of experts: a fused kernel call is bit-identical to running expert by expert, in any batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.moe import _default_apply_gate
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from support import sweep
from support.backends import by
from support.pairwise import slow_but
from support.routing_cases import (
    LENGTHS,
    ROUTED,
    SEQUENCES,
    WHOLE,
    batch,
    build,
    opened,
    other_experts,
    records,
)
from verbatim import kernels
from verbatim.model import experts as experts_module
from verbatim.model.decoder import Decoder
from verbatim.model.experts import (
    CLAMPED_HALVES,
    CLAMPED_PAIRS,
    CLAMPED_SPLIT,
    SOFTCAPPED,
    _limited,
    flat_experts,
    parts_of,
    project_chosen,
    run_experts,
    stack_of,
)
from verbatim.model.quantized import hold_quantized
from verbatim.model.router import AS_IS, SIGMOID, SOFTMAX, RouterForm, choose, router_parts
from verbatim.quantization.formats import Quantization
from verbatim.quantization.matrix import pack

needs_kernels = pytest.mark.skipif(
    kernels.library() is None, reason="there are no compiled kernels, whose bits these are"
)
NUM_EXPERTS, HIDDEN, INNER = 7, 100, 72
KINDS = [None, Quantization(8), Quantization(4), Quantization(4, 32)]
KINDS += [Quantization(8, activation_bits=8), Quantization(4, activation_bits=8)]


class Experts(nn.Module):
    """Experts as in the classes of transformers' experts interface."""

    def __init__(self, gated: bool, transposed: bool, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        noise = torch.Generator().manual_seed(3)
        self.num_experts, self.has_gate = NUM_EXPERTS, gated
        self.is_transposed, self.has_bias = transposed, bias
        self.has_post_expert_norm = False
        self.act_fn = nn.SiLU()
        width = INNER * (1 + gated)
        name = "gate_up_proj" if gated else "up_proj"
        for matrix, rows, cols in ((name, width, HIDDEN), ("down_proj", HIDDEN, INNER)):
            shape = (cols, rows) if transposed else (rows, cols)
            weight = torch.randn(NUM_EXPERTS, *shape, generator=noise) / cols**0.5
            setattr(self, matrix, nn.Parameter(weight.to(dtype), False))
            if bias:
                values = torch.randn(NUM_EXPERTS, rows, generator=noise).to(dtype)
                setattr(self, f"{matrix}_bias", nn.Parameter(values, False))

    _apply_gate = _default_apply_gate


class ClampedExperts(Experts):
    """gpt-oss' gate."""

    alpha, limit = 1.702, 1.5
    _apply_gate = GptOssExperts._apply_gate


class HalvesExperts(Experts):
    """MiniMax M3's gate."""

    swiglu_alpha, swiglu_limit = 1.702, 1.5

    def _apply_gate(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        gate, up = (
            gate.clamp(max=self.swiglu_limit),
            up.clamp(-self.swiglu_limit, self.swiglu_limit),
        )
        return (up + 1) * (gate * torch.sigmoid(gate * self.swiglu_alpha))


class SplitExperts(Experts):
    """The gate of HY V4 and DeepSeek V4."""

    limit = 1.5

    def _apply_gate(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return nn.functional.silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


class SoftcappedExperts(Experts):
    """The gate of Inkling 2."""

    def __init__(self, *options: Any) -> None:
        super().__init__(*options)
        self.act_fn = nn.Module()
        self.act_fn.gate_softcap = SimpleNamespace(softcap=1.5)
        self.act_fn.up_softcap = SimpleNamespace(softcap=0.7)

    def _apply_gate(self, x: Tensor) -> Tensor:
        gate, up = x.float().chunk(2, -1)
        capped = torch.tanh(gate / 1.5) * 1.5 * torch.sigmoid(gate)
        return (capped * torch.tanh(up / 0.7) * 0.7).to(x.dtype)


LIMITED = {
    ClampedExperts: CLAMPED_PAIRS,
    HalvesExperts: CLAMPED_HALVES,
    SplitExperts: CLAMPED_SPLIT,
    SoftcappedExperts: SOFTCAPPED,
}


def quantized(module: Any, kind: Quantization | None) -> Any:
    if kind is None:
        return module
    for name in list(module._parameters):
        parameter = module._parameters[name]
        if parameter.ndim != 3:
            continue
        packing = kind.packing(parameter.shape, parameter.dtype, module.is_transposed)
        packed = pack(parameter, packing)
        hold_quantized(module, name, packed, packing)
    return module


def choice(rows: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    noise = torch.Generator().manual_seed(seed)
    index = torch.rand(rows, NUM_EXPERTS, generator=noise).topk(k)[1]
    return index, torch.rand(rows, k, generator=noise)


def one_by_one(run: Callable[..., Tensor], *operands: Any) -> Tensor:
    """Run experts without the fused kernels: one matrix product at a time."""
    with pytest.MonkeyPatch.context() as without:
        without.setattr(experts_module.ExpertsParts, "struct_for", lambda parts, rows: None)
        return run(*operands)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=[k.name if k else "plain" for k in KINDS])
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_fused_experts_are_bit_identical_to_expert_by_expert(
    dtype: torch.dtype, kind: Quantization | None, transposed: bool
) -> None:
    noise = torch.Generator().manual_seed(1)
    x = torch.randn(300, HIDDEN, generator=noise).to(dtype)
    index, weights = choice(300, 3)
    for cls, gated, bias in (
        (Experts, True, False),
        *((limited, True, True) for limited in LIMITED),
        (Experts, False, True),
    ):
        module = quantized(cls(gated, transposed, bias, dtype), kind)
        assert parts_of(module).struct_for(x) is not None
        expected = one_by_one(flat_experts, module, x, index, weights)
        assert torch.isfinite(expected).all()
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            assert torch.equal(flat_experts(module, x, index, weights), expected), (cls, threads)
        torch.set_num_threads(1)
        for rows in (1, 2, 3, 8, 40):
            out = flat_experts(module, x[-rows:], index[-rows:], weights[-rows:])
            assert torch.equal(out, expected[-rows:]), (cls, rows)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cls", LIMITED)
def test_limited_gate_kernels_match_torch(cls: type[Experts], dtype: torch.dtype) -> None:
    parts = parts_of(module := cls(True, False, False, dtype))
    assert parts.glu == LIMITED[cls]
    x = 3 * torch.randn(50, 2 * INNER, generator=torch.Generator().manual_seed(4))
    x = torch.cat([x, torch.tensor([1e4, -1e4]).repeat_interleave(2 * INNER).view(2, -1)])
    x = x.to(dtype)
    gated = parts._gate(x)
    for expected in (module._apply_gate(x), _limited(x, parts.glu, parts.alpha, parts.limit)):
        tolerance = (
            dict(rtol=1e-5, atol=1e-6) if dtype is torch.float32 else dict(rtol=2.0**-6, atol=1e-6)
        )
        torch.testing.assert_close(gated, expected, **tolerance)
    assert parts._gate(torch.full_like(x, torch.nan)).isnan().all()


@needs_kernels
def test_sorted_rows_and_identity_experts_are_bit_identical() -> None:
    module = Experts(True, False, False, torch.bfloat16)
    x = torch.randn(20, HIDDEN, generator=torch.Generator().manual_seed(2)).bfloat16()
    counts = [4, 0, 0, 9, 7, 0, 0]
    fast = run_experts(module, x, counts)
    assert torch.equal(fast, one_by_one(run_experts, module, x, counts))
    module.num_routed_experts, module.total_experts = NUM_EXPERTS, NUM_EXPERTS + 2
    index = torch.tensor([[NUM_EXPERTS, 3], [NUM_EXPERTS + 1, NUM_EXPERTS]])
    weights = torch.tensor([[0.5, 0.25], [0.75, 0.25]])
    operands = module, x[:2], index, weights
    both = flat_experts(*operands), one_by_one(flat_experts, *operands)
    assert torch.equal(*both)
    assert torch.equal(both[0][1], x[1])


def test_float16_weights_run_without_kernels() -> None:
    module = Experts(True, False, False, torch.float16)
    x = torch.randn(5, HIDDEN).half()
    index, weights = choice(5, 2)
    assert parts_of(module).struct_for(x) is None
    assert flat_experts(module, x, index, weights).dtype is torch.float16


# ---- routing ----

FORMS = [
    RouterForm(4),
    RouterForm(4, normalized=True, rounded=True),
    RouterForm(3, SIGMOID, normalized=True, groups=4, top_groups=2, best_two=True, scale=2.5),
    RouterForm(3, SOFTMAX, groups=4, top_groups=2),
    RouterForm(4, AS_IS, SOFTMAX),
    RouterForm(4, AS_IS, SIGMOID, normalized=True, softcap=5.0),
]


@needs_kernels
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=range(len(FORMS)))
def test_router_kernel_matches_torch(form: RouterForm, corrected: bool) -> None:
    noise = torch.Generator().manual_seed(4)
    logits = torch.randn(200, 20, generator=noise) * 3
    correction = torch.randn(20, generator=noise) * 0.1 if corrected else None
    forced = torch.full((200, form.top_k), -1)
    forced[50:60] = torch.arange(form.top_k) * 2
    for forced_ids in (None, forced):
        weights, index = choose(logits, form, correction, forced_ids)
        expected = by("none", choose)(logits, form, correction, forced_ids)
        assert torch.equal(index, expected[1])
        torch.testing.assert_close(weights, expected[0], rtol=1e-5, atol=1e-7)
        for rows in (1, 7):
            alone = choose(
                logits[-rows:], form, correction, None if forced_ids is None else forced_ids[-rows:]
            )
            assert torch.equal(alone[0], weights[-rows:])


@pytest.mark.usefixtures("backend")
def test_equal_router_scores_pick_lowest_ids_and_nan_picks_valid_ids() -> None:
    _, index = choose(torch.zeros(2, 8), RouterForm(3, AS_IS, SOFTMAX))
    assert index.tolist() == [[0, 1, 2]] * 2
    _, index = choose(torch.full((1, 8), torch.nan), RouterForm(3))
    assert sorted(set(index[0].tolist())) == sorted(index[0].tolist())
    assert int(index.min()) >= 0 and int(index.max()) < 8


@needs_kernels
def test_default_dtype_does_not_change_routing() -> None:
    """Opening a model in another thread sets the default dtype for the whole process."""
    logits = torch.randn(64, 20, generator=torch.Generator().manual_seed(5))
    expected = choose(logits, FORMS[0])
    torch.set_default_dtype(torch.bfloat16)
    try:
        again = choose(logits, FORMS[0])
    finally:
        torch.set_default_dtype(torch.float32)
    assert again[0].dtype is torch.float32
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))


def test_router_with_unknown_scores_has_no_form() -> None:
    class Router(nn.Module):
        def __init__(self, score: nn.Module) -> None:
            super().__init__()
            self.top_k, self.score = 2, score
            self.weight = nn.Parameter(torch.randn(8, 16))

        def forward(self, x: Tensor) -> Any:
            logits = nn.functional.linear(x, self.weight)
            weights, index = self.score(logits).topk(self.top_k)
            return logits, weights, index

    assert router_parts(Router(nn.Sigmoid())) is not None
    assert router_parts(Router(nn.Softsign())) is None


# ---- whole models ----


IN_ONE_DTYPE = list(zip(ROUTED, itertools.cycle([torch.float32, torch.bfloat16])))


@needs_kernels
@pytest.mark.parametrize(("case", "dtype"), slow_but(IN_ONE_DTYPE[::3], IN_ONE_DTYPE))
def test_fused_and_plain_layers_have_same_bits_and_routing(case: str, dtype: torch.dtype) -> None:
    model = build(case).to(dtype)
    fused, plain = opened(model), opened(model)
    spec = plain.decoder.spec
    plain.decoder = Decoder(model, fused=False)
    plain.store = SEQUENCES.store(plain.decoder)
    works = [batch([0, 1, 2], WHOLE)]
    if spec.routed.layers and spec.routed.replay_reason is None:
        works.append(batch([0, 1, 2], WHOLE, forced_experts=torch.cat(other_experts(fused))))
    few = batch([0, 1, 2], WHOLE)
    few.logit_rows = torch.tensor([LENGTHS[0] - 1, sum(LENGTHS) - 1])
    for work in [*works, few]:
        assert torch.equal(fused.forward(work).logits, plain.forward(work).logits)
        for ours, theirs in zip(records(fused), records(plain), strict=True):
            assert torch.equal(ours, theirs)


@needs_kernels
@pytest.mark.parametrize(
    "case",
    slow_but(
        [*ROUTED[1::2], "dbrx", "jetmoe", "longcat_flash"],
        [*ROUTED, "dbrx", "jetmoe", "longcat_flash"],
    ),
)
def test_supported_moe_models_need_no_function_override(case: str) -> None:
    by_the_model = {"beam": {"exp"}, "deepseek_v2": {"mul"}, "lfm2_moe": {"silu"}}
    called = by_the_model.get(case, set())
    assert opened(build(case)).decoder.spec.needs_override == called


@needs_kernels
@pytest.mark.parametrize("kind", KINDS[1:])
def test_rows_times_chosen_quantized_matrices_are_as_one_by_one(kind: Quantization) -> None:
    stack = stack_of(quantized(Experts(False, False, False, torch.bfloat16), kind), "up_proj")
    rows, chosen = torch.randn(9, HIDDEN).bfloat16(), torch.arange(18).view(9, 2) % NUM_EXPERTS
    assert stack.num_matrices == NUM_EXPERTS
    out = project_chosen(stack, rows, chosen)
    for row, experts, products in zip(rows, chosen.tolist(), out, strict=True):
        expected = [stack.project(expert, row[None])[0] for expert in experts]
        assert torch.equal(products, torch.stack(expected))


def test_scores_that_a_router_rounds_are_rounded_before_the_choice() -> None:
    gate = build("lfm2_moe").bfloat16().model.layers[-1].feed_forward.gate
    parts, noise = router_parts(gate), torch.Generator().manual_seed(1)
    assert parts is not None and parts.form.rounded_scores
    rows = torch.randn(2000, gate.hidden_dim, generator=noise).bfloat16()
    bias = torch.randn(gate.num_experts, generator=noise) * 0.05
    logits, _, expected = gate(rows, bias)
    for function in (choose, by("none", choose)):
        chosen = function(logits.float(), parts.form, bias, None, torch.bfloat16)[1]
        assert torch.equal(chosen.sort(-1)[0], expected.sort(-1)[0])


@needs_kernels
def test_info_reports_how_experts_run() -> None:
    ways = {"qwen3_moe": "in the kernel call of their layer", "dbrx": "all in one kernel call"}
    for case, way in ways.items():
        runner = opened(build(case))
        assert runner.info()["experts"] == {way: runner.choices["routing"].layers}
    model = build("qwen3_moe")
    plain = Decoder(model, fused=False)
    assert plain.how_experts_run() == {"all in one kernel call": 4}
    assert Decoder(build("qwen3_moe").half()).how_experts_run() == {
        "expert by expert: no compiled kernels for them": 4
    }


@needs_kernels
def test_in_place_update_of_router_correction_takes_effect() -> None:
    model = build("deepseek_v3" if "glm4_moe" not in sweep.cases() else "glm4_moe")
    runner = opened(model)
    before = runner.forward(batch([0], WHOLE[:1])).logits
    for module in model.modules():
        if "e_score_correction_bias" in module._buffers:
            module._buffers["e_score_correction_bias"][0] = 50.0
    after = runner.forward(batch([0], WHOLE[:1])).logits
    assert not torch.equal(before, after)
    assert (records(runner)[0] == 0).any(-1).all()


def test_cached_expert_parts_do_not_keep_module_alive() -> None:
    module = Experts(True, False, False, torch.float32)
    parts_of(module)
    before = len(experts_module._parts)
    del module
    assert len(experts_module._parts) == before - 1


@pytest.mark.parametrize("gate", [torch.tanh, lambda x: nn.functional.silu(x.clamp(max=20.0))])
def test_experts_with_unknown_gate_are_rejected_by_kernels(gate: Callable[..., Tensor]) -> None:
    class Odd(Experts):
        def _apply_gate(self, x: Tensor) -> Tensor:
            return gate(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]

    with pytest.raises(Exception, match="has an unknown form"):
        parts_of(Odd(True, False, False, torch.float32))
