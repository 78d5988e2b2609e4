"""Tool calls and reasoning: the grammar that enforces calls, and the reader of the output.

The chat template determines the format (`formats.py`). Arguments always fit the tool's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from verbatim.errors import InvalidRequest, NotSupported
from verbatim.sampling.json_schema import check_schema
from verbatim.serve.fields import NamedTool, Tool
from verbatim.serve.formats import CallFormat, call_format, reasoning_marks
from verbatim.text.tokenizer import Tokenizer

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


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning, without its marks."""

    text: str


Part = str | Reasoning | ParsedCall  # a part of the model's output


class Marks:
    """The marks of a tokenizer, as text and in grammars.

    Attributes:
        special: those that are special tokens, which are left out of the text by default.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        backend = getattr(getattr(tokenizer, "hf", None), "backend_tokenizer", None)
        self._ids: dict[str, int] = {}
        self.special: frozenset[str] = frozenset()
        if tokenizer is None or backend is None or not hasattr(backend, "get_added_tokens_decoder"):
            return
        added = backend.get_added_tokens_decoder().items()
        special = tokenizer.special_ids
        self.special = frozenset(token.content for i, token in added if i in special)
        # Only these are not text to a grammar.
        self._ids = {
            token.content: i
            for i, token in added
            if i in special or re.fullmatch("<.+>", token.content)
        }

    def within(self, text: str) -> Marks:
        """Return those in a text; a tokenizer may have thousands."""
        few = Marks(None)
        few._ids = {mark: i for mark, i in self._ids.items() if mark in text}
        return few

    def is_token(self, mark: str) -> bool:
        return mark in self._ids

    def lark(self, text: str) -> str:
        """Return an expression in Lark for a text with marks."""
        names = sorted(filter(text.__contains__, self._ids), key=len, reverse=True)
        split = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
        parts = [
            f"<[{self._ids[part]}]>" if part in self._ids else json.dumps(part, ensure_ascii=False)
            for part in split
            if part
        ]
        return " ".join(parts) or '""'


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request, and their use.

    Attributes:
        tools: tools that may be called.
        required: only calls, at least one.
        several: more than one call is allowed.
        format: how calls are written.
    """

    tools: tuple[Tool, ...]
    required: bool
    several: bool
    format: CallFormat
    marks: Marks = field(default_factory=lambda: Marks(None))

    @classmethod
    def settle(
        cls,
        tools: Sequence[Tool] | None,
        choice: str | NamedTool | None,
        several: bool | None,
        template: str,
        marks: Marks | None = None,
    ) -> ToolUse | None:
        """Return the use of tools; None if no tool may be called.

        Raises:
            InvalidRequest: a choice without tools, or of a missing one; duplicate names; an unsupported
                schema.
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
        form = call_format(template)
        return cls(
            tuple(tools),
            required=choice == "required" or isinstance(choice, NamedTool),
            several=several is not False and not isinstance(choice, NamedTool),
            format=form,
            marks=(marks or Marks(None)).within(form.text),
        )

    def grammar(self) -> str:
        """Return the grammar of the output, in Lark."""
        return self._frame() + self._calls()

    def _frame(self) -> str:
        form, lark = self.format, self.marks.lark
        mark, rest = form.mark, form.begin.removeprefix(form.mark)
        several = self.several and form.between is not None
        more = f" ({lark(form.between or '')} call)*" if several else ""
        calls = f"{lark(rest)} call{more} {lark(form.end)}"
        section = f"section: {lark(form.begin)} call{more} {lark(form.end)}\n"
        if self.required:
            more = ' ("\\n" section)*' if self.several and form.repeats else ""
            return f"start: section{more}\n{section}"
        if form.bare:
            # Without a mark, text that begins like a call would be taken for one.
            return f"start: section | TEXT\n{section}TEXT: /[^\\{mark}](.|\\n)*/\n"
        # Text must not contain the mark, as what follows would not fit a schema.
        if self.marks.is_token(mark):
            head, rule = f"TEXT {lark(mark)}", ""
        else:
            head, rule = "head", f"head[lazy]: /(.|\\n)*/ {lark(mark)}\n"
        if form.repeats:
            start = f"part{'*' if self.several else '?'} TEXT"
        else:
            start = "part | TEXT"
        escaped = re.escape(mark).replace("/", r"\/")
        return (
            f"start: {start}\npart: {head} {calls}\n{rule}"
            f"TEXT: /(.|\\n)*/ & ~/(.|\\n)*{escaped}(.|\\n)*/\n"
        )

    def _calls(self) -> str:
        """Return the rules of the calls, with a separate schema per tool, for its references."""
        rules, names = [], []
        for number, tool in enumerate(self.tools):
            names.append(f"call_{number}")
            head = self.marks.lark(self.format.head_of(tool.function.name))
            tail = self.marks.lark(self.format.tail)
            rules.append(f"call_{number}: {head} arguments_{number} {tail}\n")
            rule = f"arguments_{number}"
            if self.format.pythonic:
                rules.append(_keywords(rule, tool))
            else:
                rules.append(f"{rule}: %json {json.dumps(_schema(tool))}\n")
        return f"call: {' | '.join(names)}\n" + "".join(rules)

    def calls(self, text: str) -> list[ParsedCall] | None:
        """Parse calls; return None if they are incomplete or not calls."""
        calls = self.format.parse(text, [tool.function.name for tool in self.tools])
        if calls is None:
            return None
        return [ParsedCall(f"call_{uuid4().hex[:24]}", name, given) for name, given in calls]


_LITERALS = {"boolean": '"True" | "False"', "null": '"None"'}  # of Python
_NOTES = frozenset({"type", "title", "description", "default", "examples", "$comment"})
_OF_FLAGS = _NOTES | {"enum"}  # keys of a schema with such a literal
_OF_KEYWORDS = _NOTES | {"properties", "required", "additionalProperties", "$defs", "definitions"}
_OF_KEYWORDS |= {"$schema", "$id"}  # keys of the schema of keyword arguments


def _keywords(rule: str, tool: Tool) -> str:
    """Return the rules of Python's keyword arguments, the required ones first."""
    schema = _schema(tool)
    properties, required = schema.get("properties", {}), schema.get("required", [])
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    if not all(name.isidentifier() for name in properties) or "$ref" in schema:
        raise NotSupported(
            f"tools: {tool.function.name}: the model's format of calls needs parameters that are Python names"
        )
    if len(set(required)) < len(required) or not set(required) <= set(properties):
        raise InvalidRequest(
            f"tools: {tool.function.name}: required must name properties, each of them once"
        )
    flags = [
        v for v in properties.values() if isinstance(v, dict) and str(v.get("type")) in _LITERALS
    ]
    unknown = set(schema) - _OF_KEYWORDS | {key for flag in flags for key in set(flag) - _OF_FLAGS}
    if unknown:
        raise NotSupported(
            f"tools: {tool.function.name}: the model's format of calls can't be held to "
            f"{', '.join(map(repr, sorted(unknown)))} of its schema"
        )
    rules, pairs = [], {}
    for number, (name, value) in enumerate(properties.items()):
        kind = value.get("type") if isinstance(value, dict) and "enum" not in value else None
        literal = _LITERALS.get(str(kind))
        whole = json.dumps(value | shared if isinstance(value, dict) else value)
        rules.append(f"{rule}_{number}: {literal or f'%json {whole}'}\n")
        pairs[name] = f'"{name}=" {rule}_{number}'
    first = ' ", " '.join(pairs[name] for name in required if name in pairs)
    rest = [pair for name, pair in pairs.items() if name not in required]
    for number, pair in enumerate(rest):  # the optional arguments from this one on
        later = number + 1 < len(rest)
        more = f' (", " {rule}_from_{number + 1})? | {rule}_from_{number + 1}' if later else ""
        rules.append(f"{rule}_from_{number}: {pair}{more}\n")
    optional = f"{rule}_from_0" if rest else ""
    if first and optional:
        optional = f'", " {optional}'
    if optional:
        optional = f" ({optional})?"
    return f"{rule}: {first}{optional}\n" + "".join(rules)


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


class Reader:
    """Incrementally splits output into reasoning, text and calls.

    Args:
        marks: around reasoning, which comes first; None without reasoning.
        opened: the output begins within reasoning.
        dropped: special tokens that are no marks.
    """

    def __init__(
        self,
        use: ToolUse | None,
        marks: tuple[str, str] | None = None,
        *,
        opened: bool = False,
        dropped: Dropped | None = None,
    ) -> None:
        self._use = use
        self._dropped = dropped
        self._split = ""  # may begin one of them
        self._marks = marks  # until the reasoning has ended
        self._reasons = opened
        self._held = ""
        self._begun = False  # there was text, or reasoning within it
        self._skips_lines = opened  # the next line ends belong to the format
        self.num_calls = 0

    def push(self, text: str, *, last: bool = False) -> list[Part]:
        """Add text; return the final parts in order: non-empty texts and reasoning, and whole calls.

        Args:
            last: the output ends here. An incomplete call is returned as text.
        """
        if self._dropped is not None:
            text, self._split = self._dropped.drop(self._split + text, last)
        self._held += text
        parts: list[Part] = []
        if self._marks is not None:
            parts += self._reasoning(*self._marks, last)
        if self._marks is None:
            if self._use is None:
                self._skip_lines()
                parts.append(self._take(len(self._held)))
            elif self._use.format.repeats:
                parts += self._repeated(self._use, last)
            else:
                parts += self._final(self._use, last)
        self.num_calls += sum(isinstance(part, ParsedCall) for part in parts)
        return [part for part in parts if part not in ("", Reasoning(""))]

    def _reasoning(self, begin: str, end: str, last: bool) -> list[Part]:
        if not self._reasons:
            text = self._held.lstrip()
            if begin.startswith(text) and text != begin and not last:
                return []
            if not text.startswith(begin):
                self._marks = None
                return []
            self._held, self._reasons, self._skips_lines = text[len(begin) :], True, True
        self._skip_lines()
        at = self._held.find(end)
        if at >= 0:
            part = Reasoning(self._held[:at].rstrip("\n"))
            self._take(at + len(end))
            self._marks, self._skips_lines = None, True
            return [part]
        keep = 0 if last else _overlap(self._held, end)
        cut = self._held[: len(self._held) - keep]
        return [Reasoning(self._take(len(cut if last else cut.rstrip("\n"))))]

    def _final(self, use: ToolUse, last: bool) -> list[Part]:
        """Return the text before calls that end the output, and at its end the calls."""
        self._skip_lines()
        mark = use.format.mark
        if use.format.bare:
            start = 0 if not self._begun and self._held.startswith(mark) else -1
            keep = 0
        else:
            start = self._held.find(mark)
            keep = _overlap(self._held, mark)
        if start < 0:
            self._begun = self._begun or self._held != ""
            cut = len(self._held) - (0 if last else keep)
            return [self._take(cut if last else len(self._held[:cut].rstrip("\n")))]
        before = self._held[:start].rstrip("\n")
        if not last:
            return [self._take(len(before))]
        calls = use.calls(self._held[start:])
        if calls is None:
            return [self._take(len(self._held))]
        self._take(len(self._held))
        return [before, *calls]

    def _repeated(self, use: ToolUse, last: bool) -> list[Part]:
        """Return text and calls, which may follow each other."""
        parts: list[Part] = []
        mark, end_mark = use.format.mark, use.format.end
        while True:
            self._skip_lines()
            start = self._held.find(mark)
            if start < 0:
                # Line ends before a call also belong to the format.
                keep = 0 if last else _overlap(self._held, mark)
                cut = len(self._held) - keep
                parts.append(self._take(cut if last else len(self._held[:cut].rstrip("\n"))))
                return parts
            # JSON strings have no line ends, so this is the end of the call.
            end = self._held.find(end_mark, start)
            if end < 0:
                before = self._held[:start].rstrip("\n")
                parts.append(self._take(len(self._held) if last else len(before)))
                return parts
            calls = use.calls(self._held[start : end + len(end_mark)])
            if calls is None:
                parts.append(self._take(start + len(mark)))
                continue
            parts += [self._held[:start].rstrip("\n"), *calls]
            self._take(end + len(end_mark))
            self._skips_lines = True

    def _skip_lines(self) -> None:
        if self._skips_lines and self._held:
            self._held = self._held.lstrip("\n")
            self._skips_lines = not self._held

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken


class Dropped:
    """Special tokens that are left out of a text."""

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = marks
        self._pattern = re.compile("|".join(map(re.escape, marks)))
        self._starts = re.compile("[" + re.escape("".join({mark[0] for mark in marks})) + "]")
        self._longest = max(map(len, marks))

    def drop(self, text: str, last: bool) -> tuple[str, str]:
        """Return the text without the tokens, and its end if that may begin another one.

        A stop string that begins within a token divides it between two deltas of a stream.
        """
        text = self._pattern.sub("", text)
        if last:
            return text, ""
        tail = max(0, len(text) - self._longest + 1)
        for start in self._starts.finditer(text, tail):
            rest = text[start.start() :]
            if any(mark.startswith(rest) for mark in self._marks):
                return text[: start.start()], rest
        return text, ""


def _overlap(text: str, mark: str) -> int:
    """Return the number of last characters that may begin `mark`."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0


def split_parts(parts: Sequence[Part]) -> tuple[str, str, list[ParsedCall]]:
    """Return the joined text, the joined reasoning, and the calls."""
    calls = [part for part in parts if isinstance(part, ParsedCall)]
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    return "".join(part for part in parts if isinstance(part, str)), reasoning, calls


class Answers:
    """The form of the answers of a conversation: readers and grammars.

    Args:
        use: the callable tools.
        template: the chat template.
    """

    def __init__(self, use: ToolUse | None, template: str, marks: Marks) -> None:
        self.use = use
        self.reasoning = reasoning_marks(template)
        self._opened = self._closed = False
        told = "".join(self.reasoning or ()) + ("" if use is None else use.format.text)
        self._marks = marks.within(told)
        # The text must have marks that are special tokens, and then has the other ones, too.
        self.shows_special = any(mark in told for mark in marks.special)
        others = [mark for mark in marks.special if mark and mark not in told]
        self._dropped = Dropped(others) if self.shows_special and others else None

    def note_prompt(self, tail: str) -> None:
        """Read from the prompt's last characters whether the answer begins within reasoning."""
        if self.reasoning is not None:
            begin, end = self.reasoning
            self._opened = tail.rstrip().endswith(begin)
            self._closed = tail.rstrip().endswith(end)

    @property
    def may_reason(self) -> bool:
        """True if the answer may begin with reasoning."""
        return self.reasoning is not None and not self._closed

    def reader(self) -> Reader:
        """Return a reader of one completion."""
        return Reader(self.use, self.reasoning, opened=self._opened, dropped=self._dropped)

    def grammar(self, structure: str, value: Any) -> str | None:
        """Return a grammar of reasoning and then a structure; None for the structure alone.

        Args:
            structure: the name in `STRUCTURES`, or "tools".
            value: of the structure.
        """
        assert self.reasoning is not None
        begin, end = self.reasoning
        if structure == "tools":
            assert self.use is not None
            answer = self.use.grammar().replace("start: ", "answer: ", 1)
        elif structure == "json_schema":
            schema = json.loads(value)
            if isinstance(schema, dict):
                check_schema(schema)
            answer = f"answer: %json {json.dumps(schema)}\n"
        elif structure == "choice":
            answer = f"answer: {' | '.join(map(json.dumps, value))}\n"
        elif structure == "regex":
            escaped = re.sub(
                r"\\.|/", lambda m: "\\/" if m[0] == "/" else m[0], value, flags=re.DOTALL
            )
            answer = f"answer: /{escaped}/\n"
        elif self._opened:
            raise NotSupported(
                "grammar: the chat template begins the answer with reasoning, which the grammar leaves out; "
                "turn reasoning off with chat_template_kwargs"
            )
        else:
            return None
        if self._marks.is_token(end):
            rule = f"thoughts: /(.|\\n)*/ {self._marks.lark(end)} /\\n{{0,2}}/\n"
        else:
            rule = f"thoughts: thought /\\n{{0,2}}/\nthought[lazy]: /(.|\\n)*/ {self._marks.lark(end)}\n"
        first = "thoughts" if self._opened else f"({self._marks.lark(begin)} thoughts)?"
        return f"start: {first} answer\n{rule}{answer}"
