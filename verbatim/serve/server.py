"""`run`: listen, serve, and shut down in order: requests finish after one signal, and end at a second."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from verbatim.errors import VerbatimError
from verbatim.llm import LLM
from verbatim.serve.app import make_app
from verbatim.serve.connections import Connection, connection_limit
from verbatim.serve.service import Service
from verbatim.serve.settings import ServeSettings

_HEADER_BYTES = 64 << 10
_QUEUED = 2048  # connections that the system holds until they are accepted
_ACCEPTED = 8  # connections that are accepted between two rounds of the event loop
_TICKS = 5  # of uvicorn's 0.1 s, between two looks at the connections


class Server(uvicorn.Server):
    """uvicorn's server, which rejects new requests while it drains, and ends at a second signal."""

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
            listener.listen(_QUEUED)  # what asyncio accepts at once is less, see `configured`
        # Signals are handled from here on.
        service = self._service
        self._say(f"serving {service.name} at {self._address} ({service.fingerprint})")

    async def on_tick(self, counter: int) -> bool:
        if counter % _TICKS == 0:
            now = asyncio.get_running_loop().time()
            connections: Any = list(self.server_state.connections)
            for connection in connections:
                connection.check(now)
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self._say("ending now")
            self.force_exit = True
        else:
            self._service.draining = True
            left = self._service.under_way
            self._say(f"shutting down; {left} requests run to their end (again: end them)")
            self.should_exit = True


def run(
    llm: LLM,
    settings: ServeSettings,
    host: str,
    port: int,
    *,
    log_level: str,
    drain_s: int,
    say: Callable[[str], None],
) -> None:
    """Serve until a signal.

    Args:
        port: 0 takes a free one, which is said.
        drain_s: how long what runs may go on after the first signal.
        say: is told the address and how it ends.

    Raises:
        VerbatimError: the address can't be had.
    """
    app = make_app(llm, settings)
    config = configured(app, settings, log_level=log_level, drain_s=drain_s)
    listener = listen(host, port)
    address = listener.getsockname()
    shown = f"[{address[0]}]" if ":" in address[0] else address[0]
    service: Service = app.state.service
    log = logging.getLogger("verbatim.serve")
    log.setLevel(log_level.upper())
    if not log.hasHandlers():
        log.addHandler(logging.StreamHandler())
    with frozen_heap(), _quiet("uvicorn.error", "asyncio"):
        address = f"http://{shown}:{address[1]}"
        Server(config, service, say, address).run(sockets=[listener])


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Leave out of these logs what was foreseen."""
    logs = [logging.getLogger(name) for name in names]
    for log in logs:
        log.addFilter(_foreseen)
    try:
        yield
    finally:
        for log in logs:
            log.removeFilter(_foreseen)


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Leave what was loaded so far out of garbage collections: going through it stops every stream for a
    quarter of a second."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def configured(
    app: FastAPI, settings: ServeSettings, *, log_level: str, drain_s: int
) -> uvicorn.Config:
    """Return uvicorn's configuration for the endpoints.

    Raises:
        InvalidRequest: more connections than the process may have descriptors.
    """
    limit = connection_limit(settings)
    connection: Any = partial(
        Connection,
        limit=limit,
        limit_per_address=settings.max_connections_per_address or -(-limit // 2),
        idle_timeout_s=settings.idle_timeout_s,
        read_timeout_s=settings.read_timeout_s,
    )
    return uvicorn.Config(
        app,
        http=connection,
        # Each may be one too many and is closed only in the next round, so few may come in one.
        backlog=_ACCEPTED,
        log_level=log_level,
        access_log=log_level in ("info", "debug"),
        server_header=False,
        timeout_keep_alive=math.ceil(settings.idle_timeout_s),
        timeout_graceful_shutdown=drain_s,
        h11_max_incomplete_event_size=_HEADER_BYTES,
        ws="none",
        lifespan="off",
    )


def _foreseen(record: logging.LogRecord) -> bool:
    """Leave out the traceback of an answer that was broken off by the end of the server, and what asyncio
    says of a client that is gone."""
    error = record.exc_info[1] if record.exc_info else None
    if record.msg == "socket.send() raised exception.":
        return False
    return not isinstance(error, asyncio.CancelledError)


def listen(host: str, port: int) -> socket.socket:
    """A socket of its own, so that a taken port is one line and no traceback."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # With the protocol named: only then asyncio switches Nagle's algorithm off, which holds a token
        # back until the client has acknowledged the one before, 40 ms at most.
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise VerbatimError(f"can't listen at {host}:{port}: {error.strerror or error}") from None
    listener.set_inheritable(True)
    return listener
