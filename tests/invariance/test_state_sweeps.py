"""Recurrent models, one of each family: lengths, chunks, threads, drafts, NaN, and little memory."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from support.drafters import Oracle, answers_of
from support.pairwise import parametrize_combinations, slow_but
from support.pools import check_pool
from support.requests_mixed import (
    all_facts,
    check_nothing_is_left,
    facts,
    generated,
    keep_prefixes,
    mixed_requests,
    submitted,
)
from support.toys import RECURRENT_FAMILIES, RECURRENT_TOYS, make_toy, random_ids
from verbatim import LLM, OutOfBlocks, RequestFailed, SamplingParams
from verbatim.placement.options import EngineOptions

one_fast = pytest.mark.parametrize("name", slow_but(["qwen3_5"], RECURRENT_FAMILIES))
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=0, seed=1)


@one_fast
def test_prefix_of_any_length_to_200_is_cached_with_same_bits(name: str) -> None:
    stem, tail = random_ids(200, seed=7), random_ids(5, seed=8)
    # Every offset in a block of 4 tokens, and in a chunk of 64.
    model, lengths = make_toy(name), range(1, 201, 5)
    expected = generated(LLM(model, prefix_cache=False), [stem[:n] + tail for n in lengths], GREEDY)
    with LLM(model, block_size=4) as llm:
        keep_prefixes(llm)
        for n, same in zip(lengths, expected, strict=True):
            for _ in range(2):  # the state where two prompts diverge is cached the second time
                result = llm.generate([stem[:n] + tail], GREEDY)[0]
                assert facts(result) == same, n
            assert result.num_cached_tokens == (n + len(tail) - 1) // 4 * 4


@pytest.mark.slow
@pytest.mark.parametrize("name", RECURRENT_FAMILIES)
def test_chunks_of_1_to_70_tokens_give_same_bits(name: str) -> None:
    prompts = [random_ids(n, seed=n) for n in (150, 3, 71)]
    params = GREEDY.replace(prompt_logprobs=0)
    with LLM(make_toy(name), prefix_cache=False) as llm:
        expected = all_facts(llm.generate(prompts, params))
        for size in (1, 3, 4, 8, 15, 16, 17, 33, 64, 70):
            llm.engine.scheduler.max_batch_tokens = size
            assert all_facts(llm.generate(prompts, params)) == expected, size


@pytest.mark.slow
@pytest.mark.parametrize("name", RECURRENT_FAMILIES)
def test_number_of_threads_does_not_change_bits(name: str) -> None:
    # Wide enough that work is shared among threads, in heads as well as in columns.
    wide = dict(mamba_d_head=64) if name == "granite_dense" else {}
    model = make_toy(name, hidden_size=256, intermediate_size=512, **wide)
    prompts, params = mixed_requests(12)
    found = []
    for count in (1, 2, 3, 7):
        with LLM(model, num_threads=count) as llm:
            found.append(all_facts(llm.generate(prompts, params)))
    assert all(facts == found[0] for facts in found[1:])


@one_fast
def test_drafts_with_any_number_of_accepted_tokens_give_same_bits(name: str) -> None:
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
@pytest.mark.parametrize("name", RECURRENT_FAMILIES[::2])
def test_100_sessions_share_20_state_slots(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a few states fit; the others are computed again."""
    model, count = make_toy(name), 100
    turns = [[random_ids(6 + i % 5, seed=1000 * t + i) for i in range(count)] for t in (1, 2)]
    with LLM(model) as llm:
        first = llm.generate(turns[0], GREEDY)
        histories = [a + r.outputs[0].token_ids for a, r in zip(turns[0], first, strict=True)]
        prompts = [a + b for a, b in zip(histories, turns[1], strict=True)]
        expected = [r.outputs[0].token_ids for r in llm.generate(prompts, GREEDY)]
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
def test_2000_random_requests_stay_within_12_state_slots(name: str, monkeypatch: Any) -> None:
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
                engine.call(engine.scheduler.evict_all)
            while len(waiting) > draw.randrange(1, 12):
                engine.step()
                check_pool(slots)
                for i, done in [(i, r) for i, r in waiting if r.result is not None]:
                    assert facts(done.result) == expected[i], number
                waiting = [(i, r) for i, r in waiting if r.result is None]
        while engine.step():
            pass
        assert llm.stats()["preemptions"] > 0 and engine.scheduler.prefixes.num_hits > 0
        check_nothing_is_left(llm)


# ---- NaN, and little memory

NAN_ID = 4
MORE = GREEDY.replace(max_tokens=8)


@contextmanager
def nan_embedding(model: Any) -> Iterator[None]:
    """Make the embedding of `NAN_ID` NaN, as a defect of a checkpoint or an overflow would."""
    weight = model.get_input_embeddings().weight.data
    kept = weight[NAN_ID].clone()
    weight[NAN_ID] = torch.nan
    try:
        yield
    finally:
        weight[NAN_ID] = kept


@parametrize_combinations(4, name=RECURRENT_FAMILIES, draft=[None, "ngram"])
def test_nan_state_fails_only_its_request(name: str, draft: str | None) -> None:
    model, params = make_toy(name, tie_word_embeddings=False), MORE.replace(bad_words=[[NAN_ID]])
    good = [[i for i in random_ids(n, seed=n) if i != NAN_ID] for n in (9, 40, 3)]
    bad = [[*random_ids(12, seed=1), NAN_ID, *random_ids(3, seed=2)], [NAN_ID]]
    with nan_embedding(model), LLM(model, draft=draft, block_size=4) as llm:
        keep_prefixes(llm)
        expected = all_facts(llm.generate(good, params))
        for _ in range(3):  # slots that held NaN are used again
            requests = submitted(llm, [*bad, *good], [params] * 5)
            while llm.engine.step():
                pass
            for request in requests[: len(bad)]:
                assert isinstance(request.error, RequestFailed)
            assert all_facts([r.result for r in requests[len(bad) :]]) == expected
        check_nothing_is_left(llm)


@pytest.mark.parametrize("name", slow_but(RECURRENT_FAMILIES[::3], RECURRENT_FAMILIES))
def test_results_are_same_without_room_for_state_snapshots(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = make_toy(name), random_ids(33, seed=1)
    expected = generated(LLM(model, prefix_cache=False), [prompt] * 3, MORE)
    # The zero state, and those that one sequence reads and writes.
    monkeypatch.setattr(EngineOptions, "num_states", lambda self, state_bytes: 3)
    with LLM(model, block_size=4, draft="ngram") as llm:
        keep_prefixes(llm)
        assert all_facts(llm.generate([prompt] * 3, MORE)) == expected
        assert facts(llm.generate([prompt], MORE)[0]) == expected[0]
        check_nothing_is_left(llm)


@pytest.mark.parametrize("name", slow_but(RECURRENT_FAMILIES[::3], RECURRENT_TOYS))
def test_kv_memory_below_one_state_raises_out_of_blocks(name: str) -> None:
    model = make_toy(name)
    with LLM(model) as llm:
        needed = 6 * llm.info()["state_bytes"]
    with pytest.raises(OutOfBlocks, match=r"recurrent states.*needs 3 slots of \d+ bytes"):
        LLM(model, kv_memory=needed - 1)


@pytest.mark.parametrize("name", slow_but(RECURRENT_FAMILIES[::6], RECURRENT_FAMILIES))
def test_samples_that_fork_during_drafts_keep_their_states(name: str) -> None:
    model, prompt = make_toy(name), random_ids(19, seed=4)
    params = SamplingParams(n=4, max_tokens=40, seed=3, ignore_eos=True, logprobs=0)
    with LLM(model) as llm:
        (plain,) = llm.generate([prompt], params)
    calls = itertools.count(1)
    oracle = Oracle(answers_of([plain]), right=lambda sequence: next(calls) % 5)
    with LLM(model, draft=oracle, num_draft_tokens=4, block_size=4) as llm:
        engine = llm.engine
        requests = [engine.admission.admit(prompt, params) for _ in range(3)]
        for request in requests:  # the later ones share the prompt of a request that is drafting
            engine.submit(request)
            for _ in range(4):
                engine.step()
        engine.call(engine.scheduler.evict_all)
        while engine.step():
            pass
        assert all_facts([r.result for r in requests]) == [facts(plain)] * 3
        totals = engine.drafting.totals
        assert 0 < sum(totals.num_accepted) < sum(totals.num_drafted)
        check_nothing_is_left(llm)
