"""Engine steps: number of forwards, ends of completions, seeds, memory."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import transformers

from support.requests_mixed import all_facts, facts, mixed_requests
from support.scripted_runner import scripted_engine
from support.toys import make_toy, random_ids
from verbatim import LLM, EngineClosed, FinishReason, OutOfBlocks, SamplingParams

PROMPT = random_ids(10, seed=3)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(make_toy("llama")) as opened:
        yield opened


def count(llm: LLM, prompt: Any, **params: Any) -> int:
    before = llm.stats()["forwards"]
    llm.generate(prompt, SamplingParams(ignore_eos=True, **params))
    return llm.stats()["forwards"] - before


def test_n_tokens_take_n_forwards(llm: LLM) -> None:
    for n in (1, 2, 7):
        assert count(llm, PROMPT, max_tokens=n) == n


def test_failed_step_does_not_count_as_preemption() -> None:
    engine, admission = scripted_engine()
    request = admission.admit([1, 2, 3, 4, 5], SamplingParams(n=2, max_tokens=4, seed=0))
    engine.add(request)
    forward, runner = engine.runner.forward, cast(Any, engine.runner)
    forwards: list[Any] = []

    def failing(batch: Any) -> Any:
        forwards.append(batch.block_copies)
        if len(forwards) == 2:
            raise ValueError("a failure")
        return forward(batch)

    runner.forward = failing
    while engine.has_work:
        engine.step()
    assert forwards[1], "the step has no block copies"
    assert request.metrics.preemptions == engine.stats()["preemptions"] == 0


def test_zero_tokens_take_no_forward_without_prompt_logprobs(llm: LLM) -> None:
    assert count(llm, PROMPT, max_tokens=0) == 0
    assert count(llm, PROMPT, max_tokens=0, prompt_logprobs=0) == 1
    result = llm.generate(PROMPT, SamplingParams(max_tokens=0))[0]
    assert result.outputs[0].finish_reason is FinishReason.LENGTH
    assert result.outputs[0].token_ids == [] and result.prompt_logprobs is None


def test_unseeded_runs_differ_and_reported_seeds_reproduce_them(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    first, second = (llm.generate(PROMPT, params)[0].outputs[0] for _ in range(2))
    assert first.token_ids != second.token_ids
    for run in (first, second):
        again = llm.generate(PROMPT, params.replace(seed=run.seed))[0].outputs[0]
        assert again.token_ids == run.token_ids and again.logprobs == run.logprobs


def test_samples_of_one_request_differ_and_share_its_seed(llm: LLM) -> None:
    result = llm.generate(PROMPT, SamplingParams(n=3, max_tokens=12, seed=5, ignore_eos=True))[0]
    assert len({tuple(c.token_ids) for c in result.outputs}) == 3
    assert [(c.index, c.seed) for c in result.outputs] == [(0, 5), (1, 5), (2, 5)]


def test_stop_token_ids_are_kept_and_lists_have_equal_length(llm: LLM) -> None:
    free = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    ids = free[0].outputs[0].token_ids
    params = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[ids[3]], logprobs=2)
    c = llm.generate(PROMPT, params)[0].outputs[0]
    end = ids.index(ids[3]) + 1
    assert c.token_ids == ids[:end] and c.finish_reason is FinishReason.STOP
    assert c.stop_reason == ids[3]
    assert c.top_logprobs is not None
    assert len(c.logprobs) == len(c.sampled_logprobs) == len(c.top_logprobs) == end
    pair = tuple(ids[2:4])
    c = llm.generate(PROMPT, params.replace(stop_token_ids=[pair]))[0].outputs[0]
    assert c.stop_reason == pair and tuple(c.token_ids[-2:]) == pair


def test_every_eos_id_of_generation_config_ends_a_completion() -> None:
    model = make_toy("llama")
    greedy = SamplingParams(temperature=0, max_tokens=9)
    with LLM(model) as llm:
        ids = llm.generate(PROMPT, greedy)[0].outputs[0].token_ids
    model.generation_config.eos_token_id = [2, ids[4]]
    with LLM(model) as llm:
        c = llm.generate(PROMPT, greedy)[0].outputs[0]
        assert c.token_ids == ids[: ids.index(ids[4]) + 1] and c.stop_reason == ids[4]
        c = llm.generate(PROMPT, greedy.replace(min_tokens=7))[0].outputs[0]
        assert len(c.token_ids) >= 7 and ids[4] not in c.token_ids[:6]


@pytest.mark.parametrize("sampled", [False, True])
def test_default_params_are_those_of_transformers(sampled: bool) -> None:
    model = make_toy("llama")
    settings = dict(do_sample=sampled, temperature=0.5, repetition_penalty=1.2)
    model.generation_config.update(**settings)
    with LLM(model) as llm:
        params = llm.default_params()
    assert params == SamplingParams(temperature=0.5 * sampled, repetition_penalty=1.2)


def test_greedy_reports_a_sampled_logprob_of_zero(llm: LLM) -> None:
    c = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=4))[0].outputs[0]
    assert c.sampled_logprobs == [0.0] * len(c.token_ids) and all(p < 0 for p in c.logprobs)


def test_deltas_join_to_result(llm: LLM) -> None:
    params = SamplingParams(n=2, max_tokens=9, seed=1, logprobs=2)
    deltas = list(llm.stream(PROMPT, params))
    result = deltas[-1].result
    assert result is not None and facts(result) == facts(llm.generate(PROMPT, params)[0])
    for c in result.outputs:
        mine = [d for d in deltas if d.index == c.index]
        assert [i for d in mine for i in d.token_ids] == c.token_ids
        assert [p for d in mine for p in d.logprobs] == c.logprobs
        assert [top for d in mine for top in d.top_logprobs or []] == c.top_logprobs
        assert [d.finish_reason for d in mine][-1] is c.finish_reason
        assert all(d.finish_reason is None for d in mine[:-1])


def test_prompt_logprobs_limit_rows_of_logits_per_forward(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward has at most `max_prompt_rows` rows of logits for prompts, plus one per sequence."""
    prompts = [random_ids(n, seed=n) for n in (150, 70, 3, 90)]
    params = SamplingParams(max_tokens=2, prompt_logprobs=1, seed=1)
    expected = all_facts(llm.generate(prompts, params))
    rows, forward = [], llm.engine.runner.forward

    def counted(batch: Any) -> Any:
        rows.append(len(batch.logit_rows))
        return forward(batch)

    monkeypatch.setattr(llm.engine.runner, "forward", counted)
    for most in (1, 7, 64):
        rows.clear()
        llm.engine.scheduler.max_prompt_rows = most
        assert all_facts(llm.generate(prompts, params)) == expected
        assert max(rows) <= most + len(prompts)


def test_prompts_that_wait_for_rows_of_logits_cost_no_search_for_prefixes(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched, prefixes = [], llm.engine.scheduler.prefixes
    search = prefixes.is_in_flight
    monkeypatch.setattr(prefixes, "is_in_flight", lambda s: searched.append(s) or search(s))
    llm.engine.scheduler.max_prompt_rows = 40
    llm.score([random_ids(20, seed=n) for n in range(40)])
    assert len(searched) < 4 * 40


def test_top_logprobs_are_converted_to_text() -> None:
    with LLM() as llm:
        params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=2)
        result = llm.generate("Once upon a time", params)[0]
        c = result.outputs[0]
        assert c.top_logprobs is not None and result.prompt_top_logprobs is not None
        by_text = llm.by_text(c.top_logprobs)
        assert "".join(max(top, key=top.__getitem__) for top in by_text if top) == c.text
        assert [len(top) for top in by_text if top] == [3] * 4
        assert llm.by_text(result.prompt_top_logprobs)[0] is None


def test_kv_memory_limits_blocks_and_length() -> None:
    model = make_toy("llama")
    with LLM(model, kv_memory=100_000) as llm:
        info = llm.info()
        assert info["kv_bytes"] <= 100_000
        # Layers, K and V, heads, width, bytes.
        assert info["kv_bytes_per_token"] == 3 * 2 * 2 * 16 * 4
        limit = llm.max_length
        assert limit == (info["num_blocks"] - 1) * 16 < 256
        c = llm.generate(PROMPT, SamplingParams(ignore_eos=True))[0].outputs[0]
        assert len(PROMPT) + len(c.token_ids) == limit and c.finish_reason is FinishReason.LENGTH
    with pytest.raises(EngineClosed):
        llm.generate(PROMPT)
    with pytest.raises(OutOfBlocks, match="100 bytes"):
        LLM(model, kv_memory=100)


def test_engine_uses_no_torch_rng_and_no_transformers_generate(monkeypatch: Any) -> None:
    def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("the engine must not come here")

    model = make_toy("qwen3_moe")
    prompts, params = mixed_requests(9)
    with LLM(model) as llm:  # opening probes layers with random inputs, which affect no token
        for owner, name in (
            (torch, "multinomial"),
            (torch, "Generator"),
            (torch, "rand"),
            (transformers.DynamicCache, "__init__"),
            (transformers.GenerationMixin, "generate"),
        ):
            monkeypatch.setattr(owner, name, forbidden)
        assert len(llm.generate(prompts, params)) == 9


def test_runner_sleeps_again_if_the_proposer_can_not_be_woken() -> None:
    engine, _ = scripted_engine()
    calls: list[Any] = []
    fails = iter([True, False])

    def call(method: str, *_: Any) -> None:
        if method == "wake" and next(fails):
            raise OSError("no memory")

    engine.drafting = SimpleNamespace(call=call)
    engine.runner.sleep, engine.runner.wake = calls.append, lambda: calls.append("wake")
    engine.sleep(weights=True)
    with pytest.raises(OSError):
        engine.wake()
    assert not engine.mode.has_steps
    engine.wake()
    assert engine.mode.has_steps
    assert calls == [True, "wake", False, "wake"]
