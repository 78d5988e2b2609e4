"""Many callers of one engine: which thread runs the steps, who waits, and isolation between callers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest
import torch

from support.pairwise import slow_but
from support.pools import check_pool
from support.programs import PATIENCE_S, in_thread, until
from support.requests_mixed import all_facts, facts, mixed_requests
from support.scripted_runner import ScriptedRunner
from support.toys import make_toy, random_ids
from verbatim import (
    LLM,
    EngineClosed,
    FinishReason,
    InvalidRequest,
    NotSupported,
    RequestFailed,
    SamplingParams,
    TensorParallel,
    VerbatimError,
)
from verbatim.batch import Batch
from verbatim.common.shield import Shield
from verbatim.core import Delta, Request, Result
from verbatim.engine.admission import Admission
from verbatim.engine.engine import Engine
from verbatim.engine.handle import EngineHandle
from verbatim.engine.scheduler import Scheduler
from verbatim.errors import ModelChanged, QueueFull
from verbatim.protocols import Forward

PROMPT = random_ids(10, seed=3)
LONG = SamplingParams(max_tokens=200, ignore_eos=True, seed=4)
SHORT = SamplingParams(max_tokens=5, ignore_eos=True, seed=4)
SMALL: dict[str, Any] = dict(kv_memory="16MB")


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(make_toy("llama"), **SMALL) as opened:
        yield opened
    assert engine_threads() == []


def engine_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "verbatim-engine"]


@contextlib.contextmanager
def slow_steps(llm: LLM) -> Iterator[None]:
    """Slow down steps, so that a `LONG` request takes at least ten seconds."""
    module = llm.engine.runner.module
    hook = module.register_forward_hook(lambda *_: time.sleep(0.05))
    try:
        yield
    finally:
        hook.remove()


def ids(results: list[Result]) -> list[int]:
    return results[0].outputs[0].token_ids


def call_in_thread(llm: LLM, driven: bool, params: SamplingParams) -> Future[Any]:
    """Generate in a thread, or in a coroutine whose steps run in the engine's thread."""
    if driven:
        return in_thread(lambda: asyncio.run(llm.agenerate(PROMPT, params)))
    return in_thread(llm.generate, PROMPT, params)


async def last(llm: LLM, prompt: Any, params: SamplingParams) -> Any:
    (result,) = [d.result async for d in llm.astream(prompt, params) if d.result]
    return result


# ---- asynchronous callers


def test_200_streams_finish_without_the_default_executor(llm: LLM) -> None:
    class Untouchable(Executor):
        def submit(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("the executor belongs to the user")

    prompts, params = mixed_requests(9)
    expected = all_facts(llm.generate(prompts, params))

    async def everything() -> list[Any]:
        asyncio.get_running_loop()._default_executor = Untouchable()  # type: ignore[attr-defined]
        streams = (last(llm, prompts[i % 9], params[i % 9]) for i in range(200))
        found = await asyncio.gather(*streams)
        asyncio.get_running_loop()._default_executor = None  # type: ignore[attr-defined]
        return [facts(result) for result in found]

    found = asyncio.run(everything())
    assert all(found[i] == expected[i % 9] for i in range(200))
    assert llm.stats()["blocks_used"] == 0


def test_concurrent_threads_and_event_loops_get_the_same_results(llm: LLM) -> None:
    prompts, params = mixed_requests(12)
    expected = all_facts(llm.generate(prompts, params))

    def sync(i: int) -> Any:
        if i % 2:
            return facts(llm.generate(prompts[i], params[i])[0])
        (result,) = (d.result for d in llm.stream(prompts[i], params[i]) if d.result)
        return facts(result)

    async def some(which: range) -> list[Any]:
        found = await asyncio.gather(*(last(llm, prompts[i], params[i]) for i in which))
        return [facts(result) for result in found]

    for _ in range(3):
        callers = [in_thread(sync, i) for i in range(12)]
        loops = [in_thread(asyncio.run, some(range(0, 12, step))) for step in (1, 2)]
        assert [caller.result() for caller in callers] == expected
        assert [loop.result() for loop in loops] == [expected, expected[::2]]


def test_cancelled_calls_end_without_affecting_others(llm: LLM) -> None:
    expected = ids(llm.generate(PROMPT, LONG))

    async def main() -> None:
        other = asyncio.create_task(last(llm, PROMPT, LONG))
        got = asyncio.Event()

        async def reader() -> None:
            async for _ in llm.astream(PROMPT[::-1], LONG):
                got.set()

        with slow_steps(llm):
            victim = asyncio.create_task(reader())
            group = asyncio.create_task(llm.agenerate([PROMPT[:5]] * 3, LONG))
            await got.wait()
            victim.cancel()
            group.cancel()
            await asyncio.gather(victim, group, return_exceptions=True)
            assert victim.cancelled() and group.cancelled()
            until(lambda: llm.stats()["running"] == 1)
        assert (await other).outputs[0].token_ids == expected

    asyncio.run(main())
    assert llm.stats()["blocks_used"] == 0


def test_leaving_async_stream_early_aborts_it(llm: LLM) -> None:
    async def main() -> None:
        async for _ in llm.astream(PROMPT, LONG):
            break
        while llm.stats()["running"]:
            await asyncio.sleep(0.001)

    with slow_steps(llm):
        asyncio.run(main())
    assert llm.stats()["tokens"] < 100


def test_sync_calls_run_steps_in_their_thread_after_coroutines_end(llm: LLM) -> None:
    seen: set[str] = set()
    note = lambda *_: seen.add(threading.current_thread().name)
    llm.engine.runner.module.register_forward_hook(note)
    asyncio.run(llm.agenerate(PROMPT, SHORT))
    assert seen == {"verbatim-engine"} and len(engine_threads()) == 1
    seen.clear()
    llm.generate(PROMPT, SHORT)
    assert seen == {"MainThread"} and len(engine_threads()) == 1
    caller = in_thread(llm.generate, PROMPT, LONG)  # waits first, then runs the steps itself
    asyncio.run(llm.agenerate(PROMPT, SHORT))
    caller.result()
    assert len(seen) == 3


def test_waiting_callers_are_served_when_the_stepping_caller_stops(llm: LLM) -> None:
    expected = ids(llm.generate(PROMPT, LONG))
    stream = llm.stream(PROMPT[::-1], LONG)
    next(stream)  # and is not read further
    callers = [in_thread(llm.generate, PROMPT, LONG) for _ in range(5)]
    for caller in callers:
        assert ids(caller.result()) == expected
    assert sum(len(d.token_ids) for d in stream) == 199


# ---- the loop thread's life


def test_loop_thread_ends_when_engine_is_collected() -> None:
    llm = LLM(make_toy("llama"), **SMALL)
    asyncio.run(llm.agenerate(PROMPT, SHORT))
    assert len(engine_threads()) == 1
    gone = weakref.ref(llm.engine)
    del llm
    gc.collect()
    until(lambda: gone() is None)  # the thread may hold a reference until its turn ends
    until(lambda: not engine_threads())


def test_engine_dropped_after_a_stream_is_freed_at_once() -> None:
    llm = LLM(make_toy("llama"), **SMALL)
    gone = weakref.ref(llm.engine)
    gc.collect()
    gc.disable()
    try:
        assert list(llm.stream(PROMPT, SHORT))[-1].result is not None
        del llm
        assert gone() is None
    finally:
        gc.enable()


def test_close_aborts_running_requests() -> None:
    llm = LLM(make_toy("llama"), **SMALL)

    async def main() -> list[Any]:
        streams = [asyncio.create_task(last(llm, PROMPT, LONG)) for _ in range(4)]
        while not llm.stats()["running"]:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(llm.close)
        return await asyncio.gather(*streams)

    with slow_steps(llm):
        results = asyncio.run(main())
    for result in results:
        assert result.outputs[0].finish_reason is FinishReason.ABORT
    assert engine_threads() == []
    for call in (llm.pause, llm.resume, llm.sleep, llm.wake, lambda: llm.generate(PROMPT)):
        with pytest.raises(EngineClosed):
            call()
    with pytest.raises(EngineClosed):
        asyncio.run(llm.agenerate(PROMPT))
    llm.close()


_OPEN_ENDS = [
    "sync = open_stream(); next(sync)",
    "a = open_astream(); asyncio.run(first(a))",
    "b = open_astream(); asyncio.new_event_loop().run_until_complete(first(b))",
    "threading.Thread(target=lambda: asyncio.run(forever()), daemon=True).start(); begun.wait()",
    "c = open_astream(); asyncio.run(first(c)); llms[-1].pause()",
    "late = open_llm(); asyncio.run(late.agenerate(PROMPT)); atexit.register(late.generate, PROMPT)",
]


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["; ".join(_OPEN_ENDS), *_OPEN_ENDS])
def test_process_exits_quietly_with_open_streams(ending: str) -> None:
    script = f"""
import asyncio, atexit, sys, threading, time
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from support.toys import make_toy
from verbatim import LLM, EngineClosed
PROMPT = [5, 6, 7]
llms = []
def open_llm():
    llms.append(LLM(make_toy("llama"), kv_memory="16MB", max_length=32))
    llms[-1].engine.runner.module.register_forward_hook(lambda *_: time.sleep(0.01))
    return llms[-1]
open_stream = lambda: open_llm().stream(PROMPT)
open_astream = lambda: open_llm().astream(PROMPT)
async def first(stream):
    await anext(stream)
begun = threading.Event()
async def forever():
    llm = open_llm()
    try:
        while True:
            await asyncio.gather(*(llm.agenerate(PROMPT) for _ in range(3)))
            begun.set()
    except EngineClosed:  # a call that came when the interpreter had begun to end
        pass
{ending}
"""
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ---- pausing


def test_paused_requests_continue_with_the_same_bits(llm: LLM) -> None:
    prompts, params = mixed_requests(9)
    expected = all_facts(llm.generate(prompts, params))
    for _ in range(3):
        thread_call = in_thread(llm.generate, prompts, params)
        coroutine = in_thread(lambda: asyncio.run(llm.agenerate(prompts, params)))
        for _ in range(4):
            llm.pause()
            before = llm.stats()
            assert before["paused"]
            time.sleep(0.005)
            assert llm.stats()["forwards"] == before["forwards"]
            llm.pause("keep")
            llm.resume()
            time.sleep(0.005)
        assert all_facts(thread_call.result()) == all_facts(coroutine.result()) == expected
    llm.resume()
    assert llm.stats()["paused"] is False


@pytest.mark.parametrize("driven", slow_but([True], [False, True]))
def test_drain_finishes_running_requests_and_holds_new_ones(llm: LLM, driven: bool) -> None:
    expected = ids(llm.generate(PROMPT, LONG))
    with slow_steps(llm):
        early = [call_in_thread(llm, driven, LONG) for _ in range(3)]
        until(lambda: llm.stats()["running"] == 3)
        drain = in_thread(llm.pause, "drain")
        until(lambda: llm.engine._engine.mode.value == "draining")
        late = call_in_thread(llm, driven, SHORT)
        timed = call_in_thread(llm, driven, SHORT.replace(timeout_s=0.02))
        assert timed.result()[0].outputs[0].finish_reason is FinishReason.TIMEOUT
        assert drain.running()
    drain.result()
    assert [ids(caller.result()) for caller in early] == [expected] * 3
    stats = llm.stats()
    assert stats["paused"] and stats["running"] == 0 and late.running()
    llm.pause("drain")  # nothing runs, but a request waits
    assert ids(late.result()) == expected[:5]
    llm.resume()


def test_drain_from_the_only_thread_runs_the_steps(llm: LLM) -> None:
    stream = llm.stream(PROMPT, LONG)
    next(stream)
    llm.pause("drain")
    assert llm.stats()["running"] == 0
    assert sum(len(d.token_ids) for d in stream) == 199
    llm.resume()


def test_pause_with_abort_ends_all_requests(llm: LLM) -> None:
    with slow_steps(llm):
        callers = [call_in_thread(llm, driven, LONG) for driven in (False, True)]
        until(lambda: llm.stats()["running"] == 2)
        llm.pause("abort")
    for caller in callers:
        assert caller.result()[0].outputs[0].finish_reason is FinishReason.ABORT
    assert llm.stats()["blocks_used"] == 0
    waiting = in_thread(llm.generate, PROMPT, SHORT)
    time.sleep(0.02)
    assert waiting.running()
    llm.resume()
    assert len(ids(waiting.result())) == 5


def test_unknown_pause_mode_is_rejected_by_name(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="mode='stop': must be one of 'keep', 'drain', 'abo"):
        llm.pause("stop")
    with pytest.raises(InvalidRequest, match="weights='no': must be True or False"):
        llm.sleep("no")
    assert llm.stats()["paused"] is False


@pytest.mark.parametrize("driven", [False, True])
def test_timeout_ends_request_while_paused(llm: LLM, driven: bool) -> None:
    llm.pause()
    others = [call_in_thread(llm, driven, SHORT) for _ in range(3)]
    limited = [SHORT.replace(timeout_s=s) for s in (0.2, 0.1, 0.15)]
    timed = [call_in_thread(llm, driven, params) for params in limited]
    for caller in timed:
        assert caller.result()[0].outputs[0].finish_reason is FinishReason.TIMEOUT
    assert all(caller.running() for caller in others)
    llm.resume()
    assert all(len(ids(caller.result())) == 5 for caller in others)


def test_timeout_ends_submitted_request_while_another_caller_waits(llm: LLM) -> None:
    llm.pause()
    other = in_thread(llm.generate, PROMPT, SHORT)
    until(lambda: llm.engine._step_queue)
    time.sleep(0.05)
    request = llm.engine.admission.admit(PROMPT, SHORT.replace(timeout_s=0.05))
    ended = threading.Event()
    llm.engine.submit(request, lambda delta: None, ended.set)
    assert ended.wait(PATIENCE_S) and other.running()
    llm.resume()
    assert len(ids(other.result())) == 5


def test_ctrl_c_ends_a_call_waiting_on_a_paused_engine(llm: LLM) -> None:
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    main = threading.main_thread().ident
    assert main is not None
    try:
        llm.pause()

        def press() -> None:
            until(lambda: llm.engine._step_queue)
            signal.pthread_kill(main, signal.SIGINT)

        killer = in_thread(press)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPT, SHORT)
        killer.result()
        llm.resume()
        stats = llm.stats()
        assert stats["waiting"] == 0 and stats["forwards"] == 0
        assert len(ids(llm.generate(PROMPT, SHORT))) == 5
    finally:
        signal.signal(signal.SIGINT, handler)


# ---- sleeping


def test_requests_running_before_sleep_get_the_same_bits(llm: LLM) -> None:
    prompts, params = mixed_requests(9)
    expected = all_facts(llm.generate(prompts, params))
    thread_call = in_thread(llm.generate, prompts, params)
    coroutine = in_thread(lambda: asyncio.run(llm.agenerate(prompts, params)))
    for _ in range(4):
        llm.sleep()
        stats = llm.stats()
        assert stats["asleep"] and stats["paused"] and stats["blocks_used"] == 0
        assert llm.info()["kv_bytes"] == 0
        llm.sleep()
        llm.pause()
        with pytest.raises(VerbatimError, match="sleeps"):
            llm.resume()
        with pytest.raises(VerbatimError, match="sleeps"):
            llm.pause("drain")
        llm.wake()
        llm.wake()
        assert 0 < llm.info()["kv_bytes"] <= 16e6
        time.sleep(0.01)
    assert all_facts(thread_call.result()) == all_facts(coroutine.result()) == expected


def test_live_module_weights_are_not_dropped_by_sleep(llm: LLM) -> None:
    with pytest.raises(NotSupported, match="live module"):
        llm.sleep(weights=True)
    stats = llm.stats()
    assert not stats["paused"] and not stats["asleep"]
    assert len(ids(llm.generate(PROMPT, SHORT))) == 5


@pytest.mark.parametrize("name", slow_but(["gpt2"], ["llama", "gpt2", "deepseek_v3"]))
def test_dropped_weights_are_reloaded_with_the_same_bits(tmp_path: Path, name: str) -> None:
    make_toy(name, tie_word_embeddings=name != "deepseek_v3").save_pretrained(tmp_path)
    prompts, params = mixed_requests(7)
    with LLM(tmp_path, dtype="bfloat16", **SMALL) as llm:
        module = llm.engine.runner.module
        parameters = list(module.parameters())
        bits = [p.detach().clone() for p in parameters]
        expected = all_facts(llm.generate(prompts, params))
        stream = llm.stream(PROMPT, LONG)
        head = next(stream).token_ids
        llm.sleep()
        llm.sleep(weights=True)
        assert all(p.untyped_storage().nbytes() == p.itemsize for p in parameters)
        assert llm.info()["parameters"] == sum(b.numel() for b in bits)
        llm.wake()
        # The same objects, also where a parameter is tied.
        assert all(p is q for p, q in zip(module.parameters(), parameters, strict=True))
        assert all(torch.equal(p, b) for p, b in zip(parameters, bits, strict=True))
        tail = [i for delta in stream for i in delta.token_ids]
        assert all_facts(llm.generate(prompts, params)) == expected
        assert ids(llm.generate(PROMPT, LONG)) == head + tail


def test_changed_weights_or_files_are_detected_by_sleep_and_wake(tmp_path: Path) -> None:
    make_toy("llama").save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    text = config.read_text()
    with LLM(tmp_path, **SMALL) as llm:
        expected = ids(llm.generate(PROMPT, SHORT))
        llm.sleep(weights=True)
        config.write_text(json.dumps({**json.loads(text), "rms_norm_eps": 0.5}))
        with pytest.raises(ModelChanged, match=r"config\.json changed"):
            llm.wake()
        assert llm.stats()["asleep"]
    config.write_text(text)
    with LLM(tmp_path, **SMALL) as llm:
        with torch.no_grad():
            llm.engine.runner.module.lm_head.weight.mul_(2)
        with pytest.raises(NotSupported, match="changed since they were read"):
            llm.sleep(weights=True)
        assert not llm.stats()["asleep"]
        assert ids(llm.generate(PROMPT, SHORT)) != [] != expected
        (tmp_path / "model.safetensors").touch()
        with pytest.raises(ModelChanged, match=r"model\.safetensors changed"):
            llm.sleep(weights=True)
        assert not llm.stats()["asleep"]


@pytest.mark.parametrize(
    "placement", [None, pytest.param(TensorParallel(2), marks=pytest.mark.slow)]
)
def test_wake_reads_the_same_files_after_a_link_and_the_folder_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placement: Any
) -> None:
    for seed in (0, 1):
        make_toy("llama", seed=seed).save_pretrained(tmp_path / str(seed))
    (tmp_path / "link").symlink_to("0")
    monkeypatch.chdir(tmp_path)
    with LLM("link", placement=placement, **SMALL) as llm:
        expected = all_facts(llm.generate(PROMPT, SHORT))
        llm.sleep(weights=True)
        (tmp_path / "link").unlink()
        (tmp_path / "link").symlink_to("1")
        monkeypatch.chdir("/")
        llm.wake()
        assert all_facts(llm.generate(PROMPT, SHORT)) == expected


def test_weights_of_replaced_parameter_are_not_dropped(tmp_path: Path) -> None:
    make_toy("llama").save_pretrained(tmp_path)
    with LLM(tmp_path, **SMALL) as llm:
        head = llm.engine.runner.module.lm_head
        head.weight = torch.nn.Parameter(head.weight.detach() * 2)
        expected = ids(llm.generate(PROMPT, SHORT))
        with pytest.raises(NotSupported, match="changed since they were read"):
            llm.sleep(weights=True)
        assert ids(llm.generate(PROMPT, SHORT)) == expected


def test_ctrl_c_in_drain_keeps_pause_of_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(make_toy("llama"), **SMALL) as llm:
        stream = llm.stream(PROMPT, LONG)
        next(stream)
        wait = llm.engine._wait

        def interrupted(*_: Any) -> None:
            monkeypatch.setattr(llm.engine, "_wait", wait)
            other = threading.Thread(target=llm.pause)
            other.start()
            other.join()
            raise KeyboardInterrupt

        monkeypatch.setattr(llm.engine, "_wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.pause("drain")
        assert llm.stats()["paused"]


# ---- unread streams


def test_unread_stream_fails_without_affecting_others() -> None:
    with LLM(make_toy("llama"), max_unread=20, **SMALL) as llm:
        stream = llm.stream(PROMPT, LONG)
        head = next(stream).token_ids
        assert len(ids(llm.generate(PROMPT[::-1], LONG))) == 200
        assert llm.stats()["running"] == 0 and llm.stats()["blocks_used"] == 0
        rest: list[Delta] = []
        with pytest.raises(RequestFailed, match="not read; 20 deltas wait, and max_unread is 20"):
            rest.extend(stream)
        head += [i for delta in rest for i in delta.token_ids]
        assert head == ids(llm.generate(PROMPT, LONG))[:21]

        async def stalled() -> int:
            stream, deltas = llm.astream(PROMPT, LONG), []
            deltas.append(await anext(stream))
            await asyncio.to_thread(until, lambda: llm.stats()["running"] == 0)

            async def read_on() -> None:
                while True:
                    deltas.append(await anext(stream))

            with pytest.raises(RequestFailed, match="was not read"):
                await read_on()
            return len(deltas)

        assert 20 <= asyncio.run(stalled()) <= 22
        many = SamplingParams(n=40, max_tokens=3, ignore_eos=True)
        assert len(list(llm.stream(PROMPT, many))) == 120  # one step may add more deltas than that
    with pytest.raises(InvalidRequest, match="max_unread=0"):
        LLM(make_toy("llama"), max_unread=0)


def test_slow_loop_over_steps_gets_all_deltas() -> None:
    with LLM(make_toy("llama"), max_unread=20, **SMALL) as llm:
        request = llm.engine.admission.admit(PROMPT, LONG)
        steps = llm.engine.steps([request])
        deltas = next(steps)
        llm.generate(PROMPT[::-1], LONG)  # its steps run the other request, too
        deltas += [delta for step in steps for delta in step]
        assert [i for delta in deltas for i in delta.token_ids] == ids(llm.generate(PROMPT, LONG))


def test_stream_dropped_during_forward_does_not_affect_others(llm: LLM) -> None:
    expected = ids(llm.generate(PROMPT, LONG))
    streams = [llm.stream(PROMPT[::-1], LONG) for _ in range(3)]
    for stream in streams:
        next(stream)

    def drop(*_: Any) -> None:
        if streams:
            streams.pop()
            gc.collect()

    hook = llm.engine.runner.module.register_forward_hook(drop)
    del stream
    assert ids(llm.generate(PROMPT, LONG)) == expected
    hook.remove()
    assert llm.stats()["blocks_used"] == 0


# ---- errors


@pytest.mark.parametrize("error", [MemoryError("no room"), KeyError("a bug"), SystemExit(3)])
def test_step_error_reaches_all_callers_and_engine_continues(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    expected = ids(llm.generate(PROMPT, SHORT))
    engine = llm.engine._engine
    step = engine.step

    def broken() -> bool:
        monkeypatch.setattr(engine, "step", step)
        raise error

    async def main() -> None:
        calls = [asyncio.create_task(llm.agenerate(PROMPT, LONG)) for _ in range(3)]
        calls += [asyncio.create_task(last(llm, PROMPT, LONG)) for _ in range(3)]
        with slow_steps(llm):
            while llm.stats()["running"] < 6:
                await asyncio.sleep(0.001)
            sync = in_thread(llm.generate, PROMPT, LONG)
            until(lambda: llm.stats()["running"] == 7)
            monkeypatch.setattr(engine, "step", broken)
        found = await asyncio.gather(*calls, return_exceptions=True)
        with pytest.raises(Exception) as caught:
            sync.result()
        for raised in [*found, caught.value]:
            if isinstance(error, Exception):
                assert raised is error
            else:
                assert isinstance(raised, RequestFailed) and raised.__cause__ is error
        assert ids(await llm.agenerate(PROMPT, SHORT)) == expected

    asyncio.run(main())
    assert llm.stats()["blocks_used"] == 0
    assert ids(llm.generate(PROMPT, SHORT)) == expected


def test_step_error_keeps_its_traceback_for_each_caller(llm: LLM) -> None:
    def explode(*_: Any) -> None:
        raise KeyError("from a hook")

    hook = llm.engine.runner.module.register_forward_hook(explode)

    async def depth() -> int:
        with pytest.raises(KeyError, match="from a hook") as caught:
            await llm.agenerate(PROMPT, SHORT)
        assert any(frame.name == "explode" for frame in caught.traceback)
        return len(caught.traceback)

    async def main() -> list[int]:
        return await asyncio.gather(*(depth() for _ in range(10)))

    assert len(set(asyncio.run(main()))) == 1
    hook.remove()
    assert len(ids(llm.generate(PROMPT, SHORT))) == 5


# ---- manual stepping


def test_manual_stepping(llm: LLM) -> None:
    expected = ids(llm.generate(PROMPT, SHORT))
    handle, before = llm.engine, llm.stats()["forwards"]
    request = llm.engine.admission.admit(PROMPT, SHORT)
    deltas: list[Delta] = []
    ends: list[bool] = []
    handle.submit(request, deltas.append, lambda: ends.append(request.finished))
    assert deltas == [] and handle.step() and len(deltas) == 1
    handle.pause()
    assert not handle.step()
    handle.resume()
    while handle.step():
        pass
    assert llm.stats()["forwards"] == before + 5 and ends == [True]
    assert [i for delta in deltas for i in delta.token_ids] == expected
    with pytest.raises(InvalidRequest, match="twice"):
        handle.submit(request, deltas.append)
    other = llm.engine.admission.admit(PROMPT, LONG)
    handle.submit(other, deltas.append)
    handle.step()
    handle.abort(other)
    handle.abort(other)
    assert deltas[-1].finish_reason is FinishReason.ABORT and not handle.step()
    with pytest.raises(InvalidRequest, match="twice"):
        handle.run([llm.engine.admission.admit(PROMPT, SHORT)] * 2)
    assert llm.stats()["blocks_used"] == 0


def test_callback_error_fails_only_its_request(llm: LLM) -> None:
    failing, other = (llm.engine.admission.admit(PROMPT, SHORT) for _ in range(2))

    def refuse(delta: Delta) -> None:
        raise ZeroDivisionError

    llm.engine.submit(failing, refuse)
    assert len(llm.engine.run([other])[0].outputs[0].token_ids) == 5
    assert isinstance(failing.error, ZeroDivisionError)


def test_calls_from_inside_a_forward_are_rejected(llm: LLM) -> None:
    refused: list[str] = []

    def call_back(*_: Any) -> None:
        agenerate, astream = llm.agenerate(PROMPT, SHORT), last(llm, PROMPT, SHORT)
        coroutines = (lambda: asyncio.run(agenerate), lambda: asyncio.run(astream))
        calls = (llm.pause, llm.sleep, llm.wake, llm.close, llm.engine.step)
        for call in (*calls, lambda: llm.generate(PROMPT, SHORT), *coroutines):
            with pytest.raises(VerbatimError, match="from inside its own forward") as caught:
                call()
            refused.append(str(caught.value))
        assert llm.stats()["running"] == 1

    llm.engine.runner.module.register_forward_hook(call_back)
    assert len(ids(llm.generate(PROMPT, SHORT))) == 5 and len(refused) == 40


def test_group_over_max_waiting_is_rejected_as_a_whole() -> None:
    with LLM(make_toy("llama"), max_waiting=2, max_sequences=1, **SMALL) as llm:
        llm.pause()
        waiting = [in_thread(llm.generate, [PROMPT] * 2, SHORT)]
        until(lambda: llm.stats()["waiting"] == 2)
        with pytest.raises(QueueFull):
            llm.generate([PROMPT] * 2, SHORT)
        with pytest.raises(QueueFull):
            asyncio.run(llm.agenerate([PROMPT] * 2, SHORT))
        waiting.append(in_thread(llm.generate, PROMPT, SHORT))
        until(lambda: llm.stats()["waiting"] == 3)
        with pytest.raises(QueueFull):
            next(llm.stream(PROMPT, SHORT))
        llm.resume()
        assert [len(caller.result()) for caller in waiting] == [2, 1]


def test_stream_is_abandoned_while_a_request_is_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector may end a stream at any moment, here while the queue limit is checked."""
    with LLM(make_toy("llama"), max_waiting=2, **SMALL) as llm:
        streams = [llm.stream(PROMPT, SHORT), llm.stream(PROMPT, SHORT)]
        deltas = [next(stream) for stream in streams]
        check = llm.engine._engine.check_queue

        def abandoned(requests: Iterable[Request]) -> Iterator[Request]:
            for request in requests:
                streams.clear()
                yield request

        monkeypatch.setattr(llm.engine._engine, "check_queue", lambda r: check(abandoned(r)))
        assert len(llm.generate(PROMPT, SHORT)) == 1 and len(deltas) == 2


# ---- scheduling between callers, without a model


class CountingRunner(ScriptedRunner):
    """All tokens are equally likely, and it can sleep."""

    def forward(self, batch: Batch) -> Forward:
        self.num_forwards += 1
        if random.random() < 0.1:
            time.sleep(0.0005)
        return Forward(torch.zeros(len(batch.logit_rows), self.vocab_size))

    def sleep(self, weights: bool = False) -> None: ...


class WatchedEngine(Engine):
    """An engine that fails if two threads use it at the same time."""

    def __init__(self) -> None:
        runner = CountingRunner(num_blocks=4096, block_size=64)
        super().__init__(runner, Scheduler(runner, 4096, 256, 16))  # type: ignore[arg-type]
        self.busy = threading.RLock()

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in ("step", "add", "abort", "abort_all", "expire", "fail"):
            return found

        def alone(*args: Any, **kwargs: Any) -> Any:
            assert self.busy.acquire(blocking=False), "two at the engine at once"
            try:
                return found(*args, **kwargs)
            finally:
                self.busy.release()

        return alone


def make_handle(**options: Any) -> EngineHandle:
    engine = WatchedEngine()
    none = frozenset[int]()
    admission = Admission(None, engine.runner, 100_000, "", none, adapters=engine.adapters)
    return EngineHandle(engine, admission, **options)


def make_request(handle: EngineHandle, max_tokens: int | None = 5, **params: Any) -> Request:
    return handle.admission.admit([1], SamplingParams(max_tokens=max_tokens, **params))


class Stress:
    """Callers of all kinds at one handle: threads, coroutines, pauses, and Ctrl-C in the main thread.

    Args:
        make: returns a request that ends by itself, and a function that checks its result.
        pauses: functions that pause the engine or put it to sleep; it is woken and resumed after each.
    """

    def __init__(
        self,
        handle: EngineHandle,
        make: Callable[[random.Random], tuple[Request, Callable[[Result], None]]],
        seconds: float,
        pauses: list[Callable[[], Any]],
    ) -> None:
        self.handle, self.make = handle, make
        self.pauses = [handle.stats, handle.sleep, lambda: handle.pause("drain"), *pauses]
        now = time.monotonic()
        self.end, self.latest = now + seconds, now + seconds + PATIENCE_S
        self.counts: Counter[str] = Counter()

    @property
    def running(self) -> bool:
        """Whether time is left, or on a busy machine something has not happened yet."""
        now = time.monotonic()
        return now < self.end or (now < self.latest and not self.has_seen_all)

    @property
    def has_seen_all(self) -> bool:
        kinds = "run stream leave abort coroutine cancelled interrupt".split()
        seen = min(self.counts[kind] for kind in [*kinds, "read slowly"])
        return seen > 0 and self.counts["interrupt"] > 10

    def call(self, chance: random.Random) -> None:
        """Make one call by a thread that waits."""
        kind = chance.choice(["run", "stream", "leave", "read slowly", "abort"])
        request, check = self.make(chance)
        if kind == "run":
            made = [self.make(chance) for _ in range(3)]
            results = self.handle.run([request for request, _ in made])
            for result, (_, check) in zip(results, made, strict=True):
                check(result)
        elif kind == "abort":
            self.handle.submit(request)
            time.sleep(chance.random() / 50)
            self.handle.abort(request)
            until(lambda: request.finished)
        else:
            for delta in self.handle.stream(request):
                if kind == "leave" and chance.random() < 0.2:
                    break
                if kind == "read slowly":
                    time.sleep(0.002)
                if delta.result:
                    check(delta.result)
        self.counts[kind] += 1

    async def acall(self, chance: random.Random) -> None:
        """Make one call by a coroutine."""
        request, check = self.make(chance)
        if chance.random() < 0.5:
            check((await self.handle.arun([request]))[0])
        else:
            slow, leaves = chance.random() < 0.1, chance.random() < 0.1
            async for delta in self.handle.astream([request]):
                if slow:
                    await asyncio.sleep(0.005)
                if delta.result:
                    check(delta.result)
                if leaves:
                    break
        self.counts["coroutine"] += 1

    def keep_calling(self, seed: int) -> None:
        chance = random.Random(seed)
        while self.running:
            self.call(chance)

    async def keep_awaiting(self, count: int) -> None:
        async def one(seed: int) -> None:
            chance = random.Random(seed)
            while self.running:
                task = asyncio.create_task(self.acall(chance))
                if chance.random() < 0.2:
                    await asyncio.sleep(chance.random() / 50)
                    self.counts["cancelled"] += task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                if not task.cancelled() and (error := task.exception()) is not None:
                    raise error
                if chance.random() < 0.1:
                    await asyncio.sleep(0.01)  # so that other callers run steps now and then

        await asyncio.gather(*(one(seed) for seed in range(count)))

    def keep_pausing(self, seed: int) -> None:
        chance = random.Random(seed)
        while self.running:
            for act in (chance.choice(self.pauses), self.handle.wake, self.handle.resume):
                with contextlib.suppress(VerbatimError):  # the other pausing thread put it to sleep
                    act()
                time.sleep(chance.random() / 100)

    def keep_interrupting(self) -> None:
        """Make calls in the main thread, interrupted by Ctrl-C at random times."""
        chance, armed, handle = random.Random(9), False, self.handle
        calls = [lambda: self.call(chance)] * 3
        calls += [lambda: handle.pause("drain"), handle.step, handle.stats, handle.dummy_forward]

        def interrupt(*_: Any) -> None:
            if armed:
                signal.raise_signal(signal.SIGINT)

        handlers = {signal.SIGALRM: interrupt, signal.SIGINT: signal.default_int_handler}
        before = {number: signal.signal(number, each) for number, each in handlers.items()}
        try:
            while self.running:
                try:
                    try:
                        armed = True
                        delay = chance.random() * chance.choice([1e-4, 1e-3, 2e-2])
                        signal.setitimer(signal.ITIMER_REAL, delay + 1e-6)
                        chance.choice(calls)()
                    finally:
                        armed = False
                        signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    self.counts["interrupt"] += 1
                except VerbatimError as error:
                    if "sleeps" not in str(error):
                        raise
                armed = False
                with contextlib.suppress(VerbatimError):
                    handle.resume()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in before.items():
                signal.signal(number, handler)

    def run(self, num_threads: int, num_coroutines: int) -> None:
        """Run all callers, and check that no call or request is left over."""
        callers = [in_thread(self.keep_calling, s) for s in range(num_threads)]
        awaiting = lambda: asyncio.run(self.keep_awaiting(num_coroutines // 2))
        callers += [in_thread(awaiting) for _ in range(2)]
        pausers = [in_thread(self.keep_pausing, s) for s in range(2)]
        self.keep_interrupting()
        for pauser in pausers:
            pauser.result(PATIENCE_S)
        self.handle.wake()
        self.handle.resume()
        for caller in callers:
            caller.result(PATIENCE_S)
        while self.handle.step():  # submitted requests that were neither aborted nor waited for
            pass
        assert self.has_seen_all, self.counts
        until(lambda: not self.handle.has_work)
        assert not self.handle._calls


def test_ctrl_c_while_lowering_a_shield_restores_the_handler() -> None:
    before = signal.getsignal(signal.SIGINT)
    shield = Shield()
    with shield.up():
        lowered = shield.down()
        lowered.__enter__()  # as if Ctrl-C came right after, so that __exit__ never runs
    del lowered
    gc.collect()
    assert signal.getsignal(signal.SIGINT) is before


# An interrupt in a callback of the garbage collector (hypothesis has one) can't be raised.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_concurrent_stress_leaves_no_request_unfinished() -> None:
    def make(chance: random.Random) -> tuple[Request, Callable[[Result], None]]:
        timeout_s = chance.random() / 50 if chance.random() < 0.2 else None
        request = make_request(handle, chance.randrange(1, 20), timeout_s=timeout_s)
        return request, lambda result: None

    handle = make_handle(max_unread=30)
    Stress(handle, make, 1.5, [handle.pause, lambda: handle.pause("abort")]).run(6, 10)
    assert handle.scheduler.pool.num_used == 0
    handle.close()
    assert engine_threads() == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_concurrent_stress_on_a_model_keeps_results_and_leaks_nothing() -> None:
    seconds = float(os.environ.get("VERBATIM_STRESS_S", "10"))
    requests = list(zip(*mixed_requests(12), strict=True))
    with LLM(make_toy("llama"), kv_memory="2MB", block_size=8, max_sequences=48) as llm:
        expected = [all_facts(llm.generate([prompt], [params])) for prompt, params in requests]

        def make(chance: random.Random) -> tuple[Request, Callable[[Result], None]]:
            i = chance.randrange(len(requests))

            def check(result: Result) -> None:
                assert [facts(result)] == expected[i]

            return llm.engine.admission.admit(*requests[i]), check

        Stress(llm.engine, make, seconds, [llm.pause]).run(32, 200)
        stats = llm.stats()
        assert stats["running"] == stats["waiting"] == stats["blocks_used"] == 0
        check_pool(llm.engine.scheduler.pool)


@pytest.fixture
def handle() -> Iterator[EngineHandle]:
    handle = make_handle()
    yield handle
    handle.close()
    assert engine_threads() == []


def test_other_calls_get_a_turn_between_steps(handle: EngineHandle) -> None:
    endless = [make_request(handle, None), make_request(handle, None)]
    caller = in_thread(handle.run, [endless[0]])
    coroutine = in_thread(lambda: asyncio.run(handle.arun([endless[1]])))
    until(lambda: handle.stats()["running"] == 2 and handle.runner.num_forwards > 10)
    for _ in range(100):
        handle.stats()
    for request in endless:
        handle.abort(request)
    caller.result()
    coroutine.result()


@pytest.mark.parametrize("driven", [False, True])
def test_repeated_calls_do_not_starve_steps(handle: EngineHandle, driven: bool) -> None:
    stop = threading.Event()

    def keep_calling() -> None:
        while not stop.is_set():
            handle.call(lambda: time.sleep(1e-4))

    callers = [in_thread(keep_calling) for _ in range(3)]
    request = make_request(handle, 100)
    try:
        if driven:
            asyncio.run(asyncio.wait_for(handle.arun([request]), PATIENCE_S))
        else:
            in_thread(handle.run, [request]).result()
    finally:
        stop.set()
    for caller in callers:
        caller.result()


def test_call_from_signal_handler_does_not_deadlock_with_its_thread(handle: EngineHandle) -> None:
    all_stats: list[dict[str, Any]] = []
    twice = lambda *_: all_stats.extend(handle.stats() for _ in "ab")
    handler = signal.signal(signal.SIGALRM, twice)
    handle.pause()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        handle.run([make_request(handle, timeout_s=0.2)])
    finally:
        signal.signal(signal.SIGALRM, handler)
    assert [found["paused"] for found in all_stats] == [True, True]


def test_exception_while_acquiring_engine_leaves_it_usable(handle: EngineHandle) -> None:
    owner = handle._owner

    class Interrupted:
        def __getattr__(self, name: str) -> Any:
            return getattr(owner, name)

        def acquire(self, **options: Any) -> bool:
            handle._owner = owner
            assert owner.acquire(**options)
            raise TimeoutError

    handle._owner = Interrupted()
    with pytest.raises(TimeoutError):
        handle.stats()
    assert handle.run([make_request(handle)])[0].outputs[0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_engine_ignores_torch_default_device(name: str, tmp_path: Path) -> None:
    module, params = make_toy(name), [SHORT, SHORT.replace(allowed_token_ids=range(90))]
    with LLM(module) as llm:
        results = llm.generate([PROMPT] * 2, params)
        expected = [result.outputs[0].token_ids for result in results]
    with torch.device("meta"), LLM(module) as llm:
        results = llm.generate([PROMPT] * 2, params)
        assert [result.outputs[0].token_ids for result in results] == expected
        assert next(iter(llm.stream(PROMPT, SHORT))).token_ids == expected[0][:1]
        assert llm.score([PROMPT])
        with llm.session(seed=SHORT.seed, params=SHORT) as session:
            session.generate(PROMPT)
            session.save(tmp_path / "saved", kv=True)
            with llm.session(load=tmp_path / "saved") as loaded:
                assert loaded.token_ids == session.token_ids


# ---- a forked child


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # about forking with threads
@pytest.mark.parametrize("busy", [False, True])
def test_forked_child_raises_and_names_spawn(handle: EngineHandle, busy: bool) -> None:
    """In the child, OpenMP would wait forever for threads that only the parent has."""
    asyncio.run(handle.arun([make_request(handle)]))
    endless = make_request(handle, None)
    caller = in_thread(handle.run, [endless]) if busy else None
    until(lambda: not busy or handle.stats()["running"])

    def in_child() -> bool:
        with pytest.raises(EngineClosed, match="'spawn'"):
            handle.run([make_request(handle)])
        with pytest.raises(EngineClosed, match="'spawn'"):
            asyncio.run(handle.arun([make_request(handle)]))
        with pytest.raises(NotSupported, match="'spawn'"):
            LLM()
        handle.close()
        return handle.closed

    child = os.fork()
    if child == 0:
        signal.alarm(int(PATIENCE_S))
        try:
            os._exit(0 if in_child() else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    handle.abort(endless)
    if caller is not None:
        caller.result()


def test_exception_at_any_line_of_acquiring_engine_leaves_no_owner() -> None:
    """Raise at every line of acquiring and releasing, except where signal handlers can't run."""
    no_call_before = "try:", "return True", "self._owner.release()"
    with LLM(make_toy("llama")) as llm:
        handle = llm.engine
        ours = {f.__code__ for f in (EngineHandle._try, EngineHandle._pop_woken)}
        lines: list[int] = []
        source = Path(inspect.getsourcefile(EngineHandle) or "").read_text().splitlines()

        def raising_at(number: int) -> Any:
            """Return a trace function that raises at the traced line of that number."""

            def trace(frame: Any, event: str, _: Any) -> Any:
                if frame.f_code not in ours:
                    return None
                if event == "line":
                    lines.append(frame.f_lineno)
                    line = source[frame.f_lineno - 1].strip()
                    if len(lines) == number and line not in no_call_before:
                        raise TimeoutError
                return trace

            return trace

        number, num_raised = 0, 0
        while number <= len(lines):
            number, before = number + 1, sys.gettrace()
            lines.clear()
            sys.settrace(raising_at(number))
            try:
                handle.call(lambda: None)
            except TimeoutError:
                num_raised += 1
            finally:
                sys.settrace(before)
            assert not handle._owner._is_owned(), number
        assert num_raised > 8
