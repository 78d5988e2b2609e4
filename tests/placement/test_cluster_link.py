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
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.programs import resident_bytes
from verbatim import SamplingParams, VerbatimError
from verbatim.batch import (
    Batch,
    Candidate,
    Candidates,
    Draw,
    SamplePlan,
    SampleRow,
    Support,
    dummy_batch,
)
from verbatim.core import Completion, DraftStats, FinishReason, Metrics, Result
from verbatim.placement.distributed import link as links
from verbatim.placement.distributed.group import StageGroup
from verbatim.placement.distributed.hosts import NoHost
from verbatim.placement.distributed.layers import Layers
from verbatim.placement.distributed.link import Link, LinkLost, Listener, Refused, connect
from verbatim.placement.distributed.stage import Stage
from verbatim.placement.distributed.wire import (
    PREFIX,
    Garbage,
    Mark,
    bytes_of,
    decode,
    encode,
    encode_rows,
    sizes,
)

KEY = b"k" * 32


def over_the_wire(message: Any) -> Any:
    raw = b"".join(bytes(buffer) for buffer in encode(message))
    header, arrays, _ = sizes(raw[: PREFIX.size])
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
        "many": list(range(-500, 500)),
        "many of all sorts": [True, 2**80, *range(100)],
    }
    found = over_the_wire(message)
    assert same(found, message)
    assert type(found["many"]) is list and found["many of all sorts"][0] is True
    assert isinstance(next(iter(dict(list(found["by number"].items())[1:]))), tuple)
    for bad in ({"a": {1, 2}}, {"a": object()}, {"a": b"raw"}, {"a": torch.complex64}):
        with pytest.raises((TypeError, KeyError)):
            encode(bad)


def test_batches_plans_and_draws_arrive_as_they_were() -> None:
    batch = Batch(
        token_ids=torch.tensor([5, 6, 7]),
        positions=torch.tensor([0, 1, 4]),
        query_starts=torch.tensor([0, 2, 3], dtype=torch.int32),
        context_lens=torch.tensor([2, 5], dtype=torch.int32),
        block_tables=torch.tensor([[1, 0], [2, 3]], dtype=torch.int32),
        logit_rows=torch.tensor([1, 2]),
        block_copies=[(1, 2), (4, 3)],
        wants_hidden=True,
        forced_experts=torch.full((3, 2, 2), -1, dtype=torch.int16),
    )
    found = over_the_wire({"batch": batch})["batch"]
    assert all(same(getattr(found, f), getattr(batch, f)) for f in Batch.__slots__)
    assert found.block_copies == batch.block_copies
    params = SamplingParams(
        temperature=0.7, top_k=9, top_p=0.9, min_p=0.01, typical_p=0.8, logit_bias={3: 1.5, 9: -2.0},
        repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=-1,
    )  # fmt: skip
    rows = [
        SampleRow(params, 2**64 - 1, 3, 17, [1, 2], [3], [4, 5], num_logprobs=2),
        SampleRow(params, 0, 0, 0, target=7, mask=torch.tensor([-1, 3], dtype=torch.int32)),
        SampleRow(SamplingParams(), 5, 1, 2, num_candidates=6),
    ]
    plan = over_the_wire({"plan": SamplePlan(rows, [0, 0, 1])})["plan"]
    assert plan.logits_rows == [0, 0, 1] and plan.rows[0].params is plan.rows[1].params
    for was, now in zip(rows, plan.rows, strict=True):
        for field in set(SampleRow.__slots__) - {"params"}:
            a, b = getattr(was, field), getattr(now, field)
            assert same(list(a) if isinstance(a, tuple | list) else a, b), field
    assert plan.rows[0].params == params
    beam = Candidates([3, 4], [-0.1, -3.0], [-0.2, -3.0])
    draws = [
        Draw(1, -0.5, 0.0, [1], [-0.5], Support(None, -0.5)),
        Draw(2, -math.inf, -1.0, [], [], candidates=beam),
    ]
    again = over_the_wire({"draws": draws})["draws"]
    assert again == draws and next(iter(again[1].candidates)) == Candidate(3, -0.1, -0.2)
    assert Mark(2, 1, 0) > Mark(1, 9, 9) and Mark(1, 2, 1) > Mark(1, 2, 0)


def test_results_arrive_as_they_were() -> None:
    output = Completion(
        0, 0, "a", [1], [-0.5], None, [[(1, -0.5)]], FinishReason.STOP, (1, 2), 7, [0]
    )  # fmt: skip
    metrics = Metrics(draft=DraftStats([1], [1], 1))
    result = Result("r", None, [5, 6], [None, -1.0], [None, [(6, -1.0)]], [output], 0, metrics, 3)
    found = over_the_wire({"results": [result]})["results"]
    assert found == [result] and found[0].outputs[0].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("rows", [0, 1, 300])
def test_hidden_states_arrive_as_they_were(rows: int) -> None:
    states, mark = torch.randn(rows, 48).bfloat16(), Mark(3, 2**40, 5)
    for hidden in (states, states.t()):
        raw = b"".join(bytes(buffer) for buffer in encode_rows(mark, hidden))
        data = raw[PREFIX.size :]
        assert sizes(raw[: PREFIX.size]) == (0, len(data), mark)
        assert data == bytes_of(hidden.contiguous())


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
    encoded = [some_rows(2, 3), *map(encode, messages)]
    valid = [b"".join(map(bytes, buffers)) for buffers in encoded]
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
    assert seen > count // 20
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


def test_who_knows_the_key_is_let_in_and_heard(guests: Guests) -> None:
    link = connect(guests.address, KEY, {"name": "me"})
    assert guests.met == [{"name": "me"}]
    big = {"rows": torch.randn(300, 1000), "many": [torch.tensor([i]) for i in range(200)]}
    threading.Thread(target=link.send, args=(big,)).start()
    assert same(guests.links[0].receive(), big)
    guests.links[0].close()
    with pytest.raises(LinkLost):
        link.receive()
    with pytest.raises(LinkLost):
        send_often(link, big)
    link.close()


@pytest.mark.parametrize("near", [True, False], ids=["one-machine", "tcp"])
def test_a_connection_carries_hidden_states(near: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_HAS_NAMES", near and sys.platform == "linux")
    guests = Guests()
    link = connect(guests.address, KEY, {"name": "me"})
    there = guests.links[0]
    if sys.platform == "linux":
        assert (link._connection.family == socket.AF_UNIX) == near
    rooms: list[memoryview] = []
    there.room = lambda mark, size: rooms.pop() if rooms and len(rooms[-1]) == size else None
    for step, rows in enumerate([2, 3, 0, 1000, 1]):  # some are more than what is read ahead
        sent = some_rows(step, rows)
        for size in (0, 7, 96 * rows):
            rooms[:] = [memoryview(bytearray(size))]
            sending = threading.Thread(target=link.send, args=(sent,))
            sending.start()
            assert heard(there) == (Mark(3, step, 5), bytes(sent[1])), step
            sending.join()
    # They may come with something behind them, or in pieces.
    sent = some_rows(20, 2)
    raw = b"".join(bytes(buffer) for buffer in sent)
    for pieces in ([raw + raw], [raw[:9], raw[9:], raw], [raw[:-3], raw[-3:] + raw[:50], raw[50:]]):
        sending = threading.Thread(target=send_slowly, args=(link, pieces))
        sending.start()
        assert heard(there) == heard(there) == (Mark(3, 20, 5), bytes(sent[1]))
        sending.join()
    link._connection.sendall(b"vbt3" + raw[4:])
    with pytest.raises(Garbage):
        there.receive()
    link.close()
    guests.close()


def some_rows(step: int, rows: int) -> list[Any]:
    return list(encode_rows(Mark(3, step, 5), torch.randn(rows, 48).bfloat16()))


def heard(link: Link) -> tuple[Mark, bytes]:
    message = link.receive()
    assert message["do"] == "rows"
    return message["mark"], bytes(message["states"])


def send_slowly(link: Link, pieces: list[bytes]) -> None:
    for piece in pieces:
        link._connection.sendall(piece)
        time.sleep(0.02)


def send_often(link: Link, message: dict[str, Any]) -> None:
    """More than what the operating system would take for somebody who is gone."""
    for _ in range(100):
        link.send(message)


def test_a_peer_that_accepts_nothing_is_lost() -> None:
    ours, theirs = socket.socketpair()
    link = Link(ours)
    link.limit_sending(1)
    with theirs, pytest.raises(LinkLost, match="nothing is accepted"):
        link.send([bytes(1 << 26)])
    with pytest.raises(LinkLost):
        link.send({"do": "ping"})


def test_who_does_not_is_told_why(guests: Guests, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refused, match="it does not know the cluster's key"):
        connect(guests.address, b"x" * 32, {"name": "me"})
    monkeypatch.setattr(links, "_GREETING", b"verbatim-cluster-7\n")
    with pytest.raises(
        Refused, match="it speaks verbatim-cluster-1, and this side verbatim-cluster-7"
    ):
        _connect_to_an_older_one()
    monkeypatch.undo()
    with pytest.raises(Refused, match="we want nobody here"):
        connect(guests.address, KEY, {"name": "nobody"})
    assert guests.met == []
    with pytest.raises(LinkLost, match=r"no connection to 127\.0\.0\.1:1"):
        connect(("127.0.0.1", 1), KEY, {})
    connect(guests.address, KEY, {"name": "me"}).close()


def _connect_to_an_older_one() -> None:
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        peer, _ = server.accept()
        peer.sendall(b"verbatim-cluster-1\n" + bytes(32))
        with contextlib.suppress(ConnectionError):
            peer.recv(1)
        peer.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        connect(server.getsockname(), KEY, {})
    finally:
        thread.join()
        server.close()


def test_an_impostor_behind_the_address_is_found_out() -> None:
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for answer in (links._GREETING + bytes(64), b"HTTP/1.1 400 Bad Request\r\n"):
            peer, _ = server.accept()
            peer.sendall(answer)
            with contextlib.suppress(ConnectionError):
                while peer.recv(1000):
                    pass
            peer.close()

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(Refused, match="does not know the cluster's key"):
        connect(server.getsockname(), KEY, {})
    with pytest.raises(Refused, match="does not speak verbatim-cluster-2"):
        connect(server.getsockname(), KEY, {})
    thread.join()
    server.close()


def test_strangers_of_all_kinds_leave_a_door_open_for_friends(
    guests: Guests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "_SHAKE_S", 0.3)
    strangers = [socket.create_connection(guests.address) for _ in range(20)]
    for i, stranger in enumerate(strangers[:15]):
        said = [b"GET / HTTP/1.1\r\n\r\n" * 10, b"\0" * 5000, links._GREETING + bytes(64)][i % 3]
        stranger.sendall(said)
    link = connect(guests.address, KEY, {"name": "me"})
    # One that was let in and then speaks garbage.
    link._connection.sendall(PREFIX.pack(b"vbt2", 7, 0, 0, 0, 0) + b"garbage")
    with pytest.raises(Garbage):
        guests.links[0].receive()
    for stranger in strangers:
        stranger.settimeout(5)
        with contextlib.suppress(ConnectionError):
            while stranger.recv(4096):
                pass
        stranger.close()
    link.close()


# A stage that hears what it should not.


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage(KEY, "127.0.0.1", Layers())
    yield made
    made.close()
    made.join(5.0)


def ask(link: Link, **message: Any) -> Any:
    link.send({**message, "call": 1})
    return link.receive()


def test_a_stage_refuses_what_it_does_not_expect(stage: Stage) -> None:
    with pytest.raises(Refused, match="role 'king' is not known"):
        connect(stage.address, KEY, {"role": "king"})
    head = connect(stage.address, KEY, {"role": "head"})
    with pytest.raises(Refused, match="serves another head"):
        connect(stage.address, KEY, {"role": "head"})
    with pytest.raises(Refused, match="stage 0 of epoch 3 called stage 0 of epoch 0"):
        connect(stage.address, KEY, {"role": "stage", "epoch": 3, "index": 0})
    kind, text = ask(head, do="dance")["error"]
    assert (kind, text) == ("VerbatimError", "'dance' is nothing that a stage can do")
    asked = ask(head, do="record", name="routing", block_table=[1], num_tokens=1)
    assert asked["result"] is None
    assert ask(head, do="open")["error"][0] == "KeyError"
    sizes = dict(num_blocks=3, num_states=0, keep_bytes=0, first_of={})
    asked = ask(head, do="allocate", **sizes)
    assert asked["error"][1] == "this stage holds no layers yet, or sleeps"
    nobody = ask(head, do="link", next=["127.0.0.1", 1], epoch=0)
    assert "no connection" in nobody["result"]["unreachable"]
    assert ask(head, do="epoch", epoch="x", index=0)["error"][0] == "ValueError"
    assert "result" in ask(head, do="epoch", epoch=4, index=0, restarts=0)
    batch = replace(dummy_batch(), token_ids=torch.tensor([3]))
    rest = {"parts": 1, "first": 0, "stop": 0, "fresh": [], "kept": False, "replays": False}
    work = {"do": "work", "epoch": 3, "step": 1, "part": 0, "batch": batch, **rest}
    head.send(work)
    answer = head.receive()
    assert answer["failed"] == 1 and "is of the past" in answer["error"][1]
    head.send({**work, "epoch": 4, "batch": {}})
    assert head.receive()["error"][0] == "TypeError"
    head.send({**work, "epoch": 4})
    assert head.receive()["error"][1] == "this stage holds no layers yet, or sleeps"
    head.send({**work, "epoch": 4})
    assert "is of the past" in head.receive()["error"][1], "it is not done twice"
    head.send({"do": "work"})
    assert head.receive()["error"][0] == "KeyError"
    stale = ask(head, do="draw", epoch=2, step=0, parts=1, plan={})
    assert "is of the past" in stale["error"][1]
    pong = ask(head, do="ping")["result"]
    assert pong["step"] == 1
    assert ask(head, do="status")["result"]["layers"] is None
    head.close()


def test_a_stage_that_stops_before_its_welcome_is_not_waited_for() -> None:
    stopped, left = threading.Event(), threading.Event()

    def stop(who: Any, link: Link) -> Callable[[], object]:
        stopped.wait(60.0)
        return left.set

    door = Listener(KEY, "127.0.0.1", stop)
    host = SimpleNamespace(address=("127.0.0.1", door.port), machine="one", kill=lambda: None)
    hosts: Any = SimpleNamespace(key=KEY, start=lambda count, avoid: [host])
    try:
        with pytest.raises(NoHost):
            StageGroup(hosts, patience_s=0.3, step_timeout_s=60.0).launch(1)
    finally:
        stopped.set()
        door.close()
        assert left.wait(10.0)


def test_a_stage_whose_head_is_gone_ends() -> None:
    ended = threading.Event()
    stage = Stage(KEY, "127.0.0.1", Layers(), ended.set)
    connect(stage.address, KEY, {"role": "head"}).close()
    assert ended.wait(5)
    with pytest.raises(LinkLost):
        connect(stage.address, KEY, {"role": "head"})
