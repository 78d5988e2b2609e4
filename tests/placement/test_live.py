"""A live module is used in place and restored afterwards."""

from __future__ import annotations

import asyncio
import copy
import gc
import inspect
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, eager_attention_forward

import verbatim
from support.programs import PATIENCE_S, in_thread
from support.toys import make_toy, random_ids, scores_of
from verbatim import LLM, InvalidRequest, SamplingParams, VerbatimError
from verbatim.api.tensors import _engines
from verbatim.errors import ModelChanged, UnsupportedModel
from verbatim.model import patching

PROMPT = random_ids(12, seed=8)
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


def greedy(llm: LLM) -> list[int]:
    return llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids


def eager_logits(model: Any, ids: list[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([ids])).logits[0]


def own_answer(model: Any) -> list[int]:
    """Return greedy tokens from the module's own forward, without a KV cache."""
    ids = list(PROMPT)
    with torch.no_grad():
        for _ in range(10):
            ids.append(int(eager_logits(model, ids)[-1].argmax()))
    return ids[len(PROMPT) :]


def train_step(model: Any) -> float:
    model.train()
    ids = torch.tensor([PROMPT])
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.5 * parameter.grad
                parameter.grad = None
    return loss.item()


def test_training_step_is_used_by_next_generation_without_copy() -> None:
    model = make_toy("qwen3")
    addresses = [p.data_ptr() for p in model.parameters()]
    with LLM(model) as llm:
        before = greedy(llm)
        for _ in range(3):
            train_step(model)
        after = greedy(llm)
        assert after != before
        assert after == own_answer(model.eval())
    assert [p.data_ptr() for p in model.parameters()] == addresses
    assert all(p.requires_grad for p in model.parameters())


def test_modes_config_and_attributes_are_restored_after_success_and_error() -> None:
    model = make_toy("qwen3_moe").train()
    model.model.layers[1].eval()  # a mixture of modes is kept as it was
    modes = [m.training for m in model.modules()]
    settings = copy.deepcopy(model.config.__dict__)
    attributes = [set(m.__dict__) for m in model.modules()]

    def as_it_was() -> bool:
        return (
            [m.training for m in model.modules()] == modes
            and [set(m.__dict__) for m in model.modules()] == attributes
            and {k: v for k, v in model.config.__dict__.items() if k.startswith("_attn")}
            == {k: v for k, v in settings.items() if k.startswith("_attn")}
        )

    with LLM(model) as llm:
        greedy(llm)
        assert as_it_was()

        def explode(*_: Any) -> None:
            raise KeyError("from the user's hook")

        hook = model.model.layers[2].register_forward_hook(explode)
        with pytest.raises(KeyError, match="from the user's hook"):
            greedy(llm)
        hook.remove()
        assert as_it_was()
        assert llm.stats()["blocks_used"] == 0
        assert len(greedy(llm)) == 10


def test_opening_runs_no_user_hooks() -> None:
    model = make_toy("llama")
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    model.model.layers[0].register_forward_pre_hook(lambda *_: calls.append(2))
    with LLM(model) as llm:
        assert calls == []
        greedy(llm)
        assert calls.count(1) == 10 and calls.count(2) == 10
    assert len(model._forward_hooks) == 1


def pruned(path: str, name: str = "weight") -> Callable[[Any], Any]:
    def edit(model: Any) -> None:
        layer = model.get_submodule(path)
        nn.init.normal_(getattr(layer, name))  # biases of toys are zeros
        prune.l1_unstructured(layer, name, amount=0.5)

    return edit


def edited(path: str, name: str, value: Any) -> Callable[[Any], Any]:
    return lambda m: setattr(m.get_submodule(path), name, value)


@pytest.mark.parametrize(
    ("toy", "edit"),
    [
        ("qwen3_moe", edited("model.layers.1.mlp.experts", "act_fn", nn.Tanh())),
        ("qwen3_moe", edited("model.layers.1.mlp.gate", "norm_topk_prob", True)),
        ("gpt_oss", edited("model.layers.1.mlp.experts", "limit", 0.3)),
        ("llama", pruned("model.layers.1.mlp.up_proj")),
        ("llama", pruned("model.norm")),
        ("llama", pruned("lm_head")),
        ("gpt2", pruned("transformer.ln_f", "bias")),
        ("gpt_oss", pruned("model.layers.1.mlp.router", "bias")),
        ("gpt_oss", pruned("model.layers.1.mlp.experts", "gate_up_proj_bias")),
    ],
)
def test_edited_module_gives_scores_of_module_forward(toy: str, edit: Any) -> None:
    model = make_toy(toy)
    with LLM(model) as llm:
        before = llm.score(PROMPT)[1:]
        edit(model)
        expected = scores_of(model, PROMPT)
        after = llm.score(PROMPT)[1:]
        assert after == pytest.approx(expected.tolist(), abs=1e-4) and after != before
    with LLM(model) as llm:
        assert llm.score(PROMPT)[1:] == after


def adapt(model: Any, *parameters: str) -> Any:
    """Return the model with LoRA layers of PEFT, also for these parameters."""
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT uses a deprecated name
        settings = LoraConfig(
            r=4,
            target_modules=["k_proj", "v_proj"],
            target_parameters=parameters,
            init_lora_weights=False,
        )
        return get_peft_model(model, settings).eval()


def add_adapters(model: Any) -> Any:
    adapted = adapt(model)
    with torch.random.fork_rng():
        adapted.add_adapter("other", adapted.peft_config["default"])
    return adapted.eval()


def rescale(model: Any) -> None:
    for layer in model.modules():
        if isinstance(getattr(layer, "scaling", None), dict):
            layer.scaling["default"] *= 3


def unchanged(model: Any) -> Any:
    return model


class Counting(nn.Module):
    """Counts its calls, in an attribute and in a buffer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.num_calls = inner, 0
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        self.count += 1
        return self.inner(x)


def counting(model: Any) -> Any:
    model.model.layers[1].mlp = Counting(model.model.layers[1].mlp)
    return model


MLP = "model.layers.0.mlp"


@pytest.mark.parametrize(
    ("prepare", "edit"),
    [
        (unchanged, edited("model.layers.0.input_layernorm", "variance_epsilon", 0.5)),
        (unchanged, lambda m: m.model.rotary_emb.inv_freq.mul_(0.5)),
        (unchanged, lambda m: m.get_submodule(MLP).register_forward_hook(lambda m, i, o: 3 * o)),
        (unchanged, edited(MLP, "forward", lambda x: 3 * x)),
        (unchanged, edited(MLP, "act_fn", nn.Tanh())),
        (counting, edited("model.layers.1.mlp.inner", "act_fn", nn.Tanh())),
        (add_adapters, lambda m: m.set_adapter("other")),
        (add_adapters, lambda m: m.disable_adapter_layers()),
        (add_adapters, lambda m: m.merge_adapter(["other"])),
        (add_adapters, rescale),
    ],
)
def test_edits_drop_keys_and_values_of_sessions_and_streams(prepare: Any, edit: Any) -> None:
    model = prepare(make_toy("llama"))
    with LLM(model) as llm, llm.session(seed=3) as session:
        stream = llm.stream(PROMPT, GREEDY)
        session.generate(PROMPT, GREEDY)
        ids = PROMPT + next(stream).token_ids
        assert llm.stats()["weight_version"] == 0
        edit(model)
        turn = session.generate(PROMPT, GREEDY)
        rest = [i for delta in stream for i in delta.token_ids]
        assert llm.stats()["weight_version"] == 1
    with LLM(model) as llm:
        expected = llm.generate(turn.prompt_token_ids, GREEDY)[0].outputs[0]
        assert turn.outputs[0].logprobs == expected.logprobs
        ids += rest[: len(rest) - 5]
        expected = llm.generate(ids, GREEDY.replace(max_tokens=5))[0].outputs[0]
        assert rest[-5:] == expected.token_ids


@pytest.mark.parametrize("fused", [True, False])
def test_replaced_configs_do_not_join_sequences(fused: bool) -> None:
    model = make_toy("llama")
    with LLM(model, fused=fused) as llm:
        before = llm.score([PROMPT, PROMPT[::-1]])
        for layer in model.model.layers:
            layer.self_attn.config = copy.deepcopy(model.config)
        assert llm.score([PROMPT, PROMPT[::-1]]) == before
    assert {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")} == {
        "sdpa"
    }


@pytest.mark.parametrize(
    ("toy", "edit", "error"),
    [
        # Its layers keep their window; their mask, and so the module's own forward, does not.
        ("gemma2", lambda m: setattr(m.config, "sliding_window", 3), UnsupportedModel),
        ("gemma2", lambda m: m.config.layer_types.reverse(), UnsupportedModel),
        ("qwen3_moe", edited("model.layers.1.mlp.gate", "top_k", 1), ModelChanged),
    ],
)
def test_edit_that_contradicts_layers_is_rejected(toy: str, edit: Any, error: Any) -> None:
    model = make_toy(toy, num_hidden_layers=2)
    with LLM(model) as llm:
        llm.score(PROMPT)
        edit(model)
        with pytest.raises(error):
            llm.score(PROMPT)


class Clamped(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).clamp(-0.5, 0.5)


def biased(attention: Any) -> None:
    attention.kv_b_proj.bias = nn.Parameter(torch.ones(attention.kv_b_proj.out_features))


def clamped(attention: Any) -> None:
    weight = attention.kv_b_proj.weight
    attention.kv_b_proj = Clamped(weight.shape[1], weight.shape[0], bias=False)
    attention.kv_b_proj.weight = weight


def shifted(attention: Any) -> None:
    attention.kv_b_proj.register_forward_hook(lambda m, i, out: out + 1)


def with_forward(attention: Any) -> None:
    linear = attention.kv_b_proj
    linear.forward = lambda x: nn.functional.linear(x, linear.weight) * 2


def with_doubled_values(attention: Any) -> None:
    class Doubling(type(attention)):  # type: ignore[misc]
        def expand_kv(self, *args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            keys, values = super().expand_kv(*args)
            return keys, 2 * values

    attention.__class__ = Doubling


@pytest.mark.parametrize(
    "edit", [biased, clamped, shifted, with_forward, with_doubled_values], ids=lambda e: e.__name__
)
def test_latent_vectors_are_stored_only_if_they_are_multiplied_with_a_matrix(edit: Any) -> None:
    model = make_toy("deepseek_v3", num_hidden_layers=2)
    with LLM(model) as llm:
        llm.score(PROMPT)
        edit(model.model.layers[1].self_attn)
        with pytest.raises(ModelChanged, match="open it again"):
            llm.score(PROMPT)
    with LLM(model) as llm:
        assert [shape.latent for shape in llm.engine.runner.decoder.spec.layers] == [True, False]
        expected = scores_of(model, PROMPT).tolist()
        assert llm.score(PROMPT)[1:] == pytest.approx(expected, abs=1e-4)


def test_hook_may_call_another_model_with_latent_attention() -> None:
    model = make_toy("deepseek_v3", num_hidden_layers=2)
    other = make_toy("deepseek_v3", num_hidden_layers=2, seed=1, attn_implementation="eager")
    expected, outputs = scores_of(other, PROMPT), []
    with LLM(model) as llm:
        plain = greedy(llm)
        model.model.norm.register_forward_hook(lambda *_: outputs.append(scores_of(other, PROMPT)))
        assert greedy(llm) == plain
    assert len(outputs) == 10
    torch.testing.assert_close(outputs, [expected] * 10, atol=1e-4, rtol=0)


def test_attention_may_pass_its_keys_as_values() -> None:
    class Tied(LlamaAttention):
        def forward(
            self, hidden_states: Any, position_embeddings: Any, attention_mask: Any, **options: Any
        ) -> Any:
            heads = (*hidden_states.shape[:-1], -1, self.head_dim)
            q, k = (p(hidden_states).view(heads) for p in (self.q_proj, self.k_proj))
            q, k = q.transpose(1, 2), k.transpose(1, 2)
            name = self.config._attn_implementation
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)
            scaling = self.scaling
            out, _ = attend(self, q, k, k, attention_mask, scaling=scaling, is_causal=True)
            return self.o_proj(out.flatten(2)), None

    model = make_toy("llama", num_hidden_layers=2)
    for layer in model.model.layers:
        layer.self_attn.__class__ = Tied
    with LLM(model) as llm:
        expected = scores_of(model, PROMPT).tolist()
        assert llm.score(PROMPT)[1:] == pytest.approx(expected, abs=1e-4)


def test_hook_and_parametrization_affect_generation_like_module_forward() -> None:
    class Doubled(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * -2

    model = make_toy("llama")
    with LLM(model) as llm:
        plain = greedy(llm)
        hook = model.model.layers[1].mlp.up_proj.register_forward_hook(lambda m, i, out: out * 3)
        assert greedy(llm) == own_answer(model) != plain
        hook.remove()
        assert greedy(llm) == plain
        layer = model.model.layers[1].self_attn.o_proj
        parametrize.register_parametrization(layer, "weight", Doubled())
        assert greedy(llm) == own_answer(model) != plain
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
        assert greedy(llm) == plain


def test_lora_layers_give_tokens_of_module_forward() -> None:
    model = make_toy("llama")
    with LLM(model) as llm:
        plain = greedy(llm)
    adapted = adapt(model)
    with LLM(adapted) as llm:
        tokens = greedy(llm)
        assert tokens == own_answer(adapted) != plain
    merged = adapted.merge_and_unload()
    with LLM(merged) as llm:
        assert greedy(llm) == tokens


@pytest.mark.parametrize("toy", ["mixtral", "gpt_oss"])
def test_lora_on_experts_gives_scores_of_module_forward(toy: str) -> None:
    adapted = adapt(make_toy(toy), "mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    with LLM(adapted) as llm:
        greedy(llm)
        assert llm.stats()["weight_version"] == 0  # though PEFT's forward counts as writing
        seen = []
        for change in (unchanged, train_step, lambda m: m.disable_adapter_layers()):
            change(adapted)
            seen.append(llm.score(PROMPT)[1:])
            expected = scores_of(adapted.eval(), PROMPT)
            assert seen[-1] == pytest.approx(expected.tolist(), abs=1e-4)
            assert llm.score([PROMPT, PROMPT[:5]])[0][1:] == seen[-1]
        assert seen[0] != seen[1] != seen[2]


def test_interleaved_engines_and_training_are_bit_identical() -> None:
    def run(interleaved: bool) -> tuple[Any, ...]:
        first, second, trained = make_toy("llama"), make_toy("gemma2"), make_toy("llama", seed=1)
        losses: list[float] = []
        with LLM(first) as a, LLM(second) as b:
            streams = [llm.stream(PROMPT, SamplingParams(seed=3, max_tokens=8)) for llm in (a, b)]
            outputs: list[list[Any]] = [[], []]
            if interleaved:
                for deltas in zip(*streams, strict=False):
                    losses.append(train_step(trained))
                    for out, delta in zip(outputs, deltas, strict=True):
                        out.append((delta.token_ids, delta.logprobs))
            for out, stream in zip(outputs, streams, strict=True):
                out.extend((delta.token_ids, delta.logprobs) for delta in stream)
        while len(losses) < 8:
            losses.append(train_step(trained))
        return outputs, losses, [p.detach().clone() for p in trained.parameters()]

    apart, mixed = run(False), run(True)
    assert mixed[0] == apart[0] and mixed[1] == apart[1]
    assert all(torch.equal(p, q) for p, q in zip(mixed[2], apart[2], strict=True))


def test_hook_may_use_another_engine_only_if_it_is_idle() -> None:
    first, second = make_toy("llama"), make_toy("llama", seed=1)
    with LLM(first) as a, LLM(second) as b:
        expected, errors = greedy(b), []
        results: list[Any] = []
        stepping, go_on = threading.Event(), threading.Event()

        def use_the_other(*_: Any) -> None:
            calls = (lambda: greedy(b), b.stats, lambda: asyncio.run(b.agenerate(PROMPT, GREEDY)))
            for call in calls:
                try:
                    results.append(call())
                except VerbatimError as error:
                    errors.append(str(error))

        hook = first.model.layers[0].register_forward_hook(use_the_other)
        greedy(a)
        assert results[0] == expected and len(results) == 20 and len(errors) == 10

        def halt(request: Any, logits: torch.Tensor) -> torch.Tensor:
            stepping.set()
            go_on.wait(PATIENCE_S)
            return logits

        results.clear()
        errors.clear()
        halting = SamplingParams(temperature=0.0, max_tokens=2, logits_processors=[halt])
        caller = in_thread(b.generate, PROMPT, halting)
        assert stepping.wait(PATIENCE_S)
        greedy(a)
        go_on.set()
        caller.result()
        assert not results and len(errors) == 30
        assert all("from inside another engine's forward" in message for message in errors)
        hook.remove()
        assert greedy(b) == expected


def test_concurrent_generate_on_nested_modules_completes() -> None:
    outer, inner, other = (make_toy("llama", seed=seed) for seed in range(3))
    prompt = torch.tensor([PROMPT])

    def call(model: Any, count: int) -> torch.Tensor:
        return verbatim.generate(model, prompt, max_new_tokens=count, temperature=0.0)

    def keep_calling(model: Any) -> int:
        return sum(call(model, 2).shape[0] for _ in range(5))

    def use_the_inner(*_: Any) -> None:
        call(inner, 1)

    hook = outer.model.layers[0].register_forward_pre_hook(use_the_inner)
    callers = [in_thread(keep_calling, m) for m in (outer, other, other)]
    assert [caller.result() for caller in callers] == [5] * 3
    hook.remove()
    assert {m for m in (outer, inner, other) if m in _engines} == {outer, inner, other}


def test_generate_returns_ordinary_tensor_usable_in_training() -> None:
    model = make_toy("llama")
    ids = torch.tensor([PROMPT, PROMPT[::-1]])
    out = verbatim.generate(model, ids, max_new_tokens=5, temperature=0.0, ignore_eos=True)
    assert out.shape == (2, 17) and torch.equal(out[:, :12], ids)
    assert not out.is_inference()
    model.train()
    loss = model(input_ids=out, labels=out).loss
    loss.backward()
    assert model.training and model.lm_head.weight.grad is not None


def test_generate_masks_padding_and_pads_after_stop_token() -> None:
    model = make_toy("gpt2")
    alone = verbatim.generate(
        model, torch.tensor([PROMPT]), max_new_tokens=6, temperature=0.0, ignore_eos=True
    )
    padded = torch.tensor([[0, 0, 0, *PROMPT], [*PROMPT[::-1], 0, 0, 0]])
    mask = torch.tensor([[0] * 3 + [1] * 12, [1] * 12 + [0] * 3])
    stop = int(alone[0, 12 + 2])
    out = verbatim.generate(
        model,
        padded,
        mask,
        6,
        temperature=0.0,
        ignore_eos=True,
        stop_token_ids=[stop],
        pad_token_id=99,
    )
    end = alone[0, 12:].tolist().index(stop) + 1
    assert out[0, 15 : 15 + end].tolist() == alone[0, 12 : 12 + end].tolist()
    assert (out[0, 15 + end :] == 99).all()


def test_loop_over_sample_gives_same_tokens_as_generate() -> None:
    model = make_toy("llama")
    ids = torch.tensor([PROMPT, PROMPT[::-1]])
    settings: dict[str, Any] = dict(temperature=0.9, top_k=30, top_p=0.95)
    expected = verbatim.generate(model, ids, max_new_tokens=8, seed=77, ignore_eos=True, **settings)
    rows = ids
    for _ in range(8):
        logits = torch.stack([eager_logits(model, row)[-1] for row in rows.tolist()])
        drawn = verbatim.sample(logits, **settings, seed=77, position=rows.shape[1])
        rows = torch.cat([rows, drawn[:, None]], dim=1)
    assert torch.equal(rows, expected)
    assert rows[0, 12:].tolist() != rows[1, 12:].tolist()


def test_generate_without_seed_follows_torch_seed_and_rows_differ() -> None:
    model = make_toy("llama")
    ids = torch.tensor([PROMPT] * 4)
    with torch.random.fork_rng():
        torch.manual_seed(41)
        first = verbatim.generate(model, ids, max_new_tokens=8, ignore_eos=True)
        other = verbatim.generate(model, ids, max_new_tokens=8, ignore_eos=True)
        torch.manual_seed(41)
        assert torch.equal(verbatim.generate(model, ids, max_new_tokens=8, ignore_eos=True), first)
    assert not torch.equal(first, other)
    assert len({tuple(row) for row in first.tolist()}) == 4


def test_engine_of_bare_module_is_collected_with_it() -> None:
    model = make_toy("llama")
    verbatim.generate(model, torch.tensor([PROMPT]), max_new_tokens=1)
    gone = weakref.ref(model), weakref.ref(_engines[model])
    del model
    gc.collect()
    assert [ref() for ref in gone] == [None, None]  # other tests' models may still be there


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(input_ids=torch.tensor([1, 2])), "shape"),
        (dict(input_ids=torch.zeros(1, 2)), "integer tensor"),
        (dict(attention_mask=torch.ones(1, 3)), "attention_mask has shape"),
        (dict(attention_mask=torch.ones(1, 2, device="meta")), "attention_mask .* with data"),
        (dict(attention_mask=torch.zeros(1, 2)), "row 0"),
        (dict(attention_mask=torch.tensor([[0.0, -1e9]])), "must hold only 0"),
        (dict(attention_mask=[[1, 1]]), "must be a tensor"),
        (
            dict(input_ids=torch.tensor([[5, 6, 7]]), attention_mask=torch.tensor([[1, 0, 1]])),
            "middle",
        ),
        (dict(do_sample=True), "do_sample is unknown"),
        (dict(logprobs=2), "logprobs is not accepted"),
        (dict(pad_token_id=1.5), "pad_token_id=1.5"),
        (dict(n=2), "n is not accepted"),
        (dict(temperature=-1), "temperature=-1"),
    ],
)
def test_invalid_generate_arguments_are_rejected(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = dict(input_ids=torch.tensor([[5, 6]]), max_new_tokens=2)
    with pytest.raises(InvalidRequest, match=message):
        verbatim.generate(make_toy("llama"), **{**arguments, **changes})


@pytest.mark.parametrize("draft", [None, "early-exit"])
def test_ctrl_c_while_module_is_restored_completes_the_restore(draft: str | None) -> None:
    giving_back = patching._restore.__code__
    _, first = inspect.getsourcelines(patching._restore)
    lines = sorted({line for *_, line in giving_back.co_lines() if line and line > first + 5})
    assert len(lines) >= 8
    module = make_toy("llama").train()
    module.model.layers[2].register_forward_hook(lambda *args: None)
    params = SamplingParams(max_tokens=4, seed=1, ignore_eos=True)

    def press_at(line: int) -> Any:
        pressed = False

        def at_line(frame: Any, event: str, arg: Any) -> Any:
            nonlocal pressed
            if event == "line" and frame.f_lineno == line and not pressed:
                pressed = True
                raise KeyboardInterrupt
            return at_line

        return lambda frame, event, arg: at_line if frame.f_code is giving_back else None

    with LLM(module, draft=draft, num_draft_tokens=draft and 2) as llm:
        for line in lines:
            sys.settrace(press_at(line))
            try:
                llm.generate([3, 4, 5], params)
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)
            assert all(layer.training for layer in module.modules()), line
            assert module.config._attn_implementation == "sdpa", line
            assert not any("forward" in layer.__dict__ for layer in module.modules()), line
            assert len(module.model.layers[2]._forward_hooks) == 1, line
