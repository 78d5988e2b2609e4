"""Known defects of other engines with recurrent layers, a test for each; numbers are those of the issues."""

from __future__ import annotations

from typing import Any

import pytest

from support.mtp_toys import toy
from support.pairwise import parametrize_combinations
from support.requests_mixed import facts, keep_prefixes
from support.toys import make_toy, random_ids
from verbatim import LLM, SamplingParams
from verbatim.draft import Mtp

ONE_OF_EACH = ["qwen3_5", "granite_dense", "lfm2", "mamba"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0, seed=1)
SYSTEM = random_ids(40, seed=3)
# Prompts that repeat themselves, so that prompt lookup drafts, after a common system prompt.
PROMPTS = [SYSTEM + random_ids(5, seed=s) * 4 for s in range(4)]


def plain(model: Any, prompts: list[list[int]], **options: Any) -> list[Any]:
    """Each prompt alone, without a cache and without drafts."""
    with LLM(model, prefix_cache=False, **options) as llm:
        return [facts(llm.generate([prompt], GREEDY)[0]) for prompt in prompts]


def test_mtp_with_prefix_cache_gives_same_bits() -> None:
    """SkyRL 1981, vLLM 47194 and 53912: accuracy fell from 25.6 to 8.8 %."""
    pair = toy("qwen3_5", 1)
    expected = plain(pair.main, PROMPTS)
    with LLM(pair.main, draft=Mtp(pair.mtp), num_draft_tokens=3, block_size=4) as llm:
        keep_prefixes(llm)
        for _ in range(2):
            assert [facts(llm.generate([p], GREEDY)[0]) for p in PROMPTS] == expected
        assert llm.stats()["draft"]["drafted"] > 0


@pytest.mark.parametrize("draft", ["ngram", "early-exit"])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_drafts_do_not_disable_prefix_cache(name: str, draft: str) -> None:
    """vLLM 54360: speculation silently switched prefix hits off."""
    with LLM(make_toy(name), draft=draft, num_draft_tokens=3, block_size=4) as llm:
        keep_prefixes(llm)
        llm.generate([PROMPTS[0]], GREEDY)
        again = llm.generate([PROMPTS[0]], GREEDY)[0]
    assert again.num_cached_tokens == (len(PROMPTS[0]) - 1) // 4 * 4


@parametrize_combinations(name=ONE_OF_EACH, tokens=[1, 3, 7])
def test_prompt_of_draft_length_plus_one_is_not_taken_for_draft(name: str, tokens: int) -> None:
    """vLLM 53051: a prompt of 1 + draft tokens was taken for a draft."""
    model, prompts = make_toy(name), [[7] * (tokens + 1), random_ids(tokens + 1, seed=5)]
    expected = plain(model, prompts)
    with LLM(model, draft="ngram", num_draft_tokens=tokens) as llm:
        assert [facts(r) for r in llm.generate(prompts, GREEDY)] == expected


@parametrize_combinations(
    name=ONE_OF_EACH,
    lengths=[(64, 8), (60, 8), (30, 20), (128, 10), (63, 4), (1, 70), (127, 4)],
)
def test_scoring_in_one_pass_gives_logprobs_of_decode(name: str, lengths: tuple[int, int]) -> None:
    """SGLang 13309: chunks of a prompt and steps of decode computed other numbers."""
    prompt, decode = lengths
    params = GREEDY.replace(max_tokens=decode, temperature=1.0, seed=9)
    with LLM(make_toy(name), prefix_cache=False) as llm:
        ids = random_ids(prompt, seed=prompt)
        (output,) = llm.generate([ids], params)[0].outputs
        (scores,) = llm.score([ids + output.token_ids])
    assert scores[prompt:] == output.logprobs
