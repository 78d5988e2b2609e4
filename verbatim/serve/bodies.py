"""Reading request bodies: JSON to the models of `fields.py`, with one-line errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from verbatim.serve.errors import Refusal
from verbatim.spelling import did_you_mean

M = TypeVar("M", bound=BaseModel)
MAX_CONTAINERS = 1 << 16  # JSON objects and arrays of one body
MAX_FIELDS = 1 << 16  # names in the objects of one body
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)

_KINDS = frozenset(["str", "int", "float", "bool"])
# Tags of the unions in lists; in the path of an error they follow the index.
_TAGS = frozenset(
    "system developer user assistant tool message reasoning function_call function_call_output "
    "text thinking tool_use tool_result".split()
)


class BodyRoute(APIRoute):
    """A route that validates a JSON body from its bytes.

    FastAPI would first build Python objects of all of it, which holds up the event loop for seconds where
    a body of some megabytes has a million small lists.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        model: type[BaseModel] = self.body_field.field_info.annotation  # type: ignore[assignment]

        async def with_body(http: Request) -> Response:
            async def body() -> BaseModel:
                return parse_body(model, await http.body())

            vars(http)["json"] = body
            return await handle(http)

        return with_body


def parse_body(model: type[M], raw: bytes) -> M:
    """Validate a JSON body.

    Raises:
        Refusal: 400: not JSON, not a `model`, or as `check_parts`.
    """
    check_parts(raw)
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise refusal_of_body(error.errors(include_url=False), model) from None


def check_parts(raw: bytes) -> None:
    """Count the parts of JSON, before it is read.

    Raises:
        Refusal: 400: more than `MAX_CONTAINERS` or `MAX_FIELDS`.
    """
    for marks, limit, what in (
        (b"{[", MAX_CONTAINERS, "objects and arrays"),
        (b":", MAX_FIELDS, "fields"),
    ):
        # Strings may have any number of these characters, and are seldom looked through for them.
        if _count(raw, marks) > limit and (num := _count(_STRING.sub(b"", raw), marks)) > limit:
            raise Refusal(400, f"the body has {num} {what}; at most {limit}")


def _count(raw: bytes, marks: bytes) -> int:
    return sum(raw.count(mark) for mark in marks)


def refusal_of_body(
    errors: Sequence[Any], model: type[BaseModel] | None = None, *, skip: int = 0
) -> Refusal:
    """Return the response for a list that is too long, or the first of the most deeply nested errors.

    A missing field of the body is reported if there is no other error.

    Args:
        errors: pydantic's.
        model: its fields are suggested for an unknown one.
        skip: parts of a field's path that come before its name.
    """
    first = max(errors, key=_rank)
    if isinstance(first.get("input"), bytes) and first["type"] != "json_invalid":
        return Refusal(415, "the body must be JSON, sent as Content-Type: application/json")
    unknown = first["type"] == "extra_forbidden"
    param = _param(first["loc"][skip:], known=not unknown)
    if unknown:
        known = model.model_fields if model is not None and len(first["loc"]) == 1 else ()
        return Refusal(
            400, f"unsupported field {param!r:.80}{did_you_mean(str(param), known)}", param=param
        )
    if first["type"] == "json_invalid" and not first["loc"]:
        why = first["ctx"]["error"]
        what = "has half a surrogate pair" if "hex escape" in why else "is not JSON"
        return Refusal(400, f"the body {what}: {why}")
    given = first.get("input")
    shown = (
        "" if isinstance(given, dict | list) or first["type"] == "missing" else f"{given!r:.80}: "
    )
    return Refusal(400, f"{param or 'the body'}: {shown}{first['msg']}", param=param)


def _rank(error: Any) -> tuple[bool, bool, int, bool]:
    depth, given = len(error["loc"]), error["type"] != "missing"
    return error["type"] == "too_long", depth > 1 or given, depth, given


def _param(loc: Sequence[Any], known: bool) -> str | None:
    """Return the path of a field, without the names of the types that were tried on the way.

    Args:
        known: whether the last part is a field or type of ours, and not a name from the body.
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
    """Return whether a part of a field's path is the name of a type that was tried there."""
    return isinstance(part, str) and (part in _KINDS or "[" in part or part[:1].isupper())
