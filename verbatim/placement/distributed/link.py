"""Connections between the processes of a model, authenticated by a secret key.

Before either side reads a message from the other, both prove that they know the key (HMAC-SHA256 over the
other side's nonce). Then the caller describes itself, and receives "welcome" or the reason for a refusal.
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
import time
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
_HANDSHAKE_TIMEOUT_S = 10.0
_HAS_NAMES = sys.platform == "linux"  # whether Unix sockets have abstract names
_MAX_HANDSHAKES = 64  # maximum concurrent handshakes
_RETRY_S = 0.1  # wait after an error of a listening socket
_SEND_TIMEOUT_S = 10.0  # time without progress of a send after which the other side counts as dead
_READ_AHEAD = 1 << 16  # bytes of the read buffer; shorter messages are sent by one system call
_FIRST_READ = 1 << 26  # maximum bytes allocated before data arrives
_PROBE_S = 2  # seconds without data after which `receive_into` sends an empty message
_EMPTY = b"".join(encode({}))
_CLOSED = "the connection is lost: the other side has closed it"

Address = tuple[str, int]


class LinkLost(VerbatimError):
    """The other side has closed the connection, or can't be reached."""


class CutOff(LinkLost):
    """The network is cut: the other side no longer acknowledges data, but has not closed the connection."""


class Refused(VerbatimError):
    """The other side refused the connection, or failed the handshake; the message has the reason."""


class Link:
    """A two-way connection for messages, over TCP, or over a Unix socket (faster) within one machine.

    Only one thread at a time may receive; any thread may send.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
        if self._is_tcp:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._sending = threading.Lock()
        # Reads ahead, so that a small message takes one system call.
        self._reader = io.BufferedReader(socket.SocketIO(connection, "rb"), _READ_AHEAD)
        self.limit_sending(_SEND_TIMEOUT_S)

    def limit_sending(self, seconds: float) -> None:
        """Limit how many seconds a send waits for the other side before the connection is closed."""
        connection, whole = self._connection, max(1, int(seconds))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", whole, 0))
        if self._is_tcp and hasattr(socket, "TCP_USER_TIMEOUT"):  # until sent data is acknowledged
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * whole)

    def detect_cuts(self) -> None:
        """Let `receive_into` send empty messages while it waits; after a cut, it would wait forever."""
        limit = struct.pack("ll", _PROBE_S, 0)
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def shake_hands(self, key: bytes, role: bytes, other: bytes) -> None:
        """Perform the handshake: prove knowledge of the key, and check the other side's proof.

        Args:
            role, other: roles of this and the other side; they are in the proofs to prevent reflection.

        Raises:
            Refused: the other side speaks another protocol, or has another key.
            LinkLost, OSError: the other side is gone, or does not answer.
        """
        ours, connection = secrets.token_bytes(_NONCE), self._connection
        connection.sendall(_GREETING + ours)
        greeting, protocol = self._read(len(_GREETING)), _GREETING.decode().rstrip()
        if greeting != _GREETING:
            if greeting.startswith(b"verbatim-cluster-"):
                theirs = greeting.decode(errors="replace").rstrip()
                raise Refused(f"it speaks {theirs}, but this side {protocol}")
            raise Refused(f"it does not speak {protocol}")
        nonce = self._read(_NONCE)
        connection.sendall(hmac.digest(key, role + nonce + ours, "sha256"))
        expected = hmac.digest(key, other + ours + nonce, "sha256")
        if not hmac.compare_digest(self._read(_NONCE), expected):
            raise Refused("it does not know the cluster's key")

    def send(self, message: Mapping[str, Any] | list[Buffer]) -> None:
        """Send a message, which may already be encoded, without interleaving others.

        Raises:
            LinkLost: the other side is gone, or accepts no data.
        """
        buffers = encode(message) if isinstance(message, Mapping) else message
        if sum(map(len, buffers)) < _READ_AHEAD:
            buffers = [b"".join(buffers)]
        with self._sending:
            for buffer in buffers:
                self.send_raw(buffer)

    def send_raw(self, buffer: Buffer) -> None:
        """Send raw bytes outside of a message; raises the errors of `send`."""
        try:
            self._connection.sendall(buffer)
        except OSError as error:
            self.close()
            why = "nothing is accepted" if isinstance(error, BlockingIOError) else error
            raise LinkLost(f"the connection is lost: {why}") from None

    def receive_into(self, buffer: memoryview) -> None:
        """Receive raw bytes into `buffer`; no message may be pending before them.

        Raises:
            CutOff: the network is cut; detected only after `detect_cuts`.
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

    def receive(self, max_bytes: int | None = None) -> dict[str, Any]:
        """Wait for the next message, and return it.

        Args:
            max_bytes: maximum bytes of the message; a larger one is not read. None: no limit.

        Raises:
            LinkLost: the other side is gone.
            Garbage: the data is not a message, or the message is too large.
        """
        try:
            header_size, array_size = sizes(self._read(PREFIX.size))
            if max_bytes is not None and header_size + array_size > max_bytes:
                raise Garbage(
                    f"a message has {header_size + array_size:,} bytes, and at most {max_bytes:,} "
                    "were announced"
                )
            return decode(self._read(header_size), self._read(array_size))
        except OSError as error:
            raise LinkLost(f"the connection is lost: {error}") from None

    def _read(self, count: int) -> bytearray:
        """Return the next `count` bytes; memory is allocated as they arrive, as `count` is not trusted."""
        data = bytearray(min(count, _FIRST_READ))
        self._read_into(data)
        while len(data) < count:
            chunk = bytearray(min(count - len(data), len(data)))
            self._read_into(chunk)
            data += chunk
        return data

    def _read_into(self, buffer: bytearray) -> None:
        if self._reader.readinto(buffer) < len(buffer):
            raise LinkLost(_CLOSED)

    def close(self) -> None:
        """Close the connection; a waiting `receive` raises."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        if (descriptor := self._connection.detach()) >= 0:
            # Closed only with this object, as another thread may still use the descriptor's number.
            weakref.finalize(self, os.close, descriptor)


class Listener:
    """Listens for the other processes of a cluster.

    Args:
        accept: called in a separate thread with the caller's description (`who` of `connect`) and the link.
            Returns a function that serves the link after the welcome; any error refuses the caller.
    """

    def __init__(
        self,
        key: bytes,
        host: str,
        accept: Callable[[dict[str, Any], Link], Callable[[], object]],
    ) -> None:
        self._key = key
        self._accept = accept
        self._handshakes = threading.Semaphore(_MAX_HANDSHAKES)
        self._sockets = [socket.create_server((host, 0), backlog=64)]
        self.port: int = self._sockets[0].getsockname()[1]
        if _HAS_NAMES:
            unix = socket.socket(socket.AF_UNIX)
            try:
                unix.bind(_socket_name((host, self.port), key))
                unix.listen(64)
                self._sockets.append(unix)
            except OSError:
                unix.close()  # not permitted: all connect over TCP
        for listening in self._sockets:
            thread = threading.Thread(
                target=self._listen, args=(listening,), name="verbatim-listener", daemon=True
            )
            thread.start()

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
            except OSError:  # closed; or the caller is gone, or too many files are open
                if listening.fileno() < 0:
                    return
                time.sleep(_RETRY_S)
                continue
            if not self._handshakes.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._admit, args=(connection,), daemon=True).start()

    def _admit(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_HANDSHAKE_TIMEOUT_S)
            link = Link(connection)
            link.shake_hands(self._key, b"listener", b"caller")
            who = link.receive()
            connection.settimeout(None)
        except (OSError, VerbatimError):
            connection.close()
            return
        finally:
            self._handshakes.release()
        try:
            serve, answer = self._accept(who, link), "welcome"
        except Exception as error:
            serve, answer = link.close, str(error)
        with suppress(LinkLost):  # noticed by the function that serves it
            link.send({"answer": answer})
        serve()


def connect(address: Address, key: bytes, who: Mapping[str, Any], timeout_s: float) -> Link:
    """Connect to the listener at `address`, and wait for its welcome.

    Args:
        who: the description of this side.
        timeout_s: time limit of each read and write.

    Raises:
        LinkLost: there is no answer.
        Refused: the listener belongs to another cluster, or refuses this side.
    """
    host, port = address
    try:
        connection = _open_socket(address, key, timeout_s)
        try:
            connection.settimeout(timeout_s)
            link = Link(connection)
            link.shake_hands(key, b"caller", b"listener")
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
    except (OSError, ValueError, LinkLost, Garbage) as error:  # ValueError: the host "a..b"
        raise LinkLost(f"no connection to {host}:{port}: {error}") from None
    return link


def _open_socket(address: Address, key: bytes, timeout_s: float) -> socket.socket:
    """Return a connected socket: a Unix socket if the listener is on this machine, else TCP."""
    if _HAS_NAMES:
        unix = socket.socket(socket.AF_UNIX)
        try:
            unix.settimeout(timeout_s)
            unix.connect(_socket_name(address, key))
            return unix
        except OSError:
            unix.close()
    return socket.create_connection(address, timeout=timeout_s)


def _socket_name(address: Address, key: bytes) -> bytes:
    """Return the abstract name of a port's Unix socket, which can't be guessed without the key."""
    host, port = address
    digest = hmac.digest(key, f"near {host}:{port}".encode(), "sha256")
    return b"\0verbatim-" + digest.hex().encode()
