"""The step loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, wait
from typing import Any

from verbatim.core import FinishReason, Request, Sequence
from verbatim.engine.adapters import LoadedAdapters
from verbatim.engine.calls import as_exception
from verbatim.engine.commit import commit, delta, finish
from verbatim.engine.drafting import Drafting
from verbatim.engine.draw import draw
from verbatim.engine.scheduler import Scheduler
from verbatim.engine.work import Schedule
from verbatim.errors import InvalidRequest, QueueFull, StageFailed, TierFailed, VerbatimError
from verbatim.kv.prefix_folder import PrefixFolder
from verbatim.protocols import CacheLost, Forward, Runner
from verbatim.shield import Shield

# Longest wait of a step if all sequences wait for masks; deadlines and messages are checked after it.
_IDLE_WAIT_S = 5e-3


class Engine:
    """Runs requests to completion, one step at a time. Not thread-safe: the caller holds the engine lock.

    Args:
        max_waiting: maximum number of waiting requests; None sets no limit.
        drafting: speculative decoding; None disables it.
        live: the model belongs to the caller, whose code may change the weights at any time. A detected
            change counts as an update. Since some can't be detected, the prefix cache is cleared
            whenever the engine was idle.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        *,
        max_waiting: int | None = None,
        drafting: Drafting | None = None,
        live: bool = False,
    ) -> None:
        self.runner = runner
        self.active: dict[Request, None] = {}  # the unfinished requests, in order of arrival
        self.adapters = LoadedAdapters(runner, self.active)
        self.drafting = drafting
        self.scheduler, self.sessions = scheduler, scheduler.sessions
        self.max_waiting = max_waiting
        self.live = live
        self.num_tokens = 0  # generated since the engine was opened
        self.weight_version = 0  # set by each update of the weights
        # Called when a request has a result or an error, after its last delta.
        self.on_end: Callable[[Request], object] = lambda request: None
        self.next_deadline = math.inf  # no active request has an earlier one
        self.shield = Shield()  # of the thread that runs the step
        self._stamp = runner.stamp() if live else None

    @property
    def prefix_folder(self) -> PrefixFolder | None:
        """The files of cached prefixes; None: they are kept in memory only."""
        return self.scheduler.prefixes.folder

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def check_queue(self, requests: Iterable[Request]) -> None:
        """Raise QueueFull if the requests that are not added yet exceed the queue limit."""
        if self.max_waiting is None:
            return
        count = sum(not (request in self.active or request.finished) for request in requests)
        # Without those that were preempted, or forked from a running one.
        waiting = sum(not s.request.was_scheduled for s in self.scheduler.waiting)
        running = len(self.scheduler.running)
        free_slots = max(0, self.scheduler.max_sequences - running)
        if waiting + count > self.max_waiting + free_slots:
            raise QueueFull(
                f"{waiting} requests wait and {running} run; {count} more exceed "
                f"max_waiting={self.max_waiting} and max_sequences={self.scheduler.max_sequences}"
            )

    def add(self, request: Request) -> None:
        """Add a request."""
        if self.live and not self.has_work:
            self.scheduler.prefixes.forget()
            self.sessions.make_private()
        self.active[request] = None
        request.weight_version = self.weight_version
        try:
            request.adapter = self.adapters.number_of(request.params.adapter)
        except InvalidRequest as error:  # it was unloaded since the request was admitted
            self.fail(request, error)
            return
        if request.is_prefill_only and not (request.needs_prompt_rows or request.params.records):
            self._finish(request, FinishReason.LENGTH)  # nothing to compute: no forward
            return
        self.next_deadline = min(self.next_deadline, request.deadline)
        self.scheduler.add(request.sequences[0])

    def step(self) -> bool:
        """Schedule, forward, sample, commit; return False if there was nothing to do.

        The caller defers Ctrl-C with `shield`. It is allowed in the forward and the draw, before any
        request has changed.

        Raises:
            TierFailed: a part of the model is unreachable. The requests of the step have failed with this
                error, and the engine can't be used any more.
        """
        self.expire(time.monotonic())
        if self.live and self.has_work and self.runner.stamp() != self._stamp:
            self._use_new_weights(None, restart=False)
        begin, drafting = time.perf_counter(), self.drafting
        lengths = None if drafting is None else drafting.lengths(self.scheduler.running)
        work = self.scheduler.schedule(lengths)
        if work is None:
            return self._wait_for_mask()
        try:
            forward = self._compute(work, drafting if lengths else None)
        except CacheLost as error:
            self._give_up(work, error)
            return True
        except Exception as error:
            for chunk in work.chunks:
                if not chunk.sequence.request.finished:
                    self.fail(chunk.sequence.request, error)
            if isinstance(error, TierFailed):
                raise
            return True
        except BaseException:
            self.scheduler.roll_back(work)
            raise
        self._commit(work, forward)
        self.adapters.free()
        if drafting is not None:
            drafting.note_step(work.chunks, time.perf_counter() - begin)
        return True

    def peek(self) -> list[tuple[Request, int, float]]:
        """Return the draws of the next step, without committing them: request, token id and log-prob.

        Steps that only recompute what was evicted draw nothing, and are committed.
        """
        while True:
            work = self.scheduler.schedule()
            while self.scheduler.masks:  # whether a mask is ready shall not decide what is returned
                wait(self.scheduler.masks)
                if work is not None:
                    self.scheduler.roll_back(work)
                work = self.scheduler.schedule()
            if work is None:
                return []
            try:
                forward = self._compute(work, None)
            except CacheLost as error:
                self._give_up(work, error)
                continue
            except BaseException:
                self.scheduler.roll_back(work)
                raise
            if any(chunk.draws or not chunk.sequence.output_ids for chunk in work.chunks):
                break
            self._commit(work, forward)
        self.scheduler.roll_back(work)
        return [
            (chunk.sequence.request, draw.id, draw.logprob)
            for chunk in work.chunks
            if not chunk.sequence.request.finished
            for draw in chunk.results[chunk.num_prompt_rows :][:1]
        ]

    def _give_up(self, work: Schedule, error: CacheLost) -> None:
        """Undo a step in which a stage was lost; fail the requests that have lost too many in a row."""
        self.scheduler.roll_back(work)
        if error.limit is None:
            return
        for request in dict.fromkeys(chunk.sequence.request for chunk in work.chunks):
            request.num_lost += 1
            if request.num_lost > error.limit and not request.finished:
                self.fail(request, StageFailed(str(error)))

    def _wait_for_mask(self) -> bool:
        """Wait a moment for a grammar mask, if nothing else is left to do; return whether one is computed."""
        masks = self.scheduler.masks
        wait(masks, timeout=_IDLE_WAIT_S, return_when=FIRST_COMPLETED)
        return bool(masks)

    def _compute(self, work: Schedule, drafting: Drafting | None) -> Forward:
        """Draft, forward and sample, with Ctrl-C allowed."""
        with self.shield.down():
            if drafting is not None:
                drafting.propose(work.chunks)
            forward = self.runner.forward(work.batch())
            draw(self.runner, forward, work.chunks, self.fail)
            return forward

    def _commit(self, work: Schedule, forward: Forward) -> None:
        """Append the drawn tokens to their sequences, and deliver the deltas."""
        for chunk in work.chunks:
            request = chunk.sequence.request
            if request.finished:  # it failed in this step
                continue
            if chunk.results:
                request.num_lost = 0
            try:
                changed = commit(chunk, forward.hidden, self.scheduler)
                if self.drafting is not None:
                    self.drafting.note_commit(chunk)
                for sequence in changed:
                    self._emit(sequence, chunk.num_accepted)
                if chunk.error is not None and not (request.finished or chunk.sequence.finished):
                    self.fail(request, chunk.error)
            except Exception as error:
                self.fail(request, error)  # the other requests go on

    def _emit(self, sequence: Sequence, num_accepted: int = 0, *, now: bool = False) -> None:
        """Deliver a delta; free the blocks of a finished sequence, or save them in its session.

        Args:
            now: even if its recorded choices are lost; else they are computed again first.
        """
        request = sequence.request
        if sequence.finished and not (self._record(sequence) or now):
            sequence.num_recorded, sequence.grammar = sequence.num_computed, None
            self.scheduler.evict(sequence)
            return
        sequence.num_recorded = None
        self.num_tokens += len(sequence.output_ids) - sequence.num_sent
        if request.deliver is None and not sequence.finished:
            sequence.num_sent = len(sequence.output_ids)
            return
        if sequence.finished:
            self.sessions.save(sequence)
            self.scheduler.remove(sequence)
        if request not in self.active:
            return  # aborted by the receiver of its last delta
        added = delta(sequence, num_accepted)
        if request.finished:
            del self.active[request]
        try:
            if request.deliver is not None:
                request.deliver(added)
        except BaseException as error:  # of the receiver, which ends its request alone
            self.fail(request, as_exception(error))
        if request.result is not None:
            self.on_end(request)

    def _record(self, sequence: Sequence) -> bool:
        """Read the recorded choices of a finished sequence; return False if they are lost."""
        for name in sequence.request.params.records:
            record = self.runner.record(name, sequence.blocks, sequence.num_computed)
            setattr(sequence, name, record)
            if len(record) < sequence.num_computed:
                return False
        return True

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """Finish a request with the output it has."""
        sequences = list(request.sequences)  # `finish` replaces those of a beam search
        for sequence in finish(request, reason):
            self._emit(sequence, now=True)
        for sequence in sequences:
            self.scheduler.remove(sequence)

    def abort(self, request: Request) -> None:
        """Finish a request now with the output it has; do nothing if it is finished or unknown."""
        if request in self.active:
            self._finish(request, FinishReason.ABORT)

    def abort_all(self) -> None:
        """Abort all running and waiting requests."""
        for request in list(self.active):
            self._finish(request, FinishReason.ABORT)

    def expire(self, now: float) -> None:
        """Finish the requests whose deadline has passed at `now`, on the monotonic clock."""
        if now < self.next_deadline:
            return
        for request in [request for request in self.active if request.deadline <= now]:
            self._finish(request, FinishReason.TIMEOUT)
        self.next_deadline = min((request.deadline for request in self.active), default=math.inf)

    def fail(self, request: Request, error: BaseException) -> None:
        """Finish a request with an error."""
        if request.result is not None:
            return  # it is complete; only its delivery failed
        request.error = error
        for sequence in request.sequences:
            if not sequence.finished:
                sequence.watch.finish_reason = FinishReason.ERROR
            self.scheduler.remove(sequence)
        self.active.pop(request, None)
        self.on_end(request)

    def update_weights(
        self, write: Callable[[], None], *, version: int | None, restart: bool
    ) -> None:
        """Change the model's weights with `write`, and discard all KV of the old ones.

        Args:
            version: the new version; None adds one to the present version.
            restart: running requests start over, unless they are streamed and a delta was sent; else they
                continue after the tokens they have.
        """
        self.scheduler.evict_all()  # before the write: new weights must never read old K and V
        write()
        self._use_new_weights(version, restart=restart)

    def _use_new_weights(self, version: int | None, *, restart: bool) -> None:
        """Discard all KV after a change of weights, and restart or continue the active requests."""
        self._stamp = self.runner.stamp() if self.live else None
        if self.prefix_folder is not None:
            self.prefix_folder.stop("the weights were updated")
        self.weight_version = self.weight_version + 1 if version is None else version
        self.scheduler.evict_all()
        for request in self.active:
            sent = any(sequence.num_sent for sequence in request.sequences)
            if restart and not (request.deliver is not None and sent):
                for sequence in request.sequences:
                    self.scheduler.remove(sequence)
                request.restart()
                self.scheduler.add(request.sequences[0])
            else:
                self.scheduler.discard_pending(request)
            request.weight_version = self.weight_version

    def sleep(self, weights: bool) -> None:
        """Release memory, as `Runner.sleep`, also that of the proposer."""
        if self.drafting is not None:
            self.drafting.call("sleep", weights)
        try:
            self.runner.sleep(weights)
        except VerbatimError:  # refused
            if self.drafting is not None:
                self.drafting.call("wake")
            raise

    def wake(self) -> None:
        """Allocate the memory again, as `Runner.wake`."""
        self.runner.wake()
        if self.drafting is not None:
            self.drafting.call("wake")

    def close(self) -> None:
        """Release memory, processes and files."""
        self.sessions.close()
        try:
            if self.drafting is not None:
                self.drafting.call("close")
        finally:
            self.runner.close()

    def stats(self) -> dict[str, Any]:
        """Return counters since the engine was opened, and the present load."""
        pool = self.scheduler.pool
        return {
            "forwards": self.runner.num_forwards,
            "tokens": self.num_tokens,
            "preemptions": self.scheduler.num_preemptions,
            "weight_version": self.weight_version,
            "cached_tokens": self.scheduler.prefixes.num_hits,
            "prefix_folder": None if self.prefix_folder is None else self.prefix_folder.stats(),
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "blocks_used": pool.num_used,
            "blocks_cached": pool.num_cached,
            "blocks_free": pool.num_free,
            "blocks_reserved": self.sessions.num_reserved,
            "sessions": self.sessions.num_open,
            "draft": None if self.drafting is None else self.drafting.stats(),
            **self.runner.stats(),
        }
