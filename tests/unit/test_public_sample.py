"""`sample`, the tensor-level API of the sampler: logits `[B, V]` to ids `[B]`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from verbatim.batch import SamplePlan, SampleRow
from verbatim.errors import InvalidRequest
from verbatim.params import SamplingParams
from verbatim.sampling.sampler import sample, sample_rows


def test_sample_equals_sample_rows_with_the_row_as_sample_index() -> None:
    logits = torch.randn(5, 64, generator=torch.Generator().manual_seed(8))
    positions = [4, 9, 9, 0, 2**32 - 1]
    rows = [SampleRow(SamplingParams(top_k=9), 7, b, p) for b, p in enumerate(positions)]
    expected = [draw.id for draw in sample_rows(logits, SamplePlan(rows))]
    for given in (positions, tuple(positions), torch.tensor(positions)):
        ids = sample(logits, top_k=9, seed=7, position=given)
        assert ids.dtype == torch.int64 and ids.tolist() == expected
    rows = [SampleRow(SamplingParams(), 7, b, 3) for b in range(5)]
    drawn = [draw.id for draw in sample_rows(logits, SamplePlan(rows))]
    for position in (3, np.int64(3)):
        assert sample(logits, seed=7, position=position).tolist() == drawn
    assert sample(logits[:0]).tolist() == []


def test_sample_without_a_seed_draws_one_number_from_torchs_generator() -> None:
    logits = torch.zeros(3, 100)
    torch.manual_seed(5)
    first, state = sample(logits), torch.get_rng_state()
    second = sample(logits)
    torch.manual_seed(5)
    torch.randint(-(2**63), 2**63 - 1, ())
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)
    assert torch.equal(sample(logits), first) and torch.equal(sample(logits), second)
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("kw", "message"),
    [
        ({"seed": 3}, "a seed without a position"),
        ({"position": 3}, "a position without a seed"),
        ({"seed": 3, "position": [1, 2, 3]}, "3 positions for 2 rows"),
        ({"seed": 3, "position": -1}, "position=-1"),
        ({"seed": 3, "position": [0, 2**32]}, f"position={2**32}"),
        ({"seed": 3, "position": True}, "position=True"),
        ({"seed": -1, "position": 0}, "seed=-1"),
        ({"seed": 2**64, "position": 0}, "seed="),
        ({"temperature": -0.5}, "temperature=-0.5"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_p": 0.0}, "top_p=0"),
    ],
)
def test_sample_rejects_invalid_arguments(kw: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        sample(torch.zeros(2, 4), **kw)


def test_sample_rejects_invalid_logits() -> None:
    for logits in (torch.zeros(4), torch.zeros(2, 4).long(), [[0.0]], torch.zeros(2, 0)):
        with pytest.raises(InvalidRequest, match="logits"):
            sample(logits)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="row 1"):
        sample(torch.tensor([[0.0, 1.0], [0.0, math.nan]]))
