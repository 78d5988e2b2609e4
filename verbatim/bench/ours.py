"""Verbatim itself: whole steps of its engine, from scheduling to the ids that are handed out."""

from __future__ import annotations

import math
import random
import time
from typing import Any

import torch

from verbatim.bench.timing import WARM, seconds, step_times
from verbatim.core import Request
from verbatim.errors import InvalidRequest
from verbatim.llm import LLM
from verbatim.params import SamplingParams
from verbatim.protocols import Forward


class Ours:
    """An open engine, stepped by hand.

    Args:
        llm: nobody else uses it meanwhile.
    """

    name = "Verbatim"

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._handle = llm.engine
        self._vocab = llm.engine.admission.vocab_size
        self._budget = llm.engine.scheduler.max_batch_tokens

    def prefill(self, length: int) -> float:
        """Seconds from a prompt of so many ids to its next id."""
        return self.prefill_of(random_ids(length, self._vocab))

    def prefill_of(self, prompt: list[int]) -> float:
        """Seconds from a prompt to its next id."""

        def answer() -> None:
            request = self.add([prompt], max_tokens=1)[0]
            while not request.finished:
                self._handle.step()

        return seconds(answer)

    def decode(self, rows: int, context: int, steps: int) -> list[float]:
        """Seconds of each step of `rows` sequences behind `context` tokens each."""
        return self.decode_of([random_ids(context, self._vocab) for _ in range(rows)], steps)

    def decode_of(
        self, prompts: list[list[int]], steps: int, most_s: float = math.inf
    ) -> list[float]:
        """Seconds of each step behind prompts; `most_s` as of `step_times`.

        Raises:
            InvalidRequest: the first are as long as may be before the last is taken in.
        """
        rows, longest = len(prompts), max(map(len, prompts))
        # Those that are in grow by a token in each step in which others come in.
        taken_in = math.ceil(sum(map(len, prompts)) / max(1, self._budget - rows)) + rows
        room = self._llm.max_length - longest
        requests = self.add(prompts, max_tokens=min(taken_in + steps + WARM + 1, room))
        try:
            self._take_in(requests)
            times = step_times(self._handle.step, steps, most_s)
            if any(request.result is not None for request in requests):
                raise InvalidRequest(
                    f"{rows} rows of {longest} tokens: some reach {self._llm.max_length}, which is all "
                    "that fits, before the others are there; take fewer rows or shorter ones"
                )
            return times
        finally:
            for request in requests:
                self._handle.abort(request)

    def mixed(self, requests: list[tuple[list[int], int]]) -> tuple[int, float]:
        """All prompts at once, each with so many new tokens: tokens made, and the seconds."""
        start = time.perf_counter()
        admitted = [self._admit(ids, count) for ids, count in requests]
        for request in admitted:
            self._handle.submit(request)
        while not all(request.finished for request in admitted):
            self._handle.step()
        return sum(count for _, count in requests), time.perf_counter() - start

    def _take_in(self, requests: list[Request]) -> None:
        """As if the prompts had been computed: what decoding costs doesn't depend on the numbers in KV.

        Prompts come in over several steps, in which those that are through grow by some tokens. Rows go on
        from ids of their own: equal ones would choose the same experts.
        """

        def nothing(batch: Any) -> Forward:
            return Forward(torch.rand(len(batch.logit_rows), self._vocab))

        runner: Any = self._handle.runner
        runner.forward = nothing
        try:
            while not requests[-1].sequences[0].output_ids:
                self._handle.step()
        finally:
            del runner.forward

    def add(self, prompts: list[list[int]], *, max_tokens: int) -> list[Request]:
        """Greedy requests, none of which has had a step yet."""
        requests = [self._admit(prompt, max_tokens) for prompt in prompts]
        for request in requests:
            self._handle.submit(request)
        return requests

    def _admit(self, ids: list[int], max_tokens: int) -> Request:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return self._llm.engine.admission.admit(ids, params)


def random_ids(length: int, vocab: int) -> list[int]:
    """A prompt that no other one begins like."""
    return [random.randrange(vocab) for _ in range(length)]
