"""One stage of a cluster: a process that holds some layers and runs batches through them.

A stage takes orders from the head, where the engine is, and hidden states from the stage before. It computes
one thing at a time; pings and new connections are answered at any time. Every piece of work names its epoch,
step and micro-batch: what is of another epoch, or was done before, is not done again, so a repeated one does
no harm.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from verbatim.errors import VerbatimError
from verbatim.placement.distributed.link import Address, Link, LinkLost, Listener
from verbatim.placement.distributed.neighbours import Neighbours
from verbatim.placement.distributed.wire import Garbage, Message
from verbatim.placement.distributed.work import Work, answer, described


class Stage:
    """Serves one head until it is closed or the head is gone.

    Args:
        key: the cluster's secret.
        host: the address at which other machines reach this one.
        share: the `Served` that is called here.
        ended: called when there is nothing more to do here.

    Attributes:
        told: what the head tells the program around this stage; None once the stage has ended.
    """

    def __init__(
        self,
        key: bytes,
        host: str,
        share: Any,
        ended: Callable[[], object] = lambda: None,
    ) -> None:
        self._ended = ended
        self.told: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[tuple[Link, Message] | None] = queue.SimpleQueue()
        self._share = share
        self._neighbours = Neighbours(key)
        self._steps = Work(share, self._neighbours)
        self._computing = threading.Lock()
        self._busy_since: float | None = None
        self._listener = Listener(key, host, self.accept)
        self.address: Address = (host, self._listener.port)
        self._worker = threading.Thread(target=self._work, name="verbatim-stage", daemon=True)
        self._worker.start()

    def close(self) -> None:
        """Close all connections, and free everything."""
        if self._neighbours.close():
            self._listener.close()
            self._inbox.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the computation in progress."""
        self._worker.join(timeout_s)
        if self._computing.acquire(timeout=timeout_s):
            self._computing.release()

    def status(self) -> Message:
        """Return the state of this stage, as plain values."""
        neighbours = self._neighbours
        return {
            **self._share.status(),
            **self._steps.status(),
            "index": neighbours.index,
            "epoch": neighbours.epoch,
            "pid": os.getpid(),
            "address": list(self.address),
            "restarts": neighbours.restarts,
            "hop_s": neighbours.hop_s,
            "serving": neighbours.serving,
        }

    # What is heard: a thread for each connection.

    def accept(self, who: Message, link: Link) -> Callable[[], object]:
        """Return what serves an authenticated peer until the link is lost."""
        role = who.get("role")
        if role == "head":
            self._neighbours.take_head(link)
            return lambda: self._serve(link, self._order, self.close)
        if role == "stage":
            self._neighbours.take_before(who, link)
            link.room = self._steps.room
            return lambda: self._serve(link, self._hear, link.close)
        raise VerbatimError(f"role {role!r} is not known")

    def _serve(
        self, link: Link, take: Callable[[Link, Message], object], end: Callable[[], object]
    ) -> None:
        try:
            while True:
                take(link, link.receive())
        except (LinkLost, Garbage):
            pass
        finally:
            end()

    def _hear(self, link: Link, message: Message) -> None:
        """Handle a message of the previous stage."""
        if message.get("do") == "echo":
            link.send({})
        else:
            self._compute(link, message)

    def _order(self, link: Link, message: Message) -> None:
        """Handle a message of the head; most are queued for the computing thread."""
        do = str(message.get("do"))
        if do == "ping":
            answer(link, message, self._ping)
        elif do == "epoch":
            answer(link, message, self._neighbours.begin_epoch)
        elif do == "link":  # it may take seconds, in which the head asks who is still there
            order = (link, message, self._neighbours.connect)
            threading.Thread(target=answer, args=order, daemon=True).start()
        else:
            self._inbox.put((link, message))

    def _ping(self, message: Message) -> Message:
        since = self._busy_since
        busy_s = 0.0 if since is None else time.monotonic() - since
        return {"busy_s": busy_s, "step": self._steps.done.step}

    # What is done: one thing at a time.

    def _work(self) -> None:
        """Handle queued messages, one after another."""
        while (entry := self._inbox.get()) is not None:
            self._compute(*entry)
        with self._computing:
            self._share.close()
        self.told.put(None)
        self._ended()

    def _compute(self, link: Link, message: Message) -> None:
        """Run one piece of work. The thread that receives hidden states computes them: waking another one
        takes as long as the message itself.
        """
        with self._computing:
            self._busy_since = time.monotonic()
            try:
                self._do(link, message)
            except Exception as error:  # a message that is not what it should be
                told = {"call": message.get("call"), "error": described(error)}
                self._neighbours.tell(told)
            self._busy_since = None

    def _do(self, link: Link, message: Message) -> None:
        do = message.get("do", "")
        if do == "rows" or do == "work":  # first: what comes in every step
            self._steps.take(message)
        elif do in self._share.calls:
            answer(link, message, self._share.call)
        elif do == "tell":
            self.told.put(message["told"])
        elif do == "status":
            spans = list(self._steps.spans)
            answer(link, message, lambda _: {**self.status(), "spans": spans})
        elif do in ("draw", "logits"):
            self._steps.when_made(link, message)
        else:
            raise VerbatimError(f"{do!r} is nothing that a stage can do")
