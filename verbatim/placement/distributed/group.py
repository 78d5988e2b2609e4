"""Stages and ranks as seen by their head: calls, answers, and detection of lost processes."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import repeat, zip_longest
from typing import Any

from verbatim.common.shield import Shield
from verbatim.errors import (
    InvalidRequest,
    ModelChanged,
    ModelError,
    NotSupported,
    OutOfBlocks,
    StageFailed,
    UnsupportedModel,
    VerbatimError,
)
from verbatim.placement.distributed.hosts import Host, Hosts
from verbatim.placement.distributed.link import Link, LinkLost, Refused, connect
from verbatim.placement.distributed.served import versions
from verbatim.placement.distributed.wire import Buffer, Message, encode
from verbatim.weights.update import NewWeights

_PING_S = 0.5  # interval between pings while an answer is awaited
_LOADING_S = 60.0  # permitted silence of a process that reads weights or imports libraries

_log = logging.getLogger("verbatim.cluster")

_ERRORS = [InvalidRequest, ModelChanged, ModelError, NotSupported, OutOfBlocks, UnsupportedModel]


class StageGone(StageFailed):
    """Some stages have ended, or do not answer."""


@dataclass(eq=False)
class StageHandle:
    """A stage, and the connection to it."""

    host: Host
    link: Link
    inbox: Inbox
    name: str = ""  # for error messages; "": described by its layers
    index: int = -1
    first: int = 0  # layer
    end: int = 0  # layer
    shape: Message = field(default_factory=dict)  # its part of the model, as reported by the stage
    facts: Message = field(default_factory=dict)  # its process
    number: int = 0  # of the process on its machine
    restarts: int = 0  # how often the process of this stage was replaced
    lost: str | None = None  # the reason why it counts as lost; None while it is alive
    pinged_at: float | None = None  # send time of an unanswered ping

    def __post_init__(self) -> None:
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @property
    def memory_at(self) -> tuple[str, str]:
        """The memory that the stage uses: its machine and the name of its device."""
        return self.facts["machine"], self.facts["device"]

    def __str__(self) -> str:
        why = "" if self.lost is None else f": {self.lost}"
        layers = f"layers {self.first} to {self.end} on {self.host.machine}"
        stage = f"stage {self.index} ({layers})" if self.index >= 0 else self.host.machine
        return f"{self.name or stage}{why}"

    def _listen(self) -> None:
        try:
            while True:
                self.inbox.put((self, self.link.receive()))
        except VerbatimError as error:
            self.inbox.put((self, str(error)))

    def send(self, message: Mapping[str, Any] | list[Buffer]) -> None:
        """Send a message; if that fails, mark the stage as lost."""
        try:
            with Shield().up():  # a partial message would make the connection unusable
                self.link.send(message)
        except LinkLost as error:
            self.lost = self.lost or str(error)

    def give_up(self) -> None:
        """Close the connection, and end the process."""
        self.lost = self.lost or "it was abandoned"
        self.link.close()
        self.host.kill()
        if self._listener is not threading.current_thread():  # a finalizer may run in it
            self._listener.join(1.0)


Inbox = queue.SimpleQueue[tuple[StageHandle, "Message | str"]]


class StageGroup:
    """Processes that serve shares of one model: all stages, or all ranks but the first.

    Args:
        patience_s: seconds without an answer to a ping after which a member is lost.
        step_timeout_s: seconds of computation for one call after which a member is lost.
    """

    def __init__(self, hosts: Hosts, *, patience_s: float, step_timeout_s: float) -> None:
        self.hosts = hosts
        self.members: list[StageHandle] = []
        self.patience_s = patience_s
        self.step_timeout_s = step_timeout_s
        self._inbox: Inbox = queue.SimpleQueue()
        self._calls = 0
        self._called: list[StageHandle] = []  # members of the last call
        self._answers: dict[int, Message] = {}  # of the last call, by call number; {}: none yet
        self._reports: list[tuple[StageHandle, Message]] = []  # about work that ended or failed
        self._next_ping = 0.0
        self._last_pump = 0.0

    def launch(self, count: int, avoid: Iterable[str] = ()) -> list[StageHandle]:
        """Start processes without layers, on machines other than `avoid`, and connect to them.

        Raises:
            NoHost: no machine has room.
            StageGone: a process has ended, or does not answer.
            NotSupported: a process has other versions than this one.
        """
        launched: list[StageHandle] = []
        hosts = self.hosts.start(count, set(avoid))
        try:
            for host in hosts:
                link = connect(host.address, self.hosts.key, {"role": "head"}, self.patience_s)
                launched.append(StageHandle(host, link, self._inbox))
            answers = self.call("facts", launched, patient=True)
            for member, facts in zip(launched, answers, strict=True):
                member.facts = facts
                for name, ours in versions().items():
                    if facts.get(name) != ours:
                        raise NotSupported(
                            f"{member.host.machine} has {name} {facts.get(name)}, but this machine has "
                            f"{ours}: all machines of a cluster need the same"
                        )
            self._prepare(launched)
        except BaseException as error:
            for member in launched:
                member.give_up()
            for host in hosts:
                host.kill()
            if isinstance(error, LinkLost | Refused):
                raise StageGone(str(error)) from None
            raise
        return launched

    def _prepare(self, launched: list[StageHandle]) -> None:
        """Initialize new processes before their first use; raises the errors of `call`."""

    @property
    def lost(self) -> list[StageHandle]:
        return [member for member in self.members if member.lost is not None]

    def call(
        self,
        do: str,
        members: list[StageHandle] | None = None,
        per_member: Iterable[Message] | None = None,
        *,
        patient: bool = False,
        meanwhile: Callable[[], object] = lambda: None,
        **fields: Any,
    ) -> list[Any]:
        """Make a call on several members at the same time, and return their answers.

        Args:
            members: the members to call; None: all.
            per_member: further arguments of each member.
            fields: the arguments common to all.
            patient: whether the call has no time limit, such as reading weights.
            meanwhile: called repeatedly while answers are awaited; it may raise.

        Raises:
            StageGone: a member is lost.
            VerbatimError: the call failed on a member.
        """
        members = self.members if members is None else members
        self._called, self._answers = members, {}
        for member, more in zip(members, per_member or repeat({}, len(members)), strict=True):
            self._calls += 1
            self._answers[self._calls] = {}
            member.send({"do": do, **fields, **more, "call": self._calls})
        while not all(self._answers.values()):
            self.check(members)
            meanwhile()
            self.pump(patient=patient)
        answers, self._answers = [*self._answers.values()], {}
        for member, answer in zip(members, answers, strict=True):
            if "error" in answer:
                raise error_of(answer["error"], f"{member}, {do}")
        return [answer["result"] for answer in answers]

    def send_weights(self, do: str, new: NewWeights, names: Iterable[Iterable[str]]) -> list[Any]:
        """Send each member the new weights of its names, in pieces; return the answers to the last call.

        On an error, all members discard the weights that they have prepared.
        """
        answers: list[Any] = []
        try:
            for pieces in zip_longest(*map(new.messages, names), fillvalue={}):
                per_member = [{"tensors": piece} for piece in pieces]
                answers = self.call(do, per_member=per_member, patient=True)
        except BaseException:
            self.notify("drop_weights", self.members)
            raise
        return answers

    def notify(self, do: str, members: Iterable[StageHandle], **fields: Any) -> None:
        """Make a call without waiting for answers; mark members that can't be reached as lost."""
        encoded = encode({"do": do, **fields})
        # All or none: a stage without this work would close its connection to the stage before.
        with Shield().up():
            for member in members:
                member.send(encoded)

    def check(self, members: Iterable[StageHandle] | None = None) -> None:
        """Raise StageGone if one of `members` is lost (None: of all members)."""
        members = self.members if members is None else members
        if gone := [member for member in members if member.lost is not None]:
            raise StageGone("; ".join(map(str, gone)))

    def reports(self) -> list[tuple[StageHandle, Message]]:
        """Return and clear the reports received so far, about work that ended or failed."""
        received, self._reports = self._reports, []
        return received

    def pump(self, timeout_s: float = _PING_S, *, patient: bool = False) -> None:
        """Handle the next message if one arrives in time, and ping the members when it is due."""
        with suppress(queue.Empty):
            self._handle(*self._inbox.get(timeout=timeout_s), patient=patient)
        now = time.monotonic()
        if now >= self._next_ping:
            self._ping_members(now, max(self.patience_s, _LOADING_S if patient else 0.0))

    def _ping_members(self, now: float, patience_s: float) -> None:
        # If no messages were read for a while, answers may be unread, so no member counts as silent.
        idle = now - self._last_pump > 2 * _PING_S + 0.5
        self._next_ping, self._last_pump = now + _PING_S, now
        waited_for = [m for m in {*self.members, *self._called} if m.lost is None]
        for member in waited_for:
            if member.pinged_at is None or idle:
                member.pinged_at = now
                member.send({"do": "ping"})
            elif now - member.pinged_at > patience_s:
                member.lost = f"silent for {now - member.pinged_at:.1f} s"

    def _handle(self, member: StageHandle, message: Message | str, *, patient: bool) -> None:
        if isinstance(message, str):
            member.lost = member.lost or message
            return
        member.pinged_at = None  # any message shows that it is alive
        if "busy_s" in message:  # the answer to a ping
            if message["busy_s"] > self.step_timeout_s and not patient:
                member.lost = f"busy with one piece of work for {message['busy_s']:.1f} s"
        elif message.get("call") is None:
            self._reports.append((member, message))
        elif message["call"] in self._answers:
            self._answers[message["call"]] = message

    def close(self, process: int | None = None) -> None:
        """End all members; no effect in another process than `process`, such as a forked child."""
        if process in (None, os.getpid()):
            for member in self.members:
                if member.lost is None:  # the rank's program waits for this message
                    member.send({"do": "deliver", "message": {"do": "close"}})
                member.give_up()
            self.hosts.close()


def error_of(described: list[str], where: str) -> Exception:
    """Return the error that a member reported as its class name and text."""
    kind, text = described
    for error_class in (*_ERRORS, MemoryError):
        if error_class.__name__ == kind:
            return error_class(f"{text} ({where})")
    return VerbatimError(f"{kind}: {text} ({where})")
