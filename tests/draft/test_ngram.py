"""Prompt lookup: drafts are those of a search from scratch, at a cost that does not grow."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verbatim import InvalidRequest
from verbatim.draft.ngram import History, Ngram

CANDIDATES, LONGEST = 16, 32


def searched(ids: list[int], min_match: int, length: int) -> list[int]:
    """What `History.continuation` should return, by a search of all `ids`."""
    if len(ids) <= min_match:
        return []
    end = ids[-min_match:]
    places = [p for p in range(min_match, len(ids)) if ids[p - min_match : p] == end]
    found: list[tuple[int, int]] = []
    for place in places[::-1][:CANDIDATES]:  # the latest first
        size = min_match
        while size < min(LONGEST, place) and ids[place - size - 1] == ids[len(ids) - size - 1]:
            size += 1
        found.append((size, place))
    if not found:
        return []
    _, place = max(found)  # the longest, and of those the latest
    extended = list(ids)
    for j in range(length):  # one by one: a match that reaches the end continues with its own ids
        extended.append(extended[place + j])
    return extended[len(ids) :]


repetitive = st.lists(st.integers(0, 2), max_size=90)
phrases = st.lists(st.sampled_from([[1, 2, 3, 4], [2, 3], [5] * 7, [1, 2, 3, 9]]), max_size=20).map(
    lambda parts: [i for part in parts for i in part]
)


@settings(max_examples=300)
@given(st.one_of(repetitive, phrases), st.integers(1, 6), st.integers(1, 9))
def test_draft_matches_search_of_whole_history(ids: list[int], min_match: int, length: int) -> None:
    history = History(min_match)
    history.extend(ids)
    assert history.continuation(length) == searched(ids, min_match, length)


@settings(max_examples=150)
@given(phrases, st.lists(st.integers(1, 9), min_size=1), st.integers(1, 4))
def test_history_extended_in_pieces_equals_history_extended_at_once(
    ids: list[int], pieces: list[int], min_match: int
) -> None:
    grown, start = History(min_match), 0
    while start < len(ids):
        stop = start + pieces[start % len(pieces)]
        grown.extend(ids[start:stop])
        start = stop
        assert grown.continuation(5) == searched(ids[:stop], min_match, 5)
    whole = History(min_match)
    whole.extend(ids)
    assert vars(grown) == vars(whole)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([], []),
        ([1], []),
        ([1, 2, 3, 4], []),  # nothing is repeated
        ([1, 2, 3, 1, 2], [3, 1, 2, 3]),
        ([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], [3, 8, 1, 2]),  # the longer match, not the later
        ([1, 2, 3, 8, 1, 2, 4, 9, 1, 2], [4, 9, 1, 2]),  # the later of two equally long matches
        ([5, 5, 5], [5, 5, 5, 5]),
        ([0, 6, 7, 6, 7], [6, 7, 6, 7]),  # the match overlaps the end, and so does what follows
        ([6, 7, 8, 0, 7, 8], [0, 7, 8, 0]),
    ],
)
def test_draft_examples(ids: list[int], expected: list[int]) -> None:
    history = History(2)
    history.extend(ids)
    assert history.continuation(4) == expected


def test_matches_count_up_to_32_ids_and_16_latest_are_compared() -> None:
    stem = list(range(100, 140))
    history = History(2)
    history.extend([1, *stem, 50, 2, *stem, 51, 1, *stem])  # the first matches more than 32
    assert history.continuation(1) == [51]
    for between, found in ((CANDIDATES - 1, [70]), (CANDIDATES, [60])):
        history = History(2)
        history.extend([3, 1, 2, 70])  # three ids match here
        for i in range(between):
            history.extend([9 + i, 1, 2, 60])  # and two here
        history.extend([3, 1, 2])
        assert history.continuation(1) == found


# ---- through the proposer


def sequence(ids: list[int]) -> Any:
    """What a proposer reads of a sequence."""

    class Row(SimpleNamespace):
        __hash__ = object.__hash__
        __eq__ = object.__eq__

        def token_ids(self, start: int, stop: int) -> list[int]:
            self.read += stop - start
            return self.ids[start:stop]

        @property
        def num_tokens(self) -> int:
            return len(self.ids)

    return Row(ids=ids, read=0)


def test_each_sequence_has_its_own_history_and_reads_each_id_once() -> None:
    ngram = Ngram(2)
    first, second = sequence([1, 2, 3, 1, 2]), sequence([4, 5, 6, 4, 5])
    assert ngram.propose([first, second], [2, 3]) == [[3, 1], [6, 4, 5]]
    first.ids += [3, 1]
    assert ngram.propose([second], [1]) == [[6]]
    assert ngram.propose([first, second], [3, 1]) == [[2, 3, 1], [6]]
    assert (first.read, second.read) == (7, 5)
    # A restarted sequence is another one, though it has the same ids.
    again = sequence([1, 2])
    assert ngram.propose([again], [4]) == [[]]
    del again, first, second
    assert not ngram._histories


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_interrupted_history_is_read_again(error: type[BaseException]) -> None:
    ids = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]

    class Breaking(list[int]):
        def __iter__(self) -> Any:
            yield from [1, 2, 3]
            raise error

    row, ngram = sequence(ids[:6]), Ngram(2)
    assert ngram.propose([row], [2]) == [[3, 4]]
    row.ids = ids
    plain = row.token_ids
    row.token_ids = lambda start, stop: Breaking()
    with pytest.raises(error):
        ngram.propose([row], [2])
    row.token_ids = plain
    assert ngram.propose([row], [3]) == [searched(ids, 2, 3)]


def operations(function: Any) -> int:
    """Lines of ngram.py that a call runs through, comprehensions and all."""
    count = 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.endswith("ngram.py"):
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("min_match", [1, 2, 5])
@pytest.mark.parametrize(
    "kind", ["one id for ever", "two by turns", "all different", "long phrases"]
)
def test_cost_of_extending_and_drafting_is_independent_of_length(min_match: int, kind: str) -> None:
    make = {
        "one id for ever": lambda i: 7,
        "two by turns": lambda i: i % 2,
        "all different": lambda i: i,
        "long phrases": lambda i: i % 997,
    }[kind]
    history, costs = History(min_match), {}
    for size in (3_000, 100_000):
        history.extend([make(i) for i in range(len(history.ids), size)])
        costs[size] = (
            operations(lambda i=size: history.extend([make(i)])),
            operations(lambda: history.continuation(8)),
        )
    assert costs[3_000] == costs[100_000]
    assert costs[3_000][0] < 15
    assert costs[3_000][1] <= CANDIDATES * (LONGEST * 2 + 8) + 40
    assert len(history._previous_ends) == len(history.ids)
    assert len(history._last_end) <= len(history.ids)


@pytest.mark.parametrize("min_match", [0, -1, 33, 10**9, True, 2.0, "2", None])
def test_invalid_min_match_is_rejected(min_match: Any) -> None:
    with pytest.raises(InvalidRequest, match=rf"min_match={min_match!r}: .* 1 to 32"):
        Ngram(min_match)


@pytest.mark.parametrize("min_match", [1, 2, 31, 32])
def test_valid_min_match_values_produce_drafts(min_match: int) -> None:
    ids = list(range(3, 40))
    assert Ngram(min_match).propose([sequence(ids + ids)], [3]) == [[3, 4, 5]]
