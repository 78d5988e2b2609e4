"""`/v1/responses`: OpenAI's newer endpoint for conversations, without stored state."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import BeforeValidator, Field

from verbatim.core import Completion, Delta, Request, Result
from verbatim.errors import NotSupported
from verbatim.serve.answers import Part, Reasoning
from verbatim.serve.chat import ConversationRequest, logprobs_of, text_of
from verbatim.serve.completions import Events, cut_of
from verbatim.serve.fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    MAX_TOP,
    CallArguments,
    Effort,
    Function,
    JsonSchema,
    NamedFunction,
    PlainFormat,
    Sampling,
    Strict,
    Switch,
    at_most,
)
from verbatim.serve.formats import ParsedCall, call_of
from verbatim.serve.service import Service

# ---- the body


class InputText(Strict):
    """A text part of a message."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = Field(None, max_length=0)
    # Copied from an earlier answer; ignored.
    logprobs: Annotated[list[Any], at_most(1 << 16)] | None = None


class _Item(Strict):
    """Base of the input items. `id` and `status`, copied from an earlier answer, are ignored."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class InputMessage(_Item):
    """A message; one of the assistant may be an unchanged item of an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    phase: Literal["commentary", "final_answer"] | None = None  # has no effect
    content: str | Annotated[list[InputText], at_most(MAX_MESSAGES)]


class ReasoningText(Strict):
    """A text of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(_Item):
    """Reasoning of an earlier answer."""

    type: Literal["reasoning"]
    summary: Annotated[list[Any], at_most(MAX_MESSAGES)] | None = Field(None, max_length=0)
    content: Annotated[list[ReasoningText], at_most(MAX_MESSAGES)] | None = None
    encrypted_content: None = None


class ReasoningOptions(Strict):
    """The effort of the reasoning."""

    effort: Effort | None = Field(None, description="Passed to the chat template.")
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="Has no effect: the reasoning itself is in the answer."
    )
    generate_summary: None = None


class CallItem(_Item):
    """A function call of the model."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: CallArguments


class OutputItem(_Item):
    """The result of a function call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[list[InputText], at_most(MAX_MESSAGES)]


class FunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"]


class NamedFunctionTool(NamedFunction):
    """The tool that the model must use."""

    type: Literal["function"]


class SchemaText(JsonSchema):
    """A JSON document that conforms to a schema."""

    type: Literal["json_schema"]


class Text(Strict):
    """The format of the answer's text."""

    format: Annotated[PlainFormat | SchemaText, Field(discriminator="type")] | None = None


Item = Annotated[
    Annotated[InputMessage | ReasoningItem | CallItem | OutputItem, Field(discriminator="type")],
    BeforeValidator(lambda item: {"type": "message"} | item if isinstance(item, dict) else item),
]


# Reasoning is in the answer in plain text, so nothing is encrypted.
Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]


class Responses(Sampling):
    """A request for a response, which is not stored."""

    input: str | Annotated[list[Item], at_most(MAX_MESSAGES)] = Field(
        min_length=1, examples=["Tell me a story."]
    )
    instructions: str | None = Field(None, description="System message before all others.")
    max_output_tokens: int | None = Field(None, ge=1)
    text: Text | None = None
    tools: Annotated[list[FunctionTool], at_most(MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    parallel_tool_calls: Switch = None
    include: Annotated[list[Included], at_most(8)] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP)
    reasoning: ReasoningOptions | None = None
    background: Literal[False] | None = None
    max_tool_calls: int | None = Field(
        None, ge=1, description="Has no effect: it counts the calls of built-in tools."
    )
    truncation: Literal["disabled"] | None = None
    n: Literal[1] | None = None

    def has_logprobs(self) -> bool:
        """Return whether the texts of the answer have log-probs."""
        return "message.output_text.logprobs" in (self.include or ())


# ---- the answer

# Fields that a response repeats from its request.
_ECHOED_FIELDS = (
    *("instructions", "max_output_tokens", "max_tool_calls", "prompt_cache_key"),
    *("prompt_cache_retention", "safety_identifier", "user"),
)


class ResponsesRequest(ConversationRequest[Responses]):
    """A validated responses request; raises Refusal, InvalidRequest or NotSupported."""

    prefix = "resp_"

    def __init__(self, service: Service, body: Responses) -> None:
        service.check_logprobs(body.top_logprobs)
        super().__init__(
            service,
            body,
            _messages(body),
            _fields(body),
            body.text and body.text.format,
            body.tools or (),
            body.tool_choice,
            body.parallel_tool_calls,
            effort=getattr(body.reasoning, "effort", None),
        )
        if body.has_logprobs() and (self.answers.use is not None or self.answers.reasons):
            what = "reasoning" if self.answers.use is None else "tools"
            raise NotSupported(
                f"include=['message.output_text.logprobs'] with {what}: some tokens belong to no text; "
                f"/v1/chat/completions has logprobs with {what}"
            )
        self._done: list[dict[str, Any]] = []  # the streamed items that have ended
        self._item: dict[str, Any] = {}  # the streamed item that is open
        self._pending: list[dict[str, Any]] = []  # log-probs of tokens without text so far
        self._num_events = 0

    def whole(self, requests: list[Request], results: list[Result]) -> dict[str, Any]:
        output = results[0].outputs[0]
        parts = self.parts_of(output) or [""]  # an empty answer has one item
        # With log-probs there is one part, a text.
        return self._response([_item(part, self._logprobs(output)) for part in parts], results[0])

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._num_events += 1
        return {"type": f"response.{kind}", **fields, "sequence_number": self._num_events - 1}

    def write(self, number: int, request: Request, delta: Delta) -> Events:
        if not self.readers:
            for kind in ("created", "in_progress"):
                yield self._event(kind, response=self._response([], None))
        self._pending += self._logprobs(delta)
        for part in self.parts_of(delta):
            yield from self._write_part(part)

    def _write_part(self, part: Part) -> Events:
        """Yield the events of a part, which may end an item and begin another."""
        if not self._item or isinstance(part, ParsedCall) or self._kind is not type(part):
            yield from self._end_item()
            yield from self._begin_item(part)
        if isinstance(part, ParsedCall):
            kind = "function_call_arguments.delta"
            yield self._event(kind, **self._at(), delta=part.arguments)
            yield from self._end_item()
            return
        (content,) = self._item["content"]
        text, extra = part if isinstance(part, str) else part.text, dict[str, Any]()
        content["text"] += text
        if isinstance(part, str):
            extra["logprobs"], self._pending = self._pending, []
            content["logprobs"] += extra["logprobs"]
        if text:
            yield self._event(f"{content['type']}.delta", **self._at(), delta=text, **extra)

    def _begin_item(self, part: Part) -> Events:
        """Open an item, announced without its text or arguments."""
        item, self._kind = _item(part), type(part)
        self._item = item
        empty: dict[str, Any] = {"content": []} if "content" in item else {"arguments": ""}
        begun = item | empty | {"status": "in_progress"}
        yield self._event("output_item.added", output_index=len(self._done), item=begun)
        for content in item.get("content", ()):
            content["text"] = ""
            yield self._event("content_part.added", **self._at(), part=dict(content))

    def _end_item(self) -> Events:
        """Close the item that is open."""
        if not self._item:
            return
        item, at = self._item, self._at()
        for content in item.get("content", ()):
            text = {"text": content["text"]}
            if "logprobs" in content:
                content["logprobs"] += self._pending
                self._pending = []
                text["logprobs"] = content["logprobs"]
            yield self._event(f"{content['type']}.done", **at, **text)
            yield self._event("content_part.done", **at, part=content)
        if item["type"] == "function_call":
            call = {name: item[name] for name in ("name", "arguments")}
            yield self._event("function_call_arguments.done", **at, **call)
        self._item = {}
        self._done.append(item)
        yield self._event("output_item.done", output_index=at["output_index"], item=item)

    def _at(self) -> dict[str, Any]:
        at = {"item_id": self._item["id"], "output_index": len(self._done)}
        return at | {"content_index": 0} if "content" in self._item else at

    def end(self, results: list[Result]) -> Events:
        if not (self._done or self._item):
            yield from self._write_part("")  # an empty answer has one item
        yield from self._end_item()
        whole = self._response(self._done, results[0])
        yield self._event(whole["status"], response=whole)

    def _logprobs(self, piece: Completion | Delta) -> Iterable[dict[str, Any]]:
        return self.token_logprobs(piece) if self.body.has_logprobs() else []

    def _response(self, items: list[dict[str, Any]], result: Result | None) -> dict[str, Any]:
        body, params = self.body, self.params
        form = (body.text and body.text.format) or PlainFormat(type="text")
        output = None if result is None else result.outputs[0]
        cut = None if output is None else cut_of(output, "max_output_tokens")
        status = "in_progress" if output is None else "incomplete" if cut else "completed"
        choice = body.tool_choice or "auto"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": cut} if cut else None,
            "frequency_penalty": params.frequency_penalty,
            "metadata": body.metadata or {},
            "model": self.model,
            "output": items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "presence_penalty": params.presence_penalty,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": {"format": form.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [
                {"strict": True, "parameters": None} | tool.model_dump(exclude_none=True)
                for tool in body.tools or []
            ],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None if result is None else self.usage([result]),
            "system_fingerprint": self.service.fingerprint,
            "seed": None if output is None else output.seed,
            **{name: getattr(body, name) for name in _ECHOED_FIELDS},
        }

    def usage(self, results: list[Result]) -> dict[str, Any]:
        (result,) = results
        num_prompt, num_new = len(result.prompt_token_ids), len(result.outputs[0].token_ids)
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": {
                "cached_tokens": result.num_cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": num_new,
            "output_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
            "total_tokens": num_prompt + num_new,
        }


def _item(part: Part, logprobs: Iterable[dict[str, Any]] = ()) -> dict[str, Any]:
    """Return the output item of a part."""
    if isinstance(part, ParsedCall):
        return {
            "id": f"fc_{part.id.removeprefix('call_')}",
            "type": "function_call",
            "status": "completed",
            "call_id": part.id,
            "name": part.name,
            "arguments": part.arguments,
        }
    if isinstance(part, Reasoning):
        return {
            "id": f"rs_{uuid4().hex}",
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": part.text}],
            "encrypted_content": None,
            "status": "completed",
        }
    text = {"type": "output_text", "text": part, "annotations": [], "logprobs": logprobs or []}
    return {
        "id": f"msg_{uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [text],
    }


def _fields(body: Responses) -> dict[str, Any]:
    limit = body.max_output_tokens
    fields: dict[str, Any] = {} if limit is None else {"max_tokens": limit}
    switch = "include=['message.output_text.logprobs']"
    return fields | logprobs_of(body.top_logprobs, body.has_logprobs(), switch)


def _messages(body: Responses) -> list[dict[str, Any]]:
    """Return the conversation's messages; consecutive calls become one turn."""
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    items = body.input
    if isinstance(items, str):
        items = [InputMessage(role="user", content=items)]
    for item in items:
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else {}
        if isinstance(item, OutputItem):
            messages.append(
                {"role": "tool", "content": text_of(item.output), "tool_call_id": item.call_id}
            )
        elif isinstance(item, CallItem):
            if not last:
                last = {"role": "assistant", "content": ""}
                messages.append(last)
            call = call_of(item.call_id, item.name, item.arguments)
            last.setdefault("tool_calls", []).append(call)
        elif isinstance(item, ReasoningItem):
            reasoning = text_of(item.content)
            messages.append({"role": "assistant", "content": "", "reasoning_content": reasoning})
        else:
            turn = {"role": item.role, "content": text_of(item.content)}
            only_reasons = "reasoning_content" in last and not last["content"]
            if item.role == "assistant" and only_reasons and "tool_calls" not in last:
                last |= turn
            else:
                messages.append(turn)
    return messages
