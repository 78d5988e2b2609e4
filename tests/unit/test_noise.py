"""The sampling noise: Gumbel, and a pure function of seed, sample index, position and token id."""

from __future__ import annotations

import math

import pytest
import torch

from support.backends import by
from verbatim import kernels
from verbatim.sampling import noise
from verbatim.sampling.noise import gumbel_row, philox

MAX = 2**64 - 1
PI_COUNTER = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)


needs_kernel = pytest.mark.skipif(kernels.library() is None, reason="the kernels are not built")


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (PI_COUNTER, (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_philox_matches_published_test_vectors(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (torch.tensor([c]) for c in counter)
    assert tuple(int(w) for w in philox((c0, c1, c2, c3), key)) == expected


@pytest.mark.usefixtures("backend")
def test_gumbel_noise_follows_the_documented_philox_layout() -> None:
    seed, sample_index, position = 0x0123456789ABCDEF, 5, 77
    for token_id in (0, 1, 2, 3, 4, 151_935):
        counter = [torch.tensor([c]) for c in (token_id // 4, position, sample_index, 0)]
        words = philox((counter[0], counter[1], counter[2], counter[3]), (0x89ABCDEF, 0x01234567))
        uniform = (int(words[token_id % 4]) + 0.5) / 2**32
        expected = torch.tensor(-math.log(-math.log1p(-uniform)), dtype=torch.float64).float()
        assert gumbel_row(seed, sample_index, position, token_id + 1)[-1] == expected


@pytest.mark.usefixtures("backend")
def test_noise_depends_on_all_coordinates_and_not_on_vocab_size() -> None:
    whole = gumbel_row(7, 1, 20, 1003)
    for size in (1, 2, 3, 17):
        assert torch.equal(gumbel_row(7, 1, 20, size), whole[:size])
    assert whole.unique().numel() > 1000
    others = [(7, 1, 21), (7, 1, 20 + 2**16), (7, 2, 20), (8, 1, 20), (7 + 2**32, 1, 20)]
    others += [(7 + 2**63, 1, 20), (7, 20, 1)]
    for other in others:
        assert (gumbel_row(*other, 1003) != whole).float().mean() > 0.99, other


@pytest.mark.usefixtures("backend")
def test_noise_has_the_same_bits_with_any_number_of_threads() -> None:
    vocab_size = 40_001  # torch splits work over threads from 32,768 on
    expected = gumbel_row(MAX, 2, 9, vocab_size)
    for threads in (2, 3, 7):
        torch.set_num_threads(threads)
        assert torch.equal(gumbel_row(MAX, 2, 9, vocab_size), expected)


def test_noise_is_unaffected_by_rounding_errors_of_torch_log1p(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bits = torch.randint(0, 2**32, (20_000,), generator=torch.Generator().manual_seed(1))
    expected = [-math.log(-math.log1p(-(b + 0.5) * 2.0**-32)) for b in bits.tolist()]
    assert torch.equal(noise._transform(bits), torch.tensor(expected, dtype=torch.float64).float())
    plain = noise._transform(bits)
    log1p = torch.log1p
    # A log1p that is off by one unit in the last place gives the same noise.
    monkeypatch.setattr(torch, "log1p", lambda x: torch.nextafter(log1p(x), torch.zeros(())))
    assert torch.equal(noise._transform(bits), plain)


@needs_kernel
@pytest.mark.parametrize("seed", [0, 1, 2**32, 0x0123456789ABCDEF, MAX])
def test_kernel_noise_is_bit_identical_to_the_reference(seed: int) -> None:
    for vocab_size, sample_index, position in [(5, 0, 0), (1000, 3, 2**32 - 1), (32_003, 9, 77)]:
        coordinates = seed, sample_index, position, vocab_size
        assert torch.equal(gumbel_row(*coordinates), by("none", gumbel_row)(*coordinates))


def test_noise_of_extreme_random_words_is_finite() -> None:
    low, high = noise._transform(torch.tensor([0xFFFFFFFF, 0])).tolist()
    assert low == pytest.approx(-math.log(33 * math.log(2)), abs=1e-5)
    assert high == pytest.approx(33 * math.log(2), abs=1e-5)
