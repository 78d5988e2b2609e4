"""Bodies and connections of somebody who means no good: each gets its answer, and nothing stays behind."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest

from support.serving import Served, serving
from verbatim import LLM

pytestmark = pytest.mark.slow

SMALL = {"model": "storyteller", "prompt": "x", "max_tokens": 2, "seed": 1}
NUMBERS = ["1e308", "1e-320", "1e400", "NaN", "-Infinity", "-0.0", "true", "9" * 30, "-" + "9" * 30]
TEXTS = [
    "\ud800",
    "\x00",
    "\u202e\ufeff",
    "\U0010ffff",
    "a\u0301" * 500,
    "<|endoftext|>",
    "<tool_call>",
    "{{ 7 * 7 }}",
    "\r\n\r\nHTTP/1.1 200 OK\r\n",
    "\N{MATHEMATICAL DOUBLE-STRUCK DIGIT ONE}",
]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with LLM(kv_memory="64MB") as llm, serving(llm) as server:
        yield server


def answered(served: Served, path: str, body: str | dict[str, Any]) -> None:
    """It is served, or refused as what it is."""
    text = body if isinstance(body, str) else json.dumps(body)
    headers = {"content-type": "application/json"}
    answer = served.client.post(path, content=text.encode(), headers=headers)
    assert answer.status_code in (200, 400, 404), (answer.status_code, text[:200])
    assert "server_error" not in answer.text, text[:200]  # in a stream neither
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("number", NUMBERS, ids=[number[:8] for number in NUMBERS])
def test_a_number_beyond_all_ranges(served, number):
    for name in (
        "max_tokens seed top_k n priority timeout_s temperature logprobs min_tokens top_p min_p typical_p "
        "repetition_penalty num_beams length_penalty stream"
    ).split():
        answered(served, "/v1/completions", json.dumps(SMALL)[:-1] + f', "{name}": {number}}}')
        answered(
            served,
            "/v1/generate",
            f'{{"prompt": "x", "params": {{"{name}": {number}, "stop": "e"}}}}',
        )
    assert served.idle()


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_a_text_of_odd_characters(served, text):
    for stream in (False, True):
        more = SMALL | {"stream": stream}
        answered(
            served,
            "/v1/completions",
            more | {"prompt": text, "stop": text, "user": text, "echo": True, "logprobs": 1},
        )
        for name in ("regex", "grammar", "cache_salt", "model", text):
            answered(served, "/v1/completions", more | {name: text})
        for schema in (
            {"const": text},
            {"properties": {text: {}}, "required": [text]},
            {"pattern": text},
        ):
            answered(served, "/v1/completions", more | {"json_schema": schema})
        answered(
            served,
            "/v1/completions",
            more | {"choice": [text, "a"], "bad_words": [text], "logit_bias": {text: 1}},
        )
        messages = [{"role": "user", "content": text}]
        answered(
            served,
            "/v1/chat/completions",
            {
                "messages": messages,
                "max_tokens": 2,
                "stream": stream,
                "chat_template_kwargs": {text: text},
            },
        )
        answered(
            served,
            "/v1/responses",
            {
                "input": text,
                "instructions": text,
                "metadata": {text: text},
                "max_output_tokens": 2,
                "stream": stream,
            },
        )
    answered(served, "/tokenize", {"text": text, "return_tokens": True})
    answered(served, "/v1/logprobs", {"prompts": [text]})
    assert served.idle()


@pytest.mark.parametrize("depth", [50, 400, 3000])
def test_json_of_great_depth(served, depth):
    lists, objects = "[" * depth + "]" * depth, '{"items":' * depth + "1" + "}" * depth
    nots = '{"not":' * depth + "{}" + "}" * depth
    for schema in (objects, nots, f'{{"const": {lists}}}', f'{{"description": {lists}}}'):
        answered(
            served,
            "/v1/completions",
            f'{{"model": "storyteller", "prompt": "x", "max_tokens": 2, "json_schema": {schema}}}',
        )
    for value in (lists, objects):
        for name in ("stop", "logit_bias", "cache_salt", "replay_routing", "json_schema"):
            answered(
                served,
                "/v1/generate",
                f'{{"prompt": "x", "params": {{"max_tokens": 2, "{name}": {value}}}}}',
            )
        answered(served, "/v1/responses", f'{{"input": {value}}}')
        answered(
            served,
            "/v1/chat/completions",
            f'{{"messages": {value}, "chat_template_kwargs": {{"a": {value}}}}}',
        )
    assert served.idle()


def request(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def test_requests_that_come_in_one_packet_are_answered_in_order(served):
    alone = [served.post("/v1/completions", **SMALL | {"seed": seed}) for seed in range(4)]
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as connection:
        connection.sendall(b"".join(request(SMALL | {"seed": seed}) for seed in range(4)))
        found = b""
        while found.count(b"}}}") < 4:  # where an answer ends
            more = connection.recv(65536)
            assert more, found
            found += more
    bodies = [part[part.index(b"{") :] for part in found.split(b"HTTP/1.1 200 OK")[1:]]
    answers = [json.loads(body) for body in bodies]
    assert [a["choices"] for a in answers] == [a["choices"] for a in alone]


def test_a_storm_of_clients_that_hang_up_leaves_nothing(served):
    served.post("/v1/completions", **SMALL)
    tasks = served.num_tasks()
    for number in range(120):
        body = SMALL | {"max_tokens": 500, "n": 4, "seed": number, "stream": bool(number % 2)}
        connection = socket.create_connection(("127.0.0.1", served.port), timeout=20)
        connection.sendall(request(body)[: None if number % 7 else 60])  # some in mid-sentence
        if number % 3 == 0:
            time.sleep(0.002)
        if number % 5 == 0:  # without a farewell
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    end = time.monotonic() + 20
    while served.num_tasks() > tasks:  # the last ones may not have been heard of yet
        assert time.monotonic() < end
        time.sleep(0.01)
    assert served.idle()
    assert served.post("/v1/completions", **SMALL)["choices"]
