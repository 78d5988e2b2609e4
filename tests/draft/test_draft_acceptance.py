"""Drafts drawn with the engine's noise have the predicted acceptance (`benchmarks/draft_acceptance.py`)."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from draft_acceptance import Pair, pairs


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(pair, id=pair.name, marks=[pytest.mark.slow] * (i % 2))
        for i, pair in enumerate(pairs(16))
    ],
)
def test_acceptance_with_shared_noise_lies_between_bound_and_limit(pair: Pair) -> None:
    draws = 5_000
    slack = 4 * math.sqrt(0.25 / draws)
    assert pair.bound - 1e-12 <= pair.shared <= pair.best + 1e-12
    assert pair.shared >= pair.unshared - 1e-12
    assert pair.measured(draws) == pytest.approx(pair.shared, abs=slack)
    assert pair.measured(draws, shared=False) == pytest.approx(pair.unshared, abs=slack)
    assert pair.best == pytest.approx(1 - pair.distance)
