"""Verbatim's own endpoints: token ids in and out, all parameters, raw and sampled log-probs.

Also the loading and unloading of LoRA adapters, with vLLM's paths and fields.
"""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

from pydantic import Field

from verbatim.common.spelling import did_you_mean
from verbatim.core import Delta, Request, Result
from verbatim.errors import InvalidRequest, ModelError, NotSupported
from verbatim.params import SamplingParams
from verbatim.serve.chat import adapt_messages, message_of, template_of
from verbatim.serve.completions import ApiRequest, Events
from verbatim.serve.errors import Refusal
from verbatim.serve.fields import Messages, PromptIds, Prompts, Strict, Switch, TextIds, Variables
from verbatim.serve.service import Service
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


class GenerateRequest(ApiRequest[Generate]):
    """A validated generation request, answered with `Result` and `Delta` as JSON."""

    def __init__(self, service: Service, body: Generate) -> None:
        super().__init__(service, body)
        fields: dict[str, Any] = {"adapter": self.adapter} | body.params
        for name in body.params:
            if name not in PARAMS:
                why = "can't be sent" if name == "logits_processors" else "is unknown"
                meant = did_you_mean(name, PARAMS) or f"; allowed are {', '.join(PARAMS)}"
                raise InvalidRequest(f"params.{name} {why}{meant}")
        self.params = SamplingParams(**fields)
        self._known: set[int] = set()  # ids whose texts were returned

    async def ask(self) -> tuple[list[Any], SamplingParams]:
        return [self.body.prompt], self.params

    def whole(self, requests: list[Request], results: list[Result]) -> dict[str, Any]:
        return self._to_dict(results[0])

    def write(self, number: int, request: Request, delta: Delta) -> Events:
        yield self._to_dict(delta)

    def end(self, results: list[Result]) -> Events:
        return iter(())  # the last delta has the result

    def _to_dict(self, value: Result | Delta) -> dict[str, Any]:
        """Return a value's fields and, with `return_tokens`, the texts of its new ids."""
        fields = {name: getattr(value, name) for name in _FIELDS[type(value)]}
        fields |= {"model": self.service.name, "numerics_key": self.service.fingerprint}
        if self.body.return_tokens:
            new = sorted(_ids_of(value) - self._known)
            self._known.update(new)
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


class ScoreRequest(ApiRequest[Score]):
    """A request for the log-prob of each token given the tokens before it, at temperature 1."""

    async def ask(self) -> tuple[list[Any], SamplingParams]:
        num_top = self.body.top_logprobs or 0
        params = SamplingParams(max_tokens=0, prompt_logprobs=num_top, adapter=self.adapter)
        return [*self.body.prompts], params

    def whole(self, requests: list[Request], results: list[Result]) -> dict[str, Any]:
        scores = [
            {
                "ids": result.prompt_token_ids,
                "logprobs": result.prompt_logprobs,
                "top_logprobs": result.prompt_top_logprobs if self.body.top_logprobs else None,
            }
            for result in results
        ]
        service = self.service
        return {"model": service.name, "numerics_key": service.fingerprint, "scores": scores}


async def tokenize(service: Service, body: Tokenize) -> dict[str, Any]:
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
    adapt_messages(messages, template_of(service, tools=False))
    ids = await service.in_thread(ids_of, num_chars=len(body.text or str(messages)))
    answer = {"ids": ids, "count": len(ids), "max_length": service.llm.max_length}
    if body.return_tokens:
        answer["tokens"] = map(service.texts.text, ids)
    return answer


async def detokenize(service: Service, body: Detokenize) -> dict[str, Any]:
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


class LoadAdapter(Strict):
    """A LoRA adapter to load, from a folder inside of --adapter-root; needs an API key."""

    lora_name: str = Field(min_length=1, max_length=256, examples=["law"])
    lora_path: str = Field(
        min_length=1,
        max_length=4096,
        description="Its folder: inside of --adapter-root, or relative to it.",
        examples=["law-v2"],
    )
    load_inplace: Switch = Field(
        None, description="Take the place of an adapter of this name, for later requests."
    )


class UnloadAdapter(Strict):
    """A LoRA adapter to unload; running requests finish with it. Needs an API key."""

    lora_name: str = Field(min_length=1, max_length=256, examples=["law"])
    lora_int_id: int | None = Field(None, description="Has no effect.")


async def load_adapter(service: Service, body: LoadAdapter) -> dict[str, Any]:
    """Load an adapter between two steps of the engine."""
    root = _root(service)
    if body.lora_name == service.name:
        raise InvalidRequest(f"lora_name={body.lora_name!r} is the name of the model")
    try:
        folder = (root / body.lora_path).resolve()
    except (OSError, ValueError):  # a loop of links, a null byte
        folder = Path("/")
    if not folder.is_relative_to(root):
        raise Refusal(
            403, f"lora_path={body.lora_path!r}: not inside of the server's --adapter-root"
        )
    try:
        await asyncio.to_thread(
            service.llm.load_adapter, body.lora_name, folder, replace=bool(body.load_inplace)
        )
    except (ModelError, NotSupported) as error:
        message = str(error).replace(str(folder), body.lora_path)  # hides the server's path
        raise InvalidRequest(f"lora_path: {message}") from None
    return {"status": "ok", "lora_name": body.lora_name}


async def unload_adapter(service: Service, body: UnloadAdapter) -> dict[str, Any]:
    """Unload an adapter; running requests finish with it."""
    _root(service)
    await asyncio.to_thread(service.llm.unload_adapter, body.lora_name)
    return {"status": "ok", "lora_name": body.lora_name}


def _root(service: Service) -> Path:
    """Return --adapter-root; refuse if clients may not load adapters."""
    settings = service.settings
    if settings.adapter_root is None or not settings.api_keys:
        raise Refusal(
            403, "adapters are loaded only by a server with --adapter-root and an API key"
        )
    return Path(settings.adapter_root).resolve()
