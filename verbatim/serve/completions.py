"""`ApiRequest`: the base of the requests of all endpoints; `/v1/completions`."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from itertools import accumulate
from typing import Any, Generic, TypeVar
from uuid import uuid4

from pydantic import BaseModel

from verbatim.core import Completion, Delta, FinishReason, Request, Result, TopLogprobs
from verbatim.engine.admission import as_prompts
from verbatim.params import SamplingParams
from verbatim.serve.errors import Refusal
from verbatim.serve.fields import Completions, ForTrainers
from verbatim.serve.service import NO_IDS, Client, Reservation, Service

log = logging.getLogger("verbatim.serve")
DEFAULT_MAX_TOKENS = 16  # OpenAI's
Events = Iterator[dict[str, Any]]
Body = TypeVar("Body", bound=BaseModel)


class ApiRequest(Generic[Body]):
    """Base of the validated requests, which an endpoint answers as a whole or as a stream of events.

    A subclass defines `ask`, and writes its own format: `whole`, `write` and `end`.

    Attributes:
        adapter: name of the LoRA adapter that the request names as its model, or None.
        model: model name of the response.
        texts: texts of single tokens, for log-probs.
        shown_ids: special tokens that stay in the text.
        with_usage: whether a stream ends with the usage.

    Raises:
        Refusal: an unknown model, or stream options without a stream.
    """

    prefix = ""  # of response ids
    kind = chunk_kind = ""  # object types of a whole response, and of a chunk of a stream
    ends_with_done = False  # whether a stream ends with `[DONE]`

    def __init__(self, service: Service, body: Body) -> None:
        fields: Any = body
        self.adapter = service.check_model(fields.model)
        options = getattr(body, "stream_options", None)
        if options is not None and not fields.stream:
            raise Refusal(400, "stream_options requires stream=true", param="stream_options")
        self.with_usage = not self.ends_with_done or bool(options and options.include_usage)
        self.service = service
        self.body: Body = body
        self.shown_ids = NO_IDS
        self.model = fields.model or service.name
        self.id = f"{self.prefix}{uuid4().hex}"
        self.created = int(time.time())
        metadata = getattr(body, "metadata", None) or {}
        user = getattr(body, "user", None) or metadata.get("user_id")  # Anthropic's
        if user is not None:
            log.info("%s is for user %.200r", self.id, user)
        by_id = getattr(body, "return_tokens_as_token_ids", False)
        self.texts = service.id_texts if by_id else service.texts
        self._requests = list[Request]()  # once admitted

    async def _admit(self, reservation: Reservation) -> list[Request]:
        """Return a request for each prompt; after a refusal with status 429, the same ones again."""
        if not self._requests or any(request.finished for request in self._requests):
            prompts, params = await self.ask()
            self._requests = await self.service.admit(reservation, prompts, params, self.shown_ids)
        else:
            for request in self._requests:
                request.arrival = time.monotonic()  # `timeout_s` begins again
        self.service.reserve_bytes(reservation, self._requests)
        return self._requests

    async def answer(self, client: Client) -> dict[str, Any]:
        """Generate, and return the whole response. May be called again after a refusal with status 429."""
        service = self.service
        with service.reserve(client) as reservation:
            requests = await self._admit(reservation)
            results = await service.llm.engine.arun(requests)
            service.metrics.note(results)
        await self.count_reasoning(results)
        return self.whole(requests, results)

    async def events(self, client: Client) -> AsyncGenerator[dict[str, Any], None]:
        """Generate, and yield the response as events, at each step."""
        service, results = self.service, list[Result]()
        with service.reserve(client) as reservation:
            requests = await self._admit(reservation)
            numbers = {request.request_id: i for i, request in enumerate(requests)}
            async with aclosing(service.llm.engine.astream(requests)) as deltas:
                async for delta in deltas:
                    if delta.result is not None:
                        results.append(delta.result)
                        service.metrics.note([delta.result])
                    number = numbers[delta.request_id]
                    for event in self.write(number, requests[number], delta):
                        yield event
        if self.with_usage:
            await self.count_reasoning(results)
        for event in self.end(results):
            yield event

    async def ask(self) -> tuple[list[Any], SamplingParams]:
        """Return the prompts and their parameters."""
        raise NotImplementedError

    def whole(self, requests: list[Request], results: list[Result]) -> dict[str, Any]:
        """Return the whole response."""
        raise NotImplementedError

    def write(self, number: int, request: Request, delta: Delta) -> Events:
        """Yield the events of a delta; `number` is the index of its prompt."""
        raise NotImplementedError

    def end(self, results: list[Result]) -> Events:
        """Yield the last events of a stream."""
        if self.with_usage:
            yield self.chunk([], self.usage(results))

    async def count_reasoning(self, results: list[Result]) -> None:
        """Count the tokens of reasoning, for the usage, where there can be any."""

    def usage(self, results: list[Result]) -> dict[str, Any]:
        """Return the counts of prompt and completion tokens."""
        prompt = sum(len(result.prompt_token_ids) for result in results)
        num_new = sum(len(output.token_ids) for result in results for output in result.outputs)
        cached = sum(result.num_cached_tokens for result in results)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": num_new,
            "total_tokens": prompt + num_new,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def envelope(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return a response with these choices."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.service.fingerprint,
            "choices": choices,
        }

    def chunk(
        self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return a chunk of a stream, with a `usage` field if the stream ends with the usage."""
        piece = self.envelope(self.chunk_kind, choices)
        return piece | {"usage": usage} if self.with_usage else piece

    def token_logprobs(self, piece: Completion | Delta) -> Iterator[dict[str, Any]]:
        """Return the log-probs of a piece in the format of chat completions."""
        return self.texts.of_chat(
            piece.token_ids,
            self.service.logprobs_of(piece),
            piece.top_logprobs,
            getattr(self.body, "top_logprobs", None) or 0,
        )


class CompletionRequest(ApiRequest[Completions]):
    """A validated completions request; raises Refusal or InvalidRequest."""

    prefix, ends_with_done = "cmpl-", True
    kind = chunk_kind = "text_completion"

    def __init__(self, service: Service, body: Completions) -> None:
        super().__init__(service, body)
        self.prompts, _ = as_prompts(body.prompt)
        self.params = _params(body).replace(adapter=self.adapter)
        self._offsets: dict[int, int] = {}  # characters so far of each choice that has begun
        tokenizer = service.llm.tokenizer
        skips = self.params.skip_special_tokens
        self._skipped = tokenizer.special_ids if tokenizer is not None and skips else NO_IDS
        service.check_logprobs(body.logprobs, body.prompt_logprobs, body.stream)

    async def ask(self) -> tuple[list[Any], SamplingParams]:
        return self.prompts, self.params

    def whole(self, requests: list[Request], results: list[Result]) -> dict[str, Any]:
        choices = tuple(  # each may be long
            self._choice(number, requests[number], output)
            | prompt_of(result, self.body, self.service)
            for number, result in enumerate(results)
            for output in result.outputs
        )
        return self.envelope(self.kind, choices) | {"usage": self.usage(results)}

    def write(self, number: int, request: Request, delta: Delta) -> Events:
        choice = self._choice(number, request, delta)
        tokens = self.body.return_token_ids or self.body.support
        if tokens or any(choice[name] for name in ("text", "logprobs", "finish_reason")):
            yield self.chunk([choice])

    def _prompt_offsets(self, prompt: str, ids: list[int]) -> list[int]:
        """Return where each token of a prompt begins in it; special tokens that it lacks take no room."""
        tokenizer, texts = self.service.llm.tokenizer, self.service.texts
        special_ids = NO_IDS if tokenizer is None else tokenizer.special_ids
        offsets = [0]
        for token_id in ids:
            is_added = token_id in special_ids and not prompt.startswith(
                texts.text(token_id), offsets[-1]
            )
            offsets.append(offsets[-1] + (0 if is_added else texts.length(token_id)))
        # The tokenizer may add a space before the prompt.
        return [offset + min(0, len(prompt) - offsets[-1]) for offset in offsets[:-1]]

    def _choice(self, number: int, request: Request, piece: Completion | Delta) -> dict[str, Any]:
        """Return the choice of a whole completion or of a delta."""
        index = number * self.params.n + piece.index
        is_first = index not in self._offsets
        offset = self._offsets.setdefault(index, 0)
        text, prompt_ids, offsets = piece.text, list[int](), list[int]()
        logprobs = list[float | None](self.service.logprobs_of(piece))
        top: list[TopLogprobs | None] = [*(piece.top_logprobs or ())]
        if self.body.echo and is_first:
            prompt, tokenizer = request.prompt, self.service.llm.tokenizer
            if prompt is None and tokenizer is not None:
                prompt = tokenizer.decode(request.prompt_ids, False)
            text = (prompt or "") + text
            prompt_ids = request.prompt_ids
            offset = len(prompt or "")
            if self.body.logprobs is not None:
                offsets = self._prompt_offsets(prompt or "", prompt_ids)
            if request.params.prompt_logprobs is not None:
                tokens = request.prompt_tokens
                logprobs = [None, *(token.logprob for token in tokens), *logprobs]
                top = [None, *(token.top_logprobs for token in tokens), *top]
        entries = None
        if (num_top := self.body.logprobs) is not None:
            if not num_top and not self.body.return_tokens_as_token_ids:
                num_top = None  # only vLLM's clients, which request ids, expect the drawn tokens
            length = self.service.texts.length
            lengths = (0 if i in self._skipped else length(i) for i in piece.token_ids)
            *own, self._offsets[index] = accumulate(lengths, initial=offset)
            offsets += own
            ids = prompt_ids + piece.token_ids
            entries = self.texts.legacy(ids, logprobs, top, num_top, offsets)
        choice = {"index": index, "text": text, "logprobs": entries, "finish_reason": None}
        if piece.finish_reason is not None:
            choice |= ending(piece, request.seed)
        if self.body.return_token_ids and is_first:
            choice["prompt_token_ids"] = request.prompt_ids
        return choice | ids_of(piece, self.body)


def _params(body: Completions) -> SamplingParams:
    fields = body.sampling()
    if (
        fields.setdefault("max_tokens", DEFAULT_MAX_TOKENS) == 0
        and not body.echo
        and body.prompt_logprobs is None
    ):
        raise Refusal(400, "max_tokens=0 requires echo or prompt_logprobs", param="max_tokens")
    if body.logprobs is not None:
        fields["logprobs"] = body.logprobs
        if body.echo:
            fields["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    return SamplingParams(**fields)


# ---- shared with chats


def prompt_of(result: Result, body: ForTrainers, service: Service) -> dict[str, Any]:
    """Return the ids and log-probs of the prompt, if requested."""
    fields: dict[str, Any] = {}
    if body.return_token_ids:
        fields["prompt_token_ids"] = result.prompt_token_ids
    if body.prompt_logprobs is not None:
        fields["prompt_logprobs"] = service.texts.prompt_logprobs(result)
    return fields


def ids_of(piece: Completion | Delta, body: ForTrainers) -> dict[str, Any]:
    """Return the ids, weight versions, supports and log masses of a piece's tokens, if requested."""
    fields: dict[str, Any] = {}
    if body.return_token_ids:
        fields |= {"token_ids": piece.token_ids, "weight_versions": piece.weight_versions}
    if body.support:
        fields |= {"supports": piece.supports, "log_masses": piece.log_masses}
    return fields


def cut_of(piece: Completion | Delta, limit: str) -> str | None:
    """Return `limit` (also for a timeout) or "abort" (as vLLM does); None for a normal stop."""
    if piece.finish_reason is FinishReason.STOP:
        return None
    return "abort" if piece.finish_reason is FinishReason.ABORT else limit


def ending(piece: Completion | Delta, seed: int, *, called: bool = False) -> dict[str, Any]:
    """Return the finish reason, stop reason and seed of a completion; a timeout is "length".

    The stop reason (id, ids or string) and the seed extend OpenAI's fields.
    """
    reason = cut_of(piece, "length") or ("tool_calls" if called else "stop")
    stop = piece.stop_reason
    return {
        "finish_reason": reason,
        "stop_reason": list(stop) if isinstance(stop, tuple) else stop,
        "seed": seed,
    }
