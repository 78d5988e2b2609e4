"""The request body of `/v1/responses`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from verbatim.serve.fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    MAX_TOP,
    AtMost,
    Effort,
    Function,
    JsonSchema,
    NamedFunction,
    PlainFormat,
    Sampling,
    Strict,
    Switch,
)


class InputText(Strict):
    """A text part of a message."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = Field(None, max_length=0)
    # Copied from an earlier answer; ignored.
    logprobs: Annotated[list[Any], AtMost(1 << 16)] | None = None


class _Item(Strict):
    """Base of the input items. `id` and `status`, copied from an earlier answer, are ignored."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class InputMessage(_Item):
    """A message; one of the assistant may be an unchanged item of an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    phase: Literal["commentary", "final_answer"] | None = None  # has no effect
    content: str | Annotated[list[InputText], AtMost(MAX_MESSAGES)]


class ReasoningText(Strict):
    """A text of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(_Item):
    """Reasoning of an earlier answer."""

    type: Literal["reasoning"]
    summary: Annotated[list[Any], AtMost(MAX_MESSAGES)] | None = Field(None, max_length=0)
    content: Annotated[list[ReasoningText], AtMost(MAX_MESSAGES)] | None = None
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
    arguments: str


class OutputItem(_Item):
    """The result of a function call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str


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


def _kind(item: Any) -> str:
    """Return an item's type; "message" is the default."""
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if isinstance(kind, str) else "message"


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")],
    Discriminator(
        _kind,
        custom_error_type="unknown_item",
        custom_error_message="the type must be message, reasoning, function_call or function_call_output",
    ),
]


# Reasoning is in the answer as it is, so there is nothing to encrypt.
Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]


class Responses(Sampling):
    """A request for a response, which is not stored."""

    input: str | Annotated[list[Item], AtMost(MAX_MESSAGES)] = Field(
        min_length=1, examples=["Tell me a story."]
    )
    instructions: str | None = Field(None, description="System message before all others.")
    max_output_tokens: int | None = Field(None, ge=1)
    text: Text | None = None
    tools: Annotated[list[FunctionTool], AtMost(MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    parallel_tool_calls: Switch = None
    include: Annotated[list[Included], AtMost(8)] | None = None
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
