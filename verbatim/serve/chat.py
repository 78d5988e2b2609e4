"""`/v1/chat/completions`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from verbatim.core import Completion, Delta, Request, Result
from verbatim.errors import InvalidRequest, NotSupported
from verbatim.params import STRUCTURES, SamplingParams
from verbatim.sampling.json_schema import close_objects
from verbatim.serve.answers import Answers, Part, Reader, split_parts
from verbatim.serve.completions import ApiRequest, Events, ending, ids_of, prompt_of
from verbatim.serve.fields import (
    AssistantMessage,
    ChatCompletions,
    Function,
    Message,
    NamedFunction,
    NamedTool,
    Sampling,
    ToolMessage,
)
from verbatim.serve.formats import ToolUse, call_of
from verbatim.serve.grammars import ANY_OBJECT
from verbatim.serve.service import Reservation, Service
from verbatim.text.chat import render_chat

Body = TypeVar("Body", bound=Sampling)


class ConversationRequest(ApiRequest[Body]):
    """A request for the next turn of a conversation: a chat, a response or a message.

    Args:
        messages: messages in the format of chat templates, with contents as text.
        fields: fields of SamplingParams that the body sets under other names.
        form: the response format of any endpoint, or None.
        functions: functions that the model may call.
        choice: OpenAI's `tool_choice`.
        several_calls: OpenAI's `parallel_tool_calls`.
        template_kwargs: other variables of the template.
        effort: reasoning effort; "none" turns reasoning off.
        thinking: whether to reason, for templates with such a switch; None: the template's default.

    Attributes:
        params: sampling parameters of the turn, without the grammar of its reasoning.
        num_reasoning_tokens: reasoning tokens of the answer, once counted.
        readers: those of the completions that have begun, by index.

    Raises:
        InvalidRequest, NotSupported: an unsupported combination.
    """

    def __init__(
        self,
        service: Service,
        body: Body,
        messages: Iterable[dict[str, Any]],
        fields: dict[str, Any],
        form: Any,
        functions: Sequence[Function] = (),
        choice: str | NamedFunction | None = None,
        several_calls: bool | None = None,
        *,
        template_kwargs: dict[str, Any] | None = None,
        effort: str | None = None,
        thinking: bool | None = None,
    ) -> None:
        super().__init__(service, body)
        fields = body.sampling() | fields | _structure(form)
        self._messages = [*messages]
        self._variables = dict(template_kwargs or {})
        if wrong := sorted(self._variables.keys() & _NOT_FOR_CLIENTS):
            raise InvalidRequest(f"chat_template_kwargs.{wrong[0]}: {_NOT_FOR_CLIENTS[wrong[0]]}")
        template = template_of(service, bool(functions))
        use = ToolUse.resolve(functions, choice, several_calls, template, service.marks)
        adapt_messages(self._messages, template)
        # The template's variable that turns reasoning on and off, if it has one.
        names = ("enable_thinking", "thinking")
        switch = next((name for name in names if re.search(rf"\b{name}\b", template)), None)
        if effort is not None:
            has_effort = switch is None or "reasoning_effort" in template
            if has_effort:
                self._variables["reasoning_effort"] = effort
            if switch is not None and (effort == "none" or not has_effort):
                self._variables[switch] = effort != "none"
        if thinking is not None and switch is not None:
            self._variables[switch] = thinking
        if functions:
            self._variables["tools"] = [
                {"type": "function", "function": function.plain()} for function in functions
            ]
        self.answers = Answers(use, template, service.marks)
        self.shown_ids = self.answers.shown_ids
        self.readers = defaultdict[int, Reader](self.answers.reader)
        if use is not None:
            if kind := next((name for name in STRUCTURES if fields.get(name) is not None), None):
                raise NotSupported(
                    f"{kind} with tools: only one kind of structured output per request"
                )
            fields["grammar"] = use.grammar()
        self.params = service.chat_defaults.replace(**fields, adapter=self.adapter)
        self.num_reasoning_tokens = 0

    async def ask(self) -> tuple[list[Any], SamplingParams]:
        """Render the conversation to prompt ids; return these and the parameters of the turn."""
        tokenizer = self.service.tokenizer
        ids = await self.service.in_thread(
            lambda: render_chat(tokenizer, self._messages, **self._variables),
            num_chars=len(str([self._messages, self._variables])),  # tools may be large, too
        )
        self.answers.note_prompt(tokenizer.decode(ids[-_TAIL_IDS:], False))
        if (grammar := self.answers.grammar(self.params)) is None:
            return [ids], self.params
        structure: dict[str, Any] = dict.fromkeys(STRUCTURES) | {"grammar": grammar}
        return [ids], self.params.replace(**structure)

    async def _admit(self, reservation: Reservation) -> list[Request]:
        try:
            return await super()._admit(reservation)
        except InvalidRequest as error:
            field = self.params.structure if self.answers.use is None else "tools"
            if not str(error).startswith("grammar: ") or field == "grammar":
                raise
            # The client sent another field, from which the grammar was made.
            raise InvalidRequest(str(error).replace("grammar", str(field), 1)) from None

    def parts_of(self, piece: Completion | Delta) -> list[Part]:
        """Return the new text, reasoning and calls of a completion."""
        ended = piece.finish_reason is not None
        return self.readers[piece.index].push(piece.text, last=ended)

    async def count_reasoning(self, results: list[Result]) -> None:
        if self.answers.reasons:
            (result,) = results
            tokenizer, skips = self.service.tokenizer, self.params.skip_special_tokens
            self.num_reasoning_tokens = await self.service.in_thread(
                lambda: self.answers.num_reasoning_tokens(result, tokenizer, skips),
                num_chars=sum(len(output.text) for output in result.outputs),
            )


_TAIL_IDS = 16  # last ids of a prompt, which are searched for a mark of reasoning

# Template variables that clients can't set, and the reason.
_NOT_FOR_CLIENTS = {
    "chat_template": "a template is a program, which this server does not accept from clients",
    "tools": "use the field tools",
    "tokenizer": "not a variable of a chat template",
    "messages": "is a field of its own",
    "sanitize_control_tokens": "is not for clients to change",
}


def template_of(service: Service, tools: bool) -> str:
    """Return the chat template for conversations with or without tools; "" if there is none."""
    hf = getattr(service.llm.tokenizer, "hf", None)
    template = getattr(hf, "chat_template", None)
    if isinstance(template, dict):
        template = (template.get("tool_use") if tools else None) or template.get("default")
    return template if isinstance(template, str) else ""


def adapt_messages(messages: list[dict[str, Any]], template: str) -> None:
    """Rename or drop earlier reasoning to fit the template; refuse other fields that it does not use."""
    names = ("reasoning_content", "reasoning", "thinking")
    field = next((name for name in names if re.search(rf"[.'\"]{name}\b", template)), None)
    for index, message in enumerate(messages):
        reasoning = message.pop("reasoning_content", None)
        if field is not None and reasoning:
            message[field] = reasoning
        for key in ("name", "tool_calls"):
            if key in message and not re.search(rf"\b{key}\b", template):
                raise NotSupported(
                    f"messages[{index}].{key} would have no effect: the chat template doesn't use it"
                )


class ChatRequest(ConversationRequest[ChatCompletions]):
    """A validated chat completion request; raises Refusal, InvalidRequest or NotSupported."""

    prefix, ends_with_done = "chatcmpl-", True
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, service: Service, body: ChatCompletions) -> None:
        service.check_logprobs(body.top_logprobs, body.prompt_logprobs, body.stream)
        choice = body.tool_choice
        super().__init__(
            service,
            body,
            map(message_of, body.messages),
            _fields(body),
            body.response_format,
            [tool.function for tool in body.tools or ()],
            choice.function if isinstance(choice, NamedTool) else choice,
            body.parallel_tool_calls,
            template_kwargs=body.chat_template_kwargs,
            effort=body.reasoning_effort,
        )

    def whole(self, requests: list[Request], results: list[Result]) -> dict[str, Any]:
        (result,) = results
        choices = tuple(map(self._choice, result.outputs))  # each may be long
        answer = self.envelope(self.kind, choices) | {"usage": self.usage(results)}
        return answer | prompt_of(result, self.body, self.service)

    def _event(self, index: int, delta: dict[str, Any], **rest: Any) -> dict[str, Any]:
        empty = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self.chunk([empty | rest])

    def write(self, number: int, request: Request, delta: Delta) -> Events:
        """Yield the reasoning of a delta, its text with log-probs, its calls, then its end."""
        if delta.index not in self.readers:
            first = self._event(delta.index, {"role": "assistant", "content": ""})
            if self.body.return_token_ids:
                first["prompt_token_ids"] = request.prompt_ids
            yield first
        text, reasoning, calls = split_parts(self.parts_of(delta))
        num_calls = self.readers[delta.index].num_calls
        pieces: list[dict[str, Any]] = []
        if reasoning:
            pieces.append({"delta": {"reasoning_content": reasoning}})
        logprobs = self._logprobs(delta)
        if text or (logprobs is not None and delta.token_ids):
            pieces.append({"delta": {"content": text}, "logprobs": logprobs})
        for number, call in enumerate(calls, start=num_calls - len(calls)):
            pieces.append({"delta": {"tool_calls": [{"index": number} | call.wire()]}})
        tokens = ids_of(delta, self.body)
        if tokens and delta.token_ids:
            pieces = pieces or [{"delta": {}}]
            pieces[0] |= tokens
        for piece in pieces:
            yield self._event(delta.index, **piece)
        if delta.finish_reason is not None:
            end = ending(delta, request.seed, called=num_calls > 0)
            yield self._event(delta.index, {}, **end)

    def _choice(self, output: Completion) -> dict[str, Any]:
        text, reasoning, calls = split_parts(self.parts_of(output))
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self.answers.reasons:
            message["reasoning_content"] = reasoning or None
        if calls:
            message["tool_calls"] = [call.wire() for call in calls]
            message["content"] = text or None
        return {
            "index": output.index,
            "message": message,
            "logprobs": self._logprobs(output),
            **ending(output, output.seed, called=bool(calls)),
            **ids_of(output, self.body),
        }

    def usage(self, results: list[Result]) -> dict[str, Any]:
        details = {"reasoning_tokens": self.num_reasoning_tokens}
        return super().usage(results) | {"completion_tokens_details": details}

    def _logprobs(self, piece: Completion | Delta) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        return {"content": self.token_logprobs(piece), "refusal": None}


def _fields(body: ChatCompletions) -> dict[str, Any]:
    limits = [n for n in (body.max_completion_tokens, body.max_tokens) if n is not None]
    if len(set(limits)) > 1:
        raise InvalidRequest(
            f"max_tokens={body.max_tokens} and max_completion_tokens={body.max_completion_tokens}: "
            "they mean the same; set only one"
        )
    fields: dict[str, Any] = {"max_tokens": limits[0]} if limits else {}
    return fields | logprobs_of(body.top_logprobs, bool(body.logprobs), "logprobs=true")


def logprobs_of(num_top: int | None, wanted: bool, switch: str) -> dict[str, Any]:
    """Return the sampling parameter for log-probs, which are reported if the `switch` is set."""
    if num_top and not wanted:
        raise InvalidRequest(f"top_logprobs={num_top} needs {switch}")
    return {"logprobs": num_top or 0} if wanted else {}


def _structure(form: Any) -> dict[str, Any]:
    """Return the sampling parameter for the response format of any endpoint; {} for None or text."""
    schema = getattr(getattr(form, "json_schema", form), "schema_", None)
    if schema is None and getattr(form, "type", None) == "json_object":
        schema = ANY_OBJECT
    return {} if schema is None else {"json_schema": close_objects(schema)}


def text_of(content: Any) -> str:
    """Return a message's text: a string, or parts, some of which have a `text`."""
    if isinstance(content, str):
        return content
    return "".join(getattr(part, "text", "") for part in content or ())


def message_of(message: Message) -> dict[str, Any]:
    """Return a message in the template's format: content as text, arguments as parsed JSON."""
    plain: dict[str, Any] = {"role": message.role, "content": text_of(message.content)}
    if isinstance(message, ToolMessage):
        plain["tool_call_id"] = message.tool_call_id
    elif message.name is not None:
        plain["name"] = message.name
    if not isinstance(message, AssistantMessage):
        return plain
    if reasoning := message.reasoning_content or message.reasoning:
        plain["reasoning_content"] = reasoning
    if message.tool_calls:
        plain["tool_calls"] = [
            call_of(call.id, call.function.name, call.function.arguments)
            for call in message.tool_calls
        ]
    return plain
