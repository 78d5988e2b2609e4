"""What a server lets in, how much of it, and what it keeps when a client goes."""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import logging
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
import torch

from support.programs import PATIENCE_S, in_thread
from support.serving import Client, Served, received, request_of, serving, until
from verbatim import LLM
from verbatim.errors import InvalidRequest
from verbatim.sampling.grammar import GrammarCompiler
from verbatim.serve.app import make_app
from verbatim.serve.completions import CompletionRequest
from verbatim.serve.errors import PIECE_BYTES, json_pieces, to_bytes
from verbatim.serve.fields import Completions
from verbatim.serve.server import Server, configured, listen, logged, run
from verbatim.serve.service import UNKNOWN
from verbatim.serve.settings import LOCAL_HOSTS, ServeSettings, is_local

KEYS = ("first-key-1", "second-key-2")
JSON = {"content-type": "application/json"}
LONG = {"model": "storyteller", "prompt": "x", "max_tokens": 1500, "ignore_eos": True, "seed": 1}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_waiting=4, max_sequences=2) as llm:
        yield llm


@pytest.fixture(scope="module")
def served(llm: LLM) -> Iterator[Served]:
    settings = ServeSettings(max_body_bytes=20_000, max_requests=6, max_choices=4)
    with serving(llm, settings) as server:
        yield server


@pytest.fixture(scope="module")
def locked(llm: LLM) -> Iterator[Served]:
    settings = ServeSettings(api_keys=KEYS, cors_origins=("https://a.example",))
    with serving(llm, settings) as server:
        yield server


@pytest.fixture(scope="module")
def local(llm: LLM) -> Iterator[Served]:
    with serving(llm, ServeSettings(hosts=LOCAL_HOSTS)) as server:
        yield server


# ---- keys


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, "missing_api_key"),
        ({"Authorization": "first-key-1"}, "missing_api_key"),
        ({"Authorization": "Basic first-key-1"}, "missing_api_key"),
        ({"Authorization": "Bearer first-key-"}, "invalid_api_key"),
        ({"Authorization": "Bearer first-key-12"}, "invalid_api_key"),
        ({"Authorization": "Bearer \xff\xfe"}, "invalid_api_key"),
    ],
    ids=["none", "bare", "basic", "shorter", "longer", "bytes"],
)
def test_without_a_key_nothing_is_answered(locked, headers, code):
    raw = {name: value.encode("latin-1") for name, value in headers.items()}
    for method, path in [("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/metrics"),
                         ("GET", "/docs"), ("GET", "/openapi.json"), ("GET", "/nope"),
                         ("GET", "/v1/engine"), ("OPTIONS", "/v1/completions")]:  # fmt: skip
        answer = locked.client.request(method, path, headers=raw)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == code
        assert answer.headers["www-authenticate"] == "Bearer"
    for path in ("/health", "/ready"):
        assert locked.client.get(path, headers=raw).status_code == 200


def test_each_key_is_let_in_and_they_share_no_prefix(locked):
    """Whether a prompt was asked before must not be seen by another key's owner."""
    prompt = "A prompt that fills a block of sixteen tokens, and then another one. " * 4

    def cached(key: str, **more: Any) -> int:
        answer = locked.client.post(
            "/v1/completions",
            json={"prompt": prompt, "max_tokens": 1} | more,
            headers={"Authorization": f"Bearer {key}"},
        )
        assert answer.status_code == 200, answer.text
        found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    assert cached(KEYS[0]) == 0
    assert cached(KEYS[0]) > 0
    assert cached(KEYS[1]) == 0
    assert cached(KEYS[1]) > 0
    assert cached(KEYS[0], cache_salt="mine") == 0


def test_other_origins_are_let_in_where_told(locked, served):
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST",
             "Access-Control-Request-Headers": "authorization"}  # fmt: skip
    answer = locked.client.options("/v1/completions", headers=asked)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://a.example"
    refused = locked.client.get("/v1/models", headers={"Origin": "https://a.example"})
    assert refused.headers["access-control-allow-origin"] == "https://a.example"
    other = asked | {"Origin": "https://b.example"}
    answer = locked.client.options("/v1/completions", headers=other)
    assert "access-control-allow-origin" not in answer.headers
    for headers in (asked, other):
        answer = served.client.options("/v1/completions", headers=headers)
        assert answer.status_code == 405
        assert "access-control-allow-origin" not in answer.headers


# ---- bodies


def test_a_body_that_is_too_long_is_413(served):
    body = json.dumps({"prompt": "x" * 20_000})
    answer = served.client.post("/v1/completions", content=body, headers=JSON)
    assert (answer.status_code, answer.json()["error"]["type"]) == (413, "invalid_request_error")
    assert "20000" in answer.text

    def pieces() -> Iterator[bytes]:
        yield from (b'{"prompt": "' + b"x" * 8000, b"x" * 8000, b"x" * 8000, b'"}')

    answer = served.client.post("/v1/completions", content=pieces(), headers=JSON)  # chunked
    assert answer.status_code == 411
    assert "Content-Length" in answer.json()["error"]["message"]
    served.until_idle()


def test_a_body_that_never_ends_is_408(llm):
    with serving(llm, ServeSettings(body_timeout_s=0.4)) as server:
        with server.connect() as link:
            link.sendall(request_of(b'{"prompt": "x"}')[:-5])
            said = received(link)
        assert b" 408 " in said.split(b"\r\n")[0]
        assert b"0.4 s" in said
        server.until_idle()


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400), (b"{", 400), (b"[]", 400), (b"null", 400), (b'"x"', 400), (b"NaN", 400),
        (b'{"prompt": "x", "temperature": NaN}', 400), (b'{"prompt": "\xff"}', 400),
        (b'{"prompt": "x", "top_p": Infinity}', 400), (b"[" * 15_000, 400),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", 400),
        (b'{"prompt": "x", "seed": ' + b"9" * 4000 + b"}", 400),
        (b'{"prompt": "x", "temperature": 1' + b"0" * 400 + b"}", 400),
        (b'{"prompt": ' + b"[" * 900 + b"1" + b"]" * 900 + b"}", 400),
        (b'{"prompt": "x", "json_schema": ' + b'{"items":' * 900 + b"{}" + b"}" * 901, 400),
        (b'{"prompt": "x", "prompt": 5}', 400),
    ],
    ids=["empty", "open", "list", "null", "text", "nan", "nan-field", "no-utf8", "infinity",
         "deep", "digits", "fewer-digits", "huge", "deep-prompt", "deep-schema", "twice"],
)  # fmt: skip
def test_a_body_that_is_no_request_is_refused(served, content, status):
    answer = served.client.post("/v1/completions", content=content, headers=JSON)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_another_kind_of_body_is_415(served):
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        headers = {"content-type": kind}
        answer = served.client.post("/v1/completions", content=b'{"prompt":"x"}', headers=headers)
        assert answer.status_code == 415
        assert "application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "field"),
    [("/v1/completions", "prompt"), ("/v1/responses", "input"), ("/v1/generate", "prompt"),
     ("/v1/logprobs", "prompts"), ("/tokenize", "text")],
)  # fmt: skip
def test_half_a_character_in_a_prompt_is_no_text(served, path, field):
    half = "\ud83d"
    body = {"model": "storyteller", field: [half] if field == "prompts" else half}
    answer = served.client.post(path, content=json.dumps(body), headers=JSON)
    assert answer.status_code == 400
    assert "the body has half a surrogate pair" in answer.json()["error"]["message"]


# ---- paths and methods


def test_other_paths_and_methods_are_openai_errors(served):
    for method, path, status in [
        ("GET", "/nope", 404), ("POST", "/v1/nope", 404), ("GET", "/v1/completions", 405),
        ("PUT", "/v1/completions", 405), ("DELETE", "/v1/models", 405), ("HEAD", "/health", 405),
        ("OPTIONS", "/v1/completions", 405), ("GET", "/v1/models/%00", 404),
        ("GET", "/../etc/passwd", 404), ("TRACE", "/", 405), ("GET", "/v1/models/", 404),
    ]:  # fmt: skip
        answer = served.client.request(method, path, follow_redirects=False)
        assert answer.status_code in (status, 307), (method, path, answer.status_code)
        if method != "HEAD" and answer.status_code != 307:
            assert answer.json()["error"]["message"]
        if status == 405:
            assert answer.headers["allow"]


def test_no_answer_tells_of_this_machine(served, monkeypatch, caplog):
    """Not even one to what nobody foresaw."""
    texts = [
        served.client.get(path).text for path in ("/v1/engine", "/v1/models", "/metrics", "/health")
    ]
    texts += [served.client.post("/v1/completions", json=body).text for body in ({}, {"prompt": 5})]

    def broken(*_: Any, **__: Any) -> None:
        raise OSError("/secret/place")

    monkeypatch.setattr(served.llm.engine.admission, "admit", broken)
    connection = http.client.HTTPConnection("127.0.0.1", served.port)
    connection.connect()
    connection.auto_open = 0  # it would connect again by itself
    body = json.dumps({"model": "storyteller", "prompt": "x"})
    for _ in range(3):  # the connection stays open
        connection.request("POST", "/v1/completions", body, JSON)
        answer = connection.getresponse()
        texts.append(answer.read().decode())
        assert (answer.status, json.loads(texts[-1])["error"]["type"]) == (500, "server_error")
    connection.close()
    assert "secret" in caplog.text  # whoever runs the server is told
    monkeypatch.undo()
    for text in texts:
        assert not re.search(r"Traceback|secret|/home|/usr|/root|/work|site-packages|\.py\b", text)
    sample = 'verbatim_http_answers_total{path="/v1/completions",status="500"} 3.0'
    assert sample in served.client.get("/metrics").text
    served.until_idle()


# ---- how much at once


@contextmanager
def busy(served: Served, count: int, **more: Any) -> Iterator[None]:
    """So many long streams that have begun, and come no further."""
    begun = []
    with Client(base_url=served.url) as client, ExitStack() as streams:
        for number in range(count):
            body = LONG | {"stream": True, "seed": number} | more
            stream = streams.enter_context(client.stream("POST", "/v1/completions", json=body))
            begun.append(stream.iter_lines())  # kept: a dropped one would close the stream
            assert stream.status_code == 200 and next(begun[-1])
        served.llm.pause()
        try:
            yield
        finally:
            streams.close()
            served.llm.resume()


def test_more_than_may_run_or_wait_are_429_with_a_time_to_come_again(served, llm):
    tasks = served.num_tasks()
    statuses: list[httpx.Response] = []

    def ask() -> None:
        with Client(base_url=served.url) as client:
            statuses.append(client.post("/v1/completions", json=LONG))

    with busy(served, 2):
        asked = [in_thread(ask) for _ in range(12)]
        # Six have seats, two of them run, four wait; the rest were sent away.
        until(lambda: len(statuses) >= 8)
        for answer in statuses:
            assert answer.status_code == 429, answer.text
            assert answer.json()["error"]["type"] == "rate_limit_error"
            assert int(answer.headers["retry-after"]) >= 1
        assert served.client.get("/health").status_code == 200
        llm.pause("abort")  # what waits has been seen enough of
    for each in asked:
        each.result()
    served.until_idle()
    assert served.num_tasks() <= tasks + 1


def test_a_full_queue_of_the_engine_is_429(llm):
    """Its own limit, `max_waiting`, where the server's is wider."""
    with serving(llm) as server, busy(server, 2):
        bodies = [LONG | {"prompt": ["x"] * 8}, LONG | {"prompt": ["x"] * 8, "stream": True}]
        for body in bodies:
            error = server.refused("/v1/completions", body, 429)
            assert "max_waiting" in error["message"] or "wait" in error["message"]
    server.until_idle()


def test_a_generation_ends_when_its_time_is_over(llm):
    with serving(llm, ServeSettings(timeout_s=0.05)) as server:
        for more in ({}, {"timeout_s": 1e6}):
            answer = server.post("/v1/completions", **LONG | more)
            assert answer["choices"][0]["finish_reason"] == "length"
            assert answer["usage"]["completion_tokens"] < 1500


# ---- clients that go


def test_a_client_that_goes_takes_its_request_along(served, llm):
    """While it waits, in the middle of its prefill, in the middle of a stream, with several choices."""
    tasks = served.num_tasks()
    with busy(served, 2):  # so that the next wait
        link = served.connect()
        link.sendall(request_of(LONG))
        until(lambda: served.service.under_way == 3)
        link.close()
        until(lambda: served.service.under_way == 2)
        assert llm.stats()["waiting"] == 0
    served.until_idle()  # the streams were left in the middle
    for prompt in ([5] * 1900, "x"):
        with served.connect() as link:
            link.sendall(request_of(LONG | {"prompt": prompt, "max_tokens": 100}))
            until(lambda: served.service.under_way)
        served.until_idle()
    with busy(served, 1, prompt=["x", "y"], n=2):
        pass
    served.until_idle()
    assert served.num_tasks() <= tasks + 1
    assert "verbatim_clients_gone_total" in served.client.get("/metrics").text


def test_who_does_not_read_is_let_go(llm):
    """Or some who do nothing would keep all the seats."""
    settings = ServeSettings(read_timeout_s=0.3, max_response_bytes=1 << 30)
    with serving(llm, settings) as server:
        body = LONG | {"stream": True, "n": 4, "logprobs": 500}
        with socket.socket() as link:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            link.connect(("127.0.0.1", server.port))
            link.sendall(request_of(body))
            until(lambda: server.service.under_way)
            server.until_idle()


def test_while_it_drains_nobody_new_is_let_in(served):
    served.service.draining = True
    try:
        error = served.refused("/v1/completions", {"prompt": "x"}, 503)
        assert (error["type"], error["message"]) == ("server_error", "the server is shutting down")
        assert served.client.get("/ready").status_code == 503
        assert served.client.get("/health").status_code == 200
    finally:
        served.service.draining = False


def test_a_closed_engine_is_told():
    with LLM() as llm, serving(llm) as server:
        llm.close()
        assert server.client.get("/health").status_code == 503
        assert server.client.get("/ready").status_code == 503
        server.refused("/v1/completions", {"prompt": "x"}, 503)
        assert server.client.get("/metrics").status_code == 200


# ---- settings


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_body_bytes": 0}, {"max_requests": 0}, {"max_requests": True}, {"max_choices": 1.5},
        {"body_timeout_s": 0}, {"timeout_s": float("nan")}, {"timeout_s": -1}, {"name": " "},
        {"api_keys": ("short",)}, {"api_keys": ("with space",)}, {"api_keys": ("schlüssel",)},
        {"cors_origins": ("*",)}, {"cors_origins": ("https://a/b",)}, {"cors_origins": ("a",)},
        {"read_timeout_s": 0}, {"port": 65536}, {"log_level": "loud"}, {"drain_timeout_s": -1},
        {"api_keys": ("a-key-of-mine",), "no_api_key": True},
    ],
    ids=repr,
)  # fmt: skip
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(InvalidRequest):
        ServeSettings(**wrong)


def test_local_addresses_are_known():
    assert all(map(is_local, ["localhost", "127.0.0.1", "127.1.2.3", "::1"]))
    assert not any(map(is_local, ["0.0.0.0", "::", "example.org", "10.0.0.1", ""]))


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LocalHost:8000", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("evil.example", 421),
        ("localhost.evil.example:8000", 421),
        ("127.0.0.1.evil.example", 421),
        ("", 421),
        (None, 200),  # HTTP/1.0, which no browser speaks
    ],
)
def test_a_local_server_answers_under_its_own_names_alone(local, host, status):
    """A page of another name, which leads a browser here, is told nothing, not even at open paths."""
    head = "" if host is None else f"Host: {host}\r\n"
    for path in ("/", "/health", "/v1/models"):
        with local.connect() as link:
            link.sendall(f"GET {path} HTTP/1.0\r\n{head}\r\n".encode())
            assert received(link).startswith(f"HTTP/1.1 {status}".encode())


@pytest.mark.parametrize(
    ("given", "hosts"),
    [
        ({}, LOCAL_HOSTS),
        ({"host": "127.8.8.8"}, (*LOCAL_HOSTS, "127.8.8.8")),
        ({"host": "[::1]"}, LOCAL_HOSTS),
        ({"hosts": ("mine",)}, ("mine",)),
        ({"host": "0.0.0.0", "no_api_key": True}, ()),
        ({"api_keys": ("a-key-of-mine",)}, ()),
        ({"host": "0.0.0.0"}, None),
        ({"host": "example.org", "hosts": ("mine",)}, None),
    ],
)
def test_a_server_is_guarded_where_nobody_needs_a_key(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, given: Any, hosts: Any
) -> None:
    """Of the command and of Python."""

    class Made(Exception):
        pass

    def make(_: LLM, settings: ServeSettings) -> None:
        assert settings.hosts == hosts
        raise Made

    monkeypatch.setattr("verbatim.serve.server.make_app", make)
    with pytest.raises(Made if hosts is not None else InvalidRequest, match=r"no_api_key|^$"):
        run(llm, ServeSettings(**given))


def test_threads_of_a_server_end_with_it(llm: LLM) -> None:
    with serving(llm) as server:
        threads = [
            asyncio.run_coroutine_threadsafe(
                server.service.in_thread(
                    threading.current_thread, num_chars=chars, compiles=compiles
                ),
                server.loop,
            ).result(PATIENCE_S)
            for chars, compiles in [(0, True), (1 << 20, False)]
        ]
        assert all(thread.is_alive() for thread in threads)
    until(lambda: not any(thread.is_alive() for thread in threads))


def test_a_token_does_not_wait_for_the_one_before_to_be_acknowledged():
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


# ---- one client's work is not another's wait


@pytest.fixture(scope="module")
def roomy() -> Iterator[Served]:
    with LLM(kv_memory="64MB") as llm, serving(llm) as server:
        yield server


def test_structures_that_take_long_to_compile_hold_up_nobody_else(roomy, monkeypatch):
    known = {"prompt": "x", "regex": "[ab]{3}", "max_tokens": 4}
    first = roomy.post("/v1/completions", seed=1, **known)
    compile_, go_on = GrammarCompiler.compile, threading.Event()
    begun: list[Any] = []

    def slow(self: GrammarCompiler, key: Any) -> Any:
        begun.append(key)
        assert go_on.wait(PATIENCE_S)
        return compile_(self, key)

    monkeypatch.setattr(GrammarCompiler, "compile", slow)

    def ask(number: int) -> int:
        body = {"prompt": "x", "regex": f"[ab]{{{number + 4}}}", "max_tokens": 2}
        with Client(base_url=roomy.url) as client:
            return client.post("/v1/completions", json=body).status_code

    asked = [in_thread(ask, number) for number in range(20)]
    try:
        until(lambda: roomy.service.under_way == len(asked) and begun)
        free = roomy.post("/v1/completions", prompt="x", max_tokens=4, ignore_eos=True)
        assert free["usage"]["completion_tokens"] == 4
        assert roomy.post("/tokenize", text="x")["count"]
        assert roomy.client.get("/v1/engine").json()["under_way"] == len(asked)
        again = roomy.post("/v1/completions", seed=1, **known)  # compiled before
        assert again["choices"][0]["text"] == first["choices"][0]["text"]
        assert not any(each.done() for each in asked)
        assert len(begun) <= 2  # each may take memory
    finally:
        go_on.set()
    assert {each.result() for each in asked} == {200}
    roomy.until_idle()


def test_prompts_of_one_stream_come_in_together(roomy):
    prompts = ["Once upon a time", "The dragon", "Lily and Ben", "One day", "x", "In a far land"]
    body = {"prompt": prompts, "max_tokens": 30, "ignore_eos": True, "seed": 4}
    before = roomy.llm.stats()["forwards"]
    pieces = roomy.stream("/v1/completions", **body)
    assert roomy.llm.stats()["forwards"] - before <= 30
    whole = roomy.post("/v1/completions", **body)
    texts = [""] * len(prompts)
    for piece in pieces[:-1]:
        choice = piece["choices"][0]
        texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in whole["choices"]]


def test_what_is_told_of_the_engine_is_not_worked_out_at_each_glance(roomy, monkeypatch):
    info, count = roomy.llm.info, 0

    def counted() -> dict[str, Any]:
        nonlocal count
        count += 1
        return info()

    monkeypatch.setattr(roomy.llm, "info", counted)
    roomy.service.info._task = None
    told = [roomy.client.get("/v1/engine").json() for _ in range(8)]
    assert count == 1
    assert all(each["info"]["numerics_key"] == info()["numerics_key"] for each in told)
    assert told[0]["stats"]["forwards"] == roomy.llm.stats()["forwards"]


def test_a_model_that_suggests_what_can_not_be_is_refused_at_the_start(monkeypatch):
    with LLM(kv_memory="16MB") as llm:
        monkeypatch.setattr(llm.engine.generation_config, "do_sample", True)
        monkeypatch.setattr(llm.engine.generation_config, "top_p", 7.0)
        with pytest.raises(InvalidRequest, match=r"generation_config.json.*top_p=7.0.*--no-chat"):
            make_app(llm)
        with serving(llm, ServeSettings(chat_defaults=False)) as server:
            messages = [{"role": "user", "content": "Hello"}]
            server.post("/v1/chat/completions", messages=messages, max_tokens=3)


def test_an_error_is_not_told_again_when_it_is_over(roomy, monkeypatch):
    def broken() -> dict[str, Any]:
        raise OSError

    with monkeypatch.context() as patched:
        patched.setattr(roomy.llm, "info", broken)
        roomy.service.info._task = None
        assert roomy.client.get("/v1/engine").status_code == 500
    assert roomy.client.get("/v1/engine").status_code == 200


def test_many_long_completions_are_sent_in_small_pieces(roomy):
    body = {"prompt": [[5] * 200] * 70, "max_tokens": 1, "echo": True, "logprobs": 5}
    request = CompletionRequest(roomy.service, Completions(model=roomy.service.name, **body))
    answer = asyncio.run_coroutine_threadsafe(request.answer(UNKNOWN), roomy.loop).result()
    pieces = list(json_pieces(answer))
    assert len(json.loads(b"".join(pieces))["choices"]) == 70
    assert len(pieces) > 4
    assert max(map(len, pieces)) < 2 * PIECE_BYTES


NESTED = json.loads("[" * 400 + "]" * 400)  # deeper than pydantic writes


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": float("inf"), "b": [float("nan"), 0.1]}, b'{"a":null,"b":[null,0.1]}'),
        (torch.tensor([[0.5, float("-inf")]], dtype=torch.bfloat16), b"[[0.5,null]]"),
        ({1: ("x", None, True)}, b'{"1":["x",null,true]}'),
        ({"half": "\ud800", "states": torch.tensor([1, 2])}, b'{"half":"?","states":[1,2]}'),
        (NESTED, b"[" * 400 + b"]" * 400),
        (10**30, b"1" + b"0" * 30),
    ],
    ids=["infinite", "tensor", "keys", "surrogate", "nested", "long"],
)
def test_what_json_has_no_word_for(value, text):
    assert to_bytes(value) == text


def test_a_signal_within_the_handler_of_the_first_one_is_a_second_one(llm: LLM) -> None:
    messages: list[str] = []

    def say(message: str) -> None:
        messages.append(message)
        if len(messages) == 1:
            server.handle_exit(signal.SIGTERM, None)

    app = make_app(llm, ServeSettings())
    config = configured(app, ServeSettings())
    server = Server(config, app.state.service, say, "http://127.0.0.1:1")
    server.handle_exit(signal.SIGTERM, None)
    assert server.should_exit and server.force_exit and messages[1:] == ["ending now"]


def test_logs_have_handlers_only_while_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    loggers = [logging.getLogger(f"uvicorn.{name}") for name in ("error", "access")]
    before = [([*logger.handlers], logger.propagate) for logger in loggers]
    at_root = logging.StreamHandler(io.StringIO())
    monkeypatch.setattr(logging.getLogger(), "handlers", [at_root])
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with logged("info"):
        for logger in loggers:
            logger.critical('%s - "%s %s HTTP/%s" %d', "client", "GET", "/", "1.1", 200)
    line = r'\d{4}-\d\d-\d\d .* client - "GET / HTTP/1.1" 200'
    assert re.match(f"{line}\n", sys.stderr.getvalue())
    assert re.match(f"{line} OK\n", sys.stdout.getvalue())
    assert at_root.stream.getvalue() == ""  # nothing is written twice
    assert [(logger.handlers, logger.propagate) for logger in loggers] == before
