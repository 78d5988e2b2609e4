"""Timings and random prompts. Nothing here imports torch."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

WARM = 2  # untimed warm-up steps


def seconds(call: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def step_times(step: Callable[[], object], steps: int, most_s: float = math.inf) -> list[float]:
    """Return the seconds of each step, after `WARM` untimed ones.

    Args:
        steps: maximum number of timed steps.
        most_s: stop after this total time and at least three steps.
    """
    for _ in range(WARM):
        step()
    times: list[float] = []
    while len(times) < steps and (len(times) < 3 or sum(times) < most_s):
        times.append(seconds(step))
    return times


def random_ids(length: int, vocab: int) -> list[int]:
    """Return a random prompt, without a prefix in common with others."""
    return [random.randrange(vocab) for _ in range(length)]
