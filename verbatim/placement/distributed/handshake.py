"""Connecting two processes of a cluster, which know each other by a secret.

Before either side reads a message of the other, both prove that they know the key (HMAC-SHA256 over the
other's random bytes), and the caller says who it is. A caller that can't gets the reason, if it speaks our
language at all, and cut off.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from verbatim.errors import VerbatimError
from verbatim.placement.distributed.link import Link, LinkLost

PROTOCOL = 1
_GREETING = b"verbatim-cluster-%d\n" % PROTOCOL
_NONCE = 32
_SHAKE_S = 10.0
_HAS_NAMES = sys.platform == "linux"  # Unix sockets that are in no folder
_MAX_STRANGERS = 64  # who may be shaking hands at once

Address = tuple[str, int]


class Refused(VerbatimError):
    """The other side refused the connection; the message has the reason."""


class Listener:
    """Listens for the other processes of a cluster.

    Args:
        key: the cluster's secret.
        host: the address to listen at.
        accept: called with who it is (what the other side said to `connect`) and the link, in a thread of
            its own; what it raises is told to the other side, and the link is closed.
    """

    def __init__(
        self, key: bytes, host: str, accept: Callable[[dict[str, Any], Link], None]
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
            try:
                listening.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
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
            link = Link(connection)
            who = link.receive()
        except (OSError, VerbatimError):
            connection.close()
            return
        finally:
            self._room.release()
        try:
            self._accept(who, link)
        except Exception as error:
            try:
                link.send({"refused": str(error)})
            except LinkLost:
                pass
            link.close()


def connect(address: Address, key: bytes, who: Mapping[str, Any], timeout_s: float = 5.0) -> Link:
    """Connect to the listener at `address`; `who` describes this side.

    The other side's first message, which it sends when it has let us in, is the caller's to receive.

    Raises:
        LinkLost: there is no answer.
        Refused: the listener belongs to another cluster, or refuses this side.
    """
    host, port = address
    try:
        connection = _connected(address, key, timeout_s)
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
        link = Link(connection)
        link.send(who)
        return link
    except OSError as error:
        connection.close()
        raise LinkLost(f"no connection to {host}:{port}: {error}") from None
    except VerbatimError:
        connection.close()
        raise


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
