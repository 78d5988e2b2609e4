"""`Session`: a conversation that keeps its K and V between turns."""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Self

from verbatim.api.session_file import SessionState, read_session, write_session
from verbatim.common.checks import check_kind, integer, optional_seconds, switch
from verbatim.core import Delta, FinishReason, Request, Result, SessionCache
from verbatim.engine.admission import Prompt
from verbatim.engine.handle import EngineHandle
from verbatim.engine.sessions import Sessions
from verbatim.errors import EngineClosed, InvalidRequest, SessionBusy
from verbatim.params import SamplingParams
from verbatim.text.detokenizer import Detokenizer


class CacheHolder:
    """Owns session caches of an engine, and frees them on `close` or garbage collection."""

    def __init__(self, engine: EngineHandle) -> None:
        self._handle = engine
        self._caches: list[SessionCache] = []
        self._requests: list[Request] = []  # of the running call
        self._busy = threading.Lock()
        self._finalizer = weakref.finalize(self, _close_all, engine.sessions, self._caches)
        self._finalizer.atexit = False  # nothing outlives the process

    @property
    def closed(self) -> bool:
        """True if the session or its engine was closed."""
        return not self._finalizer.alive or self._handle.closed

    def close(self) -> None:
        """Free K, V and the reservation; a call in progress ends as "abort". May be called again."""
        self._finalizer()
        for request in self._requests:
            self._handle.abort(request)
        self._handle.release_sessions()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        self._handle.check_open()
        if self.closed:
            raise EngineClosed("this session has been closed")

    @contextmanager
    def _claim(self) -> Iterator[None]:
        """Lock the session for the block; raise SessionBusy if it is in use, EngineClosed if closed."""
        self._check_open()
        if not self._busy.acquire(blocking=False):
            raise SessionBusy(
                "this session is in use: another call is in progress, or a stream is open"
            )
        try:
            yield
        finally:
            self._busy.release()

    @contextmanager
    def _running(self, requests: list[Request]) -> Iterator[None]:
        """Let `close` abort `requests` during the block; mark the caches as idle after it."""
        self._requests = requests
        try:
            yield
        finally:
            for cache in self._caches:
                self._handle.sessions.release(cache)
            self._requests = []


def _close_all(sessions: Sessions, caches: list[SessionCache]) -> None:
    for cache in caches:
        sessions.close_session(cache)


class Session(CacheHolder):
    """A conversation, turn by turn; opened by `LLM.session`.

    A turn returns the same output as `LLM.generate` with all ids so far as one prompt and the session's seed.
    The K and V of earlier turns are kept, so a turn computes only new tokens. They are evicted if other
    requests need the memory or the weights change, and then recomputed; outputs do not depend on this.

    A turn that is interrupted (an error, Ctrl-C, an abandoned stream, `pause("abort")`) leaves the session
    unchanged. A session runs one call at a time.

    Attributes:
        params: sampling parameters of turns that pass none.
    """

    def __init__(
        self,
        engine: EngineHandle,
        *,
        max_length: int | None = None,
        seed: int | None = None,
        params: SamplingParams | None = None,
        load: str | os.PathLike[str] | None = None,
        wait_s: float | None = 0.0,
        idle_timeout_s: float | None = None,
    ) -> None:
        super().__init__(engine)
        check_kind("params", params, SamplingParams | None, "a SamplingParams or None")
        seed = SamplingParams(seed=seed).seed  # checked there
        limit = engine.admission.max_length
        if load is None:
            new_seed = secrets.randbits(53) if seed is None else seed
            self._state = state = SessionState(new_seed, limit, SamplingParams())
        else:
            self._state = state = read_session(load, engine)
            if seed not in (None, state.seed):
                raise InvalidRequest(f"seed={seed}: the loaded session has seed {state.seed}")
        self._wait_s = optional_seconds("wait_s", wait_s)
        self.params = params or state.params
        if max_length is None:
            state.max_length = min(state.max_length, limit)
        else:
            limit_source, length = engine.admission.limit_source, len(state.token_ids)
            state.max_length = integer("max_length", max_length, 1, limit, why=limit_source)
            if state.max_length < length:
                raise InvalidRequest(
                    f"max_length={max_length}: the loaded session already has {length} tokens"
                )
        self._cache = SessionCache(
            state.max_length, optional_seconds("idle_timeout_s", idle_timeout_s)
        )
        self._caches.append(self._cache)
        self._reserve()
        engine.sessions.release(self._cache)
        try:
            state.put_kv(engine, self._cache)
        except BaseException:
            self.close()
            raise

    @property
    def token_ids(self) -> list[int]:
        """A copy of all ids so far, inputs and completions."""
        return list(self._state.token_ids)

    @property
    def position(self) -> int:
        """Number of tokens so far. Assign a smaller number to drop the tokens after it.

        Raises:
            EngineClosed, SessionBusy: on assignment.
        """
        return len(self._state.token_ids)

    @position.setter
    def position(self, value: int) -> None:
        position = integer("position", value, 0, self.position)  # up to the current length
        with self._claim():
            if position == len(self._state.token_ids):  # a turn may have ended meanwhile
                return
            self._state.token_ids = self._state.token_ids[:position]
            self._state.completions = [
                (begin, min(end, position))
                for begin, end in self._state.completions
                if begin <= position
            ]
            self._state.text = self._decode(self._begin_of_completion())

    @property
    def text(self) -> str:
        """Text of the completion that `generate(None)` would continue, as a single call would return it.

        The texts of the calls join to it, unless a call ended inside a character or a stop string that a
        later call completed: returned text is not withdrawn.
        """
        return self._state.text

    @property
    def max_length(self) -> int:
        """Maximum tokens of the session."""
        return self._cache.max_length

    @property
    def seed(self) -> int:
        """Seed of all draws."""
        return self._state.seed

    def generate(
        self, inputs: Prompt | None = None, params: SamplingParams | None = None
    ) -> Result:
        """Run one turn. The prompt is the session so far, followed by `inputs`.

        Args:
            inputs: a string or a list of ids. The tokenizer adds special tokens and a space only to a string
                that begins the session.
                None continues the last completion, for whatever reason it ended: penalties, `min_tokens`,
                stops and structured output apply to all of it, `max_tokens` only to the new tokens. In an
                empty session, None starts from the model's BOS.
            params: None: the session's. The seed must be None or the session's, `n` and `num_beams` 1.

        Returns:
            As `LLM.generate`; `prompt_token_ids` has all ids before the new tokens.

        Raises:
            PromptTooLong, InvalidRequest, NotSupported: before any forward runs; the session is unchanged.
            OutOfBlocks: the reservation had expired after `idle_timeout_s`, and no KV memory became free
                within `wait_s`.
            SessionBusy: another call is in progress.
            EngineClosed: the session or its LLM is closed.
            RequestFailed: as in `LLM.generate`.
        """
        with self._turn(inputs, params) as request:
            self._reserve()
            (result,) = self._handle.run([request])
            self._take(request, result)
        return result

    def stream(
        self, inputs: Prompt | None = None, params: SamplingParams | None = None
    ) -> Iterator[Delta]:
        """Stream the result of `generate`. Leaving the loop early leaves the session unchanged."""
        deltas = self._stream(inputs, params)
        next(deltas)  # locks the session until the generator ends
        return deltas  # type: ignore[return-value]  # only the first one is None

    def _stream(
        self, inputs: Prompt | None, params: SamplingParams | None
    ) -> Iterator[Delta | None]:
        with self._turn(inputs, params) as request:
            self._reserve()
            yield None
            for delta in self._handle.stream(request):
                if delta.result is not None:
                    self._take(request, delta.result)
                yield delta

    async def agenerate(
        self, inputs: Prompt | None = None, params: SamplingParams | None = None
    ) -> Result:
        """Run `generate` in asyncio; cancelling leaves the session unchanged."""
        with self._turn(inputs, params) as request:
            await self._areserve()
            (result,) = await self._handle.arun([request])
            self._take(request, result)
        return result

    async def astream(
        self, inputs: Prompt | None = None, params: SamplingParams | None = None
    ) -> AsyncIterator[Delta]:
        """Run `stream` in asyncio; invalid arguments are reported with the first delta."""
        with self._turn(inputs, params) as request:
            await self._areserve()
            async with aclosing(self._handle.astream([request])) as deltas:
                async for delta in deltas:
                    if delta.result is not None:
                        self._take(request, delta.result)
                    yield delta

    def save(self, path: str | os.PathLike[str], *, kv: bool = False) -> None:
        """Write the session to a file, which `LLM.session(load=path)` resumes with the same tokens.

        An existing file of that name is replaced atomically.

        Args:
            kv: also write the cached K and V, so that they are not recomputed after loading.

        Raises:
            NotSupported: `kv` if the placement can't copy its cache, or an adapter computed K and V; params
                with Python callables or recorded choices.
            VerbatimError: `kv`, and the engine is paused.
            SessionBusy, EngineClosed: as in `generate`.
        """
        switch("kv", kv)
        with self._claim():
            self._state.params = self.params
            write_session(path, self._handle, self._state, self._cache if kv else None)

    # ---- a turn

    @contextmanager
    def _turn(self, inputs: Prompt | None, params: SamplingParams | None) -> Iterator[Request]:
        """Admit the request of one turn for the block; other calls are refused meanwhile."""
        with self._claim():
            request = self._admit(inputs, self.params if params is None else params)
            with self._running([request]):
                yield request

    def _reserve(self) -> None:
        for pause_s in self._handle.sessions.acquire(self._cache, self._wait_s):
            time.sleep(pause_s)

    async def _areserve(self) -> None:
        for pause_s in self._handle.sessions.acquire(self._cache, self._wait_s):
            await asyncio.sleep(pause_s)

    def _admit(self, inputs: Prompt | None, params: SamplingParams) -> Request:
        check_kind("params", params, SamplingParams, "a SamplingParams")
        if params.seed not in (None, self.seed):
            raise InvalidRequest(
                f"seed={params.seed}: this session's seed is {self.seed}; leave it None, or open a session "
                "with another seed"
            )
        params = params.replace(seed=self._state.seed)
        ids, resumed_ids, resumed_text = self._state.token_ids, list[int](), ""
        if inputs is None and ids:
            begin = self._begin_of_completion()
            ids, resumed_ids, resumed_text = ids[:begin], ids[begin:], self._state.text
        elif inputs is None:
            if self._handle.bos_id is None:
                raise InvalidRequest(
                    "inputs=None in an empty session starts from the model's BOS, and this model has none; "
                    "pass a string or ids"
                )
            ids = [self._handle.bos_id]
        else:
            ids = ids + self._handle.admission.prompt_ids(inputs, begins=not ids)
        return self._handle.admission.admit(
            inputs,
            params,
            ids=ids,
            resumed_ids=resumed_ids,
            resumed_text=resumed_text,
            session_cache=self._cache,
        )

    def _take(self, request: Request, result: Result) -> None:
        """Append a finished turn to the session."""
        (completion,) = result.outputs
        if completion.finish_reason is FinishReason.ABORT:
            return
        begin = len(request.prompt_ids)
        self._state.token_ids = result.prompt_token_ids + completion.token_ids
        earlier = [entry for entry in self._state.completions if entry[0] < begin]
        self._state.completions = [*earlier, (begin, len(self._state.token_ids))]
        self._state.text = request.sequences[0].watch.whole_text
        self._state.skips_special_tokens = request.params.skip_special_tokens

    def _begin_of_completion(self) -> int:
        """Return the start of the completion at the end of the session; the end if there is none."""
        begin, end = self._state.completions[-1] if self._state.completions else (0, -1)
        return begin if end == len(self._state.token_ids) else len(self._state.token_ids)

    def _decode(self, begin: int) -> str:
        """Return the text of the completion from `begin` to the end."""
        if self._handle.admission.tokenizer is None or begin == len(self._state.token_ids):
            return ""
        detokenizer = Detokenizer(
            self._handle.admission.tokenizer,
            skip_special_tokens=self._state.skips_special_tokens,
            prompt_tail_ids=self._state.token_ids[:begin],
        )
        return "".join(map(detokenizer.push, self._state.token_ids[begin:])) + detokenizer.flush()
