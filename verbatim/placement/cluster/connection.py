"""A connection between two processes that know each other already (`link.py`): messages both ways."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Mapping
from typing import Any

from verbatim.errors import VerbatimError
from verbatim.placement.cluster.frame import Expected, Leaving
from verbatim.placement.cluster.wire import PREFIX, decode, encode, sizes

_SAY_S = 10.0  # in which a message has to be on its way, or the other side is taken for dead
_AHEAD = 1 << 16  # bytes
_AT_ONCE = 1 << 26  # bytes


class LinkLost(VerbatimError):
    """The other side is gone, or can't be reached."""


class Connection:
    """A link over TCP; over a Unix socket, which is faster, between processes of one machine.

    Attributes:
        expected: what the next message is likely to be, for which memory is ready; set by any thread.
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
        self._leaving: Leaving | None = None
        self.expected: Expected | None = None
        # What has come and was not asked for yet, so that a small message is one call to the system.
        self._came = bytearray(_AHEAD)
        self._ahead = memoryview(self._came)
        self._begin = self._end = 0

    def send(self, message: Mapping[str, Any]) -> None:
        if message.get("do") == "rows":
            return self._send_rows(message)
        buffers = encode(message)
        with self._sending:
            try:
                self._send(buffers)
            except OSError as error:
                self.close()
                raise LinkLost(f"the connection is lost: {error}") from None

    def _send_rows(self, message: Mapping[str, Any]) -> None:
        """Send hidden states from a buffer that is kept."""
        with self._sending:
            try:
                if self._leaving is None or not self._leaving.fill(message):
                    self._send(encode(message))
                    # What is large is better sent from where it is.
                    small = message["hidden"].nbytes < _AHEAD // 2
                    self._leaving = Leaving(message) if small else None
                    return
                raw = self._leaving.raw
                sent = self._connection.send(raw)
                if sent < len(raw):
                    self._connection.sendall(memoryview(raw)[sent:])
            except OSError as error:
                self.close()
                raise LinkLost(f"the connection is lost: {error}") from None

    def _send(self, buffers: list[bytes | memoryview]) -> None:
        if len(buffers) <= 64:
            sent = self._connection.sendmsg(buffers)
            for buffer in buffers:
                if sent < len(buffer):
                    self._connection.sendall(memoryview(buffer)[sent:])
                sent = max(0, sent - len(buffer))
        else:
            for buffer in buffers:
                self._connection.sendall(buffer)

    def receive(self) -> dict[str, Any]:
        try:
            if self._begin == self._end:
                self._begin, self._end = 0, self._receive(self._ahead)
                expected = self.expected
                if expected is not None:
                    message = expected.read(self._came, self._end)
                    if message is not None:
                        self.expected = None
                        self._begin = self._end
                        return message
            header_size, array_size = sizes(bytes(self._take(PREFIX.size)))
            header, arrays = self._take(header_size), self._take(array_size)
        except OSError as error:
            raise LinkLost(f"the connection is lost: {error}") from None
        return decode(bytes(header), arrays)

    def _take(self, count: int) -> bytearray:
        """Return the next bytes, in memory that is allocated as they arrive, since `count` may be a lie."""
        found = bytearray(min(count, _AT_ONCE))
        self._fill(memoryview(found))
        while len(found) < count:
            more = bytearray(min(count - len(found), len(found)))
            self._fill(memoryview(more))
            found += more
        return found

    def _fill(self, view: memoryview) -> None:
        while view:
            if self._begin < self._end:
                some = min(len(view), self._end - self._begin)
                view[:some] = self._ahead[self._begin : self._begin + some]
                self._begin += some
            elif len(view) >= len(self._ahead):
                some = self._receive(view)
            else:
                self._begin, self._end = 0, self._receive(self._ahead)
                some = 0
            view = view[some:]

    def _receive(self, view: memoryview) -> int:
        count = self._connection.recv_into(view)
        if not count:
            raise LinkLost("the connection is lost: the other side has closed it")
        return count

    def close(self) -> None:
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._connection.close()
