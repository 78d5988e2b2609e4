"""The worked examples of Megatron's document, on the functions of the engine that do this work."""

from __future__ import annotations

import pytest

from verbatim import SamplingParams
from verbatim.batch import Draws
from verbatim.core import Request, Sequence
from verbatim.engine.commit import valid_rows
from verbatim.engine.work import Chunk, Draft, Schedule

#          what is fed in       what each row draws
DECODING = [
    ([50, 60, 70], [60, 99, 98]),  # the first draft stands, the second does not
    ([30, 40, 55], [40, 55, 97]),  # both stand
    ([61, 71, 81], [96, 81, 95]),  # none does, though the second is what its own row drew
]
IN_PREFILL = [([19, 20], [33]), ([41, 42, 43, 44], [45])]


def chunk_of(ids: list[int], num_drafts: int) -> Chunk:
    """Rows of `ids` for a sequence in blocks of its own, the last `num_drafts` of them drafted."""
    known = ids[: len(ids) - num_drafts]
    request = Request(
        "r", None, known, SamplingParams(), 0, 9, frozenset(), [], 0.0, lambda request: None
    )
    sequence = Sequence(request, 0, watch=None, blocks=[1])  # type: ignore[arg-type]
    draft = Draft(ids[len(known) :], [None] * num_drafts)
    return Chunk(sequence, len(known), 0, draws=True, max_draft=num_drafts, draft=draft)


@pytest.fixture
def work() -> Schedule:
    chunks = [chunk_of(ids, 2) for ids, _ in DECODING] + [chunk_of(ids, 0) for ids, _ in IN_PREFILL]
    return Schedule(chunks, [])


def test_rows_that_need_logits(work: Schedule) -> None:
    batch = work.batch()
    assert batch.logit_rows.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 14]
    assert batch.token_ids.tolist() == [
        *(50, 60, 70, 30, 40, 55, 61, 71, 81),
        *(19, 20, 41, 42, 43, 44),
    ]
    assert batch.context_lens.tolist() == [3, 3, 3, 2, 4]
    assert [chunk.first_logits_row for chunk in work.chunks] == [0, 3, 6, 9, 10]


def test_rows_that_count(work: Schedule) -> None:
    drawn = [token_id for _, ids in DECODING + IN_PREFILL for token_id in ids]
    nothing = [0.0] * len(drawn)
    draws = Draws(drawn, nothing, nothing, [[]] * len(drawn), [[]] * len(drawn))
    first = 0
    for chunk in work.chunks:
        chunk.first_draw, chunk.num_draws = first, 1 + len(chunk.draft.ids)
        first += chunk.num_draws
    counted = [valid_rows(chunk, draws) for chunk in work.chunks]
    masks = [
        "".join(
            "01"[row in rows] for row in range(chunk.first_draw, chunk.first_draw + chunk.num_draws)
        )
        for chunk, rows in zip(work.chunks, counted, strict=True)
    ]
    assert masks == ["110", "111", "100", "1", "1"]
    assert [rows[-1] for rows in counted] == [1, 5, 6, 9, 10]
