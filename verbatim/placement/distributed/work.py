"""The steps of a stage: run its layers, and send hidden states on, or sample."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from verbatim.batch import Batch
from verbatim.errors import VerbatimError
from verbatim.placement.distributed.layers import Layers
from verbatim.placement.distributed.link import Link, LinkLost
from verbatim.placement.distributed.neighbours import Neighbours
from verbatim.placement.distributed.wire import Mark, Message
from verbatim.protocols import Forward

_SPANS = 4096  # of the past, for benchmarks
_RECENT_S = 10.0  # over which the speed is told


class Work:
    """The steps of one stage. One thread at a time may call it.

    Attributes:
        done: the last piece of work that was begun; what is not behind it is refused.
        spans: of the last pieces: step, micro-batch, begin and end by this machine's `time.monotonic`, rows.
    """

    def __init__(self, layers: Layers, neighbours: Neighbours) -> None:
        self._layers = layers
        self._neighbours = neighbours
        self.done = Mark(0, 0, 0)
        self.num_frames = 0
        self.num_tokens = 0
        self.busy_s = 0.0
        self.spans: deque[tuple[int, int, float, float, int]] = deque(maxlen=_SPANS)
        # Micro-batches, each with memory for its hidden states, and hidden states that have come.
        self._work: dict[Mark, Message] = {}
        self._rows: dict[Mark, bytearray | memoryview] = {}
        # By step: what the last stage has computed, and the questions that wait for it.
        self._computed: dict[int, list[Forward]] = {}
        self._waiting: dict[int, list[tuple[Link, Message]]] = {}

    def status(self) -> Message:
        """Return counts and timings, as plain values."""
        since = time.monotonic() - _RECENT_S
        recent = sum(tokens for *_, end, tokens in self.spans.copy() if end > since)
        return {
            "frames": self.num_frames,
            "tokens": self.num_tokens,
            "busy_s": self.busy_s,
            "tokens_per_s": recent / _RECENT_S,  # that went through here lately, waiting included
        }

    def room(self, mark: Mark, size: int) -> memoryview | None:
        """Return the memory for so many bytes of hidden states, once, if their micro-batch is here."""
        work = self._work.get(mark, {})
        return work.pop("room") if len(work.get("room", ())) == size else None

    def take(self, message: Message) -> None:
        """Take one half of a micro-batch: the work from the head, or hidden states from the previous stage.

        The head tells all stages at once, so that batches are decoded before their hidden states arrive.
        """
        mark = Mark(-1, -1, -1)
        try:
            mark = message.get("mark") or Mark(message["epoch"], message["step"], message["part"])
            if mark.epoch != self._neighbours.epoch or mark <= self.done:
                raise VerbatimError(f"{mark} is of the past: this stage has done {self.done}")
            if "states" in message:
                self._rows[mark] = message["states"]
            else:
                self._work[mark] = self._checked(message)
            work = self._work.get(mark)
            if work is not None and ("hidden" not in work or mark in self._rows):
                self._run(mark, work)
        except LinkLost as error:
            self._neighbours.tell({**_failed(mark), "unreachable": str(error)})
        except Exception as error:
            self._neighbours.tell({**_failed(mark), "error": described(error)})

    def _checked(self, work: Message) -> Message:
        index, batch = self._neighbours.index, work["batch"]
        if not isinstance(batch, Batch):
            raise TypeError("the batch of a piece of work is none")
        if index in work["fresh"]:
            # Of blocks whose contents came with its replay, or are gone.
            batch.block_copies = []
        if work["first"] != index:
            hidden = work["hidden"] = self._layers.entering(batch.num_tokens)
            work["room"] = hidden.flatten().view(torch.uint8).numpy().data
        return work

    def _run(self, mark: Mark, work: Message) -> None:
        """Run one micro-batch, and send it to the next stage."""
        self.done = mark
        index, batch, hidden = self._neighbours.index, work["batch"], work.get("hidden")
        if "room" in work and hidden is not None:  # they came before it
            work["room"][:] = self._rows[mark]
        kept = work["kept"] and work["first"] == index
        begin = time.monotonic()
        out = self._layers.run(batch, hidden, kept=kept)
        end = time.monotonic()  # from here to the `begin` of the next stage it is a hop
        try:
            if work["stop"] > index:
                self._neighbours.pass_on(mark, out.logits)
            elif work["replays"]:
                self._neighbours.tell({"ended": list(mark)})
            else:
                self._keep(mark.step, work["parts"], out)
        finally:
            if not kept:
                self._layers.keep(batch, out.logits)
            self._note(mark, batch.num_tokens, begin, end)

    def _note(self, mark: Mark, num_tokens: int, begin: float, end: float) -> None:
        """Record the time of a piece of work, and forget those before it."""
        for halves in (self._work, self._rows):
            for old in [other for other in halves if other <= mark]:
                del halves[old]
        self.num_frames += 1
        self.num_tokens += num_tokens
        self.busy_s += end - begin
        self.spans.append((mark.step, mark.part, begin, end, num_tokens))

    def _keep(self, step: int, parts: int, computed: Forward) -> None:
        """Keep the logits of the last stage until they are sampled."""
        for past in (self._computed, self._waiting):
            for old in [other for other in past if other < step]:
                del past[old]
        self._computed.setdefault(step, []).append(computed)
        if len(self._computed[step]) == parts:  # else one of them failed on the way
            for link, message in self._waiting.pop(step, []):
                answer(link, message, self._draw)

    def when_made(self, link: Link, message: Message) -> None:
        """Draw, or send logits, once all of a step is computed."""
        step = message.get("step", 0)
        if message.get("epoch") != self._neighbours.epoch or step < self.done.step:
            stale = VerbatimError(f"step {step} of epoch {message.get('epoch')} is of the past")
            self._neighbours.tell({"call": message.get("call"), "error": described(stale)})
        elif len(self._computed.get(step, ())) == message["parts"]:
            answer(link, message, self._draw)
        else:
            self._waiting.setdefault(step, []).append((link, message))

    def _draw(self, message: Message) -> Message:
        parts = self._computed[message["step"]]
        rows = [part.logits for part in parts]
        logits = torch.cat(rows) if len(rows) > 1 else rows[0]
        if message["do"] == "logits":
            return {"logits": logits[message["rows"]].float()}
        hidden = [part.hidden for part in parts if part.hidden is not None]
        return {
            "draws": self._layers.running.sample(Forward(logits), message["plan"]),
            "hidden": torch.cat(hidden) if hidden else None,
        }


def answer(link: Link, message: Message, do: Callable[[Message], Any]) -> None:
    """Call a function with a message, and send its error back, and its result if it is asked for."""
    told: Message = {"call": message.get("call")}
    try:
        told["result"] = do(message)
    except Exception as error:
        told["error"] = described(error)
    if "call" not in message and "error" not in told:
        return
    try:
        link.send(told)
    except LinkLost:
        pass  # the head is gone, which the thread that reads from it notices


def described(error: Exception) -> list[str]:
    """Describe an error as plain data: class name and message."""
    return [type(error).__name__, str(error) or type(error).__name__]


def _failed(mark: Mark) -> Message:
    return {"failed": mark.step, "epoch": mark.epoch}
