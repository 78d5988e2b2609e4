"""Comparison with transformers: the same greedy ids and log-probs, per architecture."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.pairwise import slow_but
from support.toys import RECURRENT_FAMILIES, TOYS, make_toy, random_ids, scores_of
from verbatim import LLM, SamplingParams

# Longer than the toys' sliding windows of 7, to detect a window that is not applied.
PROMPTS = [random_ids(length, seed=length) for length in (19, 3, 11, 1, 26)]


def transformers_greedy(model: Any, prompt: list[int], max_new_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=2,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


# `test_sweep.py` compares the logits of all architectures.
@pytest.mark.parametrize(
    "name",
    slow_but(
        [*list(TOYS)[::8], *RECURRENT_FAMILIES[::4]], [*list(TOYS)[::4], *RECURRENT_FAMILIES[::2]]
    ),
)
def test_greedy_tokens_equal_transformers(name: str) -> None:
    model = make_toy(name)
    model.generation_config.eos_token_id = 2
    expected = [transformers_greedy(model, prompt, 12) for prompt in PROMPTS]
    with LLM(model) as llm:
        results = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=12))
    assert [r.outputs[0].token_ids for r in results] == expected


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma2", "gpt_oss", "gpt2", "bloom"])
def test_scores_have_bits_of_generation_and_match_transformers(name: str) -> None:
    model = make_toy(name)
    params = [SamplingParams(seed=i, max_tokens=14, ignore_eos=True) for i in range(len(PROMPTS))]
    with LLM(model) as llm:
        results = llm.generate(PROMPTS, params)
        rows = [r.prompt_token_ids + r.outputs[0].token_ids for r in results]
        scores = llm.score(rows)
    for result, row, score in zip(results, rows, scores, strict=True):
        prompt_length = len(result.prompt_token_ids)
        assert score[0] is None and len(score) == len(row)
        assert score[prompt_length:] == result.outputs[0].logprobs
        assert torch.allclose(torch.tensor(score[1:]), scores_of(model, row), atol=1e-4)


def test_top_logprobs_match_transformers() -> None:
    model = make_toy("qwen3")
    prompt = PROMPTS[0]
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5, prompt_logprobs=4)
    with LLM(model) as llm:
        result = llm.generate([prompt], params)[0]
    with torch.no_grad():
        truth = model(input_ids=torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert result.outputs[0].top_logprobs is not None and result.prompt_top_logprobs is not None
    found = [result.prompt_top_logprobs[i] for i in range(1, len(prompt))]
    for row, top in zip(truth, [*found, result.outputs[0].top_logprobs[0]], strict=True):
        assert top is not None
        values, ids = row.topk(len(top))
        assert [i for i, _ in top] == ids.tolist()
        assert torch.allclose(torch.tensor([p for _, p in top]), values, atol=1e-4)
