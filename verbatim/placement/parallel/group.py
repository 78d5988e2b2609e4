"""The other ranks as rank 0 sees them: messages, answers, and which ranks are lost."""

from __future__ import annotations

import os
import queue
import secrets
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verbatim.errors import TierFailed, VerbatimError
from verbatim.placement.cluster.link import Link, LinkLost, Listener
from verbatim.placement.launcher import HOST, Launcher, WorkerProcess

_COME_S = 120.0  # in which a process that was started has to report: it imports torch
_TELL_S = 3.0  # in which it becomes known who is gone
_END_S = 5.0

Message = dict[str, Any]


class _Connections:
    """The connections. Threads hold these, and not the group, so that it can be garbage-collected."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.links: dict[int, Link] = {}
        self.answers: queue.SimpleQueue[tuple[int, Message]] = queue.SimpleQueue()
        self.lost: dict[int, str] = {}  # rank to its last words, in the order in which they went
        self.changed = threading.Condition()

    def accept(self, who: Message, link: Link) -> None:
        """Accept a rank, and receive its messages until it is gone, in a thread of its own."""
        rank = who.get("rank")
        with self.changed:
            if not isinstance(rank, int) or not 0 < rank < self.size or rank in self.links:
                raise VerbatimError(f"rank {rank!r} is none that is waited for")
            link.send({"welcome": True})
            self.links[rank] = link
            self.changed.notify_all()
        words = ""
        try:
            while True:
                message = link.receive()
                words = str(message.get("gone", ""))
                self.answers.put((rank, message))
        except VerbatimError:
            with self.changed:
                self.lost[rank] = words
                self.changed.notify_all()


class RankGroup:
    """The ranks 1 to `size` - 1, over a connection to each.

    Attributes:
        folder: a private folder, deleted by `close`.
        key, port: what a rank needs to come in.
        processes: those that were started here, by rank; empty where the user started them.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.folder = Path(tempfile.mkdtemp(prefix="verbatim-ranks-"))
        self.key = secrets.token_bytes(32)
        self.processes: dict[int, WorkerProcess] = {}
        self._launchers: list[Launcher] = []
        self._connections = _Connections(size)
        self._listener = Listener(self.key, HOST, self._connections.accept)
        self.port = self._listener.port
        # Runs if it is never closed; its arguments must not refer to this object.
        self._end = weakref.finalize(
            self,
            _end,
            os.getpid(),
            self.folder,
            self._listener,
            self._connections.links,
            self.processes,
            self._launchers,
        )

    def start(self) -> None:
        """Start the processes."""
        launcher = Launcher("verbatim.placement.parallel.worker:serve")
        self._launchers.append(launcher)
        for rank in range(1, self.size):
            self.processes[rank] = launcher.start(rank=rank, port=self.port, key=self.key.hex())

    def wait_for_all(self, timeout_s: float = _COME_S) -> None:
        """Wait until each rank is connected.

        Raises:
            TierFailed: one has died, or does not come.
        """
        end = time.monotonic() + timeout_s
        while True:
            with self._connections.changed:
                missing = [
                    rank for rank in range(1, self.size) if rank not in self._connections.links
                ]
                if not missing:
                    return
                self._connections.changed.wait(0.1)
            for rank in missing:
                process = self.processes.get(rank)
                if process is not None and process.returncode is not None:
                    raise TierFailed(self._said(rank, "it ended before it was ready"))
            if time.monotonic() > end:
                raise TierFailed(self._said(missing[0], f"it did not come within {timeout_s:g} s"))

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send a message to all ranks.

        Raises:
            TierFailed: one is gone; the message names it. The others have got it.
        """
        lost = None
        for link in self._connections.links.values():
            try:
                link.send(message)
            except LinkLost as error:
                lost = error
        if lost is not None:
            raise self.failure(lost)

    def answers(self, timeout_s: float) -> dict[int, Message]:
        """Return one message of each rank.

        Raises:
            TierFailed: one is gone, or does not answer.
        """
        found: dict[int, Message] = {}
        end = time.monotonic() + timeout_s
        while len(found) < self.size - 1:
            try:
                rank, message = self._connections.answers.get(timeout=0.1)
            except queue.Empty:
                if self._connections.lost:
                    raise self.failure(None) from None
                if time.monotonic() > end:
                    rank = next(r for r in range(1, self.size) if r not in found)
                    late = f"it did not answer within {timeout_s:g} s"
                    raise TierFailed(self._said(rank, late)) from None
                continue
            found[rank] = message
        return found

    def failure(self, error: Exception | None) -> TierFailed:
        """Return the error that names the lost rank, once it is known."""
        with self._connections.changed:
            self._connections.changed.wait_for(lambda: bool(self._connections.lost), _TELL_S)
        time.sleep(0.05)  # for the last words of others, which may have caused it
        with self._connections.changed:
            lost = dict(self._connections.lost)
        # Who went without a word took the others along.
        for rank, words in sorted(lost.items(), key=lambda entry: bool(entry[1])):
            return TierFailed(self._said(rank, words or "its connection is lost"))
        stuck = f"no rank is known to be gone, but one does not answer: {error}"
        return TierFailed(f"of {self.size} ranks, {stuck}")

    def _said(self, rank: int, what: str) -> str:
        process = self.processes.get(rank)
        if process is not None:
            ended = f" has ended ({process.ended})" if process.wait(0.5) else ""
            what = f"process {process.pid}{ended}: {what}"
        return f"rank {rank} of {self.size}: {what}"

    def close(self) -> None:
        """End the processes, and free everything; a second call does nothing."""
        self._end()


def _end(
    pid: int,
    folder: Path,
    listener: Listener,
    links: dict[int, Link],
    processes: dict[int, WorkerProcess],
    launchers: list[Launcher],
) -> None:
    if os.getpid() != pid:  # a forked child
        return
    listener.close()
    for link in links.values():
        try:
            link.send({"do": "close"})
        except LinkLost:
            pass
        link.close()
    end = time.monotonic() + _END_S
    for process in processes.values():
        process.wait(max(0.0, end - time.monotonic()))
    for launcher in launchers:
        launcher.close()
    shutil.rmtree(folder, ignore_errors=True)
