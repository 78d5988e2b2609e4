"""Shared computation: common prefixes of prompts, and samples of one prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.pools import check_pool
from support.requests_mixed import all_facts, facts, mixed_requests
from support.toys import make_toy, random_ids
from verbatim import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, seed=0)


class Rows:
    """Counts the rows of each forward of an LLM."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: list[int] = []
        forward = llm.engine.runner.forward

        def counted(batch: Any) -> Any:
            self.counts.append(batch.num_tokens)
            return forward(batch)

        monkeypatch.setattr(llm.engine.runner, "forward", counted)

    def take(self) -> list[int]:
        counts, self.counts = self.counts, []
        return counts


@pytest.fixture(scope="module")
def folder(folders: Any) -> Any:
    return folders("llama", max_position_embeddings=2048)


@pytest.fixture
def llm(folder: Any) -> Iterator[LLM]:
    with LLM(folder, block_size=8) as opened:
        yield opened


def test_samples_of_one_request_compute_prompt_once(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, prompt = Rows(llm, monkeypatch), random_ids(1000, seed=1)
    params = SamplingParams(n=8, max_tokens=5, seed=4, ignore_eos=True)
    result = llm.generate(prompt, params)[0]
    assert rows.take() == [1000, 8, 8, 8, 8]
    assert len({tuple(c.token_ids) for c in result.outputs}) == 8
    with LLM(llm.name, block_size=8, prefix_cache=False) as plain:
        alone = [
            plain.engine.run(
                [plain.engine.admission.admit(prompt, params.replace(n=1), first_sample=i)]
            )
            for i in range(8)
        ]
    for c, (solo,) in zip(result.outputs, alone, strict=True):
        assert (c.token_ids, c.logprobs) == (solo.outputs[0].token_ids, solo.outputs[0].logprobs)


def test_more_samples_than_max_sequences_share_one_prefill(
    folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, params = random_ids(41, seed=2), SamplingParams(n=11, max_tokens=4, seed=4)
    with LLM(folder, block_size=8) as llm:
        expected = facts(llm.generate(prompt, params)[0])
    with LLM(folder, block_size=8, max_sequences=3, prefix_cache=False) as llm:
        rows = Rows(llm, monkeypatch)
        assert facts(llm.generate(prompt, params)[0]) == expected
        prefill, *decode = rows.take()
        assert prefill == 41 and max(decode) <= 3
        assert llm.stats()["preemptions"] == 0 and llm.stats()["blocks_used"] == 0


def test_repeated_prompt_reports_its_cached_tokens(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, prompt = Rows(llm, monkeypatch), random_ids(100, seed=3)
    first, second = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 96)
    assert second.metrics.num_cached_tokens == 96 and llm.stats()["cached_tokens"] == 96
    assert rows.take() == [100, 1, 1, 1, 1, 1, 4, 1, 1, 1, 1, 1]
    assert facts(first) == facts(second)


def test_next_turn_reuses_completion_of_previous_turn(llm: LLM) -> None:
    prompt = random_ids(30, seed=3)
    turn = llm.generate(prompt, GREEDY.replace(max_tokens=20))[0]
    follow_up = prompt + turn.outputs[0].token_ids + random_ids(9, seed=4)
    result = llm.generate(follow_up, GREEDY)[0]
    assert result.num_cached_tokens == 48  # 49 positions were computed, in blocks of 8


def test_concurrent_prompts_with_same_prefix_compute_it_once(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, prompt = Rows(llm, monkeypatch), random_ids(64, seed=5)
    prompts = [prompt, prompt, prompt[:33], [*prompt, 5, 6, 7], prompt]
    results = llm.generate(prompts, GREEDY)
    # The last block of an equal prompt is computed again: the next token is drawn from its last row.
    assert rows.take()[:2] == [64, 1 + 8 + 1 + 3 + 8]
    assert [r.num_cached_tokens for r in results] == [0, 56, 32, 64, 56]
    assert all_facts(results) == [facts(llm.generate(p, GREEDY)[0]) for p in prompts]


def test_prefixes_are_not_shared_across_cache_salts(llm: LLM) -> None:
    prompt = random_ids(40, seed=7)
    found = [
        llm.generate(prompt, GREEDY.replace(cache_salt=salt))[0].num_cached_tokens
        for salt in (None, "a", "b", "a", "", None)
    ]
    assert found == [0, 0, 0, 32, 0, 32]


def test_prompt_logprobs_are_unaffected_by_cached_prefix(llm: LLM) -> None:
    """Megatron moves a completion's log-probs into the prompt's when a prefix is found."""
    prompt = random_ids(60, seed=8)
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=2, prompt_logprobs=2, seed=0)
    first = llm.generate(prompt, params)[0]
    llm.generate(prompt, GREEDY)
    again = llm.generate(prompt, params)[0]
    assert again.prompt_logprobs is not None and len(again.prompt_logprobs) == 60
    assert facts(again) == facts(first) and again.num_cached_tokens == 0
    assert llm.score(prompt) == first.prompt_logprobs


def test_prefix_blocks_are_evicted_least_recently_used_and_last_block_first(folder: Any) -> None:
    with LLM(folder, block_size=8, kv_memory=8 * 12 * 768) as llm:
        assert llm.stats()["blocks_free"] == 11
        one, two = random_ids(40, seed=9), random_ids(40, seed=10)
        params = GREEDY.replace(max_tokens=1)
        llm.generate(one, params)
        llm.generate(two, params)
        assert llm.stats()["blocks_cached"] == 10
        llm.generate(one[:17], params)  # touches the first two blocks of `one`
        llm.generate(random_ids(31, seed=11), params)  # takes the free one and three cached
        assert llm.generate(one, params)[0].num_cached_tokens == 16
        assert llm.generate(two, params)[0].num_cached_tokens in (24, 32)
        check_pool(llm.engine.scheduler.pool)


def test_disabled_prefix_cache_has_no_hits_and_same_results(
    folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, params = mixed_requests()
    with LLM(folder) as llm:
        expected = all_facts(llm.generate(prompts, params))
        assert all_facts(llm.generate(prompts, params)) == expected
        assert llm.stats()["cached_tokens"] > 0
    with LLM(folder, prefix_cache=False) as llm:
        assert all_facts(llm.generate(prompts * 2, params * 2)) == expected * 2
        assert llm.stats()["cached_tokens"] == 0 and llm.stats()["blocks_cached"] == 0


def test_live_module_does_not_reuse_prefixes_after_weights_change() -> None:
    module, prompt = make_toy("llama"), random_ids(40, seed=12)
    with LLM(module, block_size=8) as llm:
        before = llm.generate([prompt, prompt], GREEDY)
        assert [r.num_cached_tokens for r in before] == [0, 32]
        for parameter in module.parameters():
            parameter.data.mul_(1.25)  # no version counter sees this
        after = llm.generate(prompt, GREEDY)[0]
        assert after.num_cached_tokens == 0
    with LLM(module, block_size=8, prefix_cache=False) as llm:
        assert facts(llm.generate(prompt, GREEDY)[0]) == facts(after)
