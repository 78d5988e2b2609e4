"""A stateful test of an engine: requests are added, run, fork, are evicted and aborted in any order."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from support.requests_mixed import facts
from support.scripted_runner import VOCAB, check, result_of, scripted_engine, solo
from verbatim.core import Delta, Request
from verbatim.params import SamplingParams

_STEMS = [[3, 4, 5, 6, 7, 8, 9, 10, 11], [3, 4, 5, 6, 12, 13, 14, 15, 16], [17] * 14]
prompts = st.builds(
    lambda stem, cut, tail: stem[:cut] + tail,
    st.sampled_from(_STEMS),
    st.integers(1, 14),
    st.lists(st.integers(3, VOCAB - 1), max_size=6),
)
params = st.one_of(
    st.builds(
        SamplingParams,
        seed=st.integers(0, 5),
        max_tokens=st.integers(0, 12),
        n=st.sampled_from([1, 1, 1, 2, 5]),
        temperature=st.sampled_from([0.0, 0.7, 1.0]),
        logprobs=st.sampled_from([None, 2]),
        prompt_logprobs=st.sampled_from([None, None, 1]),
        priority=st.integers(-2, 2),
        hidden_states=st.booleans(),
        record_routing=st.booleans(),
        cache_salt=st.sampled_from([None, None, "a"]),
        presence_penalty=st.sampled_from([0.0, 0.5]),
        stop_token_ids=st.sampled_from([(), ((5, 6), (7,))]),
    ),
    st.builds(
        SamplingParams,
        seed=st.just(0),
        max_tokens=st.integers(1, 8),
        num_beams=st.integers(2, 4),
        n=st.integers(1, 2),
        logprobs=st.sampled_from([None, 2]),
        hidden_states=st.booleans(),
        priority=st.integers(-1, 1),
    ),
)


OPTIONS: dict[str, Any] = dict(
    num_blocks=st.integers(9, 40),
    max_batch_tokens=st.sampled_from([3, 7, 16, 64]),
    max_sequences=st.sampled_from([1, 2, 3, 8]),
    max_prompt_rows=st.sampled_from([1, 3, 64]),
    prefix_cache=st.booleans(),
)


class EngineMachine(RuleBasedStateMachine):
    @initialize(**OPTIONS)
    def open(self, **options: Any) -> None:
        self.engine, self.admission = scripted_engine(**options)
        self.requests: list[Request] = []
        self.deltas: dict[str, list[Delta]] = {}
        self.aborted: set[str] = set()

    @rule(prompt=prompts, asked=params)
    def add(self, prompt: list[int], asked: SamplingParams) -> None:
        if len(self.requests) >= 12:
            return
        request = self.admission.admit(prompt, asked)
        self.requests.append(request)
        self.deltas[request.request_id] = []
        request.deliver = self.deltas[request.request_id].append
        self.engine.add(request)

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            had_work = self.engine.has_work
            assert self.engine.step() == had_work, "work and nothing to do"
            check(self.engine)

    @precondition(lambda self: self.engine.has_work)
    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        victim = data.draw(st.sampled_from([r for r in self.requests if not r.finished]))
        self.engine.abort(victim)
        self.aborted.add(victim.request_id)
        assert victim.finished

    @rule()
    def evict_everybody(self) -> None:
        self.engine.scheduler.evict_all()
        assert self.engine.scheduler.pool.num_used == 0

    @rule(method=st.sampled_from(["forward", "sample", "record"]))
    def lose(self, method: str) -> None:
        """Lose all K and V in the next step; with "record", before the step is committed."""
        self.engine.runner.loses = method  # type: ignore[attr-defined]

    @precondition(lambda self: self.engine.has_work)
    @rule()
    def interrupt(self) -> None:
        self.engine.runner.raises = KeyboardInterrupt()  # type: ignore[attr-defined]
        try:
            self.engine.step()
        except KeyboardInterrupt:
            return
        raise AssertionError("the interrupt got lost")

    @invariant()
    def accounts(self) -> None:
        if hasattr(self, "engine"):
            check(self.engine)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        steps = 0
        while self.engine.step():
            steps += 1
            assert steps < 5_000, "it goes on for ever"
        check(self.engine)
        assert self.engine.scheduler.pool.num_used == 0
        assert not self.engine.scheduler.prefixes._in_flight
        for request in self.requests:
            _check_answer(request, self.deltas[request.request_id], self.aborted)


def _check_answer(request: Request, deltas: list[Delta], aborted: set[str]) -> None:
    result, params = result_of(request), request.params
    sent: dict[int, list[int]] = {}
    for delta in deltas:
        sent.setdefault(delta.index, []).extend(delta.token_ids)
    assert [d.result for d in deltas if d.result is not None] == [result]
    assert sent == {c.index: c.token_ids for c in result.outputs}, "a gap or a repeat"
    for c in result.outputs:
        lists = [c.logprobs, c.sampled_logprobs, c.top_logprobs]
        assert all(len(entries) == len(c.token_ids) for entries in lists if entries is not None)
        if params.hidden_states:
            assert c.hidden_states is not None and len(c.hidden_states) == len(c.token_ids)
    expected = solo(request.prompt_ids, params)
    if request.request_id in aborted:
        if params.num_beams == 1:
            for c, whole in zip(result.outputs, expected.outputs, strict=True):
                assert c.token_ids == whole.token_ids[: len(c.token_ids)]
        return
    assert facts(result) == facts(expected)
    for c, whole in zip(result.outputs, expected.outputs, strict=True):
        if params.record_routing:
            assert c.routing is not None and whole.routing is not None
            positions = len(request.prompt_ids) + max(0, len(c.token_ids) - 1)
            assert len(c.routing) == positions and c.routing.equal(whole.routing)
        if params.hidden_states:
            assert c.hidden_states is not None and whole.hidden_states is not None
            assert c.hidden_states.equal(whole.hidden_states)
    assert Counter(c.index for c in result.outputs) == Counter(range(len(result.outputs)))
