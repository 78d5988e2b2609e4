"""Stages and ranks as their head sees them: calls, answers, and which are alive."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import repeat, zip_longest
from typing import Any

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
from verbatim.shield import Shield
from verbatim.weights.update import NewWeights

_PING_S = 0.5  # between two looks at who is still there, while something is waited for
_LOADING_S = 60.0  # who reads weights and imports libraries may be silent for so long

_log = logging.getLogger("verbatim.cluster")


_ERRORS = {
    kind.__name__: kind
    for kind in (
        *(InvalidRequest, ModelChanged, ModelError, NotSupported, OutOfBlocks, UnsupportedModel),
        MemoryError,
    )
}


class StageGone(StageFailed):
    """Some stages no longer answer, or do not at first."""


class StageHandle:
    """A stage, and the connection to it.

    Attributes:
        first, end: its layers.
        shape: what it told of its part of the model.
        lost: why it is given up; None while it is there.
        number: which of the processes of its machine it is, from 0.
        restarts: how often this place in the line was filled anew.
    """

    def __init__(self, host: Host, link: Link, inbox: Inbox) -> None:
        self.host = host
        self.link = link
        self.name = ""  # in errors; "": that of a stage with layers
        self.index = -1
        self.first = self.end = self.number = 0
        self.shape: Message = {}
        self.facts: Message = {}
        self.restarts = 0
        self.lost: str | None = None
        self.asked: float | None = None  # when a ping went out that isn't answered
        self._listener = threading.Thread(target=self._listen, args=(inbox,), daemon=True)
        self._listener.start()

    @property
    def memory_at(self) -> tuple[str, str]:
        """The memory that it uses: that of its machine, or of a GPU."""
        return self.host.machine, self.facts["device"]

    def __str__(self) -> str:
        why = "" if self.lost is None else f": {self.lost}"
        layers = f"layers {self.first} to {self.end} on {self.host.machine}"
        stage = f"stage {self.index} ({layers})" if self.index >= 0 else self.host.machine
        return f"{self.name or stage}{why}"

    def _listen(self, inbox: Inbox) -> None:
        try:
            while True:
                inbox.put((self, self.link.receive()))
        except VerbatimError as error:
            inbox.put((self, str(error)))

    def send(self, message: Mapping[str, Any] | list[Buffer]) -> None:
        """Send, or mark the stage as lost."""
        try:
            with Shield().up():  # half a message would be the end of the connection
                self.link.send(message)
        except LinkLost as error:
            self.lost = self.lost or str(error)

    def give_up(self) -> None:
        """Close the connection, and end its process."""
        self.lost = self.lost or "it was given up"
        self.link.close()
        self.host.kill()
        self._listener.join(1.0)


Inbox = queue.SimpleQueue[tuple[StageHandle, "Message | str"]]


class StageGroup:
    """Processes that serve shares of one model: all stages, or all ranks but the first.

    Args:
        hosts: where their processes come from.
        patience_s: a stage that doesn't answer a ping for so long is lost.
        step_timeout_s: so is one that computes for so long on one piece of work.
    """

    def __init__(self, hosts: Hosts, *, patience_s: float, step_timeout_s: float) -> None:
        self.hosts = hosts
        self.members: list[StageHandle] = []
        self.patience_s = patience_s
        self.step_timeout_s = step_timeout_s
        self._inbox: Inbox = queue.SimpleQueue()
        self._calls = 0
        self._asked: list[StageHandle] = []  # by the last call
        self._answers: dict[int, Message] = {}  # to it, by number; empty so far
        self._reports: list[tuple[StageHandle, Message]] = []  # of work that ended or failed
        self._next_ping = 0.0
        self._last_pump = 0.0

    def launch(self, count: int, avoid: Iterable[str] = ()) -> list[StageHandle]:
        """Launch processes without layers, of the same versions as this one.

        Args:
            avoid: machines that are of no use.

        Raises:
            NoHost: there is no machine for them.
            StageGone: one has ended, or does not answer.
            NotSupported: one of them runs other versions.
        """
        found: list[StageHandle] = []
        hosts = self.hosts.start(count, set(avoid))
        try:
            for host in hosts:
                link = connect(host.address, self.hosts.key, {"role": "head"}, self.patience_s)
                found.append(StageHandle(host, link, self._inbox))
            answers = self.call("facts", found, patient=True)
            for member, facts in zip(found, answers, strict=True):
                member.facts = facts
                self._check_versions(member)
            self._prepare(found)
        except BaseException as error:
            for member in found:
                member.give_up()
            for host in hosts:
                host.kill()
            if isinstance(error, LinkLost | Refused):
                raise StageGone(str(error)) from None
            raise
        return found

    def _prepare(self, launched: list[StageHandle]) -> None:
        """Tell new processes what they need to know first; errors as of `call`."""

    def _check_versions(self, member: StageHandle) -> None:
        for name, ours in versions().items():
            theirs = member.facts.get(name)
            if theirs != ours:
                raise NotSupported(
                    f"{member.host.machine} has {name} {theirs}, and this machine has {ours}: all "
                    "machines of a cluster need the same"
                )

    @property
    def lost(self) -> list[StageHandle]:
        return [member for member in self.members if member.lost is not None]

    def call(
        self,
        do: str,
        members: list[StageHandle] | None = None,
        own: Iterable[Message] | None = None,
        *,
        patient: bool = False,
        meanwhile: Callable[[], object] = lambda: None,
        **fields: Any,
    ) -> list[Any]:
        """Let stages make a call at the same time, and return their answers.

        Args:
            members: which ones; None: all.
            own: further fields for each of them.
            fields: the arguments of all.
            patient: what they do may take any time, as reading weights does.
            meanwhile: called whenever something has come in; it may raise.

        Raises:
            StageGone: one of them is lost.
            VerbatimError: one could not do what was asked for.
        """
        members = self.members if members is None else members
        self._asked, self._answers = members, {}
        for member, more in zip(members, own or repeat({}, len(members)), strict=True):
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

    def send_weights(
        self, do: str, new: NewWeights, names: Iterable[Iterable[str]], **fields: Any
    ) -> list[Any]:
        """Send all members new weights, each those of its names, by a call for each piece of them.

        Returns:
            The answers to the last piece; errors as of `call`.
        """
        answers: list[Any] = []
        for pieces in zip_longest(*map(new.messages, names), fillvalue={}):
            own = [{"tensors": piece} for piece in pieces]
            answers = self.call(do, own=own, patient=True, **fields)
        return answers

    def tell(self, do: str, members: Iterable[StageHandle], **fields: Any) -> None:
        """Let stages make a call, and wait for no answer; mark those that can't be reached as lost."""
        encoded = encode({"do": do, **fields})
        # A stage without its work would hang up on the one that sends it hidden states.
        with Shield().up():
            for member in members:
                member.send(encoded)

    def check(self, members: Iterable[StageHandle] | None = None) -> None:
        """Raise StageGone if one of these is lost; None: of all members."""
        members = self.members if members is None else members
        if gone := [member for member in members if member.lost is not None]:
            raise StageGone("; ".join(map(str, gone)))

    def reports(self) -> list[tuple[StageHandle, Message]]:
        """Return reports since the last call: work that has ended or failed."""
        found, self._reports = self._reports, []
        return found

    def pump(self, timeout_s: float = _PING_S, *, patient: bool = False) -> None:
        """Receive the next message, and ping the stages now and then."""
        with suppress(queue.Empty):
            self._take(*self._inbox.get(timeout=timeout_s), patient=patient)
        now = time.monotonic()
        if now >= self._next_ping:
            self._look_around(now, max(self.patience_s, _LOADING_S if patient else 0.0))

    def _look_around(self, now: float, patience_s: float) -> None:
        # No message was read for a while: unread answers may be here, so no stage counts as late.
        idle = now - self._last_pump > 2 * _PING_S + 0.5
        self._next_ping, self._last_pump = now + _PING_S, now
        waited_for = [m for m in {*self.members, *self._asked} if m.lost is None]
        for member in waited_for:
            if member.asked is None or idle:
                member.asked = now
                member.send({"do": "ping"})
            elif now - member.asked > patience_s:
                member.lost = f"silent for {now - member.asked:.1f} s"

    def _take(self, member: StageHandle, message: Message | str, *, patient: bool) -> None:
        if isinstance(message, str):
            member.lost = member.lost or message
            return
        member.asked = None  # it is there, whatever it says
        if "busy_s" in message:  # a ping's answer
            if message["busy_s"] > self.step_timeout_s and not patient:
                member.lost = f"busy with one piece of work for {message['busy_s']:.1f} s"
        elif message.get("call") is None:
            self._reports.append((member, message))
        elif message["call"] in self._answers:
            self._answers[message["call"]] = message

    def close(self, process: int | None = None) -> None:
        """End all stages.

        Args:
            process: the one that they belong to; does nothing in a forked child of it.
        """
        if process in (None, os.getpid()):
            for member in self.members:
                if member.lost is None:  # a program around the stage waits for this
                    member.send({"do": "tell", "told": {"do": "close"}})
                member.give_up()
            self.hosts.close()


def error_of(described: list[str], where: str) -> Exception:
    """Return the error that a stage described."""
    kind, text = described
    known = _ERRORS.get(kind)
    if known is not None:
        return known(f"{text} ({where})")
    return VerbatimError(f"{kind}: {text} ({where})")
