"""`run`: listen, serve, and shut down. After the first signal, requests finish; a second one aborts them.

`Connection`: uvicorn's HTTP connection with limits, so that clients can't exhaust the file descriptors.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import resource
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.logging import AccessFormatter, DefaultFormatter
from uvicorn.protocols.http.h11_impl import H11Protocol

from verbatim.api.llm import LLM
from verbatim.errors import InvalidRequest, VerbatimError
from verbatim.serve.app import make_app
from verbatim.serve.errors import Refusal
from verbatim.serve.service import Service
from verbatim.serve.settings import ServeSettings

MAX_CONNECTIONS = 4096
_SPARE_DESCRIPTORS = 64  # at most; for files, and connections accepted before one is closed
_SPARE_CONNECTIONS = 16  # at most; beyond the limit, for health checks
_READ_BYTES = 1 << 14  # parsed per round of the event loop
_HEALTH = frozenset({"/health", "/ready"})
# Valid before any HTTP/1.1 response. Sent to detect whether a client that has sent EOF is still connected.
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_PROBE_S = 0.05
_Base: Any = H11Protocol  # httptools' class does not limit the size of a request's head


def connection_limit(settings: ServeSettings) -> int:
    """Return the maximum number of connections, from `settings` or the limit on open descriptors.

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
            f"max_connections={settings.max_connections}: {max(0, free)} can be open in addition "
            f"to the process's files, as at most {allowed} descriptors are allowed (ulimit -n)"
        )
    return settings.max_connections


def _num_descriptors() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:  # not Linux
        return 32


class Connection(_Base):  # type: ignore[misc]
    """One client's connection.

    At `limit` connections, a new one replaces the one that has been idle longest, without a complete request.
    If none is idle, requests on the new connection get status 503, except health checks.
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
        """True if the client has sent no complete request since the last answer."""
        cycle = self.cycle
        return cycle is None or cycle.response_complete or cycle.more_body

    # ---- uvicorn's events

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if hasattr(transport, "max_size"):  # asyncio's own
            transport.max_size = _READ_BYTES
        address = self._address
        same_address = [each for each in self.connections if each._address == address]
        for connections, limit in zip((self.connections, same_address), self._limits, strict=True):
            if len(connections) > limit:
                self._make_room(connections)

    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        super().on_response_complete()
        if self._has_eof:
            self.transport.close()

    def eof_received(self) -> bool:
        """Return whether to keep the connection open for an answer.

        A client that has closed only its sending side still gets its answer. If it has closed the
        connection, the second write fails; `_probe` writes until then.
        """
        self._has_eof = not self._is_idle
        if self._has_eof and not self.cycle.response_started:
            if self.scope["http_version"] != "1.1":
                return False
            self._probe(self.cycle, _PROBE_S)
        return self._has_eof

    # ---- limits

    def check(self, now: float) -> None:
        """Close the connection if its client has sent no request or read nothing for too long."""
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
        self.connections.discard(self)  # not to be counted until the event loop closes it
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


_HEADER_BYTES = 64 << 10
_BACKLOG = 2048  # maximum connections not yet accepted
_ACCEPTS_PER_ROUND = 8  # connections accepted per round of the event loop
_CHECK_TICKS = 5  # uvicorn's ticks of 0.1 s between two checks of the connections


class Server(uvicorn.Server):
    """uvicorn's server; it rejects new requests while it drains, and exits at a second signal."""

    def __init__(
        self, config: uvicorn.Config, service: Service, say: Callable[[str], None], address: str
    ) -> None:
        super().__init__(config)
        self._address = address
        self._service = service
        self._say = say

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(_BACKLOG)  # asyncio accepts fewer at once, see `uvicorn_config`
        # Signals are handled from here on.
        service = self._service
        self._say(f"serving {service.name} at {self._address} ({service.fingerprint})")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        self._service.close()

    async def on_tick(self, counter: int) -> bool:
        if counter % _CHECK_TICKS == 0:
            now = asyncio.get_running_loop().time()
            connections: Any = list(self.server_state.connections)
            for connection in connections:
                connection.check(now)
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # The next signal may interrupt this method, so the state is set before printing.
        if self.should_exit:
            self.force_exit = True
            self._say("ending now")
        else:
            self.should_exit = self._service.draining = True
            num_left = self._service.num_in_progress
            self._say(f"shutting down; waiting for {num_left} requests (a second signal ends them)")


def run(llm: LLM, settings: ServeSettings, *, say: Callable[[str], None] = print) -> None:
    """Serve until a signal, in the main thread; report address and shutdown with `say`. `llm` stays open.

    Raises:
        InvalidRequest: other machines reach the server without an API key.
        VerbatimError: the address is not available.
    """
    settings = settings.guarded()
    app = make_app(llm, settings)
    config = uvicorn_config(app, settings)
    listener = listen(settings.host, settings.port)
    address = listener.getsockname()
    shown = f"[{address[0]}]" if ":" in address[0] else address[0]
    service: Service = app.state.service
    with log_to_console(settings.log_level), frozen_heap():
        address = f"http://{shown}:{address[1]}"
        Server(config, service, say, address).run(sockets=[listener])


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Exclude existing objects from garbage collection, which would pause streams for 0.25 s."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def uvicorn_config(app: FastAPI, settings: ServeSettings) -> uvicorn.Config:
    """Return uvicorn's configuration; raise InvalidRequest if `max_connections` is too high."""
    connection: Any = partial(Connection, settings=settings, limit=connection_limit(settings))
    return uvicorn.Config(
        app,
        http=connection,
        # Connections over the limit are closed only in the next round, so accept few per round.
        backlog=_ACCEPTS_PER_ROUND,
        log_level=settings.log_level,
        log_config=None,
        access_log=settings.log_level in ("info", "debug"),
        server_header=False,
        timeout_keep_alive=math.ceil(settings.idle_timeout_s),
        timeout_graceful_shutdown=settings.drain_timeout_s,
        h11_max_incomplete_event_size=_HEADER_BYTES,
        ws="none",
        lifespan="off",
    )


@contextmanager
def log_to_console(level: str) -> Iterator[None]:
    """Write logs with timestamps: accesses to stdout, the rest to stderr, none to the root logger."""
    logs, accesses = logging.StreamHandler(), logging.StreamHandler(sys.stdout)
    start = "%(asctime)s %(levelprefix)s "
    logs.setFormatter(DefaultFormatter(f"{start}%(message)s"))
    accesses.setFormatter(
        AccessFormatter(f'{start}%(client_addr)s - "%(request_line)s" %(status_code)s')
    )
    logs.addFilter(_is_unexpected)
    names = ("uvicorn.error", "asyncio", "verbatim.serve", "uvicorn.access")
    pairs = list(zip(map(logging.getLogger, names), (logs, logs, logs, accesses), strict=True))
    before = [logger.propagate for logger, _ in pairs]
    for logger, handler in pairs:
        logger.addHandler(handler)
        logger.propagate = False
    logging.getLogger("verbatim.serve").setLevel(level.upper())
    try:
        yield
    finally:
        for (logger, handler), propagate in zip(pairs, before, strict=True):
            logger.removeHandler(handler)
            logger.propagate = propagate


def _is_unexpected(record: logging.LogRecord) -> bool:
    """Return False for responses cancelled at shutdown, and for writes to disconnected clients."""
    error = record.exc_info[1] if record.exc_info else None
    if record.msg == "socket.send() raised exception.":
        return False
    return not isinstance(error, asyncio.CancelledError)


def listen(host: str, port: int) -> socket.socket:
    """Open the listening socket, so that a port in use is reported without a traceback."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        dual_stack = family == socket.AF_INET6  # "::" is also every address of IPv4
        listener = socket.create_server(
            address, family=family, backlog=_BACKLOG, dualstack_ipv6=dual_stack
        )
    except UnicodeError:  # a name such as "a..b"
        raise VerbatimError(f"can't listen at {host}:{port}: not a host name") from None
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (while")[0]  # drop the address
        raise VerbatimError(f"can't listen at {host}:{port}: {why}") from None
    # Inherited by connections: Nagle's algorithm would delay a token until the client acknowledges the
    # previous one, for up to 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.set_inheritable(True)
    return listener
