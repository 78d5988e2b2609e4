"""The sampler: its draws, log-probs and errors, and that the result of a row depends on that row only."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from support.backends import by
from support.pairwise import slow_but
from support.processing import process
from verbatim import kernels
from verbatim.batch import Draw, Draws, IdValues, SamplePlan, SampleRow
from verbatim.core import TokenCounts
from verbatim.params import SamplingParams
from verbatim.sampling import logprobs
from verbatim.sampling.noise import gumbel_row
from verbatim.sampling.processors import bitmask, edit, is_greedy
from verbatim.sampling.sampler import sample_rows

INF = math.inf
needs_kernel = pytest.mark.skipif(kernels.library() is None, reason="the kernels are not built")
every_backend = pytest.mark.usefixtures("backend")


def random_logits(rng: random.Random, num_rows: int, vocab_size: int) -> Tensor:
    """Random rows with and without ties and entries of -inf, in both dtypes of the kernel."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    shape = (num_rows, vocab_size)
    logits = torch.randn(shape, generator=generator) * rng.choice([0.1, 1.0, 3.0, 10.0])
    kind = rng.randrange(6)
    if kind == 0:
        return logits.bfloat16()
    if kind == 1:
        return (logits * 2).round() / 2
    if kind == 2:
        return logits.masked_fill(torch.rand(shape, generator=generator) < 0.5, -INF)
    if kind == 3:
        return logits.sort(dim=1).values * rng.choice([1, 0])
    return logits


def random_row(rng: random.Random, vocab_size: int, typical: bool = False) -> SampleRow:
    v = vocab_size
    params = SamplingParams(
        temperature=rng.choice([0, 1e-40, 1e-3, 0.1, 0.8, 1.0, 1.0, 1.5, 10.0]),
        top_k=rng.choice([0, 0, 1, 5, 50, 300, v, v + 3, 2**64 + 3]),
        top_p=rng.choice([1.0, 1.0, 0.95, 0.5, 1e-6, 0.999999, rng.random() + 1e-9]),
        min_p=rng.choice([0.0, 0.0, 0.05, 0.5, 1.0]),
        typical_p=rng.choice([1.0, 0.5]) if typical else 1.0,
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        presence_penalty=rng.choice([0.0, 0.0, 0.5]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.5]),
    )
    allowed = rng.choice([None, None, None, [0, 2, 3]])
    penalized = (
        params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
    )
    return SampleRow(
        params,
        seed=rng.randrange(2**64),
        sample_index=rng.randrange(4),
        position=rng.randrange(1000),
        counts=TokenCounts([1, 2, 3]).after([0, 2, 2]) if penalized else None,
        bias=rng.choice([None, None, IdValues.of({1: 5.0, 3: -100.0})]),
        banned_ids=rng.choice([[], [], [0, 4]]),
        target=rng.choice([None] * 8 + [2]),
        num_logprobs=rng.choice([0, 0, 3, 20]),
        mask=None if allowed is None else bitmask(allowed, v),
    )


def by_row(draws: Draws) -> list[str]:
    """Each row's results as text: equal text is equal bits, NaN included."""
    return [repr(draw) for draw in draws]


def one(logits: list[float] | Tensor, **row: Any) -> Draw:
    params = SamplingParams(**row.pop("params", {}))
    one_row = SampleRow(params, **{"seed": 1, "sample_index": 0, "position": 3, **row})
    return sample_rows(torch.as_tensor(logits)[None], SamplePlan([one_row]))[0]


@needs_kernel
@pytest.mark.parametrize("rng_seed", slow_but([0], range(3)))
def test_kernel_and_reference_agree_on_random_rows(rng_seed: int) -> None:
    rng = random.Random(rng_seed)
    sizes = [5, 7, 16, 33, 100, 1000, 1023, 4097] * 10 + [32_003] * 3 + [151_936]
    for vocab_size in sizes:
        num_rows = 4 if vocab_size < 30_000 else 1
        logits = random_logits(rng, num_rows, vocab_size)
        plan = SamplePlan([random_row(rng, vocab_size) for _ in range(num_rows)])
        ours = sample_rows(logits, plan)
        reference = by("none", sample_rows)(logits, plan)
        same = {"rel": 1e-6, "abs": 1e-7, "nan_ok": True}
        for a, b in zip(ours, reference, strict=True):
            assert (a.id, a.top_ids) == (b.id, b.top_ids), (vocab_size, plan)
            assert a.logprob == pytest.approx(b.logprob, **same)
            assert a.sampled_logprob == pytest.approx(b.sampled_logprob, **same)


@needs_kernel
@pytest.mark.parametrize("rng_seed", range(2))
def test_supports_of_kernel_and_reference_agree(rng_seed: int) -> None:
    """A support has the drawn id, and its mass converts the unfiltered log-prob to `sampled_logprob`."""
    rng = random.Random(rng_seed)
    for vocab_size in [5, 33, 100, 1000, 4097] * 4 + [32_003]:
        logits = random_logits(rng, 4, vocab_size)
        rows = [random_row(rng, vocab_size, typical=True) for _ in range(4)]
        for row in rows:
            row.params = row.params.replace(support=True)
        ours = sample_rows(logits, SamplePlan(rows))
        reference = by("none", sample_rows)(logits, SamplePlan(rows))
        for i, row in enumerate(rows):
            token_id, (ids, log_mass) = ours[i].id, ours[i].support
            assert ids == reference[i].support.ids, row
            assert log_mass == pytest.approx(reference[i].support.log_mass, abs=1e-9)
            if row.target is not None or token_id < 0:
                assert (ids, log_mass) == (None, 0.0)
                continue
            edited = process(logits[i], dataclasses.replace(row, params=row.params.replace(
                top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0)))  # fmt: skip
            if ids is None:
                assert log_mass == 0.0
            elif not is_greedy(edit(logits[i], row), row.params.temperature):
                assert ids == sorted(set(ids)) and token_id in ids
                whole = edited.double().log_softmax(0)
                assert log_mass == pytest.approx(whole[ids].logsumexp(0).item(), abs=1e-6)
                own = whole[token_id].item() - log_mass
                assert ours[i].sampled_logprob == pytest.approx(own, abs=1e-5)


@needs_kernel
def test_kernel_pruning_never_drops_the_winning_token() -> None:
    vocab_size = 20_011
    generator = torch.Generator().manual_seed(3)
    for position in range(60):
        scale = [0.0, 0.01, 1.0, 5.0, 1000.0][position % 5]
        logits = torch.randn(vocab_size, generator=generator) * scale
        expected = int((logits + gumbel_row(1, 0, position, vocab_size)).argmax())
        assert one(logits, position=position)[0] == expected


@every_backend
def test_draws_of_a_row_do_not_depend_on_batch_order_or_threads() -> None:
    rng = random.Random(11)
    vocab_size, num_rows = 1003, 16
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        logits = (torch.randn(num_rows, vocab_size) * 3).to(dtype)
        rows = [random_row(rng, vocab_size, typical=True) for _ in range(num_rows)]
        expected = by_row(sample_rows(logits, SamplePlan(rows)))
        for i in range(num_rows):
            alone = sample_rows(logits[i : i + 1], SamplePlan([rows[i]]))
            assert by_row(alone) == [expected[i]]
        order = rng.sample(range(num_rows), num_rows)
        plan = SamplePlan([rows[i] for i in order])
        assert by_row(sample_rows(logits[order], plan)) == [expected[i] for i in order]
        strided = torch.stack([logits, logits], dim=2)[:, :, 0]
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            assert by_row(sample_rows(strided, SamplePlan(rows))) == expected


@every_backend
def test_draws_from_a_large_vocabulary_do_not_depend_on_threads() -> None:
    logits = torch.randn(2, 151_936, generator=torch.Generator().manual_seed(1)) * 3
    params = SamplingParams(temperature=0.9, top_p=0.9)
    plan = SamplePlan([SampleRow(params, 5, i, 9, num_logprobs=5) for i in range(2)])
    results = []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        results.append(by_row(sample_rows(logits, plan)))
    assert results == [results[0]] * 4


@needs_kernel
@pytest.mark.parametrize("params", [{}, {"temperature": 0.7, "top_k": 8, "top_p": 0.9}], ids=str)
def test_frequencies_of_20_000_draws_match_the_distribution(params: dict[str, Any]) -> None:
    logits = torch.randn(37, generator=torch.Generator().manual_seed(2)) * 1.5
    settled = SamplingParams(**params)
    expected = process(logits, SampleRow(settled, 0, 0, 0)).double().softmax(0)
    counts = torch.zeros(37)
    for start in range(0, 20_000, 5000):
        rows = [SampleRow(settled, 99, p % 3, start + p) for p in range(5000)]
        draws = sample_rows(logits.expand(5000, 37), SamplePlan(rows))
        counts += torch.bincount(torch.tensor([draw.id for draw in draws]), minlength=37)
    kept = expected > 0
    assert counts[~kept].sum() == 0
    observed = counts[kept].double().numpy()
    assert stats.chisquare(observed, expected[kept].numpy() * 20_000).pvalue > 1e-4


@every_backend
def test_greedy_takes_the_largest_logit_and_the_lowest_id_of_ties() -> None:
    for logits, expected in [([0.0, 2.0, 1.0, 2.0], 1), ([-INF, -5.0, -INF, -5.0], 1)]:
        for temperature in (0, 1e-42, 1e-60):
            result = one(logits, params={"temperature": temperature})
            assert (result[0], result[2]) == (expected, 0.0)
    assert one([-1.0, -0.0, 0.0], params={"temperature": 0})[0] == 1


@every_backend
def test_greedy_uses_biased_logits_and_ignores_filters() -> None:
    params = {"temperature": 0, "top_k": 1, "top_p": 0.1}
    result = one([5.0, 4.0, 3.0, 0.0], params=params, bias=IdValues.of({3: 9.0}))
    assert result[0] == 3
    assert result[1] == pytest.approx(torch.tensor([5.0, 4, 3, 0]).log_softmax(0)[3].item())


@every_backend
def test_sampling_breaks_ties_by_lowest_id() -> None:
    logits = torch.full((300,), 2.0**30)  # so large that noise does not change them
    assert one(logits)[0] == 0
    logits[:7] = 0.0
    assert one(logits)[0] == 7


@every_backend
def test_logprobs_are_raw_and_sampled_logprobs_processed() -> None:
    logits = torch.randn(500, generator=torch.Generator().manual_seed(4)) * 2
    params, bias = {"temperature": 0.6, "top_k": 20, "top_p": 0.9}, IdValues.of({4: 2.0})
    drawn = one(logits, params=params, num_logprobs=4, bias=bias)
    token_id, logprob, sampled, top_ids, top_logprobs = drawn[:5]
    processed = process(logits, SampleRow(SamplingParams(**params), 0, 0, 0, bias=bias))
    assert logprob == pytest.approx(logits.double().log_softmax(0)[token_id].item(), abs=1e-6)
    assert sampled == pytest.approx(processed.double().log_softmax(0)[token_id].item(), abs=1e-6)
    assert top_ids == logits.topk(4).indices.tolist()
    expected = logits.double().log_softmax(0)[top_ids].tolist()
    assert top_logprobs == pytest.approx(expected, abs=1e-6)


@every_backend
def test_only_surviving_token_has_sampled_logprob_0() -> None:
    result = one([1.0, 3.0, 2.0], params={"top_k": 1})
    assert (result[0], result[2]) == (1, 0.0)


@every_backend
def test_scored_logprobs_are_bit_identical_to_generated_ones() -> None:
    logits = torch.randn(6, 5003, generator=torch.Generator().manual_seed(5)).bfloat16()
    params = SamplingParams(temperature=0.8, top_p=0.9, frequency_penalty=0.5)
    counts = TokenCounts(()).after([1, 2])
    rows = [SampleRow(params, 8, 0, p, counts, num_logprobs=3) for p in range(6)]
    drawn = sample_rows(logits, SamplePlan(rows))
    targets = [SampleRow(SamplingParams(), 0, 0, 0, target=d.id, num_logprobs=3) for d in drawn]
    scored = sample_rows(logits, SamplePlan(targets))
    assert all(math.isnan(draw.sampled_logprob) for draw in scored)
    assert [d._replace(sampled_logprob=0) for d in scored] == [
        d._replace(sampled_logprob=0) for d in drawn
    ]


@every_backend
def test_top_logprobs_break_ties_by_id_and_omit_logits_of_minus_infinity() -> None:
    logits = [1.0, 2.0, -INF, 2.0, 1.0]
    assert one(logits, num_logprobs=3)[3] == [1, 3, 0]
    assert one(logits, num_logprobs=100)[3] == [1, 3, 0, 4]
    assert one(logits, num_logprobs=0)[3] == []


@every_backend
def test_row_that_cannot_be_drawn_gets_id_minus_1_and_changes_no_other_row() -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(6))
    rows = [SampleRow(SamplingParams(), 3, i, 0, num_logprobs=2) for i in range(6)]
    healthy = by_row(sample_rows(logits, SamplePlan(rows)))
    logits[1, 39] = math.nan
    logits[2] = -INF
    logits[3, 17] = INF
    rows[4] = dataclasses.replace(rows[4], banned_ids=range(40))
    rows[1] = dataclasses.replace(rows[1], target=5)
    draws = sample_rows(logits, SamplePlan(rows))
    results = by_row(draws)
    assert (results[0], results[5]) == (healthy[0], healthy[5])
    assert results[1:5] == [repr(Draw(-1, math.nan, math.nan, [], []))] * 4


@every_backend
def test_target_with_logit_minus_infinity_has_logprob_minus_infinity() -> None:
    assert one([0.0, -INF, 0.0], target=1)[:2] == (1, -INF)


@every_backend
def test_sampling_does_not_change_logits_or_the_global_generator() -> None:
    rng = random.Random(7)
    logits = torch.randn(8, 300)
    before, state = logits.clone(), torch.get_rng_state()
    plan = SamplePlan([random_row(rng, 300, typical=True) for _ in range(8)])
    sample_rows(logits, plan)
    assert torch.equal(logits, before)
    assert torch.equal(torch.get_rng_state(), state)


def test_lane_sum_and_exp_falling_are_close_to_torch() -> None:
    values = torch.rand(1003, dtype=torch.float64)
    assert logprobs.lane_sum(values) == pytest.approx(values.sum().item(), rel=1e-14)
    x = -torch.linspace(0, 600, 10_001, dtype=torch.float64)
    assert torch.allclose(logprobs.exp_falling(x), x.exp(), rtol=3e-9, atol=0)
    assert logprobs.exp_falling(torch.zeros(1, dtype=torch.float64)).item() == 1.0


def test_invalid_sample_plans_are_rejected() -> None:
    rows = [SampleRow(SamplingParams(), 0, 0, 0)]
    with pytest.raises(ValueError, match="1 rows to sample"):
        sample_rows(torch.zeros(2, 4), SamplePlan(rows))
    rows[0].target = 4
    with pytest.raises(ValueError, match="target=4: must be 0 to 3"):
        sample_rows(torch.zeros(1, 4), SamplePlan(rows))
