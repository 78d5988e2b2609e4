"""`DynamicInferenceContext`: the requests of a dynamic batch, and the output of each step."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verbatim.api.tensors import draw_seed
from verbatim.common.checks import integer
from verbatim.compat.megatron.request import DynamicInferenceRequest, InferenceRequest
from verbatim.compat.megatron.translation import Translation
from verbatim.core import Delta, Request
from verbatim.engine.handle import EngineHandle
from verbatim.errors import InvalidRequest, NotSupported

StopCallback = Callable[[list[int]], Iterable[int]]


class _Token(NamedTuple):
    request: InferenceRequest
    id: int
    logprob: float
    routing: Tensor | None = None  # experts of the rows computed for it, `[rows, layers, k]`


@dataclass(slots=True, eq=False)
class _RunningRequest:
    """A running request, of which the first `len(ids)` tokens are reported."""

    request: InferenceRequest
    admitted: Request
    number: int  # its request id
    row: int  # index by arrival in its batch
    # Of each token, if recorded. Those lost with a stage are recomputed, and delay their tokens.
    routing: list[Tensor | None] | None
    ids: list[int] = field(default_factory=list)  # of the reported tokens
    preemptions: int = 0  # number of preemptions reported
    ended: bool = False  # no more tokens follow

    @property
    def next(self) -> _Token | None:
        """The first token that is not reported."""
        index, routing = len(self.ids), self.routing
        for sequence in self.admitted.sequences:  # one, or none before the first step
            if index < (sequence.num_sent if routing is None else len(routing)):
                logprob = sequence.tokens[index].logprob
                experts = None if routing is None else routing[index]
                return _Token(self.request, sequence.output_ids[index], logprob, experts)
        return None


class DynamicInferenceContext:
    """A dynamic batch. Requests can be added from any thread, even during a step."""

    def __init__(self, translation: Translation) -> None:
        self._translation = translation
        self._entries: dict[int, _RunningRequest] = {}
        # Entries with new output, so that the cost of a step does not depend on waiting requests.
        # Other threads add to both dicts during iteration, so loops go over copies.
        self._fresh: dict[_RunningRequest, None] = {}
        self._adding = threading.RLock()  # re-entrant, for signal handlers
        self._preemptions = 0  # the engine's count at the last check for paused requests
        self._seed = self._row = 0

    @property
    def requests(self) -> dict[int, InferenceRequest]:
        """Requests not yet reported as finished, by id."""
        return {entry.number: entry.request for entry in list(self._entries.values())}

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

        Requests without a seed share a seed from torch's default generator, drawn when a request is added
        to an empty context; each has its own sample index, counted from 0.

        Raises:
            InvalidRequest: an invalid field, or an id in use.
            NotSupported: `prefill_chunk_length`; `LLM(max_batch_tokens=)` sets the chunk size.
        """
        if prefill_chunk_length is not None:
            raise NotSupported(
                f"prefill_chunk_length={prefill_chunk_length}: LLM(max_batch_tokens=...) sets the "
                "length of chunks; leave it at None"
            )
        number = integer("request_id", getattr(req, "request_id", None), -(2**63), 2**63 - 1)
        with self._adding:
            if number in self._entries:
                raise InvalidRequest(f"request_id={number} is in use")
            if not self._entries:
                self._seed, self._row = draw_seed(), 0
            admitted = self._translation.admit(req, self._row, self._seed)
            routing: Any = [] if admitted.params.record_routing else None
            entry = _RunningRequest(req, admitted, number, self._row, routing)
            old_status = req.status
            # Everything is registered before the submit: another thread's step may deliver tokens at once.
            self._translation.begin(req, admitted)
            if isinstance(req, DynamicInferenceRequest):
                req.generated_tokens = entry.ids
            self._entries[number] = entry
            try:
                self._handle.submit(admitted, partial(self._take, entry), partial(self._end, entry))
            except BaseException:
                self._entries.pop(number, None)
                req.status = old_status
                raise
            self._row += 1

    def _take(self, entry: _RunningRequest, _: Delta) -> None:
        """Note the tokens of a step; called in the thread that runs the step."""
        if entry.routing is not None:
            num_new = entry.admitted.sequences[0].num_sent - len(entry.routing)
            entry.routing += self._read_routing(entry, num_new) if num_new else []
        self._mark_fresh(entry)

    def _read_routing(self, entry: _RunningRequest, num_new: int) -> list[Tensor | None]:
        """Return the experts of the rows computed for each new token; [] if they will be recomputed."""
        sequence = entry.admitted.sequences[0]
        # The last token has not been computed.
        end = sequence.num_tokens - 1
        begin = end - num_new if entry.routing else 0
        rows: Tensor
        if sequence.routing is not None:  # the sequence has ended, and its blocks are freed
            rows = sequence.routing[begin:end]
        else:
            runner = self._handle.runner
            skipped, offset = divmod(begin, runner.block_size)
            blocks = sequence.blocks[skipped:]
            rows = runner.record("routing", blocks, end - begin + offset)[offset:]
        if len(rows) < end - begin:  # lost; those of a sequence that has ended early stay so
            return [] if sequence.routing is None else [rows, *[None] * (num_new - 1)]
        first = len(rows) - num_new + 1
        return [rows[:first], *rows[first:].split(1)][:num_new]

    def _end(self, entry: _RunningRequest) -> None:
        entry.ended = True
        self._mark_fresh(entry)

    def _mark_fresh(self, entry: _RunningRequest) -> None:
        if self._entries.get(entry.number) is entry:  # else it was stopped
            self._fresh[entry] = None

    def reset(self) -> None:
        """End all requests; they keep their output so far."""
        for number in list(self._entries):
            self._stop(number)

    @property
    def _handle(self) -> EngineHandle:
        return self._translation.llm.engine

    def step(self) -> None:
        """Run one step of the engine, unless another thread's step has already produced output.

        If no step is possible, for example while the engine is paused, wait for at most a second, so that a
        loop over steps does not spin.
        """
        if self._entries and not any(entry.next for entry in list(self._fresh)):
            self._handle.step_or_wait(lambda: bool(self._fresh))

    def collect(self, stop: StopCallback | None) -> dict[str, Any] | None:
        """Return the output of a step; None without requests. A finished request is reported once."""
        if not self._entries:
            return None
        fresh = self._in_order()
        # Read first: no tokens come after the end.
        ended = {entry for entry in fresh if entry.ended}
        rows = {entry: token for entry in fresh if (token := entry.next)}
        for entry, token in rows.items():
            entry.ids.append(token.id)
        active = [entry.number for entry in rows]
        try:
            stopped = set() if stop is None else set(stop(list(active)) or ())
        except BaseException:  # nothing was reported: the next call reports these tokens
            for entry in rows:
                entry.ids.pop()
            raise
        finished = []
        for entry in fresh:
            self._fresh.pop(entry, None)
            if entry.next:
                self._fresh[entry] = None
            elif entry in ended and self._entries.get(entry.number) is entry:
                finished.append(entry.number)
        finished += [n for n in active if n in stopped and n not in finished]
        step = _step(rows.values(), self._newly_paused(), finished)
        for number in finished:
            self._stop(number)
        return step

    def peek(self) -> dict[str, Any] | None:
        """Return the output of the next step without committing it; no request changes."""
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
        """Return the experts that the next `collect` will report, by request; None if there are none."""
        return _routing(self._unreported())

    def _in_order(self) -> list[_RunningRequest]:
        """Return the entries with new output, in order of arrival."""
        fresh = [e for e in list(self._fresh) if self._entries.get(e.number) is e]
        return sorted(fresh, key=lambda entry: entry.row)

    def _unreported(self) -> list[_Token]:
        """Return the next token to report of each request that has one."""
        return [token for entry in self._in_order() if (token := entry.next)]

    def _newly_paused(self) -> list[int]:
        """Return the ids of the requests that were preempted since the last call and still wait."""
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
        """Remove a request, end it if it runs, and fill in its output."""
        entry = self._entries.pop(number)
        self._fresh.pop(entry, None)
        request, admitted = entry.request, entry.admitted
        if admitted.error is not None or (entry.ended and not entry.next and admitted.result):
            self._translation.settle(request, admitted)
        else:  # ended by the caller: only the reported tokens are kept
            self._handle.abort(admitted)
            self._translation.settle(request, admitted, len(entry.ids))
            reported = (entry.routing or [])[: len(entry.ids)]
            if routing := [rows for rows in reported if rows is not None]:
                request.routing_indices = torch.cat(routing)


def _step(
    tokens: Iterable[_Token], paused: Iterable[int] = (), finished: Iterable[int] = ()
) -> dict[str, Any]:
    """Return the result of a step, as documented in `async_generate_output_tokens_dynamic_batch`."""
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
