"""Timings of Verbatim's engine steps, from scheduling to output."""

from __future__ import annotations

import math
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
        self._handle = llm.engine
        self.vocab = llm.engine.admission.vocab_size
        self.max_length = llm.max_length
        self._budget = llm.engine.scheduler.max_batch_tokens

    def prefill(self, prompt: list[int]) -> float:
        """Return the seconds for a prompt, to its next token."""

        def answer() -> None:
            request = self.add([prompt], max_tokens=1)[0]
            while not request.finished:
                self._handle.step()

        return seconds(answer)

    def decode(self, prompts: list[list[int]], steps: int, most_s: float = math.inf) -> list[float]:
        """Return the seconds of each decode step after these prompts; `most_s` as in `step_times`.

        Raises:
            InvalidRequest: a sequence reaches the length limit before all prompts are processed.
        """
        rows, longest = len(prompts), max(map(len, prompts))
        # Running sequences grow by a token in each step that processes further prompts.
        num_prefill_steps = math.ceil(sum(map(len, prompts)) / max(1, self._budget - rows)) + rows
        room = self.max_length - longest
        requests = self.add(prompts, max_tokens=min(num_prefill_steps + steps + WARM + 1, room))
        try:
            self._skip_prefill(requests)
            times = step_times(self._handle.step, steps, most_s)
            if any(request.result is not None for request in requests):
                raise InvalidRequest(
                    f"{rows} rows of {longest} tokens: some reach {self.max_length}, which is all "
                    "that fits, before the others are there; take fewer rows or shorter ones"
                )
            return times
        finally:
            for request in requests:
                self._handle.abort(request)

    def mixed(self, requests: list[tuple[list[int], int]]) -> tuple[int, float]:
        """Run all (prompt, number of new tokens) at once; return the number of new tokens and the seconds."""
        start = time.perf_counter()
        added = [self.add([ids], max_tokens=count)[0] for ids, count in requests]
        while not all(request.finished for request in added):
            self._handle.step()
        return sum(count for _, count in requests), time.perf_counter() - start

    def _skip_prefill(self, requests: list[Request]) -> None:
        """Process the prompts without forwards, as the cost of decoding does not depend on K and V.

        This takes several steps, in which earlier rows grow by some tokens. Rows continue with different
        ids, as equal ones would select the same experts.
        """

        def random_logits(batch: Any) -> Forward:
            return Forward(torch.rand(len(batch.logit_rows), self.vocab))

        runner: Any = self._handle.runner
        runner.forward = random_logits
        try:
            while not requests[-1].sequences[0].output_ids:
                self._handle.step()
        finally:
            del runner.forward

    def add(self, prompts: list[list[int]], *, max_tokens: int) -> list[Request]:
        """Submit greedy requests, without a step."""
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        requests = [self._handle.admission.admit(prompt, params) for prompt in prompts]
        for request in requests:
            self._handle.submit(request)
        return requests
