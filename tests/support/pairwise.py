"""Covering arrays: few cases with all pairs of values; and the choice of cases for the fast suite."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pytest

Choice = tuple[str, str]  # (dimension, value)
Pair = frozenset[Choice]
Case = tuple[str, ...]  # one value per dimension


def pairs_of(dimensions: Mapping[str, Sequence[str]], case: Case) -> set[Pair]:
    """Return all pairs of choices of a case."""
    return {
        frozenset(pair) for pair in itertools.combinations(zip(dimensions, case, strict=True), 2)
    }


def covering(
    dimensions: Mapping[str, Sequence[str]], refused: Collection[Pair], first: Sequence[Case] = ()
) -> list[Case]:
    """Return cases that contain every pair of choices except the refused ones.

    Args:
        first: cases to begin with.
    """
    bits: dict[Pair, int] = {}

    def pairs(case: Case) -> int:
        """Return the pairs of a case as a bit mask; 0 if one is refused."""
        found = pairs_of(dimensions, case)
        return (
            0 if found & refused_pairs else sum(bits.setdefault(p, 1 << len(bits)) for p in found)
        )

    refused_pairs = set(refused)
    possible = [(case, pairs(case)) for case in itertools.product(*dimensions.values())]
    left = sum(bits.values())
    cases = list(first)
    for case in cases:
        left &= ~pairs(case)
    while left:
        case, found = max(possible, key=lambda entry: (entry[1] & left).bit_count())
        cases.append(case)
        left &= ~found
    return cases


def some_combinations(**dimensions: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return combinations that contain every pair of values; the first few contain every value."""
    places = {name: [str(i) for i in range(len(values))] for name, values in dimensions.items()}
    first: list[Case] = []
    uses: Counter[Choice] = Counter()

    def seen(case: Case) -> tuple[int, int]:
        counts = [uses[choice] for choice in zip(places, case, strict=True)]
        return -counts.count(0), sum(counts)

    while len(uses) < sum(map(len, places.values())):
        first.append(min(itertools.product(*places.values()), key=seen))
        uses.update(zip(places, first[-1], strict=True))
    return [
        tuple(values[int(i)] for values, i in zip(dimensions.values(), case, strict=True))
        for case in covering(places, (), first)
    ]


def slow_but(fast: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Return parameters for `pytest.mark.parametrize`; all but those in `fast` are marked slow.

    Args:
        values: the parameters; a tuple holds the values of several arguments.
    """
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=[pytest.mark.slow] * (value not in fast),
        )
        for value in values
    ]


def parametrize_combinations(
    num_fast: int | None = None, /, **dimensions: Sequence[Any]
) -> pytest.MarkDecorator:
    """Run a test with every pair of values; in the fast suite, only with every value.

    Args:
        num_fast: number of cases in the fast suite, if not as many as contain every value.
    """
    cases = some_combinations(**dimensions)
    fast = max(map(len, dimensions.values())) if num_fast is None else num_fast
    params = [
        pytest.param(*case, marks=[pytest.mark.slow] * (i >= fast)) for i, case in enumerate(cases)
    ]
    return pytest.mark.parametrize(tuple(dimensions), params)
