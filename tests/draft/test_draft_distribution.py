"""Words drawn with drafts have the model's own distribution, and drafts stand as often as they should."""

from __future__ import annotations

import math
import sys
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from support.toys import make_toy
from verbatim import LLM, SamplingParams
from verbatim.batch import SamplePlan
from verbatim.core import Sequence
from verbatim.sampling.rows import draw_row
from verbatim.sampling.sampler import sample_rows

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from draft_acceptance import Pair, pairs

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB, PROMPT = 8, [3, 4, 5, 6]


@cache
def model() -> Any:
    """A real one, so small that all it can say is soon said."""
    return make_toy(
        "llama",
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.5,
    )


def open_toy(**options: Any) -> LLM:
    rows = dict(max_sequences=4096, max_batch_tokens=4 * 4096)
    # The prompt fills its block, which so needs no copies, before which nothing is drafted.
    return LLM(model(), kv_memory="64MB", block_size=4, **rows, **options)


@cache
def exact() -> np.ndarray[Any, Any]:
    """`[V, V, V]`: the probability of each beginning of three tokens, by the module's own forward."""
    found = np.ones((VOCAB,) * 3)
    rows = torch.tensor([[*PROMPT, *ids] for ids in product(range(VOCAB), repeat=3)])
    with torch.no_grad():
        chances = model()(input_ids=rows).logits.double().softmax(-1).numpy()
    for i, ids in enumerate(product(range(VOCAB), repeat=3)):
        for j, token_id in enumerate(ids):
            found[ids] *= chances[i, len(PROMPT) - 1 + j, token_id]
    assert math.isclose(found.sum(), 1.0, rel_tol=1e-9)
    return found


class OtherModel:
    """Draws from a distribution of its own, which looks at the last token alone.

    Args:
        shared: with the engine's noise; else with another seed's.
    """

    def __init__(self, shared: bool) -> None:
        self.shared = shared
        self.logits = 1.5 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(4))

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in sequences]
        for step in range(max(lengths)):
            live = [i for i, length in enumerate(lengths) if length > step]
            rows = [draw_row(sequences[i], drafts[i]) for i in live]
            for row in rows:
                row.seed += 0 if self.shared else 2**40
            last = [(sequences[i].output_ids + drafts[i])[-1] for i in live]
            ids = sample_rows(self.logits, SamplePlan(rows, last)).ids
            for i, token_id in zip(live, ids, strict=True):
                drafts[i].append(token_id)
        return drafts


def pvalue(counts: np.ndarray[Any, Any], chances: np.ndarray[Any, Any]) -> float:
    """Of chi-square; what is expected fewer than five times is counted as one."""
    observed, expected = counts.ravel(), chances.ravel() * counts.sum()
    rare = expected < 5
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    kept = expected > 0
    assert observed[~kept].sum() == 0 and kept.sum() > 20
    return float(stats.chisquare(observed[kept], expected[kept]).pvalue)


def check_draws(drafter: Any, num_seeds: int) -> list[float]:
    """4,000 draws of each seed have the exact distribution; the acceptance at each place."""
    counts = np.zeros((VOCAB,) * 3, dtype=np.int64)
    with open_toy(draft=drafter, num_draft_tokens=3) as llm:
        for seed in range(num_seeds):
            # Five tokens: the first comes with the prompt, three are drafted, one is behind them.
            params = SamplingParams(n=4000, max_tokens=5, ignore_eos=True, seed=seed)
            for c in llm.generate(PROMPT, params)[0].outputs:
                counts[tuple(c.token_ids[:3])] += 1
        drafting = llm.engine.drafting
        assert drafting is not None and drafting.totals.num_drafted[0] > 2000 * num_seeds
        acceptance = drafting.totals.acceptance
    assert counts.sum() == 4000 * num_seeds
    for axis in (
        2,
        0,
    ):  # the pair of the prompt's row and a drafted one, and that of two drafted ones
        assert pvalue(counts.sum(axis), exact().sum(axis)) > 0.001
    assert pvalue(counts, exact()) > 0.001
    return acceptance


@pytest.mark.slow
def test_two_drafted_tokens_have_the_exact_distribution_whoever_drafts_them() -> None:
    with_noise, without = (check_draws(OtherModel(shared), 1) for shared in (True, False))
    # Shared noise lets more of them stand, and neither lets all or none.
    assert all(a > 1.5 * b > 0 for a, b in zip(with_noise, without, strict=True))
    assert with_noise[0] < 0.9


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shared noise", "own noise"])
def test_twenty_thousand_draws_have_the_exact_distribution(kind: str) -> None:
    check_draws(OtherModel(kind == "shared noise"), 5)


@pytest.mark.parametrize("pair", pairs(16), ids=lambda pair: pair.name)
def test_acceptance_with_shared_noise_lies_between_bound_and_limit(pair: Pair) -> None:
    draws = 5_000
    slack = 4 * math.sqrt(0.25 / draws)
    assert pair.bound - 1e-12 <= pair.shared <= pair.best + 1e-12
    assert pair.shared >= pair.unshared - 1e-12
    assert pair.measured(draws) == pytest.approx(pair.shared, abs=slack)
    assert pair.measured(draws, shared=False) == pytest.approx(pair.unshared, abs=slack)
    assert pair.best == pytest.approx(1 - pair.distance)
