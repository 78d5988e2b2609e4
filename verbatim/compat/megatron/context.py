"""`DynamicInferenceContext`: the requests that are stepped together, and what each step brings."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from verbatim.compat.megatron.request import DynamicInferenceRequest, InferenceRequest, Status
from verbatim.compat.megatron.sampling import draw_seed
from verbatim.compat.megatron.translation import Translation
from verbatim.core import Completion, Delta, FinishReason, Request, TopLogprobs
from verbatim.engine.driver import Driver
from verbatim.engine.dummy import peek
from verbatim.errors import InvalidRequest, NotSupported

StopCallback = Callable[[list[int]], Iterable[int]]


@dataclass(slots=True, eq=False)
class _Entry:
    """One request on its way: what the engine made, and how much of that was handed on."""

    request: InferenceRequest
    admitted: Request
    news: deque[tuple[int, float, TopLogprobs]] = field(default_factory=deque)
    ids: list[int] = field(default_factory=list)  # handed on
    logprobs: list[float] = field(default_factory=list)
    tops: list[TopLogprobs] = field(default_factory=list)
    preemptions: int = 0  # that were told of
    ended: bool = False  # and all its news is in

    def end(self) -> None:
        self.ended = True

    def take(self, delta: Delta) -> None:
        tops: list[TopLogprobs] = delta.top_logprobs or [[] for _ in delta.token_ids]
        self.news.extend(zip(delta.token_ids, delta.logprobs, tops, strict=True))

    def hand_on(self) -> None:
        """The next token."""
        token, logprob, top = self.news.popleft()
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.tops.append(top)


class DynamicInferenceContext:
    """Where requests enter a dynamic batch."""

    def __init__(self, translation: Translation) -> None:
        self._translation = translation
        self._entries: dict[int, _Entry] = {}
        self._seed = 0
        self._row = 0

    @property
    def requests(self) -> dict[int, InferenceRequest]:
        """Those that have not been reported as finished, by their id."""
        return {number: entry.request for number, entry in self._entries.items()}

    @property
    def max_sequence_length(self) -> int:
        """Prompt and completion together, in tokens."""
        return self._translation.max_sequence_length

    @property
    def total_request_count(self) -> int:
        """Requests that have not been reported as finished."""
        return len(self._entries)

    def is_dynamic_batching(self) -> bool:
        """Always."""
        return True

    def has_unfinished_requests(self) -> bool:
        """Is there anything to step for?"""
        return bool(self._entries)

    def add_request(self, req: InferenceRequest, prefill_chunk_length: int | None = None) -> None:
        """Let a request in at the next step; its fields are filled in as it goes.

        Requests without a seed that are added to an empty context and after share one number from torch's
        default generator; each draws with its own sample index, counted from 0.

        Args:
            req: what became of it is written there.
            prefill_chunk_length: refused; the engine cuts prompts at `LLM(max_batch_tokens=)`.

        Raises:
            InvalidRequest: something in it can't be served, or its id is in use.
        """
        if prefill_chunk_length is not None:
            raise NotSupported(
                f"prefill_chunk_length={prefill_chunk_length}: prompts are cut where "
                "LLM(max_batch_tokens=...) says; leave it at None"
            )
        if req.request_id in self._entries:
            raise InvalidRequest(f"request_id={req.request_id} is in use")
        if not self._entries:
            self._seed, self._row = draw_seed(), 0
        admitted = self._translation.admit(req, self._row, self._seed)
        entry = _Entry(req, admitted)
        self._driver.submit(admitted, entry.take, entry.end)
        self._translation.begin(req, admitted)
        self._entries[req.request_id] = entry
        self._row += 1
        if isinstance(req, DynamicInferenceRequest):
            req.generated_tokens = entry.ids

    def reset(self) -> None:
        """End everything that is in here; what was generated so far is written down."""
        for number in list(self._entries):
            self._stop(number)

    @property
    def _driver(self) -> Driver:
        return self._translation.llm._driver

    def step(self) -> None:
        """One step of the engine, unless somebody else's step brought news already."""
        if self._entries and not any(entry.news for entry in self._entries.values()):
            self._driver.step()

    def collect(self, stop: StopCallback | None) -> dict[str, Any] | None:
        """What the step brought; None where there is no request. Each finished one is named once."""
        if not self._entries:
            return None
        active = [number for number, entry in self._entries.items() if entry.news]
        for number in active:
            self._entries[number].hand_on()
        stopped = set() if stop is None else set(stop(list(active)) or ())
        finished = [number for number in self._entries if self._has_ended(number)]
        finished += [n for n in active if n in stopped and n not in finished]
        told = self._newly_paused()
        rows = [self._entries[number] for number in active]
        step = _step(
            active,
            [entry.ids[-1] for entry in rows],
            self._log_probs((entry.request, entry.logprobs[-1]) for entry in rows),
        )
        for number in finished:
            self._stop(number)
        return {
            **step,
            "newly_paused_request_ids": _ids(told),
            "finished_request_ids": _ids(finished),
        }

    def peek(self) -> dict[str, Any] | None:
        """What the next step would sample; nothing is written down."""
        if not self._entries:
            return None
        # What somebody else's step has brought already comes first, as it does in `step`.
        drawn = [(e.request, *e.news[0][:2]) for e in self._entries.values() if e.news]
        if not drawn:
            mine = {entry.admitted: entry.request for entry in self._entries.values()}
            seen = peek(self._driver)
            drawn = [(mine[r], token, logprob) for r, token, logprob in seen if r in mine]
        return _step(
            [request.request_id for request, _, _ in drawn],
            [token for _, token, _ in drawn],
            self._log_probs((request, logprob) for request, _, logprob in drawn),
        )

    def _has_ended(self, number: int) -> bool:
        entry = self._entries[number]
        return entry.ended and not entry.news

    def _newly_paused(self) -> list[int]:
        """Requests that lost their blocks since they were last looked at, and wait."""
        paused = []
        for number, entry in self._entries.items():
            count = entry.admitted.metrics.preemptions
            if count > entry.preemptions and not entry.admitted.finished:
                paused.append(number)
            entry.preemptions = count
        return paused

    def _stop(self, number: int) -> None:
        """Take a request out, as it is, and write down what became of it."""
        entry = self._entries.pop(number)
        request, admitted = entry.request, entry.admitted
        if admitted.error is not None:
            request.status, request.error = Status.FAILED, admitted.error
        elif entry.ended and not entry.news and admitted.result is not None:
            self._translation.fill(request, admitted, admitted.result.outputs[0])
        else:
            self._driver.abort(admitted)
            self._translation.fill(request, admitted, self._cut(entry))

    def _cut(self, entry: _Entry) -> Completion:
        """A completion that its caller has ended, of what was handed on."""
        text, params = "", entry.request.sampling_params
        if self._translation.tokenizer is not None and params is not None:
            keep_end = params.detokenize_stop_sequence
            text = self._translation.detokenize(entry.ids, remove_EOD=not keep_end)
        return Completion(
            index=0,
            sample_index=entry.admitted.first_sample,
            text=text,
            token_ids=entry.ids,
            logprobs=entry.logprobs,
            sampled_logprobs=None,
            top_logprobs=entry.tops,
            finish_reason=FinishReason.ABORT,
            stop_reason=None,
            seed=entry.admitted.seed,
        )

    def _log_probs(self, rows: Iterable[tuple[InferenceRequest, float]]) -> Tensor | None:
        """One a row, NaN where the request did not ask; None where none did."""
        each = [
            (
                request.sampling_params is not None and request.sampling_params.return_log_probs,
                value,
            )
            for request, value in rows
        ]
        if not any(asked for asked, _ in each):
            return None
        values = [value if asked else float("nan") for asked, value in each]
        return torch.tensor(values, dtype=torch.float32)


def _step(active: list[int], sample: list[int], log_probs: Tensor | None) -> dict[str, Any]:
    return {
        "active_request_ids": _ids(active),
        "newly_paused_request_ids": _ids([]),
        "finished_request_ids": _ids([]),
        "sample": _ids(sample),
        "log_probs": log_probs,
        "cuda_graph_request_count": None,  # there are no CUDA graphs on a CPU
    }


def _ids(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)
