"""Kernels of norms and activations: accurate, and bit-identical for a row in any batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.odd_toys import DTYPES
from support.toys import make_toy
from verbatim import kernels
from verbatim.kernels.options import Activation, NormKind
from verbatim.model import elementwise, invariant, norms
from verbatim.model.differential import bit_equal
from verbatim.model.norms import Gate, find_norm, formula, norm_forward

WIDTHS = (1, 15, 16, 17, 60, 128, 1000)
KINDS = [kind for kind in NormKind if kind]


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(params=sorted(kernels.available()))
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with the kernels of every instruction set."""
    monkeypatch.setattr(kernels, "requested", lambda: request.param)


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name.lower())
def test_norm_kernels_agree_with_the_formula(kind: NormKind, dtype: str) -> None:
    for width in WIDTHS:
        x = noise(50, width, dtype=DTYPES[dtype]) * torch.logspace(-3, 2, 50)[:, None]
        x = x.to(DTYPES[dtype])
        weight = None if kind is NormKind.BARE else noise(width, dtype=DTYPES[dtype], seed=1)
        centered = kind >= NormKind.CENTERED
        bias = noise(width, dtype=DTYPES[dtype], seed=2) if centered else None
        ours = elementwise.norm(x, weight, 1e-5, kind, bias)
        expected = formula(x, weight, 1e-5, kind, bias)
        near = 3e-6 if centered else 0.0  # for numbers that cancel
        if dtype == "float32":
            torch.testing.assert_close(ours, expected, rtol=2e-6, atol=near)
        else:  # another order of the sum changes a rounding now and then
            torch.testing.assert_close(ours, expected, rtol=2.0**-7, atol=near)
            assert float((ours != expected).float().mean()) < 0.002


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_a_row_is_bit_identical_in_any_batch(dtype: str) -> None:
    x, weight = noise(300, 1000, dtype=DTYPES[dtype]), noise(1000, dtype=DTYPES[dtype], seed=1)
    for kind in KINDS:
        given = None if kind is NormKind.BARE else weight
        alone = [elementwise.norm(row[None], given, 1e-6, kind) for row in x[::37]]
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            together = elementwise.norm(x, given, 1e-6, kind)[::37]
            assert bit_equal(together, torch.cat(alone)), f"{kind.name}, {threads} threads"


EXACT: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: lambda x: x / (1 + torch.exp(-x)),
    Activation.GELU_TANH: lambda x: (
        0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))
    ),
    Activation.SIGMOID: lambda x: 1 / (1 + torch.exp(-x)),
    Activation.EXP: torch.exp,
    Activation.SOFTPLUS: lambda x: x.clamp(min=0) + torch.log1p(torch.exp(-x.abs())),
    Activation.GELU: nn.functional.gelu,
    Activation.RELU: nn.functional.relu,
    Activation.RELU_SQUARED: lambda x: nn.functional.relu(x).square(),
}
# Of infinity, 0, -0, 3e38 and -3e38.
LIMITS = {
    Activation.SIGMOID: [1.0, 0.5, 0.5, 1.0, 0.0],
    Activation.EXP: [torch.inf, 1.0, 1.0, torch.inf, 0.0],
    Activation.SOFTPLUS: [torch.inf, math.log(2), math.log(2), 3.0e38, 0.0],
    Activation.RELU_SQUARED: [torch.inf, 0.0, 0.0, torch.inf, 0.0],
}


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", Activation, ids=lambda a: a.name.lower())
def test_activations_are_accurate_and_independent_of_neighbours(
    activation: Activation, dtype: str
) -> None:
    x = torch.cat([noise(5000) * 4, torch.linspace(-120, 120, 3001)]).to(DTYPES[dtype])
    if activation is Activation.EXP:
        x = x.clamp(max=86.5)  # infinite above 87
    exact = EXACT[activation](x.double())
    ours = elementwise.activate(x, activation)
    digits = 2.0**-7 if dtype == "bfloat16" else 2e-6
    torch.testing.assert_close(ours.double(), exact, rtol=digits, atol=2e-6)
    pieces = [elementwise.activate(piece, activation) for piece in x.split(7)]
    assert bit_equal(torch.cat(pieces), ours)


@pytest.mark.parametrize("activation", Activation, ids=lambda a: a.name.lower())
def test_activations_of_nan_infinity_zero_and_extreme_values(activation: Activation) -> None:
    odd = torch.tensor([torch.inf, torch.nan, 0.0, -0.0, 3.0e38, -3.0e38])
    ours = elementwise.activate(odd, activation)
    assert ours[1].isnan()
    expected = torch.tensor(LIMITS.get(activation, [torch.inf, 0.0, 0.0, 3.0e38, 0.0]))
    torch.testing.assert_close(ours[[0, 2, 3, 4, 5]], expected, rtol=1e-6, atol=0.0)


def test_clamped_subclass_of_an_activation_is_not_recognized() -> None:
    class Clamped(nn.SiLU):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).clamp(max=20.0)

    assert elementwise.activation_of(Clamped()) is None
    assert elementwise.activation_of(nn.SiLU()) is Activation.SILU


FAMILIES = {
    "llama": NormKind.ROUNDED,
    "qwen3": NormKind.ROUNDED,
    "deepseek_v3": NormKind.ROUNDED,
    "olmo2": NormKind.WIDE,
    "gpt_oss": NormKind.WIDE,
    "gemma2": NormKind.ONE_PLUS,
    "gemma3": NormKind.ONE_PLUS,
    "gpt2": NormKind.CENTERED,
    "cohere": NormKind.CENTERED,
    "nemotron": NormKind.CENTERED_ONE_PLUS,
    "olmo": NormKind.CENTERED,
}


@pytest.mark.parametrize("name", FAMILIES)
def test_kind_of_a_models_norms_is_recognized(name: str) -> None:
    model = make_toy(name)
    found = [find_norm(m) for m in model.modules() if "Norm" in type(m).__name__]
    assert found
    assert {None if parts is None else parts.kind for parts in found} == {FAMILIES[name]}


class MeanNorm(nn.Module):
    """Named and built like an RMS norm, but subtracts the mean."""

    def __init__(self, **fields: Any) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(64)), 1e-6
        self.__dict__.update(fields)

    def normed(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return self.weight * self.normed(x)


class HalfWeightedNorm(MeanNorm):
    """Equals an RMS norm only with weight 1, as in a new model."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.normed(x.float()) * (0.5 + 0.5 * self.weight.float())).to(x.dtype)


class SwitchedNorm(MeanNorm):
    """Applies its weight unless `bare` is set."""

    def forward(self, x: Tensor) -> Tensor:
        normed = self.normed(x.float()).to(x.dtype)
        return normed if self.bare else self.weight * normed


def test_unrecognized_norms_keep_their_forward() -> None:
    for cls in (MeanNorm, HalfWeightedNorm):
        assert find_norm(cls()) is None
        assert norm_forward(cls()) is None


def test_norm_recognition_depends_on_settings_of_the_instance() -> None:
    assert find_norm(SwitchedNorm(bare=True)) is None
    parts = find_norm(SwitchedNorm(bare=False))
    assert parts is not None and parts.kind is NormKind.ROUNDED


class ScaledNorm(MeanNorm):
    """Equals an RMS norm only with factor 1, as in the first layer of a model that scales by depth."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.normed(x.float()).to(x.dtype) * self.factor


def test_norm_recognition_is_not_shared_with_an_instance_of_another_factor() -> None:
    parts = find_norm(ScaledNorm(factor=1.0))
    assert parts is not None and parts.kind is NormKind.ROUNDED
    assert find_norm(ScaledNorm(factor=0.5)) is None


class GateFirstNorm(MeanNorm):
    """As in Mamba-2, the gate is applied before the mean of squares."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        gated = x.float() * nn.functional.silu(gate.float())
        return self.weight * self.normed(gated).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "place", "gate"),
    [
        ("qwen3_5", "linear_attn.norm", Gate.AFTER),
        ("granite_hybrid", "mamba.norm", Gate.BEFORE),
        ("nemotron_h", "mixer.norm", Gate.BEFORE),
        ("kimi_linear", "o_norm", Gate.SIGMOID),
    ],
)
def test_gated_norm_is_accurate_and_bit_identical_in_any_batch(
    name: str, place: str, gate: Gate, dtype: str
) -> None:
    model = make_toy(name, dtype=DTYPES[dtype])
    norm = next(m for n, m in model.named_modules() if n.endswith(place))
    parts, forward = find_norm(norm, gate), norm_forward(norm)
    assert parts is not None and forward is not None
    assert parts.kind is (NormKind.WIDE if gate is Gate.SIGMOID else NormKind.ROUNDED)
    assert not any(find_norm(norm, other) for other in Gate if other is not gate)
    norm.weight = nn.Parameter(noise(len(norm.weight), dtype=DTYPES[dtype], seed=3))
    rows = [noise(40, len(norm.weight), dtype=DTYPES[dtype], seed=s) for s in (1, 2)]
    with torch.no_grad():
        ours, theirs = forward(*rows), type(norm).forward(norm, *rows)
        pieces = [forward(*some) for some in zip(*(x.split(7) for x in rows), strict=True)]
    torch.testing.assert_close(
        ours, theirs, rtol=2.0**-6 if dtype == "bfloat16" else 3e-6, atol=1e-7
    )
    assert bit_equal(torch.cat(pieces), ours)


def test_norm_gated_before_normalization_is_recognized_separately() -> None:
    assert find_norm(GateFirstNorm(), Gate.AFTER) is None
    parts = find_norm(GateFirstNorm(), Gate.BEFORE)
    assert parts is not None and parts.kind is NormKind.ROUNDED


@pytest.mark.parametrize("epsilon", [0.5, 1])
def test_norm_reads_weight_and_epsilon_in_every_call(epsilon: float) -> None:
    norm = make_toy("llama").model.norm
    forward, x = norm_forward(norm), noise(3, 64)
    assert forward is not None
    norm.variance_epsilon = epsilon
    norm.weight = nn.Parameter(noise(64, seed=3))
    expected = formula(x, norm.weight.detach(), float(epsilon), NormKind.ROUNDED)
    with torch.no_grad():
        torch.testing.assert_close(forward(x), expected, rtol=2e-6, atol=0.0)


def test_unsupported_dtypes_and_gradients_use_the_original_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    norm = make_toy("llama").model.norm
    forward = norm_forward(norm)
    assert forward is not None
    called: list[Any] = []
    monkeypatch.setattr(elementwise, "norm", lambda *args: called.append(args))
    x = noise(3, 64).double()
    with torch.no_grad():
        assert torch.equal(forward(x), type(norm).forward(norm, x))
        half = norm.half()
        assert torch.equal(forward(x.half()), type(half).forward(half, x.half()))
    assert forward(noise(3, 64)).requires_grad and not called  # a gradient is required
    assert invariant.silu(noise(3, 64).requires_grad_()).requires_grad


def test_strided_rows_give_the_same_bits() -> None:
    x, weight = noise(1, 5, 4, 64).transpose(1, 2), noise(64, seed=1)
    ours = elementwise.norm(x, weight, 1e-6, NormKind.WIDE)
    rows = elementwise.norm(x.reshape(-1, 64), weight, 1e-6, NormKind.WIDE)
    assert ours.shape == x.shape and bit_equal(ours.reshape(-1, 64), rows)


def test_norm_with_a_patched_class_forward_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "_families", {})
    assert find_norm(SwitchedNorm(bare=False)) is not None
    monkeypatch.setattr(SwitchedNorm, "forward", MeanNorm.forward)
    assert find_norm(SwitchedNorm(bare=False)) is None
