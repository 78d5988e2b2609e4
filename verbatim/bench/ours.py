"""Verbatim itself: whole steps of its engine, from scheduling to the ids that are handed out."""

from __future__ import annotations

import random
import time
from typing import Any

import torch

from verbatim.core import Request
from verbatim.llm import LLM
from verbatim.params import SamplingParams
from verbatim.placement.runner import Forward

WARM = 2  # steps that are not timed


class Ours:
    """An open engine, stepped by hand.

    Args:
        llm: nobody else uses it meanwhile.
    """

    name = "Verbatim"

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._engine = llm._engine
        self._vocab = llm._admission.vocab_size

    def prefill(self, length: int) -> float:
        """Seconds from a prompt of so many ids to its next id."""
        start = time.perf_counter()
        requests = self._add([random_ids(length, self._vocab)], max_tokens=1)
        while not requests[0].finished:
            self._engine.step()
        return time.perf_counter() - start

    def decode(self, rows: int, context: int, steps: int) -> list[float]:
        """Seconds of each step of `rows` sequences behind `context` tokens each."""
        prompts = [random_ids(context, self._vocab) for _ in range(rows)]
        requests = self._add(prompts, max_tokens=rows + steps + WARM + 2)
        try:
            self._take_in(requests)
            for _ in range(WARM):
                self._engine.step()
            times = []
            for _ in range(steps):
                start = time.perf_counter()
                self._engine.step()
                times.append(time.perf_counter() - start)
            return times
        finally:
            for request in requests:
                self._engine.abort(request)

    def mixed(self, requests: list[tuple[list[int], int]]) -> tuple[int, float]:
        """All prompts at once, each with so many new tokens: tokens made, and the seconds."""
        start = time.perf_counter()
        admitted = [self._admit(ids, count) for ids, count in requests]
        for request in admitted:
            self._engine.add(request, lambda delta: None)
        while not all(request.finished for request in admitted):
            self._engine.step()
        return sum(count for _, count in requests), time.perf_counter() - start

    def _take_in(self, requests: list[Request]) -> None:
        """As if the prompts had been computed: what decoding costs doesn't depend on the numbers in KV.

        Prompts come in over several steps, in which those that are through grow by some tokens.
        """

        def nothing(batch: Any) -> Forward:
            return Forward(torch.zeros(len(batch.logit_rows), self._vocab))

        runner: Any = self._engine.runner
        runner.forward = nothing
        try:
            while not requests[-1].sequences[0].output_ids:
                self._engine.step()
        finally:
            del runner.forward

    def _add(self, prompts: list[list[int]], *, max_tokens: int) -> list[Request]:
        requests = [self._admit(prompt, max_tokens) for prompt in prompts]
        for request in requests:
            self._engine.add(request, lambda delta: None)
        return requests

    def _admit(self, ids: list[int], max_tokens: int) -> Request:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return self._llm._admission.admit(ids, params)


def random_ids(length: int, vocab: int) -> list[int]:
    """A prompt that no other one begins like."""
    return [random.randrange(vocab) for _ in range(length)]
