"""A connection between two processes that know each other already (`handshake.py`)."""

from __future__ import annotations

import io
import socket
import struct
import threading
from collections.abc import Mapping
from typing import Any

from verbatim.errors import VerbatimError
from verbatim.placement.distributed.rows import FIRST, decode_rows
from verbatim.placement.distributed.wire import PREFIX, Buffer, decode, encode, sizes

_SAY_S = 10.0  # in which a message has to be on its way, or the other side is taken for dead
_AHEAD = 1 << 16  # bytes that are sent, or read, by one call to the system
_AT_ONCE = 1 << 26  # bytes


class LinkLost(VerbatimError):
    """The other side is gone, or can't be reached."""


class Link:
    """Messages both ways, over TCP; over a Unix socket, which is faster, between processes of one machine.

    One thread at a time may receive, any may send.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        seconds = struct.pack("ll", int(_SAY_S), 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # what was sent and isn't acknowledged in it
                milliseconds = int(1000 * _SAY_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        self._connection = connection
        self._sending = threading.Lock()
        # It reads ahead, so that a small message is one call to the system.
        self._reader = io.BufferedReader(socket.SocketIO(connection, "rb"), _AHEAD)

    def send(self, message: Mapping[str, Any] | list[Buffer]) -> None:
        """Send one message whole; it may be encoded already.

        Raises:
            LinkLost: the other side is gone, or takes nothing.
        """
        buffers = message if isinstance(message, list) else encode(message)
        with self._sending:
            try:
                self._send(buffers)
            except OSError as error:
                self.close()
                raise LinkLost(f"the connection is lost: {error}") from None

    def _send(self, buffers: list[Buffer]) -> None:
        if sum(map(len, buffers)) < _AHEAD:
            buffers = [b"".join(buffers)]
        for buffer in buffers:
            self._connection.sendall(buffer)

    def receive(self) -> dict[str, Any]:
        """Wait for the next message, and return it.

        Raises:
            LinkLost: the other side is gone.
            Garbage: it does not speak our language.
        """
        try:
            header_size, array_size = sizes(self._take(PREFIX.size))
            header, arrays = self._take(header_size), self._take(array_size)
        except OSError as error:
            raise LinkLost(f"the connection is lost: {error}") from None
        if header and header[0] == FIRST:
            return {"do": "rows", "rows": decode_rows(header, arrays)}
        return decode(header, arrays)

    def _take(self, count: int) -> bytearray:
        """Return the next bytes, in memory that is allocated as they arrive, since `count` may be a lie."""
        found = bytearray(min(count, _AT_ONCE))
        self._fill(found)
        while len(found) < count:
            more = bytearray(min(count - len(found), len(found)))
            self._fill(more)
            found += more
        return found

    def _fill(self, buffer: bytearray) -> None:
        if self._reader.readinto(buffer) < len(buffer):
            raise LinkLost("the connection is lost: the other side has closed it")

    def close(self) -> None:
        """Close the connection; a waiting `receive` raises."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._connection.close()
