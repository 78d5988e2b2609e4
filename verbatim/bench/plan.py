"""`BenchPlan`: the measurements of a benchmark; timings and random prompts. Does not import torch."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from verbatim.common.checks import integer


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """The measurements of a run.

    Attributes:
        rows: numbers of sequences decoded at once.
        contexts: context lengths of decoding, in tokens.
        prefills: prompt lengths in tokens.
        mixed: number of requests in the mixed workload, which only Verbatim runs; 0 skips it.
        rounds: number of turns per system and case.
        steps: number of decode steps per turn.

    Raises:
        InvalidRequest: a number out of its range.
    """

    rows: tuple[int, ...] = (1, 8, 32)
    contexts: tuple[int, ...] = (128, 1024)
    prefills: tuple[int, ...] = (512,)
    mixed: int = 32
    rounds: int = 3
    steps: int = 8

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            for number in value if isinstance(value, tuple) else (value,):
                integer(name, number, low=int(name != "mixed"))

    def fitting(self, max_length: int) -> tuple[BenchPlan, list[str]]:
        """Return the plan without lengths above the model's limit, and a remark on each of them."""
        max_context = max_length - max(self.rows, default=0) - self.steps - 4
        contexts = tuple(n for n in self.contexts if n <= max_context)
        prefills = tuple(n for n in self.prefills if n < max_length)
        dropped = [f"a context of {n}" for n in self.contexts if n not in contexts]
        dropped += [f"a prompt of {n}" for n in self.prefills if n not in prefills]
        remarks = [f"{item} is left out: at most {max_length} tokens fit" for item in dropped]
        return replace(self, contexts=contexts, prefills=prefills), remarks


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
        most_s: total seconds after which to stop, but not before three steps.
    """
    for _ in range(WARM):
        step()
    times: list[float] = []
    while len(times) < steps and (len(times) < 3 or sum(times) < most_s):
        times.append(seconds(step))
    return times


def random_ids(length: int, vocab: int) -> list[int]:
    """Return random ids, which share no prefix with earlier prompts."""
    return [random.randrange(vocab) for _ in range(length)]
