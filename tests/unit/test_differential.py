"""The comparison that fast paths are held to."""

from __future__ import annotations

import torch

from verbatim.model.differential import bit_equal, differential_check, largest_error


def test_equal_is_bit_for_bit() -> None:
    one = torch.tensor([1.0, 0.0, torch.nan])
    assert bit_equal(one, one.clone())
    assert not bit_equal(one, torch.tensor([1.0, -0.0, torch.nan]))
    assert not bit_equal(one, one.bfloat16())
    assert not bit_equal(one, one[None])
    assert bit_equal(torch.arange(3), torch.arange(3))


def test_the_first_difference_is_told_with_its_case_and_place() -> None:
    calls: list[int] = []

    def ours(case: int) -> list[torch.Tensor]:
        calls.append(case)
        return [torch.zeros(2), torch.full((2,), float(case > 1))]

    def theirs(case: int) -> list[torch.Tensor]:
        return [torch.zeros(2), torch.zeros(2)]

    assert differential_check(ours, theirs, [0, 1]) is None
    found = differential_check(ours, theirs, [1, 2, 3])
    assert found is not None and (found.case, found.place) == (2, 1)
    assert largest_error(found.ours, found.theirs) == 1.0
    assert calls == [0, 1, 1, 2]  # nothing is computed behind it


def test_a_looser_comparison_is_the_callers() -> None:
    def apart(_: None) -> list[torch.Tensor]:
        return [torch.full((2,), 1e-6)]

    def zeros(_: None) -> list[torch.Tensor]:
        return [torch.zeros(2)]

    assert differential_check(apart, zeros, [None]) is not None
    assert differential_check(apart, zeros, [None], torch.allclose) is not None
    assert differential_check(apart, zeros, [None], lambda a, b: largest_error(a, b) < 1e-5) is None
