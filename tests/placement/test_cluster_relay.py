"""Where nothing but Ray reaches the stages: the same words, more slowly."""

from __future__ import annotations

import os
import queue
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support.requests_mixed import all_facts, mixed_requests
from support.stages import ThreadHosts
from verbatim import LLM, Cluster, InvalidRequest, SamplingParams, VerbatimError
from verbatim.placement.cluster import hosts as cluster_hosts
from verbatim.placement.cluster.contact import NAMESPACE, begin_ray
from verbatim.placement.cluster.crew import Crew, Host, Member
from verbatim.placement.cluster.link import RELAY, Link, LinkLost, Refused
from verbatim.placement.cluster.relay import GROUPS, Called, RelayDoor, reach, relay_address
from verbatim.placement.cluster.wire import Garbage, encode

KEY = b"k" * 32
NOWHERE = ("127.0.0.1", 1)  # nobody listens there
LOST_S = 30.0  # after which a test fails that waits for somebody to be told


def frame(**message: Any) -> bytes:
    return b"".join(encode(message))


def unpacked(frames: list[bytes]) -> list[Any]:
    link = Called(None)
    for number, raw in enumerate(frames):
        link.put(number, raw)
    return [link.receive() for _ in frames]


# The side of the actor, without Ray.


def test_frames_are_read_in_the_order_in_which_they_were_sent() -> None:
    link = Called(None)
    for number in (2, 0, 3, 1):
        assert link.put(number, frame(number=number, array=torch.arange(number)))
    found = [link.receive() for _ in range(4)]
    assert [message["number"] for message in found] == [0, 1, 2, 3]
    assert [message["array"].tolist() for message in found] == [[], [0], [0, 1], [0, 1, 2]]


@pytest.mark.parametrize(
    "raw",
    [b"", b"vbt", b"GET / HTTP/1.1\r\n\r\n", frame(a=1)[:-1], frame(a=1) + b" "],
    ids=["empty", "short", "http", "cut", "longer"],
)
def test_garbage_is_called_garbage(raw: bytes) -> None:
    link = Called(None)
    link.put(0, raw)
    with pytest.raises(Garbage):
        link.receive()


def test_a_closed_link_takes_and_gives_nothing_but_what_it_had() -> None:
    link = Called(None)
    link.send({"last": 1})
    link.close()
    assert not link.put(0, frame(late=1))
    with pytest.raises(LinkLost):
        link.send({"later": 1})
    assert not link.over
    frames, more = link.fetch()
    assert (unpacked(frames), more, link.over) == ([{"last": 1}], False, True)
    for _ in range(2):
        with pytest.raises(LinkLost):
            link.receive()


def test_who_takes_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verbatim.placement.cluster.relay._MAX_WAITING", 3)
    link = Called(None)
    for _ in range(3):
        link.send({})
    with pytest.raises(LinkLost, match="takes nothing"):
        link.send({})
    assert link.closed


class Room:
    """Lets everybody in who isn't called Mallory, and takes down what they say."""

    def __init__(self) -> None:
        self.heard: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def let_in(self, who: dict[str, Any], link: Link) -> None:
        if who["name"] == "Mallory":
            raise VerbatimError("not you")
        link.send({"welcome": who["name"]})
        try:
            while True:
                self.heard.put(link.receive())
        except LinkLost as error:
            self.heard.put(str(error))


def knock(door: RelayDoor, channel: str, name: str, key: bytes = KEY) -> bytes | None:
    import hmac

    proof = hmac.digest(key, b"relaycaller" + channel.encode(), "sha256")
    return door.knock(channel, proof, frame(name=name), None)


def test_a_door_lets_in_who_knows_the_key_and_tells_the_others_why() -> None:
    room = Room()
    door = RelayDoor(KEY, room.let_in)
    assert knock(door, "a", "Alice", b"x" * 32) is None
    assert door.fetch("a") == ([], False) and not door.deliver("a", 0, frame())
    assert knock(door, "a", "Alice") is not None
    assert knock(door, "a", "Bob") is None  # there is such a link
    assert unpacked(door.fetch("a")[0]) == [{"welcome": "Alice"}]
    assert door.deliver("a", 0, frame(said=1)) and room.heard.get(timeout=LOST_S) == {"said": 1}
    door.hang_up("a")
    assert "closed" in room.heard.get(timeout=LOST_S)
    assert not door.deliver("a", 1, frame(said=2))
    assert knock(door, "m", "Mallory") is not None
    frames, _ = door.fetch("m")
    assert unpacked(frames) == [{"refused": "not you"}]
    assert knock(door, "a", "Alice") is not None  # the first one is over


def test_a_door_has_room_for_so_many() -> None:
    door = RelayDoor(KEY, Room().let_in)
    answers = [knock(door, str(number), "Alice") for number in range(65)]
    assert [answer is None for answer in answers] == [False] * 64 + [True]
    for number in range(64):
        door.hang_up(str(number))


# The choice.


@pytest.mark.parametrize("bad", ["tcp", "", None, 1], ids=["tcp", "empty", "none", "number"])
def test_a_transport_that_is_none_is_refused(bad: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"transport=.*auto.*direct.*actors"):
        Cluster(transport=bad)


def test_actors_need_ray() -> None:
    with pytest.raises(InvalidRequest, match="transport='actors' needs Ray"):
        Cluster(transport="actors", hosts=ThreadHosts())


# With Ray.


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    ray = cluster_hosts.import_ray()
    begin_ray(None)
    yield ray
    ray.shutdown()


class Listener(RelayDoor):
    """An actor whose links end in a room, and which can call others."""

    def __init__(self, name: str) -> None:
        self.room = Room()
        self.name = name
        super().__init__(KEY, self.room.let_in)

    def call(self, name: str) -> Any:
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def call() -> None:  # as a stage does, in a thread that isn't Ray's
            self.link = reach(relay_address(name), KEY, {"name": self.name})
            self.link.send({"said": os.getpid()})
            answers.put(self.link.receive())

        threading.Thread(target=call).start()
        return answers.get(timeout=LOST_S)

    def heard(self) -> Any:
        return self.room.heard.get(timeout=LOST_S)


@pytest.fixture
def listeners(ray: Any) -> Iterator[dict[str, Any]]:
    kind = ray.remote(num_cpus=0, max_concurrency=4, concurrency_groups=GROUPS)(Listener)
    names = [f"{one}-{secrets.token_hex(4)}" for one in ("a", "b")]
    here = {"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}}
    made = {
        name: kind.options(name=name, namespace=NAMESPACE, runtime_env=here).remote(name)
        for name in names
    }
    ray.get([actor.__ray_ready__.remote() for actor in made.values()])
    yield made
    for actor in made.values():
        ray.kill(actor)


def ended(link: Link) -> str:
    """What the link's end says to who receives."""
    told: queue.SimpleQueue[str] = queue.SimpleQueue()

    def receive() -> None:
        try:
            link.receive()
        except LinkLost as error:
            told.put(str(error))

    threading.Thread(target=receive, daemon=True).start()
    return told.get(timeout=LOST_S)


@pytest.mark.slow
def test_links_between_actors(ray: Any, listeners: dict[str, Any]) -> None:
    (a, one), (b, other) = listeners.items()
    with pytest.raises(LinkLost):
        reach(relay_address("nobody"), KEY, {"name": "test"})
    with pytest.raises(Refused, match="key"):
        reach(relay_address(a), b"x" * 32, {"name": "test"})
    link = reach(relay_address(a), KEY, {"name": "Mallory"})
    assert link.receive() == {"refused": "not you"}
    assert "closed" in ended(link)

    mine = reach(relay_address(a), KEY, {"name": "test"})
    assert mine.receive() == {"welcome": "test"}
    large = torch.randn(300, 1000)  # which Ray sends another way than what is small
    for number in range(20):
        mine.send({"number": number, "array": large if number % 3 == 0 else large[0]})
    heard = [ray.get(one.heard.remote()) for _ in range(20)]
    assert [message["number"] for message in heard] == [*range(20)]
    assert all(torch.equal(m["array"], large if m["number"] % 3 == 0 else large[0]) for m in heard)

    assert ray.get(other.call.remote(a)) == {"welcome": b}
    (pid,) = ray.get(one.heard.remote()).values()
    os.kill(pid, signal.SIGKILL)
    assert "lost" in ray.get(one.heard.remote())  # who was called is told that the caller is gone
    mine.close()
    assert "closed" in ray.get(one.heard.remote())
    with pytest.raises(LinkLost):
        mine.send({})
    mine = reach(relay_address(a), KEY, {"name": "test"})
    assert mine.receive() == {"welcome": "test"}
    ray.kill(one)
    assert "lost" in ended(mine)  # and so is who calls


def addresses(llm: LLM) -> list[str]:
    crew: Crew = llm.engine.runner.crew  # type: ignore[attr-defined]
    return [member.host.address[0] for member in crew.members]


@pytest.mark.slow
def test_words_by_way_of_ray_and_after_a_kill(ray: Any, folders: Callable[[str], Path]) -> None:
    prompts, params = mixed_requests()
    with LLM(folders("qwen3"), max_length=200) as llm:
        want = all_facts(llm.generate(prompts, params))
        words = llm.generate([5, 6, 7], SamplingParams(max_tokens=12, ignore_eos=True, seed=1))
    placement = Cluster(stages=3, transport="actors")
    with LLM(folders("qwen3"), max_length=200, placement=placement) as llm:
        assert all(host.startswith(RELAY) for host in addresses(llm))
        assert all_facts(llm.generate(prompts, params)) == want
        for victim in (1, 0):
            pids = [stage["pid"] for stage in llm.info()["stages"]]
            found: list[int] = []
            for delta in llm.stream(
                [5, 6, 7], SamplingParams(max_tokens=12, ignore_eos=True, seed=1)
            ):
                if not found:
                    os.kill(pids[victim], signal.SIGKILL)
                found += delta.token_ids
            assert found == words[0].outputs[0].token_ids
            now = [stage["pid"] for stage in llm.info()["stages"]]
            assert [pid for pid in now if pid not in pids] == [now[victim]]
        listening = [m._listener for m in llm.engine.runner.crew.members]  # type: ignore[attr-defined]
    assert not any(thread.is_alive() for thread in listening)


@pytest.mark.slow
@pytest.mark.parametrize("who", ["head", "stage"])
def test_who_cannot_connect_goes_by_way_of_ray(
    ray: Any, folders: Callable[[str], Path], who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait, meet = cluster_hosts.RayHosts._wait, Crew.meet

    def wait_and_wall(self: Any, host: Any, deadline: float) -> None:
        wait(self, host, deadline)
        host.address = NOWHERE

    def meet_and_wall(self: Crew, host: Host) -> Member:
        member = meet(self, host)
        if not host.address[0].startswith(RELAY):
            host.address = NOWHERE
        return member

    if who == "head":
        monkeypatch.setattr(cluster_hosts.RayHosts, "_wait", wait_and_wall)
    else:
        monkeypatch.setattr(Crew, "meet", meet_and_wall)
    prompt, params = [5, 6, 7] * 9, SamplingParams(max_tokens=12, temperature=0.8, seed=1)
    with LLM(folders("qwen3")) as llm:
        want = all_facts(llm.generate(prompt, params))
    with LLM(folders("qwen3"), placement=Cluster(stages=2)) as llm:
        assert addresses(llm)[1].startswith(RELAY)
        assert all_facts(llm.generate(prompt, params)) == want
    with pytest.raises(VerbatimError, match=r"no connection to 127\.0\.0\.1:1"):
        LLM(folders("qwen3"), placement=Cluster(stages=2, transport="direct", spares=0))
