"""`ServeSettings`: the settings of a server, validated before it listens."""

from __future__ import annotations

import dataclasses
import ipaddress
import os

from verbatim.common.checks import check_kind, integer, number
from verbatim.errors import InvalidRequest

_WORDS = {
    "logprobs_mode": ("raw_logprobs", "processed_logprobs"),  # vLLM's names
    "log_level": ("critical", "error", "warning", "info", "debug"),
}
_RANGES = {"port": (0, 65535), "drain_timeout_s": (0,)}  # of integers; the others must be 1 or more


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """The settings of a server.

    Attributes:
        host: address to listen on.
        port: port to listen on; 0 takes a free one, which is reported.
        name: model name in the API. None: the engine's name.
        api_keys: accepted keys; empty: none is required.
        no_api_key: accept requests from other machines without an API key.
        max_body_bytes: maximum size of a request body; status 413 above it.
        max_requests: maximum generations in progress or queued; status 429 above it.
        max_choices: maximum completions per request (prompts times `n`); status 400 above it.
        max_response_bytes: maximum estimated size of a response; status 400 above it.
        max_connections: maximum connections. None: by the limit of descriptors, at most 4096.
        max_connections_per_address: maximum connections from one address; behind a proxy all have the
            proxy's. None: half of `max_connections`.
        idle_timeout_s: seconds in which a connection must send the head of its next request.
        body_timeout_s: maximum seconds for a body to arrive; status 408 above it.
        read_timeout_s: seconds after which a client that reads nothing of its response is disconnected.
        request_timeout_s: maximum seconds of a generation, which then ends with finish reason "length". None:
            no limit.
        negative_priorities: accept a `priority` below 0, which runs a client's requests before, and in
            place of, those of others.
        hosts: accepted names in the Host header; empty: any. Protects a local server against web pages that
            resolve their own name to it (DNS rebinding); `guarded` sets them.
        cors_origins: origins of web pages that may call the server; empty: none.
        docs: serve /docs and /openapi.json.
        playground: serve the playground at /.
        adapter_root: folder from which clients with an API key may load LoRA adapters. None: they may load
            none.
        chat_defaults: sample chats with the defaults of the model's generation_config.json.
        logprobs_mode: the log-probs of drawn tokens in OpenAI's endpoints. "raw_logprobs": of the model at
            temperature 1. "processed_logprobs": of the distribution that was drawn from, which TRL needs.
        training: serve the routes by which a trainer pauses the engine and replaces its weights; every
            client with access may use them.
        update_timeout_s: with `training`, seconds after which a silent trainer loses its update, so that
            others can begin one.
        log_level: critical, error, warning, info or debug.
        drain_timeout_s: seconds for running requests to finish after the first signal.
        max_update_bytes: with `training`, maximum size of an update of the weights. None: 8 bytes for each
            parameter of the model (float32, tied ones twice).

    Raises:
        InvalidRequest: a value out of its range.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    name: str | None = None
    api_keys: tuple[str, ...] = ()
    no_api_key: bool = False
    max_body_bytes: int = 4 << 20
    max_requests: int = 512
    max_choices: int = 128
    max_response_bytes: int = 32 << 20
    max_connections: int | None = None
    max_connections_per_address: int | None = None
    idle_timeout_s: float = 30.0
    body_timeout_s: float = 30.0
    read_timeout_s: float = 60.0
    request_timeout_s: float | None = None
    negative_priorities: bool = False
    hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    docs: bool = True
    playground: bool = True
    adapter_root: str | None = None
    chat_defaults: bool = True
    logprobs_mode: str = "raw_logprobs"
    training: bool = False
    update_timeout_s: float = 120.0
    log_level: str = "info"
    drain_timeout_s: int = 60
    max_update_bytes: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name, kind, value = field.name, str(field.type), getattr(self, field.name)
            if value is None and kind.endswith("None"):
                continue
            if kind.startswith("int"):
                value = integer(name, value, *_RANGES.get(name, ()))
            if kind.startswith("float"):
                value = number(name, value, 0.0, above=True, unit=" of seconds")
            if kind.startswith("str"):
                check_kind(name, value, str, "a string")
            if value not in (allowed := _WORDS.get(name, (value,))):
                raise InvalidRequest(f"{name}={value!r}: must be one of {', '.join(allowed)}")
            object.__setattr__(self, name, value)
        object.__setattr__(self, "host", self.host.strip("[]"))  # of an IPv6 address
        if self.no_api_key and self.api_keys:
            raise InvalidRequest(
                "no_api_key: can't be combined with an API key (api_keys, --api-key-file or "
                "$VERBATIM_API_KEY)"
            )
        if self.name is not None and not self.name.strip():
            raise InvalidRequest("name='': must not be empty")
        if self.adapter_root is not None:
            if not self.api_keys:
                raise InvalidRequest(
                    f"adapter_root={self.adapter_root!r}: loading adapters needs an API key"
                )
            if not os.path.isdir(self.adapter_root):
                raise InvalidRequest(f"adapter_root={self.adapter_root!r}: must be a folder")
        for key in self.api_keys:
            # Valid in a header, and too long to be found by brute force.
            if len(key) < 8 or not all(33 <= ord(c) <= 126 for c in key):
                raise InvalidRequest(
                    "an API key must have 8 characters or more, all printable ASCII without spaces"
                )
        for origin in self.cors_origins:
            scheme, _, rest = origin.partition("://")
            if scheme not in ("http", "https") or not rest or "/" in rest or "*" in origin:
                raise InvalidRequest(
                    f"cors origin {origin!r}: must be an origin such as https://example.org, without a "
                    "path or *"
                )

    def guarded(self) -> ServeSettings:
        """Return the settings for listening at `host`: without keys, a local server gets its `hosts`.

        Raises:
            InvalidRequest: other machines reach it, and neither `api_keys` nor `no_api_key` is set.
        """
        host = self.host
        if self.api_keys:
            return self
        if is_local(host):  # a web page has no key
            names = self.hosts or tuple(dict.fromkeys((*LOCAL_HOSTS, host.lower())))
            return dataclasses.replace(self, hosts=names)
        if not self.no_api_key:
            raise InvalidRequest(
                f"host={host!r} accepts requests from other machines: set api_keys ($VERBATIM_API_KEY or "
                "--api-key-file), or no_api_key=True (--no-api-key)"
            )
        return self


LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


def is_local(host: str) -> bool:
    """Return whether an address to listen on is only reachable from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
