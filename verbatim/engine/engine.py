"""The step loop."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from typing import Any

from verbatim.batch import DRAW_FAILED, Draws
from verbatim.core import Delta, FinishReason, Request, Sequence
from verbatim.engine.commit import commit, counted_rows, delta, finish
from verbatim.engine.drafting import Drafting
from verbatim.engine.draw import draw
from verbatim.engine.scheduler import Scheduler
from verbatim.engine.sessions import Sessions
from verbatim.engine.work import Chunk, Schedule
from verbatim.errors import QueueFull, RequestFailed, TierFailed, VerbatimError
from verbatim.protocols import Forward, Runner
from verbatim.shield import Shield


class Engine:
    """Runs requests to their end, one step at a time. Not safe for threads: its owner holds a lock.

    Args:
        max_waiting: requests that may wait for a seat at most; None sets no limit.
        drafting: guesses tokens ahead, for the model to look at several in one forward; None does not.
        live: somebody else owns the model and may change its weights at any time. What can be seen of
            that counts as an update; what can't is why cached prefixes go whenever nothing runs.
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
        self.drafting = drafting
        self.scheduler = scheduler
        self.max_waiting = max_waiting
        self.live = live
        self.num_tokens = 0  # made since it was opened
        self.weight_version = 0  # raised by each update of the weights
        self.on_end: Callable[[Request], object] = lambda request: None  # with a result or an error
        self._active: dict[str, tuple[Request, Callable[[Delta], None]]] = {}
        self._deadlines: list[tuple[float, str]] = []
        self.shield = Shield()  # of the thread that makes a step
        self._stamp = runner.stamp() if live else None

    @property
    def sessions(self) -> Sessions:
        """What is held for conversations between their turns."""
        return self.scheduler.sessions

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def check_room(self, count: int) -> None:
        """Raise QueueFull if `count` more requests are more than may wait."""
        if self.max_waiting is None:
            return
        waiting, running = self.scheduler.num_new, len(self.scheduler.running)
        seats = max(0, self.scheduler.max_sequences - running)
        if waiting + count > self.max_waiting + seats:
            raise QueueFull(
                f"{waiting} requests wait and {running} run; {count} more are over the limits of "
                f"max_waiting={self.max_waiting} and max_sequences={self.scheduler.max_sequences}"
            )

    def add(self, request: Request, deliver: Callable[[Delta], None]) -> None:
        """Take a request in; `deliver` gets its deltas, during the steps that make them."""
        if self.live and not self.has_work:
            self.scheduler.pool.forget()
            self.sessions.make_private()
        self._active[request.request_id] = request, deliver
        request.weight_version = self.weight_version
        if request.is_prefill_only and not (
            request.needs_prompt_rows or request.params.record_routing
        ):
            self._end(request, FinishReason.LENGTH)  # nothing to compute: no forward
            return
        if request.params.timeout_s is not None:
            deadline = request.arrival + request.params.timeout_s
            heapq.heappush(self._deadlines, (deadline, request.request_id))
            if len(self._deadlines) > 64 and len(self._deadlines) > 2 * len(self._active):
                self._deadlines = [entry for entry in self._deadlines if entry[1] in self._active]
                heapq.heapify(self._deadlines)
        self.scheduler.add(request.sequences[0])

    def step(self) -> bool:
        """Schedule, forward, sample, commit. False when there was nothing to do.

        Raises:
            TierFailed: a part of the model is out of reach. The requests of the step have failed with it, and
                the engine is of no more use.

        Its caller holds Ctrl-C back by `shield`, which lets it through in the forward and the draw, where
        nothing counts yet and every request stays as it was.
        """
        self.expire(time.monotonic())
        if self.live and self.has_work and self.runner.stamp() != self._stamp:
            self._renew(None, restart=False)
        begin, drafting = time.perf_counter(), self.drafting
        lengths = None if drafting is None else drafting.lengths(self.scheduler.running)
        work = self.scheduler.schedule(lengths)
        if work is None:
            return False
        try:
            forward, draws = self._compute(work, drafting if lengths else None)
        except Exception as error:
            self._fail_all(work, error)  # whoever waits for one of these finds it there
            if isinstance(error, TierFailed):
                raise
            return True
        except BaseException:
            self.scheduler.interrupted(work)
            raise
        self._commit(work, forward, draws)
        if drafting is not None:
            drafting.note_step(work.chunks, time.perf_counter() - begin)
        return True

    def peek(self) -> tuple[list[Chunk], Draws] | None:
        """What the next step would draw, which computes it once more; None when there is nothing to do."""
        work = self.scheduler.schedule()
        if work is None:
            return None
        try:
            _, draws = self._compute(work, None)
        finally:
            self.scheduler.interrupted(work)
        return work.chunks, draws

    def _compute(self, work: Schedule, drafting: Drafting | None) -> tuple[Forward, Draws]:
        """The middle of a step, where nothing counts yet and Ctrl-C is let through."""
        with self.shield.down():
            if drafting is not None:
                drafting.propose(work.chunks)
            forward = self.runner.forward(work.batch())
            return forward, draw(self.runner, forward, work.chunks, self.fail)

    def _commit(self, work: Schedule, forward: Forward, draws: Draws) -> None:
        """Let every sequence of the step grow, and hand out what is new."""
        for chunk in work.chunks:
            request = chunk.sequence.request
            if request.finished:  # it failed in this step
                continue
            try:
                if any(draws.ids[row] == DRAW_FAILED for row in counted_rows(chunk, draws)):
                    raise RequestFailed(_nothing_to_draw(request))
                grown = commit(chunk, draws, forward.hidden, self.scheduler)
                if self.drafting is not None:
                    self.drafting.note_commit(chunk)
                for sequence in grown:
                    self._hand_out(sequence, chunk.num_accepted)
                if chunk.error is not None and not request.finished:
                    self.fail(request, chunk.error)
            except Exception as error:
                self.fail(request, error)  # whatever it is, it is this request's

    def _hand_out(self, sequence: Sequence, num_accepted: int = 0) -> None:
        """Send what is new; a sequence that has ended gives its blocks back, or to its session."""
        request = sequence.request
        self.num_tokens += len(sequence.output_ids) - sequence.num_sent
        if sequence.finished:
            if request.params.record_routing:
                sequence.routing = self.runner.routing(sequence.blocks, sequence.num_computed)
            self.sessions.save(sequence)
            self.scheduler.remove(sequence)
        if request.request_id not in self._active:
            return  # whoever took the last delta has aborted it
        deliver = self._active[request.request_id][1]
        added = delta(sequence, num_accepted)
        if request.finished:
            del self._active[request.request_id]
            self.on_end(request)
        deliver(added)

    def _end(self, request: Request, reason: FinishReason) -> None:
        """End a request as it is."""
        running = list(request.sequences)
        for sequence in finish(request, reason):
            self._hand_out(sequence)
        for sequence in running:
            self.scheduler.remove(sequence)

    def abort(self, request: Request) -> None:
        """End a request now, keeping what it has; harmless when it has ended or never came in."""
        if request.request_id in self._active:
            self._end(request, FinishReason.ABORT)

    def abort_all(self) -> None:
        """End everything that runs or waits."""
        for request, _ in list(self._active.values()):
            self._end(request, FinishReason.ABORT)

    def expire(self, now: float) -> None:
        """End the requests whose time is over, at `now` on the monotonic clock."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heapq.heappop(self._deadlines)
            if request_id in self._active:
                self._end(self._active[request_id][0], FinishReason.TIMEOUT)

    def next_deadline(self) -> float | None:
        """When `expire` will have something to do, on the monotonic clock."""
        while self._deadlines and self._deadlines[0][1] not in self._active:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def fail(self, request: Request, error: BaseException) -> None:
        """End a request with an error; the others go on."""
        if request.result is not None:
            return  # all of it was made before something went wrong with handing it out
        request.error = error
        for sequence in request.sequences:
            if not sequence.finished:
                sequence.finish_reason = FinishReason.ERROR
            self.scheduler.remove(sequence)
        self._active.pop(request.request_id, None)
        self.on_end(request)

    def evict_all(self) -> None:
        """Give every block back; whoever runs is recomputed later, and nothing is cached any more."""
        self.scheduler.evict_all()

    def update_weights(
        self, write: Callable[[], None], *, version: int | None, restart: bool
    ) -> None:
        """Let `write` change the model's weights, and compute again what the old ones had to do with.

        Args:
            version: what the new ones are called; None counts on.
            restart: whoever runs begins again, unless it is streamed and some of it was read; else
                everybody goes on from the tokens it has.
        """
        self.evict_all()  # first: new weights must never meet old K and V
        write()
        self._renew(version, restart=restart)

    def _renew(self, version: int | None, *, restart: bool) -> None:
        """The weights are others now."""
        self._stamp = self.runner.stamp() if self.live else None
        self.weight_version = self.weight_version + 1 if version is None else version
        self.evict_all()
        for request, _ in self._active.values():
            sent = any(sequence.num_sent for sequence in request.sequences)
            if restart and not (request.streamed and sent):
                for sequence in request.sequences:
                    self.scheduler.remove(sequence)
                request.restart()
                self.scheduler.add(request.sequences[0])
            else:
                self.scheduler.revise(request)
            request.weight_version = self.weight_version

    def sleep(self, weights: bool) -> None:
        """Give memory back, as `Runner.sleep`; whoever drafts does, too."""
        if self.drafting is not None:
            self.drafting.tell("sleep", weights)
        try:
            self.runner.sleep(weights)
        except VerbatimError:  # refused
            if self.drafting is not None:
                self.drafting.tell("wake")
            raise

    def wake(self) -> None:
        """Take it again, as `Runner.wake`."""
        self.runner.wake()
        if self.drafting is not None:
            self.drafting.tell("wake")

    def close(self) -> None:
        """Give back memory, processes and files."""
        self.sessions.close()
        try:
            if self.drafting is not None:
                self.drafting.tell("close")
        finally:
            self.runner.close()

    def stats(self) -> dict[str, Any]:
        """Counts since it was opened, and what is held now."""
        pool = self.scheduler.pool
        return {
            "forwards": self.runner.num_forwards,
            "tokens": self.num_tokens,
            "preemptions": self.scheduler.num_preemptions,
            "weight_version": self.weight_version,
            "cached_tokens": self.scheduler.prefixes.num_hits,
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

    def _fail_all(self, work: Schedule, error: Exception) -> None:
        """A forward that raises takes the requests of its batch with it, and frees their blocks."""
        for chunk in work.chunks:
            if not chunk.sequence.request.finished:
                self.fail(chunk.sequence.request, error)


def _nothing_to_draw(request: Request) -> str:
    return (
        f"request {request.request_id}: no token can be drawn; the model's logits are not numbers, or "
        "the request's bans, structure and filters leave nothing"
    )
