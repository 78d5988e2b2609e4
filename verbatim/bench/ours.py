"""Timings of Verbatim's engine steps, from scheduling to output."""

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
    """An open engine, stepped by the benchmark.

    Args:
        llm: not used by anything else meanwhile.
    """

    name = "Verbatim"

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._handle = llm.engine
        self._vocab = llm.engine.admission.vocab_size
        self._budget = llm.engine.scheduler.max_batch_tokens

    def prefill(self, length: int) -> float:
        """Return the seconds for a random prompt of this length, to its next token."""
        return self.prefill_of(random_ids(length, self._vocab))

    def prefill_of(self, prompt: list[int]) -> float:
        """Return the seconds for a prompt, to its next token."""

        def answer() -> None:
            request = self.add([prompt], max_tokens=1)[0]
            while not request.finished:
                self._handle.step()

        return seconds(answer)

    def decode(self, rows: int, context: int, steps: int) -> list[float]:
        """Return the seconds of each decode step of `rows` sequences with `context` tokens each."""
        return self.decode_of([random_ids(context, self._vocab) for _ in range(rows)], steps)

    def decode_of(
        self, prompts: list[list[int]], steps: int, most_s: float = math.inf
    ) -> list[float]:
        """Return the seconds of each decode step after these prompts; `most_s` as in `step_times`.

        Raises:
            InvalidRequest: a sequence reaches the length limit before all prompts are processed.
        """
        rows, longest = len(prompts), max(map(len, prompts))
        # Running sequences grow by a token in each step that processes further prompts.
        num_prefill_steps = math.ceil(sum(map(len, prompts)) / max(1, self._budget - rows)) + rows
        room = self._llm.max_length - longest
        requests = self.add(prompts, max_tokens=min(num_prefill_steps + steps + WARM + 1, room))
        try:
            self._skip_prefill(requests)
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
        """Run all (prompt, number of new tokens) at once; return the number of new tokens and the seconds."""
        start = time.perf_counter()
        admitted = [self._admit(ids, count) for ids, count in requests]
        for request in admitted:
            self._handle.submit(request)
        while not all(request.finished for request in admitted):
            self._handle.step()
        return sum(count for _, count in requests), time.perf_counter() - start

    def _skip_prefill(self, requests: list[Request]) -> None:
        """Process the prompts without forwards, as the cost of decoding does not depend on K and V.

        This takes several steps, in which earlier rows grow by some tokens. Rows continue with different
        ids, as equal ones would select the same experts.
        """

        def random_logits(batch: Any) -> Forward:
            return Forward(torch.rand(len(batch.logit_rows), self._vocab))

        runner: Any = self._handle.runner
        runner.forward = random_logits
        try:
            while not requests[-1].sequences[0].output_ids:
                self._handle.step()
        finally:
            del runner.forward

    def add(self, prompts: list[list[int]], *, max_tokens: int) -> list[Request]:
        """Submit greedy requests, without a step."""
        requests = [self._admit(prompt, max_tokens) for prompt in prompts]
        for request in requests:
            self._handle.submit(request)
        return requests

    def _admit(self, ids: list[int], max_tokens: int) -> Request:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return self._llm.engine.admission.admit(ids, params)


def random_ids(length: int, vocab: int) -> list[int]:
    """Return a random prompt, without a prefix in common with others."""
    return [random.randrange(vocab) for _ in range(length)]
