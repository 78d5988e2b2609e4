"""`Guard`: the outermost middleware; checks host, API key and body, and counts responses."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import re
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from verbatim.serve.errors import Refusal, refusal_of, too_many
from verbatim.serve.service import Service

# Paths without a key: probes, and the playground, which asks for the key itself.
OPEN = frozenset({"/health", "/ready", "/"})
_LARGE_BYTES = 1 << 18
_BODIES = 16  # limit on the total size of large bodies in progress, in units of `max_body_bytes`


def _password(credentials: str) -> bytes:
    """Return the password of HTTP basic authentication; b"" if there is none."""
    try:
        return base64.b64decode(credentials, validate=True).partition(b":")[2]
    except ValueError:
        return b""


class Guard:
    """Middleware that rejects requests with a wrong Host or key, and bodies that are too long or too slow.

    Keys are compared by their hashes in constant time. A short hash of the request's key is stored in its
    state as `key`; "" if none is needed. Responses are counted by path and status.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service, self._settings = app, service, service.settings
        self._large_bytes = 0  # of the large bodies in progress
        self._keys = [hashlib.sha256(key.encode()).digest() for key in self._settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = False

        async def counted(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                route = scope.get("route")  # the pattern, so that clients can't add paths
                path = getattr(route, "path", "other")
                metrics = self._service.metrics
                metrics.answers.labels(path, str(message["status"])).inc()
                metrics.rejected.inc(message["status"] == 429)
                begun = True
            await send(message)

        headers, state = Headers(scope=scope), scope.setdefault("state", {})
        try:
            self._check_host(headers)
            state["key"] = self._key(headers) if scope["path"] not in OPEN else ""
            self._check_body(headers)
            await self._app(scope, self._bounded(receive, state), counted)
        except asyncio.CancelledError:  # at the second signal, or when the drain time is over
            if not begun:
                await Refusal(503, "the server has ended").response()(scope, receive, counted)
            raise
        except Exception as error:
            if begun:
                raise
            # Outer handlers would close the connection during the client's next request.
            await refusal_of(error).response()(scope, receive, counted)
        finally:
            if num_bytes := state.get("large_bytes", 0):
                self._large_bytes -= num_bytes
                self._service.trim_soon()

    def _key(self, headers: Headers) -> str:
        if not self._keys:
            return ""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "basic":  # of clients that only take a URL: http://:KEY@host
            secret = _password(key)
        elif scheme.lower() == "bearer":
            secret = key.encode("latin-1")
        else:  # of Anthropic's clients
            secret = headers.get("x-api-key", "").encode("latin-1")
        challenge = {"WWW-Authenticate": "Bearer"}
        if not secret:
            how = "send it as `Authorization: Bearer KEY` or `X-Api-Key: KEY`"
            raise Refusal(401, f"no API key: {how}", code="missing_api_key", headers=challenge)
        digest = hashlib.sha256(secret.strip()).digest()
        # All are compared, so that the time does not depend on which one matches.
        if not sum(hmac.compare_digest(digest, known) for known in self._keys):
            raise Refusal(401, "invalid API key", code="invalid_api_key", headers=challenge)
        return digest.hex()[:16]

    def _check_host(self, headers: Headers) -> None:
        host = headers.get("host")
        # Clients of HTTP/1.0 may omit the header; web pages can't, since every browser sends it.
        if not self._settings.hosts or host is None:
            return
        name = re.sub(r":\d*$", "", host.lower()).strip("[]")
        if name not in map(str.lower, self._settings.hosts):
            raise Refusal(421, f"Host: {host[:80]!r}: not a name of this server")

    def _check_body(self, headers: Headers) -> None:
        encodings = {value.strip().lower() for value in headers.getlist("content-encoding")}
        if encodings - {"", "identity"}:
            raise Refusal(415, "Content-Encoding: not supported; send the body as it is")
        if "transfer-encoding" in headers:
            # A chunk of one byte costs as much as a kilobyte of a body. If there is a Content-Length as well,
            # a proxy may parse a different request than this server.
            raise Refusal(
                411,
                "Transfer-Encoding: not supported; send the body with its Content-Length",
                headers={"Connection": "close"},
            )
        length = headers.get("content-length", "0")
        # Sliced, since int() rejects thousands of digits.
        if length.isdecimal() and int(length[:20]) > self._settings.max_body_bytes:
            raise self._too_long()

    def _too_long(self) -> Refusal:
        return Refusal(
            413, f"the body is longer than the limit of {self._settings.max_body_bytes} bytes"
        )

    def _bounded(self, receive: Receive, state: dict[str, Any]) -> Receive:
        """Return `receive` with limits on the body's size and time, and on all large bodies together."""
        remaining, loop = self._settings.max_body_bytes, asyncio.get_running_loop()
        deadline: float | None = loop.time() + self._settings.body_timeout_s

        async def bounded() -> Message:
            nonlocal remaining, deadline
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise Refusal(
                    408,
                    f"the body took longer than {self._settings.body_timeout_s:g} s to arrive",
                    headers={"Connection": "close"},
                ) from None
            remaining -= len(message.get("body", b""))
            if remaining < 0:
                raise self._too_long()
            num_bytes = self._settings.max_body_bytes - remaining
            if num_bytes > _LARGE_BYTES:
                self._large_bytes += num_bytes - state.get("large_bytes", 0)
                state["large_bytes"] = num_bytes
                if self._large_bytes > _BODIES * self._settings.max_body_bytes:
                    raise too_many(
                        "the large bodies in progress have reached the limit on their total size"
                    )
            if not message.get("more_body", False):
                deadline = None  # the body is complete: only a disconnect can follow
            return message

        return bounded
