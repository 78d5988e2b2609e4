"""The request body of `/v1/messages`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from verbatim.serve.fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    AtMost,
    CacheControl,
    Effort,
    Function,
    Sampling,
    Strict,
    Switch,
    TextPart,
    Variables,
)


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


Texts = str | Annotated[list[TextBlock], AtMost(MAX_MESSAGES)]


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
    content: str | Annotated[list[UserBlock], AtMost(MAX_MESSAGES)]


class AssistantTurn(Strict):
    """An earlier answer."""

    role: Literal["assistant"]
    content: str | Annotated[list[AnswerBlock], AtMost(MAX_MESSAGES)]


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

    messages: Annotated[list[Turn], AtMost(MAX_MESSAGES)] = Field(
        min_length=1, examples=[[{"role": "user", "content": "Tell me a story."}]]
    )
    system: Texts | None = None
    tools: Annotated[list[InputTool], AtMost(MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    n: Literal[1] | None = None


class Messages(CountTokens):
    """A request for a message."""

    max_tokens: int = Field(ge=1)
    stop_sequences: Annotated[list[str], AtMost(64)] | None = None
