"""`Connection`: uvicorn's HTTP connection with limits, so that no client can use up the descriptors."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Iterable
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from verbatim.errors import InvalidRequest
from verbatim.serve.errors import Refusal
from verbatim.serve.settings import ServeSettings

MAX_CONNECTIONS = 4096
_SPARE_DESCRIPTORS = (
    64  # at most; for files, and for connections that are accepted before one is closed
)
_SPARE_CONNECTIONS = 16  # at most; beyond the limit, for health checks
_READ_BYTES = 1 << 14  # that are parsed in one turn of the event loop
_HEALTH = frozenset({"/health", "/ready"})
# Valid before any HTTP/1.1 response, and sent only to learn whether a client that has sent an EOF is there.
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_PROBE_S = 0.05
_Base: Any = H11Protocol  # not httptools', which limits no head


def connection_limit(settings: ServeSettings) -> int:
    """Return the number of connections that the process can hold, or that `settings` allow.

    Raises:
        InvalidRequest: `max_connections` needs more descriptors than the process may open.
    """
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed == resource.RLIM_INFINITY:
        allowed = 1 << 20
    free = allowed - _num_descriptors()
    free -= min(_SPARE_DESCRIPTORS, free // 3) + min(_SPARE_CONNECTIONS, free // 6)
    if settings.max_connections is None:
        return max(1, min(free, MAX_CONNECTIONS))
    if settings.max_connections > free:
        raise InvalidRequest(
            f"max_connections={settings.max_connections}: {max(0, free)} can be open beside the "
            f"process's files, as at most {allowed} descriptors are allowed (ulimit -n)"
        )
    return settings.max_connections


def _num_descriptors() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:  # no Linux
        return 32


class Connection(_Base):  # type: ignore[misc]
    """One client's connection.

    At the limit a new connection replaces the one that has waited longest for its client to send a complete
    request. If all have one, the new connection is answered with 503, but for health checks.

    Args:
        limit: connections in all.
        uvicorn: arguments of uvicorn's class.
    """

    def __init__(self, *, settings: ServeSettings, limit: int, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._settings = settings
        self._limits = limit, settings.max_connections_per_address or -(-limit // 2)
        self._idle_since = self._unsent_since = self.loop.time()
        self._num_unsent = 0
        self._is_spare = self._has_eof = False

    @property
    def _is_idle(self) -> bool:
        """Return whether the client has yet to send a complete request since the last answer."""
        cycle = self.cycle
        return cycle is None or cycle.response_complete or cycle.more_body

    # ---- uvicorn's events

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if hasattr(transport, "max_size"):  # asyncio's own
            transport.max_size = _READ_BYTES
        address = self._address
        same = [each for each in self.connections if each._address == address]
        for connections, limit in zip((self.connections, same), self._limits, strict=True):
            if len(connections) > limit:
                self._make_room(connections)

    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        super().on_response_complete()
        if self._has_eof:
            self.transport.close()

    def eof_received(self) -> bool:
        """Return whether to keep the connection open for an answer.

        A client that has closed only its side gets its answer; from one that has closed the connection, the
        system reports an error at the second write.
        """
        self._has_eof = not self._is_idle
        if self._has_eof and not self.cycle.response_started:
            if self.scope["http_version"] != "1.1":
                return False
            self._probe(self.cycle, _PROBE_S)
        return self._has_eof

    # ---- limits

    def check(self, now: float) -> None:
        """Close the connection if its client sends no head, or reads nothing."""
        num_unsent = self.transport.get_write_buffer_size()
        if num_unsent != self._num_unsent or not num_unsent:
            self._num_unsent, self._unsent_since = num_unsent, now
        cycle = self.cycle
        in_request = cycle is not None and not cycle.response_complete
        if now - self._unsent_since > self._settings.read_timeout_s or (
            not in_request and now - self._idle_since > self._settings.idle_timeout_s
        ):
            self._drop()

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""

    def _make_room(self, connections: Iterable[Connection]) -> None:
        others = [each for each in connections if each is not self and each._is_idle]
        spare = [each for each in others if each._is_spare]
        replaced = [each for each in others if not each._is_spare]
        if not replaced:
            self._is_spare = True
            self.app: ASGIApp = _only_health(self.app)
            if len(spare) < _SPARE_CONNECTIONS:
                return
        min(replaced or spare, key=lambda each: each._idle_since)._drop()

    def _drop(self) -> None:
        self.connections.discard(self)  # so that it is not counted until the loop has closed it
        self.transport.abort()

    def _probe(self, cycle: Any, delay_s: float) -> None:
        if not cycle.response_started and not self.transport.is_closing():
            self.transport.write(_CONTINUE)
            self.loop.call_later(delay_s, self._probe, cycle, 4 * delay_s)


def _only_health(app: ASGIApp) -> ASGIApp:
    headers = {"Connection": "close", "Retry-After": "1"}
    refusal = Refusal(503, "too many connections", headers=headers).response()

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await (app if scope["path"] in _HEALTH else refusal)(scope, receive, send)

    return answer
