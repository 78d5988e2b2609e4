"""`bit_equal`, which compares fast paths with plain ones."""

from __future__ import annotations

import pytest
import torch

from verbatim.model.differential import bit_equal


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
