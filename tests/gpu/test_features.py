"""Features beyond plain generation on a GPU, each compared with a plain run on the same GPU."""

from __future__ import annotations

import asyncio
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import verbatim
from support import kempner_reference, mtp_toys
from support.kempner_toys import kempner_toy
from support.lora import merge, save_adapter
from support.pools import check_pool
from support.requests_mixed import all_facts, facts, generated, mixed_requests
from support.toys import make_toy, random_ids
from verbatim import LLM, SamplingParams, storyteller
from verbatim.compat import coati, flexllmgen, kempnerforge, megatron, petals
from verbatim.draft import DraftModel, EarlyExit
from verbatim.model.mtp_source import Mtp

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STORIES = ["Once upon a time", "The cat", "A long time ago there was a little girl who"]
PARAMS = [
    SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, seed=0, logprobs=2),
    SamplingParams(max_tokens=30, seed=1, ignore_eos=True, prompt_logprobs=1),
    SamplingParams(max_tokens=20, seed=2, n=2, top_p=0.9, hidden_states=True),
]
KEMPNER = dict(dim=60, n_layers=2, n_heads=6, n_kv_heads=2, vocab_size=128, max_seq_len=128)


def story(**options: Any) -> LLM:
    return LLM(device=DEVICE, deterministic=True, kv_memory="64MB", **options)


@cache
def told() -> list[Any]:
    return generated(story(), STORIES, PARAMS)


def toy(name: str, **changes: Any) -> Any:
    return make_toy(name, dtype=torch.bfloat16, **changes).to(DEVICE)


# ---- drafts


@pytest.mark.parametrize(
    "draft", ["mtp", "early-exit", str(storyteller.path()), EarlyExit(2), "ngram"], ids=str
)
def test_drafts_do_not_change_storyteller_results(draft: Any) -> None:
    with story(draft=draft, num_draft_tokens=4) as llm:
        assert all_facts(llm.generate(STORIES, PARAMS)) == told()
        stats = llm.stats()["draft"]
        assert stats["drafted"] > 0 and not stats["errors"], stats
        if DEVICE == "cuda":
            assert isinstance(llm.info()["recorded_steps"], int)
        llm.sleep(weights=True)
        llm.wake()
        assert all_facts(llm.generate(STORIES, PARAMS)) == told(), "after a sleep"


def test_draft_model_equal_to_target_is_always_accepted() -> None:
    with story(draft=str(storyteller.path()), num_draft_tokens=4) as llm:
        llm.generate(STORIES, SamplingParams(max_tokens=25, seed=3, ignore_eos=True))
        assert llm.stats()["draft"]["acceptance"] == [1.0] * 4


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "glm4_moe"])
def test_mtp_and_early_exit_drafts_of_live_modules_change_no_result(name: str) -> None:
    pair = mtp_toys.toy(name, 1, torch.bfloat16)
    main, mtp = pair.main.to(DEVICE), pair.mtp.to(DEVICE)
    prompts, params = mixed_requests()
    expected = generated(LLM(main, deterministic=True), prompts, params)
    for draft, options in ((Mtp(mtp), {}), (EarlyExit(1), dict(max_batch_tokens=7, block_size=5))):
        llm = LLM(main, deterministic=True, draft=draft, num_draft_tokens=3, **options)
        with llm:
            assert all_facts(llm.generate(prompts, params)) == expected, draft
            stats = llm.stats()["draft"]
            assert stats["drafted"] > 0 and not stats["errors"], stats


def test_live_draft_model_stays_on_its_device() -> None:
    main = toy("qwen3")
    prompts, params = mixed_requests()
    expected = generated(LLM(main, deterministic=True), prompts, params)
    for name, device in (("llama", "cpu"), ("mamba", DEVICE)):
        small = make_toy(name, num_hidden_layers=2).to(device)
        draft = DraftModel(small, kv_memory="4MB")
        with LLM(main, deterministic=True, draft=draft, num_draft_tokens=3) as llm:
            assert all_facts(llm.generate(prompts, params)) == expected
            stats = llm.stats()["draft"]
            assert stats["drafted"] > 0 and not stats["errors"], stats
        assert next(small.parameters()).device.type == device


# ---- weights


def test_update_weights_is_reversible_and_repeatable() -> None:
    with story() as llm:
        before = all_facts(llm.generate(STORIES, PARAMS))
        module: Any = llm.engine.runner.whole_module  # type: ignore[attr-defined]
        old = {name: p.detach().clone() for name, p in module.named_parameters()}
        new = {name: p * 1.25 for name, p in old.items()}
        assert llm.update_weights(new) == 1
        after = all_facts(llm.generate(STORIES, PARAMS))
        assert after != before
        assert llm.update_weights({n: p.cpu() for n, p in old.items()}) == 2
        assert all_facts(llm.generate(STORIES, PARAMS)) == before
        llm.update_weights(new)
        assert all_facts(llm.generate(STORIES, PARAMS)) == after


def test_in_place_edit_of_live_module_takes_effect() -> None:
    module, prompt = toy("llama"), random_ids(30, 1)
    params = SamplingParams(max_tokens=8, seed=1, prompt_logprobs=0, ignore_eos=True)
    with LLM(module, deterministic=True) as llm:
        before = facts(llm.generate(prompt, params)[0])
        module.lm_head.weight.data.mul_(1.5)
        llm.weights_changed()
        after = facts(llm.generate(prompt, params)[0])
        assert after != before
    assert generated(LLM(module, deterministic=True), [prompt], params) == [after]


def test_adapters_are_applied_per_request(tmp_path: Path) -> None:
    module, prompts = toy("llama"), [random_ids(9 + i, i) for i in range(4)]
    folder = save_adapter(tmp_path / "a", module.cpu(), seed=1)
    module.to(DEVICE)
    params = SamplingParams(max_tokens=10, seed=1, ignore_eos=True, prompt_logprobs=0)
    adapted = params.replace(adapter="a")
    plain = generated(LLM(module, deterministic=True), prompts, params)
    with LLM(module, deterministic=True, adapters={"a": folder}) as llm:
        alone = [facts(llm.generate(prompt, adapted)[0]) for prompt in prompts]
        mixed = all_facts(llm.generate(prompts, [adapted, params, adapted, params]))
        assert mixed == [alone[0], plain[1], alone[2], plain[3]] and alone != plain
        scores = llm.score(prompts[0], adapter="a")
    with LLM(merge(module.float().cpu(), folder).to(DEVICE), deterministic=True) as llm:
        merged = llm.score(prompts[0])
    assert scores[1:] == pytest.approx(merged[1:], abs=0.2)
    assert scores[1:] != pytest.approx(plain[0][1][1:], abs=0.2)


def test_storyteller_with_adapter_gives_same_bits_in_mixed_batch(tmp_path: Path) -> None:
    with story() as llm:
        folder = save_adapter(tmp_path / "a", llm.engine.runner.whole_module, seed=1)  # type: ignore[attr-defined]
    params = [params.replace(adapter="a") for params in PARAMS]
    with story(adapters={"a": folder}) as llm:
        assert all_facts(llm.generate(STORIES, PARAMS)) == told()
        adapted = all_facts(llm.generate(STORIES, params))
        mixed = all_facts(llm.generate(STORIES * 2, PARAMS + params))
        assert mixed == told() + adapted and adapted != told()


# ---- what a result reports


def test_scores_equal_generated_logprobs() -> None:
    with story() as llm:
        result = llm.generate(STORIES[1], PARAMS[1])[0]
        ids = result.prompt_token_ids + result.outputs[0].token_ids
        scores = llm.score([ids, ids[:9]])
        expected = [*result.prompt_logprobs, *result.outputs[0].logprobs]  # type: ignore[misc]
    assert scores == [expected, expected[:9]]


def test_hidden_states_reproduce_logprobs() -> None:
    module, params = toy("qwen3"), PARAMS[2].replace(n=1, prompt_logprobs=0)
    with LLM(module, deterministic=True) as llm:
        result = llm.generate(random_ids(20, 1), params)[0]
    hidden = result.outputs[0].hidden_states
    assert hidden is not None and hidden.device.type == "cpu"
    head = module.lm_head.weight.float().cpu()
    logits = (hidden.float() @ head.t()).log_softmax(-1)
    found = logits[range(len(hidden)), result.outputs[0].token_ids]
    assert found.tolist() == pytest.approx(result.outputs[0].logprobs, abs=0.1)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v32"])
def test_recorded_routing_and_indices_are_replayed(name: str) -> None:
    module = toy(name)
    prompts = [random_ids(n, n) for n in (30, 5, 19)]
    indexed = name == "deepseek_v32"
    params = SamplingParams(
        max_tokens=6, seed=4, ignore_eos=True, prompt_logprobs=0, record_routing=True
    )
    params = params.replace(record_indices=indexed)
    with LLM(module, deterministic=True) as llm:
        results = llm.generate(prompts, params)
        expected = all_facts(results)
        assert all_facts([llm.generate(p, params)[0] for p in prompts]) == expected, "alone"
        for prompt, result in zip(prompts, results, strict=True):
            routing, indices = result.outputs[0].routing, result.outputs[0].indices
            assert routing is not None and (indices is not None) == indexed
            replayed = params.replace(replay_routing=routing, replay_indices=indices)
            assert facts(llm.generate(prompt, replayed)[0]) == facts(result), "replayed"
            if not indexed:
                other = replayed.replace(replay_routing=(routing + 1) % module.config.num_experts)
                assert facts(llm.generate(prompt, other)[0]) != facts(result)
    with LLM(module, deterministic=True, max_batch_tokens=7, block_size=5) as llm:
        assert all_facts(llm.generate(prompts, params)) == expected, "in chunks"


# ---- ways of generating


def test_beam_search_gives_same_bits_alone_and_batched() -> None:
    params = SamplingParams(num_beams=3, n=2, max_tokens=12, logprobs=1, seed=1)
    with story() as llm:
        expected = all_facts(llm.generate(STORIES, params))
        assert all_facts([llm.generate(s, params)[0] for s in STORIES]) == expected
        scores = [c.score for c in llm.generate(STORIES[0], params)[0].outputs]
        assert scores == sorted(scores, reverse=True)  # type: ignore[type-var]


@pytest.mark.parametrize("draft", [None, "mtp", "early-exit", str(storyteller.path())], ids=str)
def test_structured_output_is_same_with_drafts(draft: Any) -> None:
    pytest.importorskip("llguidance", reason="grammars need llguidance")
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    params = [
        SamplingParams(regex="(the|a) (cat|dog) (ran|sat)", seed=1),
        SamplingParams(json_schema=schema, seed=2, max_tokens=40),
        SamplingParams(choice=["yes", "no"], seed=3),
    ]
    expected = generated(story(), STORIES, params)
    with story(draft=draft) as llm:
        results = llm.generate(STORIES, params)
    assert all_facts(results) == expected
    assert results[2].outputs[0].text in ("yes", "no")


def test_prefix_folder_is_hit_and_changes_no_result(tmp_path: Path) -> None:
    prompts = [text * 8 for text in STORIES]
    params = [p.replace(hidden_states=False, prompt_logprobs=None) for p in PARAMS]
    expected = generated(story(), prompts, params)
    for draft in (None, "mtp"):
        options = dict(prefix_folder=tmp_path / str(draft), block_size=8, draft=draft)
        assert generated(story(**options), prompts, params) == expected
        with story(**options) as llm:
            results = llm.generate(prompts, params)
            assert all_facts(results) == expected
            assert all(result.num_cached_tokens > 0 for result in results)


def test_saved_session_resumes_with_same_tokens(tmp_path: Path) -> None:
    params, seen = SamplingParams(max_tokens=12, ignore_eos=True), []
    for options in ({}, dict(draft="mtp"), dict(draft="early-exit", max_batch_tokens=7)):
        with story(**options) as llm, llm.session(max_length=200, seed=5) as session:
            session.generate(STORIES[0], params)
            session.generate(" And then", params)
            session.save(tmp_path / "session", kv=True)
            session.generate(None, params)
            end = session.token_ids
            with llm.session(load=tmp_path / "session") as loaded:
                loaded.generate(None, params)
                assert loaded.token_ids == end
            seen.append(end)
    assert seen[0] == seen[1] == seen[2]


def test_streams_and_coroutines_give_same_tokens() -> None:
    async def all_of(llm: LLM) -> tuple[list[Any], list[int]]:
        async def streamed() -> list[int]:
            deltas = llm.astream(STORIES[1], PARAMS[1])
            return [i async for delta in deltas for i in delta.token_ids]

        results, ids = await asyncio.gather(llm.agenerate(STORIES, PARAMS), streamed())
        return all_facts(results), ids

    expected = told()[1][4][0][2]
    with story() as llm:
        ids = [i for delta in llm.stream(STORIES[1], PARAMS[1]) for i in delta.token_ids]
        assert ids == expected
        assert asyncio.run(all_of(llm)) == (told(), expected)


def test_abort_sleep_and_preemption_change_no_token() -> None:
    """An aborted stream, sleep in the middle of a request, and a KV cache that is too small."""
    with story(draft="mtp", prefix_cache=False) as llm:
        for delta in llm.stream(STORIES[0], PARAMS[0]):
            if delta.token_ids:
                break
        stream = llm.stream(STORIES[1], PARAMS[1])
        ids = [*next(stream).token_ids]
        llm.sleep()
        llm.wake()
        ids += [i for delta in stream for i in delta.token_ids]
        assert ids == told()[1][4][0][2]
        check_pool(llm.engine.scheduler.pool)
    per_token = 0
    with story() as llm:
        per_token = llm.info()["kv_bytes_per_token"]
    small = dict(device=DEVICE, deterministic=True, kv_memory=per_token * 104, block_size=8)
    with LLM(draft="early-exit", **small) as llm:  # type: ignore[arg-type]
        assert all_facts(llm.generate(STORIES, PARAMS)) == told()
        assert llm.stats()["preemptions"] > 0


def test_server_completions_and_streams_match_generate() -> None:
    for name in ("uvicorn", "httpx", "fastapi"):
        pytest.importorskip(name, reason="the server's packages are not installed")
    from support.serving import serving

    with story(draft="mtp") as llm, serving(llm) as served:
        body = dict(prompt=STORIES[1], max_tokens=30, seed=1, ignore_eos=True)
        answer = served.post("/v1/completions", **body)
        assert answer["choices"][0]["text"] == told()[1][4][0][1]
        events = served.stream("/v1/completions", **body)
        texts = [e["choices"][0]["text"] for e in events if e != "[DONE]" and e["choices"]]
        assert "".join(texts) == told()[1][4][0][1]


def test_compat_apis_give_same_tokens_and_device() -> None:
    """Every API gives the same tokens for ids on a GPU, and returns them there."""
    rows = torch.tensor([random_ids(5, 1), random_ids(5, 2)]).to(DEVICE)
    tokenizer = SimpleNamespace(padding_side="left", eos_token_id=None, pad_token_id=None)
    settings = megatron.SamplingParams(num_tokens_to_generate=9, top_k=1, termination_id=-1)
    requests = {
        i: megatron.InferenceRequest(request_id=i, prompt_tokens=row, sampling_params=settings)
        for i, row in enumerate(rows)
    }
    with story(draft="mtp") as llm:
        expected = verbatim.generate(llm, rows, max_new_tokens=9, temperature=0.0, ignore_eos=True)
        remote = petals.AutoDistributedModelForCausalLM.from_pretrained(llm)
        options = dict(do_sample=False, eos_token_id=None)
        for found in (
            coati.generate(llm, rows, tokenizer, 14, do_sample=False, early_stopping=False),
            kempnerforge.generate(llm, rows, 9, temperature=0.0),
            remote.generate(rows, max_new_tokens=9, **options),
        ):
            assert found.tolist() == expected.tolist() and found.device == rows.device
        opt_lm_ids = flexllmgen.OptLM(llm).generate(rows.cpu(), 9, do_sample=False)
        assert opt_lm_ids.tolist() == expected.tolist()
        megatron.TextGenerationController(llm).generate_all_output_tokens_static_batch(requests)
        new = [request.generated_tokens.tolist() for request in requests.values()]
        assert new == expected[:, 5:].tolist()


# ---- modules of other protocols


def test_kempnerforge_module_gives_same_bits_in_every_schedule() -> None:
    """The module runs as transformers' Llama, which has the same parameters."""
    module = kempner_reference.make(**KEMPNER).to(DEVICE)
    prompts, params = mixed_requests()
    with LLM(module, deterministic=True) as llm:
        assert llm.info()["rows"] == "together"
        expected = all_facts(llm.generate(prompts, params))
    for options in (dict(max_batch_tokens=7, block_size=5), dict(draft="ngram")):
        assert generated(LLM(module, deterministic=True, **options), prompts, params) == expected
    ids = torch.tensor([prompts[4]], device=DEVICE)
    logits = module(ids)[0].log_softmax(-1)[range(len(prompts[4]) - 1), prompts[4][1:]]
    with LLM(module, deterministic=True) as llm:
        assert llm.score(prompts[4])[1:] == pytest.approx(logits.tolist(), abs=1e-3)


def greedy_ids(forward: Any, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(forward(torch.tensor([ids], device=DEVICE))[0, -1].argmax()))
    return ids


def test_modules_run_by_their_own_forward_match_greedy_loop() -> None:
    """Token by token with `kv_caches`, in whole rows, and with Coati's hooks."""
    module, rows = kempner_toy().to(DEVICE), [random_ids(6, 1), random_ids(6, 2)]
    expected = [greedy_ids(module, row, 5) for row in rows]
    ids = torch.tensor(rows, device=DEVICE)
    found = verbatim.generate(module, ids, max_new_tokens=5, temperature=0.0)
    assert found.tolist() == expected and found.device.type == DEVICE
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    with LLM(module) as llm:
        assert llm.info()["rows"] == "one at a time"
        alone = [facts(llm.generate(row, params.replace(seed=1))[0]) for row in rows]
        assert all_facts(llm.generate(rows, params.replace(seed=1))) == alone
    actor: Any = Actor(module)
    with verbatim.open_forward(actor, max_length=20) as llm:
        results = llm.generate(rows, params)
        assert [r.prompt_token_ids + r.outputs[0].token_ids for r in results] == expected
    tokenizer = SimpleNamespace(padding_side="left", eos_token_id=None, pad_token_id=0)
    for prepare in (None, lambda input_ids, past=None, **_: dict(input_ids=input_ids)):
        found = coati.generate(
            actor,
            ids,
            tokenizer,
            11,
            do_sample=False,
            early_stopping=False,
            prepare_inputs_fn=prepare,
        )
        assert found.tolist() == expected and found.device.type == DEVICE


class Actor(torch.nn.Module):
    """A module that returns its logits in a dict."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.inner(input_ids)}
