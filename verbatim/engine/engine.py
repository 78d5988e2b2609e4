"""`Engine`: the step loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, wait
from enum import Enum
from typing import Any

from verbatim.common.shield import Shield
from verbatim.core import FinishReason, Request, Sequence
from verbatim.engine.adapters import LoadedAdapters
from verbatim.engine.commit import commit, delta, finish
from verbatim.engine.drafting import Drafting
from verbatim.engine.scheduler import Scheduler
from verbatim.engine.work import Schedule, draw
from verbatim.errors import (
    InvalidRequest,
    QueueFull,
    StageFailed,
    TierFailed,
    VerbatimError,
    as_exception,
)
from verbatim.protocols import CacheLost, Forward, Runner

# Maximum wait of a step in which all sequences wait for masks; deadlines and messages are checked after it.
_IDLE_WAIT_S = 5e-3
PAUSE_MODES = ("keep", "drain", "abort")


class Mode(Enum):
    """The engine's state between two steps."""

    RUNNING = "running"
    DRAINING = "draining"  # steps run, new requests wait
    PAUSED = "paused"  # no step runs, new requests are queued
    ASLEEP = "asleep"  # paused, with its memory freed

    @property
    def has_steps(self) -> bool:
        return self in (Mode.RUNNING, Mode.DRAINING)


class Engine:
    """Runs requests to completion, one step at a time. Not thread-safe: the caller holds the engine lock.

    Args:
        max_waiting: maximum number of waiting requests; None sets no limit.
        drafting: speculative decoding; None disables it.
        live: whether the model belongs to the caller, who may change the weights at any time. A detected
            change counts as an update. Since some can't be detected, the prefix cache is cleared whenever
            the engine was idle.
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
        self.mode = Mode.RUNNING
        self.num_tokens = 0  # generated since the engine was opened
        self.weight_version = 0  # set by each update of the weights
        # Called when a request has a result or an error, after its last delta.
        self.on_end: Callable[[Request], object] = lambda request: None
        self.next_deadline = math.inf  # a lower bound for all active requests
        self.shield = Shield()  # of the thread that runs the step
        self._stamp = runner.stamp() if live else None

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def check_queue(self, requests: Iterable[Request]) -> None:
        """Raise QueueFull if the requests that are not added yet exceed the queue limit."""
        if self.max_waiting is None:
            return
        count = sum(not (request in self.active or request.finished) for request in requests)
        # Not counting sequences that were preempted, or forked from a running one.
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
        except InvalidRequest as error:  # the adapter was unloaded since the request was admitted
            self.fail(request, error)
            return
        if request.is_prefill_only and not (request.needs_prompt_rows or request.params.records):
            self._finish(request, FinishReason.LENGTH)  # nothing to compute: no forward
            return
        self.next_deadline = min(self.next_deadline, request.deadline)
        self.scheduler.add(request.sequences[0])

    def step(self) -> bool:
        """Schedule, forward, sample, commit; return False if there was nothing to do, or in a pause.

        The caller defers Ctrl-C with `shield`. It is allowed only in the forward and the draw, before any
        request has changed.

        Raises:
            TierFailed: a part of the model is unreachable. The requests of the step have failed with this
                error, and the engine is unusable.
        """
        self.expire(time.monotonic())
        if self.mode is Mode.DRAINING and not self.has_work:
            self.mode = Mode.PAUSED
        if not self.mode.has_steps:
            return False
        self._notice_new_weights()
        begin, drafting = time.perf_counter(), self.drafting
        lengths = None if drafting is None else drafting.lengths(self.scheduler.running)
        work = self.scheduler.schedule(lengths)
        if work is None:
            masks = self.scheduler.masks
            wait(masks, timeout=_IDLE_WAIT_S, return_when=FIRST_COMPLETED)
            return bool(masks)
        try:
            forward = self._compute(work, drafting if lengths else None)
        except Exception as error:
            for chunk in work.chunks:
                if not chunk.sequence.request.finished:
                    self.fail(chunk.sequence.request, error)
            if isinstance(error, TierFailed):
                raise
            return True
        if forward is None:
            return True
        self._commit(work, forward)
        self.adapters.free()
        if drafting is not None:
            drafting.note_step(work.chunks, time.perf_counter() - begin)
        return True

    def peek(self) -> list[tuple[Request, int, float]]:
        """Return the draws of the next step, without committing them: request, token id and log-prob.

        Steps that only recompute evicted tokens draw nothing, and are committed. The list is empty while
        the engine is paused.
        """
        if self.mode.has_steps:
            self._notice_new_weights()
        while self.mode.has_steps:
            work = self.scheduler.schedule()
            while self.scheduler.masks:  # the result must not depend on which masks are ready
                wait(self.scheduler.masks)
                if work is not None:
                    self.scheduler.roll_back(work)
                work = self.scheduler.schedule()
            if work is None:
                return []
            forward = self._compute(work, None)
            if forward is None:
                continue
            if not any(chunk.draws or not chunk.sequence.output_ids for chunk in work.chunks):
                self._commit(work, forward)
                continue
            self.scheduler.roll_back(work)
            return [
                (chunk.sequence.request, draw.id, draw.logprob)
                for chunk in work.chunks
                if not chunk.sequence.request.finished
                for draw in chunk.results[chunk.num_prompt_rows :][:1]
            ]
        return []

    def _compute(self, work: Schedule, drafting: Drafting | None) -> Forward | None:
        """Draft, forward and sample, with Ctrl-C allowed; an error rolls the step back.

        Returns None if a stage was lost; requests that have lost too many consecutive steps have failed then.
        """
        try:
            with self.shield.down():
                if drafting is not None:
                    drafting.propose(work.chunks)
                forward = self.runner.forward(work.batch())
                draw(self.runner, forward, work.chunks, self.fail)
                return forward
        except CacheLost as error:
            self.scheduler.roll_back(work)
            limit = math.inf if error.limit is None else error.limit
            for request in dict.fromkeys(chunk.sequence.request for chunk in work.chunks):
                request.num_lost += error.limit is not None
                if request.num_lost > limit and not request.finished:
                    self.fail(request, StageFailed(str(error)))
            return None
        except BaseException:
            self.scheduler.roll_back(work)
            raise

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
            except (KeyboardInterrupt, SystemExit):  # of a signal handler
                raise
            except BaseException as error:  # also a panic of the tokenizer's library
                self.fail(request, as_exception(error))  # the other requests continue

    def _emit(self, sequence: Sequence, num_accepted: int = 0, *, now: bool = False) -> None:
        """Deliver a delta; free the blocks of a finished sequence, or save them in its session.

        If its recorded choices are lost, they are recomputed first, unless `now`.
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
        output = delta(sequence, num_accepted)
        if request.finished:
            del self.active[request]
        try:
            if request.deliver is not None:
                request.deliver(output)
        except BaseException as error:  # raised by the receiver; fails only its own request
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
        """Finish a request now with the output it has; no effect if it is finished or unknown."""
        if request in self.active:
            self._finish(request, FinishReason.ABORT)

    def abort_all(self) -> None:
        """Abort all running and waiting requests."""
        for request in list(self.active):
            self._finish(request, FinishReason.ABORT)

    def expire(self, now: float) -> None:
        """Finish the requests with a deadline up to `now`, on the monotonic clock."""
        if now < self.next_deadline:
            return
        for request in [request for request in self.active if request.deadline <= now]:
            self._finish(request, FinishReason.TIMEOUT)
        self.next_deadline = min((request.deadline for request in self.active), default=math.inf)

    def fail(self, request: Request, error: BaseException) -> None:
        """Finish a request with an error."""
        if request.result is not None:
            return  # the request is complete; only the delivery failed
        request.error = error
        for sequence in request.sequences:
            if not sequence.finished:
                sequence.watch.finish_reason = FinishReason.ERROR
            self.scheduler.remove(sequence)
        self.active.pop(request, None)
        self.on_end(request)

    def update_weights(
        self, prepare: Callable[[], Callable[[], None]], *, version: int | None, restart: bool
    ) -> int:
        """Change the model's weights, discard all KV of the old ones, and return the new version.

        Args:
            prepare: checks the new weights, and returns the function that writes them.
            version: the new version; None: the current version plus 1.
            restart: whether running requests start over, except streams with a sent delta. Else they continue
                after the tokens they have.
        """
        write = prepare()
        # Before the write, which may fail in the middle: new weights must never read or save old K and V.
        self._discard_kv()
        write()
        self._use_new_weights(version, restart=restart)
        return self.weight_version

    def _notice_new_weights(self) -> None:
        """Discard all KV if the weights of a live module have changed."""
        if self.live and self.has_work and self.runner.stamp() != self._stamp:
            self._use_new_weights(None, restart=False)

    def _discard_kv(self) -> None:
        """Discard the KV of old weights, and save no more of it."""
        if (folder := self.scheduler.prefixes.folder) is not None:
            folder.stop("the weights were updated")
        self.scheduler.evict_all()

    def _use_new_weights(self, version: int | None, *, restart: bool) -> None:
        """Discard all KV after a change of weights, and restart or continue the active requests."""
        self._stamp = self.runner.stamp() if self.live else None
        self._discard_kv()
        self.weight_version = self.weight_version + 1 if version is None else version
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

    def pause(self, how: str) -> Mode:
        """Pause or drain, as `LLM.pause`, and return the new mode; a sleeping engine stays asleep."""
        if how not in PAUSE_MODES:
            raise InvalidRequest(
                f"mode={how!r}: must be one of {', '.join(map(repr, PAUSE_MODES))}"
            )
        if how == "drain" and self.mode is Mode.ASLEEP:
            raise VerbatimError("an engine that sleeps can't be drained; call wake() first")
        if how == "abort":
            self.abort_all()
        if self.mode is not Mode.ASLEEP:
            self.mode = Mode.DRAINING if how == "drain" and self.has_work else Mode.PAUSED
        return self.mode

    def resume(self) -> None:
        """End a pause, as `LLM.resume`."""
        if self.mode is Mode.ASLEEP:
            raise VerbatimError("the engine sleeps; call wake(), which resumes as well")
        self.mode = Mode.RUNNING

    def sleep(self, weights: bool) -> None:
        """Release the memory of the proposer and the runner, as `Runner.sleep`, and all blocks."""
        self._call_proposer("sleep", weights)
        try:
            self.runner.sleep(weights)
        except Exception:
            self._call_proposer("wake")
            raise
        finally:  # stages of a cluster may have freed their KV before one refused
            self.scheduler.evict_all()
        self.mode = Mode.ASLEEP

    def wake(self) -> None:
        """Allocate the memory again, as `Runner.wake`, and resume; no effect if not asleep."""
        if self.mode is not Mode.ASLEEP:
            return
        self.runner.wake()
        try:
            self._call_proposer("wake")
        except Exception:
            self.runner.sleep(False)  # keeps the weights
            raise
        self.mode = Mode.RUNNING

    def _call_proposer(self, method: str, *args: Any) -> None:
        """Call a method of the proposer that was opened for this engine, if it has one."""
        if self.drafting is not None:
            self.drafting.call(method, *args)

    def close(self) -> None:
        """Release memory, processes and files."""
        self.sessions.close()
        try:
            self._call_proposer("close")
        finally:
            self.runner.close()

    def stats(self) -> dict[str, Any]:
        """Return counters since the engine was opened, and the current load."""
        pool, folder = self.scheduler.pool, self.scheduler.prefixes.folder
        return {
            "forwards": self.runner.num_forwards,
            "tokens": self.num_tokens,
            "preemptions": self.scheduler.num_preemptions,
            "weight_version": self.weight_version,
            "cached_tokens": self.scheduler.prefixes.num_hits,
            "prefix_folder": None if folder is None else folder.stats(),
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "blocks_used": pool.num_used,
            "blocks_cached": pool.num_cached,
            "blocks_free": pool.num_free,
            "blocks_reserved": self.sessions.num_reserved,
            "sessions": self.sessions.num_open,
            "draft": None if self.drafting is None else self.drafting.stats(),
            **self.runner.stats(),
            "paused": not self.mode.has_steps,
            "asleep": self.mode is Mode.ASLEEP,
        }
