"""Threads, coroutines, aborts, Ctrl-C, slow readers, pauses and sleep at once: nothing is lost or left."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from support.requests_mixed import all_facts, facts, mixed_requests
from support.toys import make_toy
from verbatim import LLM, RequestFailed, VerbatimError

SECONDS = float(os.environ.get("VERBATIM_STRESS_S", "10"))
NUM_THREADS, NUM_COROUTINES = 32, 200


class Stress:
    """One engine, and what each of its requests gives when it is alone."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.prompts, self.params = mixed_requests(12)
        self.expected = [all_facts(llm.generate([p], [q]))[0] for p, q in self._each()]
        self.end = time.monotonic() + SECONDS
        self.counts: dict[str, int] = {}

    def _each(self) -> Any:
        return zip(self.prompts, self.params, strict=True)

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    @property
    def running(self) -> bool:
        return time.monotonic() < self.end

    def call(self, chance: random.Random) -> None:
        """Make one call by a thread that waits."""
        i = chance.randrange(len(self.prompts))
        prompt, params = self.prompts[i], self.params[i]
        kind = chance.randrange(5)
        if kind == 0:
            some = chance.sample(range(len(self.prompts)), 3)
            found = self.llm.generate(
                [self.prompts[j] for j in some], [self.params[j] for j in some]
            )
            assert all_facts(found) == [self.expected[j] for j in some]
        elif kind == 1:
            (result,) = [d.result for d in self.llm.stream(prompt, params) if d.result]
            assert facts(result) == self.expected[i]
        elif kind == 2:
            for _ in self.llm.stream(prompt, params):
                if chance.random() < 0.2:
                    break
        elif kind == 3:
            for delta in self.llm.stream(prompt, params):
                time.sleep(0.002)
                if delta.result:
                    assert facts(delta.result) == self.expected[i]
        else:
            request = self.llm.engine.admission.admit(prompt, params)
            self.llm.engine.submit(request)
            time.sleep(chance.random() / 50)
            self.llm.engine.abort(request)
            while not request.finished:
                time.sleep(0.001)
        self.count("thread")

    async def acall(self, chance: random.Random) -> None:
        """Make one call by a coroutine."""
        i = chance.randrange(len(self.prompts))
        prompt, params = self.prompts[i], self.params[i]
        if chance.random() < 0.5:
            (result,) = await self.llm.agenerate([prompt], params)
            assert facts(result) == self.expected[i]
        else:
            slow = chance.random() < 0.1
            async for delta in self.llm.astream(prompt, params):
                if slow:
                    await asyncio.sleep(0.005)
                if delta.result:
                    assert facts(delta.result) == self.expected[i]
        self.count("coroutine")

    async def keep_awaiting(self, count: int) -> None:
        async def one(seed: int) -> None:
            chance = random.Random(seed)
            while self.running:
                task = asyncio.create_task(self.acall(chance))
                if chance.random() < 0.2:
                    await asyncio.sleep(chance.random() / 10)
                    if task.cancel():
                        self.count("cancelled")
                await asyncio.gather(task, return_exceptions=True)
                if not task.cancelled() and (error := task.exception()) is not None:
                    raise error

        await asyncio.gather(*(one(seed) for seed in range(count)))

    def keep_pausing(self) -> None:
        chance, llm = random.Random(1), self.llm
        while self.running:
            time.sleep(chance.random() / 5)
            try:
                chance.choice([llm.pause, llm.sleep, lambda: llm.pause("drain"), llm.stats])()
            except VerbatimError:
                pass  # draining while asleep
            llm.wake()
            llm.resume()
            self.count("pause")


@pytest.mark.slow
@pytest.mark.timeout(SECONDS * 2 + 300)
def test_nothing_is_lost_and_nothing_is_left_when_all_happens_at_once() -> None:
    with LLM(make_toy("llama"), kv_memory="2MB", block_size=8, max_sequences=48) as llm:
        stress = Stress(llm)
        errors: list[BaseException] = []

        def guarded(work: Callable[[], Any]) -> threading.Thread:
            def run() -> None:
                try:
                    work()
                except BaseException as error:
                    errors.append(error)

            thread = threading.Thread(target=run, daemon=True)
            thread.start()
            return thread

        def keep_calling(seed: int) -> None:
            chance = random.Random(seed)
            while stress.running:
                stress.call(chance)

        threads = [guarded(lambda s=s: keep_calling(s)) for s in range(NUM_THREADS)]
        threads += [
            guarded(lambda: asyncio.run(stress.keep_awaiting(NUM_COROUTINES // 2)))
            for _ in range(2)
        ]
        threads.append(guarded(stress.keep_pausing))
        chance, main = random.Random(2), threading.main_thread().ident
        assert main is not None
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            while stress.running:
                timer = threading.Timer(
                    chance.random() / 5, signal.pthread_kill, (main, signal.SIGINT)
                )
                try:
                    timer.start()
                    while True:
                        stress.call(chance)
                except KeyboardInterrupt:
                    stress.count("interrupt")
        finally:
            signal.signal(signal.SIGINT, handler)
        for thread in threads:
            thread.join(240)
            assert not thread.is_alive(), "a call never came back"
        assert not [e for e in errors if not isinstance(e, RequestFailed)], errors
        assert min(stress.counts.get(k, 0) for k in ("thread", "coroutine", "interrupt")) > 10
        stats = llm.stats()
        assert stats["running"] == stats["waiting"] == stats["blocks_used"] == 0
        assert not llm.engine.has_work
        llm.engine.scheduler.pool.check()
        print(stress.counts)
