"""`Service`: the engine as the endpoints see it. Requests go in, results or pieces of them come out.

It counts what is under way, and lets go of a request when its client does.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Iterator
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

from verbatim.core import Delta, Request, Result
from verbatim.engine.admission import Prompt
from verbatim.errors import InvalidRequest
from verbatim.llm import LLM
from verbatim.params import SamplingParams
from verbatim.serve.errors import Refusal, too_many
from verbatim.serve.metrics import Metrics
from verbatim.serve.settings import ServeSettings
from verbatim.serve.tokens import TokenTexts

log = logging.getLogger("verbatim.serve")
_INFO_S = 5.0  # how old may be what is told of the engine; a cluster's stages may move
_COMPILERS = 2  # structures that are compiled at once


class Service:
    """One engine and its rules for many clients.

    Attributes:
        name: what clients call the model.
        fingerprint: the numerics key; equal keys and seeds give equal tokens.
        chat_defaults: what settles that which a chat leaves open.
        texts: of single tokens.
        draining: no new generation is let in.

    Raises:
        InvalidRequest: the model's generation_config.json has a value out of range, and chats would use it.
    """

    def __init__(self, llm: LLM, settings: ServeSettings) -> None:
        self.llm = llm
        self.settings = settings
        self.name = settings.name or _plain_name(llm.name)
        self.created = int(time.time())
        self.fingerprint: str = llm.info()["numerics_key"]
        self.chat_defaults = _chat_defaults(llm) if settings.chat_defaults else SamplingParams()
        self.texts = TokenTexts(llm.tokenizer)
        self.metrics = Metrics()
        self.draining = False
        self._under_way = 0
        self._stats: asyncio.Task[dict[str, Any]] | None = None
        self._info: asyncio.Task[dict[str, Any]] | None = None
        self._info_at = -math.inf
        self._compilers = ThreadPoolExecutor(_COMPILERS, "verbatim-structures")

    async def stats(self) -> dict[str, Any]:
        """The engine's, between two steps. All who ask meanwhile wait for the same answer, in one thread."""
        if self._stats is None or self._stats.done():
            self._stats = asyncio.create_task(asyncio.to_thread(self.llm.stats))
        return await asyncio.shield(self._stats)

    async def info(self) -> dict[str, Any]:
        """The engine's, `_INFO_S` old at most. All who ask meanwhile wait for the same answer."""
        now, info = time.monotonic(), self._info
        if info is not None and info.done():
            failed = info.cancelled() or info.exception() is not None
            if failed or now > self._info_at + _INFO_S:
                info = None
        if info is None:
            self._info_at = now
            info = self._info = asyncio.create_task(asyncio.to_thread(self.llm.info))
        return await asyncio.shield(info)

    def check_model(self, name: str | None) -> None:
        """Refuse a request for another model."""
        if name is not None and name != self.name:
            raise Refusal(
                404,
                f"model={name!r}: this server serves {self.name!r}",
                param="model",
                code="model_not_found",
            )

    @staticmethod
    def note_user(answer_id: str, user: str | None) -> None:
        """Write down whom an answer is for, where its client says so."""
        if user is not None:
            log.info("%s is for user %.200r", answer_id, user)

    @contextmanager
    def seat(self) -> Iterator[None]:
        """One place among the generations under way.

        Raises:
            Refusal: 503 while draining, 429 where all are taken.
        """
        if self.draining:
            raise Refusal(503, "the server is shutting down", headers={"Retry-After": "5"})
        if self._under_way >= self.settings.max_requests:
            self.metrics.turned_away.inc()
            raise too_many(
                f"{self._under_way} requests are in progress or queued, which is the limit"
            )
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1

    @property
    def under_way(self) -> int:
        """Generations that have a seat."""
        return self._under_way

    async def admit(
        self, prompts: SequenceOf[Prompt], params: SamplingParams, key: str
    ) -> list[Request]:
        """One request a prompt, checked; a thread does it, since tokenizing and grammars take time.

        Args:
            key: of the client: prompts share cached prefixes only under the same one.
        """
        if len(prompts) * params.n > self.settings.max_choices:
            raise InvalidRequest(
                f"{len(prompts)} prompts times n={params.n} exceed the limit of "
                f"{self.settings.max_choices} completions per request"
            )
        if key:
            params = params.replace(cache_salt=f"{key}/{params.cache_salt or ''}")
        limit = self.settings.timeout_s
        if limit is not None and (params.timeout_s is None or params.timeout_s > limit):
            params = params.replace(timeout_s=limit)
        admission = self.llm.engine.admission
        # A structure may take seconds to compile, and nobody but those who ask for another waits for it.
        threads = self._compilers if admission.compiles(params) else None
        return await asyncio.get_running_loop().run_in_executor(
            threads, lambda: [admission.admit(prompt, params) for prompt in prompts]
        )

    async def results(self, requests: list[Request]) -> list[Result]:
        """What became of all of them."""
        results = await self.llm.engine.arun(requests)
        self.metrics.note(results)
        return results

    async def deltas(self, requests: list[Request]) -> AsyncGenerator[tuple[int, Delta], None]:
        """What each step adds to them, each with the number of its request."""
        stream: Any = self.llm.engine.astream(requests)  # a generator, which can be closed
        async with aclosing(stream) as pieces:
            async for number, delta in pieces:
                self._note(delta)
                yield number, delta

    def _note(self, delta: Delta) -> None:
        if delta.result is not None:
            self.metrics.note([delta.result])


def _chat_defaults(llm: LLM) -> SamplingParams:
    try:
        return llm.default_params()
    except InvalidRequest as error:
        raise InvalidRequest(
            f"the model's generation_config.json has invalid defaults for chats: {error}; fix it, or pass "
            "--no-chat-defaults or ServeSettings(chat_defaults=False)"
        ) from None


def _plain_name(name: str) -> str:
    """Of a folder its last part: where it lies is nobody's business."""
    return Path(name).name if name.startswith((".", "/", "~")) else name
