"""How long calls take, and steps that follow one another."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

WARM = 2  # steps that are not timed


def seconds(call: Callable[[], object]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def step_times(step: Callable[[], object], steps: int, most_s: float = math.inf) -> list[float]:
    """Seconds of each step behind `WARM` others.

    Args:
        steps: how many are timed, at most.
        most_s: of those in all; three are timed in any case.
    """
    for _ in range(WARM):
        step()
    times: list[float] = []
    while len(times) < steps and (len(times) < 3 or sum(times) < most_s):
        times.append(seconds(step))
    return times
