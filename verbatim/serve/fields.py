"""What the endpoints read: OpenAI's fields by OpenAI's names, and ours beside them.

A field that is not here is refused by its name, and so is a value of another type. Ranges are those of
`SamplingParams`, which checks them and says what is allowed.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from verbatim.errors import InvalidRequest
from verbatim.params import MAX_BEAMS, MAX_LOGPROBS, MAX_PRIORITY

MAX_TOP = 20  # likeliest tokens that a chat may ask for, as with OpenAI


class Strict(BaseModel):
    """Unknown fields and values of another type are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


def within(text: str | None = None, **range_: Any) -> Any:
    """A field that may be left out. The document tells its range; what checks it is `SamplingParams`."""
    return Field(None, description=text, json_schema_extra=range_)


# Ids outside of the vocabulary are refused later, by the model's own limit.
TokenId = Annotated[int, WithJsonSchema({"type": "integer", "minimum": 0})]
_SHARE: dict[str, Any] = {"exclusiveMinimum": 0, "maximum": 1}
_PENALTY: dict[str, Any] = {"minimum": -2, "maximum": 2}

Number = float | None
Integer = int | None
Switch = bool | None
Texts = str | list[str] | None


class Sampling(Strict):
    """What may be asked of a generation everywhere."""

    model: str | None = Field(None, description="The served model's name, which may be left out.")
    temperature: Number = within("0 takes the likeliest token.", minimum=0)
    top_p: Number = within(**_SHARE)
    n: Integer = within("Completions of each prompt.", minimum=1)
    seed: Integer = within(
        "Equal seeds give equal tokens, in any batch.", minimum=-(2**63), maximum=2**64 - 1
    )
    stop: Texts = None
    presence_penalty: Number = within(**_PENALTY)
    frequency_penalty: Number = within(**_PENALTY)
    logit_bias: dict[str, float] | None = within(
        "By token id.", propertyNames={"pattern": "^[0-9]{1,6}$"}
    )
    user: str | None = Field(None, description="Whom it is for; written into the server's log.")
    stream: Switch = None
    # Ours, by the names of SamplingParams.
    top_k: Integer = within(minimum=0)
    min_p: Number = within(minimum=0, maximum=1)
    typical_p: Number = within(**_SHARE)
    repetition_penalty: Number = within(exclusiveMinimum=0)
    min_tokens: Integer = within(minimum=0)
    stop_token_ids: list[TokenId | list[TokenId]] | None = None
    bad_words: list[str | list[TokenId]] | None = None
    allowed_token_ids: list[TokenId] | None = within(minItems=1)
    include_stop_str_in_output: Switch = None
    ignore_eos: Switch = None
    skip_special_tokens: Switch = None
    any_whitespace: Switch = Field(None, description="Let a JSON document be indented.")
    regex: str | None = within(minLength=1)
    grammar: str | None = within(minLength=1)
    choice: list[str] | None = within(minItems=1)
    priority: Integer = within("Lower runs earlier.", minimum=-MAX_PRIORITY, maximum=MAX_PRIORITY)
    timeout_s: Number = within(exclusiveMinimum=0)
    cache_salt: str | None = None
    draft: Switch = None

    def sampling(self) -> dict[str, Any]:
        """What was given of SamplingParams' fields.

        Raises:
            InvalidRequest: a bias for something that is no id.
        """
        found = {name: getattr(self, name) for name in _PLAIN if getattr(self, name) is not None}
        if self.seed is not None and -(2**63) <= self.seed < 0:
            found["seed"] = self.seed + 2**64  # OpenAI's seeds have a sign
        if self.logit_bias is not None:
            found["logit_bias"] = {_id(i): bias for i, bias in self.logit_bias.items()}
        return found


_PLAIN = (
    "temperature top_p n seed stop presence_penalty frequency_penalty top_k min_p typical_p "
    "repetition_penalty min_tokens stop_token_ids bad_words allowed_token_ids "
    "include_stop_str_in_output ignore_eos skip_special_tokens any_whitespace regex grammar choice "
    "priority timeout_s cache_salt draft"
).split()


def _id(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise InvalidRequest(f"logit_bias: {text!r} is not a token id (an integer, 0 or more)")
    return int(text[:20])


class StreamOptions(Strict):
    """Of a stream."""

    include_usage: Switch = Field(None, description="End with one more piece that has the usage.")


class Completions(Sampling):
    """A prompt, or several, to be continued."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]] = Field(
        examples=["Once upon a time", [1, 2, 3]]
    )
    max_tokens: Integer = within("16 unless given.", minimum=0)
    logprobs: Integer = within(
        "Log-probs, and those of the N likeliest tokens.", minimum=0, maximum=MAX_LOGPROBS
    )
    echo: Switch = Field(None, description="The prompt before the completion, log-probs included.")
    stream_options: StreamOptions | None = None
    json_schema: dict[str, Any] | None = None
    num_beams: Integer = within(minimum=1, maximum=MAX_BEAMS)
    length_penalty: Number = within(minimum=-100, maximum=100)
    early_stopping: bool | Literal["never"] | None = None


class TextPart(Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str


class FunctionCall(Strict):
    """What a model called, arguments as the JSON that it wrote."""

    name: str
    arguments: str


class ToolCall(Strict):
    """One call in an assistant's message."""

    id: str
    type: Literal["function"]
    function: FunctionCall


Content = str | list[TextPart]


class PlainMessage(Strict):
    """Of the system, the developer or the user."""

    role: Literal["system", "developer", "user"]
    content: Content
    name: str | None = None


class AssistantMessage(Strict):
    """A turn that the model made before."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: list[ToolCall] | None = None
    refusal: None = None
    name: str | None = None
    function_call: None = None
    audio: None = None
    annotations: list[Any] | None = Field(default=None, max_length=0)


class ToolMessage(Strict):
    """What a tool answered."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str


Message = Annotated[PlainMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class Function(Strict):
    """A function that may be called."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.\-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Switch = None  # arguments always fit the schema, asked for or not


class Tool(Strict):
    """A tool that may be used."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    """By name."""

    name: str


class NamedTool(Strict):
    """The one tool to use."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Strict):
    """What an answer must fit; the grammar sees to it, `strict` or not."""

    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    strict: Switch = None


class PlainFormat(Strict):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaFormat(Strict):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


Format = Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")]


class ChatCompletions(Sampling):
    """A conversation, to be answered."""

    messages: list[Message] = Field(
        min_length=1, examples=[[{"role": "user", "content": "Tell me a story."}]]
    )
    max_tokens: Integer = within("As max_completion_tokens, which is newer.", minimum=1)
    max_completion_tokens: Integer = within("Up to the length limit unless given.", minimum=1)
    logprobs: Switch = None
    top_logprobs: Integer = Field(None, ge=0, le=MAX_TOP)
    stream_options: StreamOptions | None = None
    response_format: Format | None = None
    tools: list[Tool] | None = Field(None, min_length=1, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: Switch = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables of the model's own chat template, such as enable_thinking."
    )
