"""`run`: listen, serve, and shut down: requests finish after one signal, and are aborted at a second."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
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
_QUEUED = 2048  # backlog of connections not yet accepted
_ACCEPTED = 8  # connections accepted per round of the event loop
_TICKS = 5  # uvicorn's ticks of 0.1 s between two checks of the connections


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
            listener.listen(_QUEUED)  # asyncio accepts fewer at once, see `configured`
        # Signals are handled from here on.
        service = self._service
        self._say(f"serving {service.name} at {self._address} ({service.fingerprint})")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        await asyncio.to_thread(self._service.on_close)

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
        port: 0 takes a free one, which is reported.
        drain_s: seconds for running requests after the first signal.
        say: called with the address, and at shutdown.

    Raises:
        VerbatimError: the address is not available.
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
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s: %(message)s"))
        log.addHandler(handler)
    with frozen_heap(), _quiet("uvicorn.error", "asyncio"):
        address = f"http://{shown}:{address[1]}"
        Server(config, service, say, address).run(sockets=[listener])


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Filter expected errors from these logs."""
    logs = [logging.getLogger(name) for name in names]
    for log in logs:
        log.addFilter(_is_unexpected)
    try:
        yield
    finally:
        for log in logs:
            log.removeFilter(_is_unexpected)


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Exclude existing objects from garbage collection, which would pause streams for 0.25 s."""
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
        # Connections over the limit are closed only in the next round, so accept few per round.
        backlog=_ACCEPTED,
        log_level=log_level,
        log_config=_log_config(),
        access_log=log_level in ("info", "debug"),
        server_header=False,
        timeout_keep_alive=math.ceil(settings.idle_timeout_s),
        timeout_graceful_shutdown=drain_s,
        h11_max_incomplete_event_size=_HEADER_BYTES,
        ws="none",
        lifespan="off",
    )


def _log_config() -> dict[str, Any]:
    """Return uvicorn's configuration of logs, with the time in front of each line."""
    config = deepcopy(uvicorn.config.LOGGING_CONFIG)
    for formatter in config["formatters"].values():
        formatter["fmt"] = f"%(asctime)s {formatter['fmt']}"
    return config


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
        both = family == socket.AF_INET6  # "::" is also every address of IPv4
        listener = socket.create_server(
            address, family=family, backlog=_QUEUED, dualstack_ipv6=both
        )
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (while")[0]  # the address is in front
        raise VerbatimError(f"can't listen at {host}:{port}: {why}") from None
    # Connections inherit it. Nagle's algorithm delays a token until the client acknowledges the one before,
    # for up to 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.set_inheritable(True)
    return listener
