"""`Service`: the engine that all endpoints share, with a server's limits and metrics."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from verbatim.api.llm import LLM
from verbatim.common.heap import trim_heap
from verbatim.core import Completion, Delta, Request
from verbatim.engine.admission import Prompt
from verbatim.errors import InvalidRequest, NotSupported
from verbatim.params import MAX_PRIORITY, SamplingParams
from verbatim.serve.errors import Refusal, too_many
from verbatim.serve.grammars import Marks
from verbatim.serve.metrics import ServerMetrics
from verbatim.serve.settings import ServeSettings
from verbatim.serve.tokens import TokenTexts
from verbatim.text.tokenizer import Tokenizer

T = TypeVar("T")
NO_IDS: frozenset[int] = frozenset()
log = logging.getLogger("verbatim.serve")
_INFO_S = 5.0  # maximum age of `info`: a cluster's stages may move
_COMPILERS = 2  # threads that compile structures
_READERS = 2  # threads that tokenize large inputs
_LARGE_CHARS = 1 << 16
# Estimates of a response's size in JSON, and of the memory that it takes until then.
_TOKEN_BYTES = 8
_ENTRY_BYTES = 100  # a token with its log-prob
_NUMBER_BYTES = 20
_TRIM_DELAY_S = 1.0
_MAX_RESPONSES = 16  # limit on all responses in progress, in units of `max_response_bytes`


@dataclass(frozen=True, slots=True)
class Client:
    """The sender of a request: the short hash of its API key, "" without one, and its address."""

    key: str = ""
    address: str = ""


UNKNOWN = Client()


@dataclass(slots=True, eq=False)
class Reservation:
    """One generation in progress, with the estimated size of its response."""

    client: Client
    nbytes: int = 0
    num_choices: int = 0


class _SharedCall:
    """Calls a function in a thread. Callers share a call in progress, and a result up to `age_s` old."""

    def __init__(self, function: Callable[[], dict[str, Any]], age_s: float = -1.0) -> None:
        self._function, self._age_s = function, age_s
        self._task: asyncio.Task[dict[str, Any]] | None = None
        self._begin = 0.0

    async def __call__(self) -> dict[str, Any]:
        now, task = time.monotonic(), self._task
        if task is not None and task.done():
            failed = task.cancelled() or task.exception() is not None
            if failed or now > self._begin + self._age_s:
                task = None
        if task is None:
            self._begin = now
            task = self._task = asyncio.create_task(asyncio.to_thread(self._function))
        return await asyncio.shield(task)


class Service:
    """One engine, shared by many clients.

    Attributes:
        name: the model's name in the API.
        fingerprint: the numerics key; equal keys and seeds give equal tokens.
        chat_defaults: sampling parameters of chats that set none.
        texts, id_texts: texts of single tokens in responses, and "token_id:" with the id in their place.
        stats, info: coroutine functions that return the engine's statistics and information.
        draining: whether new generations are rejected.

    Raises:
        NotSupported: an engine that several ranks of the caller drive together.
        InvalidRequest: the model's generation_config.json has a value out of range, and chats would use it;
            or an adapter has the served model's name.
    """

    def __init__(self, llm: LLM, settings: ServeSettings) -> None:
        llm.engine.refuse_collective("a server or a batch (use a Cluster)")
        self.llm = llm
        self.settings = settings
        is_path = llm.name.startswith((".", "/", "~"))  # clients see only its last part
        self.name = settings.name or (Path(llm.name).name if is_path else llm.name)
        if self.name in llm.adapters:
            raise InvalidRequest(
                f"the adapter {self.name!r} has the name of the served model: give one of them another name "
                "(--adapter, --name)"
            )
        self.created = int(time.time())
        self.fingerprint: str = llm.info()["numerics_key"]
        self.chat_defaults = _chat_defaults(llm) if settings.chat_defaults else SamplingParams()
        self.texts = TokenTexts(llm.tokenizer)
        self.id_texts = TokenTexts(None)
        self.marks = Marks(llm.tokenizer)
        self.metrics = ServerMetrics()
        self.draining = self._trim_scheduled = False
        self._reservations: set[Reservation] = set()
        self._hidden_size = int(getattr(llm.engine.config, "hidden_size", 0) or 0)
        self.stats = _SharedCall(lambda: llm.stats())  # between two steps
        self.info = _SharedCall(lambda: llm.info(), _INFO_S)
        self._compilers = ThreadPoolExecutor(_COMPILERS, "verbatim-structures")
        self._readers = ThreadPoolExecutor(_READERS, "verbatim-large-inputs")

    def close(self) -> None:
        """Shut down the thread pools; running work finishes."""
        for threads in (self._compilers, self._readers):
            threads.shutdown(wait=False, cancel_futures=True)

    @property
    def num_in_progress(self) -> int:
        """Number of generations in progress."""
        return len(self._reservations)

    @property
    def tokenizer(self) -> Tokenizer:
        """The engine's tokenizer; raises NotSupported if there is none."""
        if self.llm.tokenizer is None:
            raise NotSupported("chats and texts need a tokenizer, and this engine has none")
        return self.llm.tokenizer

    def trim_soon(self) -> None:
        """Schedule a return of free memory to the system, after a large body or response."""
        if not self._trim_scheduled:
            self._trim_scheduled = True
            asyncio.get_running_loop().call_later(_TRIM_DELAY_S, self._trim)

    def _trim(self) -> None:
        self._trim_scheduled = False
        asyncio.get_running_loop().run_in_executor(None, trim_heap)

    def check_model(self, name: str | None) -> str | None:
        """Return the adapter of this name, or None for the served model; refuse other names."""
        if name is None or name == self.name:
            return None
        adapters = self.llm.adapters
        if name in adapters:
            return name
        served = ", ".join(map(repr, [self.name, *adapters]))
        raise Refusal(
            404,
            f"model={name!r:.80}: this server serves {served}",
            param="model",
            code="model_not_found",
        )

    def models(self) -> list[dict[str, Any]]:
        """Return the model and its adapters in OpenAI's format."""
        shared = {
            "object": "model",
            "created": self.created,
            "owned_by": "verbatim",
            "max_model_len": self.llm.max_length,
            "numerics_key": self.fingerprint,
        }
        names = [name for name in self.llm.adapters if name != self.name]
        adapters = [{"id": name, **shared, "parent": self.name} for name in names]
        return [{"id": self.name, **shared, "parent": None}, *adapters]

    def check_logprobs(
        self, num_top: int | None, num_prompt: int | None = None, stream: bool | None = None
    ) -> None:
        """Refuse top log-probs unless the mode is raw_logprobs, and prompt log-probs in a stream."""
        if num_top and self.settings.logprobs_mode != "raw_logprobs":
            raise InvalidRequest(
                f"{num_top} top log-probs: this server reports only those of drawn tokens "
                f"(--logprobs-mode {self.settings.logprobs_mode})"
            )
        if stream and num_prompt is not None:
            raise InvalidRequest(f"prompt_logprobs={num_prompt} with stream: not supported")

    def logprobs_of(self, piece: Completion | Delta) -> list[float]:
        """Return the log-probs to report for drawn tokens, by `ServeSettings.logprobs_mode`."""
        if self.settings.logprobs_mode == "raw_logprobs" or piece.sampled_logprobs is None:
            return piece.logprobs
        return piece.sampled_logprobs

    @contextmanager
    def reserve(self, client: Client = UNKNOWN) -> Iterator[Reservation]:
        """Hold one of the `max_requests` generations in the block; refuse while draining or at the limit."""
        if self.draining:
            raise Refusal(503, "the server is shutting down", headers={"Retry-After": "5"})
        if self.num_in_progress >= self.settings.max_requests:
            raise too_many(
                f"{self.num_in_progress} requests are in progress or queued, which is the limit"
            )
        reservation = Reservation(client)
        self._reservations.add(reservation)
        try:
            yield reservation
        finally:
            self._reservations.remove(reservation)

    async def admit(
        self,
        reservation: Reservation,
        prompts: SequenceOf[Prompt],
        params: SamplingParams,
        shown_ids: frozenset[int],
    ) -> list[Request]:
        """Return a request for each prompt. Tokenizing and compiling a grammar run in a thread.

        Only prompts with the same API key share cached prefixes. `shown_ids` stay in the text.

        Raises:
            InvalidRequest: more completions than `max_choices`, or an invalid prompt or parameter.
        """
        if len(prompts) * params.n > self.settings.max_choices:
            raise InvalidRequest(
                f"{len(prompts)} prompts times n={params.n} exceed the limit of "
                f"{self.settings.max_choices} completions per request"
            )
        if params.priority < 0 and not self.settings.negative_priorities:
            raise InvalidRequest(
                f"priority={params.priority}: must be 0 or more on this server, so that no request runs in "
                "place of another client's (--negative-priorities)"
            )
        params = self._with_fair_priority(reservation, len(prompts), params)
        if key := reservation.client.key:
            params = params.replace(cache_salt=f"{key}/{params.cache_salt or ''}")
        limit = self.settings.request_timeout_s
        if limit is not None and (params.timeout_s is None or params.timeout_s > limit):
            params = params.replace(timeout_s=limit)
        admission = self.llm.engine.admission
        return await self.in_thread(
            lambda: [admission.admit(prompt, params, shown_ids=shown_ids) for prompt in prompts],
            num_chars=sum(map(len, prompts)) + sum(map(len, params.bad_words)),
            compiles=admission.compiles(params),
        )

    def _with_fair_priority(
        self, reservation: Reservation, num_prompts: int, params: SamplingParams
    ) -> SamplingParams:
        """Return `params` with a lower priority if the client already fills half of the engine's batch.

        Requests of other clients then run first, and may preempt these. A single client can fill the batch.
        """
        client = reservation.client
        reservation.num_choices = num_prompts * max(params.n, params.num_beams)
        num_choices = sum(r.num_choices for r in self._reservations if r.client == client)
        share = max(1, self.llm.engine.scheduler.max_sequences // 2)
        if num_choices <= share or client == UNKNOWN:
            return params
        return params.replace(priority=min(params.priority + 1, MAX_PRIORITY))

    async def in_thread(
        self, work: Callable[[], T], *, num_chars: int, compiles: bool = False
    ) -> T:
        """Run `work` in a thread; work that can take seconds runs in separate pools, to delay no other."""
        pool = None
        if compiles:
            pool = self._compilers
        elif num_chars > _LARGE_CHARS:
            pool = self._readers
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    def reserve_bytes(self, reservation: Reservation, requests: list[Request]) -> None:
        """Reserve memory for the response to admitted requests.

        Raises:
            InvalidRequest: a response larger than `max_response_bytes`.
            Refusal: 429: the responses in progress would be too large together.
        """
        limit = self.settings.max_response_bytes
        nbytes = sum(map(self._response_bytes, requests))
        if nbytes > limit:
            raise InvalidRequest(
                f"the response could have {nbytes:,} bytes, {limit:,} are the limit: lower max_tokens, n, "
                "the number of prompts or of top log-probs"
            )
        if nbytes + sum(r.nbytes for r in self._reservations) > _MAX_RESPONSES * limit:
            raise too_many("the responses in progress have reached the limit on their total size")
        reservation.nbytes = nbytes

    def _response_bytes(self, request: Request) -> int:
        """Estimate the size of a response at its longest."""
        params, num_prompt = request.params, len(request.prompt_ids)
        new = prompt = _TOKEN_BYTES
        if params.logprobs is not None:
            new += _ENTRY_BYTES * (1 + params.logprobs)
        if params.prompt_logprobs is not None:
            prompt += _ENTRY_BYTES * (1 + params.prompt_logprobs)
        extra = 0
        if params.support:
            limit = self.llm.engine.admission.vocab_size
            new += _TOKEN_BYTES * min(params.top_k or limit, limit) + _NUMBER_BYTES
        if params.hidden_states:
            extra += self._hidden_size
        for name in params.records:
            choices = self.llm.engine.runner.choices[name]
            extra += choices.layers * choices.k
        new, prompt = new + extra * _NUMBER_BYTES, prompt + extra * _NUMBER_BYTES
        return params.n * (request.max_tokens * new + num_prompt * prompt)


def _chat_defaults(llm: LLM) -> SamplingParams:
    try:
        return llm.default_params()
    except InvalidRequest as error:
        raise InvalidRequest(
            f"the model's generation_config.json has invalid defaults for chats: {error}; fix it, or pass "
            "--no-chat-defaults or ServeSettings(chat_defaults=False)"
        ) from None
