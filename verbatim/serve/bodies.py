"""Parses request bodies: JSON to the models of `fields.py`, with one-line errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar, get_args, get_type_hints

from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from verbatim.common.spelling import did_you_mean
from verbatim.serve.errors import Refusal

M = TypeVar("M", bound=BaseModel)
MAX_CONTAINERS = 1 << 16  # JSON objects and arrays of one body
MAX_FIELDS = 1 << 16  # names in the objects of one body
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)

_KINDS = frozenset(["str", "int", "float", "bool"])
_FORMATS = frozenset(["response_format", "format"])  # unions; in the path of an error a tag follows
# Tags of the unions in lists; in the path of an error they follow the index.
_TAGS = frozenset(
    "system developer user assistant tool message reasoning function_call function_call_output "
    "text thinking tool_use tool_result".split()
)


class BodyRoute(APIRoute):
    """A route that validates a JSON body from its bytes.

    FastAPI would first parse the whole body to Python objects, which blocks the event loop for seconds if a
    few megabytes contain a million small lists.
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


def model_of(handler: Any) -> type[BaseModel]:
    """Return the model of the body that an endpoint's request class, or its function, takes."""
    if isinstance(handler, type):  # a subclass of ApiRequest[model]
        return get_args(handler.__orig_bases__[0])[0]  # type: ignore[attr-defined,no-any-return]
    return get_type_hints(handler)["body"]  # type: ignore[no-any-return]


def parse_body(model: type[M], raw: bytes) -> M:
    """Validate a JSON body; raise a Refusal (400) if it is invalid, or has too many parts."""
    check_parts(raw)
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise refusal_of_body(error.errors(include_url=False), model) from None


def check_parts(raw: bytes) -> None:
    """Raise a Refusal (400) for JSON with too many objects, arrays or fields, before it is parsed."""
    for marks, limit, what in (
        (b"{[", MAX_CONTAINERS, "objects and arrays"),
        (b":", MAX_FIELDS, "fields"),
    ):
        # Strings may contain these characters, and are left out only if the count exceeds the limit.
        if _count(raw, marks) > limit and (num := _count(_STRING.sub(b"", raw), marks)) > limit:
            raise Refusal(400, f"the body has {num} {what}; at most {limit}")


def _count(raw: bytes, marks: bytes) -> int:
    return sum(raw.count(mark) for mark in marks)


def refusal_of_body(
    errors: Sequence[Any], model: type[BaseModel] | None = None, *, skip: int = 0
) -> Refusal:
    """Return the refusal for a list that is too long, or else for the first of the most nested errors.

    A missing top-level field is reported only if there is no other error.

    Args:
        errors: pydantic's errors.
        model: model of the body; its fields are suggested for a misspelled one.
        skip: number of leading parts of an error's path that are not part of the field's name.
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
    value = first.get("input")
    shown = (
        "" if isinstance(value, dict | list) or first["type"] == "missing" else f"{value!r:.80}: "
    )
    return Refusal(400, f"{param or 'the body'}: {shown}{first['msg']}", param=param)


def _rank(error: Any) -> tuple[bool, bool, int, bool]:
    depth, is_present = len(error["loc"]), error["type"] != "missing"
    return error["type"] == "too_long", depth > 1 or is_present, depth, is_present


def _param(loc: Sequence[Any], known: bool) -> str | None:
    """Return the dotted path of a field, without the names of the union members that pydantic tried.

    `known`: whether the last part is a field or type of the models, and not a name from the body.
    """
    *parents, last = loc or (None,)
    parts = [
        part
        for parent, part in zip([None, *parents], parents, strict=False)
        if not _is_type(part)
        and parent not in _FORMATS
        and not (isinstance(parent, int) and part in _TAGS)
    ]
    if last is not None and not (known and _is_type(last)):
        parts.append(last)
    return ".".join(map(str, parts)) or None


def _is_type(part: Any) -> bool:
    """Return whether a part of an error's path is the name of a union member."""
    return isinstance(part, str) and (part in _KINDS or "[" in part or part[:1].isupper())
