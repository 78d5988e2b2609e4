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
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from functools import partial
from itertools import chain
from typing import Any, Protocol, TypeVar

from verbatim.batch import dummy_batch
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
from verbatim.kernels import numerics_key
from verbatim.model.patching import holds_exclusive
from verbatim.model.products import probe_report
from verbatim.options import dtype_name, on_cpu
from verbatim.placement.actor import run_alone
from verbatim.protocols import CacheLost
from verbatim.shield import Shield

_T = TypeVar("_T")
PAUSE_MODES = ("keep", "drain", "abort")
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
    ASLEEP = "asleep"  # paused, and without memory

    @property
    def has_steps(self) -> bool:
        return self in (Mode.RUNNING, Mode.DRAINING)


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
    It starts on demand, and holds the handle only weakly while no coroutine waits.

    Finalizers and signal handlers must not wait: they put messages into an inbox, which a thread empties
    when it becomes the owner and when it stops.

    Args:
        max_unread: maximum unread deltas of a stream; one more ends its request.
        collective: set if other processes make the same calls.

    Attributes:
        admission: validates prompts and parameters, and creates requests.
        runner: the model in its placement. Its methods are called inside `call`.
        scheduler: read inside `call`, or while nothing runs.
        drafting: speculative decoding; None without drafts.
        sessions: reservations and cached blocks of sessions.
        adapters: the loaded adapters; loads and unloads inside `together`.
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
        self.adapters = engine.adapters
        self._engine = engine
        self._max_unread = max_unread
        self._mode = Mode.RUNNING
        self._why_closed: str | None = None
        # Unfinished requests; an owner adds them to the engine, unless it drains.
        self._calls: dict[Request, Call] = {}
        self._num_driven = 0  # unfinished requests that the background thread runs
        self._woken: dict[Waiter, None] = {}  # to be woken when the owner's turn ends
        # Weak: a reference cycle would keep a dropped handle for a while.
        end = weakref.WeakMethod(self._end)
        engine.on_end = lambda request: (method := end()) and method(request)
        self._reset()
        global _opened_in
        _opened_in = _opened_in or os.getpid()
        _handles.add(self)

    def _reset(self) -> None:
        """Create locks, inbox and lists of waiters: at the beginning, and in the child of a fork."""
        # A SimpleQueue: a finalizer may put a message at any moment.
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        # Held by the owner. Never acquired twice; an RLock, because it knows which thread holds it.
        self._owner: Any = threading.RLock()
        self._lock = threading.RLock()  # guards `_calls` and `_thread`; held briefly
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
    def bos_id(self) -> int | None:
        """The id that begins a text, of the tokenizer, else of the configs; None if none has a valid one."""
        ids = [getattr(self.admission.tokenizer, "bos_id", None)]
        ids += [getattr(c, "bos_token_id", None) for c in (self.generation_config, self.config)]
        valid = range(self.admission.vocab_size)
        return next((i for i in ids if isinstance(i, int) and i in valid), None)

    @property
    def has_work(self) -> bool:
        """True if requests run or wait."""
        return bool(self._calls)

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
        if self._mode is Mode.ASLEEP:
            raise VerbatimError("the engine sleeps; call wake() first")

    # ---- requests whose caller waits

    def run(self, requests: list[Request]) -> list[Result]:
        """Run requests to their end; return their results, or raise the first one's error."""
        if self.collective is not None:
            return self.collective.run(self, requests)
        return self.run_here(requests)

    def together(self, work: Callable[[], _T]) -> _T:
        """Call `work` between two steps, on all processes if there are several."""
        if self.collective is None:
            return self.call(work)
        return self.collective.agree(lambda: self.call(work))

    def run_here(self, requests: list[Request]) -> list[Result]:
        """Run requests to their end on this process alone."""
        waiter = ThreadWaiter()
        call = Call(requests, waiter)
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
        call = Call(requests, waiter, max_unread)
        with self._submitted(call):
            ended = False
            while not ended:
                self._wait(waiter, lambda: bool(call.unread) or not call.num_open)
                ended = not call.num_open  # before the deltas are read, as none come after that
                yield call.take()
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

    async def astream(self, requests: list[Request]) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of requests in asyncio.

        Leaving or cancelling aborts the requests. An error of one ends all.
        """
        self._refuse_async("astream")
        waiter = TaskWaiter()
        call = Call(requests, waiter, self._max_unread)
        with self._submitted(call):
            ended = False
            while not ended:
                await waiter.wait()
                ended = not call.num_open  # before the deltas are read, as none come after that
                while call.unread:
                    yield call.unread.popleft()
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
        request.deliver, request.on_end = deliver, on_end or request.on_end
        self._submit(Call([request]))

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
            # Short: a `resume` between the step and this wait has woken no one.
            waiter.wait(min(wait_s, _POLL_S if self._mode.has_steps else _CHECK_S))

    def abort(self, request: Request) -> None:
        """End a request after the current step, with the output it has; from any thread."""
        if (call := self._calls.get(request)) is not None:
            self._send(lambda: self._abort([request], call))

    def peek(self) -> list[tuple[Request, int, float]]:
        """Return the draws of the next step without committing them: request, token id and log-prob.

        The next step computes them again. The list is empty while the engine is paused.
        """
        return self.call(lambda: self._engine.peek() if self._mode.has_steps else [])

    def dummy_forward(self) -> None:
        """Run a forward of one row in the scratch block, for a rank without requests."""

        def forward() -> None:
            self.check_awake()
            with suppress(CacheLost):  # what was lost is computed again by the next step
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

    def call_module(
        self, call: str | Callable[..., Any], *args: Any, seed: int | None = None, **kwargs: Any
    ) -> Any:
        """Call a method or a function of `module` in eval mode, while no engine of this process computes.

        What it computes is no request: nothing is cached, evicted or computed again by the engine.

        Args:
            call: a method's name, of which "forward" calls the module itself, hooks included; or a function,
                which gets the module as its first argument.
            seed: of torch's generator during the call; None leaves the generator as it is.

        Raises:
            NotSupported: the module is not whole in this process.
            VerbatimError: called inside a step of this engine, or its weights are asleep.
        """
        self._refuse_inside()
        module, name = self.module, call if isinstance(call, str) else call.__name__
        if module is None:
            self.check_awake()
            what = name.replace("_", " ")
            raise NotSupported(f"{what}: the model is not whole and unquantized in this process")
        if not isinstance(call, str):
            return run_alone(module, call, module, *args, seed=seed, **kwargs)
        method = module if call == "forward" else getattr(module, call)
        return run_alone(module, method, *args, seed=seed, **kwargs)

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
        before, drain = self._mode, mode == "drain"
        if drain and before is Mode.ASLEEP:
            raise VerbatimError("an engine that sleeps can't be drained; call wake() first")
        if mode == "abort":
            self._engine.abort_all()
        if before is not Mode.ASLEEP:
            self._set_mode(Mode.DRAINING if drain and self._engine.has_work else Mode.PAUSED)
        return before, self._mode

    def _undo_pause(self, before: Mode, after: Mode) -> None:
        if self._mode is after:  # else another call came later, and counts
            self._set_mode(before)

    def resume(self) -> None:
        """Resume steps, as `LLM.resume`.

        Raises:
            VerbatimError: the engine is asleep.
        """

        def resume() -> None:
            if self._mode is Mode.ASLEEP:
                raise VerbatimError("the engine sleeps; call wake(), which resumes as well")
            self._set_mode(Mode.RUNNING)

        self.call(resume)

    def sleep(self, weights: bool = False) -> None:
        """Pause and free memory, as `LLM.sleep`; nothing has changed after an error."""

        def sleep() -> None:
            self._engine.sleep(weights)
            self.scheduler.evict_all()
            self._set_mode(Mode.ASLEEP)

        self.together(sleep)

    def wake(self) -> None:
        """Allocate memory and resume, as `LLM.wake`."""

        def wake() -> None:
            if self._mode is Mode.ASLEEP:
                self._engine.wake()
                self._set_mode(Mode.RUNNING)

        self.together(wake)

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

        return self.together(update)

    def evict_all(self) -> None:
        """Free all blocks and clear the prefix cache; the KV of running requests is recomputed."""
        self.call(self.scheduler.evict_all)

    def forget_cached(self) -> None:
        """Clear the prefix cache; running requests keep their blocks."""
        self.call(self.scheduler.prefixes.forget)

    def release_sessions(self) -> None:
        """Free the blocks of closed sessions after the current step."""
        self._send(self._engine.sessions.reclaim)

    def stats(self) -> dict[str, Any]:
        """Return counters since the engine was opened, and its present load; also after `close`."""
        return self._between_steps(
            lambda: {
                **self._engine.stats(),
                "paused": not self._mode.has_steps,
                "asleep": self._mode is Mode.ASLEEP,
            }
        )

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
            "adapters": self.adapters.info(),
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
            self._engine.check_queue(chain(self._calls, requests))
            if call.driven and self._thread is None:
                if _interpreter_ends:
                    raise EngineClosed("the interpreter is ending")
                self._thread = _Thread(self)
            for request in requests:
                if call.keeps:
                    request.deliver = partial(self._keep, call)
                self._calls[request] = call
            if call.driven and self._thread is not None:
                self._num_driven += len(requests)
                self._thread.waiter.wake()
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
        try:  # a signal handler may raise as soon as the lock is taken
            if not self._owner.acquire(blocking=False):
                return False
            self._engine.shield = shield  # a step lowers it where Ctrl-C breaks nothing
            with on_cpu():
                try:
                    self._process_inbox()
                except Exception as error:  # a bug: no caller may wait for ever
                    self._step_failed(error)
                work()
            return True
        finally:
            try:
                woken = self._take_woken()
            finally:
                try:
                    # Signal handlers run behind calls, and this is the first one here.
                    self._owner.release()
                except RuntimeError:  # another thread is the owner
                    pass
            wake_all(woken)

    def _take_woken(self) -> Any:
        """Return who is to be woken, if this thread is the owner."""
        if not self._owner._is_owned():
            return {}
        woken, self._woken = self._woken, {}
        return woken

    def _hand_on(self) -> None:
        """Process late messages; wake the next owner, and the thread that runs the steps."""
        while not self._inbox.empty():
            with Shield().up() as shield:
                if not self._try(_no_work, shield):
                    break
        with suppress(IndexError):
            self._queue[0].wake()
        with suppress(IndexError):
            if (first := self._waiting[0]).thread != threading.get_ident():
                first.wake()

    def _wait(self, waiter: ThreadWaiter, done: Callable[[], bool]) -> None:
        """Run steps until `done`, or wait while another thread runs them."""
        with Shield().up() as shield, self._in_line(self._waiting, waiter):
            while not done():
                wait_s = _CHECK_S
                if holds_exclusive() or self._waiting[0] is waiter:
                    wait_s = self._own(self._step_if_due, shield)
                if wait_s:
                    with shield.down():
                        waiter.wait(wait_s)

    @contextmanager
    def _in_line(self, line: deque[ThreadWaiter], waiter: ThreadWaiter) -> Iterator[None]:
        """Keep a waiter in a line of waiters during the block, within a shield.

        It stands in front if it is the background thread's, or if this thread is in the line already, which
        means that a signal handler has interrupted it.
        """
        if waiter.first or any(other.thread == waiter.thread for other in line.copy()):
            line.appendleft(waiter)
        else:
            line.append(waiter)
        try:
            yield
        finally:
            line.remove(waiter)
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
        if self._mode.has_steps:
            return _POLL_S if self._engine.has_work else _CHECK_S
        return min(max(1e-3, self._engine.next_deadline - time.monotonic()), _CHECK_S)

    def _process_inbox(self) -> None:
        """Process the messages in the inbox, and add new requests to the engine."""
        self._engine.sessions.reclaim()
        self._add_new()
        for _ in range(self._inbox.qsize()):
            self._inbox.get_nowait()()
            self._add_new()

    def _add_new(self) -> None:
        active, draining = self._engine.active, self._mode is Mode.DRAINING
        if len(self._calls) == len(active):
            return
        with self._lock:
            new = [r for r in self._calls if not (r in active or r.finished)]
        for request in new:
            if not draining or request.deadline <= time.monotonic():
                self._try_with(request, self._engine.add)

    def _try_with(self, request: Request, work: Callable[[Request], None]) -> None:
        """Call `work`; an error ends the request."""
        try:
            work(request)
        except Exception as error:
            self._fail(request, error)

    def _keep(self, call: Call, delta: Delta) -> None:
        """Keep a delta of a step for a caller, which is woken."""
        assert call.waiter is not None
        self._woken[call.waiter] = None
        call.keep(delta)

    def _step(self) -> bool:
        """Run a step; return False if there was nothing to do."""
        if not self._mode.has_steps:
            self._engine.expire(time.monotonic())
            return False
        try:
            has_run = self._engine.step()
        except BaseException as error:
            # Ctrl-C in a step run by a caller goes to that caller; all requests are unchanged.
            if threading.current_thread() is not self._thread and not isinstance(error, Exception):
                raise
            self._step_failed(error)
            return True
        if self._mode is Mode.DRAINING and not self._engine.has_work:
            self._set_mode(Mode.PAUSED)
        return has_run

    def _step_failed(self, error: BaseException) -> None:
        """End all requests with the error of a step, whose state is unknown."""
        for request in list(self._engine.active):
            self._fail(request, as_exception(error))
        if isinstance(error, TierFailed):
            self._shut_down(f"this LLM was closed when this happened: {error}")
            self._engine.close()

    def _abort(self, requests: list[Request], call: Call) -> None:
        for request in requests:
            if self._calls.get(request) is call:
                if request not in self._engine.active:
                    self._try_with(request, self._engine.add)
                self._try_with(request, self._engine.abort)

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
            if call.driven and not self._num_driven and self._thread is not None:
                self._woken[self._thread.waiter] = None  # callers run the steps again
        request.deliver = None  # it refers to the request, and to this handle
        call.end(request)
        if call.waiter is not None and (not call.num_open or call.keeps):
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
            self._add_new()
            self._engine.abort_all()
        finally:
            for request in list(self._calls):
                self._fail(request, EngineClosed(why))

    # ---- the background thread

    def _drive(self, thread: _Thread) -> None:
        """Run steps while coroutines wait."""
        self._wait(thread.waiter, lambda: thread.stopped or not self._num_driven)

    def _stop_thread(self) -> None:
        """Stop the background thread after its current step, and wait for its end."""
        thread = self._thread
        if thread is not None:
            thread.stopped = True
            thread.waiter.wake()
            if thread is not threading.current_thread():
                thread.join()
            self._thread = None

    def _forked(self) -> None:
        """Close the handle in the child of a fork, which lacks the parent's threads and connections."""
        self._why_closed = self._why_closed or FORKED
        self.collective = None
        self._calls.clear()
        self._num_driven = 0
        self._reset()
        self._engine.sessions.after_fork()


class _Thread(threading.Thread):
    """Runs the steps of a handle while it has driven requests; otherwise it holds the handle weakly."""

    def __init__(self, handle: EngineHandle) -> None:
        super().__init__(name="verbatim-engine", daemon=True)
        self.waiter = waiter = ThreadWaiter(first=True)
        self.stopped = False
        self.handle = weakref.ref(handle, lambda _: waiter.wake())
        self.start()

    def run(self) -> None:
        self.waiter.thread = threading.get_ident()
        while not self.stopped and (handle := self.handle()) is not None:
            handle._drive(self)
            del handle
            if not self.stopped:  # else `_drive` may have taken the wake of `_stop_thread`
                self.waiter.wait()


def _no_work() -> bool:
    return True


def _probe_findings() -> list[str]:
    """Return how matrix products are kept batch-invariant: by the kernels, or by tiles of rows."""
    return [
        f"{rows}x{columns} {dtype_name(dtype)}: tiles of {' and '.join(map(str, heights))} rows, one thread"
        for (rows, columns), dtype, heights in probe_report()
    ] or ["not needed: the kernels' products are row-invariant by construction"]


_handles: weakref.WeakSet[EngineHandle] = weakref.WeakSet()
_opened_in: int | None = None  # the process of the first handle
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


def check_not_forked() -> None:
    """Raise NotSupported in the child of a process that had opened an LLM before it forked."""
    if _opened_in not in (None, os.getpid()):
        raise NotSupported(FORKED)


def _after_fork() -> None:
    for handle in list(_handles):
        handle._forked()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork)
