"""A link by way of Ray: its frames are arguments and results of actor calls.

Slower than a connection, and for machines between which there is nothing else. Who calls hands its frames
to the actor and fetches those that wait for it there, so only the called side has to be an actor.
"""

from __future__ import annotations

import hmac
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from verbatim.errors import first_line
from verbatim.placement.cluster.contact import NAMESPACE
from verbatim.placement.cluster.link import (
    RELAY,
    Address,
    Link,
    LinkLost,
    Refused,
    connect,
    welcome,
)
from verbatim.placement.cluster.wire import PREFIX, Garbage, decode, encode, sizes

_FETCH_S = 1.0  # that a call waits in the actor for frames
_LOOK_S = 0.25  # between two looks, while it does, at whether this side still wants them
_SAY_S = 10.0  # in which Ray has a frame delivered, or the other side is taken for dead
_MAX_LINKS = 64  # of one actor
_MAX_WAITING = 4096  # frames that nobody has fetched

# Ray gives each group threads of its own: who waits for frames keeps nobody from delivering some.
GROUPS = {"relay-in": 1, "relay-out": 8}


def relay_address(name: str) -> Address:
    """Where `connect` finds the actor of this name."""
    return RELAY + name, 0


class Called:
    """The side of the actor: frames are put in and fetched by calls of the other side's."""

    def __init__(self, caller: Any) -> None:
        self._caller = caller  # an actor, or None: Ray ends this process when such a caller is gone
        self._looking: Any = None
        self._frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._early: dict[int, bytes] = {}
        self._next = 0
        self._leaving: list[bytes] = []
        self._changed = threading.Condition()
        self.closed = False

    def send(self, message: Mapping[str, Any]) -> None:
        frame = b"".join(encode(message))
        with self._changed:
            if not self.closed and len(self._leaving) < _MAX_WAITING:
                self._leaving.append(frame)
                self._changed.notify()
                return
        self.close()
        raise LinkLost("the link by way of Ray is lost: the other side takes nothing")

    def receive(self) -> dict[str, Any]:
        while True:
            try:
                frame = self._frames.get(timeout=_FETCH_S)
            except queue.Empty:
                self._look()
                if not self.closed:
                    continue
                frame = None
            if frame is None:
                raise LinkLost("the link by way of Ray is lost: one side has closed it")
            return _unpacked(frame)

    def _look(self) -> None:
        """Close if the caller is gone, which Ray says to whoever asks it something."""
        import ray

        if self._caller is None:
            return
        if self._looking is not None:
            if not ray.wait([self._looking], timeout=0)[0]:
                return
            try:
                ray.get(self._looking)
            except Exception:
                self.close()
                return
        self._looking = self._caller.__ray_ready__.remote()

    @property
    def over(self) -> bool:
        """Is it closed, and everything fetched?"""
        return self.closed and not self._leaving

    def close(self) -> None:
        with self._changed:
            self.closed = True
            self._changed.notify_all()
        self._frames.put(None)

    def put(self, number: int, frame: bytes) -> bool:
        """Take the frame in, in its turn: Ray may overtake. False where this side has hung up."""
        with self._changed:
            if self.closed:
                return False
            self._early[number] = frame
            while (found := self._early.pop(self._next, None)) is not None:
                self._next += 1
                self._frames.put(found)
            return True

    def fetch(self) -> tuple[list[bytes], bool]:
        """What goes out, and whether more may follow; waits for it, but not for long."""
        with self._changed:
            self._changed.wait_for(lambda: self._leaving or self.closed, _FETCH_S)
            frames, self._leaving = self._leaving, []
            return frames, not self.closed


class RelayDoor:
    """What an actor needs so that others can have links to it.

    Args:
        key, let_in: as of a `Door`.
    """

    def __init__(self, key: bytes, let_in: Callable[[dict[str, Any], Link], None]) -> None:
        self._key = key
        self._let_in = let_in
        self._links: dict[str, Called] = {}

    def knock(self, channel: str, proof: bytes, hello: bytes, caller: Any) -> bytes | None:
        """Begin a link, for whoever proves to know the key; the answer proves it too.

        Args:
            hello: a frame that tells who it is.
            caller: its actor, if it is one.
        """
        links = {name: link for name, link in self._links.items() if not link.over}
        self._links = links
        known = hmac.compare_digest(proof, _proof(self._key, b"caller", channel))
        if not known or channel in links or len(links) >= _MAX_LINKS:
            return None
        who = _unpacked(hello)
        link = links[channel] = Called(caller)
        threading.Thread(target=welcome, args=(who, link, self._let_in), daemon=True).start()
        return _proof(self._key, b"door", channel)

    def deliver(self, channel: str, number: int, frame: bytes) -> bool:
        """The caller's n-th frame; False: nobody is there to take it."""
        link = self._links.get(channel)
        return link is not None and link.put(number, frame)

    def fetch(self, channel: str) -> tuple[list[bytes], bool]:
        """Frames for the caller, and whether more may follow."""
        link = self._links.get(channel)
        return ([], False) if link is None else link.fetch()

    def hang_up(self, channel: str) -> None:
        """The caller has closed."""
        link = self._links.get(channel)
        if link is not None:
            link.close()


class Calling:
    """The side that has called."""

    def __init__(self, actor: Any, channel: str) -> None:
        self._channel = channel
        self._deliver = actor.deliver.options(concurrency_group="relay-in")
        self._hang_up = actor.hang_up.options(concurrency_group="relay-in")
        self._fetch = actor.fetch.options(concurrency_group="relay-out")
        self._sending = threading.Lock()
        self._count = 0
        self._underway: list[tuple[Any, float]] = []
        self._received: list[bytes] = []  # the next one last
        self._closed = False

    def send(self, message: Mapping[str, Any]) -> None:
        frame = b"".join(encode(message))
        with self._sending:
            if self._closed:
                raise LinkLost("the link by way of Ray is lost")
            try:
                self._look()
                sent = self._deliver.remote(self._channel, self._count, frame)
            except LinkLost:
                self.close()
                raise
            except Exception as error:  # Ray has many ways to say that an actor is gone
                self.close()
                raise _lost(error) from None
            self._underway.append((sent, time.monotonic()))
            self._count += 1

    def _look(self) -> None:
        """Raise if what was sent did not arrive."""
        import ray

        if not self._underway:
            return
        refs = [ref for ref, _ in self._underway]
        done, left = ray.wait(refs, num_returns=len(refs), timeout=0)
        if not all(ray.get(done)):
            raise LinkLost("the link by way of Ray is lost: the other side has closed it")
        if left:
            late = set(left)
            self._underway = [entry for entry in self._underway if entry[0] in late]
            if time.monotonic() - self._underway[0][1] > _SAY_S:
                raise LinkLost("the link by way of Ray is lost: the other side takes nothing")
        else:
            self._underway = []

    def receive(self) -> dict[str, Any]:
        import ray

        while not self._received:
            try:
                asked = self._fetch.remote(self._channel)
                until = time.monotonic() + _SAY_S
                while not ray.wait([asked], timeout=_LOOK_S)[0]:
                    if self._closed:
                        raise LinkLost("the link by way of Ray is lost: this side has closed it")
                    if time.monotonic() > until:
                        raise LinkLost("the link by way of Ray is lost: no answer")
                frames, more = ray.get(asked)
            except LinkLost:
                raise
            except Exception as error:
                raise _lost(error) from None
            if not frames and not more:
                raise LinkLost("the link by way of Ray is lost: the other side has closed it")
            self._received = frames[::-1]
        return _unpacked(self._received.pop())

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            try:
                self._hang_up.remote(self._channel)
            except Exception:
                pass  # the actor is gone, or Ray is


def reach(address: Address, key: bytes, who: Mapping[str, Any]) -> Link:
    """A link to whoever is at `address`: by `call` where that is an actor of Ray's, else by `connect`."""
    direct = not address[0].startswith(RELAY)
    return connect(address, key, who) if direct else call(address, key, who)


def call(address: Address, key: bytes, who: Mapping[str, Any], timeout_s: float = 5.0) -> Calling:
    """As `connect`, for the address of an actor."""
    import ray

    name, channel = address[0].removeprefix(RELAY), secrets.token_hex(16)
    try:
        actor: Any = ray.get_actor(name, namespace=NAMESPACE)
        context = ray.get_runtime_context()
        caller = context.current_actor if context.get_actor_id() else None
        knock = actor.knock.options(concurrency_group="relay-in")
        hello = b"".join(encode(who))
        asked = knock.remote(channel, _proof(key, b"caller", channel), hello, caller)
        answer = ray.get(asked, timeout=timeout_s)
    except Exception as error:
        raise _lost(error) from None
    if answer is None or not hmac.compare_digest(answer, _proof(key, b"door", channel)):
        raise Refused(f"{name}: the cluster's key is another one, or it has too many links")
    return Calling(actor, channel)


def _lost(error: Exception) -> LinkLost:
    return LinkLost(f"the link by way of Ray is lost: {first_line(error)}")


def _proof(key: bytes, role: bytes, channel: str) -> bytes:
    return hmac.digest(key, b"relay" + role + channel.encode(), "sha256")


def _unpacked(frame: bytes) -> dict[str, Any]:
    view = memoryview(frame)
    if len(view) < PREFIX.size:
        raise Garbage("not a message of Verbatim's cluster: too short")
    header, arrays = sizes(bytes(view[: PREFIX.size]))
    if len(view) != PREFIX.size + header + arrays:
        raise Garbage("not a message of Verbatim's cluster: of another size than it says")
    view = view[PREFIX.size :]
    return decode(bytes(view[:header]), bytearray(view[header:]))


__all__ = ["GROUPS", "Called", "Calling", "RelayDoor", "call", "relay_address"]
