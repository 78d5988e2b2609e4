"""Streamed text: deltas join, characters stay whole, stop strings are never sent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support import toy_tokenizers
from support.toys import make_toy
from verbatim import LLM, SamplingParams
from verbatim.batch import Draw, Draws, SamplePlan
from verbatim.protocols import Forward


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """A toy whose tokens are words, parts of CJK characters and emoji, and invalid bytes."""
    tokenizer = getattr(toy_tokenizers, request.param)()
    model = make_toy("llama", vocab_size=tokenizer.vocab_size)
    with LLM(model, tokenizer=tokenizer.hf) as opened:
        yield opened


PARAMS = SamplingParams(max_tokens=60, temperature=1.8, ignore_eos=True)


def test_deltas_join_to_the_completion_text(llm: LLM) -> None:
    assert llm.tokenizer is not None
    texts = set()
    for seed in range(6):
        deltas = list(llm.stream("日本 🙂 the fox", PARAMS.replace(seed=seed)))
        completion = deltas[-1].result.outputs[0] if deltas[-1].result else None
        assert completion is not None and len(completion.token_ids) == 60
        assert "".join(d.text for d in deltas) == completion.text
        texts.add(completion.text)
    assert len(texts) == 6


def replay(llm: LLM, monkeypatch: pytest.MonkeyPatch, text: str) -> list[int]:
    """Make the engine sample the ids of `text` whatever the logits are; return the ids."""
    assert llm.tokenizer is not None
    ids = llm.tokenizer.hf.encode(text, add_special_tokens=False)
    script = iter(ids)

    def sample(forward: Forward, plan: SamplePlan) -> Draws:
        return [Draw(next(script), -1.0, -1.0, [], [])] * len(plan.rows)

    monkeypatch.setattr(llm.engine.runner, "sample", sample)
    return ids


TEXT = "the fox 日本語 🙂 über 👩‍👩‍👧 naïve e\u0301 中文!"


def test_characters_split_over_tokens_are_streamed_whole(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert llm.tokenizer is not None
    ids = replay(llm, monkeypatch, TEXT)
    assert len(ids) > 20
    params = SamplingParams(max_tokens=len(ids), ignore_eos=True)
    deltas = list(llm.stream("one", params))
    assert "".join(d.text for d in deltas).strip() == TEXT
    assert not any("\N{REPLACEMENT CHARACTER}" in d.text for d in deltas)


@pytest.mark.parametrize("stop", ["🙂", "語 🙂", "👩‍👧", "本", "e\u0301 中", "!"])
def test_stop_string_of_split_characters_cuts_before_it(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, stop: str
) -> None:
    ids = replay(llm, monkeypatch, TEXT)
    params = SamplingParams(max_tokens=len(ids), ignore_eos=True, stop=[stop, "absent"])
    deltas = list(llm.stream("one", params))
    sent = "".join(d.text for d in deltas)
    assert sent.strip() == TEXT[: TEXT.index(stop)].strip()
    assert deltas[-1].stop_reason == stop
    assert deltas[-1].result is not None
    assert deltas[-1].result.outputs[0].token_ids == [i for d in deltas for i in d.token_ids]
