"""`DynamicInferenceContext`: the requests of a dynamic batch and the output of each step."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verbatim.checks import integer
from verbatim.compat.megatron.request import DynamicInferenceRequest, InferenceRequest
from verbatim.compat.megatron.translation import Translation
from verbatim.core import Delta, Request
from verbatim.engine.handle import EngineHandle
from verbatim.errors import InvalidRequest, NotSupported
from verbatim.tensors import draw_seed

StopCallback = Callable[[list[int]], Iterable[int]]


class _Token(NamedTuple):
    request: InferenceRequest
    id: int
    logprob: float
    routing: Tensor | None = None  # experts of the rows computed for it, `[rows, layers, k]`


@dataclass(slots=True, eq=False)
class _RunningRequest:
    """A running request and its tokens, of which the first `len(ids)` are reported."""

    request: InferenceRequest
    admitted: Request
    number: int  # its id
    row: int  # counted from 0 in each batch, in order of arrival
    tokens: list[_Token] = field(default_factory=list)
    # Ids and log-probs whose experts were lost with a stage: they follow with those of the next token.
    held: list[tuple[int, float]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)  # of the reported tokens
    preemptions: int = 0  # reported ones
    ended: bool = False  # no more tokens follow

    @property
    def next(self) -> _Token | None:
        """The first token that is not reported."""
        return self.tokens[len(self.ids)] if len(self.ids) < len(self.tokens) else None


class DynamicInferenceContext:
    """A dynamic batch. Requests may be added from any thread, also during a step."""

    def __init__(self, translation: Translation) -> None:
        self._translation = translation
        self._entries: dict[int, _RunningRequest] = {}
        # Entries with new output, so that the cost of a step does not grow with waiting requests.
        # Other threads add to both dicts during iteration, so loops go over copies.
        self._fresh: dict[_RunningRequest, None] = {}
        self._adding = threading.RLock()  # re-entrant, for signal handlers
        self._preemptions = 0  # the engine's count at the last check for paused requests
        self._seed = self._row = 0

    @property
    def requests(self) -> dict[int, InferenceRequest]:
        """Requests not yet reported as finished, by id."""
        return {number: entry.request for number, entry in list(self._entries.items())}

    @property
    def max_sequence_length(self) -> int:
        """Maximum length of prompt and completion together, in tokens."""
        return self._translation.max_sequence_length

    @property
    def total_request_count(self) -> int:
        """Number of requests not yet reported as finished."""
        return len(self._entries)

    def is_dynamic_batching(self) -> bool:
        """Return True."""
        return True

    def has_unfinished_requests(self) -> bool:
        """Return whether any request has not been reported as finished."""
        return bool(self._entries)

    def add_request(self, req: InferenceRequest, prefill_chunk_length: int | None = None) -> None:
        """Add a request, to start at the next step; its fields are updated as it runs.

        Requests without a seed share one number from torch's default generator, drawn when one is added
        to an empty context; each has its own sample index, counted from 0.

        Args:
            req: its output fields are filled in.
            prefill_chunk_length: refused; `LLM(max_batch_tokens=)` sets the chunk size.

        Raises:
            InvalidRequest: an invalid field, or an id in use.
        """
        if prefill_chunk_length is not None:
            raise NotSupported(
                f"prefill_chunk_length={prefill_chunk_length}: prompts are cut where "
                "LLM(max_batch_tokens=...) says; leave it at None"
            )
        with self._adding:
            self._add(req)

    def _add(self, req: InferenceRequest) -> None:
        integer("request_id", getattr(req, "request_id", None), -(2**63), 2**63 - 1)
        if req.request_id in self._entries:
            raise InvalidRequest(f"request_id={req.request_id} is in use")
        if not self._entries:
            self._seed, self._row = draw_seed(), 0
        admitted = self._translation.admit(req, self._row, self._seed)
        entry = _RunningRequest(req, admitted, req.request_id, self._row)
        old_status = req.status
        # Register everything before submitting: another thread's step may deliver tokens at once.
        self._translation.begin(req, admitted)
        if isinstance(req, DynamicInferenceRequest):
            req.generated_tokens = entry.ids
        self._entries[req.request_id] = entry
        try:
            self._handle.submit(admitted, partial(self._take, entry), partial(self._end, entry))
        except BaseException:
            self._entries.pop(req.request_id, None)
            req.status = old_status
            raise
        self._row += 1

    def _take(self, entry: _RunningRequest, delta: Delta) -> None:
        """Keep the tokens of a step; called in the thread that runs it."""
        entry.held += zip(delta.token_ids, delta.logprobs, strict=True)
        routing: Iterable[Tensor | None] | None = repeat(None)
        if entry.admitted.params.record_routing and entry.held:
            routing = self._read_routing(entry, len(entry.held))
        if routing is None:
            return
        told, entry.held = entry.held, []
        entry.tokens += [
            _Token(entry.request, *token, rows) for token, rows in zip(told, routing, strict=False)
        ]
        self._mark_fresh(entry)

    def _read_routing(self, entry: _RunningRequest, num_new: int) -> Iterable[Tensor | None] | None:
        """Return the experts of the rows that were computed for each new token; None if they are lost."""
        sequence = entry.admitted.sequences[0]
        # The last token has not been computed.
        end = sequence.num_tokens - 1
        begin = end - num_new if entry.tokens else 0
        rows: Tensor
        if sequence.routing is not None:  # it has ended, and its blocks are freed
            rows = sequence.routing[begin:end]
        else:
            runner = self._handle.runner
            skipped, offset = divmod(begin, runner.block_size)
            blocks = sequence.blocks[skipped:]
            rows = runner.record("routing", blocks, end - begin + offset)[offset:]
            if len(rows) < end - begin:
                return None
        if len(rows) < end - begin:  # it ended early, while they were lost
            return chain([rows], repeat(None))
        first = len(rows) - num_new + 1
        return [rows[:first], *rows[first:].split(1)]

    def _end(self, entry: _RunningRequest) -> None:
        entry.ended = True
        self._mark_fresh(entry)

    def _mark_fresh(self, entry: _RunningRequest) -> None:
        if self._runs(entry):
            self._fresh[entry] = None

    def _runs(self, entry: _RunningRequest) -> bool:
        return self._entries.get(entry.number) is entry

    def reset(self) -> None:
        """End all requests, and keep their output so far."""
        for number in list(self._entries):
            self._stop(number)

    @property
    def _handle(self) -> EngineHandle:
        return self._translation.llm.engine

    def step(self) -> None:
        """Make one step of the engine, unless another thread's step has already produced output.

        If no step is possible, as the engine is paused, wait until it is resumed; a second at most, so that a
        loop over steps does not spin.
        """
        if self._entries and not any(entry.next for entry in list(self._fresh)):
            self._handle.step_or_wait(lambda: bool(self._fresh))

    def collect(self, stop: StopCallback | None) -> dict[str, Any] | None:
        """Return the output of the step, None without requests. A finished request is reported once."""
        if not self._entries:
            return None
        fresh = self._in_order()
        rows = [(entry, token) for entry in fresh if (token := entry.next)]
        for entry, token in rows:
            entry.ids.append(token.id)
        active = [entry.number for entry, _ in rows]
        try:
            stopped = set() if stop is None else set(stop(list(active)) or ())
        except BaseException:  # these tokens were not reported: the next call reports them
            for entry, _ in rows:
                entry.ids.pop()
            raise
        finished = []
        for entry in fresh:
            self._fresh.pop(entry, None)
            if entry.next:
                self._fresh[entry] = None
            elif entry.ended and self._runs(entry):
                finished.append(entry.number)
        finished += [n for n in active if n in stopped and n not in finished]
        step = _step([token for _, token in rows], self._newly_paused(), finished)
        for number in finished:
            self._stop(number)
        return step

    def peek(self) -> dict[str, Any] | None:
        """Return what the next step would sample, without changing any request."""
        if not self._entries:
            return None
        # Output of another thread's step comes first, as in `step`.
        drawn = self._unreported()
        if not drawn:
            requests = {entry.admitted: entry.request for entry in list(self._entries.values())}
            drawn = [
                _Token(requests[request], token, logprob)
                for request, token, logprob in self._handle.peek()
                if request in requests
            ]
        return _step(drawn)

    def routing(self) -> dict[int, Tensor] | None:
        """Return the experts that the next `collect` will report, by request; None without any."""
        return _routing(self._unreported())

    def _in_order(self) -> list[_RunningRequest]:
        """Return the entries with new output, in order of arrival."""
        return sorted(filter(self._runs, list(self._fresh)), key=lambda entry: entry.row)

    def _unreported(self) -> list[_Token]:
        """Return the next token to report of each request that has one."""
        return [token for entry in self._in_order() if (token := entry.next)]

    def _newly_paused(self) -> list[int]:
        """Return the ids of requests preempted since the last call and still waiting."""
        before, self._preemptions = self._preemptions, self._handle.scheduler.num_preemptions
        if before == self._preemptions:
            return []  # the common case
        paused = []
        for number, entry in list(self._entries.items()):
            count = entry.admitted.metrics.preemptions
            if count > entry.preemptions and not entry.admitted.finished:
                paused.append(number)
            entry.preemptions = count
        return paused

    def _stop(self, number: int) -> None:
        """Remove a request, ending it if it runs, and fill in its output."""
        entry = self._entries.pop(number)
        self._fresh.pop(entry, None)
        request, admitted = entry.request, entry.admitted
        if admitted.error is not None or (entry.ended and not entry.next and admitted.result):
            self._translation.settle(request, admitted)
        else:  # ended by the caller: only reported tokens count
            self._handle.abort(admitted)
            self._translation.settle(request, admitted, len(entry.ids))
            reported = (token.routing for token in entry.tokens[: len(entry.ids)])
            if routing := [rows for rows in reported if rows is not None]:
                request.routing_indices = torch.cat(routing)


def _step(
    tokens: list[_Token], paused: Iterable[int] = (), finished: Iterable[int] = ()
) -> dict[str, Any]:
    """Return the documented result of a step."""
    params = [token.request.sampling_params for token in tokens]
    wants = [p is not None and p.return_log_probs for p in params]
    log_probs = [t.logprob if want else math.nan for want, t in zip(wants, tokens, strict=True)]
    return {
        "active_request_ids": _ids(token.request.request_id for token in tokens),
        "newly_paused_request_ids": _ids(paused),
        "finished_request_ids": _ids(finished),
        "sample": _ids(token.id for token in tokens),
        "log_probs": torch.tensor(log_probs, dtype=torch.float32) if any(wants) else None,
        "routing_indices_per_request": _routing(tokens),
        "cuda_graph_request_count": None,  # there are no CUDA graphs on a CPU
    }


def _routing(tokens: Iterable[_Token]) -> dict[int, Tensor] | None:
    by_id = {t.request.request_id: t.routing for t in tokens if t.routing is not None}
    return by_id or None


def _ids(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64)
