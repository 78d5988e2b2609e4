"""Isolation: whatever happens to one request, the results of the others are the same as without it."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from support.pools import check_pool
from support.requests_mixed import (
    all_facts,
    facts,
    finish_despite_ctrl_c,
    mixed_requests,
    press_ctrl_c,
    submitted,
)
from support.toys import make_toy, random_ids
from verbatim import LLM, FinishReason, QueueFull, RequestFailed, SamplingParams
from verbatim.core import Request, Sequence

LONG = SamplingParams(max_tokens=60, ignore_eos=True, seed=1)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(make_toy("qwen3_moe"), block_size=4, max_batch_tokens=24) as opened:
        yield opened


class Company:
    """Eight requests that run together with a ninth, step by step."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.engine = llm, llm.engine
        prompts, params = mixed_requests(8)
        self.expected = all_facts(llm.generate(prompts, params))
        self.engine.call(self.engine.scheduler.evict_all)
        self.requests = submitted(llm, prompts, params)

    def join(self, prompt: Any, params: SamplingParams) -> Request:
        (request,) = submitted(self.llm, [prompt], [params])
        return request

    def held_by(self, request: Request) -> int:
        return sum(len(s.blocks) for s in request.sequences)

    def finish(self) -> None:
        while self.engine.step():
            check_pool(self.engine.scheduler.pool)
        results = [request.result for request in self.requests]
        assert all(results) and all_facts(results) == self.expected  # type: ignore[arg-type]
        assert self.llm.stats()["blocks_used"] == 0


def until(engine: Any, condition: Callable[[], bool]) -> None:
    for _ in range(200):
        if condition():
            return
        assert engine.step()
    raise AssertionError("it never came to that")


# What a processor raises or returns, and a word of the request's error.
FAULTS: dict[str, tuple[Any, str]] = {
    "KeyError": (KeyError("no such thing"), "processor"),
    "SystemExit": (SystemExit("no"), "processor"),
    "RecursionError": (RecursionError("deep"), "processor"),
    "wrong shape": (lambda logits: logits[:-1], "processor"),
    "wrong type": (lambda logits: logits.tolist(), "processor"),
    "NaN": (lambda logits: logits * torch.nan, "no token"),
    "nothing left": (lambda logits: torch.full_like(logits, -torch.inf), "no token"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_failing_logits_processor_fails_only_its_request(llm: LLM, fault: str) -> None:
    wrong, words = FAULTS[fault]

    def processor(ids: torch.Tensor, logits: torch.Tensor) -> Any:
        if len(ids) < 15:
            return logits
        if isinstance(wrong, BaseException):
            raise wrong
        return wrong(logits)

    others = Company(llm)
    victim = others.join(random_ids(10, seed=6), LONG.replace(n=2, logits_processors=[processor]))
    until(others.engine, lambda: victim.finished)
    assert isinstance(victim.error, RequestFailed) and others.held_by(victim) == 0
    assert words in str(victim.error)
    if isinstance(wrong, BaseException):
        assert victim.error.__cause__ is wrong
    others.finish()


class Panic(BaseException):
    """Like a panic of the tokenizers library, which is no Exception."""


@pytest.mark.parametrize("error", [RecursionError("deep"), Panic("odd")], ids=repr)
def test_failing_stop_watch_fails_only_its_request(llm: LLM, error: BaseException) -> None:
    def push(token_id: int) -> Any:
        raise error

    others = Company(llm)
    victim = others.join(random_ids(10, seed=6), LONG)
    victim.sequences[0].watch.push = push  # type: ignore[method-assign]
    until(others.engine, lambda: victim.finished)
    assert victim.error is not None and error in (victim.error, victim.error.__cause__)
    assert others.held_by(victim) == 0
    others.finish()


def test_processors_get_prompt_plus_completion_and_copied_logits(llm: LLM) -> None:
    seen: list[tuple[list[int], torch.Tensor]] = []

    def spoil(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        seen.append((ids.tolist(), logits.clone()))
        logits.fill_(-5.0)
        logits[7] = 5.0
        return logits

    prompt = random_ids(10, seed=6)
    params = SamplingParams(max_tokens=3, seed=2, logits_processors=[spoil], ignore_eos=True)
    c = llm.generate(prompt, params)[0].outputs[0]
    assert [ids for ids, _ in seen] == [prompt + c.token_ids[:i] for i in range(3)]
    assert all(row.dtype == torch.float32 and row.shape == (128,) for _, row in seen)
    # `logprobs` are those of the model's own logits, `sampled_logprobs` of the processed ones.
    assert c.logprobs == llm.score(prompt + c.token_ids)[10:]
    assert c.sampled_logprobs is not None and max(c.sampled_logprobs) > max(c.logprobs)


def test_timed_out_request_keeps_its_tokens(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    others = Company(llm)
    victim = others.join(random_ids(10, seed=6), LONG.replace(timeout_s=1000.0, n=2))
    until(others.engine, lambda: len(victim.sequences[0].output_ids) == 5)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 1001.0)
    others.engine.step()
    assert victim.result is not None and others.held_by(victim) == 0
    assert [c.finish_reason for c in victim.result.outputs] == [FinishReason.TIMEOUT] * 2
    assert [len(c.token_ids) for c in victim.result.outputs] == [5, 5]
    others.finish()


def test_full_queue_raises_queue_full() -> None:
    with LLM(make_toy("llama"), max_sequences=2, max_waiting=3) as llm:
        assert len(llm.generate([random_ids(4, s) for s in range(5)], LONG)) == 5
        with pytest.raises(QueueFull, match=r"6 more .* max_waiting=3 and max_sequences=2"):
            llm.generate([random_ids(4, s) for s in range(6)], LONG)
        assert llm.stats()["waiting"] == llm.stats()["running"] == 0


def joining(llm: LLM) -> tuple[Callable[..., Request], list[str]]:
    """A function that submits a request under a name, and the names in the order in which they finish."""
    order: list[str] = []

    def join(name: str, waited_s: float = 0.0, **changes: Any) -> Request:
        request = llm.engine.admission.admit(random_ids(8, 3), LONG.replace(**changes))
        request.arrival -= waited_s
        llm.engine.submit(request, lambda delta: order.append(name) if delta.result else None)
        return request

    return join, order


def test_higher_priority_request_runs_first_and_preempts() -> None:
    with LLM(make_toy("llama"), max_sequences=2) as llm:
        engine, (join, order) = llm.engine, joining(llm)
        low = [join(f"low {i}", priority=1) for i in range(3)]
        until(engine, lambda: len(low[0].sequences[0].output_ids) > 3)
        join("high", priority=-1)
        join("middle", priority=0)
        engine.step()
        engine.step()  # one is preempted in a step
        assert {s.request.params.priority for s in engine.scheduler.running} == {-1, 0}
        while engine.step():
            pass
        assert order == ["high", "middle", "low 0", "low 1", "low 2"]


def test_restarting_beams_do_not_block_higher_priority_request() -> None:
    with LLM(make_toy("llama"), max_sequences=8) as llm:
        engine, (join, order) = llm.engine, joining(llm)
        for priority in (0, 0, 1, 1):
            join("beams", num_beams=2, temperature=0, priority=priority)
        for _ in range(5):
            engine.step()
        join("short", max_tokens=8)
        for _ in range(8):
            engine.step()
        assert order == ["short"]
        while engine.step():
            check_pool(engine.scheduler.pool)


def test_waiting_one_minute_raises_priority_by_one() -> None:
    with LLM(make_toy("llama"), max_sequences=1) as llm:
        join, order = joining(llm)
        join("old", priority=2, waited_s=130.0)
        join("new", priority=0)
        join("newer", priority=1)
        while llm.engine.step():
            pass
        assert order == ["old", "new", "newer"]


def test_evictions_preserve_stops_streams_and_routing_records() -> None:
    """Stop sequences, streams and routing records survive evictions; Megatron loses them."""
    model = make_toy("qwen3_moe")
    prompts = [random_ids(10 + 3 * i, seed=i) for i in range(8)]
    plain = SamplingParams(max_tokens=30, temperature=0.9, record_routing=True, logprobs=1)
    with LLM(model) as llm:
        free = llm.generate(prompts, [plain.replace(seed=i, ignore_eos=True) for i in range(8)])
        stops = [r.outputs[0].token_ids[17:19] for r in free]
        params = [
            plain.replace(seed=i, ignore_eos=True, stop_token_ids=[stops[i]]) for i in range(8)
        ]
        params = [p.replace(prompt_logprobs=0) if i % 2 else p for i, p in enumerate(params)]
        expected = llm.generate(prompts, params)
        per_token = llm.info()["kv_bytes_per_token"]
    assert all(r.outputs[0].finish_reason is FinishReason.STOP for r in expected)
    with LLM(model, kv_memory=per_token * 4 * 20, block_size=4) as llm:
        engine, deltas = llm.engine, [[] for _ in prompts]  # type: ignore[var-annotated]
        requests = [llm.engine.admission.admit(p, q) for p, q in zip(prompts, params, strict=True)]
        for request, outbox in zip(requests, deltas, strict=True):
            engine.submit(request, outbox.append)
        steps = 0
        while engine.step():
            check_pool(engine.scheduler.pool)
            steps += 1
            if steps % 2 == 0:  # also between the two ids of a stop
                engine.call(engine.scheduler.evict_all)
        assert all(request.metrics.preemptions for request in requests)
        assert llm.stats()["blocks_used"] == 0
    for request, outbox, whole in zip(requests, deltas, expected, strict=True):
        assert request.result is not None and facts(request.result) == facts(whole)
        (c,) = request.result.outputs
        assert [i for d in outbox for i in d.token_ids] == c.token_ids
        assert [i for d in outbox for i in d.logprobs] == c.logprobs
        assert c.routing is not None
        assert c.routing.shape == (len(request.prompt_ids) + len(c.token_ids) - 1, 3, 2)


def test_replayed_routing_gives_same_bits_and_other_experts_other_logprobs() -> None:
    with LLM(make_toy("qwen3_moe"), block_size=4) as llm:
        prompt = random_ids(21, seed=4)
        params = SamplingParams(max_tokens=12, seed=3, record_routing=True, ignore_eos=True)
        result = llm.generate(prompt, params)[0]
        record = result.outputs[0].routing
        assert record is not None and record.shape == (21 + 12 - 1, 3, 2)
        again = llm.generate([prompt, prompt], [params.replace(replay_routing=record), params])
        assert all_facts(again) == [facts(result)] * 2
        forced = record.clone()
        forced[:10] = (forced[:10] + 1) % 6
        for replay in (forced, forced[:10]):
            other = llm.generate(prompt, params.replace(replay_routing=replay))[0]
            routing = other.outputs[0].routing
            assert routing is not None and routing[:10].equal(forced[:10])
            assert other.outputs[0].logprobs != result.outputs[0].logprobs
            assert other.num_cached_tokens == 0
        # Prefixes computed with forced experts are not reused by requests without.
        assert facts(llm.generate(prompt, params)[0]) == facts(result)


def test_ctrl_c_at_any_point_of_a_step_does_not_change_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C in one caller's step, while blocks are taken or sequences grow, affects no other request."""
    prompts, params = mixed_requests(12)
    model = make_toy("qwen3_moe")
    with LLM(model) as llm:
        expected = all_facts(llm.generate(prompts, params))
        per_token = llm.info()["kv_bytes_per_token"]
    rng = random.Random(4)

    with LLM(model, kv_memory=per_token * 130, block_size=8) as llm:
        engine = llm.engine
        scheduler = engine.scheduler
        for owner, *names in (
            (scheduler.pool, "take", "release"),
            (scheduler.prefixes, "index_blocks"),
            (scheduler, "fork", "remove"),
            (engine.runner, "forward", "sample"),
            (Sequence, "push"),
        ):
            press_ctrl_c(monkeypatch, rng, 0.02, owner, *names)
        results, raised = finish_despite_ctrl_c(llm, prompts, params)
        monkeypatch.undo()
        assert raised > 10 and llm.stats()["preemptions"] > 0
        assert all(results) and all_facts(results) == expected
        assert llm.stats()["blocks_used"] == 0
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_small_urgent_request_does_not_wait_for_large_prefill() -> None:
    with LLM(make_toy("llama"), max_batch_tokens=16) as llm:
        engine = llm.engine
        few = LONG.replace(max_tokens=3)
        (large,) = submitted(llm, [random_ids(200, 1)], [LONG.replace(priority=5, max_tokens=5)])
        engine.step()
        (urgent,) = submitted(llm, [random_ids(4, 2)], [few.replace(priority=-5)])
        for _ in range(3):
            engine.step()
        assert urgent.result is not None and not large.finished
        engine.abort(large)
        engine.scheduler.max_prompt_rows = 1
        prompts = [random_ids(60, 3), random_ids(60, 5), random_ids(4, 4)]
        scoring = SamplingParams(prompt_logprobs=0)
        *scored, other = submitted(llm, prompts, [scoring, scoring, few])
        for _ in range(3):
            engine.step()
        assert other.result is not None and not any(request.finished for request in scored)
