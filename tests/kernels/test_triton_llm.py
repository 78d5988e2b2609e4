"""Generation with Triton kernels: the code paths of a GPU, also on the CPU under the interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support import sweep
from support.backends import by
from support.mtp_toys import random_mtp
from support.pairwise import slow_but
from support.requests_mixed import all_facts, generated
from support.toys import make_toy, random_ids
from support.triton_here import DEVICE, INTERPRETED
from verbatim import LLM, SamplingParams
from verbatim.batch import Batch, SamplePlan, SampleRow
from verbatim.kv.store import KVStore
from verbatim.model import experts
from verbatim.model.decoder import Decoder
from verbatim.model.mtp_source import Mtp
from verbatim.model.quantizable import choose_packings
from verbatim.placement.recorded import RecordedSteps
from verbatim.quantization.formats import resolve_quantization
from verbatim.quantization.matrix import rounded
from verbatim.sampling.sampler import sample_rows

TINY = dict(
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    vocab_size=64,
)
TOYS: dict[str, dict[str, Any]] = {
    "llama": TINY,
    "qwen3": TINY | dict(head_dim=12, num_hidden_layers=2),
    "gemma2": TINY | dict(num_hidden_layers=2),
    "gpt_oss": TINY | dict(intermediate_size=24),
    "bloom": dict(hidden_size=36, n_head=3, n_layer=1),
    "gpt2": dict(n_embd=36, n_head=3, n_layer=1),
    "qwen3_moe": TINY,
    "qwen3_5": TINY | dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]),
    "granite_dense": TINY
    | dict(mamba_n_heads=4, num_hidden_layers=2, layer_types=["mamba", "attention"]),
    "lfm2": TINY | dict(num_hidden_layers=2, layer_types=["conv", "full_attention"]),
}


@pytest.fixture(autouse=True)
def _triton(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr("verbatim.kernels.requested", lambda: "triton")


def toy(name: str, dtype: torch.dtype = torch.float32) -> Any:
    if name not in TOYS:
        return sweep.build(name).to(DEVICE, dtype)
    return make_toy(name, dtype=dtype, **TOYS[name]).to(DEVICE)


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """A greedy request, a sampled one, one of two samples with filters, and one that is only scored."""
    prompts = [[i % 60 + 3 for i in random_ids(length, length)] for length in (6, 3, 5, 4)]
    params = [
        SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, seed=0),
        SamplingParams(max_tokens=4, seed=1, ignore_eos=True),
        SamplingParams(max_tokens=2, seed=2, n=2, top_p=0.9, logprobs=2, presence_penalty=0.5),
        SamplingParams(max_tokens=0, prompt_logprobs=0, seed=3),
    ]
    return prompts, params


def facts(llm: LLM, which: slice = slice(None)) -> list[Any]:
    prompts, params = requests()
    return all_facts(llm.generate(prompts[which], params[which]))


def holds_in_every_schedule(module: Any, **options: Any) -> None:
    options["deterministic"] = True
    with LLM(module, **options) as llm:
        expected = facts(llm)
        assert [facts(llm, slice(i, i + 1))[0] for i in (0, 2)] == expected[::2], "alone"
        info = llm.info()  # kv_memory covers all bytes of a token, also the ids of its experts
        tokens = info["num_blocks"] * info["block_size"]
        states = info["state_bytes"] * info.get("state_slots", 0)
        per_token = (info["kv_bytes"] - states + info["routing_bytes"]) // tokens
    with LLM(module, **options, max_batch_tokens=4, block_size=3) as llm:
        assert facts(llm) == expected, "chunked"
    kv_memory = per_token * 16
    if states:  # half of kv_memory is for states, and a sequence needs three slots
        kv_memory = 2 * max(kv_memory, 3 * info["state_bytes"])
    memory = dict(kv_memory=kv_memory, block_size=4, prefix_cache=False)
    with LLM(module, **options, **memory) as llm:
        assert facts(llm) == expected
        assert llm.stats()["preemptions"] > 0


@pytest.mark.parametrize("dtype", slow_but(["bfloat16"], ["bfloat16", "float16"]))
def test_batched_and_chunked_prompts_give_the_same_bits(dtype: str) -> None:
    module, prompts = toy("llama", getattr(torch, dtype)), [[5, 9, 4, 30, 7], [6, 11]]
    params = SamplingParams(max_tokens=2, seed=1, ignore_eos=True)
    with LLM(module, deterministic=True) as llm:
        expected = all_facts([llm.generate(prompt, params)[0] for prompt in prompts])
    with LLM(module, deterministic=True, max_batch_tokens=4, block_size=3) as llm:
        assert all_facts(llm.generate(prompts, params)) == expected


@pytest.mark.parametrize(
    ("name", "quantization"),
    slow_but(
        [("llama", "int4")],
        [("llama", "int4"), ("qwen3_moe", "int8"), ("llama", "w8a8"), ("gpt2", "w4a8")],
    ),
)
def test_quantized_model_is_bit_identical_to_one_of_its_decoded_weights(
    name: str, quantization: str, tmp_path: Path
) -> None:
    module, prompts = toy(name, torch.bfloat16).cpu(), [[5, 9, 4, 30, 7], [6, 11]]
    module.save_pretrained(tmp_path / "plain")
    kind = resolve_quantization(quantization)
    assert kind is not None
    with torch.no_grad():
        for weight, packing in choose_packings(module, kind).items():
            weight.copy_(by("none", rounded)(weight, packing))
    module.save_pretrained(tmp_path / "decoded")
    params = SamplingParams(max_tokens=2, seed=1, ignore_eos=True)
    options: dict[str, Any] = dict(device=DEVICE.type, deterministic=True, tokenizer=False)
    with LLM(tmp_path / "plain", **options, quantization=quantization) as llm:
        expected = all_facts([llm.generate(prompt, params)[0] for prompt in prompts])
    if kind.activation_bits is None:
        with LLM(tmp_path / "decoded", **options) as llm:
            assert all_facts(llm.generate(prompts, params)) == expected
    options |= dict(max_batch_tokens=4, block_size=3)
    with LLM(tmp_path / "plain", **options, quantization=quantization) as llm:
        assert all_facts(llm.generate(prompts, params)) == expected


@pytest.mark.parametrize("kind", slow_but(["mtp"], ["model", "mtp", "early-exit"]))
def test_drafts_do_not_change_the_bits(kind: str) -> None:
    kinds = dict(num_mtp_layers=1, mtp_layer_types=["full_attention"])
    main = make_toy("qwen3", **TOYS["qwen3"], **kinds)
    mtp = random_mtp(main, 1).to(torch.bfloat16)
    main = main.to(DEVICE, torch.bfloat16)
    draft: Any = {"model": toy("llama", torch.bfloat16), "mtp": Mtp(mtp.to(DEVICE))}.get(kind, kind)
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, seed=1)
    prompts = [[5, 9, 4]]
    expected = generated(LLM(main, deterministic=True), prompts, params)
    with LLM(main, deterministic=True, draft=draft, num_draft_tokens=2) as llm:
        assert all_facts(llm.generate(prompts, params)) == expected
        stats = llm.stats()["draft"]
        assert stats["drafted"] > 0 and not stats["errors"], stats


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16"])
@pytest.mark.parametrize("name", TOYS)
def test_models_are_bit_identical_in_every_schedule(name: str, dtype: str) -> None:
    holds_in_every_schedule(toy(name, getattr(torch, dtype)))


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_quantized_kv_cache_is_bit_identical_in_every_schedule(kv_dtype: str) -> None:
    holds_in_every_schedule(toy("qwen3", torch.bfloat16), kv_dtype=kv_dtype)


@pytest.mark.parametrize("name", slow_but(["llama"], TOYS))
def test_greedy_tokens_equal_transformers(name: str) -> None:
    module = toy(name)
    prompt = requests()[0][0]
    theirs = module.generate(
        torch.tensor([prompt], device=DEVICE), max_new_tokens=4, min_new_tokens=4, do_sample=False
    )[0, len(prompt) :]
    with LLM(module, deterministic=True) as llm:
        params = SamplingParams(max_tokens=4, min_tokens=4, temperature=0.0)
        assert llm.generate(prompt, params)[0].outputs[0].token_ids == theirs.tolist()


def logits_of(module: Any, *, fused: bool, batch_invariant: bool = True) -> torch.Tensor:
    """Logits of one sequence, in chunks of 7 and 4 rows."""
    decoder = Decoder(module, fused=fused, batch_invariant=batch_invariant)
    store = KVStore(decoder.spec.layers, 4, 4, decoder.spec.dtype, DEVICE)
    store.batch_invariant = batch_invariant
    assert decoder.fused is None or decoder.fused["plain"] == 0, decoder.fused
    found = []
    for first, last in ((0, 7), (7, 11)):
        rows = range(last - first)
        batch = Batch.of([(range(3 + first, 3 + last), first, [1, 2, 3])], rows)
        found.append(decoder.run(batch, store).logits)
    return torch.cat(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["qwen3", "llama", "qwen2", "gemma2", "gemma3", "phi3", "mistral", "qwen3_moe"]
)
def test_fused_layers_have_the_same_bits_and_call_hooks(name: str) -> None:
    module = make_toy(name, dtype=torch.bfloat16, **TOYS.get(name, TINY)).to(DEVICE)
    plain = logits_of(module, fused=False)
    assert torch.equal(logits_of(module, fused=True), plain)
    seen: list[Any] = []
    attention = module.model.layers[0].self_attn
    with attention.register_forward_hook(lambda *_: seen.append(1)):
        assert torch.equal(logits_of(module, fused=True), plain)
    assert len(seen) == 2


@pytest.mark.slow
def test_scaling_changed_after_the_first_forward_takes_effect() -> None:
    module = toy("llama")
    decoder = Decoder(module)
    batch = Batch.of([([5, 6, 7], 0, [1])], range(3))
    store = KVStore(decoder.spec.layers, 2, 4, torch.float32, DEVICE)
    before = decoder.run(batch, store).logits
    module.model.layers[0].self_attn.scaling *= 3
    after = decoder.run(batch, store).logits
    assert not torch.equal(after, before)
    assert torch.equal(after, Decoder(module, fused=False).run(batch, store).logits)


@pytest.mark.slow
def test_logits_without_batch_invariance_agree_within_rounding() -> None:
    module = toy("qwen3")
    exact = logits_of(module, fused=True)
    fast = logits_of(module, fused=True, batch_invariant=False)
    plain = module(torch.arange(3, 14, device=DEVICE)[None]).logits[0]
    assert torch.allclose(exact, fast, rtol=1e-4, atol=1e-4)
    assert torch.allclose(fast, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_all_experts_at_once_are_bit_identical_to_one_by_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = toy(name, torch.bfloat16)
    found = next(m for m in module.modules() if experts.is_stacked(m))
    hidden = torch.randn(9, TINY["hidden_size"]).bfloat16()
    index = torch.arange(18).view(9, 2) % 5 % found.num_experts
    weights = torch.rand(9, 2)
    given = [found, *(x.to(DEVICE) for x in (hidden, index, weights))]
    calls: list[Any] = []
    one = experts.ExpertsParts.run_one
    monkeypatch.setattr(
        experts.ExpertsParts, "run_one", lambda *args: (calls.append(args), one(*args))[1]
    )
    with torch.inference_mode():
        at_once = experts.flat_experts(*given)
        assert not calls
        monkeypatch.setattr(experts.ExpertsParts, "sorts_on_gpu", lambda *_: False)
        assert torch.equal(experts.flat_experts(*given), at_once)
    assert calls


@pytest.mark.parametrize("name", slow_but(["qwen3_moe"], ["qwen3_moe", "jetmoe"]))
def test_recorded_steps_of_experts_have_the_same_bits_and_routing(name: str) -> None:
    """Here, a replay runs the step again."""
    module, prompts = toy(name, torch.bfloat16), [[5, 9, 8], [7, 6, 5, 4]]
    params = SamplingParams(max_tokens=3, seed=1, ignore_eos=True, record_routing=True)

    def generated(record: bool) -> list[Any]:
        with LLM(module, deterministic=True) as llm:
            runner: Any = llm.engine.runner
            if record:
                runner.decoder.record_steps(lambda _: RecordedSteps(lambda step: (step, 0)))
            outputs = [result.outputs[0] for result in llm.generate(prompts, params)]
            assert not record or runner.decoder.steps.status == 2
        return [(o.token_ids, o.logprobs, o.routing.tolist()) for o in outputs]

    assert generated(True) == generated(False)


def test_rows_with_mixed_params_are_drawn_as_on_the_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(5, 100, generator=generator)
    every = [
        SamplingParams(top_k=3),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=0.0),
        SamplingParams(logit_bias={3: 9.0}),
        SamplingParams(min_p=0.1),
    ]
    rows = [SampleRow(p, 7, 0, 5 + i, num_logprobs=2 * (i % 2)) for i, p in enumerate(every * 2)]
    places = [0, 1, 2, 3, 4, 4, 3, 2, 1, 0]
    found = sample_rows(logits.to(DEVICE), SamplePlan(rows, places))
    want = by("none", sample_rows)(logits, SamplePlan(rows, places))
    assert repr(found) == repr(want)
