"""`EngineHandle`: thread-safe access to an engine, from threads and event loops."""

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
from functools import partial
from typing import Any, Protocol, TypeVar

from verbatim.batch import dummy_batch
from verbatim.common.shield import Shield
from verbatim.core import Delta, Request, Result
from verbatim.engine.admission import Admission
from verbatim.engine.calls import (
    Call,
    TaskWaiter,
    ThreadWaiter,
    Waiter,
    wake_all,
)
from verbatim.engine.engine import Engine, Mode
from verbatim.errors import (
    EngineClosed,
    InvalidRequest,
    NotSupported,
    TierFailed,
    VerbatimError,
    as_exception,
)
from verbatim.kernels import instruction_set, numerics_key
from verbatim.model.patching import holds_exclusive
from verbatim.model.products import probe_report
from verbatim.options import dtype_name, on_cpu
from verbatim.placement.actor import run_alone
from verbatim.protocols import CacheLost

_T = TypeVar("_T")
_POLL_S = 0.05  # time between two attempts to step while an engine has work that can't run yet
_CHECK_S = 1.0  # maximum sleep of a waiting caller between two checks
_NESTED = (
    "this call comes from inside another engine's forward, and this engine is in use: waiting would "
    "deadlock, since no other forward can run until that one returns"
)


class Collective(Protocol):
    """Makes the calls that all processes must make together."""

    may_be_empty: bool  # whether this process can join a call without requests of its own

    def run(self, handle: EngineHandle, admit: Callable[[], list[Request]]) -> list[Result]:
        """Run the requests that `admit` returns to completion on all processes."""
        ...

    def agree(self, work: Callable[[], _T]) -> _T:
        """Call `work` on all processes; if rank 0 works for all, its error fails the call on every rank."""
        ...

    def close(self) -> None:
        """Close the connections between the processes."""
        ...


class EngineHandle:
    """Calls an engine from any number of threads and event loops.

    One thread at a time owns the engine (holds the engine lock), for a step or for work between two steps.
    Waiting threads become owners in order of arrival. A thread that waits for its requests runs the steps, so
    debuggers, profilers, thread-local settings and Ctrl-C work where the call was made. If several threads
    wait, the first one runs the steps for all. For coroutines, a background thread of the handle runs them.
    It starts on demand, and holds only a weak reference to the handle while no coroutine waits.

    Finalizers and signal handlers must not wait: they put messages into an inbox, which a thread processes
    when it acquires and when it releases ownership.

    Args:
        max_unread: maximum number of unread deltas of a stream; the request fails if there are more.
        collective: makes the calls that other processes make as well; None for a single process.

    Attributes:
        admission: validates prompts and parameters, and creates requests.
        runner: the model in its placement. Call its methods only inside `call`.
        scheduler: read it only inside `call`, or while no step runs.
        drafting: speculative decoding; None without drafts.
        sessions: reservations and cached blocks of sessions.
        adapters: the loaded adapters. Load and unload them only inside `call_on_all`.
        config, generation_config: the model's transformers configs; None if it has none.
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
        self._seen_mode = engine.mode  # after the last work of an owner
        self._why_closed: str | None = None
        # The call of each unfinished request. The owner adds new requests to the engine, unless draining.
        self._calls: dict[Request, Call] = {}
        self._num_driven = 0  # unfinished requests that the background thread runs
        self._to_wake: dict[Waiter, None] = {}  # to be woken when the owner releases the engine
        # Weak: a reference cycle would delay the collection of a dropped handle.
        end = weakref.WeakMethod(self._end)
        engine.on_end = lambda request: (method := end()) and method(request)
        self._reset()
        global _opened_in
        _opened_in = _opened_in or os.getpid()
        _handles.add(self)

    def _reset(self) -> None:
        """Create locks, inbox and queues of waiters: at construction, and in the child of a fork."""
        # A SimpleQueue is reentrant: a finalizer may put a message at any moment.
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        # Held by the owner. Never acquired twice; an RLock because it knows the thread that holds it.
        self._owner: Any = threading.RLock()
        self._lock = threading.RLock()  # guards `_calls` and `_thread`; held briefly
        # Threads that wait to be the owner, in order.
        self._owner_queue: deque[ThreadWaiter] = deque()
        # Threads that wait for their requests; the first one runs the steps.
        self._step_queue: deque[ThreadWaiter] = deque()
        self._thread: _Thread | None = None

    # ---- state

    @property
    def module(self) -> Any:
        """The model's module, if it is whole and unquantized in this process's memory; else None."""
        return getattr(self.runner, "whole_module", None)

    @property
    def bos_id(self) -> int | None:
        """The BOS id of the tokenizer, else of the configs; None if none of them has a valid one."""
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
        if self._engine.mode is Mode.ASLEEP:
            raise VerbatimError("the engine sleeps; call wake() first")

    def check_running(self) -> None:
        """Raise VerbatimError if new requests would wait for `wake` or `resume`, EngineClosed if closed."""
        self.check_awake()
        if self._engine.mode is not Mode.RUNNING:
            raise VerbatimError("the engine is paused; call resume() first")

    # ---- requests with a waiting caller

    def run(self, requests: list[Request]) -> list[Result]:
        """Run requests to completion; return their results, or raise the error of the first that failed."""
        return self.admit_and_run(lambda: requests)

    @property
    def may_be_empty(self) -> bool:
        """True if a call may have no prompts, because other ranks may have some."""
        return self.collective is not None and self.collective.may_be_empty

    def admit_and_run(self, admit: Callable[[], list[Request]]) -> list[Result]:
        """Run the requests that `admit` returns; an error of it also fails the other processes' calls."""
        if self.collective is not None:
            return self.collective.run(self, admit)
        return self.run_here(admit())

    def call_on_all(self, work: Callable[[], _T]) -> _T:
        """Call `work` between two steps, on all processes."""
        if self.collective is None:
            return self.call(work)
        return self.collective.agree(lambda: self.call(work))

    def run_here(self, requests: list[Request]) -> list[Result]:
        """Run requests to completion in this process alone."""
        waiter = ThreadWaiter()
        with self._submitted(requests, waiter) as call:
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
        """Run steps, and yield the new deltas of `requests` after each, until all have ended.

        Leaving the loop aborts the requests. The error of a failed request is raised after the last yield.

        Args:
            max_unread: maximum number of unread deltas from other threads' steps; one more fails its request.
        """
        self.refuse_collective("a loop over steps")
        waiter, ended = ThreadWaiter(), False
        with self._submitted(requests, waiter, max_unread) as call:
            while not ended:
                self._wait(waiter, lambda: bool(call.unread) or not call.num_open)
                ended = not call.num_open  # read first: no deltas come after the end
                yield call.take()
            call.raise_error()

    async def arun(self, requests: list[Request]) -> list[Result]:
        """Run `run` in asyncio. Cancelling aborts the requests."""
        self._refuse_async("agenerate")
        waiter = TaskWaiter()
        with self._submitted(requests, waiter) as call:
            while call.num_open:
                await waiter.wait()
            return call.results()

    async def astream(self, requests: list[Request]) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of requests in asyncio.

        Leaving the loop, cancelling, or an error of one request aborts all of them.
        """
        self._refuse_async("astream")
        waiter, ended = TaskWaiter(), False
        with self._submitted(requests, waiter, self._max_unread) as call:
            while not ended:
                await waiter.wait()
                ended = not call.num_open  # read first: no deltas come after the end
                while call.unread:
                    yield call.unread.popleft()
                call.raise_error()

    # ---- requests without a waiting caller

    def submit(
        self,
        request: Request,
        deliver: Callable[[Delta], None] | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        """Add a request before the next step, and return at once; the caller runs the steps.

        Args:
            deliver: called with each delta, in the thread that runs the step; an exception fails the request.
            on_end: called in the same thread once `request.result` or `request.error` is set.

        Raises:
            QueueFull: the queue is at its limit.
        """
        request.deliver, request.on_end = deliver, on_end or request.on_end
        self._submit(Call([request]))

    def step(self) -> bool:
        """Run a step for all requests; return False if there was nothing to do, or the engine is paused.

        An error in the step is not raised; it is set on the requests that fail.
        """
        return self.call(self._step)

    def step_or_wait(self, has_output: Callable[[], bool]) -> None:
        """Run a step; if none is possible, wait until `resume`, `close` or a deadline, at most a second.

        There is no wait if `has_output` returns True: a step of another thread has produced output.
        """
        wait_s = self.call(self._step_if_due)
        if not wait_s or has_output():
            return
        waiter = ThreadWaiter()
        with Shield().up() as shield, self._in_queue(self._step_queue, waiter), shield.down():
            # A short timeout, because this wait misses a `resume` between the step and here.
            waiter.wait(min(wait_s, _POLL_S if self._engine.mode.has_steps else _CHECK_S))

    def abort(self, request: Request) -> None:
        """End a request after the current step, with the output it has; from any thread."""
        if (call := self._calls.get(request)) is not None:
            self._send(lambda: self._abort([request], call))

    def peek(self) -> list[tuple[Request, int, float]]:
        """Return the draws of the next step without committing them: request, token id and log-prob.

        The next step computes them again. The list is empty while the engine is paused.
        """
        return self.call(self._engine.peek)

    def dummy_forward(self) -> None:
        """Run a forward of one row in the scratch block, for a rank without requests."""

        def forward() -> None:
            self.check_awake()
            with suppress(CacheLost):  # the next step recomputes the lost K and V
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

        Ctrl-C while the call waits for ownership cancels it.

        Raises:
            EngineClosed: the engine is closed, unless `when_closed`.
            VerbatimError: called inside a step of this engine; or inside another engine's forward while
                this engine is in use.
        """
        self._refuse_inside()
        if self._lock._is_owned():  # type: ignore[attr-defined]
            raise VerbatimError(
                "called by a signal handler that interrupted another call of this engine"
            )

        def checked() -> _T:
            if not when_closed:
                self.check_open()
            return work()

        with Shield().up() as shield:
            return self._call_as_owner(checked, shield)

    def call_module(
        self, call: str | Callable[..., Any], *args: Any, seed: int | None = None, **kwargs: Any
    ) -> Any:
        """Call a method or a function of `module` in eval mode, while no engine of this process computes.

        The call is not a request: the engine caches, evicts and recomputes nothing for it.

        Args:
            call: the name of a method ("forward" calls the module itself, with its hooks), or a function that
                takes the module as its first argument.
            seed: seed of torch's generator during the call; None leaves the generator unchanged.

        Raises:
            NotSupported: this process does not hold the whole module.
            VerbatimError: called inside a step of this engine, or while the weights are asleep.
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
        """Stop steps, as `LLM.pause`. The latest of several calls takes effect."""
        engine, changed = self._engine, list[tuple[Mode, Mode]]()  # from, to

        def undo() -> None:
            before, after = changed[0]
            if engine.mode is after:  # else a later call has changed the mode
                engine.mode = before

        try:
            self.call(lambda: changed.append((engine.mode, engine.pause(mode))))
            self._wait(ThreadWaiter(), lambda: engine.mode is not Mode.DRAINING or self.closed)
        except KeyboardInterrupt:
            if changed:
                self._send(undo)
            raise

    def resume(self) -> None:
        """Resume steps, as `LLM.resume`."""
        self.call(self._engine.resume)

    def sleep(self, weights: bool = False) -> None:
        """Pause and free memory, as `LLM.sleep`; an error leaves the engine unchanged."""
        self.call_on_all(partial(self._engine.sleep, weights))

    def wake(self) -> None:
        """Allocate memory and resume, as `LLM.wake`."""
        self.call_on_all(self._engine.wake)

    def update_weights(
        self, prepare: Callable[[], Callable[[], None]], *, version: int | None, restart: bool
    ) -> int:
        """Change the model's weights between two steps, and return their version.

        `prepare` checks the new weights, and returns the function that writes them.
        """
        return self.call_on_all(
            lambda: self._engine.update_weights(prepare, version=version, restart=restart)
        )

    def release_sessions(self) -> None:
        """Free the blocks of closed sessions after the current step."""
        self._send(self.sessions.reclaim)

    def stats(self) -> dict[str, Any]:
        """Return counters since the engine was opened, and its current load; also after `close`."""
        return self._between_steps(self._engine.stats)

    def info(self) -> dict[str, Any]:
        """Return the properties of the model and of its placement, as plain values."""
        runner, admission, drafting = self.runner, self.admission, self.drafting
        runner_info = self._between_steps(runner.info)
        return {
            **runner_info,
            "vocab_size": runner.vocab_size,
            "max_length": admission.max_length,
            "max_length_from": admission.limit_source,
            "eos_ids": sorted(admission.eos_ids),
            "adapters": self.adapters.info(),
            "block_size": runner.block_size,
            "num_blocks": runner.num_blocks,
            "draft": None if drafting is None else drafting.info(),
            "numerics_key": numerics_key(
                runner_info["dtype"],
                runner_info["kv_dtype"],
                (runner_info.get("quantization") or {}).get("requested"),
                runner_info.get("gpu"),
                by_torch=bool(runner_info["torch_functions"]),
            ),
            "instruction_set": instruction_set(),
            "probe": _probe_findings(),
        }

    def _between_steps(self, read: Callable[[], _T]) -> _T:
        """Call `read` between two steps; or immediately inside a hook or signal handler, which can't wait."""
        if self._owner._is_owned() or self._lock._is_owned():  # type: ignore[attr-defined]
            return read()
        return self.call(read, when_closed=True)

    def close(self) -> None:
        """End running requests as "abort" and close the runner. May be called again.

        Cached prefixes that are not in the prefix folder yet are written first.
        """
        self._refuse_inside()
        if (folder := self.scheduler.prefixes.folder) is not None and not self.closed:
            folder.finish()
        self.call(self._close, when_closed=True)
        self._stop_thread()

    def _close(self) -> None:
        try:
            if not self.closed:
                self._shut_down("this LLM has been closed")
        finally:
            if self.collective is not None:
                self.collective.close()

    # ---- ownership

    @contextmanager
    def _submitted(
        self, requests: list[Request], waiter: Waiter, max_unread: float | None = None
    ) -> Iterator[Call]:
        """Submit the requests of a `Call` at the start of the block; abort the unfinished ones at its end."""
        self._refuse_inside()
        call = Call(requests, waiter, max_unread)
        try:
            self._submit(call)
            yield call
        finally:
            if call.num_open:
                self._send(lambda: self._abort(requests, call))

    def _submit(self, call: Call) -> None:
        requests = call.requests
        with Shield().up(), self._lock:
            self.check_open()
            is_submitted = any(request.finished or request in self._calls for request in requests)
            if is_submitted or len(set(requests)) < len(requests):
                raise InvalidRequest("a request can't be submitted twice")
            self._engine.check_queue([*self._calls, *requests])
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
        self._send(_do_nothing)  # the owner adds the requests

    def _send(self, message: Callable[[], object]) -> None:
        """Queue `message` to be called by the owner; from any thread, and from finalizers."""
        self._inbox.put(message)
        if not self._owner._is_owned():
            self._hand_over()

    def _call_as_owner(self, work: Callable[[], _T], shield: Shield) -> _T:
        """Wait until this thread owns the engine, call `work`, and return its result. `shield` is up."""
        waiter, results = ThreadWaiter(), list[_T]()
        with self._in_queue(self._owner_queue, waiter):
            while True:
                nested = holds_exclusive()
                if nested or self._owner_queue[0] is waiter:
                    if self._try(lambda: results.append(work()), shield):
                        return results[0]
                if nested:
                    raise VerbatimError(_NESTED)
                with shield.down():
                    waiter.wait(_CHECK_S)

    def _try(self, work: Callable[[], object], shield: Shield) -> bool:
        """Become the owner, process the inbox and call `work`; return False if there is another owner."""
        try:  # a signal handler may raise as soon as the lock is acquired
            if not self._owner.acquire(blocking=False):
                return False
            self._engine.shield = shield  # a step lowers it where Ctrl-C is safe
            with on_cpu():
                try:
                    self._process_inbox()
                except Exception as error:  # a bug; without this, callers would wait forever
                    self._step_failed(error)
                work()
            return True
        finally:
            try:
                waiters = self._pop_woken()
            finally:
                try:
                    # Signal handlers run after calls, so none can raise before this one, the first here.
                    self._owner.release()
                except RuntimeError:  # another thread is the owner
                    pass
            wake_all(waiters)

    def _pop_woken(self) -> Any:
        """Remove and return the waiters to wake, if this thread is the owner."""
        if not self._owner._is_owned():
            return {}
        if self._seen_mode is not self._engine.mode:
            self._seen_mode = self._engine.mode
            self._to_wake.update(dict.fromkeys(self._step_queue))
        waiters, self._to_wake = self._to_wake, {}
        return waiters

    def _hand_over(self) -> None:
        """Process late messages; wake the next owner, and the thread that runs the steps."""
        while not self._inbox.empty():
            with Shield().up() as shield:
                if not self._try(_do_nothing, shield):
                    break
        with suppress(IndexError):
            self._owner_queue[0].wake()
        with suppress(IndexError):
            if (first := self._step_queue[0]).thread != threading.get_ident():
                first.wake()

    def _wait(self, waiter: ThreadWaiter, done: Callable[[], bool]) -> None:
        """Run steps until `done`, or wait while another thread runs them."""
        with Shield().up() as shield, self._in_queue(self._step_queue, waiter):
            while not done():
                wait_s = _CHECK_S
                if holds_exclusive() or self._step_queue[0] is waiter:
                    wait_s = self._call_as_owner(self._step_if_due, shield)
                if wait_s:
                    with shield.down():
                        waiter.wait(wait_s)

    @contextmanager
    def _in_queue(self, waiters: deque[ThreadWaiter], waiter: ThreadWaiter) -> Iterator[None]:
        """Hold a waiter in a queue of waiters during the block. A shield must be up.

        It goes to the front if it is the background thread's, or if this thread already waits in the queue,
        which means that this call comes from a signal handler.
        """
        if waiter.first or any(other.thread == waiter.thread for other in waiters.copy()):
            waiters.appendleft(waiter)
        else:
            waiters.append(waiter)
        try:
            yield
        finally:
            waiters.remove(waiter)
            self._hand_over()

    def _refuse_inside(self) -> None:
        if self._owner._is_owned():
            raise VerbatimError("an engine can't be called from inside its own forward")

    def refuse_collective(self, what: str) -> None:
        """Raise NotSupported for `what` if all processes must make the same calls."""
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
        if self._engine.mode.has_steps:
            return _POLL_S if self._engine.has_work else _CHECK_S
        return min(max(1e-3, self._engine.next_deadline - time.monotonic()), _CHECK_S)

    def _process_inbox(self) -> None:
        """Process the messages in the inbox, and add new requests to the engine."""
        self._engine.sessions.reclaim()
        self._add_new_requests()
        for _ in range(self._inbox.qsize()):
            self._inbox.get_nowait()()
            self._add_new_requests()

    def _add_new_requests(self) -> None:
        active, draining = self._engine.active, self._engine.mode is Mode.DRAINING
        if len(self._calls) == len(active):
            return
        with self._lock:
            new = [r for r in self._calls if not (r in active or r.finished)]
        for request in new:
            if not draining or request.deadline <= time.monotonic():
                self._call_or_fail(request, self._engine.add)

    def _call_or_fail(self, request: Request, work: Callable[[Request], None]) -> None:
        """Call `work(request)`; an error fails the request."""
        try:
            work(request)
        except Exception as error:
            self._fail(request, error)

    def _keep(self, call: Call, delta: Delta) -> None:
        """Store a delta for its caller, and wake the caller after the step."""
        assert call.waiter is not None
        self._to_wake[call.waiter] = None
        call.keep(delta)

    def _step(self) -> bool:
        """Run a step; return False if there was nothing to do."""
        try:
            return self._engine.step()
        except BaseException as error:
            # Ctrl-C in a caller's step is raised in that caller; all requests are unchanged.
            if threading.current_thread() is not self._thread and not isinstance(error, Exception):
                raise
            self._step_failed(error)
            return True

    def _step_failed(self, error: BaseException) -> None:
        """Fail all requests with the error of a step, since their state is unknown."""
        for request in list(self._engine.active):
            self._fail(request, as_exception(error))
        if isinstance(error, TierFailed):
            self._shut_down(f"this LLM was closed when this happened: {error}")

    def _abort(self, requests: list[Request], call: Call) -> None:
        for request in requests:
            if self._calls.get(request) is call:
                if request not in self._engine.active:
                    self._call_or_fail(request, self._engine.add)
                self._call_or_fail(request, self._engine.abort)

    def _fail(self, request: Request, error: Exception) -> None:
        if request.finished:
            return
        try:
            self._engine.fail(request, error)
        except Exception:  # the engine is broken, but the caller must receive the error
            request.error = error
            self._end(request)

    def _end(self, request: Request) -> None:
        """Report the end of a request to its caller."""
        with self._lock:
            call = self._calls.pop(request, None)
            if call is None:
                return
            self._num_driven -= call.driven
            if call.driven and not self._num_driven and self._thread is not None:
                self._to_wake[self._thread.waiter] = None  # callers run the steps again
        request.deliver = None  # breaks a reference cycle
        call.end(request)
        if call.waiter is not None and (not call.num_open or call.keeps):
            self._to_wake[call.waiter] = None

    def _shut_down(self, why: str) -> None:
        """Refuse new requests, end the active ones as "abort", and close the engine."""
        with self._lock:
            self._why_closed = why
            self._to_wake.update(dict.fromkeys(self._step_queue))
        self._engine.mode = Mode.RUNNING
        try:
            self._add_new_requests()
            self._engine.abort_all()
        finally:
            for request in list(self._calls):
                self._fail(request, EngineClosed(why))
            self._engine.close()

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
    """Runs the steps of a handle while coroutines wait; otherwise holds only a weak reference to it."""

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
            if not self.stopped:  # else `_drive` may have consumed the wake-up of `_stop_thread`
                self.waiter.wait()


def _do_nothing() -> bool:
    return True


def _probe_findings() -> list[str]:
    """Describe how matrix products are made batch-invariant: by the kernels, or by tiles of rows."""
    return [
        f"{rows}x{columns} {dtype_name(dtype)}: tiles of {' and '.join(map(str, heights))} rows, one thread"
        for (rows, columns), dtype, heights in probe_report()
    ] or ["not needed: the kernels' products are row-invariant by construction"]


_handles: weakref.WeakSet[EngineHandle] = weakref.WeakSet()
_opened_in: int | None = None  # id of the process that created the first handle
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
