"""`/v1/completions`."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any, Generic, TypeVar
from uuid import uuid4

from verbatim.core import Completion, Delta, FinishReason, Request, Result, TopLogprobs
from verbatim.params import SamplingParams
from verbatim.prompts import as_prompts
from verbatim.serve.errors import Refusal
from verbatim.serve.fields import Completions, ForTrainers, Sampling
from verbatim.serve.service import Client, Service

log = logging.getLogger("verbatim.serve")
DEFAULT_MAX_TOKENS = 16  # OpenAI's


Body = TypeVar("Body", bound=Sampling)


class ApiRequest(Generic[Body]):
    """A validated request of an endpoint: its model, its id, and what its answers share with others.

    Attributes:
        adapter: the adapter that the request names as its model.
        model: the name of its model.
        texts: the texts of tokens in log-probs.

    Raises:
        Refusal: an unknown model, or stream options without a stream.
    """

    prefix = ""  # of ids
    ends_with_done = False  # a stream ends with `[DONE]`

    def __init__(self, service: Service, body: Body) -> None:
        self.adapter = service.check_model(body.model)
        self._stream_options = getattr(body, "stream_options", None)
        if self._stream_options is not None and not body.stream:
            raise Refusal(400, "stream_options requires stream=true", param="stream_options")
        self.service = service
        self.body: Body = body
        self.model = body.model or service.name
        self.id = f"{self.prefix}{uuid4().hex}"
        self.created = int(time.time())
        user = body.user or (body.metadata or {}).get("user_id")  # Anthropic's
        if user is not None:
            log.info("%s is for user %.200r", self.id, user)
        by_id = getattr(body, "return_tokens_as_token_ids", False)
        self.texts = service.id_texts if by_id else service.texts

    @property
    def with_usage(self) -> bool:
        """True if the stream ends with the usage."""
        return self._stream_options is not None and bool(self._stream_options.include_usage)

    def envelope(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return an answer with these choices."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.service.fingerprint,
            "choices": choices,
        }

    def chunk(
        self, kind: str, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return a chunk of a stream; if that ends with the usage, every chunk has the field."""
        piece = self.envelope(kind, choices)
        return piece | {"usage": usage} if self.with_usage else piece

    def token_logprobs(self, piece: Completion | Delta) -> Iterator[dict[str, Any]]:
        """Return log-probs in the format of chats."""
        return self.texts.of_chat(
            piece.token_ids,
            self.service.logprobs_of(piece),
            piece.top_logprobs,
            getattr(self.body, "top_logprobs", None) or 0,
        )


class CompletionRequest(ApiRequest[Completions]):
    """A validated completions request.

    Raises:
        Refusal, InvalidRequest: an invalid request.
    """

    prefix, ends_with_done = "cmpl-", True

    def __init__(self, service: Service, body: Completions) -> None:
        super().__init__(service, body)
        self.prompts, _ = as_prompts(body.prompt)
        self.params = _params(body).replace(adapter=self.adapter)
        service.check_logprobs(body.logprobs, body.prompt_logprobs, body.stream)

    async def _ask(self) -> tuple[list[Any], SamplingParams]:
        return self.prompts, self.params

    async def answer(self, client: Client) -> dict[str, Any]:
        """Return the whole response."""
        ended = await self.service.run(client, self._ask)
        choices = tuple(  # each may be long
            self._choice(number * self.params.n + output.index, request, output, {})
            | prompt_of(result, self.body, self.service)
            for number, (request, result) in enumerate(ended)
            for output in result.outputs
        )
        results = [result for _, result in ended]
        return self.envelope("text_completion", choices) | {"usage": usage(results)}

    async def events(self, client: Client) -> AsyncGenerator[dict[str, Any], None]:
        """Stream the response."""
        results: list[Result] = []
        offsets: dict[int, int] = {}  # choice: characters so far
        tokens = self.body.return_token_ids or self.body.support
        async with aclosing(self.service.stream(client, self._ask)) as stream:
            async for number, request, delta in stream:
                if delta.result is not None:
                    results.append(delta.result)
                index = number * self.params.n + delta.index
                choice = self._choice(index, request, delta, offsets)
                if tokens or any(choice[name] for name in ("text", "logprobs", "finish_reason")):
                    yield self.chunk("text_completion", [choice])
        if self.with_usage:
            yield self.chunk("text_completion", [], usage(results))

    def _choice(
        self, index: int, request: Request, piece: Completion | Delta, offsets: dict[int, int]
    ) -> dict[str, Any]:
        """Return the choice of a whole completion or of a delta.

        Args:
            offsets: the number of characters so far, of the choices that have begun.
        """
        is_first = index not in offsets
        offset = offsets.setdefault(index, 0)
        text, ids = piece.text, piece.token_ids
        logprobs = list[float | None](self.service.logprobs_of(piece))
        top: list[TopLogprobs | None] = [*(piece.top_logprobs or ())]
        if self.body.echo and is_first:
            text = self._prompt_text(request) + text
            ids = request.prompt_ids + ids
            if request.params.prompt_logprobs is not None:
                prompt = request.prompt_tokens
                logprobs = [None, *(token.logprob for token in prompt), *logprobs]
                top = [None, *(token.top_logprobs for token in prompt), *top]
        found = None
        if (num_top := self.body.logprobs) is not None:
            if not num_top and not self.body.return_tokens_as_token_ids:
                num_top = None  # only vLLM's clients, which ask for ids, expect the drawn tokens
            found = self.texts.legacy(ids, logprobs, top, num_top, offset)
            offsets[index] += sum(map(self.texts.length, ids))
        choice = {"index": index, "text": text, "logprobs": found, "finish_reason": None}
        if piece.finish_reason is not None:
            choice |= ending(piece, request.seed)
        if self.body.return_token_ids and is_first:
            choice["prompt_token_ids"] = request.prompt_ids
        return choice | ids_of(piece, self.body)

    def _prompt_text(self, request: Request) -> str:
        if request.prompt is not None:
            return request.prompt
        tokenizer = self.service.llm.tokenizer
        return "" if tokenizer is None else tokenizer.decode(request.prompt_ids, False)


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
    """Return what a trainer requests of the prompt."""
    found: dict[str, Any] = {}
    if body.return_token_ids:
        found["prompt_token_ids"] = result.prompt_token_ids
    if body.prompt_logprobs is not None:
        found["prompt_logprobs"] = service.texts.prompt_logprobs(result)
    return found


def ids_of(piece: Completion | Delta, body: ForTrainers) -> dict[str, Any]:
    """Return what a trainer requests of each token of a piece."""
    found: dict[str, Any] = {}
    if body.return_token_ids:
        found |= {"token_ids": piece.token_ids, "weight_versions": piece.weight_versions}
    if body.support:
        found |= {"supports": piece.supports, "log_masses": piece.log_masses}
    return found


def usage(results: list[Result]) -> dict[str, Any]:
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


def ending(piece: Completion | Delta, seed: int, *, called: bool = False) -> dict[str, Any]:
    """Return how a completion ended; a timeout is "length".

    The stop id, ids or string and the seed are extensions of OpenAI's fields.
    """
    reason, stop = "length", piece.stop_reason
    if piece.finish_reason is FinishReason.STOP:
        reason = "tool_calls" if called else "stop"
    return {
        "finish_reason": reason,
        "stop_reason": list(stop) if isinstance(stop, tuple) else stop,
        "seed": seed,
    }
