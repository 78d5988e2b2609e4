"""How a thread that makes steps wakes coroutines: once for all of them, and none is forgotten."""

from __future__ import annotations

import asyncio
import threading
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
