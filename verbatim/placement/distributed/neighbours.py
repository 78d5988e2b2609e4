"""A stage's connections: to the head, the previous and the next stage."""

from __future__ import annotations

import threading
import time

from torch import Tensor

from verbatim.errors import VerbatimError
from verbatim.placement.distributed.link import Link, LinkLost, connect
from verbatim.placement.distributed.wire import Garbage, Mark, Message, encode_rows

_ECHOES = 3  # round trips by which a new connection is measured


class Neighbours:
    """The connections of one stage; any thread may use them.

    Attributes:
        epoch: raised whenever all stages are connected anew.
        index: this stage's place in the line.
        restarts: how often that place was filled anew.
        hop_s: seconds that a small message takes to the stage behind, when the connection was made.
    """

    def __init__(self, key: bytes) -> None:
        self.epoch = 0
        self.index = 0
        self.restarts = 0
        self.hop_s: float | None = None
        self._key = key
        self._head: Link | None = None
        self._next: Link | None = None
        self._before: Link | None = None
        self._closed = False
        self._lock = threading.Lock()

    @property
    def serving(self) -> bool:
        """Return whether there is a head."""
        return self._head is not None

    def take_head(self, link: Link) -> None:
        """Serve this head; VerbatimError if there is one."""
        with self._lock:
            if self._head is not None or self._closed:
                raise VerbatimError("this stage serves another head, or is closed")
            self._head = link

    def take_before(self, who: Message, link: Link) -> None:
        """Receive from this previous stage; VerbatimError if its epoch or index is wrong."""
        with self._lock:
            if (who.get("epoch"), who.get("index")) != (self.epoch, self.index - 1):
                raise VerbatimError(
                    f"stage {who.get('index')} of epoch {who.get('epoch')} called stage "
                    f"{self.index} of epoch {self.epoch}"
                )
            before, self._before = self._before, link
        _close(before)

    def begin_epoch(self, message: Message) -> None:
        """Close all connections to other stages."""
        with self._lock:
            links = [self._next, self._before]
            self.epoch, self.index = int(message["epoch"]), int(message["index"])
            self.restarts = int(message["restarts"])
            self._next = self._before = None
            self.hop_s = None
        _close(*links)

    def connect(self, message: Message) -> Message:
        """Connect to the next stage; return `unreachable`, the reason, if that fails."""
        host, port = message["next"]
        who = {"role": "stage", "epoch": message["epoch"], "index": self.index}
        try:
            link = connect((host, int(port)), self._key, who)
            hop_s = _half_round_trip(link)
        except LinkLost as error:
            return {"unreachable": str(error)}
        with self._lock:
            if self.epoch != message["epoch"]:
                link.close()
                raise VerbatimError(f"epoch {message['epoch']} is over")
            self._next, self.hop_s = link, hop_s
        threading.Thread(target=self._watch, args=(link, message["epoch"]), daemon=True).start()
        return {}

    def _watch(self, link: Link, epoch: int) -> None:
        """Report to the head when the next stage is unreachable: sent messages may be lost."""
        try:
            while True:
                link.receive()  # it says nothing
        except (LinkLost, Garbage) as error:
            link.close()
            if self.epoch == epoch and not self._closed:
                self.tell({"epoch": epoch, "unreachable": str(error)})

    def pass_on(self, mark: Mark, hidden: Tensor) -> None:
        """Send to the next stage, unless that epoch is over; LinkLost if it can't be reached."""
        link = self._next  # before the epoch is looked at, which changes first
        if self.epoch != mark.epoch:
            return
        if link is None:
            raise LinkLost(f"stage {self.index} has no connection to stage {self.index + 1}")
        link.send(encode_rows(mark, hidden))

    def tell(self, message: Message) -> None:
        """Send a report to the head, if there is one."""
        head = self._head
        if head is not None:
            try:
                head.send(message)
            except LinkLost:
                pass  # the thread that reads from it notices

    def close(self) -> bool:
        """Close all connections; return False if they were closed before."""
        with self._lock:
            if self._closed:
                return False
            self._closed = True
        _close(self._head, self._next, self._before)
        return True


def _close(*links: Link | None) -> None:
    for link in links:
        if link is not None:
            link.close()


def _half_round_trip(link: Link) -> float:
    """Measure the one-way latency of a small message in seconds, the best of a few. The link must be idle."""
    best = float("inf")
    for _ in range(_ECHOES):
        begin = time.perf_counter()
        link.send({"do": "echo"})
        link.receive()
        best = min(best, time.perf_counter() - begin)
    return best / 2
