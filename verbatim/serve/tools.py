"""Tool calls: how a model writes them, the grammar that makes it so, and reading them back.

A model writes calls in the way that its chat template teaches. Two ways are known: Hermes' (Qwen and many
others), `<tool_call>` around a JSON object, and a bare JSON object. Arguments always fit the tool's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from verbatim.errors import InvalidRequest
from verbatim.serve.fields import NamedTool, Tool

BEGIN, END = "<tool_call>", "</tool_call>"
ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Call:
    """One call that a model wrote; `arguments` is JSON."""

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
class ToolUse:
    """The tools of one request and how they may be used.

    Attributes:
        tools: those that may be called.
        required: a call must be made, and nothing else said.
        several: more than one call may be made.
        tagged: calls stand between `<tool_call>` and `</tool_call>`.
        key: what the template calls the arguments: "arguments" or "parameters".
    """

    tools: tuple[Tool, ...]
    required: bool
    several: bool
    tagged: bool
    key: str

    @classmethod
    def settle(
        cls,
        tools: Sequence[Tool] | None,
        choice: str | NamedTool | None,
        several: bool | None,
        template: str,
    ) -> ToolUse | None:
        """None where no tool may be called.

        Raises:
            InvalidRequest: a choice without tools, or of one that is not there; two of one name.
        """
        if tools is None:
            if choice not in (None, "none"):
                raise InvalidRequest("tool_choice without tools: there is nothing to choose")
            if several is not None:
                raise InvalidRequest("parallel_tool_calls without tools")
            return None
        names = [tool.function.name for tool in tools]
        if len(set(names)) < len(names):
            raise InvalidRequest("tools: two of them have the same name")
        if choice == "none":
            return None
        if isinstance(choice, NamedTool):
            wanted = choice.function.name
            tools = [tool for tool in tools if tool.function.name == wanted]
            if not tools:
                raise InvalidRequest(
                    f"tool_choice: no tool is named {wanted!r}; there are {', '.join(names)}"
                )
        tagged = BEGIN in template
        return cls(
            tuple(tools),
            required=choice == "required" or isinstance(choice, NamedTool),
            several=several is not False and not isinstance(choice, NamedTool) and tagged,
            tagged=tagged,
            key="parameters" if not tagged and '"parameters":' in template else "arguments",
        )

    def grammar(self) -> str:
        """What the model may write, as a Lark grammar."""
        call = f"%json {json.dumps(self._schema())}"
        if not self.tagged:
            # Without a mark, a text that begins like an object would be one.
            text = "" if self.required else " | TEXT"
            return f"start: call{text}\ncall: {call}\nTEXT: /[^{{](.|\\n)*/\n"
        wrapped = f'"{BEGIN}\\n" call "\\n{END}"'
        if self.required:
            more = f' ("\\n" {wrapped})*' if self.several else ""
            return f"start: {wrapped}{more}\ncall: {call}\n"
        times = "*" if self.several else "?"
        return (
            f"start: part{times} TEXT\n"
            f'part: head "\\n" call "\\n{END}"\n'
            f'head[lazy]: TEXT "{BEGIN}"\n'
            f"call: {call}\n"
            "TEXT: /(.|\\n)*/\n"
        )

    def _schema(self) -> dict[str, Any]:
        return {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {
                        "name": {"const": tool.function.name},
                        self.key: tool.function.parameters or ANY_OBJECT,
                    },
                    "required": ["name", self.key],
                    "additionalProperties": False,
                }
                for tool in self.tools
            ]
        }

    def reader(self) -> CallReader:
        """Reads one completion."""
        return CallReader(self)

    def call(self, text: str) -> Call | None:
        """The call that a JSON object says; None where it was cut short or is no call."""
        try:
            found = json.loads(text)
            name, arguments = found["name"], found[self.key]
        except (ValueError, LookupError, TypeError, RecursionError):
            return None
        if name not in {tool.function.name for tool in self.tools}:
            return None
        return Call(f"call_{uuid4().hex[:24]}", name, json.dumps(arguments, ensure_ascii=False))


class CallReader:
    """Parts a growing text into what is said and what is called."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._held = ""
        self.num_calls = 0

    def push(self, text: str, *, last: bool = False) -> tuple[str, list[Call]]:
        """What is certain now: text for the reader, and whole calls.

        Args:
            last: nothing follows. A call that was cut short comes out as the text it is.
        """
        self._held += text
        said, calls = self._tagged(last) if self._use.tagged else self._bare(last)
        self.num_calls += len(calls)
        return said, calls

    def _bare(self, last: bool) -> tuple[str, list[Call]]:
        if self._held.lstrip()[:1] not in ("", "{"):
            said, self._held = self._held, ""
            return said, []
        if not last:
            return "", []
        held, self._held = self._held, ""
        call = self._use.call(held)
        return (held, []) if call is None else ("", [call])

    def _tagged(self, last: bool) -> tuple[str, list[Call]]:
        said, calls = "", list[Call]()
        while True:
            start = self._held.find(BEGIN)
            if start < 0:
                keep = 0 if last else _overlap(self._held, BEGIN)
                cut = len(self._held) - keep
                said += self._held[:cut]
                self._held = self._held[cut:]
                break
            end = self._held.find(END, start)
            if end < 0:
                said += self._held[:start]
                self._held = self._held[start:]
                if last:
                    said, self._held = said + self._held, ""
                break
            call = self._use.call(self._held[start + len(BEGIN) : end])
            whole = self._held[: end + len(END)]
            said += whole[:start] if call is not None else whole
            calls += [call] if call is not None else []
            self._held = self._held[end + len(END) :]
            if call is not None:  # the line ends around calls are the format's
                said, self._held = said.rstrip("\n"), re.sub(r"^\n", "", self._held)
        return said, calls


def _overlap(text: str, mark: str) -> int:
    """How many of the last characters may be the beginning of `mark`."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0
