"""`/v1/messages`: Anthropic's endpoint for conversations."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Literal

from pydantic import Field

from verbatim.core import Completion, FinishReason, Result
from verbatim.errors import InvalidRequest
from verbatim.serve.chat import ConversationRequest, structure_of, text_of
from verbatim.serve.fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    CacheControl,
    Effort,
    Function,
    NamedFunction,
    Sampling,
    Strict,
    Switch,
    TextPart,
    Variables,
    at_most,
)
from verbatim.serve.formats import ParsedCall, call_of
from verbatim.serve.reader import Part, Reasoning
from verbatim.serve.service import Client, Service

# ---- the body


class TextBlock(TextPart):
    """A text part of a message."""

    citations: list[Any] | None = Field(default=None, max_length=0)


class ThinkingBlock(Strict):
    """Reasoning of an earlier answer; the signature is ignored."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(Strict):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Variables | None = Field(None, description="Has no effect.")
    cache_control: CacheControl = None


Texts = str | Annotated[list[TextBlock], at_most(MAX_MESSAGES)]


class ToolResultBlock(Strict):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: Switch = Field(None, description="Has no effect: the content says it.")
    cache_control: CacheControl = None


UserBlock = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]
AnswerBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]


class UserTurn(Strict):
    """A message of the user, or results of tools."""

    role: Literal["user"]
    content: str | Annotated[list[UserBlock], at_most(MAX_MESSAGES)]


class AssistantTurn(Strict):
    """An earlier answer."""

    role: Literal["assistant"]
    content: str | Annotated[list[AnswerBlock], at_most(MAX_MESSAGES)]


Turn = Annotated[UserTurn | AssistantTurn, Field(discriminator="role")]


class InputTool(Function):
    """A tool that the model may use."""

    type: Literal["custom"] | None = None
    parameters: dict[str, Any] = Field(alias="input_schema")
    cache_control: CacheControl = None


class ToolChoice(Strict):
    """The tools that the model may or must use."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: Switch = None


class Thinking(Strict):
    """The switch of reasoning, for chat templates that have one."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(None, ge=1, description="Has no effect.")
    display: Literal["summarized", "omitted"] | None = None


class OutputSchema(Strict):
    """A JSON schema of the answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    """The format of the answer and the effort of its reasoning."""

    format: OutputSchema | None = None
    effort: Effort | None = None


class CountTokens(Sampling):
    """A conversation, the tokens of which are counted."""

    messages: Annotated[list[Turn], at_most(MAX_MESSAGES)] = Field(
        min_length=1, examples=[[{"role": "user", "content": "Tell me a story."}]]
    )
    system: Texts | None = None
    tools: Annotated[list[InputTool], at_most(MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    n: Literal[1] | None = None


class Messages(CountTokens):
    """A request for a message."""

    max_tokens: int = Field(ge=1)
    stop_sequences: Annotated[list[str], at_most(64)] | None = None


# ---- the answer


class MessagesRequest(ConversationRequest[CountTokens]):
    """A validated request for a message, or for the number of its tokens.

    Raises:
        Refusal, InvalidRequest, NotSupported: an invalid or unsupported request.
    """

    prefix = "msg_"

    def __init__(self, service: Service, body: CountTokens) -> None:
        super().__init__(
            service,
            body,
            _messages(body),
            _fields(body),
            body.tools or (),
            *_choice(body.tool_choice),
            effort=None if body.output_config is None else body.output_config.effort,
            thinking=None if body.thinking is None else body.thinking.type != "disabled",
        )

    async def answer(self, client: Client) -> dict[str, Any]:
        """Return the whole message."""
        result = await self.result(client)
        return self._message([_block(part) for part in self.parts_of(result.outputs[0])], result)

    async def events(self, client: Client) -> AsyncGenerator[dict[str, Any], None]:
        """Stream the message as events."""
        result: Result | None = None
        index, kind, called, begun = -1, None, False, False
        async with aclosing(self.stream(client)) as stream:
            async for request, delta, reader, parts in stream:
                if not begun:
                    begun = True
                    usage = {"input_tokens": request.num_input_tokens, "output_tokens": 0}
                    message = self._message([], None) | {"usage": usage}
                    yield {"type": "message_start", "message": message}
                result, called = delta.result or result, reader.num_calls > 0
                for part in parts:
                    if kind is not type(part) or isinstance(part, ParsedCall):
                        if index >= 0:
                            yield {"type": "content_block_stop", "index": index}
                        index, kind = index + 1, type(part)
                        start = {"index": index, "content_block": _block(part) | _EMPTY[kind]}
                        yield {"type": "content_block_start"} | start
                    yield {"type": "content_block_delta", "index": index, "delta": _delta(part)}
        if index >= 0:
            yield {"type": "content_block_stop", "index": index}
        assert result is not None
        await self.count_reasoning(result)
        whole = self._message([], result, called)
        ended = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": ended, "usage": whole["usage"]}
        yield {"type": "message_stop"}

    def _message(
        self, content: list[dict[str, Any]], result: Result | None, called: bool = False
    ) -> dict[str, Any]:
        output = None if result is None else result.outputs[0]
        called = called or any(block["type"] == "tool_use" for block in content)
        reason, sequence = (None, None) if output is None else _stop(output, called)
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "container": None,
            "stop_details": None,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": None if result is None else self._usage(result),
            "system_fingerprint": self.service.fingerprint,
            "seed": None if output is None else output.seed,
        }

    def _usage(self, result: Result) -> dict[str, Any]:
        cached = result.num_cached_tokens
        thinking = self.num_reasoning_tokens
        return {
            "input_tokens": len(result.prompt_token_ids) - cached,
            "cache_creation": None,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "inference_geo": None,
            "output_tokens": len(result.outputs[0].token_ids),
            "output_tokens_details": {"thinking_tokens": thinking},
            "server_tool_use": None,
            "service_tier": "standard",
        }


async def count_tokens(service: Service, body: CountTokens, _: Client) -> dict[str, Any]:
    """Return the number of the prompt's tokens."""
    with service.reserve():
        prompts, _params = await MessagesRequest(service, body).ask()
        return {"input_tokens": len(prompts[0])}


def _block(part: Part) -> dict[str, Any]:
    if isinstance(part, ParsedCall):
        return {
            "type": "tool_use",
            "id": re.sub(r"\W", "_", f"toolu_{part.id.removeprefix('call_')}"),
            "caller": {"type": "direct"},
            "name": part.name,
            "input": json.loads(part.arguments),
        }
    if isinstance(part, Reasoning):
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    return {"type": "text", "text": part, "citations": None}


# What a block of a stream begins with.
_EMPTY: dict[type, dict[str, Any]] = {
    ParsedCall: {"input": {}},
    Reasoning: {"thinking": ""},
    str: {"text": ""},
}


def _delta(part: Part) -> dict[str, Any]:
    if isinstance(part, ParsedCall):
        return {"type": "input_json_delta", "partial_json": part.arguments}
    if isinstance(part, Reasoning):
        return {"type": "thinking_delta", "thinking": part.text}
    return {"type": "text_delta", "text": part}


def _stop(output: Completion, called: bool) -> tuple[str, str | None]:
    """Return why the answer ended, and at which stop sequence."""
    if output.finish_reason is not FinishReason.STOP:
        return "max_tokens", None
    if isinstance(output.stop_reason, str):
        return "stop_sequence", output.stop_reason
    return "tool_use" if called else "end_turn", None


def _fields(body: CountTokens) -> dict[str, Any]:
    fields = body.sampling()
    if isinstance(body, Messages) and body.stop_sequences is not None:
        if body.stop is not None:
            raise InvalidRequest("stop and stop_sequences: they mean the same; set only one")
        fields["stop"] = body.stop_sequences
    return fields | structure_of(body.output_config and body.output_config.format)


def _choice(choice: ToolChoice | None) -> tuple[str | NamedFunction | None, bool | None]:
    """Return OpenAI's `tool_choice` and `parallel_tool_calls`."""
    if choice is None:
        return None, None
    if (choice.type == "tool") != (choice.name is not None):
        raise InvalidRequest('tool_choice.name: required with type "tool", and only with it')
    several = False if choice.disable_parallel_tool_use else None
    if choice.name is not None:
        return NamedFunction(name=choice.name), several
    return {"any": "required"}.get(choice.type, choice.type), several


def _messages(body: CountTokens) -> Iterator[dict[str, Any]]:
    """Yield the conversation's messages; the results of tools come before the text of their turn."""
    if body.system is not None:
        yield {"role": "system", "content": text_of(body.system)}
    for turn in body.messages:
        blocks: list[Any] = [turn.content] if isinstance(turn.content, str) else [*turn.content]
        if not isinstance(turn, UserTurn):
            yield _answer(blocks)
            continue
        results = [block for block in blocks if isinstance(block, ToolResultBlock)]
        for result in results:
            content = text_of(result.content)
            yield {"role": "tool", "content": content, "tool_call_id": result.tool_use_id}
        if len(results) < len(blocks) or not blocks:
            yield {"role": "user", "content": _joined(blocks)}


def _joined(blocks: Iterable[Any]) -> str:
    """Return the text of the blocks of a turn."""
    texts = (block if isinstance(block, str) else getattr(block, "text", "") for block in blocks)
    return "".join(texts)


def _answer(blocks: Sequence[str | AnswerBlock]) -> dict[str, Any]:
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [
        call_of(block.id, block.name, block.input)
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    message = {"role": "assistant", "content": _joined(blocks)}
    message |= {"reasoning_content": "".join(thoughts)} if thoughts else {}
    return message | ({"tool_calls": calls} if calls else {})
