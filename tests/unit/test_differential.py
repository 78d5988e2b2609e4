"""`differential_check`, which compares fast paths with plain ones."""

from __future__ import annotations

import pytest
import torch

from verbatim.model.differential import bit_equal, differential_check, largest_error


def test_bit_equal_compares_bits_dtype_and_shape() -> None:
    one = torch.tensor([1.0, 0.0, torch.nan])
    assert bit_equal(one, one.clone())
    assert not bit_equal(one, torch.tensor([1.0, -0.0, torch.nan]))
    assert not bit_equal(one, one.bfloat16())
    assert not bit_equal(one, one[None])
    assert bit_equal(torch.arange(3), torch.arange(3))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn]
)
def test_bit_equal_distinguishes_zeros_and_matches_nan_in_every_dtype(dtype: torch.dtype) -> None:
    zero, nan = (torch.tensor([number]).to(dtype) for number in (0.0, torch.nan))
    assert bit_equal(nan, nan.clone()) and not bit_equal(zero, torch.tensor([-0.0]).to(dtype))


def test_first_difference_is_reported_with_its_case_and_place() -> None:
    calls: list[int] = []

    def ours(case: int) -> list[torch.Tensor]:
        calls.append(case)
        return [torch.zeros(2), torch.full((2,), float(case > 1))]

    def theirs(case: int) -> list[torch.Tensor]:
        return [torch.zeros(2), torch.zeros(2)]

    assert differential_check(ours, theirs, [0, 1]) is None
    found = differential_check(ours, theirs, [1, 2, 3])
    assert found is not None and (found.case, found.place) == (2, 1)
    assert largest_error(found.actual, found.expected) == 1.0
    assert calls == [0, 1, 1, 2]  # no case after the first difference is computed


def test_caller_can_pass_a_looser_comparison() -> None:
    def apart(_: None) -> list[torch.Tensor]:
        return [torch.full((2,), 1e-6)]

    def zeros(_: None) -> list[torch.Tensor]:
        return [torch.zeros(2)]

    assert differential_check(apart, zeros, [None]) is not None
    assert differential_check(apart, zeros, [None], torch.allclose) is not None
    assert differential_check(apart, zeros, [None], lambda a, b: largest_error(a, b) < 1e-5) is None
