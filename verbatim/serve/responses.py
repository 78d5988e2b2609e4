"""`/v1/responses`: OpenAI's newer endpoint for conversations, without stored state."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any
from uuid import uuid4

from verbatim.core import Completion, Delta, FinishReason, Result
from verbatim.errors import InvalidRequest, NotSupported
from verbatim.sampling.json_schema import closed
from verbatim.serve.chat import Conversation, parsed, structure_of, text_of
from verbatim.serve.events import Event
from verbatim.serve.fields import PlainFormat
from verbatim.serve.reader import Reasoning
from verbatim.serve.responses_fields import (
    CallItem,
    InputMessage,
    OutputItem,
    ReasoningItem,
    Responses,
)
from verbatim.serve.service import Client, Service
from verbatim.serve.tools import ParsedCall, call_of

# The fields of a response that are those of its request.
_REPEATED = (
    *("instructions", "max_output_tokens", "max_tool_calls", "prompt_cache_key"),
    *("prompt_cache_retention", "safety_identifier", "user"),
)


class ResponsesRequest:
    """A validated responses request.

    Raises:
        Refusal, InvalidRequest, NotSupported: an invalid or unsupported request.
    """

    def __init__(self, service: Service, body: Responses) -> None:
        adapter = service.check_model(body.model)
        self.service = service
        self.body = body
        self.id = f"resp_{uuid4().hex}"
        self.created = int(time.time())
        service.note_user(self.id, body.user)
        self.logprobs = body.has_logprobs()
        service.check_logprobs(body.top_logprobs)
        self.conversation = Conversation(
            service,
            _messages(body),
            _fields(body) | {"adapter": adapter},
            body.tools or (),
            body.tool_choice,
            body.parallel_tool_calls,
            effort=None if body.reasoning is None else body.reasoning.effort,
        )
        answers = self.conversation.answers
        if self.logprobs and (answers.use is not None or answers.reasons):
            what = "reasoning" if answers.use is None else "tools"
            raise NotSupported(
                f"include=['message.output_text.logprobs'] with {what}: some tokens belong to no text; "
                f"/v1/chat/completions has logprobs with {what}"
            )

    async def answer(self, client: Client) -> dict[str, Any]:
        """Return the whole response."""
        result = await self.conversation.result(client)
        output = result.outputs[0]
        parts = self.conversation.answers.reader().push(output.text, last=True)
        logprobs = self._logprobs(output)
        items = []
        for part in parts or [""]:  # an empty answer has one item
            if isinstance(part, ParsedCall):
                items.append(_call_item(part))
            elif isinstance(part, Reasoning):
                items.append(_reasoning_item(f"rs_{uuid4().hex}", part.text))
            else:
                items.append(_message_item(f"msg_{uuid4().hex}", part, logprobs))
                logprobs = []
        return self._response(items, result)

    async def events(self, client: Client) -> AsyncGenerator[Event, None]:
        """Stream the response as named, numbered events."""
        number = -1

        def event(kind: str, **rest: Any) -> Event:
            nonlocal number
            number += 1
            return kind, {"type": kind, **rest, "sequence_number": number}

        message = _TextItem(event)
        items: list[dict[str, Any]] = []
        result: Result | None = None
        async with aclosing(self.conversation.stream(client)) as stream:
            async for delta, parts in stream:
                if number < 0:
                    yield event("response.created", response=self._response([], None))
                    yield event("response.in_progress", response=self._response([], None))
                result = delta.result or result
                message.logprobs += self._logprobs(delta)
                for part in parts:
                    if isinstance(part, ParsedCall):
                        pieces = message.end(items)
                        pieces += _call_events(event, part, len(items))
                        items.append(_call_item(part))
                    else:
                        pieces = message.push(part, items)
                    for piece in pieces:
                        yield piece
        if not items and message.open is None:  # an empty answer has one item
            for piece in message.push("", items):
                yield piece
        for piece in message.end(items):
            yield piece
        assert result is not None
        await self.conversation.count_reasoning(result)
        whole = self._response(items, result)
        kind = "incomplete" if whole["status"] == "incomplete" else "completed"
        yield event(f"response.{kind}", response=whole)

    def _logprobs(self, piece: Completion | Delta) -> Iterable[dict[str, Any]]:
        if not self.logprobs:
            return []
        return self.service.texts.of_chat(
            piece.token_ids,
            self.service.logprobs_of(piece),
            piece.top_logprobs,
            self.body.top_logprobs or 0,
        )

    def _response(self, items: list[dict[str, Any]], result: Result | None) -> dict[str, Any]:
        body, params = self.body, self.conversation.params
        output = None if result is None else result.outputs[0]
        cut = output is not None and output.finish_reason is not FinishReason.STOP
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
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "frequency_penalty": params.frequency_penalty,
            "metadata": body.metadata or {},
            "model": self.body.model or self.service.name,
            "output": items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "presence_penalty": params.presence_penalty,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": {"format": _format(body)},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [
                {"strict": True, "parameters": None} | tool.model_dump(exclude_none=True)
                for tool in body.tools or []
            ],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None if result is None else self._usage(result),
            "system_fingerprint": self.service.fingerprint,
            "seed": None if output is None else output.seed,
            **{name: getattr(body, name) for name in _REPEATED},
        }

    def _usage(self, result: Result) -> dict[str, Any]:
        num_prompt, num_new = len(result.prompt_token_ids), len(result.outputs[0].token_ids)
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": {
                "cached_tokens": result.num_cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": num_new,
            "output_tokens_details": {"reasoning_tokens": self.conversation.num_reasoning_tokens},
            "total_tokens": num_prompt + num_new,
        }


class _TextItem:
    """The message or reasoning item of a stream, open while it gets text.

    Attributes:
        logprobs: of tokens without text so far; sent with the next text.
    """

    def __init__(self, event: Any) -> None:
        self._event = event
        self.open: type[str] | type[Reasoning] | None = None
        self.logprobs: list[dict[str, Any]] = []

    def push(self, part: str | Reasoning, items: list[dict[str, Any]]) -> list[Event]:
        events: list[Event] = []
        if self.open is not type(part):
            events += self.end(items)
            events += self._begin(part, len(items))
        text = part if isinstance(part, str) else part.text
        self._text += text
        extra = {}
        if isinstance(part, str):
            extra["logprobs"], self.logprobs = self.logprobs, []
            self._all += extra["logprobs"]
        if text:
            kind = f"response.{self._kind}.delta"
            events.append(self._event(kind, **self._at, content_index=0, delta=text, **extra))
        return events

    def _begin(self, part: str | Reasoning, index: int) -> list[Event]:
        self.open, self._text, self._all = type(part), "", list[dict[str, Any]]()
        self._kind = "output_text" if isinstance(part, str) else "reasoning_text"
        item = self._item("msg" if isinstance(part, str) else "rs")
        self._at: dict[str, Any] = {"item_id": item["id"], "output_index": index}
        (content,) = item["content"]
        item |= {"content": [], "status": "in_progress"}
        return [
            self._event("response.output_item.added", output_index=index, item=item),
            self._event("response.content_part.added", **self._at, content_index=0, part=content),
        ]

    def _item(self, prefix: str = "", item_id: str = "") -> dict[str, Any]:
        item_id = item_id or f"{prefix}_{uuid4().hex}"
        if self.open is str:
            return _message_item(item_id, self._text, self._all)
        return _reasoning_item(item_id, self._text)

    def end(self, items: list[dict[str, Any]]) -> list[Event]:
        """Close the item if it is open, and append it to `items`."""
        if self.open is None:
            return []
        at = self._at | {"content_index": 0}
        extra = {}
        if self.open is str:
            self._all += self.logprobs
            self.logprobs = []
            extra["logprobs"] = self._all
        item = self._item(item_id=self._at["item_id"])
        items.append(item)
        self.open = None
        return [
            self._event(f"response.{self._kind}.done", **at, text=self._text, **extra),
            self._event("response.content_part.done", **at, part=item["content"][0]),
            self._event(
                "response.output_item.done", output_index=self._at["output_index"], item=item
            ),
        ]


def _call_events(event: Any, call: ParsedCall, index: int) -> list[Event]:
    item = _call_item(call)
    at = {"item_id": item["id"], "output_index": index}
    begun = item | {"arguments": "", "status": "in_progress"}
    return [
        event("response.output_item.added", output_index=index, item=begun),
        event("response.function_call_arguments.delta", **at, delta=call.arguments),
        event(
            "response.function_call_arguments.done",
            **at,
            name=call.name,
            arguments=call.arguments,
        ),
        event("response.output_item.done", output_index=index, item=item),
    ]


def _part(text: str, logprobs: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _message_item(item_id: str, text: str, logprobs: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": item_id,
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [_part(text, logprobs)],
    }


def _reasoning_item(item_id: str, text: str) -> dict[str, Any]:
    return {
        "id": item_id,
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
        "encrypted_content": None,
        "status": "completed",
    }


def _call_item(call: ParsedCall) -> dict[str, Any]:
    return {
        "id": f"fc_{call.id.removeprefix('call_')}",
        "type": "function_call",
        "status": "completed",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
    }


def _format(body: Responses) -> dict[str, Any]:
    fmt = None if body.text is None else body.text.format
    return {"type": "text"} if fmt is None else fmt.model_dump(by_alias=True, exclude_none=True)


def _fields(body: Responses) -> dict[str, Any]:
    fields = body.sampling()
    if body.max_output_tokens is not None:
        fields["max_tokens"] = body.max_output_tokens
    if body.top_logprobs and not body.has_logprobs():
        raise InvalidRequest(
            f"top_logprobs={body.top_logprobs} needs include=['message.output_text.logprobs']"
        )
    if body.has_logprobs():
        fields["logprobs"] = body.top_logprobs or 0
    fmt = None if body.text is None else body.text.format
    if fmt is None or isinstance(fmt, PlainFormat):
        return fields | structure_of(fmt)
    return fields | {"json_schema": closed(fmt.schema_)}


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
            messages.append({"role": "tool", "content": item.output, "tool_call_id": item.call_id})
        elif isinstance(item, CallItem):
            if not last:
                last = {"role": "assistant", "content": ""}
                messages.append(last)
            call = call_of(item.call_id, item.name, parsed(item.arguments))
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
