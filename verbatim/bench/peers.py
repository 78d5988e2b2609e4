"""Systems that run the model's own files: Verbatim and transformers."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable
from typing import Any, Protocol

import torch

from verbatim.api.llm import LLM
from verbatim.bench.plan import WARM, seconds, step_times
from verbatim.core import Request
from verbatim.errors import InvalidRequest, ModelError
from verbatim.params import SamplingParams
from verbatim.protocols import Forward


class Peer(Protocol):
    """An inference system, called in the same way as by its own generation loop."""

    name: str

    def prefill(self, prompt: list[int]) -> float:
        """Return the seconds from a prompt to its next token."""
        ...

    def decode(self, prompts: list[list[int]], steps: int) -> list[float]:
        """Return the seconds of each decode step after prompts of equal length.

        A system may copy the first prompt to all rows, which then continue with different ids.
        """
        ...


class Ours:
    """An open engine, stepped by the benchmark; it must not be used otherwise meanwhile."""

    name = "Verbatim"

    def __init__(self, llm: LLM) -> None:
        self._handle = llm.engine
        self.vocab = llm.engine.admission.vocab_size
        self.max_length = llm.max_length
        self._budget = llm.engine.scheduler.max_batch_tokens

    def prefill(self, prompt: list[int]) -> float:
        """Return the seconds from a prompt to its next token."""
        return seconds(lambda: self._handle.run(self._admit([prompt], 1)))

    def decode(self, prompts: list[list[int]], steps: int, most_s: float = math.inf) -> list[float]:
        """Return the seconds of each decode step after these prompts; `most_s` as in `step_times`.

        Raises:
            InvalidRequest: a sequence reaches the length limit before all prompts are processed.
        """
        rows, longest = len(prompts), max(map(len, prompts))
        # Running sequences grow by one token in each step that processes other prompts.
        num_prefill_steps = math.ceil(sum(map(len, prompts)) / max(1, self._budget - rows)) + rows
        room = self.max_length - longest
        requests = self.add(prompts, max_tokens=min(num_prefill_steps + steps + WARM + 1, room))
        try:
            self._skip_prefill(requests)
            times = step_times(self._handle.step, steps, most_s)
            if any(request.result is not None for request in requests):
                raise InvalidRequest(
                    f"{rows} rows of {longest} tokens: some reach the limit of {self.max_length} "
                    "before the others have started; use fewer or shorter rows"
                )
            return times
        finally:
            for request in requests:
                self._handle.abort(request)

    def mixed(self, requests: list[tuple[list[int], int]]) -> tuple[int, float]:
        """Run all (prompt, number of new tokens) at once; return the total of new tokens and the seconds."""
        duration_s = seconds(
            lambda: self._handle.run(
                [request for ids, count in requests for request in self._admit([ids], count)]
            )
        )
        return sum(count for _, count in requests), duration_s

    def _skip_prefill(self, requests: list[Request]) -> None:
        """Process the prompts without forwards: decoding costs the same for any values of K and V.

        This takes several steps, in which earlier rows grow by some tokens. Rows continue with different
        ids, because equal ids would select the same experts.
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
        """Submit greedy requests, without running a step."""
        requests = self._admit(prompts, max_tokens)
        for request in requests:
            self._handle.submit(request)
        return requests

    def _admit(self, prompts: list[list[int]], max_tokens: int) -> list[Request]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return [self._handle.admission.admit(prompt, params) for prompt in prompts]


class Transformers:
    """transformers' forward, called as in `generate`, with a dynamic cache and, if supported, SDPA.

    Raises:
        ModelError: transformers can't open the model.
    """

    name = "transformers"

    def __init__(self, source: str, dtype: torch.dtype, **options: Any) -> None:
        transformers: Any = importlib.import_module("transformers")
        transformers.logging.set_verbosity_error()  # no warnings about weights
        transformers.logging.disable_progress_bar()
        try:
            self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                source, dtype=dtype, **options
            )
        except (OSError, ValueError, ImportError) as error:
            raise ModelError(f"transformers can't open it: {error}") from None
        self._vocab = self._model.config.get_text_config().vocab_size
        arguments = inspect.signature(self._model.forward).parameters
        self._cache_name = "cache" if "cache" in arguments else "past_key_values"  # before 5.24
        self.make_cache: Callable[[], Any] = lambda: transformers.DynamicCache(
            config=self._model.config
        )

    def prefill(self, prompt: list[int]) -> float:
        ids, cache = torch.tensor([prompt]), self.make_cache()
        return seconds(lambda: self._next(ids, cache))

    def decode(self, prompts: list[list[int]], steps: int, most_s: float = math.inf) -> list[float]:
        prompt, rows, cache = prompts[0], len(prompts), self.make_cache()
        self._next(torch.tensor([prompt]), cache)
        if rows > 1:
            try:
                cache.batch_repeat_interleave(rows)
            except AttributeError:  # caches of recurrent layers lack the method
                cache = self.make_cache()
                self._next(torch.tensor([prompt] * rows), cache)
        next_ids = torch.randint(self._vocab, (rows,))

        def step() -> None:
            nonlocal next_ids
            next_ids = self._next(next_ids[:, None], cache)

        return step_times(step, steps, most_s)

    def _next(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        return self.logits(ids, cache).argmax(-1)

    def logits(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        """Return the logits after the last id of each row."""
        with torch.inference_mode():
            out = self._model(ids, use_cache=True, logits_to_keep=1, **{self._cache_name: cache})
            logits: torch.Tensor = out.logits[:, -1]
        return logits
