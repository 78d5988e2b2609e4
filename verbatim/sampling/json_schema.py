"""`check_schema`: what of JSON Schema is served, and what is refused by name; how the JSON is written."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from verbatim.errors import InvalidRequest

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# No \uXXXX: a string has one spelling only, so that no key can be another one in disguise.
_ESCAPES: JsonCompileOptions = {"json_allowed_escapes": 'nrbtf\\"'}
# Options of llguidance. A compact document has no whitespace but one space behind a colon or comma. In one
# with any whitespace there may stand, between its parts, one space, or one line break with up to 32 spaces or
# 16 tabs behind it: with no bound at all, a model can go on printing whitespace for ever.
COMPACT: JsonCompileOptions = _ESCAPES | {
    "whitespace_flexible": False,
    "key_separator": r":\x20?",
    "item_separator": r",\x20?",
}
ANY_WHITESPACE: JsonCompileOptions = _ESCAPES | {
    "whitespace_pattern": r"\x20|\n(?:\x20{0,32}|\t{0,16})"
}

_ANNOTATIONS = frozenset(
    "$anchor $defs definitions $schema $id id $comment title description default deprecated readOnly "
    "writeOnly examples contentMediaType contentEncoding".split()
)
_MAPS = frozenset(["properties", "patternProperties", "$defs", "definitions"])
_LISTS = frozenset(["anyOf", "oneOf", "allOf", "prefixItems"])
_SINGLES = frozenset(["items", "additionalItems", "additionalProperties"])
_NUMBERS = frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"])
_KEYWORDS = _ANNOTATIONS | _MAPS | _LISTS | _SINGLES | _NUMBERS
_KEYWORDS |= frozenset(
    "$ref const enum type minItems maxItems required minProperties maxProperties minLength maxLength "
    "pattern format".split()
)
_OLD_DRAFT = re.compile("draft-0[0-7]|2019-09")
_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")  # only \uXXXX could write them


def check_schema(root: dict[str, Any]) -> None:
    """Refuse by name what llguidance would leave out silently, or get wrong.

    That is: keywords it does not know (it takes them for annotations, as JSON Schema does), integers
    beyond double precision, control characters in constants, and counts of keys that repeated keys
    would satisfy.
    """
    old = bool(_OLD_DRAFT.search(str(root.get("$schema", ""))))
    todo: list[tuple[str, Any]] = [("#", root)]
    seen: set[int] = set()
    while todo:
        path, schema = todo.pop()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))

        def refuse(why: str, path: str = path) -> None:
            raise InvalidRequest(f"json_schema: {path}: {why}")

        if unknown := sorted(schema.keys() - _KEYWORDS):
            refuse(f"not supported: {', '.join(unknown)}")
        if "prefixItems" in schema and (
            old or "additionalItems" in schema or isinstance(schema.get("items"), list)
        ):
            refuse("prefixItems is not supported with a draft before 2020-12 or its keywords")
        required = schema.get("required", [])
        least = schema.get("minProperties", 0)
        known = len(set(map(str, required))) if isinstance(required, list) else 0
        free = (
            schema.get("additionalProperties", True) is not False or "patternProperties" in schema
        )
        if isinstance(least, int) and least > known + 1 and free:
            refuse(
                f"minProperties={least} is not supported with {known} required properties: keys that are "
                "not listed can repeat, so that one more than those is the most that can be promised"
            )
        for key, value in schema.items():
            if key in ("const", "enum") or key in _NUMBERS:
                if why := _unfit(value):
                    refuse(f"{key}: {why}")
            elif key in _MAPS and isinstance(value, dict):
                todo += [(f"{path}/{key}/{name}", part) for name, part in value.items()]
            elif isinstance(value, list) and (key in _LISTS or key == "items"):
                todo += [(f"{path}/{key}/{index}", part) for index, part in enumerate(value)]
            elif key in _SINGLES:
                todo.append((f"{path}/{key}", value))
            elif key == "$ref" and isinstance(value, str) and value.startswith("#/"):
                todo.append((value, _at(root, value)))  # it may lie where no schema is expected


def _unfit(value: Any) -> str | None:
    """Why a constant can't be promised."""
    if isinstance(value, list):
        return next(filter(None, map(_unfit, value)), None)
    if isinstance(value, dict):
        return _unfit(list(value.values()))
    if isinstance(value, str) and _UNWRITABLE.search(value):
        return f"{value!r} has control characters, which are not supported"
    if isinstance(value, int) and abs(value) > 2**53:
        return f"{value} is beyond the integers that are exact, 2**53"
    return None


def _at(root: Any, pointer: str) -> Any:
    """What a JSON pointer leads to; None where nothing is there, which llguidance then says."""
    for part in pointer[2:].split("/"):
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(root, list) and part.isdecimal() and int(part) < len(root):
            root = root[int(part)]
        else:
            root = root.get(part) if isinstance(root, dict) else None
    return root
