"""`/v1/chat/completions`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from verbatim.core import Completion, Delta, Request, Result
from verbatim.errors import InvalidRequest, NotSupported
from verbatim.params import STRUCTURES, SamplingParams
from verbatim.sampling.json_schema import closed
from verbatim.serve.answers import Answers
from verbatim.serve.arguments import ANY_OBJECT
from verbatim.serve.completions import (
    ApiRequest,
    Body,
    ending,
    ids_of,
    prompt_of,
    usage,
)
from verbatim.serve.fields import (
    AssistantMessage,
    ChatCompletions,
    Function,
    Message,
    NamedFunction,
    NamedTool,
    ToolMessage,
)
from verbatim.serve.formats import call_of
from verbatim.serve.reader import Part, Reader, split_parts
from verbatim.serve.service import Client, Service
from verbatim.serve.tools import ToolUse
from verbatim.text.chat import render_chat


class ConversationRequest(ApiRequest[Body]):
    """A request for the next turn of a conversation: a chat, a response or a message.

    Args:
        messages: in the format of chat templates, with contents as text.
        fields: the given fields of SamplingParams.
        functions: the tools.
        choice: OpenAI's `tool_choice`.
        several_calls: OpenAI's `parallel_tool_calls`.
        template_kwargs: other variables of the template.
        effort: of the reasoning; "none" turns it off.
        thinking: turns reasoning on or off, if the template can.

    Attributes:
        params: sampling parameters of the turn, without a grammar of its reasoning.
        num_reasoning_tokens: of the answer, once it is counted.

    Raises:
        InvalidRequest, NotSupported: an unsupported combination.
    """

    def __init__(
        self,
        service: Service,
        body: Body,
        messages: Iterable[dict[str, Any]],
        fields: dict[str, Any],
        functions: Sequence[Function] = (),
        choice: str | NamedFunction | None = None,
        several_calls: bool | None = None,
        *,
        template_kwargs: dict[str, Any] | None = None,
        effort: str | None = None,
        thinking: bool | None = None,
    ) -> None:
        super().__init__(service, body)
        self._messages = [*messages]
        self._variables = dict(template_kwargs or {})
        if wrong := sorted(self._variables.keys() & _NOT_FOR_CLIENTS):
            raise InvalidRequest(f"chat_template_kwargs.{wrong[0]}: {_NOT_FOR_CLIENTS[wrong[0]]}")
        template = _template(service, bool(functions))
        use = ToolUse.resolve(functions, choice, several_calls, template, service.marks)
        _fit_messages(self._messages, template)
        if effort is not None:
            self._variables |= _effort(effort, template)
        if thinking is not None and (switch := _thinking_switch(template)) is not None:
            self._variables[switch] = thinking
        if functions:
            self._variables["tools"] = [
                {"type": "function", "function": function.plain()} for function in functions
            ]
        self.answers = Answers(use, template, service.marks)
        if use is not None:
            if given := next((name for name in STRUCTURES if fields.get(name) is not None), None):
                raise NotSupported(
                    f"{given} with tools: only one kind of structured output per request"
                )
            fields["grammar"] = use.grammar()
        self.params = service.chat_defaults.replace(**fields, adapter=self.adapter)
        self.num_reasoning_tokens = 0

    async def ask(self) -> tuple[list[list[int]], SamplingParams]:
        """Render the conversation to prompt ids; return these and the parameters of the turn."""
        tokenizer = self.service.tokenizer
        ids = await self.service.in_thread(
            lambda: render_chat(tokenizer, self._messages, **self._variables),
            num_chars=sum(len(message["content"]) for message in self._messages),
        )
        self.answers.note_prompt(tokenizer.decode(ids[-_TAIL_IDS:], False))
        if (grammar := self.answers.grammar(self.params)) is None:
            return [ids], self.params
        structure: dict[str, Any] = dict.fromkeys(STRUCTURES) | {"grammar": grammar}
        return [ids], self.params.replace(**structure)

    async def result(self, client: Client) -> Result:
        """Generate all completions, with the tokens of their reasoning counted."""
        ((_, result),) = await self.service.run(client, self.ask, self.answers.shown_ids)
        await self.count_reasoning(result)
        return result

    async def stream(
        self, client: Client
    ) -> AsyncGenerator[tuple[Request, Delta, Reader, list[Part]], None]:
        """Generate, and yield each delta with the reader and the new parts of its completion."""
        readers: defaultdict[int, Reader] = defaultdict(self.answers.reader)
        shown_ids = self.answers.shown_ids
        async with aclosing(self.service.stream(client, self.ask, shown_ids)) as stream:
            async for _, request, delta in stream:
                reader, ended = readers[delta.index], delta.finish_reason is not None
                yield request, delta, reader, reader.push(delta.text, last=ended)

    def parts_of(self, output: Completion) -> list[Part]:
        """Return the text, the reasoning and the calls of a whole completion."""
        return self.answers.reader().push(output.text, last=True)

    async def count_reasoning(self, result: Result) -> None:
        """Count the tokens of reasoning, for the usage."""
        if self.answers.reasons:
            tokenizer = self.service.tokenizer
            self.num_reasoning_tokens = await self.service.in_thread(
                lambda: self.answers.num_reasoning_tokens(
                    result, tokenizer, self.params.skip_special_tokens
                ),
                num_chars=sum(len(output.text) for output in result.outputs),
            )


_TAIL_IDS = 16  # ids at the end of a prompt that may have a mark of reasoning

# Template variables that clients can't set, and the reason.
_NOT_FOR_CLIENTS = {
    "chat_template": "a template is a program, which this server does not accept from clients",
    "tools": "use the field tools",
    "tokenizer": "not a variable of a chat template",
    "messages": "is a field of its own",
    "sanitize_control_tokens": "is not for clients to change",
}


def _template(service: Service, tools: bool) -> str:
    """Return the chat template for conversations with or without tools; "" if there is none."""
    hf = getattr(service.llm.tokenizer, "hf", None)
    template = getattr(hf, "chat_template", None)
    if isinstance(template, dict):
        template = (template.get("tool_use") if tools else None) or template.get("default")
    return template if isinstance(template, str) else ""


def _fit_messages(messages: list[dict[str, Any]], template: str) -> None:
    """Refuse fields of messages that the template does not use, and leave out earlier reasoning if so."""
    names = ("reasoning_content", "reasoning", "thinking")
    used = next((name for name in names if re.search(rf"[.'\"]{name}\b", template)), None)
    for index, message in enumerate(messages):
        reasoning = message.pop("reasoning_content", None)
        if used is not None and reasoning:
            message[used] = reasoning
        for key in ("name", "tool_calls"):
            if key in message and not re.search(rf"\b{key}\b", template):
                raise NotSupported(
                    f"messages[{index}].{key} would have no effect: the chat template doesn't use it"
                )


def _effort(effort: str, template: str) -> dict[str, Any]:
    """Return the template's variable for an effort of reasoning."""
    name = _thinking_switch(template)
    if name is None or "reasoning_effort" in template:
        return {"reasoning_effort": effort}
    return {name: effort != "none"}


def _thinking_switch(template: str) -> str | None:
    """Return the template's variable that turns reasoning on and off, or None."""
    names = ("enable_thinking", "thinking")
    return next((name for name in names if re.search(rf"\b{name}\b", template)), None)


class ChatRequest(ConversationRequest[ChatCompletions]):
    """A validated chat completion request.

    Raises:
        Refusal, InvalidRequest, NotSupported: an invalid or unsupported request.
    """

    prefix, ends_with_done = "chatcmpl-", True

    def __init__(self, service: Service, body: ChatCompletions) -> None:
        service.check_logprobs(body.top_logprobs, body.prompt_logprobs, body.stream)
        choice = body.tool_choice
        super().__init__(
            service,
            body,
            map(message_of, body.messages),
            _fields(body),
            [tool.function for tool in body.tools or ()],
            choice.function if isinstance(choice, NamedTool) else choice,
            body.parallel_tool_calls,
            template_kwargs=body.chat_template_kwargs,
            effort=body.reasoning_effort,
        )

    async def answer(self, client: Client) -> dict[str, Any]:
        """Return the whole response."""
        result = await self.result(client)
        choices = tuple(map(self._choice, result.outputs))  # each may be long
        answer = self.envelope("chat.completion", choices) | {"usage": self._usage(result)}
        return answer | prompt_of(result, self.body, self.service)

    async def events(self, client: Client) -> AsyncGenerator[dict[str, Any], None]:
        """Stream the response."""
        result: Result | None = None
        begun: set[int] = set()

        def event(index: int, delta: dict[str, Any], **rest: Any) -> dict[str, Any]:
            empty = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            return self.chunk("chat.completion.chunk", [empty | rest])

        async with aclosing(self.stream(client)) as stream:
            async for request, delta, reader, parts in stream:
                index, result = delta.index, delta.result or result
                if index not in begun:
                    begun.add(index)
                    first = event(index, {"role": "assistant", "content": ""})
                    if self.body.return_token_ids:
                        first["prompt_token_ids"] = request.prompt_ids
                    yield first
                for piece in self._pieces(delta, parts, reader):
                    yield event(index, **piece)
                if delta.finish_reason is not None:
                    called = reader.num_calls > 0
                    yield event(index, {}, **ending(delta, request.seed, called=called))
        if self.with_usage and result is not None:
            await self.count_reasoning(result)
            yield self.chunk("chat.completion.chunk", [], self._usage(result))

    def _pieces(self, delta: Delta, parts: list[Part], reader: Reader) -> list[dict[str, Any]]:
        """Return the pieces of a delta: its reasoning, its text with log-probs, then its calls."""
        text, reasoning, calls = split_parts(parts)
        pieces: list[dict[str, Any]] = []
        if reasoning:
            pieces.append({"delta": {"reasoning_content": reasoning}})
        logprobs = self._logprobs(delta)
        if text or (logprobs is not None and delta.token_ids):
            pieces.append({"delta": {"content": text}, "logprobs": logprobs})
        for number, call in enumerate(calls, start=reader.num_calls - len(calls)):
            pieces.append({"delta": {"tool_calls": [{"index": number} | call.wire()]}})
        tokens = ids_of(delta, self.body)
        if tokens and delta.token_ids:
            pieces = pieces or [{"delta": {}}]
            pieces[0] |= tokens
        return pieces

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

    def _usage(self, result: Result) -> dict[str, Any]:
        details = {"reasoning_tokens": self.num_reasoning_tokens}
        return usage([result]) | {"completion_tokens_details": details}

    def _logprobs(self, piece: Completion | Delta) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        return {"content": self.token_logprobs(piece), "refusal": None}


def _fields(body: ChatCompletions) -> dict[str, Any]:
    fields = body.sampling()
    limits = [n for n in (body.max_completion_tokens, body.max_tokens) if n is not None]
    if len(set(limits)) > 1:
        raise InvalidRequest(
            f"max_tokens={body.max_tokens} and max_completion_tokens={body.max_completion_tokens}: "
            "they mean the same; set only one"
        )
    if limits:
        fields["max_tokens"] = limits[0]
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest(f"top_logprobs={body.top_logprobs} needs logprobs=true")
    if body.logprobs:
        fields["logprobs"] = body.top_logprobs or 0
    fields |= structure_of(body.response_format)
    return fields


def structure_of(form: Any) -> dict[str, Any]:
    """Return the structure of a response format of any endpoint, which may be None."""
    schema = getattr(getattr(form, "json_schema", form), "schema_", None)
    if schema is None and getattr(form, "type", None) == "json_object":
        schema = ANY_OBJECT
    return {} if schema is None else {"json_schema": closed(schema)}


def text_of(content: Any) -> str:
    """Return a message's text: a string, or parts with a `text` each."""
    if content is None:
        return ""
    return content if isinstance(content, str) else "".join(part.text for part in content)


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
