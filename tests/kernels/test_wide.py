"""bf16 is multiplied in pairs or as floats, whichever is faster: the same bits, also for extreme numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from support.attention_cases import BF16, SHAPES, Shape, options, story, whole
from verbatim import kernels
from verbatim.kernels.functions import run
from verbatim.kernels.packing import Packing, WeightPacking
from verbatim.model.products import linear, matmul
from verbatim.quantization.matrix import QuantizedMatrix, pack

PAIRS, FLOATS, FASTEST = 0, 1, -1
pytestmark = pytest.mark.skipif(kernels.library() is None, reason="there are no compiled kernels")
BACKEND = kernels.instruction_set() or "none"


@pytest.fixture(autouse=True)
def chooses() -> Iterator[None]:
    yield
    run("vb_choose_width", None, FASTEST)


def in_both(compute: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """Return the results with bf16 in pairs and as floats; NaNs, which may differ in bits, are replaced."""
    results = []
    for choice in (PAIRS, FLOATS):
        run("vb_choose_width", None, choice)
        results.append(compute())
    a, b = results
    assert torch.equal(a.isnan(), b.isnan())
    return tuple(x.masked_fill(x.isnan(), 0).view(torch.int16) for x in results)  # type: ignore[return-value]


def numbers(kind: str, *shape: int) -> Tensor:
    """Return random bf16: normal ones, ones near the smallest or largest, or any bits."""
    noise = torch.Generator().manual_seed(sum(shape))
    if kind == "bits":
        return torch.randint(-(2**15), 2**15, shape, generator=noise).to(torch.int16).view(BF16)
    exponent = {"plain": 0, "tiny": -66, "huge": 60}[kind]
    spread = torch.randint(-6, 7, shape, generator=noise)
    return (torch.randn(shape, generator=noise).double() * 2.0 ** (exponent + spread)).to(BF16)


@pytest.mark.parametrize("kind", ["plain", "tiny", "huge", "bits"])
def test_products_have_the_same_bits(kind: str) -> None:
    shapes = [(24, 1, 3), (25, 31, 70), (300, 33, 129), (64, 5000, 40), (530, 96, 64)]
    for rows, depth, cols in shapes:
        x, weight = numbers(kind, rows, depth), numbers(kind, cols, depth)
        for stored in weight, weight.t().contiguous().t():
            pairs, floats = in_both(partial(linear, x, stored, weight[:, 0]))
            assert torch.equal(pairs, floats), (rows, depth, cols)
    x, weight = numbers(kind, 3, 30, 50), numbers(kind, 3, 50, 20)
    assert torch.equal(*in_both(partial(matmul, x, weight)))


@pytest.mark.parametrize("bits", [4, 8])
def test_products_with_quantized_weights_have_the_same_bits(bits: int) -> None:
    weight = numbers("plain", 90, 320)
    packing = WeightPacking((90, 320), BF16, Packing(bits, 64))
    quantized = QuantizedMatrix(pack(weight, packing), packing)
    x = numbers("plain", 60, 320)
    assert torch.equal(*in_both(partial(linear, x, quantized)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["plain", "all"])
def test_attention_has_the_same_bits(kind: str, shape: Shape) -> None:
    opts, what = options(kind, shape), story(shape, 147, q_dtype=BF16, kv_dtype=BF16)
    assert torch.equal(*in_both(partial(whole, BACKEND, opts, shape, what)))
    for name in "tiny", "bits":
        hard = replace(what, **{f: numbers(name, *getattr(what, f).shape) for f in ("k", "v")})
        assert torch.equal(*in_both(partial(whole, BACKEND, opts, shape, hard)))
