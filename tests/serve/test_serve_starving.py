"""Hostile bodies and connections: each gets a response, leaks nothing and blocks no other client."""

from __future__ import annotations

import json
import os
import random
import resource
import select
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.hostile import BODIES, MARK, marked
from support.pairwise import slow_but
from support.programs import PATIENCE_S, in_thread
from support.serving import Client, Served, received, request_of, routes_of, running, serving, until
from verbatim import LLM
from verbatim.errors import InvalidRequest
from verbatim.serve.app import make_app
from verbatim.serve.bodies import MAX_CONTAINERS
from verbatim.serve.server import connection_limit
from verbatim.serve.settings import ServeSettings

MODEL = {"model": Client.model}
SHORT = {"prompt": "Once", "max_tokens": 4, "temperature": 0}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
NUM_BODIES = int(os.environ.get("VERBATIM_FUZZ_BODIES", "150"))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(kv_memory="64MB") as llm:
        yield llm


@pytest.fixture(scope="module")
def served(llm: LLM) -> Iterator[Served]:
    with serving(llm, ServeSettings(training=True)) as server:
        yield server


# ---- bodies


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": [1.5] * 200_000}, "prompt.0"),
        ("/v1/completions", {"prompt": ["a"] * 2000}, "prompt"),
        ("/v1/completions", SHORT | {"bad_words": [1.5] * 200_000}, "bad_words.0"),
        ("/v1/completions", SHORT | {"bad_words": ["a"] * 5000}, "bad_words"),
        ("/v1/completions", SHORT | {"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias"),
        ("/v1/completions", SHORT | {"choice": ["a"] * 5000}, "choice"),
        ("/v1/completions", SHORT | {"stop": ["a"] * 65}, "stop"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{}] * 60_000}]},
         "messages.0.content.0.type"),
        ("/v1/chat/completions", {"messages": ["a", 1] * 100_000}, "messages.0"),
        ("/v1/responses", {"input": [{"role": "x", "content": "a"}] * 10_000}, "input.0.role"),
        ("/v1/generate", {"prompt": "x", "params": {"bad_words": ["a"] * 5000}}, "bad_words"),
        ("/v1/logprobs", {"prompts": [[1]] * 2000}, "prompts"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_list_is_rejected_at_first_error_or_at_its_limit(served, path, body, field):
    refusal = served.refused(path, body)
    assert refusal["param"] == field
    assert len(refusal["message"]) < 300


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [[1]] * 100_000},
        {"prompt": "x", "json_schema": {"enum": [[]] * 100_000}},
        {"prompt": "x", **{f"a{i}": 1 for i in range(100_000)}},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "[[" + "[]," * 100_000},
    ],
    ids=["lists", "schema", "fields", "arguments"],
)
def test_body_with_too_many_containers_is_rejected(served, body):
    path = "/v1/completions" if "prompt" in body else "/v1/responses"
    body = body if "prompt" in body else {"input": [body]}
    assert "; at most 65536" in served.refused(path, body)["message"]


def test_brackets_inside_strings_are_not_counted(served):
    text = '{"[:\\' * (MAX_CONTAINERS // 2 + 1)
    refusal = served.refused("/v1/completions", {"prompt": text, "max_tokens": 1})
    assert refusal["code"] == "context_length_exceeded"


def test_every_list_in_openapi_document_has_a_limit(served):
    document = served.client.get("/openapi.json").json()
    bounded = []

    def walk(schema: Any, path: str) -> None:
        if isinstance(schema, list):
            for index, entry in enumerate(schema):
                walk(entry, f"{path}.{index}")
        elif isinstance(schema, dict):
            if schema.get("type") == "array":
                assert "maxItems" in schema, path
                bounded.append(path)
            # `SamplingParams` limits the text length of JSON schemas; the number of objects in a body limits
            # the arguments of earlier calls.
            free = ("json_schema.anyOf.0", "properties.json.anyOf.0", "parameters.anyOf.0")
            free += (".schema", ".input_schema", ".input")
            if schema.get("additionalProperties") not in (None, False) and not path.endswith(free):
                assert "maxProperties" in schema, path
                bounded.append(path)
            for key, value in schema.items():
                if key not in ("examples", "default"):
                    walk(value, f"{path}.{key}")

    for name, schema in document["components"]["schemas"].items():
        if not name.endswith("Error"):  # FastAPI's own schemas of answers
            walk(schema, name)
    assert len(bounded) > 25


def test_chunked_body_is_rejected_and_not_read_further(served):
    """With a Content-Length, a proxy and this server could see different requests (request smuggling)."""
    hidden = b"0\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for length in (b"", b"Content-Length: %d\r\n" % len(hidden)):
        with served.connect() as link:
            link.sendall(HEAD + length + b"Transfer-Encoding: chunked\r\n\r\n" + hidden)
            answer = received(link)
        assert answer.startswith(b"HTTP/1.1 411") and answer.count(b"HTTP/1.1") == 1
        assert b"Content-Length" in answer.partition(b"\r\n\r\n")[2]
    with served.connect() as link:
        link.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        with pytest.raises(ConnectionError):
            link.sendall(b"1\r\na\r\n" * 10_000_000)


def test_total_size_of_bodies_in_progress_is_limited(llm):
    with serving(llm, ServeSettings(max_body_bytes=300_000)) as server:
        links = []
        for _ in range(17):  # 16 times 300,000 bytes are allowed
            links.append(server.connect())
            links[-1].sendall(HEAD + b"Content-Length: 299000\r\n\r\n" + b" " * 290_000)
        for link in select.select(links, [], [])[0]:  # the connection that exceeded the limit
            assert link.recv(65536).startswith(b"HTTP/1.1 429")
        assert server.post("/v1/completions", **SHORT)["choices"]
        for link in links:
            link.close()
        large = {"prompt": "a" * 290_000}
        until(lambda: server.refused("/v1/completions", large)["code"] != "rate_limit_exceeded")


def test_negative_priority_is_rejected_unless_enabled(llm, served):
    low = {"priority": -1}
    for path, more in ("/v1/completions", low), ("/v1/generate", {"params": low}):
        body = {"prompt": "x"} | more
        refusal = served.refused(path, body)
        assert (refusal["param"], "0 or more" in refusal["message"]) == ("priority", True)
    with serving(llm, ServeSettings(negative_priorities=True)) as server:
        assert server.post("/v1/completions", **SHORT, priority=-1)["choices"]


def test_client_filling_the_batch_gives_way_to_others():
    """The batch has four slots; one client's four choices are two more than its share."""
    with LLM(kv_memory="64MB", max_sequences=4) as llm, serving(llm) as server:
        alone = server.post("/v1/completions", **SHORT, seed=1)["choices"]
        body = {"prompt": "x", "n": 4, "max_tokens": 1900, "ignore_eos": True, "stream": True}
        other = httpx.HTTPTransport(local_address="127.0.0.2")
        with server.connect() as link, Client(transport=other, base_url=server.url) as client:
            link.sendall(request_of(body))
            assert link.recv(100).startswith(b"HTTP/1.1 200")
            answer = client.post("/v1/completions", json=SHORT | {"seed": 1})
            assert answer.json()["choices"] == alone
            assert server.service.num_in_progress == 1  # the four choices are still running
        server.until_idle()


# ---- hostile values and connections

INTEGERS = [2**31, 2**63, 2**64, 10**30, -1, -(2**63) - 1]
NUMBERS = ["1e308", "1e-320", "1e400", "NaN", "-Infinity", "-0.0", "true", "-" + "9" * 30]
TEXTS = [
    "\ud83d", "\x00", "\u202e\ufeff", "\U0010ffff", "a\u0301" * 500, "<|endoftext|>", "<tool_call>",
    "{{ 7 * 7 }}", "\r\n\r\nHTTP/1.1 200 OK\r\n", "\N{MATHEMATICAL DOUBLE-STRUCK DIGIT ONE}",
]  # fmt: skip
VALUES = [*map(str, INTEGERS), *NUMBERS, *map(json.dumps, TEXTS)]
for depth in (50, 400, 3000):
    VALUES += ["[" * depth + "]" * depth, '{"items":' * depth + "1" + "}" * depth]
    VALUES += ['{"not":' * depth + "{}" + "}" * depth]


# A number and nested lists; texts and booleans are valid in more fields, which then generate for seconds.
@pytest.mark.parametrize(
    "value", slow_but((VALUES[0], VALUES[-9]), VALUES), ids=lambda value: value[:12]
)
def test_hostile_values_in_any_field_cause_no_server_error(served: Served, value: str) -> None:
    models = {
        route.path: route.body_field.field_info.annotation
        for route in routes_of(make_app(served.llm, served.service.settings).routes)
        if getattr(route, "body_field", None) is not None
    }
    assert models.keys() == BODIES.keys()
    headers = {"content-type": "application/json"}
    for path, bodies in BODIES.items():
        fields = models[path].model_fields
        named = {"model": "storyteller"} if "model" in fields else {}
        changes = [bodies[0] | {name: MARK} for name in fields]
        for body in [*changes, *(changed for one in bodies for changed in marked(one))]:
            text = json.dumps(named | body).replace(json.dumps(MARK), value)
            answer = served.client.post(path, content=text, headers=headers)
            assert answer.status_code in (200, 400, 403, 404, 409), (path, text[:300], answer.text)
            assert "server_error" not in answer.text, text[:300]  # not in a stream either
            if answer.status_code != 200:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    served.until_idle()


@pytest.mark.slow
def test_pipelined_requests_are_answered_in_order(served):
    bodies = [SHORT | {"temperature": 1, "seed": seed} for seed in range(4)]
    alone = [served.post("/v1/completions", **body) for body in bodies]
    with served.connect() as connection:
        connection.sendall(b"".join(map(request_of, bodies)))
        found = b""
        while found.count(b"}}}") < 4:  # where an answer ends
            more = connection.recv(65536)
            assert more, found
            found += more
    parts = found.split(b"HTTP/1.1 200 OK")[1:]
    answers = [json.loads(part[part.index(b"{") :]) for part in parts]
    assert [a["choices"] for a in answers] == [a["choices"] for a in alone]


# ---- responses


def test_request_for_too_large_response_is_rejected(served):
    body = SHORT | {"n": 64, "max_tokens": 200, "logprobs": 1024, "echo": True}
    refusal = served.refused("/v1/completions", body)
    assert "1,3" in refusal["message"] and "33,554,432" in refusal["message"]
    assert "lower max_tokens" in refusal["message"]
    params = {"n": 64, "max_tokens": 200, "logprobs": 1024}
    served.refused("/v1/generate", {"prompt": "x", "params": params})


def test_total_size_of_responses_in_progress_is_limited(llm):
    body = SHORT | {"max_tokens": 1000, "ignore_eos": True, "logprobs": 8}
    settings = ServeSettings(max_response_bytes=910_000)
    with serving(llm, settings) as server:
        links = []
        for _ in range(16):  # the limit allows this many of the largest responses
            link = server.connect()
            link.sendall(request_of(body | {"stream": True}))
            links.append(link)
        for link in links:
            assert link.recv(100).startswith(b"HTTP/1.1 200")
        llm.pause()  # so that none comes to its end
        assert "total size" in server.refused("/v1/completions", body, 429)["message"]
        for link in links:
            link.close()
        server.until_idle()
        llm.resume()
        assert server.post("/v1/completions", **body)["choices"]


@pytest.mark.parametrize(
    "path",
    slow_but(["/v1/chat/completions"], ["/v1/completions", "/v1/chat/completions", "/v1/generate"]),
)
def test_large_response_in_pieces_equals_response_at_once(llm, path, monkeypatch):
    body: dict[str, Any] = {"max_tokens": 200, "seed": 3, "n": 3, "ignore_eos": True}
    if path == "/v1/chat/completions":
        body |= {"messages": [{"role": "user", "content": "x"}], "logprobs": True}
        body["top_logprobs"] = 20
    elif path == "/v1/generate":
        body = {"prompt": "x", "params": body | {"logprobs": 30, "prompt_logprobs": 3}}
    else:
        body |= {"prompt": ["x", "y"], "logprobs": 30, "echo": True}
    if path != "/v1/generate":
        body |= MODEL
    with serving(llm) as server:
        answer = server.client.post(path, json=body)
        assert "content-length" not in answer.headers
        monkeypatch.setattr("verbatim.serve.events.PIECE_BYTES", 1 << 30)
        monkeypatch.setattr("verbatim.serve.errors.PIECE_BYTES", 1 << 30)
        at_once = server.client.post(path, json=body)
    assert "content-length" in at_once.headers
    assert len(answer.content) > 300_000
    assert plain(answer.json()) == plain(at_once.json())


def plain(answer: dict[str, Any]) -> dict[str, Any]:
    own = {"id", "created", "request_id", "metrics", "prompt_tokens_details", "usage"}
    return {key: value for key, value in answer.items() if key not in own | {"num_cached_tokens"}}


# ---- connections


def test_connections_without_complete_request_head_are_closed(llm):
    with serving(llm, ServeSettings(idle_timeout_s=0.2)) as server:
        for start in (b"", b"GET / HTTP/1.1\r\nX: "):
            with server.connect() as link:
                link.sendall(start)
                assert link.recv(100) == b""
        answer = b""
        while not answer:  # retry if the first head was late, too
            with server.connect() as link:
                # the second head stays incomplete
                link.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea")
                answer = received(link)
        assert answer.endswith(b'{"status":"ok"}')


def test_new_connection_replaces_longest_waiting_one(llm):
    with serving(llm, ServeSettings(max_connections=4, max_connections_per_address=4)) as server:
        links = [server.connect() for _ in range(4)]
        for link in links:
            link.sendall(b"GET / HTTP/1.1\r\nX: ")
        until(lambda: server.num_connections() >= 4)
        assert server.client.get("/health").status_code == 200
        assert links[0].recv(10) == b""
        for link in links:
            link.close()


def test_only_health_is_answered_when_all_connections_are_busy(llm):
    settings = ServeSettings(max_connections=8, max_connections_per_address=3)
    body = {"prompt": "x", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with serving(llm, settings) as server:
        links = []
        for _ in range(3):
            link = server.connect()
            link.sendall(request_of(body))
            assert link.recv(100)
            links.append(link)
        llm.pause()  # so that none comes to its end
        for _ in range(3):
            with Client(base_url=server.url) as client:
                assert client.get("/health").status_code == 200
            with Client(base_url=server.url) as client:
                refused = client.post("/v1/completions", json=SHORT)
            assert refused.status_code == 503
            assert refused.headers["connection"] == "close"
            assert "too many connections" in refused.text
        llm.resume()
        other = server.connect("127.0.0.2")
        other.sendall(request_of(SHORT))
        assert other.recv(100).startswith(b"HTTP/1.1 200")
        for link in (*links, other):
            link.close()
        server.until_idle()


def test_half_closed_connection_gets_its_response(served):
    for stream in (False, True):
        with served.connect() as link:
            body = SHORT | {"max_tokens": 200, "ignore_eos": True, "stream": stream}
            link.sendall(request_of(body))
            link.shutdown(socket.SHUT_WR)
            answer = received(link)
        answer = answer.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
        assert answer.startswith(b"HTTP/1.1 200")
        assert b'"finish_reason":"length"' in answer
        assert answer.count(b"HTTP/1.1") == 1
    served.until_idle()


def test_max_connections_above_ulimit_is_rejected():
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    with pytest.raises(InvalidRequest, match=rf"max_connections={allowed}: .*ulimit -n"):
        connection_limit(ServeSettings(max_connections=allowed))
    assert connection_limit(ServeSettings(max_connections=2)) == 2


# ---- load


class Others:
    """Clients that keep requesting /health and a short completion."""

    def __init__(self, url: str) -> None:
        self.num_answers = 0
        self.errors: list[str] = []
        self._url = url
        self._ended = threading.Event()

    def _ask(self, method: str, path: str, **body: Any) -> None:
        while not self._ended.is_set():
            try:
                with Client(base_url=self._url) as client:
                    answer = client.request(method, path, **body)
                self.num_answers += 1
                if answer.status_code != 200:
                    self.errors.append(f"{path}: {answer.status_code} {answer.text}")
            except httpx.HTTPError as error:
                self.errors.append(f"{path}: {error!r}")
            time.sleep(0.01)

    def __enter__(self) -> Others:
        self._ended.clear()
        complete = partial(self._ask, "POST", "/v1/completions", json=SHORT)
        self._askers = [in_thread(self._ask, "GET", "/health"), in_thread(complete)]
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for asker in self._askers:
            asker.result(PATIENCE_S)


def resident_mb(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) >> 10


def large(rng: random.Random) -> str:
    """JSON of up to 4 MB, of very many or very long parts."""
    size, nested = int(10 ** rng.uniform(0, 6.4)), "[" * 900 + "1" + "]" * 900
    entry = rng.choice('1.5 1 -1 "a" "" {} [] [1] null {"type":"text"}'.split())
    return rng.choice(
        [
            f"[{', '.join([entry] * (size // len(entry)))}]",
            json.dumps("ab " * size),
            json.dumps("\u20ac\ud83d" * (size // 12)),
            json.dumps({str(i): entry for i in range(size // 12)}),
            nested,
            str(10 ** min(size, 4000)),
        ]
    )


def mutated(rng: random.Random, path: str) -> bytes:
    """A body with a large value somewhere, and sometimes with a byte that breaks it."""
    changed = rng.choice([*marked(rng.choice(BODIES[path]))])
    text = json.dumps(MODEL | changed).replace(json.dumps(MARK), large(rng))
    raw = text.encode()[: (4 << 20) - 1]
    if rng.random() < 0.15:
        at = rng.randrange(len(raw))
        raw = raw[:at] + rng.choice([b"", b"\xff", b'"', b"[", b"}", b"\\u"]) + raw[at + 1 :]
    return raw


@pytest.mark.slow
def test_mutated_bodies_do_not_block_other_clients():
    """VERBATIM_FUZZ_BODIES sets how many are sent."""
    seed = int(os.environ.get("VERBATIM_FUZZ_SEED", "1"))
    rng = random.Random(seed)
    headers = {"content-type": "application/json"}
    with running("--kv-memory", "16MB") as (process, url), Client(base_url=url) as client:
        paths = [path for path in BODIES if path.startswith("/v1") or "token" in path]
        others = Others(url)
        with others:
            until(lambda: others.num_answers > 50)
        before = resident_mb(process.pid)
        for first in range(0, NUM_BODIES, 50):
            # Built before the other threads of this process run, as it would delay them.
            chosen = rng.choices(paths, k=min(50, NUM_BODIES - first))
            bodies = [(path, mutated(rng, path)) for path in chosen]
            with others:
                for number, (path, raw) in enumerate(bodies, start=first):
                    answer = client.post(path, content=raw, headers=headers)
                    context = number, path, raw[:300]
                    assert answer.status_code in (200, 400, 403, 404, 413, 429), context
        until(lambda: resident_mb(process.pid) < before + 100)  # memory is returned after a second
    assert not others.errors


def partial_head(link: socket.socket) -> None:
    link.sendall(b"GET / HTTP/1.1\r\nX: ")


def partial_body(link: socket.socket) -> None:
    link.sendall(HEAD + b"Content-Length: 1000\r\n\r\n{")


def half_closed(link: socket.socket) -> None:
    link.sendall(request_of(SHORT))
    link.shutdown(socket.SHUT_WR)


def never_reading(link: socket.socket) -> None:
    link.sendall(request_of(SHORT | {"max_tokens": 1500, "logprobs": 20, "ignore_eos": True}))


@pytest.mark.slow
@pytest.mark.parametrize("slow", [partial_head, partial_body, half_closed, never_reading])
def test_500_slow_clients_do_not_block_health(slow):
    with running("--max-requests", "600") as (process, url):
        port = int(url.rsplit(":", 1)[1])
        links = []
        with Others(url) as others:
            for _ in range(500):
                link = socket.socket()
                link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                link.settimeout(PATIENCE_S)
                link.connect(("127.0.0.1", port))
                try:
                    slow(link)
                except ConnectionError:  # it was closed at once to make room
                    pass
                links.append(link)
            before = others.num_answers
            time.sleep(5)
            until(lambda: others.num_answers > before + 20)
        for link in links:
            link.close()
        assert process.poll() is None
    assert not [error for error in others.errors if "/health" in error], others.errors[:3]
