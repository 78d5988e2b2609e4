"""One-line errors for bodies that the models of `fields.py` reject."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verbatim.serve.errors import Refusal

_KINDS = frozenset(["str", "int", "float", "bool"])
# By which a list's entries are told apart; they stand behind its index.
_TAGS = frozenset(
    "system developer user assistant tool message function_call function_call_output".split()
)


def refusal_of_body(errors: Sequence[Any], *, skip: int = 0) -> Refusal:
    """Of several errors the first that got furthest.

    Args:
        errors: pydantic's.
        skip: parts of a field's path that come before its name.
    """
    first = max(errors, key=lambda each: len(each["loc"]))
    if isinstance(first.get("input"), bytes):
        return Refusal(415, "the body must be JSON, sent as Content-Type: application/json")
    unknown = first["type"] == "extra_forbidden"
    param = _param(first["loc"][skip:], known=not unknown)
    if unknown:
        return Refusal(400, f"{param}: unsupported field", param=param)
    if first["type"] == "json_invalid":
        return Refusal(400, f"the body is not JSON: {first['ctx']['error']}")
    given = first.get("input")
    shown = (
        "" if isinstance(given, dict | list) or first["type"] == "missing" else f"{given!r:.80}: "
    )
    return Refusal(400, f"{param or 'the body'}: {shown}{first['msg']}", param=param)


def _param(loc: Sequence[Any], known: bool) -> str | None:
    """The path of a field; the names of the types that were tried on the way are no part of it.

    Args:
        known: its last part may be a type's name, too, and not one that a client has made up.
    """
    *way, last = loc or (None,)
    parts = [
        part
        for before, part in zip([None, *way], way, strict=False)
        if not _is_type(part) and not (isinstance(before, int) and part in _TAGS)
    ]
    if last is not None and not (known and _is_type(last)):
        parts.append(last)
    return ".".join(map(str, parts)) or None


def _is_type(part: Any) -> bool:
    """Is a part of a field's path the name of the type that was tried there?"""
    return isinstance(part, str) and (part in _KINDS or "[" in part or part[:1].isupper())
