"""One stage of a cluster: a process that holds some layers and runs batches through them.

A stage takes orders from the head, where the engine is, and hidden states from the stage before. It computes
one thing at a time; pings and new connections are answered at any time. Every piece of work names its epoch,
step and micro-batch: what is of another epoch, or was done before, is not done again, so a repeated one does
no harm.
"""

from __future__ import annotations

import os
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from verbatim.batch import SamplePlan
from verbatim.errors import VerbatimError
from verbatim.placement.cluster.layers import Layers, Made
from verbatim.placement.cluster.link import Address, Door, Link, LinkLost, connect
from verbatim.placement.cluster.messages import Mark, pack_draws, unpack_batch, unpack_plan
from verbatim.placement.cluster.wire import Garbage

_SPANS = 4096  # of the past, kept for whoever draws a picture
_RECENT_S = 10.0  # over which the speed is told
_ECHOES = 3  # round trips by which a new connection is measured

# What the head may ask of what is held here, by the names of its methods.
_OF_LAYERS = frozenset({"facts", "open", "allocate", "check_replay", "routing", "sleep", "wake"})

Message = dict[str, Any]
_NO_ROWS: Message = {"hidden": None, "busy": [], "hops": [], "sent": ["", 0.0]}


class Stage:
    """Serves one head until it is closed or the head is gone.

    Args:
        key: the cluster's secret.
        host: the address at which other machines reach this one.
        ended: called when there is nothing more to do here.
    """

    def __init__(self, key: bytes, host: str, ended: Callable[[], object] = lambda: None) -> None:
        self._key = key
        self._ended = ended
        self._inbox: queue.SimpleQueue[tuple[Link, Message] | None] = queue.SimpleQueue()
        self._layers = Layers()
        self._head: Link | None = None
        self._next: Link | None = None
        self._before: Link | None = None
        self._lock = threading.Lock()  # of who is connected, and in which epoch
        self.epoch = 0
        self.index = 0
        self.restarts = 0
        self.hop_s: float | None = None  # to the stage behind, when the connection was made
        self._done = Mark(0, 0, 0)
        self._halves: dict[Mark, dict[str, Message]] = {}  # what came of a micro-batch so far
        self._made: dict[int, list[Made]] = {}  # by step, what the last stage has computed
        self._waiting: dict[int, list[tuple[Link, Message]]] = {}  # until that is there
        self._computing = threading.Lock()
        self._busy_since: float | None = None
        self._closed = False
        self.num_frames = 0
        self.num_tokens = 0
        self.busy_s = 0.0
        self.spans: deque[tuple[int, int, float, float, int]] = deque(maxlen=_SPANS)
        self._door = Door(key, host, self.let_in)
        self.address: Address = (host, self._door.port)
        self._worker = threading.Thread(target=self._work, name="verbatim-stage", daemon=True)
        self._worker.start()

    def close(self) -> None:
        """Hang up and free everything."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            links = [self._head, self._next, self._before]
        self._door.close()
        for link in links:
            if link is not None:
                link.close()
        self._inbox.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the end of what is being computed."""
        self._worker.join(timeout_s)
        if self._computing.acquire(timeout=timeout_s):
            self._computing.release()

    def warm(self, model: Message) -> None:
        """Make ready to hold layers of a model soon."""
        self._layers.warm(model)

    def status(self) -> Message:
        """What this stage holds and has done, as plain values."""
        return {
            **self._layers.status(),
            "index": self.index,
            "epoch": self.epoch,
            "pid": os.getpid(),
            "address": list(self.address),
            "frames": self.num_frames,
            "tokens": self.num_tokens,
            "busy_s": self.busy_s,
            "restarts": self.restarts,
            "tokens_per_s": self._recent_speed(),
            "hop_s": self.hop_s,
            "serving": self._head is not None,
        }

    def _recent_speed(self) -> float:
        """Tokens a second that went through here lately, waiting included."""
        since = time.time() - _RECENT_S
        return sum(tokens for *_, end, tokens in self.spans.copy() if end > since) / _RECENT_S

    # Connections: threads of their own.

    def let_in(self, who: Message, link: Link) -> None:
        """Serve whoever proved to know the key, until the link is lost."""
        role = who.get("role")
        if role == "head":
            with self._lock:
                if self._head is not None or self._closed:
                    raise VerbatimError("this stage serves another head, or is closed")
                self._head = link
            try:
                link.send({"welcome": os.getpid()})
                self._serve(link, self._order)
            finally:
                self.close()
        elif role == "stage":
            with self._lock:
                if (who.get("epoch"), who.get("index")) != (self.epoch, self.index - 1):
                    raise VerbatimError(
                        f"stage {who.get('index')} of epoch {who.get('epoch')} called stage "
                        f"{self.index} of epoch {self.epoch}"
                    )
                before, self._before = self._before, link
            if before is not None:
                before.close()
            link.send({"welcome": os.getpid()})
            self._serve(link, self._take_frame)
        else:
            raise VerbatimError(f"role {role!r} is not known")

    def _serve(self, link: Link, take: Callable[[Link, Message], object]) -> None:
        try:
            while True:
                take(link, link.receive())
        except (LinkLost, Garbage):
            link.close()

    def _take_frame(self, link: Link, message: Message) -> None:
        if message.get("do") == "echo":
            link.send({})
        else:
            self._compute(link, message)

    def _order(self, link: Link, message: Message) -> None:
        """One message of the head: what can wait goes to the thread that computes."""
        now = {"ping": self._ping, "epoch": self._begin_epoch, "link": self._link}
        do = now.get(str(message.get("do")))
        if do is None:
            self._inbox.put((link, message))
        elif do == self._link:  # it may take seconds, in which the head asks who is still there
            threading.Thread(target=self._answer, args=(link, message, do), daemon=True).start()
        else:
            self._answer(link, message, do)

    def _answer(self, link: Link, message: Message, do: Callable[[Message], Any]) -> None:
        """Do what a message says and send back what comes of it."""
        answer: Message = {"call": message.get("call")}
        try:
            answer["result"] = do(message)
        except Exception as error:
            answer["error"] = described(error)
        try:
            link.send(answer)
        except LinkLost:
            pass  # the head is gone, and whoever reads from it knows

    def _ping(self, message: Message) -> Message:
        since = self._busy_since
        return {
            "busy_s": 0.0 if since is None else time.monotonic() - since,
            "step": self._done.step,
        }

    def _begin_epoch(self, message: Message) -> None:
        """Forget all connections to other stages, and all work that isn't done."""
        with self._lock:
            links = [self._next, self._before]
            self.epoch, self.index = int(message["epoch"]), int(message["index"])
            self.restarts = int(message["restarts"])
            self._next = self._before = None
            self.hop_s = None
        for link in links:
            if link is not None:
                link.close()

    def _link(self, message: Message) -> Message:
        """Connect to the stage behind; by way of Ray, where that is there and nothing else leads to it."""
        host, port = message["next"]
        who = {"role": "stage", "epoch": message["epoch"], "index": self.index}
        relayed = False
        try:
            try:
                link = connect((host, int(port)), self._key, who)
            except LinkLost:
                if message["relay"] is None:
                    raise
                link = connect((message["relay"][0], 0), self._key, who)
                relayed = True
            try:
                answer = link.receive()
                if "refused" in answer:
                    raise VerbatimError(f"the next stage refused: {answer['refused']}")
                hop_s = _half_round_trip(link)
            except BaseException:
                link.close()
                raise
        except LinkLost as error:
            return {"unreachable": str(error)}
        with self._lock:
            if self.epoch != message["epoch"]:
                link.close()
                raise VerbatimError(f"epoch {message['epoch']} is over")
            self._next, self.hop_s = link, hop_s
        threading.Thread(target=self._watch, args=(link, message["epoch"]), daemon=True).start()
        return {"relayed": relayed}

    def _watch(self, link: Link, epoch: int) -> None:
        """Tell the head when the stage behind is cut off: what was sent there may not have arrived."""
        try:
            while True:
                link.receive()  # it says nothing
        except (LinkLost, Garbage) as error:
            link.close()
            if self.epoch == epoch and not self._closed:
                self._tell({"epoch": epoch, "unreachable": str(error)})

    # Work: one thing at a time.

    def _work(self) -> None:
        """Do what the head asks for, one thing after another."""
        while (entry := self._inbox.get()) is not None:
            self._compute(*entry)
        with self._computing:
            self._layers.close()
        self._ended()

    def _compute(self, link: Link, message: Message) -> None:
        """One thing at a time. What comes from the stage before is done by the thread that hears it: waking
        another one costs as much as the message itself.
        """
        with self._computing:
            self._busy_since = time.monotonic()
            try:
                self._do(link, message)
            except Exception as error:  # a message that is not what it should be
                self._tell({"call": message.get("call"), "error": described(error)})
            self._busy_since = None

    def _do(self, link: Link, message: Message) -> None:
        do = message.get("do", "")
        if do in _OF_LAYERS:
            self._answer(link, message, getattr(self._layers, do))
        elif do == "status":
            self._answer(link, message, lambda _: {**self.status(), "spans": [*self.spans]})
        elif do in ("work", "rows"):
            self._take(do, message)
        elif do in ("draw", "logits"):
            self._when_made(link, message)
        else:
            raise VerbatimError(f"{do!r} is nothing that a stage can do")

    def _take(self, do: str, message: Message) -> None:
        """A micro-batch comes in two halves: the work from the head, and hidden states from the stage before.

        The head tells all stages at once, so that nobody unpacks a batch while rows wait for it.
        """
        try:
            mark = Mark(message["epoch"], message["step"], message["part"])
            if mark.epoch != self.epoch or mark <= self._done:
                raise VerbatimError(f"{mark} is of the past: this stage has done {self._done}")
            if do == "work":
                message["batch"] = unpack_batch(message["batch"])
                if self.index in message["fresh"]:
                    # Of blocks whose contents came with its replay, or are gone.
                    message["batch"].block_copies = []
                if message["first"] == self.index:
                    return self._run(mark, message, _NO_ROWS)
            halves = self._halves.setdefault(mark, {})
            halves[do] = message
            if len(halves) == 2:
                self._run(mark, halves["work"], halves["rows"])
        except LinkLost as error:
            self._tell({**_failed(message), "unreachable": str(error)})
        except Exception as error:
            self._tell({**_failed(message), "error": described(error)})

    def _run(self, mark: Mark, work: Message, rows: Message) -> None:
        """One micro-batch: through these layers, and on to the next stage."""
        self._done = mark
        for old in [other for other in self._halves if other <= mark]:
            del self._halves[old]
        begin, clock, batch = time.perf_counter(), time.time(), work["batch"]
        hops = [*rows["hops"], *_hop(rows)]
        made = self._layers.run(
            batch, rows["hidden"], kept=work["kept"] and work["first"] == self.index
        )
        took = time.perf_counter() - begin
        self.num_frames += 1
        self.num_tokens += batch.num_tokens
        self.busy_s += took
        self.spans.append((mark.step, mark.part, clock, clock + took, batch.num_tokens))
        made.busy, made.hops = [*rows["busy"], took], hops
        if work["stop"] > self.index:
            self._pass_on(mark, made)
        elif work["replays"]:
            self._tell({"ended": list(mark)})
        else:
            self._keep(mark.step, work["parts"], made)

    def _pass_on(self, mark: Mark, made: Made) -> None:
        sent = [_CLOCK, time.monotonic()]
        with self._lock:
            link, stale = self._next, self.epoch != mark.epoch
        if stale:
            return
        if link is None:
            raise LinkLost(f"stage {self.index} has no connection to stage {self.index + 1}")
        rows = {"hidden": made.leaving, "busy": made.busy, "hops": made.hops, "sent": sent}
        link.send({"do": "rows", **mark._asdict(), **rows})

    def _keep(self, step: int, parts: int, made: Made) -> None:
        """The end of the line: logits stay here for whoever draws from them."""
        for past in (self._made, self._waiting):
            for old in [other for other in past if other < step]:
                del past[old]
        self._made.setdefault(step, []).append(made)
        if len(self._made[step]) == parts:  # else one of them failed on the way
            for link, message in self._waiting.pop(step, []):
                self._answer(link, message, self._draw)

    def _when_made(self, link: Link, message: Message) -> None:
        step = message.get("step", 0)
        if message.get("epoch") != self.epoch or step < self._done.step:
            stale = VerbatimError(f"step {step} of epoch {message.get('epoch')} is of the past")
            self._tell({"call": message.get("call"), "error": described(stale)})
        elif len(self._made.get(step, ())) == message["parts"]:
            self._answer(link, message, self._draw)
        else:
            self._waiting.setdefault(step, []).append((link, message))

    def _draw(self, message: Message) -> Message:
        begin = time.perf_counter()
        made = self._made[message["step"]]
        rows = [part.logits for part in made if part.logits is not None]
        logits = torch.cat(rows) if len(rows) > 1 else rows[0]
        if message["do"] == "logits":
            return {"logits": logits[message["rows"]].float()}
        plan: SamplePlan = unpack_plan(message["plan"])
        hidden = [part.hidden for part in made if part.hidden is not None]
        draws = pack_draws(self._layers.sample(logits, plan))
        return {
            "draws": draws,
            "hidden": torch.cat(hidden) if hidden else None,
            "busy": [*map(sum, zip(*(part.busy for part in made), strict=True))],
            "hops": [hop for part in made for hop in part.hops],
            "draw_s": time.perf_counter() - begin,
        }

    def _tell(self, message: Message) -> None:
        head = self._head
        if head is not None:
            try:
                head.send(message)
            except LinkLost:
                pass  # it is gone, and whoever reads from it knows


def _failed(message: Message) -> Message:
    return {"failed": message.get("step"), "epoch": message.get("epoch")}


def _hop(rows: Message) -> list[float]:
    """Seconds from the end of the stage before to now, where both read the same clock."""
    clock, sent = rows["sent"]
    return [time.monotonic() - sent] if clock == _CLOCK else []


def _clock() -> str:
    """What processes have in common that read the same monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return secrets.token_hex(8)  # nobody's


def _half_round_trip(link: Link) -> float:
    """Seconds that a small message takes one way, the best of a few. Nobody else speaks on the link yet."""
    best = float("inf")
    for _ in range(_ECHOES):
        begin = time.perf_counter()
        link.send({"do": "echo"})
        link.receive()
        best = min(best, time.perf_counter() - begin)
    return best / 2


def described(error: Exception) -> list[str]:
    """An error as plain data: the name of its class, and what it says."""
    return [type(error).__name__, str(error) or type(error).__name__]


_CLOCK = _clock()
