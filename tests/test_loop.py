"""How a thread that makes steps wakes coroutines: once for all of them, and none is forgotten."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections import deque
from typing import Any

import pytest

from verbatim.engine.loop import AsyncWake


class CountingLoop(asyncio.SelectorEventLoop):
    """Counts how often another thread wakes it."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 0

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> Any:
        self.times += 1
        return super().call_soon_threadsafe(callback, *args, context=context)


def run(coroutine: Any, loop: asyncio.AbstractEventLoop) -> Any:
    try:
        return loop.run_until_complete(asyncio.wait_for(coroutine, 10))
    finally:
        loop.close()


def test_readers_of_one_step_are_woken_by_one_call() -> None:
    loop = CountingLoop()

    async def all_woken() -> None:
        wakes = [AsyncWake() for _ in range(32)]
        readers = [asyncio.ensure_future(wake.wait()) for wake in wakes]
        await asyncio.sleep(0)
        loop.times = 0
        for wake in wakes:  # the loop is busy with us, as it is in another thread that has the lock
            wake.set()
            wake.set()
        assert loop.times == 1
        await asyncio.gather(*readers)

    run(all_woken(), loop)


class Late(deque[Any]):
    """When it is found empty, somebody has just come who saw that the bell was rung."""

    def __init__(self, newcomer: AsyncWake) -> None:
        super().__init__()
        self.newcomers = [newcomer]

    def __bool__(self) -> bool:
        filled = len(self) > 0
        if not filled and self.newcomers:
            self.newcomers.pop().set()
        return filled


def test_nobody_is_forgotten_who_comes_when_the_loop_has_looked() -> None:
    async def both_woken() -> None:
        first, late = AsyncWake(), AsyncWake()
        first._bell._calls = Late(late)
        first.set()
        await asyncio.gather(first.wait(), late.wait())

    run(both_woken(), asyncio.new_event_loop())


def test_a_closed_loop_is_told_of_each_time_and_a_new_one_is_woken() -> None:
    async def make() -> AsyncWake:
        return AsyncWake()

    old = run(make(), asyncio.new_event_loop())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed"):
            old.set()

    async def woken() -> None:
        wake = AsyncWake()
        threading.Thread(target=wake.set).start()
        await wake.wait()

    run(woken(), asyncio.new_event_loop())


def test_a_loop_that_was_closed_after_it_was_rung_refuses_everybody() -> None:
    async def make() -> list[AsyncWake]:
        return [AsyncWake() for _ in range(3)]

    loop = asyncio.new_event_loop()
    first, *others = loop.run_until_complete(make())
    first.set()  # the loop is closed before it looks
    loop.close()
    for wake in [*others, first]:
        with pytest.raises(RuntimeError, match="closed"):
            wake.set()


class Struck(asyncio.SelectorEventLoop):
    """Ctrl-C comes while it is rung the first time, after another thread has counted on that."""

    meanwhile: Any = None

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> Any:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            thread = threading.Thread(target=meanwhile)
            thread.start()
            thread.join()
            raise KeyboardInterrupt
        return super().call_soon_threadsafe(callback, *args, context=context)


def test_ctrl_c_while_ringing_forgets_nobody_who_counted_on_it() -> None:
    loop = Struck()

    async def both_woken() -> None:
        struck, other = AsyncWake(), AsyncWake()
        loop.meanwhile = other.set
        with pytest.raises(KeyboardInterrupt):
            struck.set()
        await other.wait()
        struck.set()
        await struck.wait()

    run(both_woken(), loop)


class StruckEvent(asyncio.Event):
    """Ctrl-C comes when it is set the first time."""

    struck = False

    def set(self) -> None:
        if not self.struck:
            self.struck = True
            raise KeyboardInterrupt
        super().set()


def test_ctrl_c_between_two_readers_forgets_none_of_them() -> None:
    loop = asyncio.new_event_loop()
    wakes: list[AsyncWake] = []

    async def tell() -> None:
        wakes.extend(AsyncWake() for _ in range(3))
        wakes[1]._event = StruckEvent()
        for wake in wakes:
            wake.set()
        await asyncio.sleep(10)

    async def all_woken() -> None:
        await asyncio.gather(*(wake.wait() for wake in wakes))

    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(tell())
    for task in asyncio.all_tasks(loop):
        task.cancel()
    run(all_woken(), loop)


def test_a_thread_keeps_nothing_of_a_loop_that_was_closed() -> None:
    class Held:
        """What a reader's frame holds."""

    async def read(held: Held, wakes: list[AsyncWake]) -> None:
        wakes.append(AsyncWake())
        await wakes[0].wait()

    async def begin(held: Held, wakes: list[AsyncWake]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(read(held, wakes))
        await asyncio.sleep(0)
        return task

    loop, held, wakes = asyncio.new_event_loop(), Held(), list[AsyncWake]()
    gone = weakref.ref(loop), weakref.ref(held)
    task = loop.run_until_complete(begin(held, wakes))
    wakes[0].set()
    loop.close()
    task._log_destroy_pending = False  # which would be a warning
    wakes.clear()
    del loop, held, task
    gc.collect()
    assert [each() for each in gone] == [None, None]
