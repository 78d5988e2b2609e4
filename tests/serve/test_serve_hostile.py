"""Bodies and connections of somebody who means no good: each gets its answer, and nothing stays behind."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest

from support.pairwise import slow_but
from support.serving import Served, request_of, routes_of, serving, until
from verbatim import LLM
from verbatim.serve.app import make_app
from verbatim.serve.settings import ServeSettings

SMALL = {"prompt": "x", "max_tokens": 2, "seed": 1}
SAYS = [{"role": "user", "content": "Hi"}]
TOOL = {"name": "f", "parameters": {"type": "object"}}
MARK = "\ue000"  # stands for a hostile value
# Bodies for each route that takes one.
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"prompt": [1], "stop": ["e"], "stop_token_ids": [1, [2]], "logit_bias": {"5": 1}},
        {"prompt": ["x"], "stop": ["e"], "bad_words": ["q", [1]], "choice": ["a"]},
        {"prompt": "x", "stop": "e", "json_schema": {"const": 1, "pattern": "a"}},
    ],
    "/v1/chat/completions": [
        {"messages": SAYS, "stop": ["e"], "allowed_token_ids": [1, 2, 3]},
        {
            "messages": [*SAYS, {"role": "tool", "content": "x", "tool_call_id": "y"}],
            "max_tokens": 2,
        },
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
            "max_tokens": 2,
        },
        {"messages": SAYS, "tools": [{"type": "function", "function": TOOL}]},
        {"messages": SAYS, "chat_template_kwargs": {"x": 1}},
    ],
    "/v1/responses": [
        {"input": "Hi", "stop": ["e"], "bad_words": [[1, 2]], "metadata": {"a": "b"}},
        {"input": SAYS, "instructions": "x", "max_output_tokens": 2},
    ],
    "/v1/messages": [{"messages": SAYS, "max_tokens": 2, "system": "x"}],
    "/v1/messages/count_tokens": [{"messages": SAYS}],
    "/v1/generate": [
        {"prompt": [1], "params": {"max_tokens": 2, "top_k": 1, "seed": 1, "n": 1, "stop": ["e"]}},
        {"prompt": "x", "params": {"max_tokens": 2, "replay_routing": 1, "json_schema": {}}},
    ],
    "/v1/logprobs": [{"prompts": [[1, 2]]}, {"prompts": ["x"]}],
    "/tokenize": [{"text": "x", "return_tokens": True}, {"messages": SAYS}],
    "/detokenize": [{"ids": [1]}],
    "/v1/load_lora_adapter": [{"lora_name": "x", "lora_path": "x"}],
    "/v1/unload_lora_adapter": [{"lora_name": "x"}],
    "/init_weight_transfer_engine": [
        {"init_info": {"master_address": "x", "master_port": 1, "rank_offset": 1, "world_size": 1}}
    ],
    "/start_weight_update": [{"trainer": "x"}],
    "/finish_weight_update": [{"version": 1}],
}
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


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with LLM(kv_memory="64MB") as llm, serving(llm, ServeSettings(training=True)) as server:
        yield server


def marked(value: Any) -> Iterator[Any]:
    """Copies of a body with the mark in the place of each part in turn, and as one more name."""
    inner = value.items() if isinstance(value, dict) else []
    for key, part in enumerate(value) if isinstance(value, list) else inner:
        for changed in (MARK, *marked(part)):
            copy = value.copy()
            copy[key] = changed
            yield copy
    if isinstance(value, dict):
        yield value | {MARK: 1}


@pytest.mark.parametrize("value", slow_but(VALUES[::4], VALUES), ids=lambda value: value[:12])
def test_unchecked_values_of_every_body(served: Served, value: str) -> None:
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
            assert "server_error" not in answer.text, text[:300]  # in a stream neither
            if answer.status_code != 200:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert served.idle()


@pytest.mark.slow
def test_requests_that_come_in_one_packet_are_answered_in_order(served):
    alone = [served.post("/v1/completions", **SMALL | {"seed": seed}) for seed in range(4)]
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as connection:
        connection.sendall(b"".join(request_of(SMALL | {"seed": seed}) for seed in range(4)))
        found = b""
        while found.count(b"}}}") < 4:  # where an answer ends
            more = connection.recv(65536)
            assert more, found
            found += more
    bodies = [part[part.index(b"{") :] for part in found.split(b"HTTP/1.1 200 OK")[1:]]
    answers = [json.loads(body) for body in bodies]
    assert [a["choices"] for a in answers] == [a["choices"] for a in alone]


@pytest.mark.slow
def test_a_storm_of_clients_that_hang_up_leaves_nothing(served):
    served.post("/v1/completions", **SMALL)
    tasks = served.num_tasks()
    for number in range(120):
        body = SMALL | {"max_tokens": 500, "n": 4, "seed": number, "stream": bool(number % 2)}
        connection = socket.create_connection(("127.0.0.1", served.port), timeout=20)
        connection.sendall(request_of(body)[: None if number % 7 else 60])  # some in mid-sentence
        if number % 3 == 0:
            time.sleep(0.002)
        if number % 5 == 0:  # without a farewell
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    until(lambda: served.num_tasks() <= tasks)  # the last ones may not have been heard of yet
    assert served.idle()
    assert served.post("/v1/completions", **SMALL)["choices"]
