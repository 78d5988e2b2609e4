"""`DynamicInferenceContext`: the requests that are stepped together, and what each step brings."""

from __future__ import annotations

import threading
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
from verbatim.engine.calls import ThreadWaiter
from verbatim.engine.handle import EngineHandle
from verbatim.errors import InvalidRequest, NotSupported

StopCallback = Callable[[list[int]], Iterable[int]]
_PATIENCE_S = 0.05  # of a step that can do nothing, so that a loop over steps does not spin


@dataclass(slots=True, eq=False)
class _Entry:
    """One request on its way: what the engine made, and how much of that was handed on.

    `take` and `end` are called by whoever makes a step, in any thread.
    """

    number: int
    request: InferenceRequest
    admitted: Request
    place: int  # in the order in which they were added
    tell: Callable[[_Entry], None]  # that there is something new
    news: deque[tuple[int, float, TopLogprobs]] = field(default_factory=deque)
    ids: list[int] = field(default_factory=list)  # handed on
    logprobs: list[float] = field(default_factory=list)
    tops: list[TopLogprobs] = field(default_factory=list)
    preemptions: int = 0  # that were told of
    ended: bool = False  # and all its news is in

    def end(self) -> None:
        self.ended = True
        self.tell(self)

    def take(self, delta: Delta) -> None:
        tops: list[TopLogprobs] = delta.top_logprobs or [[] for _ in delta.token_ids]
        self.news.extend(zip(delta.token_ids, delta.logprobs, tops, strict=True))
        self.tell(self)

    def hand_on(self) -> None:
        """The next token."""
        token, logprob, top = self.news.popleft()
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.tops.append(top)

    def take_back(self) -> None:
        """The token that was handed on last is news again."""
        self.news.appendleft((self.ids.pop(), self.logprobs.pop(), self.tops.pop()))


class DynamicInferenceContext:
    """Where requests enter a dynamic batch; from any thread, also while a step is made."""

    def __init__(self, translation: Translation) -> None:
        self._translation = translation
        self._entries: dict[int, _Entry] = {}
        # Those that something happened to: a step must not cost more the more requests wait. Others add
        # to both while they are looked at, so loops go over copies.
        self._fresh: dict[_Entry, None] = {}
        self._waiter = ThreadWaiter()
        self._adding = threading.RLock()  # re-entrant, for signal handlers
        self._preemptions = 0  # of the engine, when it was last looked for paused requests
        self._seed = 0
        self._row = 0
        self._place = 0

    @property
    def requests(self) -> dict[int, InferenceRequest]:
        """Those that have not been reported as finished, by their id."""
        return {number: entry.request for number, entry in list(self._entries.items())}

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
        with self._adding:
            self._add(req)

    def _add(self, req: InferenceRequest) -> None:
        if req.request_id in self._entries:
            raise InvalidRequest(f"request_id={req.request_id} is in use")
        if not self._entries:
            self._seed, self._row = draw_seed(), 0
        admitted = self._translation.admit(req, self._row, self._seed)
        entry = _Entry(req.request_id, req, admitted, self._place, self._note)
        before = req.status
        # All is in place before it goes in: another thread's step may bring its tokens at once.
        self._translation.begin(req, admitted)
        if isinstance(req, DynamicInferenceRequest):
            req.generated_tokens = entry.ids
        self._entries[req.request_id] = entry
        try:
            self._handle.submit(admitted, entry.take, entry.end)
        except BaseException:
            self._entries.pop(req.request_id, None)
            req.status = before
            raise
        self._row += 1
        self._place += 1
        self._waiter.wake()

    def _note(self, entry: _Entry) -> None:
        if self._entries.get(entry.number) is entry:
            self._fresh[entry] = None
            self._waiter.wake()

    def reset(self) -> None:
        """End everything that is in here; what was generated so far is written down."""
        for number in list(self._entries):
            self._stop(number)

    @property
    def _handle(self) -> EngineHandle:
        return self._translation.llm.engine

    def step(self) -> None:
        """One step of the engine, unless somebody else's step brought news already.

        Where none can be made, as while the engine is paused, it waits a little for news.
        """
        if not self._entries or any(entry.news for entry in list(self._fresh)):
            return
        self._waiter.wait(0)  # forget what it was set for before
        if not self._handle.step() and not self._fresh:
            self._waiter.wait(_PATIENCE_S)

    def collect(self, stop: StopCallback | None) -> dict[str, Any] | None:
        """What the step brought; None where there is no request. Each finished one is named once."""
        if not self._entries:
            return None
        fresh = self._look()
        rows = [entry for entry in fresh if entry.news]
        for entry in rows:
            entry.hand_on()
        active = [entry.number for entry in rows]
        try:
            stopped = set() if stop is None else set(stop(list(active)) or ())
        except BaseException:  # nothing was said of these tokens: they come with the next call
            for entry in rows:
                entry.take_back()
            self._fresh.update(dict.fromkeys(fresh))
            raise
        self._fresh.update(dict.fromkeys(e for e in fresh if e.news or e.ended))
        finished = [e.number for e in fresh if e.ended and not e.news]
        finished += [n for n in active if n in stopped and n not in finished]
        told = self._newly_paused()
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
        drawn = [(e.request, *e.news[0][:2]) for e in self._in_order() if e.news]
        if not drawn:
            mine = {entry.admitted: entry.request for entry in list(self._entries.values())}
            seen = self._handle.peek()
            drawn = [(mine[r], token, logprob) for r, token, logprob in seen if r in mine]
        return _step(
            [request.request_id for request, _, _ in drawn],
            [token for _, token, _ in drawn],
            self._log_probs((request, logprob) for request, _, logprob in drawn),
        )

    def _in_order(self) -> list[_Entry]:
        """Those that have news, as they were added."""
        return sorted(self._fresh, key=lambda entry: entry.place)

    def _look(self) -> list[_Entry]:
        """Take out those that have news; of what comes from now on, the next call is told."""
        fresh = self._in_order()
        for entry in fresh:
            self._fresh.pop(entry, None)
        return [e for e in fresh if self._entries.get(e.number) is e]

    def _newly_paused(self) -> list[int]:
        """Requests that lost their blocks since they were last looked at, and wait."""
        before, self._preemptions = self._preemptions, self._handle.scheduler.num_preemptions
        if before == self._preemptions:
            return []  # as after most steps
        paused = []
        for number, entry in list(self._entries.items()):
            count = entry.admitted.metrics.preemptions
            if count > entry.preemptions and not entry.admitted.finished:
                paused.append(number)
            entry.preemptions = count
        return paused

    def _stop(self, number: int) -> None:
        """Take a request out, as it is, and write down what became of it."""
        entry = self._entries.pop(number)
        self._fresh.pop(entry, None)
        request, admitted = entry.request, entry.admitted
        if admitted.error is not None:
            request.status, request.error = Status.FAILED, admitted.error
        elif entry.ended and not entry.news and admitted.result is not None:
            self._translation.fill(request, admitted, admitted.result.outputs[0])
        else:
            self._handle.abort(admitted)
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
            weight_versions=entry.admitted.sequences[0].weight_versions[: len(entry.ids)],
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
