"""Thousands of requests of every kind, some aborted: nothing leaks, and results match solo runs."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest

from support.pools import check_pool
from support.programs import resident_bytes
from support.requests_mixed import check_nothing_is_left, facts, mixed_requests, submitted
from support.toys import VOCAB, make_toy, random_ids
from verbatim import LLM, SamplingParams
from verbatim.core import Request


def _draw(rng: random.Random, kinds: list[SamplingParams], i: int) -> tuple[list[int], Any]:
    stem = (
        random_ids(rng.choice([0, 0, 16, 40]), seed=rng.randrange(3)) if rng.random() < 0.5 else []
    )
    prompt = stem + random_ids(rng.randint(1, 60), seed=i, high=VOCAB)
    params = rng.choice(kinds).replace(
        seed=i,
        priority=rng.choice([0, 0, 0, -1, 1]),
        max_tokens=rng.randint(4, 24),
        cache_salt=rng.choice([None, None, "tenant"]),
    )
    return prompt, params


@pytest.mark.slow
def test_soak_leaks_nothing_and_results_match_solo_runs() -> None:
    rng = random.Random(2026)
    kinds = mixed_requests(12)[1]
    model, count = make_toy("qwen3_moe"), 2000
    options: dict[str, Any] = dict(kv_memory="2MB", max_sequences=24)
    with LLM(model, block_size=8, max_batch_tokens=128, **options) as llm:
        engine, finished, aborted = llm.engine, [], 0
        live: list[Request] = []
        resident = 0
        for i in range(count):
            prompt, params = _draw(rng, kinds, i)
            live += submitted(llm, [prompt], [params])
            finished.append(live[-1])
            while len(live) > 60:
                engine.step()
                live = [r for r in live if not r.finished]
            if rng.random() < 0.15:
                engine.abort(rng.choice(live))
                aborted += 1
            if i % 250 == 0:
                check_pool(engine.scheduler.pool)
                engine.call(engine.scheduler.evict_all)
            if i == count // 2:
                gc.collect()
                resident = resident_bytes()
        while engine.step():
            pass
        gc.collect()
        grown = resident_bytes() - resident
        check_nothing_is_left(llm)
        stats = llm.stats()
        assert stats["preemptions"] > count // 20 and stats["cached_tokens"] > count // 2
        assert aborted > count // 10
        assert not engine._calls and not engine.scheduler.prefixes._in_flight
        # The test itself keeps requests and results; further memory kept by the engine would show here.
        assert grown < 60 * 2**20, f"{grown / 2**20:.0f} MiB more than halfway through"
    whole = [r for r in finished if r.result and _ended(r)]
    assert len(whole) > count * 0.7
    with LLM(model, block_size=8, prefix_cache=False) as alone:
        for request in rng.sample(whole, count // 10):
            assert request.result is not None
            solo = alone.generate(request.prompt_ids, request.params)[0]
            assert facts(solo) == facts(request.result)


def _ended(request: Request) -> bool:
    assert request.result is not None
    return all(c.finish_reason != "abort" for c in request.result.outputs)
