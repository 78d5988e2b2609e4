"""The step loop."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, wait
from typing import Any

from verbatim.batch import DRAW_FAILED
from verbatim.core import Delta, FinishReason, Request, Sequence
from verbatim.engine.adapters import LoadedAdapters
from verbatim.engine.calls import as_exception
from verbatim.engine.commit import commit, delta, finish, valid_draws
from verbatim.engine.drafting import Drafting
from verbatim.engine.draw import draw
from verbatim.engine.scheduler import Scheduler
from verbatim.engine.sessions import Sessions
from verbatim.engine.work import Chunk, Schedule
from verbatim.errors import InvalidRequest, QueueFull, RequestFailed, TierFailed, VerbatimError
from verbatim.kv.prefix_folder import PrefixFolder
from verbatim.protocols import Forward, Runner
from verbatim.shield import Shield

# Longest wait before deadlines and messages are checked, if all sequences wait for masks.
_MASK_WAIT_S = 5e-3


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
        self._active: dict[str, tuple[Request, Callable[[Delta], None]]] = {}
        self.adapters = LoadedAdapters(runner, self._active)
        self.drafting = drafting
        self.scheduler = scheduler
        self.max_waiting = max_waiting
        self.live = live
        self.num_tokens = 0  # generated since the engine was opened
        self.weight_version = 0  # raised by each update of the weights
        # Called when a request has a result or an error, after its last delta.
        self.on_end: Callable[[Request], object] = lambda request: None
        self._deadlines: list[tuple[float, str]] = []
        self.shield = Shield()  # of the thread that runs the step
        self._stamp = runner.stamp() if live else None

    @property
    def sessions(self) -> Sessions:
        """The session caches."""
        return self.scheduler.sessions

    @property
    def prefix_folder(self) -> PrefixFolder | None:
        """The files of cached prefixes; None: they are kept in memory only."""
        return self.scheduler.prefixes.folder

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def check_queue(self, count: int) -> None:
        """Raise QueueFull if `count` more requests exceed the queue limit."""
        if self.max_waiting is None:
            return
        waiting, running = self.scheduler.num_new, len(self.scheduler.running)
        free_slots = max(0, self.scheduler.max_sequences - running)
        if waiting + count > self.max_waiting + free_slots:
            raise QueueFull(
                f"{waiting} requests wait and {running} run; {count} more exceed "
                f"max_waiting={self.max_waiting} and max_sequences={self.scheduler.max_sequences}"
            )

    def add(self, request: Request, deliver: Callable[[Delta], None]) -> None:
        """Add a request; `deliver` is called with its deltas, within the steps that generate them."""
        if self.live and not self.has_work:
            self.scheduler.forget_cached()
            self.sessions.make_private()
        self._active[request.request_id] = request, deliver
        request.weight_version = self.weight_version
        try:
            request.adapter = self.adapters.number_of(request.params.adapter)
        except InvalidRequest as error:  # it was unloaded since the request was admitted
            self.fail(request, error)
            return
        if request.is_prefill_only and not (request.needs_prompt_rows or request.params.records):
            self._finish(request, FinishReason.LENGTH)  # nothing to compute: no forward
            return
        if request.params.timeout_s is not None:
            deadline = request.arrival + request.params.timeout_s
            heapq.heappush(self._deadlines, (deadline, request.request_id))
            if len(self._deadlines) > 64 and len(self._deadlines) > 2 * len(self._active):
                self._deadlines = [entry for entry in self._deadlines if entry[1] in self._active]
                heapq.heapify(self._deadlines)
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

    def peek(self) -> list[Chunk]:
        """Return the chunks of the next step with their results, without committing them."""
        work = self.scheduler.schedule()
        while self.scheduler.masks:  # whether a mask is ready shall not decide what is returned
            wait(self.scheduler.masks)
            if work is not None:
                self.scheduler.roll_back(work)
            work = self.scheduler.schedule()
        if work is None:
            return []
        try:
            self._compute(work, None)
        finally:
            self.scheduler.roll_back(work)
        return work.chunks

    def _wait_for_mask(self) -> bool:
        """Wait a moment for a grammar mask, if nothing else is left to do; return whether one is computed."""
        masks = self.scheduler.masks
        wait(masks, timeout=_MASK_WAIT_S, return_when=FIRST_COMPLETED)
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
            try:
                if any(draw.id == DRAW_FAILED for draw in valid_draws(chunk)):
                    raise RequestFailed(
                        f"request {request.request_id}: no token can be drawn; the model's logits are "
                        "not numbers, or the request's bans, structure and filters leave nothing"
                    )
                changed = commit(chunk, forward.hidden, self.scheduler)
                if self.drafting is not None:
                    self.drafting.note_commit(chunk)
                for sequence in changed:
                    self._emit(sequence, chunk.num_accepted)
                if chunk.error is not None and not request.finished:
                    self.fail(request, chunk.error)
            except Exception as error:
                self.fail(request, error)  # the other requests go on

    def _emit(self, sequence: Sequence, num_accepted: int = 0) -> None:
        """Deliver a delta; free the blocks of a finished sequence, or save them in its session."""
        request = sequence.request
        self.num_tokens += len(sequence.output_ids) - sequence.num_sent
        if sequence.finished:
            for name in request.params.records:
                record = self.runner.record(name, sequence.blocks, sequence.num_computed)
                setattr(sequence, name, record)
            self.sessions.save(sequence)
            self.scheduler.remove(sequence)
        if request.request_id not in self._active:
            return  # aborted by the receiver of its last delta
        deliver = self._active[request.request_id][1]
        added = delta(sequence, num_accepted)
        if request.finished:
            del self._active[request.request_id]
        try:
            deliver(added)
        except BaseException as error:  # of the receiver, which ends its request alone
            self.fail(request, as_exception(error))
        if request.result is not None:
            self.on_end(request)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """Finish a request with the output it has."""
        sequences = list(request.sequences)  # `finish` replaces those of a beam search
        for sequence in finish(request, reason):
            self._emit(sequence)
        for sequence in sequences:
            self.scheduler.remove(sequence)

    def abort(self, request: Request) -> None:
        """Finish a request now with the output it has; do nothing if it is finished or unknown."""
        if request.request_id in self._active:
            self._finish(request, FinishReason.ABORT)

    def abort_all(self) -> None:
        """Abort all running and waiting requests."""
        for request, _ in list(self._active.values()):
            self._finish(request, FinishReason.ABORT)

    def expire(self, now: float) -> None:
        """Finish the requests whose deadline has passed at `now`, on the monotonic clock."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heapq.heappop(self._deadlines)
            if request_id in self._active:
                self._finish(self._active[request_id][0], FinishReason.TIMEOUT)

    def next_deadline(self) -> float | None:
        """Return the earliest deadline on the monotonic clock; None if there is none."""
        while self._deadlines and self._deadlines[0][1] not in self._active:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def fail(self, request: Request, error: BaseException) -> None:
        """Finish a request with an error."""
        if request.result is not None:
            return  # it is complete; only its delivery failed
        request.error = error
        for sequence in request.sequences:
            if not sequence.finished:
                sequence.watch.finish_reason = FinishReason.ERROR
            self.scheduler.remove(sequence)
        self._active.pop(request.request_id, None)
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
        for request, _ in self._active.values():
            sent = any(sequence.num_sent for sequence in request.sequences)
            if restart and not (request.streamed and sent):
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
