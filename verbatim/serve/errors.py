"""Errors in OpenAI's format: a status and `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.responses import Response

from verbatim.common.plain import to_plain
from verbatim.errors import (
    EngineClosed,
    InvalidRequest,
    ModelChanged,
    NotSupported,
    OutOfBlocks,
    PromptTooLong,
    QueueFull,
    RequestFailed,
    StageFailed,
    TierFailed,
    VerbatimError,
)
from verbatim.params import SamplingParams

log = logging.getLogger("verbatim.serve")
RETRY_AFTER_S = 1
JSON = "application/json"
PIECE_BYTES = 256 << 10
_MESSAGE_CHARS = 2048  # a message may repeat an invalid value, which may have megabytes
_ROWS = 64  # entries of a long list that are encoded together
_FIELDS = frozenset(SamplingParams.__slots__) | {"prompt", "messages", "tools", "tool_choice"}


class Refusal(HTTPException):
    """An HTTP error response.

    A subclass of HTTPException, which FastAPI does not convert if it is raised while a body is read.

    Args:
        message: the problem, with the value and what is allowed; cut if the value is long.
        param: dotted path of the field, cut as well.
        code: OpenAI's error code, if there is one.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.message, self.code = message[:_MESSAGE_CHARS], code
        self.param = param and param[:_MESSAGE_CHARS]

    def body(self) -> dict[str, Any]:
        return {
            "type": "error",  # for Anthropic's clients
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status_code, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            },
        }

    def response(self) -> Response:
        return Json(self.body(), self.status_code, self.headers)


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    502: "server_error",
    503: "server_error",
}


class Json(Response):
    """A JSON response. NaN and infinity become null; lone surrogates become "?"."""

    media_type = JSON

    def render(self, content: Any) -> bytes:
        return to_bytes(content)


def to_bytes(content: Any) -> bytes:
    """Return compact JSON. NaN and infinity become null, objects their fields, tensors nested lists.

    Iterators become lists, so that the entries of a long list need not be in memory at once.
    """
    try:
        return to_json(content, inf_nan_mode="null", fallback=to_plain)
    except ValueError:  # half surrogate pairs, or nesting taken for a cycle
        plain = to_plain(content)
    text = json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode(errors="replace")


def json_pieces(content: Any, head: bytes = b"", tail: bytes = b"") -> Iterator[bytes]:
    """Yield head, `to_bytes(content)` and tail in pieces of `PIECE_BYTES` or more; the last may be short."""
    piece = bytearray(head)
    for part in _parts(content):
        piece += part
        if len(piece) >= PIECE_BYTES:
            yield bytes(piece)
            piece.clear()
    yield bytes(piece) + tail


def _parts(content: Any) -> Iterator[bytes]:
    """Yield JSON in pieces: one entry of a tuple or short list at a time, or groups of entries."""
    if dataclasses.is_dataclass(content):
        fields = dataclasses.fields(content)
        content = {field.name: getattr(content, field.name) for field in fields}
    if isinstance(content, dict):
        before = b"{"
        for key, value in content.items():
            yield before + to_bytes(str(key)) + b":"
            yield from _parts(value)
            before = b","
        yield b"}" if content else b"{}"
    elif isinstance(content, list | tuple | Iterator):
        entries, before = iter(content), b"["
        single = isinstance(content, tuple) or (isinstance(content, list) and len(content) <= _ROWS)
        while rows := list(islice(entries, _ROWS)):
            if single or dataclasses.is_dataclass(rows[0]):
                for row in rows:
                    yield before
                    yield from _parts(row)
                    before = b","
            else:
                yield before + to_bytes(rows)[1:-1]
                before = b","
        yield b"]" if before == b"," else b"[]"
    else:
        yield to_bytes(content)


def refusal_of(error: BaseException) -> Refusal:
    """Return the refusal for an error. Details of an unexpected error are logged, not sent."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, HTTPException):
        return Refusal(error.status_code, str(error.detail), headers=error.headers)
    if isinstance(error, PromptTooLong):
        return Refusal(400, str(error), code="context_length_exceeded")
    if isinstance(error, InvalidRequest | NotSupported):
        # The field that the message begins with, such as `top_p=2.0: must be ...`.
        match = re.match(r"(?:params\.|the )?([a-z_]+)(?:=|: | has | is empty)", str(error))
        named = match is not None and match[1] in _FIELDS
        return Refusal(400, str(error), param=match[1] if match and named else None)
    if isinstance(error, QueueFull | OutOfBlocks):
        return too_many(str(error))
    if isinstance(error, EngineClosed):
        return Refusal(503, "the engine is closed")
    if isinstance(error, StageFailed):  # the next request tries to replace the stage
        retry = {"Retry-After": str(RETRY_AFTER_S)}
        return Refusal(503, str(error), headers=retry)
    if isinstance(error, RequestFailed) and error.__cause__ is None:
        # An impossible request: no token can be drawn, or its structure exceeded a limit.
        return Refusal(400, str(error))
    if isinstance(error, TierFailed):  # its message names files of this machine
        log.error("a tier of the model's weights failed: %s", error)
        return Refusal(503, "the engine can no longer read the model's weights")
    if isinstance(error, ModelChanged):  # so may this message
        log.error("the model changed: %s", error)
        return Refusal(503, "the model's weights have changed")
    if isinstance(error, VerbatimError):
        log.error("a request failed: %s", error, exc_info=error)
        return Refusal(500, f"the request failed: {type(error).__name__}")
    log.error("unexpected error", exc_info=error)
    return Refusal(500, "internal server error")


def too_many(message: str) -> Refusal:
    """Return a 429 response with Retry-After."""
    headers = {"Retry-After": str(RETRY_AFTER_S)}
    return Refusal(429, message, code="rate_limit_exceeded", headers=headers)
