"""Models with recurrent layers under hostile input: NaN, no room for states, forks amid drafts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from support.drafters import Oracle, answers_of
from support.pairwise import parametrize_combinations, slow_but
from support.requests_mixed import all_facts, facts, generated
from support.states import check_nothing_is_left
from support.toys import RECURRENT_FAMILIES, RECURRENT_TOYS, make_toy, random_ids
from verbatim import LLM, OutOfBlocks, RequestFailed, SamplingParams
from verbatim.placement.options import EngineOptions

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0, seed=1)
NAN_ID = 4


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


@parametrize_combinations(name=RECURRENT_FAMILIES, draft=[None, "ngram"])
def test_a_state_of_nan_fails_its_request_alone(name: str, draft: str | None) -> None:
    model, params = make_toy(name, tie_word_embeddings=False), GREEDY.replace(bad_words=[[NAN_ID]])
    good = [[i for i in random_ids(n, seed=n) if i != NAN_ID] for n in (9, 40, 3)]
    bad = [[*random_ids(12, seed=1), NAN_ID, *random_ids(3, seed=2)], [NAN_ID]]
    with nan_embedding(model), LLM(model, draft=draft, block_size=4) as llm:
        llm.engine.live = False  # its cached prefixes outlive what runs
        expected = all_facts(llm.generate(good, params))
        for _ in range(3):  # slots that held NaN are used again
            requests = [llm.engine.admission.admit(p, params) for p in [*bad, *good]]
            for request in requests:
                llm.engine.submit(request)
            while llm.engine.step():
                pass
            for request in requests[: len(bad)]:
                assert isinstance(request.error, RequestFailed)
            assert all_facts([r.result for r in requests[len(bad) :]]) == expected
        check_nothing_is_left(llm)


@pytest.mark.parametrize("name", slow_but(RECURRENT_FAMILIES[::3], RECURRENT_FAMILIES))
def test_without_room_for_snapshots_prompts_are_computed_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = make_toy(name), random_ids(33, seed=1)
    expected = generated(LLM(model, prefix_cache=False), [prompt] * 3, GREEDY)
    # The zero state, and those that one sequence reads and writes.
    monkeypatch.setattr(EngineOptions, "num_states", lambda self, state_bytes: 3)
    with LLM(model, block_size=4, draft="ngram") as llm:
        llm.engine.live = False
        assert all_facts(llm.generate([prompt] * 3, GREEDY)) == expected
        assert facts(llm.generate([prompt], GREEDY)[0]) == expected[0]
        check_nothing_is_left(llm)


@pytest.mark.parametrize("name", slow_but(RECURRENT_FAMILIES[::3], RECURRENT_TOYS))
def test_a_budget_below_one_state_is_refused_by_name(name: str) -> None:
    model = make_toy(name)
    with LLM(model) as llm:
        needed = 6 * llm.info()["state_bytes"]
    with pytest.raises(OutOfBlocks, match=r"recurrent states.*needs 3 slots of \d+ bytes"):
        LLM(model, kv_memory=needed - 1)


@pytest.mark.parametrize("name", slow_but(RECURRENT_FAMILIES[::3], RECURRENT_FAMILIES))
def test_samples_that_fork_amid_drafts_keep_their_states(name: str) -> None:
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
        engine.evict_all()
        while engine.step():
            pass
        assert all_facts([r.result for r in requests]) == [facts(plain)] * 3
        totals = engine.drafting.totals
        assert 0 < sum(totals.num_accepted) < sum(totals.num_drafted)
        check_nothing_is_left(llm)
