"""`ToolUse`: the tools of a request, and the grammar that enforces their calls.

The chat template determines the format (`formats.py`). Arguments always fit the tool's schema.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from verbatim.errors import InvalidRequest
from verbatim.sampling.json_schema import check_schema
from verbatim.serve.arguments import schema_of
from verbatim.serve.fields import Function, NamedFunction
from verbatim.serve.formats import CallFormat, call_format
from verbatim.serve.marks import ANYTHING, Marks, text_without


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request, and their use.

    Attributes:
        functions: functions that may be called, by name.
        required: only calls, at least one.
        several: more than one call is allowed.
        format: how calls are written.
    """

    functions: dict[str, Function]
    required: bool
    several: bool
    format: CallFormat
    marks: Marks = field(default_factory=lambda: Marks(None))

    @classmethod
    def resolve(
        cls,
        functions: Sequence[Function],
        choice: str | NamedFunction | None,
        several: bool | None,
        template: str,
        marks: Marks | None = None,
    ) -> ToolUse | None:
        """Return the use of tools; None if no tool may be called.

        Raises:
            InvalidRequest: a choice without tools, or of a missing one; duplicate names; an unsupported
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
            _check(function)
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
            marks=(marks or Marks(None)).within(form.text),
        )

    def grammar(self) -> str:
        """Return the grammar of the output, in Lark."""
        return self._frame() + self.call_rules()

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
            return f"start: section | TEXT\n{section}TEXT: /[^\\{mark}]{ANYTHING}/\n"
        # Text must not contain the mark, as what follows would not fit a schema.
        if form.repeats:
            start = f"part{'*' if self.several else '?'} TEXT"
        else:
            start = "part | TEXT"
        return (
            f"start: {start}\npart: head {calls}\n{self.marks.until('head', mark)}"
            + text_without("TEXT", [mark])
        )

    def call_rules(self) -> str:
        """Return the rules of the calls, with a separate schema per tool, for its references."""
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
            else:
                rules += form.arguments.rules(rule, function, self.marks)
        return f"call: {' | '.join(names)}\n" + "".join(dict.fromkeys(rules))


def _check(function: Function) -> None:
    """Refuse unsupported schemas by name."""
    name, schema = function.name, schema_of(function)
    if schema.get("type", "object") != "object":
        raise InvalidRequest(
            f"tools: {name}: the type of its parameters is {schema['type']!r}; must be 'object'"
        )
    try:
        check_schema(schema)
    except InvalidRequest as error:
        raise InvalidRequest(f"tools: {name}: {error}") from None
