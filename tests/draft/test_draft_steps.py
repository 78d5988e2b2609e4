"""Drafts step by step: accepted tokens, blocks taken and returned, effects on other requests, failures."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from support.drafters import Answers, Moody, Oracle, answers_of, drafting
from support.engine_machine import OPTIONS, EngineMachine, params, prompts
from support.pairwise import slow_but
from support.requests_mixed import all_facts, facts
from support.scripted_runner import EOS, VOCAB, check, result_of, scripted_engine, solo
from verbatim.core import Delta, FinishReason, Request, Result, Sequence
from verbatim.engine.admission import Admission
from verbatim.engine.engine import Engine
from verbatim.params import SamplingParams

PROMPT = [5, 9, 17, 4, 11]
FREE = SamplingParams(seed=7, max_tokens=23, ignore_eos=True, logprobs=2, hidden_states=True)


def open_scripted(
    proposer: Any = None, length: int | None = None, **options: Any
) -> tuple[Engine, Admission]:
    engine, admission = scripted_engine(**options)
    if proposer is not None:
        engine.drafting = drafting(proposer, length, VOCAB)
        admission.drafts = True
    return engine, admission


def oracle(results: list[Result], right: Any = None) -> Oracle:
    return Oracle(answers_of(results), right, VOCAB)


def begin(engine: Engine, admission: Admission, prompt: Any, asked: SamplingParams) -> Request:
    request = admission.admit(prompt, asked)
    engine.add(request)
    return request


def finish(engine: Engine, *requests: Request) -> list[Result]:
    while engine.step():
        check(engine)
    assert engine.scheduler.pool.num_used == 0
    return [result_of(request) for request in requests]


# ---- accepted tokens


@pytest.mark.parametrize("length", slow_but([0, 3, 8], [0, 1, 2, 3, 5, 8]))
def test_oracle_needs_one_forward_per_draft_window(length: int) -> None:
    for count in range(1, 24):
        asked = FREE.replace(max_tokens=count)
        plain = solo(PROMPT, asked)
        engine, admission = open_scripted(oracle([plain]), length)
        request = begin(engine, admission, PROMPT, asked)
        assert facts(finish(engine, request)[0]) == facts(plain)
        assert engine.runner.num_forwards == 1 + -(-(count - 1) // (length + 1))
        # No row is wasted: those of the prompt, and of all tokens but the last.
        assert engine.runner.num_rows == len(PROMPT) + count - 1  # type: ignore[attr-defined]


def held(engine: Engine, sequence: Sequence) -> tuple[int, ...]:
    pool = engine.scheduler.pool
    return (
        sequence.num_computed,
        len(sequence.blocks),
        sequence.num_indexed,
        pool.num_free,
        pool.num_used,
        pool.num_cached,
    )


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("num_prompt", [3, 4, 5, 6])
@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_step_yields_accepted_drafts_plus_one_and_holds_no_extra_blocks(
    length: int, num_prompt: int, prefix_cache: bool
) -> None:
    prompt = [3 + i for i in range(num_prompt)]
    asked = FREE.replace(max_tokens=40)
    plain, admission = open_scripted(prefix_cache=prefix_cache)
    request = begin(plain, admission, prompt, asked)
    by_length = {}
    while plain.step():
        by_length[len(request.sequences[0].output_ids)] = held(plain, request.sequences[0])
    expected = result_of(request)
    for right in range(length + 1):
        drafter = oracle([expected], lambda sequence, right=right: right)
        engine, admission = open_scripted(drafter, length, prefix_cache=prefix_cache)
        request = begin(engine, admission, prompt, asked)
        (sequence,) = request.sequences
        assert engine.step()
        before = len(sequence.output_ids)
        assert before == 1
        while not request.finished:
            engine.step()
            check(engine)
            now = len(sequence.output_ids)
            assert now - before == min(right + 1, 40 - before)
            assert held(engine, sequence) == by_length[now]
            before = now
        assert facts(result_of(request)) == facts(expected)
        figures = request.metrics.draft
        full = figures.num_drafted[length - 1]  # the last windows are shorter
        assert full > 2 and figures.num_accepted[:right] == figures.num_drafted[:right]
        assert figures.num_accepted[right:] == [0] * (length - right)


@pytest.mark.parametrize("place", range(1, 8))
def test_stop_conditions_end_sequence_inside_draft_window(place: int) -> None:
    free = solo(PROMPT, FREE)
    ids = free.outputs[0].token_ids
    stops: list[dict[str, Any]] = [
        dict(stop_token_ids=[ids[place]]),
        dict(stop_token_ids=[ids[place - 1 : place + 1]]),
        dict(stop_token_ids=[ids[: place + 1]], min_tokens=2),
        dict(stop_token_ids=[[EOS], [ids[place]]], min_tokens=5),
        dict(max_tokens=place + 1),
        dict(ignore_eos=False, logit_bias={EOS: 1.0}),
        dict(ignore_eos=False, logit_bias={EOS: 1.0}, min_tokens=place),
    ]
    for stop in stops:
        asked = FREE.replace(**stop)
        plain = solo(PROMPT, asked)
        answers = answers_of([plain])
        for key, said in answers.items():  # a drafter that continues past the end
            answers[key] = said + [3 + i % 20 for i in range(30)]
        engine, admission = open_scripted(Oracle(answers, vocab_size=VOCAB), 8)
        result = finish(engine, begin(engine, admission, PROMPT, asked))[0]
        assert facts(result) == facts(plain)
        c = result.outputs[0]
        assert len(c.token_ids) == len(c.logprobs) == len(c.top_logprobs or ())
        assert engine.runner.num_forwards <= 1 + -(-len(c.token_ids) // 9) + (len(c.token_ids) > 1)
        assert engine.runner.num_forwards < len(c.token_ids) or len(c.token_ids) < 4


def test_short_requests_and_requests_with_draft_false_are_not_drafted() -> None:
    drafter = oracle([])
    engine, admission = open_scripted(drafter, 5)
    asked = [
        FREE.replace(max_tokens=0, prompt_logprobs=1),
        FREE.replace(max_tokens=1),
        FREE.replace(max_tokens=2),  # one token is left after the first, and needs no draft
        FREE.replace(draft=False),
        FREE.replace(draft=False, num_beams=2, logprobs=None, seed=None, hidden_states=False),
    ]
    requests = [begin(engine, admission, PROMPT, each) for each in asked]
    results = finish(engine, *requests)
    assert all_facts(results[:4]) == [facts(solo(PROMPT, each)) for each in asked[:4]]
    assert drafter.num_calls == 0
    assert [r.metrics.draft.num_forwards for r in results] == [0, 1, 2, 0, 0]


# ---- effects on other requests


def trace(engine: Engine, admission: Admission, script: list[tuple[int, Any, Any]]) -> Any:
    """Run a script of (step, prompt, params): results, steps of first tokens, preemptions, steps."""
    first: dict[int, int] = {}
    requests: list[Request] = []
    queue, step = list(script), 0
    while queue or engine.has_work:
        while queue and queue[0][0] <= step:
            requests.append(begin(engine, admission, *queue.pop(0)[1:]))
        engine.step()
        check(engine)
        step += 1
        for i, request in enumerate(requests):
            if any(s.output_ids for s in request.sequences):
                first.setdefault(i, step)
    return [result_of(r) for r in requests], first, engine.scheduler.num_preemptions, step


def crowd(seed: int) -> tuple[list[tuple[int, Any, Any]], dict[str, Any]]:
    """Requests that arrive one by one, and options with too few rows, sequences and blocks for them."""
    rng = random.Random(seed)
    script = []
    for i in range(9):
        prompt = [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 30))]
        asked = SamplingParams(
            seed=i,
            max_tokens=rng.randint(2, 18),
            n=rng.choice([1, 1, 1, 3]),
            ignore_eos=True,
            priority=rng.choice([0, 0, 0, -1, 1]),
        )
        script.append((i * rng.randint(0, 3), prompt, asked))
    script.sort(key=lambda entry: entry[0])
    options = dict(
        num_blocks=rng.choice([15, 17, 24]),
        max_batch_tokens=rng.choice([5, 9, 16]),
        max_sequences=rng.choice([2, 4, 8]),
    )
    return script, options


@pytest.mark.parametrize("seed", range(12))
def test_rejected_drafts_do_not_change_timing_or_preemptions(seed: int) -> None:
    """Each step has the same chunks as without drafts, and so everything happens at the same step."""
    script, options = crowd(seed)
    plain = trace(*open_scripted(**options, prefix_cache=False), script)
    wrong = Oracle(answers_of(plain[0]), lambda sequence: 0, VOCAB)
    engine, admission = open_scripted(wrong, 6, **options, prefix_cache=False)
    drafted = trace(engine, admission, script)
    assert all_facts(drafted[0]) == all_facts(plain[0])
    assert drafted[1:] == plain[1:]
    assert engine.drafting is not None and sum(engine.drafting.totals.num_drafted) > 0


@pytest.mark.parametrize("seed", range(12))
def test_accepted_drafts_do_not_delay_first_tokens(seed: int) -> None:
    script, options = crowd(seed)
    plain = trace(*open_scripted(**options), script)
    right = Oracle(answers_of(plain[0]), vocab_size=VOCAB)
    drafted = trace(*open_scripted(right, 6, **options), script)
    assert all_facts(drafted[0]) == all_facts(plain[0])
    assert sum(drafted[1].values()) <= sum(plain[1].values())
    assert drafted[3] <= plain[3]


def test_long_prefill_is_not_slowed_by_drafts() -> None:
    asked = FREE.replace(max_tokens=30)
    plain = solo(PROMPT, asked)
    for proposer in (None, oracle([plain], lambda sequence: 0)):
        engine, admission = open_scripted(proposer, 8, max_batch_tokens=9)
        first = begin(engine, admission, PROMPT, asked)
        engine.step()
        engine.step()
        late = begin(engine, admission, [3 + i % 20 for i in range(40)], asked)
        for _ in range(5):  # eight rows a step are left for it
            assert not late.sequences[0].output_ids
            engine.step()
        assert late.sequences[0].output_ids
        assert facts(finish(engine, first, late)[0]) == facts(plain)


# ---- interrupts, aborts, failures


class Broken:
    """Raises KeyboardInterrupt in the middle of a proposal, some of which was returned already."""

    def __init__(self, inner: Any, every: int) -> None:
        self.inner, self.every, self.calls = inner, every, 0

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> Any:
        self.calls += 1
        for i, draft in enumerate(self.inner.propose(sequences, lengths)):
            if self.calls % self.every == 0 and i == len(sequences) - 1:
                raise KeyboardInterrupt
            yield draft


@pytest.mark.parametrize("every", [1, 2, 3])
def test_ctrl_c_during_proposal_leaves_blocks_and_tokens_unchanged(every: int) -> None:
    results = [solo(PROMPT[i:], FREE.replace(seed=i)) for i in range(3)]
    engine, admission = open_scripted(Broken(oracle(results), every), 6)
    requests = [begin(engine, admission, PROMPT[i:], FREE.replace(seed=i)) for i in range(3)]
    while engine.has_work:
        sequences = [request.sequences[0] for request in requests]
        before = [(s.num_computed, len(s.output_ids)) for s in sequences]
        try:
            engine.step()
        except KeyboardInterrupt:
            assert before == [(s.num_computed, len(s.output_ids)) for s in sequences]
            for s in sequences:  # no more than the next row needs
                assert len(s.blocks) == (-(-s.num_tokens // 4) if s.blocks else 0)
            engine.drafting = drafting(Broken(oracle(results), every + 1), 6, VOCAB)
            if every == 1:
                engine.drafting = None  # blocks left over from drafts must not matter
        check(engine)
    assert all_facts([result_of(r) for r in requests]) == all_facts(results)
    assert engine.scheduler.pool.num_used == 0


def test_peek_returns_next_token_without_proposing_drafts() -> None:
    plain = solo(PROMPT, FREE)
    drafter = oracle([plain])
    engine, admission = open_scripted(drafter, 3)
    request = begin(engine, admission, PROMPT, FREE)
    expected = plain.outputs[0].token_ids
    while not request.finished:
        calls, known = drafter.num_calls, len(request.sequences[0].output_ids)
        seen = engine.peek()
        assert seen and drafter.num_calls == calls
        assert seen[0][1] == expected[known]
        engine.step()
        check(engine)
    assert facts(result_of(request)) == facts(plain)


@pytest.mark.parametrize("when", [1, 2, 3])
def test_abort_during_delivery_keeps_accepted_tokens(when: int) -> None:
    """`deliver` aborts its own request, and that of the next chunk, in the middle of a commit."""
    asked = [FREE.replace(seed=i, n=2) for i in range(3)]
    plain = [solo(PROMPT, each) for each in asked]
    engine, admission = open_scripted(oracle(plain), 4)
    requests = [admission.admit(PROMPT, each) for each in asked]
    count = 0

    def deliver(delta: Delta) -> None:
        nonlocal count
        count += 1
        if count == 6 + when:
            engine.abort(requests[0])
            engine.abort(requests[1])

    for request in requests:
        request.deliver = deliver
        engine.add(request)
    results = finish(engine, *requests)
    assert facts(results[2]) == facts(plain[2])
    for result, whole in zip(results[:2], plain[:2], strict=True):
        for c, d in zip(result.outputs, whole.outputs, strict=True):
            assert c.finish_reason is FinishReason.ABORT
            assert c.token_ids == d.token_ids[: len(c.token_ids)]
            assert len(c.token_ids) == len(c.logprobs)
            assert len(c.hidden_states) == len(c.token_ids)  # type: ignore[arg-type]


def test_failed_forward_with_drafts_fails_its_requests_and_frees_blocks() -> None:
    plain = solo(PROMPT, FREE)
    engine, admission = open_scripted(oracle([plain]), 4)
    requests = [begin(engine, admission, PROMPT, FREE) for _ in range(2)]
    for _ in range(3):
        engine.step()
    engine.runner.raises = OSError("the disk is gone")  # type: ignore[attr-defined]
    assert engine.step() and not engine.has_work
    assert [type(request.error) for request in requests] == [OSError, OSError]
    check(engine)
    assert engine.scheduler.pool.num_used == 0
    assert facts(finish(engine, begin(engine, admission, PROMPT, FREE))[0]) == facts(plain)


class DraftMachine(EngineMachine):
    """The state machine of the engine tests, with a drafter."""

    @initialize(**OPTIONS, length=st.sampled_from([None, 1, 2, 3, 5, 8]), seed=st.integers(0, 99))
    def open(self, length: Any = None, seed: int = 0, **options: Any) -> None:
        super().open(**options)
        self.answers: Answers = {}
        drafter = Moody(self.answers, seed, VOCAB)
        self.engine.drafting = drafting(drafter, length, VOCAB)
        self.admission.drafts = True

    @rule(prompt=prompts, asked=params)
    def add(self, prompt: list[int], asked: SamplingParams) -> None:
        if asked.num_beams > 1:
            asked = asked.replace(draft=False)
        elif len(self.requests) < 12:
            self.answers.update(answers_of([solo(prompt, asked)]))
        super().add(prompt, asked)

    @precondition(lambda self: self.engine.has_work)
    @rule()
    def interrupt_the_drafter(self) -> None:
        drafts = self.engine.drafting
        assert drafts is not None
        self.engine.drafting = drafting(Broken(drafts.proposer, 1), 3, VOCAB)
        try:
            self.engine.step()
        except KeyboardInterrupt:
            pass
        self.engine.drafting = drafts


TestDraftMachine = DraftMachine.TestCase
TestDraftMachine.settings = settings(
    max_examples=40, stateful_step_count=20, suppress_health_check=list(HealthCheck)
)
