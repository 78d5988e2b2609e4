"""API keys, limits on requests and bodies, and cleanup after clients disconnect."""

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
from verbatim.serve.server import Server, listen, log_to_console, run, uvicorn_config
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


def test_api_keys_do_not_share_cached_prefixes(locked):
    """The owner of a key must not find out which prompts came with another key."""
    prompt = "A prompt that fills a block of sixteen tokens, and then another one. " * 4

    def cached(key: str, **more: Any) -> int:
        body = {"prompt": prompt, "max_tokens": 1} | more
        headers = {"Authorization": f"Bearer {key}"}
        answer = locked.client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    assert cached(KEYS[0]) == 0
    assert cached(KEYS[0]) > 0
    assert cached(KEYS[1]) == 0
    assert cached(KEYS[1]) > 0
    assert cached(KEYS[0], cache_salt="mine") == 0


def test_cors_origins_are_allowed_only_where_configured(locked, served):
    preflight = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST",
             "Access-Control-Request-Headers": "authorization,x-stainless-lang"}  # fmt: skip
    answer = locked.client.options("/v1/completions", headers=preflight)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://a.example"
    refused = locked.client.get("/v1/models", headers={"Origin": "https://a.example"})
    assert refused.headers["access-control-allow-origin"] == "https://a.example"
    other = preflight | {"Origin": "https://b.example"}
    answer = locked.client.options("/v1/completions", headers=other)
    assert "access-control-allow-origin" not in answer.headers
    for headers in (preflight, other):
        answer = served.client.options("/v1/completions", headers=headers)
        assert answer.status_code == 405
        assert "access-control-allow-origin" not in answer.headers


# ---- bodies


def test_too_long_body_is_413(served):
    body = json.dumps({"prompt": "x" * 20_000})
    answer = served.client.post("/v1/completions", content=body, headers=JSON)
    assert (answer.status_code, answer.json()["error"]["type"]) == (413, "invalid_request_error")
    assert "20000" in answer.text
    served.until_idle()


def test_incomplete_body_times_out_with_408(llm):
    with serving(llm, ServeSettings(body_timeout_s=0.4)) as server:
        with server.connect() as link:
            link.sendall(request_of(b'{"prompt": "x"}')[:-5])
            answer = received(link)
        assert b" 408 " in answer.split(b"\r\n")[0]
        assert b"0.4 s" in answer
        server.until_idle()


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"null", b'"x"', b"NaN", b"[" * 15_000, b'{"prompt": "x", "prompt": 5}',
        b'{"prompt": "x", "temperature": NaN}', b'{"prompt": "\xff"}',
        b'{"prompt": "x", "top_p": Infinity}', b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "x", "seed": ' + b"9" * 4000 + b"}",
        b'{"prompt": "x", "temperature": 1' + b"0" * 400 + b"}",
        b'{"prompt": ' + b"[" * 900 + b"1" + b"]" * 900 + b"}",
        b'{"prompt": "x", "json_schema": ' + b'{"items":' * 900 + b"{}" + b"}" * 901,
    ],
    ids=lambda content: str(content[:40]),
)  # fmt: skip
def test_malformed_body_is_rejected(served, content):
    answer = served.client.post("/v1/completions", content=content, headers=JSON)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_other_content_types_are_415(served):
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        headers = {"content-type": kind}
        answer = served.client.post("/v1/completions", content=b'{"prompt":"x"}', headers=headers)
        assert answer.status_code == 415
        assert "application/json" in answer.json()["error"]["message"]
    for encoding in ("gzip", "br"):
        headers = {"content-encoding": encoding}
        answer = served.client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
        assert answer.status_code == 415
    headers = {"content-encoding": "identity"}
    assert served.client.post("/v1/completions", json={"prompt": "x"}, headers=headers).is_success


@pytest.mark.parametrize(
    ("path", "field"),
    [("/v1/completions", "prompt"), ("/v1/responses", "input"), ("/v1/generate", "prompt"),
     ("/v1/logprobs", "prompts"), ("/tokenize", "text")],
)  # fmt: skip
def test_lone_surrogate_in_prompt_is_rejected(served, path, field):
    half = "\ud83d"
    body = {"model": "storyteller", field: [half] if field == "prompts" else half}
    answer = served.client.post(path, content=json.dumps(body), headers=JSON)
    assert answer.status_code == 400
    assert "the body has half a surrogate pair" in answer.json()["error"]["message"]


# ---- paths and methods


def test_unknown_paths_and_methods_return_openai_errors(served):
    for method, path, status in [
        ("GET", "/nope", 404), ("POST", "/v1/nope", 404), ("GET", "/v1/completions", 405),
        ("PUT", "/v1/completions", 405), ("DELETE", "/v1/models", 405), ("HEAD", "/metrics", 405),
        ("OPTIONS", "/v1/completions", 405), ("GET", "/v1/models/%00", 404),
        ("GET", "/../etc/passwd", 404), ("TRACE", "/", 405), ("GET", "/v1/models/", 404),
    ]:  # fmt: skip
        answer = served.client.request(method, path, follow_redirects=False)
        assert answer.status_code in (status, 307), (method, path, answer.status_code)
        if method != "HEAD" and answer.status_code != 307:
            assert answer.json()["error"]["message"]
        if status == 405:
            assert answer.headers["allow"]


def test_responses_reveal_no_paths_or_tracebacks(served, monkeypatch, caplog):
    """Unexpected errors do not reveal them either."""
    paths = ("/v1/engine", "/v1/models", "/metrics", "/health")
    texts = [served.client.get(path).text for path in paths]
    texts += [served.client.post("/v1/completions", json=body).text for body in ({}, {"prompt": 5})]

    def broken(*_: Any, **__: Any) -> None:
        raise OSError("/secret/place")

    monkeypatch.setattr(served.llm.engine.admission, "admit", broken)
    connection = http.client.HTTPConnection("127.0.0.1", served.port)
    connection.connect()
    connection.auto_open = 0  # no automatic reconnect
    body = json.dumps({"model": "storyteller", "prompt": "x"})
    for _ in range(3):  # the connection stays open
        connection.request("POST", "/v1/completions", body, JSON)
        answer = connection.getresponse()
        texts.append(answer.read().decode())
        assert (answer.status, json.loads(texts[-1])["error"]["type"]) == (500, "server_error")
    connection.close()
    assert "secret" in caplog.text  # the log has the details
    monkeypatch.undo()
    for text in texts:
        assert not re.search(r"Traceback|secret|/home|/usr|/root|/work|site-packages|\.py\b", text)
    sample = 'verbatim_http_answers_total{path="/v1/completions",status="500"} 3.0'
    assert sample in served.client.get("/metrics").text
    served.until_idle()


# ---- concurrency limits


@contextmanager
def busy(served: Served, count: int, **more: Any) -> Iterator[None]:
    """Keep `count` long streams open, with the engine paused after their first token."""
    begun = []
    with Client(base_url=served.url) as client, ExitStack() as streams:
        for number in range(count):
            body = LONG | {"stream": True, "seed": number} | more
            stream = streams.enter_context(client.stream("POST", "/v1/completions", json=body))
            begun.append(stream.iter_lines())  # kept, as a collected iterator closes its stream
            assert stream.status_code == 200 and next(begun[-1])
        served.llm.pause()
        try:
            yield
        finally:
            streams.close()
            served.llm.resume()


def test_requests_over_the_limit_get_429_with_retry_after(served, llm):
    tasks = served.num_tasks()
    answers: list[httpx.Response] = []

    def post() -> None:
        with Client(base_url=served.url) as client:
            answers.append(client.post("/v1/completions", json=LONG))

    with busy(served, 2):
        callers = [in_thread(post) for _ in range(12)]
        # Six are admitted (two run, four wait); the rest are rejected.
        until(lambda: len(answers) >= 8)
        for answer in answers:
            assert answer.status_code == 429, answer.text
            assert answer.json()["error"]["type"] == "rate_limit_error"
            assert int(answer.headers["retry-after"]) >= 1
        assert served.client.get("/health").status_code == 200
        llm.pause("abort")  # end the waiting requests
    for each in callers:
        each.result()
    served.until_idle()
    assert served.num_tasks() <= tasks + 1


def test_full_engine_queue_is_429(llm):
    """The engine's limit `max_waiting` applies where the server's limit is wider."""
    with serving(llm) as server, busy(server, 2):
        bodies = [LONG | {"prompt": ["x"] * 8}, LONG | {"prompt": ["x"] * 8, "stream": True}]
        for body in bodies:
            error = server.refused("/v1/completions", body, 429)
            assert "max_waiting" in error["message"] or "wait" in error["message"]
    server.until_idle()


def test_generation_ends_at_server_timeout(llm):
    with serving(llm, ServeSettings(request_timeout_s=0.05)) as server:
        for more in ({}, {"timeout_s": 1e6}):
            answer = server.post("/v1/completions", **LONG | more)
            assert answer["choices"][0]["finish_reason"] == "length"
            assert answer["usage"]["completion_tokens"] < 1500


# ---- disconnects


def test_client_disconnect_aborts_its_requests(served, llm):
    """While waiting, during prefill, in the middle of a stream, and with several choices."""
    tasks = served.num_tasks()
    with busy(served, 2):  # so that further requests wait
        link = served.connect()
        link.sendall(request_of(LONG))
        until(lambda: served.service.num_in_progress == 3)
        link.close()
        until(lambda: served.service.num_in_progress == 2)
        assert llm.stats()["waiting"] == 0
    served.until_idle()  # the streams were abandoned
    for prompt in ([5] * 1900, "x"):
        with served.connect() as link:
            link.sendall(request_of(LONG | {"prompt": prompt, "max_tokens": 100}))
            until(lambda: served.service.num_in_progress)
        served.until_idle()
    with busy(served, 1, prompt=["x", "y"], n=2):
        pass
    served.until_idle()
    assert served.num_tasks() <= tasks + 1
    assert "verbatim_clients_gone_total" in served.client.get("/metrics").text


def test_client_that_does_not_read_is_disconnected(llm):
    """Otherwise a few idle clients could block all others."""
    settings = ServeSettings(read_timeout_s=0.3, max_response_bytes=1 << 30)
    with serving(llm, settings) as server:
        body = LONG | {"stream": True, "n": 4, "logprobs": 500}
        with socket.socket() as link:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            link.connect(("127.0.0.1", server.port))
            link.sendall(request_of(body))
            until(lambda: server.service.num_in_progress)
            server.until_idle()


def test_draining_server_rejects_new_requests(served):
    served.service.draining = True
    try:
        error = served.refused("/v1/completions", {"prompt": "x"}, 503)
        assert (error["type"], error["message"]) == ("server_error", "the server is shutting down")
        assert served.client.get("/ready").status_code == 503
        assert served.client.get("/health").status_code == 200
    finally:
        served.service.draining = False


def test_closed_engine_returns_503():
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
        {"body_timeout_s": 0}, {"request_timeout_s": float("nan")}, {"request_timeout_s": -1}, {"name": " "},
        {"api_keys": ("short",)}, {"api_keys": ("with space",)}, {"api_keys": ("schlüssel",)},
        {"cors_origins": ("*",)}, {"cors_origins": ("https://a/b",)}, {"cors_origins": ("a",)},
        {"read_timeout_s": 0}, {"port": 65536}, {"log_level": "loud"}, {"drain_timeout_s": -1},
        {"api_keys": ("a-key-of-mine",), "no_api_key": True},
    ],
    ids=repr,
)  # fmt: skip
def test_invalid_settings_are_rejected(wrong):
    with pytest.raises(InvalidRequest):
        ServeSettings(**wrong)


def test_local_addresses_are_recognized():
    assert all(map(is_local, ["localhost", "127.0.0.1", "127.1.2.3", "::1"]))
    assert not any(map(is_local, ["0.0.0.0", "::", "example.org", "10.0.0.1", ""]))


@pytest.mark.parametrize(
    ("host", "status"),
    # HTTP/1.0, which browsers do not use, may have none.
    [(host, 200) for host in ("localhost", "LocalHost:8000", "127.0.0.1:8000", "[::1]:8000", None)]
    + [("evil.example", 421), ("localhost.evil.example:8000", 421), ("", 421)]
    + [("127.0.0.1.evil.example", 421)],
)  # fmt: skip
def test_local_server_rejects_other_host_names(local, host, status):
    """Web pages that reach the server by DNS rebinding get nothing, even from paths that need no key."""
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
def test_server_without_api_key_must_be_local_or_opted_in(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, given: Any, hosts: Any
) -> None:
    class Made(Exception):
        pass

    def make(_: LLM, settings: ServeSettings) -> None:
        assert settings.hosts == hosts
        raise Made

    monkeypatch.setattr("verbatim.serve.server.make_app", make)
    with pytest.raises(Made if hosts is not None else InvalidRequest, match=r"no_api_key|^$"):
        run(llm, ServeSettings(**given))


def test_server_threads_end_with_server(llm: LLM) -> None:
    with serving(llm) as server:

        def thread_of(chars: int, compiles: bool) -> threading.Thread:
            call = server.service.in_thread(
                threading.current_thread, num_chars=chars, compiles=compiles
            )
            return asyncio.run_coroutine_threadsafe(call, server.loop).result(PATIENCE_S)

        threads = [thread_of(0, True), thread_of(1 << 20, False)]
        assert all(thread.is_alive() for thread in threads)
    until(lambda: not any(thread.is_alive() for thread in threads))


def test_accepted_sockets_set_tcp_nodelay():
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


# ---- isolation between clients


@pytest.fixture(scope="module")
def roomy() -> Iterator[Served]:
    with LLM(kv_memory="64MB") as llm, serving(llm) as server:
        yield server


def test_slow_grammar_compilation_does_not_block_other_requests(roomy, monkeypatch):
    known = {"prompt": "x", "regex": "[ab]{3}", "max_tokens": 4}
    first = roomy.post("/v1/completions", seed=1, **known)
    compile_, go_on = GrammarCompiler.compile, threading.Event()
    begun: list[Any] = []

    def slow(self: GrammarCompiler, key: Any) -> Any:
        begun.append(key)
        assert go_on.wait(PATIENCE_S)
        return compile_(self, key)

    monkeypatch.setattr(GrammarCompiler, "compile", slow)

    def post(number: int) -> int:
        body = {"prompt": "x", "regex": f"[ab]{{{number + 4}}}", "max_tokens": 2}
        with Client(base_url=roomy.url) as client:
            return client.post("/v1/completions", json=body).status_code

    callers = [in_thread(post, number) for number in range(20)]
    try:
        until(lambda: roomy.service.num_in_progress == len(callers) and begun)
        free = roomy.post("/v1/completions", prompt="x", max_tokens=4, ignore_eos=True)
        assert free["usage"]["completion_tokens"] == 4
        assert roomy.post("/tokenize", text="x")["count"]
        assert roomy.client.get("/v1/engine").json()["under_way"] == len(callers)
        again = roomy.post("/v1/completions", seed=1, **known)  # already compiled
        assert again["choices"][0]["text"] == first["choices"][0]["text"]
        assert not any(each.done() for each in callers)
        assert len(begun) <= 2  # each compilation may take much memory
    finally:
        go_on.set()
    assert {each.result() for each in callers} == {200}
    roomy.until_idle()


def test_prompts_of_one_stream_are_batched_together(roomy):
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


def test_engine_info_is_cached_between_requests(roomy, monkeypatch):
    info, count = roomy.llm.info, 0

    def counted() -> dict[str, Any]:
        nonlocal count
        count += 1
        return info()

    monkeypatch.setattr(roomy.llm, "info", counted)
    roomy.service.info._task = None
    answers = [roomy.client.get("/v1/engine").json() for _ in range(8)]
    assert count == 1
    assert all(each["info"]["numerics_key"] == info()["numerics_key"] for each in answers)
    assert answers[0]["stats"]["forwards"] == roomy.llm.stats()["forwards"]


def test_invalid_generation_config_is_rejected_at_startup(monkeypatch):
    with LLM(kv_memory="16MB") as llm:
        monkeypatch.setattr(llm.engine.generation_config, "do_sample", True)
        monkeypatch.setattr(llm.engine.generation_config, "top_p", 7.0)
        with pytest.raises(InvalidRequest, match=r"generation_config.json.*top_p=7.0.*--no-chat"):
            make_app(llm)
        with serving(llm, ServeSettings(chat_defaults=False)) as server:
            messages = [{"role": "user", "content": "Hello"}]
            server.post("/v1/chat/completions", messages=messages, max_tokens=3)


def test_error_in_engine_info_is_not_cached(roomy, monkeypatch):
    def broken() -> dict[str, Any]:
        raise OSError

    with monkeypatch.context() as patched:
        patched.setattr(roomy.llm, "info", broken)
        roomy.service.info._task = None
        assert roomy.client.get("/v1/engine").status_code == 500
    assert roomy.client.get("/v1/engine").status_code == 200


@pytest.mark.slow
def test_large_response_is_serialized_in_small_pieces(roomy):
    body = {"prompt": [[5] * 200] * 70, "max_tokens": 1, "echo": True, "logprobs": 5}
    request = CompletionRequest(roomy.service, Completions(model=roomy.service.name, **body))
    answer = asyncio.run_coroutine_threadsafe(request.answer(UNKNOWN), roomy.loop).result()
    pieces = list(json_pieces(answer))
    assert len(json.loads(b"".join(pieces))["choices"]) == 70
    assert len(pieces) > 4
    assert max(map(len, pieces)) < 2 * PIECE_BYTES


NESTED = json.loads("[" * 400 + "]" * 400)  # deeper than pydantic can serialize


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
def test_values_without_json_equivalent_are_converted(value, text):
    assert to_bytes(value) == text


def test_signal_during_first_handler_counts_as_second_signal(llm: LLM) -> None:
    messages: list[str] = []

    def say(message: str) -> None:
        messages.append(message)
        if len(messages) == 1:
            server.handle_exit(signal.SIGTERM, None)

    app = make_app(llm, ServeSettings())
    config = uvicorn_config(app, ServeSettings())
    server = Server(config, app.state.service, say, "http://127.0.0.1:1")
    server.handle_exit(signal.SIGTERM, None)
    assert server.should_exit and server.force_exit and messages[1:] == ["ending now"]


def test_log_handlers_exist_only_while_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    loggers = [logging.getLogger(f"uvicorn.{name}") for name in ("error", "access")]
    before = [([*logger.handlers], logger.propagate) for logger in loggers]
    at_root = logging.StreamHandler(io.StringIO())
    monkeypatch.setattr(logging.getLogger(), "handlers", [at_root])
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with log_to_console("info"):
        for logger in loggers:
            logger.critical('%s - "%s %s HTTP/%s" %d', "client", "GET", "/", "1.1", 200)
    line = r'\d{4}-\d\d-\d\d .* client - "GET / HTTP/1.1" 200'
    assert re.match(f"{line}\n", sys.stderr.getvalue())
    assert re.match(f"{line} OK\n", sys.stdout.getvalue())
    assert at_root.stream.getvalue() == ""  # nothing is logged twice
    assert [(logger.handlers, logger.propagate) for logger in loggers] == before
