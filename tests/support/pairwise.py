"""Few of many cases: covering arrays, and which cases of a test are in the fast suite."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pytest

Choice = tuple[str, str]  # (dimension, value)
Pair = frozenset[Choice]
Case = tuple[str, ...]  # a value of each dimension


def pairs_of(dimensions: Mapping[str, Sequence[str]], case: Case) -> set[Pair]:
    """Return the pairs of choices in a case."""
    return {
        frozenset(pair) for pair in itertools.combinations(zip(dimensions, case, strict=True), 2)
    }


def covering(
    dimensions: Mapping[str, Sequence[str]], refused: Collection[Pair], first: Sequence[Case] = ()
) -> list[Case]:
    """Return cases without a refused pair in which every other pair occurs.

    Args:
        first: cases to begin with.
    """
    bits: dict[Pair, int] = {}

    def pairs(case: Case) -> int:
        """The pairs in a case, as a bit of each."""
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
    """Return combinations in which every pair of values occurs, those first that have all values."""
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
    """Return parameters, for `pytest.mark.parametrize`, of which all but `fast` are in the slow suite.

    Args:
        values: a tuple is the values of several arguments.
    """
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=[pytest.mark.slow] * (value not in fast),
        )
        for value in values
    ]


def parametrize_combinations(**dimensions: Sequence[Any]) -> pytest.MarkDecorator:
    """Run a test with every pair of values, in the fast suite with every value."""
    cases = some_combinations(**dimensions)
    fast = max(map(len, dimensions.values()))
    params = [
        pytest.param(*case, marks=[pytest.mark.slow] * (i >= fast)) for i, case in enumerate(cases)
    ]
    return pytest.mark.parametrize(tuple(dimensions), params)
