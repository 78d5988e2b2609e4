"""Beam search through the whole engine: same ids and scores as transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.pairwise import parametrize_combinations
from support.toys import make_toy, random_ids
from verbatim import LLM, SamplingParams

NAMES = ["llama", "mistral", "qwen3_moe", "gpt2", "bloom", "gemma2", "deepseek_v3"]
PROMPTS = [random_ids(n, seed=n) for n in (17, 3, 9, 26)]


def theirs(model: Any, num_beams: int, **settings: Any) -> list[list[tuple[list[int], float]]]:
    """Return ids and score of each beam of each prompt from transformers, for the left-padded batch."""
    width = max(map(len, PROMPTS))
    padded = torch.tensor([[0] * (width - len(p)) + p for p in PROMPTS])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in PROMPTS])
    out = model.generate(
        padded,
        attention_mask=mask,
        num_beams=num_beams,
        num_return_sequences=num_beams,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        pad_token_id=0,
        **settings,
    )
    lengths = (out.beam_indices >= 0).sum(dim=1).tolist()
    rows = out.sequences[:, width:].tolist()
    found = [
        (row[:n], float(score))
        for row, n, score in zip(rows, lengths, out.sequences_scores, strict=True)
    ]
    return [found[i : i + num_beams] for i in range(0, len(found), num_beams)]


@parametrize_combinations(4, name=NAMES, ending=[(1.0, False), (0.5, True), (2.0, "never")])
def test_beam_search_matches_transformers(name: str, ending: tuple[float, bool | str]) -> None:
    length_penalty, early_stopping = ending
    model = make_toy(name)
    # Ids that are likely enough to end some hypotheses early.
    with LLM(model) as llm:
        greedy = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=8))
    likely = sorted({r.outputs[0].token_ids[-2] for r in greedy})[:2]
    model.generation_config.eos_token_id = likely
    settings = dict(length_penalty=length_penalty, early_stopping=early_stopping)
    expected = theirs(model, 4, max_new_tokens=11, **settings)
    with LLM(model, block_size=4) as llm:
        params = SamplingParams(num_beams=4, n=4, max_tokens=11, **settings)  # type: ignore[arg-type]
        results = llm.generate(PROMPTS, params)
        assert llm.stats()["blocks_used"] == 0
    ended = 0
    for result, beams in zip(results, expected, strict=True):
        assert [c.token_ids for c in result.outputs] == [ids for ids, _ in beams]
        for c, (_, score) in zip(result.outputs, beams, strict=True):
            assert c.score == pytest.approx(score, rel=2e-5, abs=2e-5)
            assert c.sampled_logprobs is None and len(c.logprobs) == len(c.token_ids)
            total = sum(c.logprobs) / len(c.token_ids) ** length_penalty
            assert total == pytest.approx(c.score, rel=1e-5)
            ended += c.finish_reason == "stop"
    # With a large penalty long hypotheses win. Otherwise some must end early, or the test shows little.
    assert ended or length_penalty > 0.5
