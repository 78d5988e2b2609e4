"""The formats in which families of models write tool calls and reasoning, by their chat templates."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

_LITERALS = {"True": "true", "False": "false", "None": "null"}
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The text of calls: `begin`, then calls with `between` in between, then `end`.

    Attributes:
        mark: what tells a call from text. Text never contains it, or doesn't begin with it (`bare`).
        head: what precedes a call's arguments, with NAME for the function's name.
        tail: what follows them.
        between: None if several calls repeat everything, with line ends and text between them.
        bare: calls are the whole output, as their mark is common in texts.
        pythonic: arguments are Python's, `name=value`; else JSON.
    """

    mark: str
    begin: str
    head: str
    tail: str
    end: str
    between: str | None = None
    bare: bool = False
    pythonic: bool = False

    @property
    def repeats(self) -> bool:
        """True if text may follow a call."""
        return self.between is None and not self.bare

    @property
    def text(self) -> str:
        """All of it, with every mark."""
        return "".join((self.mark, self.begin, self.head, self.tail, self.end, self.between or ""))

    def head_of(self, name: str) -> str:
        return self.head.replace("NAME", name)

    def parse(self, text: str, names: list[str]) -> list[tuple[str, str]] | None:
        """Return the names and arguments of calls that are all of `text`; None if it is anything else."""
        if not text.startswith(self.begin):
            return None
        calls, at = list[tuple[str, str]](), len(self.begin)
        while True:
            name = next((n for n in names if text.startswith(self.head_of(n), at)), None)
            if name is None:
                return None
            at += len(self.head_of(name))
            try:
                arguments, at = (_keywords if self.pythonic else _json)(text, at)
            except (ValueError, RecursionError):
                return None
            if not text.startswith(self.tail, at):
                return None
            at += len(self.tail)
            calls.append((name, arguments))
            if text[at:] == self.end:
                return calls
            if self.between is None or not text.startswith(self.between, at):
                return None
            at += len(self.between)


def _json(text: str, at: int) -> tuple[str, int]:
    """Return the JSON at a position, as it is written, and where it ends."""
    end = _DECODER.raw_decode(text, at)[1]
    return text[at:end], end


def _keywords(text: str, at: int) -> tuple[str, int]:
    """Return Python's keyword arguments at a position as a JSON object, and where they end."""
    parts = []
    while match := re.compile(r"(?:, )?(\w+)=").match(text, at):
        at = match.end()
        literal = re.compile("True|False|None").match(text, at)
        if literal:
            value, at = _LITERALS[literal[0]], literal.end()
        else:
            value, at = _json(text, at)
        parts.append(f"{json.dumps(match[1])}: {value}")
    return f"{{{', '.join(parts)}}}", at


_DEEPSEEK = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
_DEEPSEEK_ENDS = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
_PYTHONIC = re.compile(r"\[\w+\(\w+=")


def call_format(template: str) -> CallFormat:
    """Return the format that a chat template describes; a bare JSON object if it describes none."""
    if "<tool_call>" in template:  # Hermes, Qwen
        head = '{"name": "NAME", "arguments": '
        return CallFormat("<tool_call>", "<tool_call>\n", head, "}", "\n</tool_call>")
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
        return CallFormat("[", "[", "NAME(", ")", "]", ", ", bare=True, pythonic=True)
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
