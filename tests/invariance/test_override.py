"""The override of torch functions (`InvariantMode`), active in modules that call them directly."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode

from support import sweep
from support.sweep_forward import logits_of, sequences
from support.toys import make_toy
from verbatim.model.decoder import Decoder
from verbatim.model.invariant import InvariantMode

# Classes whose own code calls an overridden function, each with a sibling or parent whose code does not.
CASES = {
    "apertus": ("XIELUActivation", "ApertusMLP"),
    "bamba": ("BambaMixer", "BambaDecoderLayer"),
    "beam": ("BeamModel", "BeamDecoderLayer"),
    "diffllama": ("DiffLlamaAttention", "DiffLlamaMLP"),
    # Through an activation from transformers' table.
    "kimi_linear": ("KimiLinearRMSNormGated", "KimiLinearMLP"),
    "roberta": ("RobertaLMHead", "RobertaLayer"),
}

KNOWN = [name for name in CASES if name in sweep.names()]  # known to this version of transformers


def logits(decoder: Decoder) -> Tensor:
    """Logits of three sequences in one forward, and of the first one alone."""
    store, whole = sequences().store(decoder), sequences().whole
    together = logits_of(decoder, [0, 1, 2], whole, store)
    return torch.cat([*together, *logits_of(decoder, [0], whole[:1], store)])


@pytest.mark.parametrize("name", KNOWN)
def test_override_is_active_only_in_modules_that_need_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = sweep.build(name)
    seen: dict[str, set[bool]] = {}

    def watch(cls: type[Any]) -> None:
        own = cls.forward

        def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
            active = isinstance(_get_current_function_mode(), InvariantMode)
            seen.setdefault(cls.__name__, set()).add(active)
            return own(self, *args, **kwargs)

        monkeypatch.setattr(cls, "forward", watched)

    for cls in {type(module) for module in model.modules()}:
        if cls.__name__ in CASES[name]:
            watch(cls)
    decoder = Decoder(model, fused=False)
    seen.clear()
    logits(decoder)
    caller, other = CASES[name]
    assert seen == {caller: {True}, other: {False}}


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_hook_activates_override_for_whole_forward_with_same_bits(
    name: str, dtype: torch.dtype
) -> None:
    model, modes = sweep.build(name).to(dtype), []
    decoder = Decoder(model, fused=False)
    expected = logits(decoder)
    (_, alone), *_ = sequences().whole
    assert torch.equal(expected[:alone], expected[-alone:])
    model.get_output_embeddings().register_forward_pre_hook(
        lambda *_: modes.append(_get_current_function_mode())
    )
    assert torch.equal(logits(decoder), expected)
    assert modes and all(isinstance(mode, InvariantMode) for mode in modes)


def test_complex_products_are_batch_invariant() -> None:
    noise = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 33, 4, generator=noise, dtype=torch.complex64)
    with InvariantMode():
        together, alone = x * y, torch.cat([x[i : i + 1] * y[i : i + 1] for i in range(33)])
        assert torch.equal(torch.multiply(x, y), together)
        assert torch.equal(torch.mul(x, y, out=torch.empty_like(x)), together)
    assert torch.equal(together, alone)


def test_overridden_mul_accepts_keyword_arguments() -> None:
    x = torch.randn(3, 4)
    with InvariantMode():
        assert torch.equal(torch.mul(input=x, other=x), x * x)
        assert torch.equal(torch.mul(x, other=x), x * x)


class Gated(nn.Module):
    """An MLP behind a gate. `Outer` calls its `forward` without `__call__`."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.mlp(torch.sigmoid(x @ self.weight) * x))


class Outer(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.inner = Gated(mlp)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner.forward(x)


class Rare(Gated):
    """A gate for some rows only, which the rows of an inspection may not include."""

    def forward(self, x: Tensor) -> Tensor:
        rare = x[..., 0] > 1.8
        x = x.clone()
        if rare.any():
            x[rare] = torch.sigmoid(x[rare] @ self.weight) * x[rare]
        return cast(Tensor, self.mlp(x))


@pytest.mark.parametrize(
    "classes", [(Outer, Outer, Outer), (Rare, Gated, Rare)], ids=["call", "branch"]
)
def test_custom_module_code_is_batch_invariant(classes: tuple[type[Any], ...]) -> None:
    torch.manual_seed(0)
    model = make_toy("llama")
    for layer, cls in zip(model.model.layers, classes, strict=True):
        layer.mlp = cls(layer.mlp)
    decoder = Decoder(model, fused=False)
    store, whole = sequences().store(decoder), sequences().whole
    together = torch.cat(logits_of(decoder, [0, 1, 2], whole, store))
    rows = [
        logits_of(decoder, [i], [(t, t + 1)], store)[0]
        for i, span in enumerate(whole)
        for t in range(*span)
    ]
    assert torch.equal(together, torch.cat(rows))
