"""A connection between two processes of a cluster, which know each other by a secret.

Before either side reads a message of the other, both prove that they know the key (HMAC-SHA256 over the
other's random bytes), and the caller says who it is. Whoever can't is told why, if he speaks our
language at all, and cut off.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from verbatim.errors import VerbatimError
from verbatim.placement.cluster.wire import PREFIX, Garbage, decode, encode, sizes

PROTOCOL = 1
_GREETING = b"verbatim-cluster-%d\n" % PROTOCOL
_NONCE = 32
_SAY_S = 10.0  # in which a message has to be on its way, or the other side is taken for dead
_SHAKE_S = 10.0
_MAX_STRANGERS = 64  # who may be shaking hands at once

RELAY = "ray:"  # begins an address that is an actor of Ray's

Address = tuple[str, int]


class LinkLost(VerbatimError):
    """The other side is gone, or can't be reached."""


class Refused(VerbatimError):
    """The other side did not want us; the message tells why."""


class Link(Protocol):
    """Messages both ways. One thread at a time may receive, any may send."""

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message whole.

        Raises:
            LinkLost: the other side is gone, or takes nothing.
        """
        ...

    def receive(self) -> dict[str, Any]:
        """The next message; waits for it.

        Raises:
            LinkLost: the other side is gone.
            Garbage: it does not speak our language.
        """
        ...

    def close(self) -> None:
        """Hang up; whoever waits in `receive` wakes."""
        ...


class Connection:
    """A link over TCP."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)
        seconds = struct.pack("ll", int(_SAY_S), 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
        if hasattr(
            socket, "TCP_USER_TIMEOUT"
        ):  # what was sent and is not acknowledged in that time
            milliseconds = int(1000 * _SAY_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        self._connection = connection
        self._sending = threading.Lock()
        # What has come and was not asked for yet, so that a small message is one call to the system.
        self._ahead = memoryview(bytearray(1 << 16))
        self._begin = self._end = 0

    def send(self, message: Mapping[str, Any]) -> None:
        buffers = encode(message)
        with self._sending:
            try:
                self._send(buffers)
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
            header_size, array_size = sizes(bytes(self._take(PREFIX.size)))
            header, arrays = self._take(header_size), self._take(array_size)
        except OSError as error:
            raise LinkLost(f"the connection is lost: {error}") from None
        return decode(bytes(header), arrays)

    def _take(self, count: int) -> bytearray:
        """The next bytes, in memory of their own."""
        found = bytearray(count)
        view = memoryview(found)
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
        return found

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


class Door:
    """Listens for the other processes of a cluster.

    Args:
        key: the cluster's secret.
        host: the address to listen at.
        let_in: called with who it is (what the other side said to `connect`) and the link, in a thread of
            its own; what it raises is told to the other side, and the link is closed.
    """

    def __init__(
        self, key: bytes, host: str, let_in: Callable[[dict[str, Any], Link], None]
    ) -> None:
        self._key = key
        self._let_in = let_in
        self._room = threading.Semaphore(_MAX_STRANGERS)
        self._socket = socket.create_server((host, 0), backlog=64)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._listen, name="verbatim-door", daemon=True).start()

    def close(self) -> None:
        """Take nobody in any more."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._socket.close()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            if not self._room.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._welcome, args=(connection,), daemon=True).start()

    def _welcome(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_SHAKE_S)
            ours = secrets.token_bytes(_NONCE)
            connection.sendall(_GREETING + ours)
            greeting = _read(connection, len(_GREETING))
            if greeting != _GREETING:
                connection.sendall(b"-" + _reason(_other_version(greeting)))
                raise LinkLost("a stranger")
            theirs = _read(connection, _NONCE)
            proof = _read(connection, _NONCE)
            if not hmac.compare_digest(proof, _proof(self._key, b"caller", ours, theirs)):
                connection.sendall(b"-" + _reason("the cluster's key is another one"))
                raise LinkLost("a wrong key")
            connection.sendall(b"+" + _proof(self._key, b"door", theirs, ours))
            link = Connection(connection)
            who = link.receive()
        except (OSError, VerbatimError):
            connection.close()
            return
        finally:
            self._room.release()
        welcome(who, link, self._let_in)


def welcome(
    who: dict[str, Any], link: Link, let_in: Callable[[dict[str, Any], Link], None]
) -> None:
    """Let somebody in who knows the key; what that raises is told to him."""
    try:
        let_in(who, link)
    except Exception as error:
        try:
            link.send({"refused": str(error)})
        except LinkLost:
            pass
        link.close()


def connect(address: Address, key: bytes, who: Mapping[str, Any], timeout_s: float = 5.0) -> Link:
    """A link to the door at `address`, for `who` tells what this side is.

    The other side's first message, which it sends when it has let us in, is the caller's to receive.

    Raises:
        LinkLost: nobody answers there.
        Refused: somebody who isn't of this cluster, or doesn't want us.
    """
    host, port = address
    try:
        connection = socket.create_connection((host, port), timeout=timeout_s)
    except OSError as error:
        raise LinkLost(f"no connection to {host}:{port}: {error}") from None
    try:
        connection.settimeout(timeout_s)
        greeting = _read(connection, len(_GREETING))
        if greeting != _GREETING:
            raise Refused(f"{host}:{port}: {_other_version(greeting)}")
        theirs, ours = _read(connection, _NONCE), secrets.token_bytes(_NONCE)
        proof = _proof(key, b"caller", theirs, ours)
        connection.sendall(_GREETING + ours + proof)
        answer = _read(connection, 1)
        if answer != b"+":
            (size,) = struct.unpack("<H", _read(connection, 2))
            raise Refused(f"{host}:{port}: {_read(connection, size).decode(errors='replace')}")
        proof = _read(connection, _NONCE)
        if not hmac.compare_digest(proof, _proof(key, b"door", ours, theirs)):
            raise Refused(f"{host}:{port}: it does not know the cluster's key")
        link = Connection(connection)
        link.send(who)
        return link
    except OSError as error:
        connection.close()
        raise LinkLost(f"no connection to {host}:{port}: {error}") from None
    except VerbatimError:
        connection.close()
        raise


def _proof(key: bytes, role: bytes, asked: bytes, own: bytes) -> bytes:
    return hmac.digest(key, role + asked + own, "sha256")


def _reason(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<H", len(raw)) + raw


def _other_version(greeting: bytes) -> str:
    known = _GREETING.rstrip().decode()
    if greeting.startswith(b"verbatim-cluster-"):
        return f"it speaks {greeting.rstrip().decode(errors='replace')}, and this side {known}"
    return f"it does not speak {known}"


def _read(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        more = connection.recv(count - len(found))
        if not more:
            raise LinkLost("the other side has hung up")
        found += more
    return found


__all__ = [
    "RELAY",
    "Address",
    "Connection",
    "Door",
    "Garbage",
    "Link",
    "LinkLost",
    "Refused",
    "connect",
    "welcome",
]
