"""`/v1/messages`: Anthropic's endpoint for conversations."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from verbatim.core import Completion, Delta, Request, Result
from verbatim.errors import InvalidRequest
from verbatim.serve.answers import Part, Reasoning
from verbatim.serve.chat import ConversationRequest, text_of
from verbatim.serve.completions import Events, cut_of
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
from verbatim.serve.service import Service

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
    """A conversation to count the tokens of."""

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


class MessagesRequest(ConversationRequest[Messages]):
    """A validated message request; raises Refusal, InvalidRequest or NotSupported."""

    prefix = "msg_"
    _index = -1  # of the streamed block
    _kind: Any = None  # its type

    def __init__(self, service: Service, body: Messages) -> None:
        output_format = body.output_config and body.output_config.format
        is_begun = _ends_in_answer(body)
        if output_format is not None and is_begun:
            raise InvalidRequest("output_config.format: the last message begins the answer already")
        super().__init__(
            service,
            body,
            _messages(body),
            _fields(body),
            output_format,
            body.tools or (),
            *_choice(body.tool_choice),
            template_kwargs=_CONTINUED if is_begun else None,
            effort=getattr(body.output_config, "effort", None),
            thinking=None if body.thinking is None else body.thinking.type != "disabled",
        )

    def whole(self, requests: list[Request], results: list[Result]) -> dict[str, Any]:
        parts = self.parts_of(results[0].outputs[0])
        return self._message([_block(part)[0] for part in parts], results[0])

    def write(self, number: int, request: Request, delta: Delta) -> Events:
        if not self.readers:
            usage = {"input_tokens": request.num_input_tokens, "output_tokens": 0}
            yield {"type": "message_start", "message": self._message([], None) | {"usage": usage}}
        for part in self.parts_of(delta):
            block, empty, content = _block(part)
            if self._kind is not type(part) or isinstance(part, ParsedCall):
                yield from self._end_block()
                self._index, self._kind = self._index + 1, type(part)
                begun = {"index": self._index, "content_block": block | empty}
                yield {"type": "content_block_start"} | begun
            yield {"type": "content_block_delta", "index": self._index, "delta": content}

    def _end_block(self) -> Events:
        if self._index >= 0:
            yield {"type": "content_block_stop", "index": self._index}

    def end(self, results: list[Result]) -> Events:
        yield from self._end_block()
        whole = self._message([], results[0])
        stop_fields = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": stop_fields, "usage": whole["usage"]}
        yield {"type": "message_stop"}

    def _message(self, content: list[dict[str, Any]], result: Result | None) -> dict[str, Any]:
        output = None if result is None else result.outputs[0]
        reason, sequence = (None, None) if output is None else self._stop(output)
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
            "usage": None if result is None else self.usage([result]),
            "system_fingerprint": self.service.fingerprint,
            "seed": None if output is None else output.seed,
        }

    def _stop(self, output: Completion) -> tuple[str, str | None]:
        """Return why the answer ended, and at which stop sequence. "abort" extends Anthropic's reasons."""
        if cut := cut_of(output, "max_tokens"):
            return cut, None
        if isinstance(output.stop_reason, str):
            return "stop_sequence", output.stop_reason
        return "tool_use" if self.readers[0].num_calls else "end_turn", None

    def usage(self, results: list[Result]) -> dict[str, Any]:
        (result,) = results
        cached = result.num_cached_tokens
        return {
            "input_tokens": len(result.prompt_token_ids) - cached,
            "cache_creation": None,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "inference_geo": None,
            "output_tokens": len(result.outputs[0].token_ids),
            "output_tokens_details": {"thinking_tokens": self.num_reasoning_tokens},
            "server_tool_use": None,
            "service_tier": "standard",
        }


async def count_tokens(service: Service, body: CountTokens) -> dict[str, Any]:
    """Return the number of the prompt's tokens."""
    with service.reserve():
        request: Any = MessagesRequest  # `ask` needs only the fields of `CountTokens`
        prompts, _params = await request(service, body).ask()
        return {"input_tokens": len(prompts[0])}


def _block(part: Part) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the block of a part, its content at the start of a stream, and the delta with the content."""
    if isinstance(part, ParsedCall):
        block = {
            "type": "tool_use",
            "id": re.sub(r"\W", "_", f"toolu_{part.id.removeprefix('call_')}"),
            "caller": {"type": "direct"},
            "name": part.name,
            "input": json.loads(part.arguments),
        }
        delta = {"type": "input_json_delta", "partial_json": part.arguments}
        return block, {"input": {}}, delta
    if isinstance(part, Reasoning):
        block = {"type": "thinking", "thinking": part.text, "signature": ""}
        return block, {"thinking": ""}, {"type": "thinking_delta", "thinking": part.text}
    block = {"type": "text", "text": part, "citations": None}
    return block, {"text": ""}, {"type": "text_delta", "text": part}


def _fields(body: CountTokens) -> dict[str, Any]:
    if not isinstance(body, Messages) or body.stop_sequences is None:
        return {}
    if body.stop is not None:
        raise InvalidRequest("stop and stop_sequences: they mean the same; set only one")
    return {"stop": body.stop_sequences}


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


# Template variables that make the model continue the last message.
_CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}


def _ends_in_answer(body: CountTokens) -> bool:
    """Return whether the last message begins the answer: one of the assistant, without calls."""
    last = body.messages[-1]
    return last.role == "assistant" and not any(
        isinstance(block, ToolUseBlock) for block in last.content
    )


def _messages(body: CountTokens) -> Iterator[dict[str, Any]]:
    """Yield the conversation's messages; the results of tools come before the text of their turn."""
    if body.system is not None:
        yield {"role": "system", "content": text_of(body.system)}
    for turn in body.messages:
        blocks: list[Any] = [] if isinstance(turn.content, str) else [*turn.content]
        message: dict[str, Any] = {"role": turn.role, "content": text_of(turn.content)}
        if isinstance(turn, AssistantTurn):
            thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
            if thoughts:
                message["reasoning_content"] = "".join(thoughts)
            calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
            if calls:
                message["tool_calls"] = [call_of(call.id, call.name, call.input) for call in calls]
            yield message
            continue
        results = [block for block in blocks if isinstance(block, ToolResultBlock)]
        for result in results:
            content = text_of(result.content)
            yield {"role": "tool", "content": content, "tool_call_id": result.tool_use_id}
        if len(results) < len(blocks) or not blocks:
            yield message
