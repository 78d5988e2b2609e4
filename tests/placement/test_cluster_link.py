"""Connections between stages: wire format, handshakes, unknown clients and unexpected messages."""

from __future__ import annotations

import contextlib
import errno
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
from verbatim.model.device import Device
from verbatim.placement.distributed import link as links
from verbatim.placement.distributed.group import StageGroup
from verbatim.placement.distributed.hosts import Hosts, NoHost
from verbatim.placement.distributed.link import Link, LinkLost, Listener, Refused
from verbatim.placement.distributed.ranks import RankHost
from verbatim.placement.distributed.stage_share import StageShare
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


def test_messages_round_trip_unchanged() -> None:
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
    received = over_the_wire(message)
    assert same(received, message)
    assert type(received["many"]) is list and received["many of all sorts"][0] is True
    assert isinstance(next(iter(dict(list(received["by number"].items())[1:]))), tuple)
    # Other tests cover the objects that clusters and ranks exchange; one sent twice arrives as one object.
    params = SamplingParams(typical_p=0.5)
    received = over_the_wire({"params": [params, params]})["params"]
    assert received[0] is received[1] and received[0] == params
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
        b'{"a":{"\\u0000object":["SamplingParams",-1,0,1,0,1,1,0,0,false]}}',
        b'{"a":{"\\u0000object":["FinishReason","none"]}}',
        b'{"a":{"\\u0000object":{}}}',
        b'{"a":{"\\u0000same":0}}',
        b'{"a":{"\\u0000pairs":[[{},1]]}}',
        b'{"a":{"\\u0000code":"1"}}',
    ],
)
def test_hostile_headers_raise_garbage(header: bytes) -> None:
    with pytest.raises(Garbage):
        decode(header, bytearray(8))


def frames(count: int) -> Iterator[bytes]:
    """Yield messages with some bytes changed, removed or repeated."""
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


def test_fuzzed_frames_decode_or_raise_garbage() -> None:
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


# Listeners.


class Peers:
    """A listener that accepts every peer with the key except the one named "unwanted"."""

    def __init__(self) -> None:
        self.links: list[Link] = []
        self.met: list[dict[str, Any]] = []
        self.listener = Listener(KEY, "127.0.0.1", self._accept)
        self.address = ("127.0.0.1", self.listener.port)

    def _accept(self, who: dict[str, Any], link: Link) -> Callable[[], object]:
        if who.get("name") == "unwanted":
            raise VerbatimError("not wanted here")
        self.met.append(who)
        self.links.append(link)
        return lambda: None

    def close(self) -> None:
        self.listener.close()
        for link in self.links:
            link.close()


@pytest.fixture
def peers() -> Iterator[Peers]:
    accepting = Peers()
    yield accepting
    accepting.close()


@pytest.mark.parametrize("near", [True, False], ids=["one-machine", "tcp"])
def test_link_carries_messages_and_raw_bytes(
    near: bool, peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "_HAS_NAMES", near and sys.platform == "linux")
    link = connect(peers.address, KEY, {"name": "me"})
    there = peers.links[0]
    if sys.platform == "linux":
        assert (link._connection.family == socket.AF_UNIX) == near
    for size in (1, 100, 100_000, 10_000_000):  # some exceed the read-ahead buffer
        link.send({"size": size})
        assert there.receive() == {"size": size}
        sent, received = random.Random(size).randbytes(size), bytearray(size)
        sending = in_thread(send_slowly, link, [sent[:50], sent[50:]])
        there.receive_into(memoryview(received))
        assert received == sent
        sending.result()
    big = {"rows": torch.randn(300, 1000), "many": [torch.tensor([i]) for i in range(200)]}
    sending = in_thread(link.send, big)
    assert peers.met == [{"name": "me"}] and same(there.receive(), big)
    sending.result()
    link.send_raw(b"vbt9" + bytes(PREFIX.size - 4))
    with pytest.raises(Garbage):
        there.receive()
    there.close()
    with pytest.raises(LinkLost):
        link.receive()
    with pytest.raises(LinkLost):  # more than the system buffers for a closed peer
        list(map(link.send, [big] * 100))
    link, there = connect(peers.address, KEY, {"name": "me"}), peers.links[1]
    link.close()
    with pytest.raises(LinkLost, match="the other side has closed it"):
        there.receive_into(memoryview(bytearray(1)))


def send_slowly(link: Link, pieces: list[bytes]) -> None:
    for piece in pieces:
        link.send_raw(piece)
        time.sleep(0.02)


def test_sending_to_blocked_peer_raises_link_lost() -> None:
    ours, theirs = socket.socketpair()
    link = Link(ours)
    link.limit_sending(1)
    with theirs, pytest.raises(LinkLost, match="nothing is accepted"):
        link.send([bytes(1 << 26)])
    with pytest.raises(LinkLost):
        link.send({"do": "ping"})


def test_closed_link_keeps_its_descriptor_while_in_use() -> None:
    """A thread that is about to read from the link must not read from another file."""
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


def test_silent_next_stage_is_reported_after_patience_s(stage: StageShare) -> None:
    head = connect(stage.address, KEY, {"role": "head"})
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = {"index": 0, "restarts": 0, "next": silent.getsockname(), "epoch": 1}
        answer = ask(head, do="link", **place, patience_s=0.1, timeout_s=9.0)
    assert "timed out" in answer["result"]["unreachable"]
    head.close()


def test_rejected_peer_gets_the_reason(peers: Peers) -> None:
    with pytest.raises(Refused, match="it does not know the cluster's key"):
        connect(peers.address, b"x" * 32, {"name": "me"})
    with pytest.raises(Refused, match="not wanted here"):
        connect(peers.address, KEY, {"name": "unwanted"})
    assert peers.met == []
    with pytest.raises(LinkLost, match=r"no connection to 127\.0\.0\.1:1"):
        connect(("127.0.0.1", 1), KEY, {})
    connect(peers.address, KEY, {"name": "me"}).close()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (
            b"verbatim-cluster-1\n" + bytes(32),
            "verbatim-cluster-1, but this side verbatim-cluster-3",
        ),
        (links._GREETING + bytes(64), "does not know the cluster's key"),
        (b"HTTP/1.1 400 Bad Request\r\n", "does not speak verbatim-cluster-3"),
    ],
    ids=["older", "impostor", "http"],
)
def test_wrong_program_at_address_is_rejected(answer: bytes, reason: str) -> None:
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


def test_clients_without_key_do_not_block_listener(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "_HANDSHAKE_TIMEOUT_S", 0.3)
    unknown = [socket.create_connection(peers.address) for _ in range(20)]
    for i, client in enumerate(unknown[:15]):
        data = [b"GET / HTTP/1.1\r\n\r\n" * 10, b"\0" * 5000, links._GREETING + bytes(64)][i % 3]
        client.sendall(data)
    link = None
    while link is None:  # on a busy machine, shaking hands may take longer
        with contextlib.suppress(LinkLost):
            link = connect(peers.address, KEY, {"name": "me"})
    # An accepted peer that then sends garbage.
    link._connection.sendall(PREFIX.pack(MAGIC, 7, 0) + b"garbage")
    with pytest.raises(Garbage):
        peers.links[-1].receive()
    for client in unknown:
        client.settimeout(PATIENCE_S)
        with contextlib.suppress(ConnectionError):
            while client.recv(4096):
                pass
        client.close()
    link.close()


def test_listener_continues_after_failed_accept(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, failed = socket.socket.accept, set[socket.socket]()

    def fail_first(listening: socket.socket) -> Any:
        if listening not in failed:
            failed.add(listening)
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listening)

    monkeypatch.setattr(socket.socket, "accept", fail_first)
    for _ in range(3):  # the first is accepted by the call in progress
        connect(peers.address, KEY, {"name": "me"}).close()
    assert failed


# Stages that receive unexpected messages.


@pytest.fixture
def stage() -> Iterator[StageShare]:
    share = StageShare()
    share.listen(KEY, "127.0.0.1")
    yield share
    share.hang_up()
    share.join(PATIENCE_S)


def ask(link: Link, **message: Any) -> Any:
    link.send({**message, "call": 1})
    return link.receive()


def test_stage_rejects_unexpected_messages(stage: StageShare) -> None:
    with pytest.raises(Refused, match="unknown role 'king'"):
        connect(stage.address, KEY, {"role": "king"})
    head = connect(stage.address, KEY, {"role": "head"})
    with pytest.raises(Refused, match="serves another head"):
        connect(stage.address, KEY, {"role": "head"})
    for bad in ("dance", ["work"], "run", "epoch", "_work"):
        kind, text = ask(head, do=bad)["error"]
        assert (kind, text) == ("VerbatimError", f"unknown call {str(bad)!r}")
    assert "unknown call" in ask(head)["error"][1]
    assert ask(head, do="facts")["result"]["torch"]
    reply = ask(head, do="record", name="routing", block_table=[1], num_tokens=1)
    assert reply["result"] is None
    assert ask(head, do="open")["error"][0] == "KeyError"
    sizes = dict(num_blocks=3, num_states=0, first_of={})
    reply = ask(head, do="allocate", **sizes)
    assert reply["error"][1] == "this stage holds no layers yet, or sleeps"
    place = {"do": "link", "index": 0, "restarts": 0, "patience_s": 9.0, "timeout_s": 9.0}
    unreachable = ask(head, **place, next=("127.0.0.1", 1), epoch=3)
    assert "no connection" in unreachable["result"]["unreachable"]
    assert ask(head, **place, next=None, epoch="x")["error"][0] == "TypeError"
    assert ask(head, **place, next=None, epoch=4)["result"] == {}
    assert "epoch 4 is over" in ask(head, **place, next=None, epoch=4)["error"][1]
    with pytest.raises(Refused, match="epoch 3 is over: this stage is in 4"):
        connect(stage.address, KEY, {"role": "stage", "epoch": 3})
    newer = connect(stage.address, KEY, {"role": "stage", "epoch": 6})  # before its own "link" call
    with pytest.raises(Refused, match="epoch 5 is over: this stage is in 6"):
        connect(stage.address, KEY, {"role": "stage", "epoch": 5})
    newer.close()
    batch = replace(dummy_batch(), token_ids=torch.tensor([3]))
    work = {"do": "work", "epoch": 3, "step": 1, "part": 0, "batch": batch}
    head.send(work)
    answer = head.receive()
    assert answer["step"] == 1 and "is over" in answer["error"][1]
    head.send({**work, "epoch": 4, "batch": {}})
    assert head.receive()["error"][0] == "TypeError"
    head.send({**work, "epoch": 4})
    assert head.receive()["error"][1] == "this stage holds no layers yet, or sleeps"
    head.send({"do": "work"})
    assert head.receive()["error"][0] == "TypeError"
    stale = ask(head, do="draw", epoch=2, step=0, parts=1, plan={})
    assert "is over" in stale["error"][1]
    head.send({"do": "ping"})
    assert head.receive().keys() == {"busy_s"}
    assert ask(head, do="status")["result"]["layers"] is None
    head.close()


def test_failed_spare_is_replaced_by_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    spares = [RankHost(number, ("127.0.0.1", 1), b"key") for number in range(4)]
    hosts, lost = Hosts(KEY, spares), spares[::2]

    def wait(self: Hosts, host: RankHost, deadline: float) -> None:
        if host in lost:
            raise NoHost("it has ended")

    monkeypatch.setattr(Hosts, "_wait", wait)
    assert hosts.start(2, set()) == spares[1::2]
    with pytest.raises(NoHost):
        hosts.start(1, set())


def test_launch_gives_up_on_stage_that_stops_in_handshake() -> None:
    stopped, left = threading.Event(), threading.Event()

    def stop(who: Any, link: Link) -> Callable[[], object]:
        stopped.wait(PATIENCE_S)
        return left.set

    listener = Listener(KEY, "127.0.0.1", stop)
    host = SimpleNamespace(address=("127.0.0.1", listener.port), machine="one", kill=lambda: None)
    hosts: Any = SimpleNamespace(key=KEY, start=lambda count, avoid: [host])
    try:
        with pytest.raises(StageFailed):
            StageGroup(hosts, patience_s=0.3, step_timeout_s=60.0).launch(1)
    finally:
        stopped.set()
        listener.close()
        assert left.wait(PATIENCE_S)


def test_stage_ends_when_head_disconnects() -> None:
    ended = threading.Event()
    stage = StageShare()
    stage.listen(KEY, "127.0.0.1", ended.set)
    connect(stage.address, KEY, {"role": "head"}).close()
    assert ended.wait(PATIENCE_S)
    with pytest.raises(LinkLost):
        connect(stage.address, KEY, {"role": "head"})
