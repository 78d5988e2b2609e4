"""The formats in which families of models write tool calls and reasoning, by their chat templates."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from verbatim.serve.arguments import PYTHONIC, ArgumentFormat, read_json
from verbatim.serve.fields import Function

_INDEX = r"(\d{1,6})"


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A tool call of the model; `arguments` is its JSON, unchanged."""

    id: str
    name: str
    arguments: str

    def wire(self) -> dict[str, Any]:
        return call_of(self.id, self.name, self.arguments)


def call_of(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """Return a call in OpenAI's form, or in that of chat templates, with the arguments as an object."""
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The text of calls: `begin`, then calls with `between` in between, then `end`.

    Attributes:
        mark: what tells a call from text. Text never contains it, or doesn't begin with it (`bare`).
        head: what precedes a call's arguments, with NAME for the function's name, and INDEX for a number,
            with which the name is the call's id.
        tail: what follows them.
        between: None if several calls repeat everything, with line ends and text between them.
        bare: calls are the whole output, as their mark is common in texts.
        arguments: None for a JSON object.
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
        """All of it, with every mark."""
        parts = [self.mark, self.begin, self.head, self.tail, self.end, self.between or ""]
        if self.arguments is not None:
            parts += [self.arguments.head, self.arguments.tail]
        return "".join(parts)

    def parse(
        self, text: str, at: int, functions: Mapping[str, Function]
    ) -> tuple[list[ParsedCall], int] | None:
        """Return the calls at a position, and where they end; None if they are incomplete or no calls."""
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
