"""The request bodies: OpenAI's fields under OpenAI's names, and Verbatim's own.

Unknown fields and values of the wrong type are rejected. The fields of `SamplingParams` have its descriptions
and ranges, and it validates them.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Json, WithJsonSchema

from verbatim.common.checks import field_docs
from verbatim.errors import InvalidRequest
from verbatim.params import (
    MAX_BAD_WORDS,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    NUMBERS,
    SamplingParams,
    above,
)
from verbatim.serve.bodies import check_parts

MAX_TOP = 20  # limit of `top_logprobs`, as OpenAI's
MAX_PROMPTS = 1024
MAX_PROMPT_IDS = 1 << 21
MAX_TEXT_IDS = 1 << 17  # for /detokenize, which holds the GIL for a microsecond per id
MAX_MESSAGES = 4096  # also limits the parts of a message
MAX_TOOLS = 128  # also limits the calls in a message
MAX_ALLOWED_IDS = 1 << 19
MAX_CHOICES = 4096
MAX_BIASES = 1024
MAX_PHRASE_IDS = 256  # ids of one entry of `bad_words` or `stop_token_ids`
MAX_METADATA = 16  # as OpenAI's
MAX_VARIABLES = 64  # of a chat template, or of `SamplingParams`


class Strict(BaseModel):
    """Base of the request bodies: rejects unknown fields and values of the wrong type."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


def at_most(entries: int) -> Any:
    """Return a field with a maximum number of list entries, which is part of the OpenAPI document.

    Validation stops at the first invalid entry: the errors of a million entries would take a minute, for
    each member of a union.
    """
    return Field(max_length=entries, fail_fast=True)


T = TypeVar("T")
# Ids outside the vocabulary are rejected at admission.
TokenId = Annotated[int, WithJsonSchema({"type": "integer", "minimum": 0})]
PromptIds = Annotated[list[TokenId], at_most(MAX_PROMPT_IDS)]
TextIds = Annotated[list[TokenId], at_most(MAX_TEXT_IDS)]
Phrase = Annotated[list[TokenId], at_most(MAX_PHRASE_IDS)]
Prompts = Annotated[list[T], at_most(MAX_PROMPTS)]
Variables = Annotated[dict[str, Any], Field(max_length=MAX_VARIABLES)]

Number = float | None
Integer = int | None
Switch = bool | None
Texts = str | Annotated[list[str], at_most(MAX_STOP_STRINGS)] | None


class Sampling(Strict):
    """The fields that all generation endpoints share."""

    model: str = Field(description="Name of the served model.", examples=["storyteller"])
    temperature: Number = None
    top_p: Number = None
    n: Integer = None
    seed: Integer = Field(
        None,
        description="Equal seeds give equal tokens, in any batch; negative ones count as 2**64 more. "
        "Default: random.",
        json_schema_extra={"minimum": -(2**63)},  # OpenAI's seeds are signed
    )
    stop: Texts = None
    presence_penalty: Number = None
    frequency_penalty: Number = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_BIASES)] | None = Field(
        None, json_schema_extra={"propertyNames": {"pattern": "^[0-9]{1,6}$"}}
    )
    user: str | None = Field(None, description="User id, written to the server's log.")
    stream: Switch = None
    # Accepted for compatibility: nothing is stored, and there is only one service tier.
    metadata: Annotated[dict[str, str | None], Field(max_length=MAX_METADATA)] | None = None
    store: Switch = Field(None, description="Has no effect: answers are not stored.")
    service_tier: (
        Literal["auto", "default", "flex", "scale", "priority", "standard_only"] | None
    ) = Field(None, description="Has no effect.")
    safety_identifier: str | None = Field(None, description="Has no effect.")
    prompt_cache_key: str | None = Field(
        None, description="Has no effect: any cached prefix is found. See cache_salt."
    )
    prompt_cache_retention: Literal["in-memory", "in_memory", "24h"] | None = Field(
        None, description="Has no effect."
    )
    # Verbatim's own, with the names of SamplingParams.
    top_k: Integer = None
    min_p: Number = None
    typical_p: Number = None
    repetition_penalty: Number = None
    min_tokens: Integer = None
    stop_token_ids: Annotated[list[TokenId | Phrase], at_most(MAX_STOP_TOKEN_IDS)] | None = None
    bad_words: Annotated[list[str | Phrase], at_most(MAX_BAD_WORDS)] | None = None
    allowed_token_ids: Annotated[list[TokenId], at_most(MAX_ALLOWED_IDS)] | None = Field(
        None, json_schema_extra={"minItems": 1}
    )
    include_stop_str_in_output: Switch = None
    ignore_eos: Switch = None
    skip_special_tokens: Switch = None
    any_whitespace: Switch = None
    regex: str | None = Field(None, json_schema_extra={"minLength": 1})
    grammar: str | None = Field(None, json_schema_extra={"minLength": 1})
    choice: Annotated[list[str], at_most(MAX_CHOICES)] | None = Field(
        None, json_schema_extra={"minItems": 1}
    )
    priority: Integer = Field(
        None, description="Lower runs earlier; below 0 only where the server allows it."
    )
    timeout_s: Number = Field(None, json_schema_extra={"exclusiveMinimum": 0})
    cache_salt: str | None = None
    draft: Switch = None

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: Any) -> dict[str, Any]:
        """Add the descriptions and ranges of `SamplingParams` to the fields of the same names."""
        schema: dict[str, Any] = handler(core_schema)
        for name, field in handler.resolve_ref_schema(schema)["properties"].items():
            for key, value in _DOCUMENTED.get(name, {}).items():
                field.setdefault(key, value)
        return schema

    def sampling(self) -> dict[str, Any]:
        """Return the fields of SamplingParams that were set."""
        fields = self.model_dump(include=_PARAMS, exclude_none=True)
        if self.seed is not None and -(2**63) <= self.seed < 0:
            fields["seed"] = self.seed + 2**64
        return fields


# `logprobs` is a number in some bodies and a switch in others.
_PARAMS = {*SamplingParams.__slots__} - {"logprobs"}


def _documented(name: str, text: str) -> dict[str, Any]:
    """Return the description of a field of `SamplingParams`, and its range, in JSON Schema."""
    check, *limits = NUMBERS.get(name, (None,))
    keys = ("exclusiveMinimum" if check is above else "minimum", "maximum")
    return {"description": text[:1].upper() + text[1:], **dict(zip(keys, limits, strict=False))}


_DOCUMENTED = {
    n: _documented(n, t) for n, t in field_docs(SamplingParams).items() if n != "logprobs"
}


class StructuredOutputs(Strict):
    """A structure under vLLM's names; at most one."""

    json_schema: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = Field(None, min_length=1)
    choice: Annotated[list[str], at_most(MAX_CHOICES)] | None = Field(None, min_length=1)
    grammar: str | None = Field(None, min_length=1)


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: Switch = Field(None, description="Send a last chunk with the usage.")


class ForTrainers(Sampling):
    """Fields of completions and chats; most are for trainers, under vLLM's names."""

    stream_options: StreamOptions | None = None
    return_token_ids: Switch = Field(
        None,
        description="Return the ids of prompt and completion, and the weight version of each token.",
    )
    return_tokens_as_token_ids: Switch = Field(
        None, description='In log-probs, return "token_id:" and the id in place of a token\'s text.'
    )
    prompt_logprobs: Integer = None
    support: Switch = None
    structured_outputs: StructuredOutputs | None = None

    def sampling(self) -> dict[str, Any]:
        fields, structures = super().sampling(), self.structured_outputs
        structure = {} if structures is None else structures.model_dump(exclude_none=True)
        if name := next((name for name in structure if name in fields), None):
            raise InvalidRequest(f"structured_outputs.{name}: {name} is set as well")
        return fields | structure


class Completions(ForTrainers):
    """A completion request for one prompt or several."""

    prompt: str | Prompts[str] | PromptIds | Prompts[PromptIds] = Field(
        examples=["Once upon a time", [1, 2, 3]]
    )
    max_tokens: Integer = Field(None, description="Maximum number of new tokens. Default: 16.")
    logprobs: Integer = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="Return log-probs of the tokens and of the top N.",
    )
    echo: Switch = Field(
        None, description="Return the prompt before the completion, with its log-probs."
    )
    json_schema: dict[str, Any] | None = None
    num_beams: Integer = None
    length_penalty: Number = None
    early_stopping: bool | Literal["never"] | None = None


# Accepted without effect: every cached prefix is found.
CacheControl = Annotated[dict[str, Any], Field(max_length=8)] | None


class TextPart(Strict):
    """A text part of a message."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl = None


def _readable(arguments: Any) -> Any:
    """Replace lone surrogates, which a model may write and pydantic rejects, by "?"."""
    if not isinstance(arguments, str):
        return arguments
    check_parts(arguments.encode(errors="replace"))
    if "\\ud" in arguments.lower():
        with suppress(ValueError, RecursionError):  # pydantic's error names the place
            text = json.dumps(json.loads(arguments), ensure_ascii=False)
            return text.encode(errors="replace").decode()
    return arguments


# Arguments of a call in an earlier answer: JSON text as the model generated it.
CallArguments = Annotated[Json[Any], BeforeValidator(_readable)]


class FunctionCall(Strict):
    """A function call of the model."""

    name: str
    arguments: CallArguments


class ToolCall(Strict):
    """A tool call in an assistant message."""

    id: str
    type: Literal["function"]
    function: FunctionCall


Content = str | Annotated[list[TextPart], at_most(MAX_MESSAGES)]


class PlainMessage(Strict):
    """A message of the system, the developer or the user."""

    role: Literal["system", "developer", "user"]
    content: Content
    name: str | None = None


class AssistantMessage(Strict):
    """An earlier message of the assistant."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: Annotated[list[ToolCall], at_most(MAX_TOOLS)] | None = None
    refusal: None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(default=None, description="Another name of reasoning_content.")
    name: str | None = None
    function_call: None = None
    audio: None = None
    annotations: list[Any] | None = Field(default=None, max_length=0)


class ToolMessage(Strict):
    """The result of a tool call."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str


Message = Annotated[PlainMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]
Messages = Annotated[list[Message], at_most(MAX_MESSAGES)]


class Function(Strict):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.\-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Switch = None  # arguments always conform to the schema, with or without it

    def plain(self) -> dict[str, Any]:
        """Return the function as chat templates know it."""
        return self.model_dump(include={*Function.model_fields}, exclude_none=True)


class Tool(Strict):
    """A tool that the model may use."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    """The name of a function."""

    name: str


class NamedTool(Strict):
    """The tool that the model must use."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Strict):
    """A JSON schema of the answer, enforced with or without `strict`."""

    name: str
    description: str | None = Field(None, description="Has no effect.")
    schema_: dict[str, Any] = Field(alias="schema")
    strict: Switch = None


class PlainFormat(Strict):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaFormat(Strict):
    """A JSON document that conforms to a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


Format = Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")]


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatCompletions(ForTrainers):
    """A chat completion request."""

    messages: Messages = Field(
        min_length=1, examples=[[{"role": "user", "content": "Tell me a story."}]]
    )
    max_tokens: Integer = Field(
        None,
        ge=1,
        description="Older name of max_completion_tokens.",
        json_schema_extra={"minimum": 1},  # not that of `SamplingParams`
    )
    max_completion_tokens: Integer = Field(
        None, ge=1, description="Maximum number of new tokens. Default: up to the length limit."
    )
    logprobs: Switch = None
    top_logprobs: Integer = Field(None, ge=0, le=MAX_TOP)
    response_format: Format | None = None
    tools: Annotated[list[Tool], at_most(MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    modalities: Annotated[list[Literal["text"]], at_most(1)] | None = None
    parallel_tool_calls: Switch = None
    reasoning_effort: Effort | None = Field(None, description="Passed to the chat template.")
    chat_template_kwargs: Variables | None = Field(
        None, description="Variables of the model's own chat template, such as enable_thinking."
    )
