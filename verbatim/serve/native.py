"""Verbatim's own endpoints: token ids in and out, all parameters, both kinds of log-probs."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from pydantic import Field

from verbatim.core import Delta, Result
from verbatim.errors import InvalidRequest
from verbatim.params import SamplingParams
from verbatim.serve.chat import message_of
from verbatim.serve.fields import (
    Messages,
    PromptIds,
    Prompts,
    Strict,
    Switch,
    TextIds,
    Variables,
)
from verbatim.serve.service import Client, Service
from verbatim.spelling import did_you_mean
from verbatim.text.chat import render_chat

PARAMS = tuple(
    field.name for field in dataclasses.fields(SamplingParams) if field.name != "logits_processors"
)
_FIELDS = {kind: tuple(f.name for f in dataclasses.fields(kind)) for kind in (Result, Delta)}


class Generate(Strict):
    """A generation request: a prompt, text or ids, and its `SamplingParams`."""

    model: str | None = None
    prompt: str | PromptIds = Field(examples=["Once upon a time", [1, 2, 3]])
    params: Variables = Field(
        default_factory=dict,
        description=f"Fields of SamplingParams: {', '.join(PARAMS)}.",
        examples=[{"max_tokens": 16, "temperature": 0.0}, {"seed": 7, "logprobs": 3}],
    )
    stream: Switch = None
    return_tokens: Switch = Field(
        None, description="Return the text of each id under `tokens`; in a stream, once per id."
    )


class Score(Strict):
    """A request for the log-probs of texts or ids."""

    model: str | None = None
    prompts: Prompts[str] | Prompts[PromptIds] = Field(
        min_length=1, examples=[["Once upon a time"], [[1, 2, 3]]]
    )
    top_logprobs: int | None = Field(
        None, ge=0, description="Also return the top N tokens at each position."
    )


class Tokenize(Strict):
    """A text, or messages for the model's chat template, to tokenize."""

    model: str | None = None
    text: str | None = None
    messages: Messages | None = Field(None, min_length=1)
    add_special_tokens: Switch = Field(None, description="For `text` only. Default: true.")
    return_tokens: bool = False


class Detokenize(Strict):
    """Token ids to decode."""

    model: str | None = None
    ids: TextIds = Field(examples=[[1, 2, 3]])
    skip_special_tokens: bool = False


class GenerateRequest:
    """A validated generation request.

    Raises:
        Refusal, InvalidRequest: an unknown model, or an invalid parameter.
    """

    ends_with_done = False

    def __init__(self, service: Service, body: Generate) -> None:
        self.service, self.body = service, body
        fields: dict[str, Any] = {"adapter": service.check_model(body.model)} | body.params
        for name in body.params:
            if name not in PARAMS:
                why = "can't be sent" if name == "logits_processors" else "is unknown"
                meant = did_you_mean(name, PARAMS) or f"; allowed are {', '.join(PARAMS)}"
                raise InvalidRequest(f"params.{name} {why}{meant}")
        self.params = SamplingParams(**fields)

    async def _ask(self) -> tuple[list[Any], SamplingParams]:
        return [self.body.prompt], self.params

    async def answer(self, client: Client) -> dict[str, Any]:
        """Generate, and return the `Result` as JSON."""
        ((_, result),) = await self.service.run(client, self._ask)
        return self._to_dict(result, set())

    async def events(self, client: Client) -> AsyncGenerator[dict[str, Any], None]:
        """Generate, and yield `Delta`s as JSON; the last one has the result."""
        known: set[int] = set()
        async with aclosing(self.service.stream(client, self._ask)) as stream:
            async for _, _, delta in stream:
                yield self._to_dict(delta, known)

    def _to_dict(self, value: Result | Delta, known: set[int]) -> dict[str, Any]:
        """Return a value as JSON; with `return_tokens`, with the texts of its ids that are not in `known`."""
        fields = {name: getattr(value, name) for name in _FIELDS[type(value)]}
        fields |= {"model": self.service.name, "numerics_key": self.service.fingerprint}
        if self.body.return_tokens:
            new = sorted(_ids_of(value) - known)
            known.update(new)
            fields["tokens"] = {i: self.service.texts.text(i) for i in new}
        return fields


def _ids_of(value: Result | Delta) -> set[int]:
    """Return all ids in a value."""
    ids: set[int] = set()
    result = value if isinstance(value, Result) else value.result
    for part in [value] if isinstance(value, Delta) else value.outputs:
        ids.update(part.token_ids)
        ids.update(i for best in part.top_logprobs or () for i, _ in best)
    if result is not None:
        ids.update(result.prompt_token_ids)
        ids.update(i for best in result.prompt_top_logprobs or () for i, _ in best or ())
    return ids


async def score(service: Service, body: Score, client: Client) -> dict[str, Any]:
    """Return the log-prob of each token given the tokens before it, at temperature 1."""
    adapter = service.check_model(body.model)
    params = SamplingParams(max_tokens=0, prompt_logprobs=body.top_logprobs or 0, adapter=adapter)

    async def ask() -> tuple[list[Any], SamplingParams]:
        return [*body.prompts], params

    ended = await service.run(client, ask)
    return {
        "model": service.name,
        "numerics_key": service.fingerprint,
        "scores": [
            {
                "ids": result.prompt_token_ids,
                "logprobs": result.prompt_logprobs,
                "top_logprobs": result.prompt_top_logprobs if body.top_logprobs else None,
            }
            for _, result in ended
        ],
    }


async def tokenize(service: Service, body: Tokenize, _: Client) -> dict[str, Any]:
    """Return the ids of a text or of messages."""
    service.check_model(body.model)
    tokenizer = service.tokenizer
    if (body.text is None) == (body.messages is None):
        raise InvalidRequest("exactly one of text and messages is required")
    if body.messages is not None and body.add_special_tokens is not None:
        raise InvalidRequest(
            "add_special_tokens with messages: not supported; the chat template decides"
        )

    def ids_of() -> list[int]:
        if body.messages is not None:
            return render_chat(tokenizer, messages)
        return tokenizer.encode(
            body.text or "", special_tokens=body.add_special_tokens is not False
        )

    messages = [message_of(message) for message in body.messages or ()]
    num_chars = len(body.text or "") + sum(len(message["content"]) for message in messages)
    ids = await service.in_thread(ids_of, num_chars=num_chars)
    answer = {"ids": ids, "count": len(ids), "max_length": service.llm.max_length}
    if body.return_tokens:
        answer["tokens"] = map(service.texts.text, ids)
    return answer


async def detokenize(service: Service, body: Detokenize, _: Client) -> dict[str, Any]:
    """Return the text of ids."""
    service.check_model(body.model)
    tokenizer = service.tokenizer
    limit = service.llm.engine.admission.vocab_size

    def text_of() -> str:
        wrong = next((i for i in body.ids if not 0 <= i < limit), None)
        if wrong is not None:
            raise InvalidRequest(f"ids: {wrong} is not a token id (0 to {limit - 1})")
        return tokenizer.decode(body.ids, body.skip_special_tokens)

    return {"text": await service.in_thread(text_of, num_chars=len(body.ids))}
