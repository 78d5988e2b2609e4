"""The steps of a stage: run its layers, and send hidden states on, or sample."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from verbatim.batch import Batch
from verbatim.errors import VerbatimError
from verbatim.placement.cluster.frame import Expected
from verbatim.placement.cluster.layers import Layers, Made
from verbatim.placement.cluster.link import Link, LinkLost
from verbatim.placement.cluster.messages import Mark
from verbatim.placement.cluster.neighbours import Neighbours

_SPANS = 4096  # of the past, for benchmarks
_RECENT_S = 10.0  # over which the speed is told

Message = dict[str, Any]
_NO_ROWS: Message = {"hidden": None, "busy": [], "hops": [], "sent": ["", 0.0]}


class Work:
    """The steps of one stage. One thread at a time may call it.

    Attributes:
        done: the last piece of work that was begun; what is not behind it is refused.
        spans: of the last pieces: step, micro-batch, begin and end by the clock on the wall, rows.
    """

    def __init__(self, layers: Layers, neighbours: Neighbours) -> None:
        self._layers = layers
        self._neighbours = neighbours
        self.done = Mark(0, 0, 0)
        self.num_frames = 0
        self.num_tokens = 0
        self.busy_s = 0.0
        self.spans: deque[tuple[int, int, float, float, int]] = deque(maxlen=_SPANS)
        self._halves: dict[Mark, dict[str, Message]] = {}  # what came of a micro-batch so far
        self._made: dict[int, list[Made]] = {}  # by step, what the last stage has computed
        self._waiting: dict[int, list[tuple[Link, Message]]] = {}  # until that is there

    def status(self) -> Message:
        """Return counts and timings, as plain values."""
        since = time.time() - _RECENT_S
        recent = sum(tokens for *_, end, tokens in self.spans.copy() if end > since)
        return {
            "frames": self.num_frames,
            "tokens": self.num_tokens,
            "busy_s": self.busy_s,
            "tokens_per_s": recent / _RECENT_S,  # that went through here lately, waiting included
        }

    def take(self, do: str, message: Message) -> None:
        """Take one half of a micro-batch: the work from the head, or hidden states from the previous stage.

        The head tells all stages at once, so that batches are decoded before their hidden states arrive.
        """
        try:
            mark = Mark(message["epoch"], message["step"], message["part"])
            if mark.epoch != self._neighbours.epoch or mark <= self.done:
                raise VerbatimError(f"{mark} is of the past: this stage has done {self.done}")
            if do == "work":
                if not isinstance(message["batch"], Batch):
                    raise TypeError("the batch of a piece of work is none")
                if self._neighbours.index in message["fresh"]:
                    # Of blocks whose contents came with its replay, or are gone.
                    message["batch"].block_copies = []
                if message["first"] == self._neighbours.index:
                    return self._run(mark, message, _NO_ROWS)
            halves = self._halves.setdefault(mark, {})
            halves[do] = message
            if len(halves) == 2:
                self._run(mark, halves["work"], halves["rows"])
            elif do == "work":
                self._expect(mark, message)
        except LinkLost as error:
            self._neighbours.tell({**_failed(message), "unreachable": str(error)})
        except Exception as error:
            self._neighbours.tell({**_failed(message), "error": described(error)})

    def _expect(self, mark: Mark, work: Message) -> None:
        """Prepare a buffer for hidden states that have not arrived yet."""
        part = self._layers.part
        if part is not None:
            shape = work["batch"].num_tokens, part.shape.hidden_size
            before = self._neighbours.index - work["first"]
            rows = Expected(mark, shape, part.shape.hidden_dtype, before, _CLOCK)
            self._neighbours.expect(rows)

    def _run(self, mark: Mark, work: Message, rows: Message) -> None:
        """Run one micro-batch, and send it to the next stage."""
        self.done = mark
        batch, hidden, (clock, sent) = work["batch"], rows["hidden"], rows["sent"]
        kept = work["kept"] and work["first"] == self._neighbours.index
        begin = time.monotonic()
        made = self._layers.run(batch, hidden, kept=kept)
        ended = time.monotonic()
        # From here to the `begin` of the next stage it is a hop. The books can wait.
        made.busy = [*rows["busy"], ended - begin]
        made.hops = [*rows["hops"], begin - sent] if clock == _CLOCK else rows["hops"]
        try:
            if work["stop"] > self._neighbours.index:
                self._neighbours.pass_on(mark, _rows(mark, made, ended))
            elif work["replays"]:
                self._neighbours.tell({"ended": list(mark)})
            else:
                self._keep(mark.step, work["parts"], made)
        finally:
            self._note(mark, batch.num_tokens, begin, ended)

    def _note(self, mark: Mark, num_tokens: int, begin: float, ended: float) -> None:
        """Record the time of a piece of work, by the monotonic clock."""
        for old in [other for other in self._halves if other <= mark]:
            del self._halves[old]
        self.num_frames += 1
        self.num_tokens += num_tokens
        self.busy_s += ended - begin
        ahead = time.time() - time.monotonic()  # of the clock on the wall
        self.spans.append((mark.step, mark.part, begin + ahead, ended + ahead, num_tokens))

    def _keep(self, step: int, parts: int, made: Made) -> None:
        """Keep the logits of the last stage until they are sampled."""
        for past in (self._made, self._waiting):
            for old in [other for other in past if other < step]:
                del past[old]
        self._made.setdefault(step, []).append(made)
        if len(self._made[step]) == parts:  # else one of them failed on the way
            for link, message in self._waiting.pop(step, []):
                answer(link, message, self._draw)

    def when_made(self, link: Link, message: Message) -> None:
        """Draw, or send logits, once all of a step is computed."""
        step = message.get("step", 0)
        if message.get("epoch") != self._neighbours.epoch or step < self.done.step:
            stale = VerbatimError(f"step {step} of epoch {message.get('epoch')} is of the past")
            self._neighbours.tell({"call": message.get("call"), "error": described(stale)})
        elif len(self._made.get(step, ())) == message["parts"]:
            answer(link, message, self._draw)
        else:
            self._waiting.setdefault(step, []).append((link, message))

    def _draw(self, message: Message) -> Message:
        begin = time.perf_counter()
        made = self._made[message["step"]]
        rows = [part.logits for part in made if part.logits is not None]
        logits = torch.cat(rows) if len(rows) > 1 else rows[0]
        if message["do"] == "logits":
            return {"logits": logits[message["rows"]].float()}
        hidden = [part.hidden for part in made if part.hidden is not None]
        return {
            "draws": self._layers.sample(logits, message["plan"]),
            "hidden": torch.cat(hidden) if hidden else None,
            "busy": [*map(sum, zip(*(part.busy for part in made), strict=True))],
            "hops": [hop for part in made for hop in part.hops],
            "draw_s": time.perf_counter() - begin,
        }


def answer(link: Link, message: Message, do: Callable[[Message], Any]) -> None:
    """Call a function with a message, and send its result or error back."""
    told: Message = {"call": message.get("call")}
    try:
        told["result"] = do(message)
    except Exception as error:
        told["error"] = described(error)
    try:
        link.send(told)
    except LinkLost:
        pass  # the head is gone, which the thread that reads from it notices


def described(error: Exception) -> list[str]:
    """Describe an error as plain data: class name and message."""
    return [type(error).__name__, str(error) or type(error).__name__]


def _rows(mark: Mark, made: Made, ended: float) -> Message:
    """Return the message for the next stage."""
    return {
        "do": "rows",
        "epoch": mark.epoch,
        "step": mark.step,
        "part": mark.part,
        "hidden": made.leaving,
        "busy": made.busy,
        "hops": made.hops,
        "sent": [_CLOCK, ended],
    }


def _failed(message: Message) -> Message:
    return {"failed": message.get("step"), "epoch": message.get("epoch")}


def _clock() -> str:
    """Return an id of the monotonic clock, equal for processes of the same boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return secrets.token_hex(8)  # equal to no other


_CLOCK = _clock()
