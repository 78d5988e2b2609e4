"""Draft lengths. Only speed depends on them, so they are tested on a simulated machine with its own clock."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from verbatim import SamplingParams
from verbatim.core import Request, Sequence
from verbatim.engine.lengths import MAX_ADAPTIVE, DraftLengths
from verbatim.engine.work import Chunk


def sequences(count: int) -> list[Sequence]:
    request = Request("r", None, [1], SamplingParams(), 0, 99, frozenset(), [], 0.0, lambda r: None)
    return [Sequence(request, i, watch=None) for i in range(count)]  # type: ignore[arg-type]


class Machine:
    """Simulated forwards and drafts that take given times, with drafts that are accepted at random."""

    def __init__(
        self,
        acceptance: Callable[[int], float],
        forward_s: Callable[[int], float],
        # Of one more draft token, for so many sequences.
        draft_s: float | Callable[[int], float] = 0.0,
        *,
        rows: int = 1,
        proposes: float = 1.0,
        noise: float = 0.0,
    ) -> None:
        self.lengths = DraftLengths()
        self.sequences = sequences(rows)
        self.acceptance, self.forward_s = acceptance, forward_s
        self.draft_s = draft_s if callable(draft_s) else lambda lines: draft_s
        self.proposes, self.noise = proposes, noise
        self.random = random.Random(7)
        self.tokens = 0
        self.seconds = 0.0
        self.asked: list[int] = []

    def steps(self, count: int, room: int = 99) -> None:
        for _ in range(count):
            asks = self.lengths.begin_step()
            wanted = self.lengths.choose(dict.fromkeys(self.sequences, room)) if asks else {}
            self.asked.append(sum(wanted.values()))
            chunks = [Chunk(s, 1, 0, True, max_draft=wanted.get(s, 0)) for s in self.sequences]
            if asking := [chunk for chunk in chunks if chunk.max_draft]:
                sizes = [chunk.max_draft for chunk in asking]
                lines = [sum(size > j for size in sizes) for j in range(max(sizes))]
                spent = self._noisy(sum(map(self.draft_s, lines)))
                for chunk in asking:
                    size = chunk.max_draft if self.random.random() < self.proposes else 0
                    chunk.draft_ids = [5] * size
                self.lengths.note_proposal(asking, spent)
                self.seconds += spent
            spent = self._noisy(self.forward_s(len(chunks) + sum(len(c.draft_ids) for c in chunks)))
            self.lengths.note_step(chunks, spent)
            self.seconds += spent
            for chunk in chunks:
                places = range(len(chunk.draft_ids))
                outcomes = (self.random.random() < self.acceptance(j) for j in places)
                accepted = sum(1 for _ in itertools.takewhile(bool, outcomes))
                if chunk.max_draft:
                    self.lengths.note_draft(chunk.sequence, chunk.max_draft, accepted)
                self.tokens += accepted + 1

    def _noisy(self, seconds: float) -> float:
        return seconds * (1 + self.noise * self.random.expovariate(1))

    def speed(self, count: int = 2000) -> float:
        """Tokens a second against the same machine without drafts."""
        self.steps(count)
        rows = len(self.sequences)
        plain = rows / self.forward_s(rows) / (1 + self.noise)
        return self.tokens / self.seconds / plain


def memory_bound(rows: int) -> float:
    return 1.0 + 0.02 * rows


def compute_bound(rows: int) -> float:
    return 0.2 + 1.0 * rows


def test_always_accepted_drafts_reach_full_length() -> None:
    machine = Machine(lambda j: 1.0, memory_bound)
    assert machine.speed() > 7
    assert machine.asked[-1] == MAX_ADAPTIVE


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("draft_s", [0.0, 0.1, 0.4])
@pytest.mark.parametrize("rows", [1, 8, 48])
@pytest.mark.parametrize("forward_s", [memory_bound, compute_bound])
def test_never_accepted_drafts_are_rarely_tried(
    forward_s: Callable[[int], float], rows: int, draft_s: float, noise: float
) -> None:
    machine = Machine(lambda j: 0.0, forward_s, draft_s, rows=rows, noise=noise)
    assert machine.speed(1500) > 0.97
    assert sum(machine.asked[500:]) < 0.02 * rows * 1000


@pytest.mark.parametrize("acceptance", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("draft_s", [0.0, 0.15, 0.5])
@pytest.mark.parametrize("forward_s", [memory_bound, compute_bound])
def test_adaptive_length_is_close_to_best_fixed_length(
    forward_s: Callable[[int], float], draft_s: float, acceptance: float
) -> None:
    def fixed(length: int) -> float:
        tokens = sum(acceptance**j for j in range(length + 1))
        return tokens * forward_s(1) / (forward_s(1 + length) + draft_s * length)

    best = max(fixed(length) for length in range(MAX_ADAPTIVE + 1))
    assert Machine(lambda j: acceptance, forward_s, draft_s).speed(3000) > 0.95 * best


def test_drafts_stay_short_when_later_tokens_are_rejected() -> None:
    machine = Machine(lambda j: 0.95 if j < 2 else 0.05, memory_bound, 0.1)
    machine.steps(500)
    assert set(machine.asked[-100:]) <= {0, 2, 3}
    assert machine.asked[-100:].count(0) <= 2  # to measure a step without drafts again


@pytest.mark.parametrize("acceptance", [0.0, 1.0])
@pytest.mark.parametrize("slow", ["step", "draft"])
def test_slow_first_measurements_are_corrected(slow: str, acceptance: float) -> None:
    machine = Machine(lambda j: acceptance, memory_bound, 0.1)
    calm = machine.forward_s, machine.draft_s
    if slow == "step":
        machine.forward_s = lambda rows: 40 * memory_bound(rows)
    machine.steps(1)
    if slow == "draft":
        machine.draft_s = lambda lines: 50 * 0.1
    machine.steps(3)
    machine.forward_s, machine.draft_s = calm
    machine.steps(700)
    machine.tokens, machine.seconds = 0, 0.0
    assert machine.speed() > (0.97 if acceptance == 0 else 4.0)


@pytest.mark.parametrize("acceptance", [0.0, 0.9])
def test_frequently_replaced_sequences_are_not_slowed_by_exploration(acceptance: float) -> None:
    # 32 rows that cost little together, and a drafter whose cost grows with the number of sequences.
    machine = Machine(
        lambda j: acceptance, lambda n: 3.0 + 0.1 * n, lambda lines: 1.0 + 0.2 * lines, rows=32
    )
    machine.steps(120)
    machine.tokens, machine.seconds = 0, 0.0
    for _ in range(5):
        machine.sequences = sequences(32)
        machine.steps(120)
    assert machine.tokens / machine.seconds > 0.97 * 32 / machine.forward_s(32)


def test_drafting_resumes_when_drafts_are_accepted_again() -> None:
    machine = Machine(lambda j: 0.0, memory_bound, 0.1)
    machine.steps(400)
    machine.acceptance = lambda j: 0.9
    machine.steps(400)
    assert sorted(machine.asked[-100:])[2] >= 2


def test_each_sequence_has_its_own_draft_length() -> None:
    machine = Machine(lambda j: 0.0, lambda rows: 1.0 + 0.15 * rows, 0.02, rows=2)
    good, bad = machine.sequences
    for _ in range(300):
        machine.sequences, machine.acceptance = [good], lambda j: 0.95
        machine.steps(1)
        machine.sequences, machine.acceptance = [bad], lambda j: 0.0
        machine.steps(1)
    wanted = machine.lengths.choose({good: 99, bad: 99})
    assert wanted.get(good, 0) >= 4 and wanted.get(bad, 0) <= 1


def test_proposer_that_rarely_drafts_does_not_slow_decoding() -> None:
    assert Machine(lambda j: 0.9, memory_bound, 0.001, proposes=0.1).speed() > 1.0


def test_draft_is_never_longer_than_room() -> None:
    machine = Machine(lambda j: 1.0, memory_bound, rows=3)
    machine.steps(50, room=2)
    assert max(machine.asked) <= 6
    machine.steps(5, room=0)
    assert machine.asked[-5:] == [0] * 5


def test_fixed_draft_length_is_limited_only_by_room() -> None:
    a, b, c = sequences(3)
    assert DraftLengths(4).choose({a: 9, b: 2, c: 0}) == {a: 4, b: 2}
    assert DraftLengths(0).choose({a: 9}) == {}


def test_continuous_prefill_does_not_stop_drafting() -> None:
    machine = Machine(lambda j: 1.0, memory_bound)
    machine.steps(30)
    (decoding,) = machine.sequences
    asked = []
    for _ in range(200):
        wants = machine.lengths.begin_step()
        size = machine.lengths.choose({decoding: 99}).get(decoding, 0) if wants else 0
        asked.append(size)
        chunks = [
            Chunk(decoding, 1, 0, True, max_draft=size, draft_ids=[5] * size),
            Chunk(sequences(1)[0], 64, 0, False),
        ]
        machine.lengths.note_step(chunks, 9.0)
    assert asked.count(MAX_ADAPTIVE) > 180
