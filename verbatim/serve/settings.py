"""`ServeSettings`: what a server allows, checked before it listens."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass

from verbatim.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """What a server allows.

    Attributes:
        name: what clients call the model; None takes the engine's own name.
        api_keys: a request must show one of them; none: no request needs one.
        max_body_bytes: of a request; a longer one is 413.
        max_requests: generations under way or waiting at once; one more is 429.
        max_choices: completions of one request, its prompts times `n`; more are 400.
        body_timeout_s: a body that takes longer to arrive is 408.
        read_timeout_s: a client that reads nothing of its stream for so long is let go.
        timeout_s: a generation that takes longer ends as it is, with finish reason "length"; None never.
        hosts: the names that a request may call the server by in its Host header; any, unless told. A web
            page can lead a browser to a local server under a name of its own, and would read its answers.
        cors_origins: web pages of these origins may call the server; none may unless told.
        docs: serve the OpenAPI document and its page.
        playground: serve the page at /.
        chat_defaults: let the model's generation_config.json settle what a chat request leaves open.

    Raises:
        InvalidRequest: a value out of its range.
    """

    name: str | None = None
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 4 << 20
    max_requests: int = 512
    max_choices: int = 128
    body_timeout_s: float = 30.0
    read_timeout_s: float = 60.0
    timeout_s: float | None = None
    hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    docs: bool = True
    playground: bool = True
    chat_defaults: bool = True

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_requests", "max_choices"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidRequest(f"{name}={value!r}: must be an integer, 1 or more")
        for name in ("body_timeout_s", "read_timeout_s", "timeout_s"):
            value = getattr(self, name)
            if value is None and name == "timeout_s":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InvalidRequest(f"{name}={value!r}: must be a number of seconds")
            if not (math.isfinite(value) and value > 0):
                raise InvalidRequest(f"{name}={value}: must be above 0")
        if self.name is not None and not self.name.strip():
            raise InvalidRequest("name='': the model needs a name that clients can say")
        for key in self.api_keys:
            # What can stand in a header, and is not guessed by whoever tries short ones.
            if len(key) < 8 or not all(33 <= ord(c) <= 126 for c in key):
                raise InvalidRequest(
                    "an API key must have 8 characters or more, all of them ASCII without spaces"
                )
        for origin in self.cors_origins:
            scheme, _, rest = origin.partition("://")
            if scheme not in ("http", "https") or not rest or "/" in rest or "*" in origin:
                raise InvalidRequest(
                    f"cors origin {origin!r}: must be like https://example.org, without a path or *"
                )


LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


def is_local(host: str) -> bool:
    """Does an address to listen on reach no further than this machine?"""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
