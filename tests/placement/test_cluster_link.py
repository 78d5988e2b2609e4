"""What stages say to each other, and to strangers."""

from __future__ import annotations

import contextlib
import math
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.programs import PATIENCE_S, in_thread, resident_bytes
from verbatim import SamplingParams, StageFailed, VerbatimError
from verbatim.batch import dummy_batch
from verbatim.device import Device
from verbatim.placement.distributed import link as links
from verbatim.placement.distributed.group import StageGroup
from verbatim.placement.distributed.hosts import Hosts, NoHost
from verbatim.placement.distributed.link import Link, LinkLost, Listener, Refused
from verbatim.placement.distributed.stage_share import StageShare
from verbatim.placement.distributed.torchrun import RankHost
from verbatim.placement.distributed.wire import MAGIC, PREFIX, Garbage, decode, encode, sizes

KEY = b"k" * 32
connect = partial(links.connect, timeout_s=PATIENCE_S)


def over_the_wire(message: Any) -> Any:
    raw = b"".join(bytes(buffer) for buffer in encode(message))
    header, arrays = sizes(raw[: PREFIX.size])
    assert len(raw) == PREFIX.size + header + arrays
    return decode(raw[PREFIX.size :][:header], bytearray(raw[PREFIX.size + header :]))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


def test_plain_data_and_arrays_arrive_as_they_were() -> None:
    message = {
        "numbers": [1, -(2**63), 0.1, 1e-300, math.inf, -math.inf, math.nan, True, None],
        "text": "Grüße \0 \ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"),
        "deep": {"a": [{"b": torch.arange(3, dtype=torch.int16)}]},
        "bf16": torch.randn(3, 5).bfloat16(),
        "strided": torch.arange(12).reshape(3, 4).t(),
        "nothing": torch.empty(0, 7),
        "scalar": torch.tensor(3.5),
        "flags": torch.tensor([True, False]),
        "by number": {1: [2.5], (3, None): torch.float32},
        "device": Device(torch.device("cuda", 2), batch_invariant=True),
        "many": list(range(-500, 500)),
        "many of all sorts": [True, 2**80, *range(100)],
    }
    found = over_the_wire(message)
    assert same(found, message)
    assert type(found["many"]) is list and found["many of all sorts"][0] is True
    assert isinstance(next(iter(dict(list(found["by number"].items())[1:]))), tuple)
    # Objects come as cluster and ranks exchange them in other tests; what is sent twice is one object.
    params = SamplingParams(logit_bias={3: 1.5})
    found = over_the_wire({"params": [params, params]})["params"]
    assert found[0] is found[1] and found[0] == params
    for bad in ({"a": {1, 2}}, {"a": object()}, {"a": b"raw"}, {"a": torch.complex64}):
        with pytest.raises((TypeError, KeyError)):
            encode(bad)


@pytest.mark.parametrize(
    "header",
    [
        b'["a"]',
        b"[" * 100_000,
        b'{"a":{"\\u0000array":["float32",[9]]}}',
        b'{"a":{"\\u0000array":["float32",[-1]]}}',
        b'{"a":{"\\u0000array":["object",[1]]}}',
        b'{"a":{"\\u0000array":["float32",[1,1000000000000000000000]]}}',
        b'{"a":{"\\u0000array":["float32",[0,1000000000000000000000]]}}',
        b'{"a":{"\\u0000array":7}}',
        b"\xff\xfe",
        b'{"a":{"\\u0000object":["LLM"]}}',
        b'{"a":{"\\u0000object":["Batch",1]}}',
        b'{"a":{"\\u0000object":["SamplingParams",-1,0,1,0,1,1,0,0,null,false]}}',
        b'{"a":{"\\u0000object":["FinishReason","none"]}}',
        b'{"a":{"\\u0000object":{}}}',
        b'{"a":{"\\u0000same":0}}',
        b'{"a":{"\\u0000pairs":[[{},1]]}}',
        b'{"a":{"\\u0000code":"1"}}',
    ],
)
def test_hostile_headers(header: bytes) -> None:
    with pytest.raises(Garbage):
        decode(header, bytearray(8))


def frames(count: int) -> Iterator[bytes]:
    """Messages with some of their bytes changed, removed or repeated."""
    rng = random.Random(0)
    deep = {"a": [{"b": torch.ones(2)}]}
    messages = ({"do": "work", "batch": dummy_batch(), **deep}, {"do": "ping"})
    valid = [b"".join(map(bytes, buffers)) for buffers in map(encode, messages)]
    for _ in range(count):
        raw = bytearray(rng.choice(valid))
        for _ in range(rng.randint(1, 4)):
            raw = raw or bytearray(b"x")
            at, kind = rng.randrange(len(raw)), rng.randrange(4)
            if kind == 0:
                raw[at] = rng.randrange(256)
            elif kind == 1:
                raw[at : at + rng.randint(1, 8)] = rng.randbytes(rng.randint(0, 8))
            elif kind == 2:
                raw[at:] = b"x"
            else:
                raw[at:at] = raw[: rng.randrange(64)]
        yield bytes(raw)


def test_fuzzed_frames_are_messages_or_garbage() -> None:
    """`VERBATIM_FUZZ_FRAMES=100000` tries more."""
    count, seen, before = int(os.environ.get("VERBATIM_FUZZ_FRAMES", "2000")), 0, 0
    for number, raw in enumerate(frames(count)):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(raw)
            theirs.shutdown(socket.SHUT_WR)
            link = Link(ours)
            with contextlib.suppress(Garbage, LinkLost):
                while True:
                    assert isinstance(link.receive(), dict)
                    seen += 1
            link.close()
        if number == count // 5:
            before = resident_bytes()
    assert seen > count // 50
    assert resident_bytes() < before + 100 * 2**20


# Doors.


class Guests:
    """A door that lets everybody in who asks nicely."""

    def __init__(self) -> None:
        self.links: list[Link] = []
        self.met: list[dict[str, Any]] = []
        self.door = Listener(KEY, "127.0.0.1", self._let_in)
        self.address = ("127.0.0.1", self.door.port)

    def _let_in(self, who: dict[str, Any], link: Link) -> Callable[[], object]:
        if who.get("name") == "nobody":
            raise VerbatimError("we want nobody here")
        self.met.append(who)
        self.links.append(link)
        return lambda: None

    def close(self) -> None:
        self.door.close()
        for link in self.links:
            link.close()


@pytest.fixture
def guests() -> Iterator[Guests]:
    made = Guests()
    yield made
    made.close()


@pytest.mark.parametrize("near", [True, False], ids=["one-machine", "tcp"])
def test_a_connection_carries_messages_and_bytes(
    near: bool, guests: Guests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "_HAS_NAMES", near and sys.platform == "linux")
    link = connect(guests.address, KEY, {"name": "me"})
    there = guests.links[0]
    if sys.platform == "linux":
        assert (link._connection.family == socket.AF_UNIX) == near
    for size in (1, 100, 100_000, 10_000_000):  # some are more than what is read ahead
        link.send({"size": size})
        assert there.receive() == {"size": size}
        sent, found = random.Random(size).randbytes(size), bytearray(size)
        sending = in_thread(send_slowly, link, [sent[:50], sent[50:]])
        there.fill(memoryview(found))
        assert found == sent
        sending.result()
    big = {"rows": torch.randn(300, 1000), "many": [torch.tensor([i]) for i in range(200)]}
    in_thread(link.send, big)
    assert guests.met == [{"name": "me"}] and same(there.receive(), big)
    link.put(b"vbt9" + bytes(PREFIX.size - 4))
    with pytest.raises(Garbage):
        there.receive()
    there.close()
    with pytest.raises(LinkLost):
        link.receive()
    with pytest.raises(LinkLost):  # more than what the operating system takes for one that is gone
        list(map(link.send, [big] * 100))
    link, there = connect(guests.address, KEY, {"name": "me"}), guests.links[1]
    link.close()
    with pytest.raises(LinkLost, match="the other side has closed it"):
        there.fill(memoryview(bytearray(1)))


def send_slowly(link: Link, pieces: list[bytes]) -> None:
    for piece in pieces:
        link.put(piece)
        time.sleep(0.02)


def test_a_peer_that_accepts_nothing_is_lost() -> None:
    ours, theirs = socket.socketpair()
    link = Link(ours)
    link.limit_sending(1)
    with theirs, pytest.raises(LinkLost, match="nothing is accepted"):
        link.send([bytes(1 << 26)])
    with pytest.raises(LinkLost):
        link.send({"do": "ping"})


def test_a_closed_connection_keeps_its_descriptor_while_it_is_used() -> None:
    """A thread that is about to read from it must not read from another file."""
    ours, theirs = socket.socketpair()
    link, number = Link(ours), ours.fileno()
    link.close()
    with theirs, socket.socket() as other:
        assert other.fileno() != number and theirs.recv(1) == b""
        with pytest.raises(LinkLost):
            link.receive()
        del link
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(number)


def test_a_stage_waits_for_the_next_one_as_long_as_it_is_told(stage: StageShare) -> None:
    head = connect(stage.address, KEY, {"role": "head"})
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = {"index": 0, "restarts": 0, "next": silent.getsockname(), "epoch": 1}
        answer = ask(head, do="link", **place, patience_s=0.1, timeout_s=9.0)
    assert "timed out" in answer["result"]["unreachable"]
    head.close()


def test_who_does_not_is_told_why(guests: Guests) -> None:
    with pytest.raises(Refused, match="it does not know the cluster's key"):
        connect(guests.address, b"x" * 32, {"name": "me"})
    with pytest.raises(Refused, match="we want nobody here"):
        connect(guests.address, KEY, {"name": "nobody"})
    assert guests.met == []
    with pytest.raises(LinkLost, match=r"no connection to 127\.0\.0\.1:1"):
        connect(("127.0.0.1", 1), KEY, {})
    connect(guests.address, KEY, {"name": "me"}).close()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (
            b"verbatim-cluster-1\n" + bytes(32),
            "verbatim-cluster-1, and this side verbatim-cluster-3",
        ),
        (links._GREETING + bytes(64), "does not know the cluster's key"),
        (b"HTTP/1.1 400 Bad Request\r\n", "does not speak verbatim-cluster-3"),
    ],
    ids=["older", "impostor", "http"],
)
def test_another_program_behind_the_address_is_found_out(answer: bytes, reason: str) -> None:
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        peer, _ = server.accept()
        peer.sendall(answer)
        with contextlib.suppress(ConnectionError):
            while peer.recv(1000):
                pass
        peer.close()

    serving = in_thread(serve)
    with server, pytest.raises(Refused, match=reason):
        connect(server.getsockname(), KEY, {})
    serving.result()


def test_strangers_of_all_kinds_leave_a_door_open_for_friends(
    guests: Guests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "_SHAKE_S", 0.3)
    strangers = [socket.create_connection(guests.address) for _ in range(20)]
    for i, stranger in enumerate(strangers[:15]):
        said = [b"GET / HTTP/1.1\r\n\r\n" * 10, b"\0" * 5000, links._GREETING + bytes(64)][i % 3]
        stranger.sendall(said)
    link = None
    while link is None:  # on a busy machine, shaking hands may take longer
        with contextlib.suppress(LinkLost):
            link = connect(guests.address, KEY, {"name": "me"})
    # One that was let in and then speaks garbage.
    link._connection.sendall(PREFIX.pack(MAGIC, 7, 0) + b"garbage")
    with pytest.raises(Garbage):
        guests.links[-1].receive()
    for stranger in strangers:
        stranger.settimeout(PATIENCE_S)
        with contextlib.suppress(ConnectionError):
            while stranger.recv(4096):
                pass
        stranger.close()
    link.close()


# A stage that hears what it should not.


@pytest.fixture
def stage() -> Iterator[StageShare]:
    made = StageShare()
    made.listen(KEY, "127.0.0.1")
    yield made
    made.hang_up()
    made.join(PATIENCE_S)


def ask(link: Link, **message: Any) -> Any:
    link.send({**message, "call": 1})
    return link.receive()


def test_a_stage_refuses_what_it_does_not_expect(stage: StageShare) -> None:
    with pytest.raises(Refused, match="role 'king' is not known"):
        connect(stage.address, KEY, {"role": "king"})
    head = connect(stage.address, KEY, {"role": "head"})
    with pytest.raises(Refused, match="serves another head"):
        connect(stage.address, KEY, {"role": "head"})
    for bad in ("dance", ["work"], "run", "epoch", "_work"):
        kind, text = ask(head, do=bad)["error"]
        assert (kind, text) == ("VerbatimError", f"{str(bad)!r} is nothing that a stage can do")
    assert "is nothing that a stage can do" in ask(head)["error"][1]
    assert ask(head, do="facts")["result"]["torch"]
    asked = ask(head, do="record", name="routing", block_table=[1], num_tokens=1)
    assert asked["result"] is None
    assert ask(head, do="open")["error"][0] == "KeyError"
    sizes = dict(num_blocks=3, num_states=0, first_of={})
    asked = ask(head, do="allocate", **sizes)
    assert asked["error"][1] == "this stage holds no layers yet, or sleeps"
    place = {"do": "link", "index": 0, "restarts": 0, "patience_s": 9.0, "timeout_s": 9.0}
    nobody = ask(head, **place, next=("127.0.0.1", 1), epoch=3)
    assert "no connection" in nobody["result"]["unreachable"]
    assert ask(head, **place, next=None, epoch="x")["error"][0] == "TypeError"
    assert ask(head, **place, next=None, epoch=4)["result"] == {}
    assert "epoch 4 is over" in ask(head, **place, next=None, epoch=4)["error"][1]
    with pytest.raises(Refused, match="epoch 3 is over: this stage is in 4"):
        connect(stage.address, KEY, {"role": "stage", "epoch": 3})
    newer = connect(stage.address, KEY, {"role": "stage", "epoch": 6})  # before its own order
    with pytest.raises(Refused, match="epoch 5 is over: this stage is in 6"):
        connect(stage.address, KEY, {"role": "stage", "epoch": 5})
    newer.close()
    batch = replace(dummy_batch(), token_ids=torch.tensor([3]))
    work = {"do": "work", "epoch": 3, "step": 1, "part": 0, "batch": batch}
    head.send(work)
    answer = head.receive()
    assert answer["step"] == 1 and "is of the past" in answer["error"][1]
    head.send({**work, "epoch": 4, "batch": {}})
    assert head.receive()["error"][0] == "TypeError"
    head.send({**work, "epoch": 4})
    assert head.receive()["error"][1] == "this stage holds no layers yet, or sleeps"
    head.send({"do": "work"})
    assert head.receive()["error"][0] == "TypeError"
    stale = ask(head, do="draw", epoch=2, step=0, parts=1, plan={})
    assert "is of the past" in stale["error"][1]
    head.send({"do": "ping"})
    assert head.receive().keys() == {"busy_s"}
    assert ask(head, do="status")["result"]["layers"] is None
    head.close()


def test_a_spare_that_does_not_come_is_replaced_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spares = [RankHost(number, ("127.0.0.1", 1)) for number in range(4)]
    hosts, lost = Hosts(KEY, spares), spares[::2]

    def wait(self: Hosts, host: RankHost, deadline: float) -> None:
        if host in lost:
            raise NoHost("it has ended")

    monkeypatch.setattr(Hosts, "_wait", wait)
    assert hosts.start(2, set()) == spares[1::2]
    with pytest.raises(NoHost):
        hosts.start(1, set())


def test_a_stage_that_stops_before_its_welcome_is_not_waited_for() -> None:
    stopped, left = threading.Event(), threading.Event()

    def stop(who: Any, link: Link) -> Callable[[], object]:
        stopped.wait(PATIENCE_S)
        return left.set

    door = Listener(KEY, "127.0.0.1", stop)
    host = SimpleNamespace(address=("127.0.0.1", door.port), machine="one", kill=lambda: None)
    hosts: Any = SimpleNamespace(key=KEY, start=lambda count, avoid: [host])
    try:
        with pytest.raises(StageFailed):
            StageGroup(hosts, patience_s=0.3, step_timeout_s=60.0).launch(1)
    finally:
        stopped.set()
        door.close()
        assert left.wait(PATIENCE_S)


def test_a_stage_whose_head_is_gone_ends() -> None:
    ended = threading.Event()
    stage = StageShare()
    stage.listen(KEY, "127.0.0.1", ended.set)
    connect(stage.address, KEY, {"role": "head"}).close()
    assert ended.wait(PATIENCE_S)
    with pytest.raises(LinkLost):
        connect(stage.address, KEY, {"role": "head"})
