"""`run`: listen, serve, and shut down: requests finish after one signal, and are aborted at a second."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.logging import AccessFormatter, DefaultFormatter

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
        self._service.close()

    async def on_tick(self, counter: int) -> bool:
        if counter % _TICKS == 0:
            now = asyncio.get_running_loop().time()
            connections: Any = list(self.server_state.connections)
            for connection in connections:
                connection.check(now)
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # The next signal may come within this method: first the states, then the words.
        if self.should_exit:
            self.force_exit = True
            self._say("ending now")
        else:
            self.should_exit = self._service.draining = True
            left = self._service.under_way
            self._say(f"shutting down; waiting for {left} requests (a second signal ends them)")


def run(llm: LLM, settings: ServeSettings, *, say: Callable[[str], None] = print) -> None:
    """Serve until a signal, in the main thread. The caller closes `llm`.

    Args:
        say: called with the address, and at shutdown.

    Raises:
        InvalidRequest: other machines reach it without a key.
        VerbatimError: the address is not available.
    """
    settings = settings.guarded()
    app = make_app(llm, settings)
    config = configured(app, settings)
    listener = listen(settings.host, settings.port)
    address = listener.getsockname()
    shown = f"[{address[0]}]" if ":" in address[0] else address[0]
    service: Service = app.state.service
    with logged(settings.log_level), frozen_heap():
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


def configured(app: FastAPI, settings: ServeSettings) -> uvicorn.Config:
    """Return uvicorn's configuration for the endpoints.

    Raises:
        InvalidRequest: more connections than the process may have descriptors.
    """
    connection: Any = partial(Connection, settings=settings, limit=connection_limit(settings))
    return uvicorn.Config(
        app,
        http=connection,
        # Connections over the limit are closed only in the next round, so accept few per round.
        backlog=_ACCEPTED,
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
def logged(level: str) -> Iterator[None]:
    """Write the logs of a server with the time in each line: accesses to stdout, all others to stderr.

    A program's own handlers at the root do not write them a second time.
    """
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
        both = family == socket.AF_INET6  # "::" is also every address of IPv4
        listener = socket.create_server(
            address, family=family, backlog=_QUEUED, dualstack_ipv6=both
        )
    except UnicodeError:  # of "a..b"
        raise VerbatimError(f"can't listen at {host}:{port}: not a host name") from None
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (while")[0]  # the address is in front
        raise VerbatimError(f"can't listen at {host}:{port}: {why}") from None
    # Connections inherit it. Nagle's algorithm delays a token until the client acknowledges the one before,
    # for up to 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.set_inheritable(True)
    return listener
