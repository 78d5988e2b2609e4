"""`EngineHandle`: the one way to call an engine."""

from __future__ import annotations

import atexit
import math
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Any, Protocol, TypeVar

from torch import Tensor

from verbatim.batch import LowRank, dummy_batch
from verbatim.core import Delta, Request, Result
from verbatim.engine.admission import Admission
from verbatim.engine.calls import (
    Call,
    TaskWaiter,
    ThreadWaiter,
    Waiter,
    as_exception,
    wake_all,
)
from verbatim.engine.engine import Engine
from verbatim.errors import (
    EngineClosed,
    InvalidRequest,
    NotSupported,
    TierFailed,
    VerbatimError,
)
from verbatim.model.patching import holds_exclusive
from verbatim.model.products import probe_report
from verbatim.numerics import numerics_key
from verbatim.options import dtype_name
from verbatim.placement.actor import run_alone, run_layers
from verbatim.shield import Shield

_T = TypeVar("_T")
PAUSE_MODES = ("keep", "drain", "abort")
IDLE_S = 10.0  # after which an idle thread ends; the next request of a coroutine starts another
_POLL_S = 0.05  # between two attempts of an engine that has work but can't run any
_CHECK_S = 1.0  # longest sleep of a waiting caller between two checks
_NESTED = (
    "a call from inside another engine's forward can't wait for an engine that is in use: no other forward "
    "runs meanwhile"
)


class Mode(Enum):
    """The engine's state between two steps."""

    RUNNING = "running"
    DRAINING = "draining"  # steps run, new requests wait
    PAUSED = "paused"  # no step runs, new requests are queued


class Collective(Protocol):
    """Calls that several processes make together."""

    may_be_empty: bool  # this process may take part without a request

    def run(self, handle: EngineHandle, requests: list[Request]) -> list[Result]:
        """Run requests to their end on all processes."""
        ...

    def agree(self, work: Callable[[], _T]) -> _T:
        """Call `work` on all processes; an error on rank 0 fails the call on every rank."""
        ...

    def close(self) -> None:
        """Close the connections between the processes."""
        ...


class EngineHandle:
    """Calls an engine from any number of threads and event loops.

    One thread at a time owns the engine, for a step or for work between two steps; threads that wait to
    own it have their turns in order. A thread that waits for its requests runs the steps itself, so
    debuggers, profilers, thread-local settings and Ctrl-C work where the call was made. Of several such
    threads, the first runs the steps for all. For coroutines, a background thread of the handle runs them.
    It starts on demand, ends after `IDLE_S` idle seconds, and holds the handle weakly.

    Finalizers and signal handlers must not wait: they put messages into an inbox, which every owner empties
    at its beginning and at its end.

    Args:
        max_unread: maximum unread deltas of a stream; one more ends its request.
        collective: set if other processes make the same calls.

    Attributes:
        admission: validates prompts and parameters, and creates requests.
        runner: the model in its placement. Its methods are called inside `call`.
        scheduler: read inside `call`, or while nothing runs.
        drafting: speculative decoding; None without drafts.
        sessions: reservations and cached blocks of sessions.
        name: the name by which the model was opened.
        config, generation_config: transformers' objects; None if the model has none.
    """

    def __init__(
        self,
        engine: Engine,
        admission: Admission,
        *,
        name: str = "",
        config: Any = None,
        generation_config: Any = None,
        max_unread: int = 65_536,
        collective: Collective | None = None,
    ) -> None:
        self.admission = admission
        self.name = name
        self.config = config
        self.generation_config = generation_config
        self.collective = collective
        self.runner, self.scheduler = engine.runner, engine.scheduler
        self.drafting, self.sessions = engine.drafting, engine.sessions
        self._engine = engine
        self._max_unread = max_unread
        self._mode = Mode.RUNNING
        self._asleep = False
        self._why_closed: str | None = None
        self._calls: dict[Request, Call] = {}  # unfinished requests
        self._entering: dict[Request, Call] = {}  # those not added to the engine yet
        self._num_driven = 0  # unfinished requests that the background thread runs
        self._woken: dict[Waiter, None] = {}  # at the end of this turn of the owner
        end = weakref.WeakMethod(self._end)  # a circle would keep a dropped handle for a while
        engine.on_end = lambda request: (method := end()) and method(request)
        self._reset()
        global _num_opened
        _num_opened += 1
        _handles.add(self)

    def _reset(self) -> None:
        """Create locks, inbox and lists of waiters: at the beginning, and in the child of a fork."""
        # A SimpleQueue: a finalizer may put a message at any moment.
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        # Held by the owner. Never acquired twice; an RLock, because it knows which thread holds it.
        self._owner: Any = threading.RLock()
        self._lock = threading.RLock()  # guards `_calls`, `_entering` and `_thread`; held briefly
        self._queue: deque[ThreadWaiter] = deque()  # threads that wait to be the owner, in order
        # Callers whose requests run; the first runs steps.
        self._waiting: deque[ThreadWaiter] = deque()
        self._thread: _Thread | None = None

    # ---- state

    @property
    def module(self) -> Any:
        """The model's module, if it is whole and unquantized in this process's memory; else None."""
        return getattr(self.runner, "whole_module", None)

    @property
    def live(self) -> bool:
        """True if the caller owns the model and may change its weights at any time. Can be set."""
        return self._engine.live

    @live.setter
    def live(self, value: bool) -> None:
        self._engine.live = value

    @property
    def has_work(self) -> bool:
        """True if requests run or wait."""
        return self._engine.has_work or bool(self._entering)

    @property
    def num_tokens(self) -> int:
        """Tokens generated since the engine was opened."""
        return self._engine.num_tokens

    @property
    def closed(self) -> bool:
        return self._why_closed is not None

    def check_open(self) -> None:
        """Raise EngineClosed if the engine is closed."""
        if self._why_closed is not None:
            raise EngineClosed(self._why_closed)

    def check_awake(self) -> None:
        """Raise VerbatimError if the engine is asleep, EngineClosed if it is closed."""
        self.check_open()
        if self._asleep:
            raise VerbatimError("the engine sleeps; call wake() first")

    # ---- requests whose caller waits

    def run(self, requests: list[Request]) -> list[Result]:
        """Run requests to their end; return their results, or raise the first one's error."""
        if self.collective is not None:
            return self.collective.run(self, requests)
        return self.run_here(requests)

    def _together(self, work: Callable[[], _T]) -> _T:
        """Call `work` between two steps, on all processes if there are several."""
        if self.collective is None:
            return self.call(work)
        return self.collective.agree(lambda: self.call(work))

    def run_here(
        self, requests: list[Request], deliver: Callable[[Delta], None] | None = None
    ) -> list[Result]:
        """Run requests to their end on this process alone.

        Args:
            deliver: called with their deltas in the thread that runs the step; an exception ends the request.
        """
        waiter = ThreadWaiter()
        call = Call(requests, waiter, deliver=deliver)
        with self._submitted(call):
            self._wait(waiter, lambda: not call.num_open)
            return call.results()

    def stream(self, request: Request) -> Iterator[Delta]:
        """Yield the deltas of a request. Leaving the loop aborts it."""
        self.refuse_collective("stream")
        for deltas in self.steps([request], max_unread=self._max_unread):
            yield from deltas

    def steps(
        self, requests: list[Request], *, max_unread: float = math.inf
    ) -> Generator[list[Delta], None, None]:
        """Run steps; yield what each added to `requests`, the last time when all have ended.

        Leaving the loop aborts them. An error of a request is raised after the last yield.

        Args:
            max_unread: of deltas that other threads' steps add meanwhile; one more ends its request.
        """
        self.refuse_collective("a loop over steps")
        waiter = ThreadWaiter()
        call = Call(requests, waiter, max_unread=max_unread)
        with self._submitted(call):
            ended = False
            while not ended:
                self._wait(waiter, lambda: bool(call.unread) or not call.num_open)
                ended = not call.num_open  # before the deltas are read, as none come after that
                yield list(call.take())
            call.raise_error()

    async def arun(self, requests: list[Request]) -> list[Result]:
        """Run requests to their end, as `run`, in asyncio. Cancelling aborts the requests."""
        self._refuse_async("agenerate")
        waiter = TaskWaiter()
        call = Call(requests, waiter)
        with self._submitted(call):
            while call.num_open:
                await waiter.wait()
            return call.results()

    async def astream(self, requests: list[Request]) -> AsyncGenerator[tuple[int, Delta], None]:
        """Yield the deltas of requests in asyncio, each with the index of its request.

        Leaving or cancelling aborts the requests. An error of one ends all.
        """
        self._refuse_async("astream")
        waiter = TaskWaiter()
        indices = {request.request_id: i for i, request in enumerate(requests)}
        call = Call(requests, waiter, max_unread=self._max_unread)
        with self._submitted(call):
            ended = False
            while not ended:
                await waiter.wait()
                ended = not call.num_open  # before the deltas are read, as none come after that
                for delta in call.take():
                    yield indices[delta.request_id], delta
                call.raise_error()

    # ---- requests whose caller does not wait

    def submit(
        self,
        request: Request,
        deliver: Callable[[Delta], None] | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        """Add a request before the next step, and return at once; the caller runs the steps.

        Args:
            deliver: called with its deltas in the thread that runs the step; an exception ends the request.
            on_end: called there at its end, when `request.result` or `request.error` is set.

        Raises:
            QueueFull: the queue is at its limit.
        """
        request.on_end = on_end or request.on_end
        self._submit(Call([request], deliver=deliver))

    def step(self) -> bool:
        """Run a step for all requests; return False if there was nothing to do, or the engine is paused.

        An error of a step is set on the requests that it ended, and not raised.
        """
        return self.call(self._step)

    def step_or_wait(self, has_output: Callable[[], bool]) -> None:
        """Run a step; if none is possible, wait until `resume`, `close` or a deadline, at most a second.

        Args:
            has_output: returns whether a step of another thread has left nothing to wait for.
        """
        wait_s = self.call(self._step_if_due)
        if not wait_s or has_output():
            return
        waiter = ThreadWaiter()
        with Shield().up() as shield, self._in_line(self._waiting, waiter), shield.down():
            # A `resume` since the step has woken no one.
            waiter.wait(min(wait_s, _CHECK_S if self._mode is Mode.PAUSED else _POLL_S))

    def abort(self, request: Request) -> None:
        """End a request after the current step, with the output it has; from any thread."""
        self._send(lambda: self._abort([request], self._calls.get(request)))

    def peek(self) -> list[tuple[Request, int, float]]:
        """Return the draws of the next step without committing them: request, token id and log-prob.

        The next step computes them again. The list is empty while the engine is paused.
        """
        return self.call(self._peek)

    def dummy_forward(self) -> None:
        """Run a forward of one row in the scratch block, for a rank without requests."""

        def forward() -> None:
            self.check_awake()
            self.runner.forward(dummy_batch())

        self.call(forward)

    # ---- other calls

    def call(
        self,
        work: Callable[[], _T],
        *,
        when_closed: bool = False,
    ) -> _T:
        """Call `work` between two steps, in this thread; return its result.

        Ctrl-C before its turn cancels it.

        Raises:
            EngineClosed: the engine is closed, unless `when_closed`.
            VerbatimError: called inside a step of this engine; or inside another engine's forward while
                this engine is in use.
        """
        self._refuse_inside()
        if self._lock._is_owned():  # type: ignore[attr-defined]
            raise VerbatimError("called by a signal handler in the middle of another call")

        def checked() -> _T:
            if not when_closed:
                self.check_open()
            return work()

        return self._own(checked)

    def call_module(self, method: str, *args: Any, seed: int | None = None, **kwargs: Any) -> Any:
        """Call a method of `module` in eval mode, while no engine of this process computes.

        Args:
            method: its name; "forward" calls the module itself, hooks included.
            seed: of torch's generator during the call; None leaves the generator as it is.

        Raises:
            NotSupported: the module is not whole in this process.
            VerbatimError: called inside a step of this engine, or its weights are asleep.
        """
        module = self._whole_module(method)
        call = module if method == "forward" else getattr(module, method)
        return run_alone(module, call, *args, seed=seed, **kwargs)

    def run_layers(self, hidden: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        """Run hidden states `[B, T, H]` through all layers of `module`, by transformers' own code.

        They are no requests: nothing is cached, evicted or computed again by the engine.

        Args:
            cache: what the call for the positions before returned; None at first.

        Returns:
            The output of the last layer, in front of the final norm, and the cache.

        Raises:
            NotSupported, UnsupportedModel: the module is not whole in this process, or has other layers.
            VerbatimError: called inside a step of this engine, or its weights are asleep.
        """
        module = self._whole_module("hidden states")
        hidden, cache = run_alone(module, run_layers, module, hidden, cache)
        return hidden, cache

    def _whole_module(self, what: str) -> Any:
        self._refuse_inside()
        if self.module is None:
            self.check_awake()
            raise NotSupported(f"{what}: the model is not whole and unquantized in this process")
        return self.module

    def pause(self, mode: str = "keep") -> None:
        """Stop steps, as `LLM.pause`. Of several calls, the latest counts.

        Raises:
            VerbatimError: draining while asleep.
        """
        if mode not in PAUSE_MODES:
            raise InvalidRequest(
                f"mode={mode!r}: must be one of {', '.join(map(repr, PAUSE_MODES))}"
            )
        changed: list[tuple[Mode, Mode]] = []  # from, to
        try:
            self.call(lambda: changed.append(self._pause(mode)))
            self._wait(ThreadWaiter(), lambda: self._mode is not Mode.DRAINING or self.closed)
        except KeyboardInterrupt:
            if changed:
                self._send(lambda: self._undo_pause(*changed[0]))
            raise

    def _pause(self, mode: str) -> tuple[Mode, Mode]:
        """Pause or drain; return the modes before and after."""
        if mode == "drain" and self._asleep:
            raise VerbatimError("an engine that sleeps can't be drained; call wake() first")
        if mode == "abort":
            self._engine.abort_all()
        before, drain = self._mode, mode == "drain" and self._engine.has_work
        self._set_mode(Mode.DRAINING if drain else Mode.PAUSED)
        return before, self._mode

    def _undo_pause(self, before: Mode, after: Mode) -> None:
        if self._mode is after and not self._asleep:  # else another call came later, and counts
            self._set_mode(before)

    def resume(self) -> None:
        """Resume steps, as `LLM.resume`.

        Raises:
            VerbatimError: the engine is asleep.
        """

        def resume() -> None:
            if self._asleep:
                raise VerbatimError("the engine sleeps; call wake(), which resumes as well")
            self._set_mode(Mode.RUNNING)

        self.call(resume)

    def sleep(self, weights: bool = False) -> None:
        """Pause and free memory, as `LLM.sleep`; nothing has changed after an error."""

        def sleep() -> None:
            self._engine.sleep(weights)
            self.scheduler.evict_all()
            self._asleep = True
            self._set_mode(Mode.PAUSED)

        self._together(sleep)

    def wake(self) -> None:
        """Allocate memory and resume, as `LLM.wake`."""

        def wake() -> None:
            if self._asleep:
                self._engine.wake()
                self._asleep = False
                self._set_mode(Mode.RUNNING)

        self._together(wake)

    def update_weights(
        self, prepare: Callable[[], Callable[[], None]], *, version: int | None, restart: bool
    ) -> int:
        """Change the model's weights between two steps, and return their version.

        Args:
            prepare: checks the new weights, and returns the function that writes them.
        """

        def update() -> int:
            self._engine.update_weights(prepare(), version=version, restart=restart)
            return self._engine.weight_version

        return self._together(update)

    @property
    def adapters(self) -> list[str]:
        """The names of the loaded adapters."""
        return self._engine.adapters.names

    def load_adapter(
        self, name: str, layers: Mapping[str, LowRank], *, replace: bool = False
    ) -> None:
        """Load an adapter between two steps.

        Raises:
            InvalidRequest, NotSupported: as `LoadedAdapters.load`; nothing has changed then.
        """
        self._together(lambda: self._engine.adapters.load(name, layers, replace=replace))

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter between two steps, as `LLM.unload_adapter`."""
        self._together(lambda: self._engine.adapters.unload(name))

    def evict_all(self) -> None:
        """Free all blocks and clear the prefix cache; the KV of running requests is recomputed."""
        self.call(self.scheduler.evict_all)

    def forget_cached(self) -> None:
        """Clear the prefix cache; running requests keep their blocks."""
        self.call(self.scheduler.forget_cached)

    def release_sessions(self) -> None:
        """Free the blocks of closed sessions after the current step."""
        self._send(self._engine.sessions.reclaim)

    def stats(self) -> dict[str, Any]:
        """Return counters since the engine was opened, and its present load; also after `close`."""

        def stats() -> dict[str, Any]:
            paused = self._mode is Mode.PAUSED
            return {**self._engine.stats(), "paused": paused, "asleep": self._asleep}

        return self._between_steps(stats)

    def info(self) -> dict[str, Any]:
        """Return the model's properties and how it is run, as plain values."""
        runner, admission, drafting = self.runner, self.admission, self.drafting
        placed = self._between_steps(runner.info)
        return {
            **placed,
            "vocab_size": runner.vocab_size,
            "max_length": admission.max_length,
            "max_length_from": admission.limit_source,
            "eos_ids": sorted(admission.eos_ids),
            "adapters": self._engine.adapters.info(),
            "block_size": runner.block_size,
            "num_blocks": runner.num_blocks,
            "draft": None if drafting is None else drafting.info(),
            "numerics_key": numerics_key(
                placed["dtype"],
                placed["kv_dtype"],
                (placed.get("quantization") or {}).get("requested"),
                placed.get("gpu"),
            ),
            "probe": _probe_findings(),
        }

    def _between_steps(self, read: Callable[[], _T]) -> _T:
        """Call `read` between two steps; at once in a hook or a signal handler, which can't wait."""
        if self._owner._is_owned() or self._lock._is_owned():  # type: ignore[attr-defined]
            return read()
        return self.call(read, when_closed=True)

    def close(self) -> None:
        """End running requests as "abort" and close the runner. May be called again.

        Prefixes that are not in files yet are written first.
        """
        self._refuse_inside()
        if self._engine.prefix_folder is not None and not self.closed:
            self._engine.prefix_folder.finish()
        self.call(self._close, when_closed=True)
        self._stop_thread()

    def _close(self) -> None:
        try:
            if not self.closed:
                try:
                    self._shut_down("this LLM has been closed")
                finally:
                    self._engine.close()
        finally:
            if self.collective is not None:
                self.collective.close()

    # ---- ownership

    @contextmanager
    def _submitted(self, call: Call) -> Iterator[None]:
        """Run the block with the call's requests submitted; abort the unfinished ones at its end."""
        self._refuse_inside()
        try:
            self._submit(call)
            yield
        finally:
            if call.num_open:
                self._send(lambda: self._abort(call.requests, call))

    def _submit(self, call: Call) -> None:
        requests = call.requests
        with Shield().up(), self._lock:
            self.check_open()
            known = any(request.finished or request in self._calls for request in requests)
            if known or len(set(requests)) < len(requests):
                raise InvalidRequest("a request can't be submitted twice")
            self._engine.check_queue(len(self._entering) + len(requests))
            if call.driven:
                self._start_thread()
            for request in requests:
                request.streamed = call.is_read
                self._calls[request] = self._entering[request] = call
            if call.driven:
                self._num_driven += len(requests)
        self._send(_no_work)  # an owner adds them

    def _send(self, message: Callable[[], object]) -> None:
        """Have the owner call `message` soon; from any thread, and from finalizers."""
        self._inbox.put(message)
        if not self._owner._is_owned():
            self._hand_on()

    def _own(self, work: Callable[[], _T], shield: Shield | None = None) -> _T:
        """Wait for this thread's turn to own the engine, and return the result of `work`.

        Args:
            shield: the shield that is up in this thread. None: it is raised meanwhile.
        """
        if shield is None:
            with Shield().up() as shield:
                return self._own(work, shield)
        waiter, results = ThreadWaiter(), list[_T]()
        with self._in_line(self._queue, waiter):
            while True:
                nested = holds_exclusive()
                if nested or self._queue[0] is waiter:
                    if self._try(lambda: results.append(work()), shield):
                        return results[0]
                if nested:
                    raise VerbatimError(_NESTED)
                with shield.down():
                    waiter.wait(_CHECK_S)

    def _try(self, work: Callable[[], object], shield: Shield) -> bool:
        """Become the owner, process the inbox and call `work`; return False if there is another owner."""
        if not self._owner.acquire(blocking=False):
            return False
        self._engine.shield = shield  # a step lowers it where Ctrl-C breaks nothing
        try:
            try:
                self._process_inbox()
            except Exception as error:  # a bug: no caller may wait for ever
                self._step_failed(error)
            work()
        finally:
            woken, self._woken = self._woken, {}
            self._owner.release()
            wake_all(woken)
        return True

    def _hand_on(self) -> None:
        """Process late messages; wake the next owner, and the thread that runs the steps."""
        while not self._inbox.empty():
            with Shield().up() as shield:
                if not self._try(_no_work, shield):
                    break
        with suppress(IndexError):
            self._queue[0].wake()
        if self._num_driven and (thread := self._thread) is not None:
            thread.waiter.wake_from_outside()
        else:
            with suppress(IndexError):
                self._waiting[0].wake_from_outside()

    def _wait(self, waiter: ThreadWaiter, done: Callable[[], bool]) -> None:
        """Run steps until `done`, or wait while another thread runs them."""
        with Shield().up() as shield, self._in_line(self._waiting, waiter):
            while not done():
                wait_s, driven = _CHECK_S, self._num_driven and self._thread is not None
                if holds_exclusive() or (self._waiting[0] is waiter and not driven):
                    wait_s = self._own(self._step_if_due, shield)
                if wait_s:
                    with shield.down():
                        waiter.wait(wait_s)

    @contextmanager
    def _in_line(self, queue: deque[ThreadWaiter], waiter: ThreadWaiter) -> Iterator[None]:
        """Wait in a queue during the block, within a shield.

        In front, if this thread waits there already: a signal handler has interrupted it.
        """
        if any(other.thread == waiter.thread for other in queue.copy()):
            queue.appendleft(waiter)
        else:
            queue.append(waiter)
        try:
            yield
        finally:
            queue.remove(waiter)
            self._hand_on()

    def _refuse_inside(self) -> None:
        if self._owner._is_owned():
            raise VerbatimError("an engine can't be called from inside its own forward")

    def refuse_collective(self, what: str) -> None:
        """Raise NotSupported if all processes must make the same calls, which excludes `what`."""
        if self.collective is not None:
            raise NotSupported(
                f"{what}: not supported where each rank is a process of yours; ranks make all calls "
                "together, and only generate, score and chat are available"
            )

    def _refuse_async(self, what: str) -> None:
        self.refuse_collective(what)
        self._refuse_inside()
        if holds_exclusive():
            raise VerbatimError(_NESTED)

    # ---- called by the owner

    def _step_if_due(self) -> float:
        """Run a step if there is work; return the seconds until the next attempt."""
        if self._step():
            return 0.0
        if self._mode is not Mode.PAUSED:
            return _POLL_S if self._engine.has_work else _CHECK_S
        deadline = self._engine.next_deadline()
        left_s = _CHECK_S if deadline is None else deadline - time.monotonic()
        return min(max(1e-3, left_s), _CHECK_S)

    def _process_inbox(self) -> None:
        """Process the messages in the inbox, and add new requests to the engine."""
        self._engine.sessions.reclaim()
        if self._entering:
            self._add_entering()
        for _ in range(self._inbox.qsize()):
            self._inbox.get_nowait()()
            if self._entering:
                self._add_entering()

    def _add_entering(self) -> None:
        draining, now = self._mode is Mode.DRAINING, time.monotonic()
        with self._lock:
            entering = list(self._entering.items())
        for request, call in entering:
            if draining and now < _deadline(request):
                continue
            with self._lock:
                self._entering.pop(request, None)
            self._add(request, call)

    def _add(self, request: Request, call: Call) -> None:
        try:
            self._engine.add(request, lambda delta: self._deliver(call, delta))
        except Exception as error:
            self._fail(request, error)

    def _deliver(self, call: Call, delta: Delta) -> None:
        """Deliver a delta during a step."""
        if not call.is_read:
            return
        if call.waiter is not None:
            self._woken[call.waiter] = None
        call.deliver(delta)

    def _step(self) -> bool:
        """Run a step; return False if there was nothing to do."""
        if self._mode is Mode.PAUSED:
            self._engine.expire(time.monotonic())
            return False
        try:
            made = self._engine.step()
        except BaseException as error:
            # Ctrl-C in a step run by a caller goes to that caller; all requests are unchanged.
            if self._thread is None or not self._thread.is_current():
                if not isinstance(error, Exception):
                    raise
            self._step_failed(error)
            return True
        if self._mode is Mode.DRAINING and not self._engine.has_work:
            self._set_mode(Mode.PAUSED)
        return made

    def _step_failed(self, error: BaseException) -> None:
        """End all requests with the error of a step, whose state is unknown."""
        for request in list(self._calls):
            if request not in self._entering:
                self._fail(request, as_exception(error))
        if isinstance(error, TierFailed):
            self._shut_down(f"this LLM was closed when this happened: {error}")
            self._engine.close()

    def _peek(self) -> list[tuple[Request, int, float]]:
        return [
            (chunk.sequence.request, draw.id, draw.logprob)
            for chunk in (() if self._mode is Mode.PAUSED else self._engine.peek())
            if not chunk.sequence.request.finished
            for draw in chunk.results[chunk.num_prompt_rows :][:1]
        ]

    def _abort(self, requests: list[Request], call: Call | None) -> None:
        for request in requests:
            if call is None or self._calls.get(request) is not call:
                continue
            if self._entering.pop(request, None) is not None:
                self._add(request, call)
            if not request.finished:
                try:
                    self._engine.abort(request)
                except Exception as error:
                    self._fail(request, error)

    def _fail(self, request: Request, error: Exception) -> None:
        if request.finished:
            return
        try:
            self._engine.fail(request, error)
        except Exception:  # the engine is broken; the caller must get the error nevertheless
            request.error = error
            self._end(request)

    def _end(self, request: Request) -> None:
        """Report an ended request to its caller."""
        with self._lock:
            call = self._calls.pop(request, None)
            if call is None:
                return
            self._num_driven -= call.driven
            if call.driven and not self._num_driven:  # callers run the steps again
                self._woken.update(dict.fromkeys(self._waiting))
        call.end(request)
        if call.waiter is not None and (not call.num_open or call.is_read):
            self._woken[call.waiter] = None

    def _set_mode(self, mode: Mode) -> None:
        self._mode = mode
        self._woken.update(dict.fromkeys(self._waiting))

    def _shut_down(self, why: str) -> None:
        """Refuse new requests, and end the present ones as "abort"."""
        with self._lock:
            self._why_closed = why
        self._set_mode(Mode.RUNNING)
        try:
            self._add_entering()
            self._engine.abort_all()
        finally:
            for request in list(self._calls):
                self._fail(request, EngineClosed(why))

    # ---- the background thread

    def _start_thread(self) -> None:
        """Start the background thread, unless it runs."""
        if _interpreter_ends:
            raise EngineClosed("the interpreter is ending")
        if self._thread is None:
            self._thread = _Thread(self)

    def _retire(self) -> bool:
        """Detach the idle background thread; return False if it has requests again."""
        with self._lock:
            if self._num_driven:
                return False
            self._thread = None
            return True

    def _stop_thread(self) -> None:
        """Stop the background thread after its current step, and wait for its end."""
        thread = self._thread
        if thread is not None:
            thread.stop()
            self._thread = None

    def _forked(self) -> None:
        """Close the handle in the child of a fork, which lacks the parent's threads and connections."""
        self._why_closed = self._why_closed or FORKED
        self.collective = None
        self._calls.clear()
        self._entering.clear()
        self._num_driven = 0
        self._reset()
        self._engine.sessions.after_fork()


class _Thread:
    """Runs the steps of a handle while it has driven requests."""

    def __init__(self, handle: EngineHandle) -> None:
        self.waiter = waiter = ThreadWaiter()
        self._handle = weakref.ref(handle, lambda _: waiter.wake())
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="verbatim-engine", daemon=True)
        self._thread.start()

    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def stop(self) -> None:
        """Stop the thread, and wait for its end."""
        self._stopped = True
        self.waiter.wake()
        if not self.is_current():
            self._thread.join()

    def _run(self) -> None:
        self.waiter.thread = threading.get_ident()
        while not self._stopped and (handle := self._handle()) is not None:
            wait_s = handle._own(handle._step_if_due) if handle._num_driven else IDLE_S
            del handle
            if wait_s == 0 or self.waiter.wait(wait_s):
                continue
            handle = self._handle()
            if wait_s == IDLE_S and (handle is None or handle._retire()):
                return


def _no_work() -> bool:
    return True


def _probe_findings() -> list[str]:
    """Return how matrix products are kept batch-invariant: by the kernels, or by tiles of rows."""
    return [
        f"{rows}x{columns} {dtype_name(dtype)}: tiles of {' and '.join(map(str, tiles.heights))} rows"
        + (", one thread" if tiles.one_thread else "")
        for (rows, columns), dtype, tiles in probe_report()
    ] or ["not needed: the kernels' products are row-invariant by construction"]


def _deadline(request: Request) -> float:
    timeout_s = request.params.timeout_s
    return float("inf") if timeout_s is None else request.arrival + timeout_s


_handles: weakref.WeakSet[EngineHandle] = weakref.WeakSet()
_num_opened = 0
_interpreter_ends = False


def _at_exit() -> None:
    # A thread that returns from a forward into a finalized interpreter would crash the process.
    global _interpreter_ends
    _interpreter_ends = True
    for handle in list(_handles):
        handle._stop_thread()


FORKED = (
    "an LLM was opened before this process was forked, and OpenMP can't run in such a child: start processes "
    "by multiprocessing's 'spawn' method"
)
_is_forked = False


def check_not_forked() -> None:
    """Raise NotSupported in the child of a process that had opened an LLM before it forked."""
    if _is_forked:
        raise NotSupported(FORKED)


def _after_fork() -> None:
    global _is_forked
    _is_forked = _is_forked or _num_opened > 0
    for handle in list(_handles):
        handle._forked()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork)
