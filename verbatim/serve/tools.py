"""Tool calls: how a model writes them, the grammar that makes it so, and reading them back.

A model writes calls in the way that its chat template teaches. Two ways are known: Hermes' (Qwen and many
others), `<tool_call>` around a JSON object, and a bare JSON object. Arguments always fit the tool's schema.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from verbatim.errors import InvalidRequest, NotSupported
from verbatim.sampling.json_schema import COMPACT, check_schema
from verbatim.serve.fields import NamedTool, Tool
from verbatim.text.tokenizer import Tokenizer

BEGIN, END = "<tool_call>", "</tool_call>"
ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Call:
    """One call that a model wrote; `arguments` is JSON, as it wrote it."""

    id: str
    name: str
    arguments: str

    def wire(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


Part = str | Call  # of what a model said


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request and how they may be used.

    Attributes:
        tools: those that may be called.
        required: a call must be made, and nothing else said.
        several: more than one call may be made.
        tagged: calls stand between `<tool_call>` and `</tool_call>`.
        key: what the template calls the arguments: "arguments" or "parameters".
        tokens: which of the two marks are single tokens, which a grammar must call by their names.
    """

    tools: tuple[Tool, ...]
    required: bool
    several: bool
    tagged: bool
    key: str
    tokens: frozenset[str] = frozenset()

    @classmethod
    def settle(
        cls,
        tools: Sequence[Tool] | None,
        choice: str | NamedTool | None,
        several: bool | None,
        template: str,
        tokenizer: Tokenizer | None = None,
    ) -> ToolUse | None:
        """None where no tool may be called.

        Raises:
            InvalidRequest: a choice without tools, or of one that is not there; two of one name; a schema
                that can't be had.
            NotSupported: a tokenizer that leaves the marks out of the text.
        """
        if tools is None:
            if choice not in (None, "none"):
                raise InvalidRequest("tool_choice requires tools")
            if several is not None:
                raise InvalidRequest("parallel_tool_calls requires tools")
            return None
        names = [tool.function.name for tool in tools]
        if len(set(names)) < len(names):
            raise InvalidRequest("tools: two of them have the same name")
        for tool in tools:
            _check(tool)
        if choice == "none":
            return None
        if isinstance(choice, NamedTool):
            wanted = choice.function.name
            tools = [tool for tool in tools if tool.function.name == wanted]
            if not tools:
                raise InvalidRequest(
                    f"tool_choice: no tool is named {wanted!r}; the tools are {', '.join(names)}"
                )
        tagged = BEGIN in template
        return cls(
            tuple(tools),
            required=choice == "required" or isinstance(choice, NamedTool),
            several=several is not False and not isinstance(choice, NamedTool) and tagged,
            tagged=tagged,
            key="parameters" if not tagged and '"parameters":' in template else "arguments",
            tokens=_tokens(tokenizer) if tagged else frozenset(),
        )

    def grammar(self) -> str:
        """What the model may write, as a Lark grammar."""
        return self._frame() + self._calls()

    def _frame(self) -> str:
        if not self.tagged:
            # Without a mark, a text that begins like an object would be one.
            text = "" if self.required else " | TEXT"
            return f"start: call{text}\nTEXT: /[^{{](.|\\n)*/\n"
        begin, end = self._mark(BEGIN), self._mark(END)
        if self.required:
            more = ' ("\\n" wrapped)*' if self.several else ""
            return f'start: wrapped{more}\nwrapped: {begin} "\\n" call "\\n" {end}\n'
        # No text but a call's own mark may spell one: what stands behind it would fit no schema.
        if BEGIN in self.tokens:
            head, rule = f"TEXT {begin}", ""
        else:
            head, rule = "head", f"head[lazy]: /(.|\\n)*/ {begin}\n"
        return (
            f"start: part{'*' if self.several else '?'} TEXT\n"
            f'part: {head} "\\n" call "\\n" {end}\n'
            f"{rule}"
            f"TEXT: /(.|\\n)*/ & ~/(.|\\n)*{BEGIN}(.|\\n)*/\n"
        )

    def _mark(self, mark: str) -> str:
        return mark if mark in self.tokens else f'"{mark}"'

    def _calls(self) -> str:
        """Each tool's arguments are a schema of their own, whose references lead into it."""
        rules, names = [], []
        for number, tool in enumerate(self.tools):
            schema = _schema(tool) | {"x-guidance": COMPACT}
            names.append(f"call_{number}")
            head = json.dumps(self._head(tool))
            rules.append(f'call_{number}: {head} arguments_{number} "}}"\n')
            rules.append(f"arguments_{number}: %json {json.dumps(schema)}\n")
        return f"call: {' | '.join(names)}\n" + "".join(rules)

    def _head(self, tool: Tool) -> str:
        """What stands before the arguments."""
        return f'{{"name": "{tool.function.name}", "{self.key}": '

    def reader(self) -> CallReader:
        """Reads one completion."""
        return CallReader(self)

    def call(self, text: str) -> Call | None:
        """The call that a JSON object says; None where it was cut short or is no call."""
        for tool in self.tools:
            head = self._head(tool)
            if text.startswith(head) and text.endswith("}"):
                arguments = text[len(head) : -1]
                try:
                    json.loads(arguments)
                except (ValueError, RecursionError):
                    return None
                return Call(f"call_{uuid4().hex[:24]}", tool.function.name, arguments)
        return None


def _schema(tool: Tool) -> dict[str, Any]:
    """Of its arguments, which are an object."""
    schema = tool.function.parameters or ANY_OBJECT
    return schema if "$ref" in schema else ANY_OBJECT | schema


def _check(tool: Tool) -> None:
    """Refuse by name what a schema has that would be left out silently."""
    name, schema = tool.function.name, _schema(tool)
    if schema.get("type", "object") != "object":
        raise InvalidRequest(
            f"tools: {name}: the type of its parameters is {schema['type']!r}; must be 'object'"
        )
    try:
        check_schema(schema)
    except InvalidRequest as error:
        raise InvalidRequest(f"tools: {name}: {error}") from None


def _tokens(tokenizer: Tokenizer | None) -> frozenset[str]:
    """Which of the marks are tokens that were added by name."""
    backend = getattr(getattr(tokenizer, "hf", None), "backend_tokenizer", None)
    if tokenizer is None or backend is None or not hasattr(backend, "get_added_tokens_decoder"):
        return frozenset()
    added = {token.content: i for i, token in backend.get_added_tokens_decoder().items()}
    for mark in (BEGIN, END):
        if added.get(mark) in tokenizer.special_ids:
            raise NotSupported(
                f"tools: the tokenizer has {mark} as a special token, which is left out of the text"
            )
    return frozenset({BEGIN, END} & added.keys())


class CallReader:
    """Parts a growing text into what is said and what is called, in any pieces alike."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._held = ""
        self._begun = False  # something was said, which is no call
        self._behind_call = False  # line ends that come now are the format's
        self.num_calls = 0

    def push(self, text: str, *, last: bool = False) -> list[Part]:
        """What is certain now, in order: texts that are not empty, and whole calls.

        Args:
            last: nothing follows. A call that was cut short comes out as the text it is.
        """
        self._held += text
        parts = self._tagged(last) if self._use.tagged else self._bare(last)
        self.num_calls += sum(isinstance(part, Call) for part in parts)
        return [part for part in parts if part != ""]

    def _bare(self, last: bool) -> list[Part]:
        if not self._begun and self._held[:1] in ("", "{") and not last:
            return []
        held, self._held = self._held, ""
        call = None if self._begun else self._use.call(held)
        self._begun = True
        return [held if call is None else call]

    def _tagged(self, last: bool) -> list[Part]:
        parts: list[Part] = []
        while True:
            if self._behind_call and self._held:
                self._held = self._held.lstrip("\n")
                self._behind_call = not self._held
            start = self._held.find(BEGIN)
            if start < 0:
                # Line ends before a call are the format's, too.
                keep = 0 if last else _overlap(self._held, BEGIN)
                cut = len(self._held) - keep
                parts.append(self._take(cut if last else len(self._held[:cut].rstrip("\n"))))
                return parts
            # No string of JSON has a line end in it, so that this is the call's own end.
            end = self._held.find("\n" + END, start)
            if end < 0:
                said = self._held[:start].rstrip("\n")
                parts.append(self._take(len(self._held) if last else len(said)))
                return parts
            call = self._use.call(self._held[start + len(BEGIN) + 1 : end])
            if call is None:
                parts.append(self._take(start + len(BEGIN)))
                continue
            parts += [self._held[:start].rstrip("\n"), call]
            self._take(end + 1 + len(END))
            self._behind_call = True

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken


def _overlap(text: str, mark: str) -> int:
    """How many of the last characters may be the beginning of `mark`."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0


def said_and_called(parts: Sequence[Part]) -> tuple[str, list[Call]]:
    """The texts as one, and the calls."""
    calls = [part for part in parts if isinstance(part, Call)]
    return "".join(part for part in parts if isinstance(part, str)), calls
