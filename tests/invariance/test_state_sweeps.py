"""Models with recurrent layers, one of each family: all lengths, chunks, threads, and long runs."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from support.drafters import Oracle, answers_of
from support.pairwise import slow_but
from support.requests_mixed import all_facts, facts, generated, mixed_requests
from support.states import check_nothing_is_left
from support.toys import RECURRENT_FAMILIES, make_toy, random_ids
from verbatim import LLM, PromptTooLong, SamplingParams
from verbatim.placement.options import EngineOptions

two_fast = pytest.mark.parametrize("name", slow_but(("qwen3_5", "lfm2"), RECURRENT_FAMILIES))
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=0, seed=1)


@two_fast
def test_a_prefix_of_any_length_to_200_is_found_and_changes_no_bit(name: str) -> None:
    stem, tail = random_ids(200, seed=7), random_ids(5, seed=8)
    # Every place in a block of 4 tokens, and in a chunk of 64.
    model, lengths = make_toy(name), range(1, 201, 3)
    expected = generated(LLM(model, prefix_cache=False), [stem[:n] + tail for n in lengths], GREEDY)
    with LLM(model, block_size=4) as llm:
        llm.engine.live = False  # its cached prefixes outlive what runs
        for n, same in zip(lengths, expected, strict=True):
            for _ in range(2):  # where a prompt leaves another one is cached the second time
                result = llm.generate([stem[:n] + tail], GREEDY)[0]
                assert facts(result) == same, n
            assert result.num_cached_tokens == (n + len(tail) - 1) // 4 * 4


@pytest.mark.slow
@pytest.mark.parametrize("name", RECURRENT_FAMILIES)
def test_chunks_of_1_to_70_tokens_change_no_bit(name: str) -> None:
    prompts = [random_ids(n, seed=n) for n in (150, 3, 71)]
    params = GREEDY.replace(prompt_logprobs=0)
    with LLM(make_toy(name), prefix_cache=False) as llm:
        expected = all_facts(llm.generate(prompts, params))
        for size in (1, 2, 3, 4, 5, 7, 8, 13, 15, 16, 17, 31, 32, 33, 63, 64, 65, 70):
            llm.engine.scheduler.max_batch_tokens = size
            assert all_facts(llm.generate(prompts, params)) == expected, size


@pytest.mark.slow
@pytest.mark.parametrize("name", RECURRENT_FAMILIES)
def test_threads_change_no_bit(name: str) -> None:
    # Wide enough that work is shared among threads, in heads as well as in columns.
    wide = dict(mamba_d_head=64) if name == "granite_dense" else {}
    model = make_toy(name, hidden_size=256, intermediate_size=512, **wide)
    prompts, params = mixed_requests(12)
    found = []
    for count in (1, 2, 3, 7):
        with LLM(model, num_threads=count) as llm:
            found.append(all_facts(llm.generate(prompts, params)))
    assert all(facts == found[0] for facts in found[1:])


@two_fast
def test_drafts_with_any_number_of_accepted_tokens_change_no_bit(name: str) -> None:
    prompts = [random_ids(n, seed=n) for n in (17, 1, 40)]
    params = SamplingParams(max_tokens=80, seed=5, ignore_eos=True)
    model = make_toy(name)
    with LLM(model) as llm:
        plain = llm.generate(prompts, params)
    calls = itertools.count(1)
    oracle = Oracle(answers_of(plain), right=lambda sequence: next(calls) % 9)
    with LLM(model, draft=oracle, num_draft_tokens=8, block_size=4) as llm:
        assert all_facts(llm.generate(prompts, params)) == all_facts(plain)
        accepted = llm.engine.drafting.totals.num_accepted  # type: ignore[union-attr]
        assert all(accepted[:8]), "every number of accepted tokens from 1 to 8 has occurred"


@pytest.mark.slow
@pytest.mark.parametrize("name", RECURRENT_FAMILIES)
def test_100_sessions_share_a_budget(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have room for a few states only; the others are computed again."""
    model, count = make_toy(name), 100
    turns = [[random_ids(6 + i % 5, seed=1000 * t + i) for i in range(count)] for t in (1, 2)]
    with LLM(model) as llm:
        first = llm.generate(turns[0], GREEDY)
        said = [a + r.outputs[0].token_ids for a, r in zip(turns[0], first, strict=True)]
        asked = [a + b for a, b in zip(said, turns[1], strict=True)]
        expected = [r.outputs[0].token_ids for r in llm.generate(asked, GREEDY)]
        info = llm.info()
    budget = 20 * info["state_bytes"] + (count + 8) * 32 * max(1, info["kv_bytes_per_token"])
    monkeypatch.setattr(EngineOptions, "num_states", lambda self, state_bytes: 20)
    with LLM(model, kv_memory=budget, block_size=4) as llm:
        slots = llm.engine.scheduler.states.pool
        assert slots is not None and slots.num_blocks == 20
        assert llm.info()["kv_bytes"] <= budget
        sessions = [llm.session(max_length=32, seed=1) for _ in range(count)]
        for session, ids in zip(sessions, turns[0], strict=True):
            session.generate(ids, GREEDY)
        again = [s.generate(i, GREEDY) for s, i in zip(sessions, turns[1], strict=True)]
        assert [r.outputs[0].token_ids for r in again] == expected
        for session in sessions:
            session.close()
        llm.generate([[1]], GREEDY)  # frees the blocks of closed sessions
        check_nothing_is_left(llm)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5", "lfm2"])
def test_2000_requests_stay_within_the_slots(name: str, monkeypatch: Any) -> None:
    """Equal prompts, branching prompts, samples, drafts, aborts and evictions, in a random order."""
    model, draw = make_toy(name), random.Random(3)
    stems = [random_ids(n, seed=n) for n in (8, 21, 40)]
    prompts = [draw.choice(stems) + random_ids(1 + i % 9, seed=i) for i in range(40)]
    params = [
        SamplingParams(max_tokens=2 + i % 6, n=1 + (i % 5 == 0), seed=i, ignore_eos=True)
        for i in range(40)
    ]
    expected = generated(LLM(model, prefix_cache=False), prompts, params)
    monkeypatch.setattr(EngineOptions, "num_states", lambda self, state_bytes: 12)
    with LLM(model, block_size=4, kv_memory="1MB", max_batch_tokens=48, draft="ngram") as llm:
        engine = llm.engine
        engine.live = False
        slots, waiting = engine.scheduler.states.pool, []
        assert slots is not None and slots.num_blocks == 12
        for number in range(2000):
            i = draw.randrange(40)
            request = engine.admission.admit(prompts[i], params[i])
            engine.submit(request)
            waiting.append((i, request))
            if number % 17 == 0:
                engine.abort(waiting.pop(draw.randrange(len(waiting)))[1])
            if number % 301 == 0:
                engine.evict_all()
            while len(waiting) > draw.randrange(1, 12):
                engine.step()
                slots.check()
                for i, done in [(i, r) for i, r in waiting if r.result is not None]:
                    assert facts(done.result) == expected[i], number
                waiting = [(i, r) for i, r in waiting if r.result is None]
        while engine.step():
            pass
        assert llm.stats()["preemptions"] > 0 and engine.scheduler.prefixes.num_hits > 0
        check_nothing_is_left(llm)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5", "granite_dense", "lfm2"])
def test_a_context_of_32000_tokens_needs_the_memory_that_info_says(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, length = make_toy(name, max_position_embeddings=40_000), 32_000
    with LLM(model) as llm:
        info = llm.info()
    token_bytes, state_bytes = info["kv_bytes_per_token"], info["state_bytes"]
    # A running sequence needs two slots, of the state that it reads and of that it writes; one is of zeros,
    # and a block is of no sequence.
    monkeypatch.setattr(EngineOptions, "num_states", lambda self, state_bytes: 3)
    memory = (length + 32) * token_bytes + 3 * state_bytes
    prompt = random_ids(length - 2, seed=1)
    with LLM(model, kv_memory=memory, block_size=32) as llm:
        assert llm.info()["kv_bytes"] == memory
        (result,) = llm.generate([prompt], GREEDY.replace(max_tokens=2))
        assert len(result.outputs[0].token_ids) == 2
    with (
        LLM(model, kv_memory=memory - 32 * token_bytes, block_size=32) as llm,
        pytest.raises(PromptTooLong, match="31968"),
    ):
        llm.generate([prompt], GREEDY.replace(max_tokens=2))


@pytest.mark.slow
@pytest.mark.parametrize("name", RECURRENT_FAMILIES)
def test_a_prompt_of_2500_tokens_is_computed_once(name: str) -> None:
    """Asked again, or followed by another turn, at most its last block is computed."""
    model, prompt = make_toy(name, max_position_embeddings=4096), random_ids(2500, seed=1)
    with LLM(model) as llm:
        llm.engine.live = False
        first, again = (llm.generate([prompt], GREEDY)[0] for _ in range(2))
        assert facts(again) == facts(first)
        assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 2496)
        turn = prompt + first.outputs[0].token_ids + random_ids(30, seed=2)
        (result,) = llm.generate([turn], GREEDY)
        assert result.num_cached_tokens >= 2496
