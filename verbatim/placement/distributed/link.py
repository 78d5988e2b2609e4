"""Connections between the processes of a model, which know each other by a secret key.

Before either side reads a message of the other, both prove that they know the key (HMAC-SHA256 over the
other's random bytes). Then the caller says who it is, and is welcomed, or gets the reason why not.
"""

from __future__ import annotations

import hmac
import io
import os
import secrets
import socket
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from verbatim.errors import VerbatimError
from verbatim.placement.distributed.wire import (
    PREFIX,
    Buffer,
    Garbage,
    decode,
    encode,
    sizes,
)

PROTOCOL = 3
_GREETING = b"verbatim-cluster-%d\n" % PROTOCOL
_NONCE = 32
_SHAKE_S = 10.0
_HAS_NAMES = sys.platform == "linux"  # Unix sockets that are in no folder
_MAX_STRANGERS = 64  # who may be shaking hands at once
_SAY_S = 10.0  # in which a message has to be on its way, or the other side is taken for dead
_AHEAD = 1 << 16  # bytes that are sent, or read, by one call to the system
_AT_ONCE = 1 << 26  # bytes
_SILENT_S = 2  # without data, until `fill` sends an empty message
_EMPTY = b"".join(encode({}))
_CLOSED = "the connection is lost: the other side has closed it"

Address = tuple[str, int]


class LinkLost(VerbatimError):
    """The other side is gone, or can't be reached."""


class CutOff(LinkLost):
    """The network is cut: the other side has not closed the connection, and acknowledges nothing."""


class Refused(VerbatimError):
    """The other side refused the connection, or is not the right one; the message has the reason."""


class Link:
    """Messages both ways, over TCP; over a Unix socket, which is faster, between processes of one machine.

    One thread at a time may receive, any may send.
    """

    def __init__(self, connection: socket.socket) -> None:
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._sending = threading.Lock()
        # It reads ahead, so that a small message is one call to the system.
        self._reader = io.BufferedReader(socket.SocketIO(connection, "rb"), _AHEAD)
        self.limit_sending(_SAY_S)

    def limit_sending(self, seconds: float) -> None:
        """Take the other side for dead when it accepts nothing for so long."""
        connection, whole = self._connection, max(1, int(seconds))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", whole, 0))
        if connection.family in (socket.AF_INET, socket.AF_INET6) and hasattr(
            socket, "TCP_USER_TIMEOUT"
        ):  # what was sent and isn't acknowledged in it
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * whole)

    def detect_cuts(self) -> None:
        """Let `fill` send an empty message while nothing comes: else it would wait forever after a cut."""
        limit = struct.pack("ll", _SILENT_S, 0)
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def shake_hands(self, key: bytes, role: bytes, other: bytes) -> None:
        """Prove to the other side that this one knows the key, and check that it does, too.

        Args:
            role, other: what either side is, so that a proof can't be sent back.

        Raises:
            Refused: it speaks another protocol, or has another key.
            LinkLost, OSError: it is gone, or silent.
        """
        ours, connection = secrets.token_bytes(_NONCE), self._connection
        connection.sendall(_GREETING + ours)
        greeting, known = self._take(len(_GREETING)), _GREETING.decode().rstrip()
        if greeting != _GREETING:
            if greeting.startswith(b"verbatim-cluster-"):
                theirs = greeting.decode(errors="replace").rstrip()
                raise Refused(f"it speaks {theirs}, and this side {known}")
            raise Refused(f"it does not speak {known}")
        nonce = self._take(_NONCE)
        connection.sendall(hmac.digest(key, role + nonce + ours, "sha256"))
        expected = hmac.digest(key, other + ours + nonce, "sha256")
        if not hmac.compare_digest(self._take(_NONCE), expected):
            raise Refused("it does not know the cluster's key")

    def send(self, message: Mapping[str, Any] | list[Buffer]) -> None:
        """Send one message whole; it may be encoded already.

        Raises:
            LinkLost: the other side is gone, or takes nothing.
        """
        buffers = encode(message) if isinstance(message, Mapping) else message
        if sum(map(len, buffers)) < _AHEAD:
            buffers = [b"".join(buffers)]
        with self._sending:
            for buffer in buffers:
                self.put(buffer)

    def put(self, buffer: Buffer) -> None:
        """Send bytes that are no message; errors as of `send`."""
        try:
            self._connection.sendall(buffer)
        except OSError as error:
            self.close()
            why = "nothing is accepted" if isinstance(error, BlockingIOError) else error
            raise LinkLost(f"the connection is lost: {why}") from None

    def fill(self, buffer: memoryview) -> None:
        """Wait for bytes that are no message; there must be no message before them.

        Raises:
            CutOff: the network is cut; found only after `detect_cuts`.
            LinkLost: the other side is gone.
        """
        try:
            while buffer:
                try:
                    count = self._connection.recv_into(buffer, 0, socket.MSG_WAITALL)
                except BlockingIOError:
                    self._connection.sendall(_EMPTY)
                    continue
                if not count:
                    raise LinkLost(_CLOSED)
                buffer = buffer[count:]
        except OSError as error:
            closed = isinstance(error, ConnectionError) or self._connection.fileno() < 0
            raise (LinkLost if closed else CutOff)(f"the connection is lost: {error}") from None

    def receive(self, most: int | None = None) -> dict[str, Any]:
        """Wait for the next message, and return it.

        Args:
            most: bytes that it may have; what is larger is not read.

        Raises:
            LinkLost: the other side is gone.
            Garbage: it does not speak our language, or the message is larger.
        """
        try:
            header_size, array_size = sizes(self._take(PREFIX.size))
            if most is not None and header_size + array_size > most:
                raise Garbage(
                    f"a message has {header_size + array_size:,} bytes, and at most {most:,} were announced"
                )
            return decode(self._take(header_size), self._take(array_size))
        except OSError as error:
            raise LinkLost(f"the connection is lost: {error}") from None

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
            raise LinkLost(_CLOSED)

    def close(self) -> None:
        """Close the connection; a waiting `receive` raises."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        if (descriptor := self._connection.detach()) >= 0:
            # Not earlier: a thread that is about to use the number must not meet another file.
            weakref.finalize(self, os.close, descriptor)


class Listener:
    """Listens for the other processes of a cluster.

    Args:
        key: the cluster's secret.
        host: the address to listen at.
        accept: called with who it is (what the other side said to `connect`) and the link, in a thread of
            its own. It returns what serves the link once the other side is welcomed; or raises a
            VerbatimError, which the other side is told, and the link is closed.
    """

    def __init__(
        self,
        key: bytes,
        host: str,
        accept: Callable[[dict[str, Any], Link], Callable[[], object]],
    ) -> None:
        self._key = key
        self._accept = accept
        self._room = threading.Semaphore(_MAX_STRANGERS)
        self._sockets = [socket.create_server((host, 0), backlog=64)]
        self.port: int = self._sockets[0].getsockname()[1]
        if _HAS_NAMES:
            near = socket.socket(socket.AF_UNIX)
            try:
                near.bind(_name((host, self.port), key))
                near.listen(64)
                self._sockets.append(near)
            except OSError:
                near.close()  # where that is forbidden, all come by TCP
        for listening in self._sockets:
            own = threading.Thread(
                target=self._listen, args=(listening,), name="verbatim-listener", daemon=True
            )
            own.start()

    def close(self) -> None:
        """Stop listening."""
        for listening in self._sockets:
            with suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)
            listening.close()

    def _listen(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            if not self._room.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._welcome, args=(connection,), daemon=True).start()

    def _welcome(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_SHAKE_S)
            link = Link(connection)
            link.shake_hands(self._key, b"door", b"caller")
            who = link.receive()
            connection.settimeout(None)
        except (OSError, VerbatimError):
            connection.close()
            return
        finally:
            self._room.release()
        try:
            serve, answer = self._accept(who, link), "welcome"
        except Exception as error:
            serve, answer = link.close, str(error)
        with suppress(LinkLost):  # who serves it notices
            link.send({"answer": answer})
        serve()


def connect(address: Address, key: bytes, who: Mapping[str, Any], timeout_s: float) -> Link:
    """Connect to the listener at `address`, which welcomes this side; `who` describes it.

    Args:
        timeout_s: of each step of that.

    Raises:
        LinkLost: there is no answer.
        Refused: the listener belongs to another cluster, or refuses this side.
    """
    host, port = address
    try:
        connection = _connected(address, key, timeout_s)
        try:
            connection.settimeout(timeout_s)
            link = Link(connection)
            link.shake_hands(key, b"caller", b"door")
            link.send(who)
            answer = link.receive().get("answer")
            if answer != "welcome":
                raise Refused(str(answer))
            connection.settimeout(None)
        except BaseException:
            connection.close()
            raise
    except Refused as error:
        raise Refused(f"{host}:{port}: {error}") from None
    except (OSError, ValueError, LinkLost, Garbage) as error:  # ValueError: of the host "a..b"
        raise LinkLost(f"no connection to {host}:{port}: {error}") from None
    return link


def _connected(address: Address, key: bytes, timeout_s: float) -> socket.socket:
    """Return a connected socket, a Unix socket if the listener is on this machine."""
    if _HAS_NAMES:
        near = socket.socket(socket.AF_UNIX)
        try:
            near.settimeout(timeout_s)
            near.connect(_name(address, key))
            return near
        except OSError:
            near.close()
    return socket.create_connection(address, timeout=timeout_s)


def _name(address: Address, key: bytes) -> bytes:
    """Return the abstract name of a port's Unix socket, which can't be guessed without the key."""
    host, port = address
    known = hmac.digest(key, f"near {host}:{port}".encode(), "sha256")
    return b"\0verbatim-" + known.hex().encode()
