"""What `/v1/responses` reads."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from verbatim.serve.fields import MAX_TOP, PlainFormat, Sampling, Strict, Switch


class InputText(Strict):
    """A part of what is said."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = Field(None, max_length=0)
    logprobs: list[Any] | None = None  # as an earlier answer had them; they say nothing new


class _Item(Strict):
    """What an earlier answer's item carries beside what it says; neither is looked at."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class InputMessage(_Item):
    """A turn; one of the assistant's may be an earlier answer's item as it was."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputText]


class CallItem(_Item):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class OutputItem(_Item):
    """What the tool answered."""

    type: Literal["function_call_output"]
    call_id: str
    output: str


class FunctionTool(Strict):
    """A function that may be called."""

    type: Literal["function"]
    name: str = Field(pattern=r"^[a-zA-Z0-9_.\-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Switch = None


class NamedFunctionTool(Strict):
    """The one tool to use."""

    type: Literal["function"]
    name: str


class SchemaText(Strict):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    strict: Switch = None


class Text(Strict):
    """What the answer's text must be."""

    format: Annotated[PlainFormat | SchemaText, Field(discriminator="type")] | None = None


def _kind(item: Any) -> str:
    """A turn needs no type."""
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if isinstance(kind, str) else "message"


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")],
    Discriminator(
        _kind,
        custom_error_type="unknown_item",
        custom_error_message="the type must be message, function_call or function_call_output",
    ),
]


class Responses(Sampling):
    """A conversation, to be answered; nothing of it is kept."""

    input: str | list[Item] = Field(min_length=1, examples=["Tell me a story."])
    instructions: str | None = Field(None, description="A system message before all others.")
    max_output_tokens: int | None = Field(None, ge=1)
    text: Text | None = None
    tools: list[FunctionTool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    parallel_tool_calls: Switch = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP)
    metadata: dict[str, str] | None = Field(None, description="Comes back with the answer.")
    store: Literal[False] | None = Field(None, description="Nothing is kept.")
    truncation: Literal["disabled"] | None = None
    n: Literal[1] | None = None
