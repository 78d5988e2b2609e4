"""Kernels of recurrent layers: compared with their references, and bit-identical in every chunking."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from support.backends import by
from verbatim import kernels
from verbatim.kv.recurrence import causal_conv, linear_recurrence, weighted_mean
from verbatim.kv.states import StateRows
from verbatim.model.invariant import exp

LENGTHS = (1, 37, 5)
# Heads, heads of the keys, rows and columns of a state.
SHAPES = [(4, 2, 16, 16), (4, 4, 24, 100), (2, 1, 128, 128), (3, 3, 5, 17)]
SHAPES += [(40, 1, 9, 1), (40, 1, 128, 1)]
BACKENDS = ("compiled", "triton")


def each_backend(names: str, cases: list[Any], slow: Callable[[Any], bool]) -> Any:
    """Parametrize over backends and cases; those that are `slow` under Triton's interpreter are marked."""
    found = [
        pytest.param(
            backend,
            *(case if "," in names else [case]),
            marks=[pytest.mark.slow] if backend == "triton" and slow(case) else [],
        )
        for backend in BACKENDS
        for case in cases
    ]
    return pytest.mark.parametrize(f"device,{names}", found, indirect=["device"])


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The device on which the kernels of this backend run."""
    if request.param == "compiled":
        if kernels.library() is None:
            pytest.skip("no compiled kernels")
        return torch.device("cpu")
    from support.triton_here import DEVICE, INTERPRETED
    from verbatim.kernels.triton import recurrence

    if INTERPRETED:
        monkeypatch.setattr(kernels, "requested", lambda: "triton")
        # The interpreter takes long for each program.
        monkeypatch.setattr(recurrence, "NUMBERS", 2048)
    return DEVICE


def thread_counts(device: torch.device) -> Iterator[int]:
    """Set and yield numbers of threads; none for Triton, which has no threads."""
    for threads in (1, 3, 7) if kernels.library() is not None and device.type == "cpu" else ():
        torch.set_num_threads(threads)
        yield threads


def rows_of(
    device: torch.device, cuts: list[tuple[int, int]], slots: list[tuple[int, int]], *, every: bool
) -> StateRows:
    """Rows `cuts[s]` of each sequence, from slot `slots[s][0]` to `slots[s][1]`.

    Args:
        every: write the state after every row, to the slots from `slots[s][1]` on.
    """
    counts = torch.tensor([b - a for a, b in cuts])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    rows, targets = [], []
    for s, count in enumerate(counts.tolist()):
        written = range(count) if every else [count - 1]
        rows += [int(starts[s]) + row for row in written]
        targets += [slots[s][1] + i for i in range(len(written))]
    sources = [source for source, _ in slots]
    columns = (starts, *map(torch.tensor, (sources, rows, targets)))
    return StateRows(*(x.to(device, torch.int32) for x in columns))


def operands(
    shape: tuple[int, int, int, int], device: torch.device, *, by_row: bool, delta: bool
) -> dict[str, Any]:
    heads, key_heads, depth, width = shape
    noise = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=noise)

    decay = torch.rand(total, heads, *([depth] if by_row else []), generator=noise)
    given = dict(
        q=random(total, key_heads, depth),
        k=random(total, key_heads, depth) / depth**0.5,
        v=random(total, heads, width),
        decay=decay,
        beta=torch.rand(total, heads, generator=noise) if delta else None,
    )
    return {name: None if x is None else x.to(device) for name, x in given.items()}


def cut(given: dict[str, Any], cuts: list[tuple[int, int]]) -> dict[str, Any]:
    first = [sum(LENGTHS[:s]) for s in range(len(LENGTHS))]
    index = torch.cat([torch.arange(f + a, f + b) for f, (a, b) in zip(first, cuts, strict=True)])
    return {name: None if x is None else x[index] for name, x in given.items()}


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("by_row", [False, True])
@each_backend("shape", SHAPES, slow=lambda shape: shape[2] > 16)
def test_linear_recurrence_matches_reference_with_same_bits_in_chunks(
    shape: tuple[int, int, int, int], by_row: bool, delta: bool, device: torch.device
) -> None:
    given = operands(shape, device, by_row=by_row, delta=delta)
    heads, _, depth, width = shape
    whole = [(0, n) for n in LENGTHS]
    states = torch.full((200, heads, depth, width), torch.nan, device=device)
    states[0] = 0
    at = rows_of(device, whole, [(0, 1), (0, 10), (0, 60)], every=True)
    expected_states = states.clone()
    expected = by("none", linear_recurrence)(**given, state=expected_states, at=at)
    out = linear_recurrence(**given, state=states, at=at)
    assert torch.allclose(out, expected, rtol=1e-4, atol=1e-4)
    assert torch.allclose(states, expected_states, rtol=1e-4, atol=1e-4, equal_nan=True)
    assert not states[at.targets.long()].isnan().any()
    for _ in thread_counts(device):
        assert torch.equal(linear_recurrence(**given, state=states.clone(), at=at), out)
    # In two chunks, the second from the states that the first has written.
    heads_of = [(0, 1), (0, 20), (0, 2)]
    tails = [(1, 1), (20, 37), (2, 5)]
    cuts = torch.full_like(states, torch.nan)
    cuts[0] = 0
    at = rows_of(device, heads_of, [(0, 1), (0, 2), (0, 3)], every=False)
    head = linear_recurrence(**cut(given, heads_of), state=cuts, at=at)
    at = rows_of(device, tails, [(1, 4), (2, 5), (3, 6)], every=False)
    # The first sequence has no rows left.
    at = at._replace(rows=at.rows[1:], targets=at.targets[1:])
    tail = linear_recurrence(**cut(given, tails), state=cuts, at=at)
    assert torch.equal(torch.cat([head[:21], tail[:17], head[21:], tail[17:]]), out)
    assert torch.equal(cuts[5], states[10 + 36]) and torch.equal(cuts[6], states[60 + 4])


@pytest.mark.parametrize("delta", [False, True])
@each_backend("depth", [9, 16, 128], slow=lambda depth: depth > 16)
def test_rate_equals_a_decay_of_each_row(depth: int, delta: bool, device: torch.device) -> None:
    given = operands((40, 1, depth, 1), device, by_row=False, delta=delta)
    rate = -torch.rand(40, depth, generator=torch.Generator().manual_seed(1)).to(device) * 4
    at = rows_of(device, [(0, n) for n in LENGTHS], [(0, 1), (0, 2), (0, 3)], every=False)
    states = torch.zeros(4, 40, depth, 1, device=device)
    out = linear_recurrence(**given, state=states, at=at, rate=rate)
    given["decay"] = exp(given["decay"][..., None] * rate)
    expected_states = torch.zeros_like(states)
    expected = linear_recurrence(**given, state=expected_states, at=at)
    assert torch.equal(out, expected) and torch.equal(states, expected_states)


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
    ids=str,
)
@each_backend(
    "channels,width", [(64, 4), (37, 3), (200, 7), (5, 2)], slow=lambda case: case != (37, 3)
)
def test_causal_conv_matches_reference_with_same_bits_token_by_token(
    channels: int, width: int, dtype: torch.dtype, weight_dtype: torch.dtype, device: torch.device
) -> None:
    noise = torch.Generator().manual_seed(0)
    x = torch.randn(sum(LENGTHS), channels, generator=noise).to(device, dtype)
    weight = torch.randn(channels, width, generator=noise).to(device, weight_dtype)
    bias = torch.randn(channels, generator=noise).to(device, dtype)
    states = torch.zeros(100, width - 1, channels, dtype=dtype, device=device)
    at = rows_of(device, [(0, n) for n in LENGTHS], [(0, 1), (0, 2), (0, 7)], every=True)
    at = at._replace(targets=torch.arange(1, 1 + sum(LENGTHS)).to(at.targets))
    expected_states = states.clone()
    expected = by("none", causal_conv)(x, weight, bias, expected_states, at)
    out = causal_conv(x, weight, bias, states, at)
    assert torch.allclose(out, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(states, expected_states)
    alone = torch.nn.functional.conv1d(
        x[1:38].T[None].float(),
        weight[:, None].float(),
        bias.float(),
        padding=width - 1,
        groups=channels,
    )[0, :, :37].T
    assert torch.allclose(out[1:38], alone, rtol=1e-4, atol=1e-4)
    for _ in thread_counts(device):
        assert torch.equal(causal_conv(x, weight, bias, states.clone(), at), out)
    for row in range(1, 38):  # token by token from the previous states
        at = rows_of(device, [(0, 1)], [(row if row > 1 else 0, 99)], every=False)
        assert torch.equal(causal_conv(x[row : row + 1], weight, bias, states, at)[0], out[row])


@pytest.mark.skipif(kernels.library() is None, reason="no compiled kernels")
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("channels", [16, 37, 400])
def test_weighted_mean_matches_reference_with_same_bits_token_by_token(
    channels: int, by_row: bool
) -> None:
    device, noise = torch.device("cpu"), torch.Generator().manual_seed(0)
    key, value, rates = torch.randn(3, sum(LENGTHS), channels, generator=noise) * 3
    first, decay = torch.rand(2, channels, generator=noise)
    if by_row:
        decay = rates.abs()
        decay[30] = torch.inf
    states = torch.full((100, 3, channels), torch.nan)
    states[0] = 0
    at = rows_of(device, [(0, n) for n in LENGTHS], [(0, 1), (0, 2), (0, 40)], every=True)
    expected_states = states.clone()
    expected = by("none", weighted_mean)(key, value, first, decay, expected_states, at)
    out = weighted_mean(key, value, first, decay, states, at)
    assert torch.allclose(out, expected, rtol=1e-5, atol=1e-4)
    assert torch.allclose(states, expected_states, rtol=1e-5, atol=1e-4, equal_nan=True)
    assert not states[at.targets.long()].isnan().any()
    # By definition, rows weigh exp(key - decays of the rows in between), and the row itself exp(key + first).
    exponents = key[1:38].double()
    exponents[:-1] -= decay.expand_as(key)[2:38].double().flip(0).cumsum(0).flip(0)
    exponents[:-1] += decay.expand_as(key)[37]  # without the decay of the row itself
    exponents[-1] += first
    mean = (exponents.softmax(0) * value[1:38]).sum(0)
    assert torch.allclose(out[37].double(), mean, rtol=1e-3, atol=1e-3)
    for _ in thread_counts(device):
        assert torch.equal(weighted_mean(key, value, first, decay, states.clone(), at), out)
    for row in range(1, 38):  # token by token from the previous states
        at = rows_of(device, [(0, 1)], [(row if row > 1 else 0, 99)], every=False)
        now = slice(row, row + 1)
        rows = key[now], value[now], first, decay[now] if by_row else decay
        assert torch.equal(weighted_mean(*rows, states, at)[0], out[row])
        assert torch.equal(states[99], states[row + 1])
