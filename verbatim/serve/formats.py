"""Formats of tool calls and reasoning by model family, detected from the chat template.

`ToolUse`: the tools of a request, and the grammar of their calls. Arguments always fit the tool's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from verbatim.errors import InvalidRequest
from verbatim.sampling.json_schema import check_schema
from verbatim.serve.fields import Function, NamedFunction
from verbatim.serve.grammars import (
    ANYTHING,
    NO_MARKS,
    PYTHONIC,
    ArgumentFormat,
    Marks,
    read_json,
    schema_of,
    text_without,
)

_INDEX = r"(\d{1,6})"


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A tool call of the model; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str

    def wire(self) -> dict[str, Any]:
        return call_of(self.id, self.name, self.arguments)


def call_of(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """Return a call in OpenAI's format or, if `arguments` is an object, in the format of chat templates."""
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The text of calls: `begin`, calls separated by `between`, `end`.

    Attributes:
        mark: text that identifies a call. Other text never contains it, or, if `bare`, never begins with it.
        head: text before a call's arguments. NAME stands for the function's name, and INDEX for a number
            that forms the call's id with the name.
        tail: text after the arguments.
        between: separator of calls. None: each call repeats all parts, with line ends and text in between.
        bare: whether calls are the whole output, because the mark is common in text.
        arguments: format of the arguments; None for a JSON object.
    """

    mark: str
    begin: str
    head: str
    tail: str
    end: str
    between: str | None = None
    bare: bool = False
    arguments: ArgumentFormat | None = None

    @property
    def repeats(self) -> bool:
        """True if text may follow a call."""
        return self.between is None and not self.bare

    @property
    def text(self) -> str:
        """All parts joined, to find the marks that they contain."""
        parts = [self.mark, self.begin, self.head, self.tail, self.end, self.between or ""]
        if self.arguments is not None:
            parts += [self.arguments.head, self.arguments.tail]
        return "".join(parts)

    def parse(
        self, text: str, at: int, functions: Mapping[str, Function]
    ) -> tuple[list[ParsedCall], int] | None:
        """Return the calls at position `at` and the position after them; None if incomplete or invalid."""
        if not text.startswith(self.begin, at):
            return None
        names = "|".join(map(re.escape, sorted(functions, key=len, reverse=True)))
        head = re.escape(self.head).replace("NAME", f"({names})").replace("INDEX", _INDEX)
        calls, at = list[ParsedCall](), at + len(self.begin)
        end, pattern = at, re.compile(head)
        while match := pattern.match(text, at):
            name, at = match[1], match.end()
            try:
                if self.arguments is None:
                    arguments, at = read_json(text, at)
                else:
                    arguments, at = self.arguments.read(text, at, functions[name])
            except (ValueError, RecursionError):
                return None
            if not text.startswith(self.tail, at):
                return None
            end = at = at + len(self.tail)
            is_numbered = "INDEX" in self.head
            call_id = f"functions.{name}:{match[2]}" if is_numbered else f"call_{uuid4().hex[:24]}"
            calls.append(ParsedCall(call_id, name, arguments))
            if self.between is None or not text.startswith(self.between, at):
                break
            at += len(self.between)
        return (calls, end + len(self.end)) if calls and text.startswith(self.end, end) else None


_DEEPSEEK = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
_DEEPSEEK_ENDS = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
_KIMI = "<|tool_calls_section_begin|>"
_PYTHONIC = re.compile(r"\[\w+\(\w+=")


def call_format(template: str) -> CallFormat:
    """Return the format that a chat template describes; a bare JSON object if it describes none."""
    if is_harmony(template):  # gpt-oss
        head = f"{CHANNEL}commentary to=functions.NAME {CONSTRAIN}json{MESSAGE}"
        return CallFormat(CHANNEL, "", head, "", "")
    if "<arg_key>" in template:  # GLM 4.5 and 4.6; 4.7
        line = "\n" if "</arg_key>\n<arg_value>" in template else ""
        argument = f"{line}<arg_key>NAME</arg_key>{line}<arg_value>"
        arguments = ArgumentFormat(argument, "</arg_value>", raw=True)
        end = f"{line}</tool_call>"
        return CallFormat("<tool_call>", "<tool_call>", "NAME", "", end, arguments=arguments)
    if "<tool_call>" in template and "<function=" in template:  # Qwen3-Coder, Qwen 3.5, Nemotron 3
        arguments = ArgumentFormat("<parameter=NAME>\n", "\n</parameter>\n", raw=True)
        head, tail, end = "<function=NAME>\n", "</function>", "\n</tool_call>"
        return CallFormat("<tool_call>", "<tool_call>\n", head, tail, end, arguments=arguments)
    if "<tool_call>" in template:  # Hermes, Qwen
        head = '{"name": "NAME", "arguments": '
        return CallFormat("<tool_call>", "<tool_call>\n", head, "}", "\n</tool_call>")
    if _KIMI in template:
        head = "<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>"
        return CallFormat(
            _KIMI, _KIMI, head, "<|tool_call_end|>", "<|tool_calls_section_end|>", between=""
        )
    if "[TOOL_CALLS]" in template:  # Mistral, newer and older
        if "[ARGS]" in template:
            return CallFormat("[TOOL_CALLS]", "[TOOL_CALLS]", "NAME[ARGS]", "", "", "[TOOL_CALLS]")
        begin = "[TOOL_CALLS] [" if "[TOOL_CALLS] [" in template else "[TOOL_CALLS]["
        head = '{"name": "NAME", "arguments": '
        return CallFormat("[TOOL_CALLS]", begin, head, "}", "]", ", ")
    if _DEEPSEEK[0] in template:  # V3, R1; V3.1
        section, call, separator = _DEEPSEEK
        end, section_end = _DEEPSEEK_ENDS
        if "```json" in template:
            head, end, between = f"{call}function{separator}NAME\n```json\n", f"\n```{end}", "\n"
        else:
            head, between = f"{call}NAME{separator}", ""
        return CallFormat(section, section, head, end, section_end, between)
    if _PYTHONIC.search(template):  # Llama 3.2 and 4, OLMo 3
        return CallFormat("[", "[", "NAME(", ")", "]", ", ", bare=True, arguments=PYTHONIC)
    key = "parameters" if '"parameters":' in template else "arguments"  # Llama 3
    return CallFormat("{", "", f'{{"name": "NAME", "{key}": ', "}", "", bare=True)


_REASONING = (
    ("<think>", "</think>"),  # DeepSeek, Qwen, GLM, MiniMax, Nemotron
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<seed:think>", "</seed:think>"),
    ("<thought>", "</thought>"),  # EXAONE
    ("◁think▷", "◁/think▷"),  # Kimi
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
)


def reasoning_marks(template: str) -> tuple[str, str] | None:
    """Return the marks around the reasoning of models with this template; None without reasoning."""
    return next((marks for marks in _REASONING if marks[1] in template), None)


# Messages of gpt-oss begin with a header, which names their channel.
START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
HARMONY = (START, CHANNEL, CONSTRAIN, MESSAGE, "<|end|>", "<|call|>", "<|return|>")


def is_harmony(template: str) -> bool:
    """Return whether a chat template has the channels of gpt-oss."""
    return f"{CHANNEL}analysis{MESSAGE}" in template


# ---- the tools of a request


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request, and how the model may use them.

    Attributes:
        functions: callable functions by name.
        required: whether the output must be one or more calls.
        several: whether more than one call is allowed.
        format: format in which the model writes calls.
        marks: the tokenizer's marks that the format contains.
    """

    functions: dict[str, Function]
    required: bool
    several: bool
    format: CallFormat
    marks: Marks

    @classmethod
    def resolve(
        cls,
        functions: Sequence[Function],
        choice: str | NamedFunction | None,
        several: bool | None,
        template: str,
        marks: Marks = NO_MARKS,
    ) -> ToolUse | None:
        """Return the tool use of a request; None if no tool may be called.

        Raises:
            InvalidRequest: a choice without tools, or of an unknown tool; duplicate names; an unsupported
                schema.
        """
        if not functions:
            if choice not in (None, "none", "auto"):
                raise InvalidRequest("tool_choice requires tools")
            return None
        named = {function.name: function for function in functions}
        if len(named) < len(functions):
            raise InvalidRequest("tools: two of them have the same name")
        for function in functions:
            name, schema = function.name, schema_of(function)
            if schema.get("type", "object") != "object":
                kind = f"the type of its parameters is {schema['type']!r}; must be 'object'"
                raise InvalidRequest(f"tools: {name}: {kind}")
            try:
                check_schema(schema)
            except InvalidRequest as error:
                raise InvalidRequest(f"tools: {name}: {error}") from None
        if choice == "none":
            return None
        if isinstance(choice, NamedFunction):
            if choice.name not in named:
                raise InvalidRequest(
                    f"tool_choice: no tool is named {choice.name!r:.80}; the tools are {', '.join(named)}"
                )
            named = {choice.name: named[choice.name]}
        form = call_format(template)
        return cls(
            named,
            required=choice == "required" or isinstance(choice, NamedFunction),
            several=several is not False and not isinstance(choice, NamedFunction),
            format=form,
            marks=marks.within(form.text),
        )

    def grammar(self) -> str:
        """Return the grammar of the output, in Lark."""
        form, lark, mark = self.format, self.marks.lark, self.format.mark
        several = self.several and form.between is not None
        more = f" ({lark(form.between or '')} call)*" if several else ""
        calls = f"call{more} {lark(form.end)}\n"
        section = f"section: {lark(form.begin)} {calls}"
        if self.required:
            more = ' ("\\n" section)*' if self.several and form.repeats else ""
            frame = f"start: section{more}\n{section}"
        elif form.bare:
            # There is no mark, so text that begins like a call would be parsed as one.
            frame = f"start: section | TEXT\n{section}TEXT: /[^\\{mark}]{ANYTHING}/\n"
        else:
            # Text must not contain the mark, since the schema would not apply to what follows.
            start = f"part{'*' if self.several else '?'}" if form.repeats else "part |"
            part = f"part: head {lark(form.begin.removeprefix(mark))} {calls}"
            text = text_without("TEXT", [mark])
            frame = f"start: {start} TEXT\n{part}{self.marks.until('head', mark)}{text}"
        return frame + self.call_rules()

    def call_rules(self) -> str:
        """Return the rules of the calls. Each tool has its own schema, and `$ref`s are local to it."""
        rules, names, form = [], [], self.format
        for number, function in enumerate(self.functions.values()):
            names.append(f"call_{number}")
            start, _, rest = form.head.replace("NAME", function.name).partition("INDEX")
            head = self.marks.lark(start) + (
                f" /[0-9]{{1,6}}/ {self.marks.lark(rest)}" if rest else ""
            )
            rule = f"arguments_{number}"
            rules.append(f"call_{number}: {head} {rule} {self.marks.lark(form.tail)}\n")
            if form.arguments is None:
                rules.append(f"{rule}: %json {json.dumps(schema_of(function))}\n")
                continue
            try:
                rules += form.arguments.rules(rule, function, self.marks)
            except (TypeError, AttributeError, KeyError) as error:
                raise InvalidRequest(
                    f"tools: {function.name}: not a JSON schema: {error}"
                ) from None
        return f"call: {' | '.join(names)}\n" + "".join(dict.fromkeys(rules))
