"""The step loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from verbatim.batch import Draws
from verbatim.core import Delta, FinishReason, Request
from verbatim.engine.commit import commit, finish
from verbatim.engine.scheduler import Schedule, Scheduler
from verbatim.errors import RequestFailed
from verbatim.placement.runner import Runner

DRAW_FAILED = -1  # the sampler's id for a row from which nothing can be drawn


class Engine:
    """Runs requests to their end, one step at a time. Not safe for threads: its owner holds a lock."""

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.num_tokens = 0  # drawn since it was opened
        self._outboxes: dict[str, Callable[[Delta], None]] = {}

    def add(self, request: Request, deliver: Callable[[Delta], None]) -> None:
        """Take a request in; `deliver` gets its deltas, during the steps that make them."""
        self._outboxes[request.request_id] = deliver
        if request.max_tokens == 0 and request.params.prompt_logprobs is None:
            for sequence in request.sequences:  # nothing to compute: no forward
                self._send(request, finish(sequence, FinishReason.LENGTH))
            return
        self.scheduler.add(request.sequences)

    def step(self) -> bool:
        """Schedule, forward, sample, commit. False when there was nothing to do.

        An interrupt (Ctrl-C) in the middle leaves every request as it was: nothing counts before commit.
        """
        work = self.scheduler.schedule()
        if work is None:
            return False
        self._note_start(work)
        try:
            forward = self.runner.forward(work.batch)
            draws = self.runner.sample(forward, work.plan)
        except Exception as error:
            self._fail_all(work, error)  # whoever waits for one of these requests finds it there
            return True
        self._commit(work, draws)
        return True

    def _commit(self, work: Schedule, draws: Draws) -> None:
        """Let every sequence of the step grow, and hand out what is new."""
        row = 0
        for chunk in work.chunks:
            request = chunk.sequence.request
            end = row + chunk.num_prompt_targets + chunk.draws
            if DRAW_FAILED in draws.ids[row:end]:
                self.fail(request, RequestFailed(_nothing_to_draw(request)))
            elif not request.finished:
                added = commit(chunk, draws, row)
                if added is not None:
                    self.num_tokens += len(added.token_ids)
                    if added.finish_reason is not None:
                        self.scheduler.remove(chunk.sequence)
                    self._send(request, added)
            row = end

    def abort(self, request: Request) -> None:
        """End a request now, keeping what it has; harmless when it has ended or never came in."""
        if request.request_id not in self._outboxes:
            return
        for sequence in request.sequences:
            if not sequence.finished:
                self.scheduler.remove(sequence)
                self._send(request, finish(sequence, FinishReason.ABORT))

    def abort_all(self) -> None:
        """End everything that runs or waits."""
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            self.abort(sequence.request)

    def fail(self, request: Request, error: BaseException) -> None:
        """End a request with an error; the others go on."""
        request.error = error
        for sequence in request.sequences:
            if not sequence.finished:
                sequence.finish_reason = FinishReason.ERROR
                self.scheduler.remove(sequence)
        self._outboxes.pop(request.request_id, None)

    def stats(self) -> dict[str, Any]:
        pool = self.scheduler.pool
        return {
            "forwards": self.runner.num_forwards,
            "tokens": self.num_tokens,
            "preemptions": self.scheduler.num_preemptions,
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "blocks_used": pool.num_used,
            "blocks_free": pool.num_free,
        }

    def _send(self, request: Request, delta: Delta) -> None:
        deliver = self._outboxes[request.request_id]
        if request.finished:
            del self._outboxes[request.request_id]
        deliver(delta)

    def _note_start(self, work: Schedule) -> None:
        now = time.monotonic()
        for chunk in work.chunks:
            request = chunk.sequence.request
            if request.metrics.queue_s == 0.0:
                request.metrics.queue_s = now - request.arrival

    def _fail_all(self, work: Schedule, error: Exception) -> None:
        """A forward that raises takes the requests of its batch with it, and frees their blocks."""
        for chunk in work.chunks:
            if not chunk.sequence.request.finished:
                self.fail(chunk.sequence.request, error)


def _nothing_to_draw(request: Request) -> str:
    return (
        f"request {request.request_id}: no token can be drawn; the model's logits are not numbers, or "
        "the request's bans and filters leave nothing"
    )
