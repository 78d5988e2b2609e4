"""The compute budget of structured outputs, and masks computed while other requests run."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support.bombs import AMBIGUOUS, bombs
from support.programs import PATIENCE_S
from support.requests_mixed import facts, submitted
from verbatim import LLM, FinishReason, InvalidRequest, RequestFailed, SamplingParams, VerbatimError
from verbatim.core import Request
from verbatim.sampling import grammar
from verbatim.sampling.grammar import StructureState

PROMPT = "Once upon a time"
WORDS = "start: /[a-z ]{2,20}/ start | /[A-Z]/\n"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM() as llm:
        yield llm


def submit(llm: LLM, *asked: SamplingParams) -> list[Request]:
    return submitted(llm, [PROMPT] * len(asked), asked)


def finish(llm: LLM) -> None:
    while llm.engine.step():
        pass


def run(llm: LLM, *asked: SamplingParams) -> list[Request]:
    """Run requests in one batch; errors stay in `Request.error`."""
    requests = submit(llm, *asked)
    finish(llm)
    return requests


def outcome(request: Request) -> Any:
    """Return the error and the tokens before it, or the result."""
    if request.error is not None:
        return str(request.error), [sequence.output_ids for sequence in request.sequences]
    assert request.result is not None
    return facts(request.result)


class Slow:
    """Blocks the masks of `WORDS` after `held` tokens until `release` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, held: int = 1) -> None:
        self.release, self.entered = threading.Event(), threading.Event()
        original = StructureState._compute

        def compute(state: StructureState) -> Any:
            if state.compiled.key[1] == WORDS and len(state._ids) >= held:
                self.entered.set()
                assert self.release.wait(PATIENCE_S)
            return original(state)

        monkeypatch.setattr(StructureState, "_compute", compute)

    def step_until_entered(self, llm: LLM) -> None:
        while not self.entered.is_set():
            assert llm.engine.step()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    slow = Slow(monkeypatch)
    yield slow
    slow.release.set()


# ---- the budget -------------------------------------------------------------------------------------


def test_grammar_over_budget_fails_at_the_same_token_in_any_schedule(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(grammar.LIMITS, "step_max_items", 3000)  # so that it fails early
    params = SamplingParams(grammar=AMBIGUOUS, seed=1, max_tokens=80)
    with LLM() as fresh:
        (alone,) = run(fresh, params)
        assert isinstance(alone.error, RequestFailed)
        assert str(alone.error).startswith("grammar: over the budget of ")
        assert 2 < len(alone.sequences[0].output_ids) < 80
        batch = run(fresh, params, params.replace(n=3), SamplingParams(max_tokens=20), params)
        assert outcome(batch[0]) == outcome(batch[3]) == outcome(alone)
        assert isinstance(batch[1].error, RequestFailed) and batch[2].result is not None
    with LLM(draft="ngram") as drafting:
        assert outcome(run(drafting, params)[0]) == outcome(alone)


@pytest.mark.slow
def test_lexer_budget_does_not_count_other_requests() -> None:
    params = SamplingParams(**dict(bombs())["regex-dots"], max_tokens=24)
    all_params = [params.replace(seed=seed) for seed in range(6)]
    alone = []
    for each in all_params:
        with LLM() as llm:
            alone.append(outcome(run(llm, each)[0]))
    failed = [found for found in alone if "lexer" in found[0]]
    assert failed, alone
    with LLM() as llm:
        for _ in range(2):  # the second pass follows failures
            assert [outcome(request) for request in run(llm, *all_params)] == alone
            assert [outcome(run(llm, each)[0]) for each in all_params] == alone


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(30)]},
         "json_schema: #: too many patterns"),
        ({"type": "integer", "multipleOf": 1_000_003}, "multipleOf"),
        # llguidance resolves references to any object by its address.
        ({"$id": "http://x/a", "$ref": "http://x/a#/examples/0",
          "examples": [{"type": "integer", "multipleOf": 1_000_003}]},
         "json_schema: #/examples/0: .*multipleOf|add up"),
        ({"type": "object", "patternProperties": {f"^{i}x": {} for i in range(300)}},
         "300 patternProperties; at most 100"),
        ("start: T\nT: " + " & ".join(f"/.*a.{{{i}}}/" for i in range(20)) + "\n",
         "grammar: 19 intersections"),
        ('start: %json {"type": "integer", "multipleOf": 1000003}\n', "grammar: %json: .*multipleOf"),
    ],
    ids=range(6),
)  # fmt: skip
def test_structure_too_costly_to_compile_is_rejected(llm: LLM, asked: Any, named: str) -> None:
    structure = {"grammar" if isinstance(asked, str) else "json_schema": asked}
    with pytest.raises(InvalidRequest, match=named):
        llm.engine.admission.admit(PROMPT, SamplingParams(**structure))


# ---- masks and other requests -----------------------------------------------------------------------


def test_request_finishes_while_mask_of_another_is_computed(llm: LLM, slow: Slow) -> None:
    plain = SamplingParams(seed=3, max_tokens=40)
    expected = facts(llm.generate(PROMPT, plain)[0])
    held, free = submit(llm, SamplingParams(grammar=WORDS, seed=1, max_tokens=8), plain)
    while free.result is None:
        assert llm.engine.step()
    assert facts(free.result) == expected
    assert slow.entered.is_set() and not held.finished
    slow.release.set()
    finish(llm)
    assert held.result is not None and len(held.sequences[0].output_ids) > 1


def test_slow_masks_do_not_change_samples_or_beams(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = SamplingParams(grammar=WORDS, seed=1, n=3, max_tokens=20)
    animals = SamplingParams(choice=["a cat", "a dog"], seed=2, ignore_eos=True, max_tokens=30)
    all_params = [words, words.replace(ignore_eos=True), animals]
    all_params += [each.replace(num_beams=3, n=1) for each in all_params]
    expected = [outcome(request) for request in run(llm, *all_params)]
    monkeypatch.setattr(grammar, "SLOW_S", 1e-9)
    assert [outcome(request) for request in run(llm, *all_params)] == expected
    assert llm.stats()["blocks_used"] == 0


@pytest.mark.parametrize("how", ["abort", "timeout"])
def test_request_can_end_while_its_mask_is_computed(
    llm: LLM, slow: Slow, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(grammar=WORDS, n=2, timeout_s=1000.0 if how == "timeout" else None)
    (request,) = submit(llm, params)
    slow.step_until_entered(llm)
    if how == "abort":
        llm.engine.abort(request)
    else:
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 1001.0)
    finish(llm)
    assert request.result is not None and not slow.release.is_set()
    assert {c.finish_reason for c in request.result.outputs} == {FinishReason(how)}
    assert llm.stats()["blocks_used"] == 0


def test_engine_can_close_while_a_mask_is_computed(slow: Slow) -> None:
    with LLM() as llm:
        (request,) = submit(llm, SamplingParams(grammar=WORDS))
        slow.step_until_entered(llm)
    assert request.result is not None
    assert request.result.outputs[0].finish_reason is FinishReason.ABORT


def test_waiting_request_is_not_blocked_by_slow_mask(slow: Slow) -> None:
    with LLM(max_sequences=1) as llm:
        # With one slot, the second sample waits for its first token.
        (held,) = submit(llm, SamplingParams(grammar=WORDS, n=2, max_tokens=4))
        slow.step_until_entered(llm)
        (free,) = submit(llm, SamplingParams(seed=1, max_tokens=4, priority=-1))
        while free.result is None:
            assert llm.engine.step()
        assert not held.finished
        slow.release.set()
        finish(llm)
        assert held.result is not None


# ---- bombs ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_grammar_bombs_end_while_others_are_served(llm: LLM, capsys: Any) -> None:
    plain = SamplingParams(seed=3, max_tokens=200, ignore_eos=True)
    expected = facts(llm.generate(PROMPT, plain)[0])
    gaps: list[float] = []

    def listen() -> None:
        last = time.perf_counter()
        for delta in llm.stream(PROMPT, plain):
            gaps.append(time.perf_counter() - last)
            last = time.perf_counter()
            if delta.result is not None:
                assert facts(delta.result) == expected

    def bomb(fields: dict[str, Any]) -> str:
        try:
            params = SamplingParams(**fields, seed=1, max_tokens=40, timeout_s=60)
            (result,) = llm.generate(PROMPT, params)
        except VerbatimError as error:
            return "failed" if str(error).startswith(next(iter(fields))) else str(error)
        return str(result.outputs[0].finish_reason)

    for _ in range(10):
        listen()
    idle, gaps[:] = list(gaps), []
    with ThreadPoolExecutor(8) as clients:
        ends = [clients.submit(bomb, fields) for _, fields in bombs()[::3]]
        while not all(end.done() for end in ends):
            listen()
    # Slow masks have the lowest priority: on a busy machine a bomb may end by its own timeout.
    found = {end.result() for end in ends} - {"timeout"}
    assert found == {"failed", "stop", "length"}
    with capsys.disabled():
        for name, times in (("idle", idle), ("beside bombs", gaps)):
            percentiles = statistics.quantiles(times, n=100)
            print(
                f"\n{name}: median {percentiles[49] * 1e3:.2f} ms, 95th {percentiles[94] * 1e3:.2f} ms"
            )
