"""Hidden states: inputs of the LM head in the rows that have logits; the model is left unchanged."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from support import sweep
from support.routing_cases import IDS, LENGTHS, WHOLE, batch, opened
from support.toys import build, make_toy
from verbatim.errors import NotSupported

# Architecture -> whether its logits are the unmodified output of the LM head.
MODELS = {
    "llama": True,
    "llama:tied": True,
    "gemma2": False,
    "granite": False,
    "gpt2": True,
    "opt": True,
    "mpt": True,
    "qwen3_moe": True,
    "gpt_oss": True,
    "deepseek_v3": True,
    "whisper": True,  # has no logits_to_keep
}


def hidden_of(runner: Any, which: list[int], spans: list[tuple[int, int]], **fields: Any) -> Tensor:
    work = batch(which, spans, wants_hidden=True)
    for name, value in fields.items():
        setattr(work, name, value)
    hidden = runner.forward(work).hidden
    assert hidden is not None
    return hidden  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", MODELS)
def test_hidden_states_are_lm_head_inputs(case: str, dtype: torch.dtype) -> None:
    model = sweep.build(case).to(dtype)
    runner = opened(model)
    assert runner.hidden_reason is None
    forward = runner.forward(batch([0, 1, 2], WHOLE, wants_hidden=True))
    assert forward.hidden is not None
    assert forward.hidden.dtype == dtype and forward.hidden.shape == (28, model.config.hidden_size)
    assert runner.forward(batch([0, 1, 2], WHOLE)).hidden is None
    if dtype == torch.float32:
        for s, ours in enumerate(forward.hidden.split(LENGTHS)):
            with torch.no_grad():
                inputs = {"input_ids": torch.tensor([IDS[s]]), "use_cache": False}
                theirs = model(**inputs, output_hidden_states=True).hidden_states[-1][0]
            assert float((ours - theirs).abs().max()) < 1e-5 * max(1.0, float(theirs.abs().max()))
    if MODELS[case]:
        logits = F.linear(forward.hidden, model.get_output_embeddings().weight.detach())
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        scale = float(forward.logits.abs().max())
        assert float((logits - forward.logits).abs().max()) < tolerance * scale


def test_hidden_states_are_plain_tensor_with_own_storage() -> None:
    model = make_toy("llama")
    runner = opened(model)
    with torch.inference_mode():
        first = hidden_of(runner, [0], WHOLE[:1])
    assert not first.is_inference() and not first.requires_grad
    assert first.untyped_storage().nbytes() == first.nbytes
    kept = first.clone()
    hidden_of(runner, [1], WHOLE[1:2])
    assert torch.equal(first, kept)
    nn.Linear(64, 4)(first).sum().backward()  # a probe can be trained on them


class Wrapped(nn.Module):
    """A wrapper like DistributedDataParallel."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def test_lm_head_is_found_inside_wrapper() -> None:
    model = make_toy("llama")
    expected = hidden_of(opened(model), [0], WHOLE[:1])
    assert torch.equal(hidden_of(opened(Wrapped(model)), [0], WHOLE[:1]), expected)


def test_hidden_states_are_inputs_of_lora_adapted_lm_head() -> None:
    from peft import LoraConfig, get_peft_model

    model = make_toy("llama")
    expected = hidden_of(opened(model), [0], WHOLE[:1])
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT uses a deprecated name
        config = LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)
        adapted = get_peft_model(model, config).eval()
    assert torch.equal(hidden_of(opened(adapted), [0], WHOLE[:1]), expected)


def test_hidden_states_include_changes_by_user_pre_hooks() -> None:
    model = make_toy("llama")
    runner = opened(model)
    plain = hidden_of(runner, [0], WHOLE[:1])
    kept: list[Tensor] = []

    def double(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        kept.append(args[0] * 2)
        return (kept[-1],)

    handle = model.lm_head.register_forward_pre_hook(double)
    found = hidden_of(runner, [0], WHOLE[:1])
    handle.remove()
    assert torch.equal(found, plain * 2)
    kept[0].zero_()  # the result does not share memory with the hook's tensor
    assert torch.equal(found, plain * 2)
    assert torch.equal(hidden_of(runner, [0], WHOLE[:1]), plain)


def _hooks(model: nn.Module) -> list[Any]:
    fields = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks")
    return [[list(getattr(m, field).items()) for field in fields] for m in model.modules()]


def test_live_model_hooks_and_attributes_are_restored() -> None:
    model = make_toy("llama").train()
    handle = model.lm_head.register_forward_pre_hook(lambda *_: None)
    before = _hooks(model), [sorted(m.__dict__) for m in model.modules()]
    runner = opened(model)
    expected = hidden_of(runner, [0], WHOLE[:1])
    assert (_hooks(model), [sorted(m.__dict__) for m in model.modules()]) == before

    def fail(*_: Any) -> None:
        raise RuntimeError("a hook that fails")

    for layer in (model.model.layers[1], model.lm_head):
        failing = layer.register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="a hook that fails"):
            hidden_of(runner, [0], WHOLE[:1])
        failing.remove()
        assert (_hooks(model), [sorted(m.__dict__) for m in model.modules()]) == before
    assert model.training
    assert torch.equal(hidden_of(runner, [0], WHOLE[:1]), expected)
    handle.remove()


class _TwiceLlama(LlamaForCausalLM):
    """Runs its LM head twice in a forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        self.lm_head(torch.zeros(1, 1, self.config.hidden_size, dtype=out.logits.dtype))
        return out


class _HeadlessLlama(LlamaForCausalLM):
    """Has no output embeddings."""

    def get_output_embeddings(self) -> Any:
        return None


@pytest.mark.parametrize(
    ("cls", "why"), [(_TwiceLlama, "runs 2 times in a forward"), (_HeadlessLlama, "has no LM head")]
)
def test_model_without_single_lm_head_is_rejected(cls: Any, why: str) -> None:
    runner = opened(build(cls, make_toy("llama").config))
    assert runner.hidden_reason is not None and why in runner.hidden_reason
    runner.forward(batch([0], WHOLE[:1]))
    with pytest.raises(NotSupported, match=f"no hidden states: .*{why}"):
        runner.forward(batch([0], WHOLE[:1], wants_hidden=True))
