"""Logits processors, compared with transformers' on logits without ties; ties and edge cases by hand."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from support.processing import process
from verbatim.batch import IdValues, SampleRow
from verbatim.core import BadWords, TokenCounts
from verbatim.errors import InvalidRequest
from verbatim.params import SamplingParams
from verbatim.sampling.processors import bitmask, check_vocabulary

INF = math.inf


def a_row(logits_seed: int, vocab_size: int = 1000, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(logits_seed)
    logits = torch.randn(vocab_size, generator=generator) * scale
    assert logits.unique().numel() == vocab_size
    return logits


def survivors(logits: Tensor) -> list[int]:
    return (logits > -INF).nonzero().squeeze(1).tolist()


def run(
    logits: Tensor, *, prompt: tuple[int, ...] = (), output: tuple[int, ...] = (), **kw
) -> Tensor:
    counts = TokenCounts(prompt).after(output) if prompt or output else None
    return process(logits, SampleRow(SamplingParams(**kw), 0, 0, 0, counts))


WARPERS = {
    "top_k": lambda k: hf.TopKLogitsWarper(top_k=k),
    "top_p": lambda p: hf.TopPLogitsWarper(top_p=p),
    "min_p": lambda p: hf.MinPLogitsWarper(min_p=p),
    "typical_p": lambda p: hf.TypicalLogitsWarper(mass=p),
}
CASES = [
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 5000},
    {"top_p": 1e-6},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"typical_p": 0.2},
    {"typical_p": 0.9},
    {"top_k": 50, "top_p": 0.9},
    {"top_p": 0.9, "min_p": 0.1},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.8},
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
def test_filters_keep_the_same_tokens_as_transformers(case: dict, temperature: float) -> None:
    for logits_seed in range(5):
        logits = a_row(logits_seed)
        # Transformers sums its probabilities in the dtype of the logits: float64 rounds least.
        theirs = hf.TemperatureLogitsWarper(temperature)(None, logits[None]).double()
        for name, value in case.items():
            theirs = WARPERS[name](value)(None, theirs)
        ours = run(logits, temperature=temperature, **case)
        assert torch.equal(ours.double(), theirs[0])


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.5, 7.0])
def test_temperature_is_bit_identical_to_transformers(temperature: float) -> None:
    logits = a_row(3)
    theirs = hf.TemperatureLogitsWarper(temperature)(None, logits[None])[0]
    assert torch.equal(run(logits, temperature=temperature), theirs)


def test_repetition_penalty_is_bit_identical_to_transformers() -> None:
    logits = a_row(4)
    prompt, output = (5, 7, 7, 900), (7, 8, 999)
    theirs = hf.RepetitionPenaltyLogitsProcessor(1.3)(
        torch.tensor([[*prompt, *output]]), logits[None].clone()
    )[0]
    ours = run(logits, prompt=prompt, output=output, repetition_penalty=1.3)
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, logits)


def test_bfloat16_logits_are_filtered_in_float32() -> None:
    logits = a_row(5).bfloat16()
    kw = {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1}
    assert torch.equal(run(logits, prompt=(1, 2), **kw), run(logits.float(), prompt=(1, 2), **kw))
    assert run(logits, **kw).dtype == torch.float32


def test_presence_and_frequency_penalties_ignore_the_prompt() -> None:
    logits = torch.zeros(6)
    ours = run(
        logits, prompt=(0, 0), output=(1, 1, 1, 2), presence_penalty=0.5, frequency_penalty=0.25
    )
    assert ours.tolist() == [0.0, -1.25, -0.75, 0.0, 0.0, 0.0]


def test_banned_ids_override_logit_bias() -> None:
    row = SampleRow(
        SamplingParams(), 0, 0, 0, bias=IdValues.of({1: 5.0, 2: -3.0}), banned_ids=[1, 4]
    )
    assert process(torch.zeros(5), row).tolist() == [0.0, -INF, -3.0, 0.0, -INF]


def test_mask_keeps_only_the_allowed_ids() -> None:
    row = SampleRow(SamplingParams(), 0, 0, 0, mask=bitmask([7, 2, 2], 9))
    assert survivors(process(torch.zeros(9), row)) == [2, 7]


def test_penalties_are_applied_before_temperature() -> None:
    ours = run(torch.tensor([4.0, 2.0]), prompt=(0,), repetition_penalty=2.0, temperature=0.5)
    assert ours.tolist() == [4.0, 4.0]


def test_ids_outside_the_vocabulary_are_ignored() -> None:
    logits = torch.tensor([1.0, 2.0, 3.0])
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=1.0)
    counts, bias = TokenCounts([77, -1]).after([88, -2]), IdValues.of({66: 1.0, -3: 1.0})
    row = SampleRow(params, 0, 0, 0, counts, bias, banned_ids=[99, -1])
    assert torch.equal(process(logits, row), logits)


def test_counts_of_a_growing_completion_are_those_of_the_whole() -> None:
    ids = [5, 7, 5, *range(100, 300), 7, 5, 300, 300]
    counts = TokenCounts([1, 7, 1])
    for length in (0, 2, 3, 150, len(ids)):
        for ahead in ([], [7, 900, 900]):
            found = counts.copy().after(ids[:length], ahead)
            same = counts.after(ids[:length], ahead)
            expected = Counter(ids[:length] + ahead)
            assert dict(zip(found.ids.tolist(), found.values.tolist(), strict=True)) == {
                i: expected[i] for i in {1, 7, *expected}
            }
            assert torch.equal(found.ids, same.ids) and torch.equal(found.values, same.values)


def test_top_k_keeps_all_ties_of_the_kth_logit() -> None:
    assert survivors(run(torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 0.0]), top_k=2)) == [1, 2, 3, 4]


def test_top_k_treats_zeros_of_both_signs_as_ties() -> None:
    assert survivors(run(torch.tensor([-0.0, 0.0, -1.0]), top_k=1)) == [0, 1]


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.2, [0]), (0.25, [0]), (0.26, [0, 1]), (0.5, [0, 1]), (0.9, [0, 1, 2, 3])]
)
def test_top_p_breaks_ties_by_id_and_keeps_the_token_that_crosses_top_p(
    top_p: float, kept: list[int]
) -> None:
    assert survivors(run(torch.zeros(4), top_p=top_p)) == kept


def test_process_does_not_modify_its_input() -> None:
    logits = a_row(6)
    before = logits.clone()
    row = SampleRow(
        SamplingParams(
            temperature=0.5,
            top_k=9,
            top_p=0.9,
            min_p=0.1,
            typical_p=0.9,
            repetition_penalty=1.5,
            presence_penalty=1.0,
        ),
        *(0, 0, 0, TokenCounts([1, 2]).after([3]), IdValues.of({3: 1.0}), [4]),
        mask=bitmask(range(500), 1000),
    )
    process(logits, row)
    assert torch.equal(logits, before)


def test_temperature_0_skips_the_filters() -> None:
    logits = a_row(7)
    assert torch.equal(run(logits, temperature=0.0, top_k=3, top_p=0.5), logits)


def test_bad_words_block_the_same_ids_as_transformers() -> None:
    words = [[3], [1, 2], [1, 2, 4], [9, 9, 9, 9], [2, 5], [1, 2, 5]]
    processor = hf.NoBadWordsLogitsProcessor([list(w) for w in words])
    # Histories are as long as the longest word: older versions skip a word that is longer than the history.
    for ending in ([1], [1, 2], [7, 1, 2], [9, 9, 9], [2, 1], [9, 9]):
        history = [7] * (4 - len(ending)) + ending
        theirs = processor(torch.tensor([history]), torch.zeros(1, 12))[0]
        ours = BadWords(tuple(w) for w in words).blocked(history)
        assert sorted(ours) == (theirs == -INF).nonzero().squeeze(1).tolist()


def test_single_token_bad_words_are_blocked_without_history() -> None:
    assert BadWords([(3,), (1, 2)]).blocked([]) == [3]


@pytest.mark.parametrize(
    "kw",
    [
        {"logit_bias": {100: 1.0}},
        {"allowed_token_ids": [3, 100]},
        {"bad_words": [[1, 100]]},
        {"stop_token_ids": [100]},
    ],
)
def test_ids_outside_the_models_vocabulary_are_rejected(kw: dict) -> None:
    check_vocabulary(SamplingParams(**kw), 101)
    with pytest.raises(InvalidRequest, match=f"{next(iter(kw))}.*100.*0 to 99"):
        check_vocabulary(SamplingParams(**kw), 100)


@pytest.mark.parametrize("size", [1, 31, 32, 33, 1000])
def test_mask_drops_ids_without_a_bit_and_leaves_other_logits_unchanged(size: int) -> None:
    logits = torch.randn(size, generator=torch.Generator().manual_seed(size))
    logits[::7] = -math.inf
    allowed = [i for i in range(size) if (i * 2654435761) % 5 < 2]
    words = [0] * ((size + 31) // 32)
    for i in allowed:
        words[i // 32] |= 1 << i % 32
    mask = torch.tensor(words).to(torch.uint32).view(torch.int32)
    expected = torch.full((size,), -math.inf)
    expected[allowed] = logits[allowed]
    assert torch.equal(
        process(logits, SampleRow(SamplingParams(temperature=0), 0, 0, 0, mask=mask)), expected
    )
