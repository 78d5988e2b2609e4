"""Structured outputs in the engine: with samples, stop strings, beams and preemptions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from support.requests_mixed import all_facts, facts, submitted
from support.schemas import BY_HAND, TREE
from verbatim import LLM, FinishReason, RequestFailed, SamplingParams

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def storyteller() -> Iterator[LLM]:
    with LLM() as llm:
        yield llm


def _check(schema: Any, result: Any) -> int:
    jsonschema = pytest.importorskip("jsonschema")
    done = [c for c in result.outputs if c.finish_reason is FinishReason.STOP]
    for c in done:
        jsonschema.Draft202012Validator(schema).validate(json.loads(c.text))
    return len(done)


def test_schemas_hold_beside_unconstrained_requests(storyteller: LLM) -> None:
    free = SamplingParams(seed=3, max_tokens=40)
    expected = facts(storyteller.generate(PROMPT, free)[0])
    two = SamplingParams(max_tokens=150, n=2, temperature=0.7)
    params = [two.replace(json_schema=schema, seed=i) for i, schema in enumerate(BY_HAND)]
    results = storyteller.generate([PROMPT] * (len(params) + 1), [*params, free])
    assert facts(results[-1]) == expected
    finished = sum(_check(s, r) for s, r in zip(BY_HAND, results[:-1], strict=True))
    assert finished > len(BY_HAND)


def test_structures_ignore_torch_default_device(storyteller: LLM) -> None:
    with torch.device("meta"):
        result = storyteller.generate(PROMPT, SamplingParams(choice=["a hat"], max_tokens=9))[0]
    assert result.outputs[0].text == "a hat"


def test_regex_choice_and_grammar_hold_for_samples_and_greedy(storyteller: LLM) -> None:
    choices = ["a cat", "a cat and a dog", 'the "red" fox', "né"]
    regex = r"[A-Z][a-z]{2,6}( [a-z]{1,6}){2}\."
    lark = 'start: "(" start ")" | WORD\nWORD: /[a-z]{1,5}/'
    for temperature in (0.0, 1.0):
        plain = SamplingParams(temperature=temperature, seed=2, n=4, max_tokens=60)
        structures: Any = (dict(regex=regex), dict(choice=choices), dict(grammar=lark))
        all_params = [plain.replace(**structure) for structure in structures]
        matching, chosen, nested = storyteller.generate([PROMPT] * 3, all_params)
        for c in matching.outputs:
            assert re.fullmatch(regex, c.text)
        assert all(c.text in choices for c in chosen.outputs)
        for c in nested.outputs:
            if c.finish_reason is FinishReason.STOP:
                depth = c.text.count("(")
                assert re.fullmatch(rf"\({{{depth}}}[a-z]{{1,5}}\){{{depth}}}", c.text)


def test_stop_string_and_ignore_eos_end_structured_output(storyteller: LLM) -> None:
    params = SamplingParams(seed=1, max_tokens=80, regex=r"[a-z]{3} [a-z]{3} [a-z]{3}")
    whole = storyteller.generate(PROMPT, params)[0].outputs[0]
    assert whole.finish_reason is FinishReason.STOP and isinstance(whole.stop_reason, int)
    cut = storyteller.generate(PROMPT, params.replace(stop=[" "]))[0].outputs[0]
    assert cut.text == whole.text.split(" ")[0] and cut.stop_reason == " "
    bare = storyteller.generate(PROMPT, params.replace(ignore_eos=True))[0].outputs[0]
    assert (bare.text, bare.stop_reason) == (whole.text, None)
    assert bare.finish_reason is FinishReason.STOP and bare.token_ids == whole.token_ids[:-1]
    assert len(bare.logprobs) == len(bare.token_ids)


def test_beams_follow_the_structure(storyteller: LLM) -> None:
    choices = ["a cat", "a dog", "an owl"]
    params = SamplingParams(num_beams=4, n=4, max_tokens=40, choice=choices)
    outputs = storyteller.generate(PROMPT, params)[0].outputs
    assert len({c.text for c in outputs}) > 1 and {c.text for c in outputs} <= set(choices)
    scores = [c.score for c in outputs]
    assert None not in scores and scores == sorted(scores, reverse=True)  # type: ignore[type-var]


def test_structures_survive_preemptions_and_small_chunks(storyteller: LLM) -> None:
    two = SamplingParams(json_schema=TREE, n=2, max_tokens=60, temperature=0.9, logprobs=1)
    all_params = [two.replace(seed=i) for i in range(4)]
    expected = all_facts(storyteller.generate([PROMPT] * 4, all_params))
    per_token = storyteller.info()["kv_bytes_per_token"]
    with LLM(kv_memory=per_token * 160, block_size=8, max_batch_tokens=7) as llm:
        assert all_facts(llm.generate([PROMPT] * 4, all_params)) == expected
        assert llm.stats()["preemptions"] > 0


def test_structure_made_impossible_by_other_bans_fails_alone(storyteller: LLM) -> None:
    dead_end = SamplingParams(choice=["a"], allowed_token_ids=[5], max_tokens=9)
    params = [dead_end, SamplingParams(max_tokens=5, seed=1)]
    requests = submitted(storyteller, [PROMPT] * 2, params)
    while storyteller.engine.step():
        pass
    assert isinstance(requests[0].error, RequestFailed) and "structure" in str(requests[0].error)
    assert requests[1].result is not None
