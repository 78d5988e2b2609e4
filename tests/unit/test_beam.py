"""Beam search, compared with transformers' own on a cheap scripted model."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import (
    GenerationMixin,
    LogitsProcessorList,
    PretrainedConfig,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor
from transformers.modeling_outputs import CausalLMOutput

from verbatim.batch import Candidate
from verbatim.engine.beams import BeamSearch
from verbatim.params import SamplingParams

WIDTHS = (2, 3, 4, 6)
PENALTIES = (-1.0, 0.0, 0.7, 1.0, 2.0)
EARLY = (False, True, "never")


class Scripted(PreTrainedModel, GenerationMixin):
    """Logits depend on the last two ids and the length, so different histories soon get different logits."""

    config_class = PretrainedConfig

    def __init__(
        self, vocab: int, seed: int, likely: tuple[int, ...] = (), bias: float = 2.0
    ) -> None:
        super().__init__(PretrainedConfig(vocab_size=vocab))
        draws = torch.Generator().manual_seed(seed)
        self.tables = nn.ParameterList(
            torch.randn(rows, vocab, generator=draws) for rows in (vocab, vocab, 8)
        )
        with torch.no_grad():
            self.tables[0][:, list(likely)] += bias  # make ends of sequence likely

    def forward(self, input_ids: Tensor, **_: Any) -> CausalLMOutput:
        last, before, length = self.tables
        logits = last[input_ids[:, -1]] + before[input_ids[:, -2]] + length[input_ids.shape[1] % 8]
        return CausalLMOutput(logits=logits[:, None])


@dataclass
class Path:
    """A minimal state of a beam."""

    ids: tuple[int, ...] = ()
    finished: bool = False
    score: float = 0.0


@dataclass
class Case:
    """One beam search, for both implementations."""

    model: Any
    prompt: list[int]
    num_beams: int
    eos: tuple[int, ...]
    max_tokens: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    repetition_penalty: float = 1.0
    more_stops: frozenset[int] = frozenset()  # passed to transformers as a stopping criterion
    allowed: dict[int, list[int]] = field(default_factory=dict)  # by the last id; empty: all

    @property
    def processors(self) -> LogitsProcessorList:
        found = LogitsProcessorList()
        if self.repetition_penalty != 1.0:
            found.append(RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        if self.allowed:
            found.append(
                PrefixConstrainedLogitsProcessor(lambda _, ids: self.allowed[int(ids[-1])], 1)
            )
        return found


class OneOf(StoppingCriteria):
    def __init__(self, ids: frozenset[int]) -> None:
        self.ids = torch.tensor(sorted(ids))

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.isin(input_ids[:, -1], self.ids)


def transformers_beams(case: Case) -> list[tuple[tuple[int, ...], float]]:
    """Ids and scores of transformers' hypotheses, without placeholders and copies (near -1e9)."""
    ids = torch.tensor([case.prompt])
    out = case.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=case.num_beams,
        num_return_sequences=case.num_beams,
        do_sample=False,
        length_penalty=case.length_penalty,
        early_stopping=case.early_stopping,
        logits_processor=case.processors,
        stopping_criteria=StoppingCriteriaList([OneOf(case.more_stops)] if case.more_stops else []),
        eos_token_id=list(case.eos) or None,
        pad_token_id=0,
        max_new_tokens=case.max_tokens,
        use_cache=not isinstance(case.model, Scripted),
        return_dict_in_generate=True,
        output_scores=True,
    )
    lengths = (out.beam_indices >= 0).sum(1).tolist()
    rows = out.sequences[:, len(case.prompt) :].tolist()
    found = zip(rows, lengths, out.sequences_scores.tolist(), strict=True)
    # The length penalty improves the score of long placeholders; the sum of log-probs identifies them.
    return [
        (tuple(row[:length]), score)
        for row, length, score in found
        if score * max(1, length) ** case.length_penalty > -1e8
    ]


def searched(case: Case) -> BeamSearch:
    """Run the case with `BeamSearch` and full forwards, without a KV cache."""
    search = BeamSearch(
        Path(),
        SamplingParams(
            num_beams=case.num_beams,
            length_penalty=case.length_penalty,
            early_stopping=case.early_stopping,
        ),
        num_eos=len(case.eos),
        max_tokens=case.max_tokens,
    )

    def grow(path: Path, candidate: Candidate) -> Path:
        ids = (*path.ids, candidate.token_id)
        stops = candidate.token_id in {*case.eos, *case.more_stops}
        return Path(ids, stops or len(ids) == case.max_tokens)

    while not search.over:
        ids = torch.tensor([[*case.prompt, *beam.ids] for beam in search.live])
        with torch.no_grad():
            raw = case.model(input_ids=ids).logits[:, -1].float().log_softmax(-1)
        scores = case.processors(ids, raw.clone())
        search.advance(
            [candidates(*rows, search.num_candidates) for rows in zip(raw, scores, strict=True)],
            grow,
        )
    return search


def candidates(raw: Tensor, scores: Tensor, count: int) -> list[Candidate]:
    order = scores.sort(descending=True, stable=True).indices[:count]
    return [
        Candidate(i, *pair)
        for i, *pair in zip(
            order.tolist(), raw[order].tolist(), scores[order].tolist(), strict=True
        )
    ]


def assert_equal_to_transformers(case: Case) -> BeamSearch[Path]:
    search = searched(case)
    expected = transformers_beams(case)
    assert [beam.ids for beam in search.finished] == [ids for ids, _ in expected]
    scores = [beam.score for beam in search.finished]
    assert scores == pytest.approx([score for _, score in expected], rel=1e-5, abs=1e-5)
    assert all(beam.finished for beam in search.finished)
    return search


# -- compared with transformers ----------------------------------------------------------------------


@st.composite
def cases(draw: Any, *, narrow: bool = False, more_stops: bool = False) -> Case:
    """Searches of the scripted model. Unless `narrow`, transformers never runs out of candidates."""
    width = draw(st.sampled_from((*WIDTHS, 1 + max(WIDTHS))))
    num_eos = draw(st.integers(0, 3))
    vocab = (max(2, 1 + num_eos) * width) + draw(st.integers(1, 6))
    eos = tuple(draw(st.permutations(range(1, vocab)))[:num_eos])
    model = Scripted(
        vocab, draw(st.integers(0, 10**6)), eos, draw(st.sampled_from((-1.0, 1.0, 3.0)))
    )
    every = st.lists(st.integers(0, vocab - 1), min_size=1, max_size=3, unique=True)
    return Case(
        model,
        prompt=draw(st.lists(st.integers(0, vocab - 1), min_size=2, max_size=5)),
        num_beams=width,
        eos=eos,
        max_tokens=draw(st.integers(1, 12)),
        length_penalty=draw(st.sampled_from(PENALTIES)),
        early_stopping=draw(st.sampled_from((False, "never") if narrow else EARLY)),
        repetition_penalty=draw(st.sampled_from((1.0, 0.7, 1.4))),
        more_stops=draw(st.frozensets(st.integers(0, vocab - 1), min_size=2))
        if more_stops
        else frozenset(),
        allowed={i: draw(every) for i in range(vocab)} if narrow else {},
    )


@settings(max_examples=150)
@given(case=cases())
def test_beam_search_finds_the_same_hypotheses_as_transformers(case: Case) -> None:
    search = assert_equal_to_transformers(case)
    assert len(search.finished) == case.num_beams


@settings(max_examples=60)
@given(case=cases(more_stops=True))
def test_hypotheses_match_transformers_when_stops_leave_too_few_beams(case: Case) -> None:
    assert_equal_to_transformers(case)


@pytest.mark.slow
@settings(max_examples=60)
@given(case=cases(narrow=True))
def test_hypotheses_match_transformers_when_few_candidates_are_allowed(case: Case) -> None:
    """Only real hypotheses of transformers are compared, not its placeholders."""
    search = assert_equal_to_transformers(case)
    found = [beam.ids for beam in search.finished]
    assert len(set(found)) == len(found)


# -- by hand -----------------------------------------------------------------------------------------


def row(*scores: float, first: int = 0) -> list[Candidate]:
    """Candidates of ids `first`, `first + 1`, ..., in the order given."""
    return [Candidate(first + i, score, score) for i, score in enumerate(scores)]


def search_of(
    num_beams: int = 2, *, num_eos: int = 1, max_tokens: int = 9, **params: Any
) -> BeamSearch:
    return BeamSearch(Path(), SamplingParams(num_beams=num_beams, **params), num_eos, max_tokens)


def ends_at(*ends: int) -> Any:
    return lambda path, c: Path((*path.ids, c.token_id), c.token_id in ends)


def test_tied_beams_keep_the_order_of_parents_and_candidates() -> None:
    search = search_of(3)
    search.advance([row(-1.0, -1.0, -1.0, -1.0)], ends_at())
    assert [beam.ids for beam in search.live] == [(0,), (1,), (2,)]
    search.advance([row(-2.0, -2.0), row(-1.0, -2.0), row(-2.0, -2.0)], ends_at())
    assert [beam.ids for beam in search.live] == [(1, 0), (0, 0), (0, 1)]


def test_tied_hypotheses_are_returned_earliest_first() -> None:
    search = search_of(2, early_stopping="never", length_penalty=0.0)
    search.advance([row(-2.0, -1.0 - 1.0, -3.0)], ends_at(0))
    search.advance([row(-0.0, -1.0), row(-1.0, -1.0)], ends_at(0))
    assert [beam.ids for beam in search.finished] == [(0,), (1, 0)]


@pytest.mark.parametrize(
    ("early", "length_penalty", "worst", "over"),
    [
        (True, 1.0, -1.4, True),  # two hypotheses are there
        (False, 1.0, -1.4, False),  # -2.4 / 2 beats -1.4
        (False, 1.0, -1.1, True),  # and doesn't beat -1.1
        (False, 0.0, -1.4, True),  # -2.4 does not
        ("never", 1.0, -1.1, False),  # -2.4 / 9 does
        ("never", 0.0, -1.1, True),
        ("never", -1.0, -1.1, True),  # -2.4 * 2 does not beat -1.6 * 2
        ("never", -1.0, -6.0, False),  # and beats -6; longer ones are worse
    ],
)
def test_search_end_by_early_stopping_and_length_penalty(
    early: bool | str, length_penalty: float, worst: float, over: bool
) -> None:
    search = search_of(2, early_stopping=early, length_penalty=length_penalty)
    first = [*row(-1.5, -7.0), Candidate(7, worst, worst)]
    search.advance([sorted(first, key=lambda c: -c.score)], ends_at(7))
    assert not search.over
    search.advance([row(-0.1, -0.9, first=5), row(-9.0)], ends_at(5))
    assert {beam.ids for beam in search.finished} == {(7,), (0, 5)}
    assert search.over is over
    assert bool(search.live) is not over


def test_search_ends_when_live_beam_can_only_tie_the_worst_hypothesis() -> None:
    search = search_of(1)
    search.advance([row(-1.0, -1.0)], ends_at(0))
    assert search.over


def test_beam_states_are_created_only_for_kept_candidates() -> None:
    created = []
    search = search_of(2)
    search.advance(
        [row(-1.0, -2.0, -3.0, -4.0)], lambda p, c: created.append(c) or Path((c.token_id,))
    )
    assert [c.token_id for c in created] == [0, 1]


def test_cut_search_returns_live_beams_as_hypotheses() -> None:
    search = search_of(2)
    search.advance([row(-1.0, -6.0, -7.0, -8.0)], ends_at(1))
    search.advance([row(-1.0, -20.0), row(-30.0)], ends_at())
    search.cut()
    assert search.over
    assert search.live == []
    assert [(beam.ids, beam.score) for beam in search.finished] == [((0, 0), -1.0), ((1,), -6.0)]
    search = search_of(2)
    search.cut()
    assert search.finished == [Path()]


@pytest.mark.parametrize("length_penalty", [-100.0, 100.0])
def test_extreme_length_penalties_stay_finite_and_keep_their_direction(
    length_penalty: float,
) -> None:
    search = search_of(2, length_penalty=length_penalty, max_tokens=2**17, early_stopping="never")
    search.advance([row(-1.0, -2.0, -3.0)], ends_at(0))
    for _ in range(3000):
        if search.over:
            break
        search.advance([row(-1.0, -1.5, first=1)] * 2, ends_at())
    search.cut()
    first = search.finished[0]
    assert (len(first.ids) == 1) is (length_penalty < 0)
    assert all(math.isfinite(beam.score) for beam in search.finished)


def test_running_scores_are_float32() -> None:
    search = search_of(1, num_eos=0, max_tokens=20)
    total = torch.zeros(())
    for _ in range(10):
        search.advance([row(-0.1)], ends_at())
        total += torch.tensor(-0.1)
    assert search.live[0].score == total.item() != pytest.approx(-1.0, abs=1e-9)
