"""Tool calls: their format, the grammar that enforces it, and the parser.

The chat template determines the format. Two are supported: Hermes' (Qwen and many others), `<tool_call>`
around a JSON object, and a bare JSON object. Arguments always fit the tool's schema.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from verbatim.errors import InvalidRequest, NotSupported
from verbatim.sampling.json_schema import check_schema
from verbatim.serve.fields import NamedTool, Tool
from verbatim.text.tokenizer import Tokenizer

BEGIN, END = "<tool_call>", "</tool_call>"
ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A tool call of the model; `arguments` is its JSON, unchanged."""

    id: str
    name: str
    arguments: str

    def wire(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


Part = str | ParsedCall  # a part of the model's output


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request, and their use.

    Attributes:
        tools: tools that may be called.
        required: only calls, at least one.
        several: more than one call is allowed.
        tagged: calls are enclosed in `<tool_call>` and `</tool_call>`.
        key: the template's key of the arguments: "arguments" or "parameters".
        tokens: the marks that are single tokens, which a grammar must refer to by name.
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
        """Return the use of tools; None if no tool may be called.

        Raises:
            InvalidRequest: a choice without tools, or of a missing one; duplicate names; an unsupported
                schema.
            NotSupported: the tokenizer omits the marks from the text.
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
            name = choice.function.name
            tools = [tool for tool in tools if tool.function.name == name]
            if not tools:
                raise InvalidRequest(
                    f"tool_choice: no tool is named {name!r}; the tools are {', '.join(names)}"
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
        """Return the grammar of the output, in Lark."""
        return self._frame() + self._calls()

    def _frame(self) -> str:
        if not self.tagged:
            # Without a mark, text that begins like an object would be taken for a call.
            text = "" if self.required else " | TEXT"
            return f"start: call{text}\nTEXT: /[^{{](.|\\n)*/\n"
        begin, end = self._mark(BEGIN), self._mark(END)
        if self.required:
            more = ' ("\\n" wrapped)*' if self.several else ""
            return f'start: wrapped{more}\nwrapped: {begin} "\\n" call "\\n" {end}\n'
        # Text must not contain the mark, as what follows would not fit a schema.
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
        """Return the rules of the calls, with a separate schema per tool, for its references."""
        rules, names = [], []
        for number, tool in enumerate(self.tools):
            names.append(f"call_{number}")
            head = json.dumps(self._head(tool))
            rules.append(f'call_{number}: {head} arguments_{number} "}}"\n')
            rules.append(f"arguments_{number}: %json {json.dumps(_schema(tool))}\n")
        return f"call: {' | '.join(names)}\n" + "".join(rules)

    def _head(self, tool: Tool) -> str:
        """Return the text of a call before its arguments."""
        return f'{{"name": "{tool.function.name}", "{self.key}": '

    def reader(self) -> CallReader:
        """Return a parser for one completion."""
        return CallReader(self)

    def call(self, text: str) -> ParsedCall | None:
        """Parse a call; return None if it is incomplete or not a call."""
        for tool in self.tools:
            head = self._head(tool)
            if text.startswith(head) and text.endswith("}"):
                arguments = text[len(head) : -1]
                try:
                    json.loads(arguments)
                except (ValueError, RecursionError):
                    return None
                return ParsedCall(f"call_{uuid4().hex[:24]}", tool.function.name, arguments)
        return None


def _schema(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool's arguments, which are an object."""
    schema = tool.function.parameters or ANY_OBJECT
    return schema if "$ref" in schema else ANY_OBJECT | schema


def _check(tool: Tool) -> None:
    """Refuse unsupported schemas by name."""
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
    """Return the marks that are added tokens."""
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
    """Incrementally splits output into text and calls."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._held = ""
        self._begun = False  # the output began with text
        self._after_call = False  # the next line ends belong to the format
        self.num_calls = 0

    def push(self, text: str, *, last: bool = False) -> list[Part]:
        """Add text; return the final parts in order: non-empty texts, and whole calls.

        Args:
            last: the output ends here. An incomplete call is returned as text.
        """
        self._held += text
        parts = self._tagged(last) if self._use.tagged else self._bare(last)
        self.num_calls += sum(isinstance(part, ParsedCall) for part in parts)
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
            if self._after_call and self._held:
                self._held = self._held.lstrip("\n")
                self._after_call = not self._held
            start = self._held.find(BEGIN)
            if start < 0:
                # Line ends before a call also belong to the format.
                keep = 0 if last else _overlap(self._held, BEGIN)
                cut = len(self._held) - keep
                parts.append(self._take(cut if last else len(self._held[:cut].rstrip("\n"))))
                return parts
            # JSON strings have no line ends, so this is the end of the call.
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
            self._after_call = True

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken


def _overlap(text: str, mark: str) -> int:
    """Return the number of last characters that may begin `mark`."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0


def split_parts(parts: Sequence[Part]) -> tuple[str, list[ParsedCall]]:
    """Return the joined text, and the calls."""
    calls = [part for part in parts if isinstance(part, ParsedCall)]
    return "".join(part for part in parts if isinstance(part, str)), calls
