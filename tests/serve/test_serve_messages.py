"""Anthropic's `/v1/messages` matches chat completions, and accepts its own answers as history."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from support.programs import PATIENCE_S
from support.serving import Served, serving, talking
from support.tool_templates import HERMES, THINKING
from verbatim import LLM, SamplingParams
from verbatim.serve.settings import ServeSettings

KEY = "a-key-of-eight"
MESSAGES = [{"role": "user", "content": "Tell me a story."}]
ASK: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 12, "seed": 3}
SCHEMA = {"type": "object", "properties": {"v": {"type": "boolean"}}, "required": ["v"]}
SCHEMA |= {"additionalProperties": False}
TOOLS = [{"name": "f", "description": "d", "input_schema": SCHEMA}]
CALLING: dict[str, Any] = {"tools": TOOLS, "tool_choice": {"type": "any"}, "max_tokens": 400}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with LLM() as llm, serving(llm) as server:
        yield server


@pytest.fixture(scope="module")
def calling() -> Iterator[Served]:
    """A model with tools and reasoning."""
    template = HERMES[: HERMES.index("{%- for")] + THINKING
    settings = ServeSettings(api_keys=(KEY,), name="tales")
    with talking(template, settings=settings, added=True) as server:
        server.client.headers["x-api-key"] = KEY
        server.bias = {str(server.llm.tokenizer.hf.get_added_vocab()["</think>"]): 3.0}
        yield server


def blocks_of(events: list[Any]) -> list[dict[str, Any]]:
    """Assemble the content blocks from the events of a stream."""
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], blocks[event["index"]]
            if delta["type"] == "input_json_delta":
                block["input"] = json.loads(delta["partial_json"])
            else:
                name = delta["type"].removesuffix("_delta")
                block[name] += delta[name]
    return blocks


def without_ids(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in b.items() if name != "id"} for b in blocks]


def test_message_matches_chat_of_the_same_turns(served):
    body = ASK | {"system": [{"type": "text", "text": "Be short."}], "metadata": {"user_id": "me"}}
    whole = served.post("/v1/messages", **body)
    system = {"role": "system", "content": "Be short."}
    chat = served.post("/v1/chat/completions", **ASK | {"messages": [system, *MESSAGES]})
    (block,) = whole["content"]
    assert block["text"] == chat["choices"][0]["message"]["content"]
    assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", "storyteller")
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("max_tokens", None)
    usage = whole["usage"]
    num_prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert num_prompt == chat["usage"]["prompt_tokens"]
    count = {name: value for name, value in body.items() if name != "max_tokens"}
    counted = served.post("/v1/messages/count_tokens", **count)
    assert counted == {"input_tokens": num_prompt}
    events = served.stream("/v1/messages", **body)
    assert blocks_of(events) == whole["content"]
    kinds = [e["type"] for e in events if e["type"] != "content_block_delta"]
    assert kinds == [
        "message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == usage["output_tokens"] == 12
    stop = block["text"][3:6]
    ended = served.post("/v1/messages", **ASK | {"system": "Be short.", "stop_sequences": [stop]})
    assert (ended["stop_reason"], ended["stop_sequence"]) == ("stop_sequence", stop)


@pytest.mark.parametrize("content", ["Once upon", [{"type": "text", "text": "Once upon"}]])
def test_answer_continues_a_last_message_of_the_assistant(served, content):
    begun = {"messages": [*MESSAGES, {"role": "assistant", "content": content}]}
    prompt = served.post("/tokenize", messages=MESSAGES)["ids"]
    prompt += served.llm.tokenizer.encode("Once upon", special_tokens=False)
    counted = served.post("/v1/messages/count_tokens", **begun)
    assert counted == {"input_tokens": len(prompt)}
    params = SamplingParams(max_tokens=12, temperature=0)
    (result,) = served.llm.generate([prompt], params)
    (block,) = served.post("/v1/messages", **ASK | begun, temperature=0.0)["content"]
    assert block["text"] == result.outputs[0].text
    structured = {"output_config": {"format": {"type": "json_schema", "schema": {}}}}
    assert (
        "begins the answer" in served.refused("/v1/messages", ASK | begun | structured)["message"]
    )


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}] * 5000}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages.0"),
        ({"tools": TOOLS * 200}, "tools"),
        ({"tools": [{"type": "web_search_20250305", "name": "x"}]}, "tools.0.type"),
        ({"n": 2}, "n"),
        ({"thinkin": {}}, "thinkin"),
        ({"metadata": {str(i): "x" for i in range(20)}}, "metadata"),
    ],
)
def test_unsupported_field_is_rejected_by_name(served, change, param):
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        if path.endswith("tokens") and "max_tokens" in change:
            continue
        body = {k: v for k, v in ASK.items() if path == "/v1/messages" or k != "max_tokens"}
        answer = served.client.post(path, json=body | change)
        assert answer.status_code == 400, answer.text
        error = answer.json()
        assert error["type"] == "error"
        assert error["error"]["type"] == "invalid_request_error"
        assert (error["error"]["param"] or "").startswith(param)
        assert len(error["error"]["message"]) < 300
    served.until_idle()


def test_api_key_is_accepted_in_x_api_key_header(calling):
    body = ASK | {"model": "tales"}
    url = f"{calling.url}/v1/messages"
    post = partial(httpx.post, timeout=PATIENCE_S)
    assert post(url, json=body, headers={"x-api-key": KEY}).status_code == 200
    assert post(url, json=body, headers={"Authorization": f"Bearer {KEY}"}).status_code == 200
    for headers in ({}, {"x-api-key": "wrong-key"}, {"x-api-key": ""}):
        answer = post(url, json=body, headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["type"] == "authentication_error"


@pytest.mark.slow
def test_tool_use_and_thinking_blocks_round_trip(calling):
    body = ASK | CALLING | {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    body |= {"logit_bias": calling.bias, "temperature": 1.0}
    whole = calling.post("/v1/messages", **body)
    events = calling.stream("/v1/messages", **body)
    assert without_ids(blocks_of(events)) == without_ids(whole["content"])
    kinds = [block["type"] for block in whole["content"]]
    assert kinds[:1] == ["thinking"] and set(kinds) <= {"thinking", "tool_use"}
    assert whole["stop_reason"] in ("tool_use", "max_tokens")
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm", "signature": ""}, {"type": "text", "text": "Yes."},
            {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"v": True}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny"},
            {"type": "text", "text": "Go on", "cache_control": {"type": "ephemeral"}}]},
    ]  # fmt: skip
    counted = calling.post("/v1/messages/count_tokens", messages=turns, tools=TOOLS)
    call = {"id": "toolu_1", "type": "function",
            "function": {"name": "f", "arguments": '{"v": true}'}}  # fmt: skip
    chat = [
        *MESSAGES,
        {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "sunny"},
        {"role": "user", "content": "Go on"},
    ]
    function = {"name": "f", "description": "d", "parameters": SCHEMA}
    tools = [{"type": "function", "function": function}]
    answer = calling.post("/v1/chat/completions", messages=chat, tools=tools, max_tokens=1)
    assert counted["input_tokens"] == answer["usage"]["prompt_tokens"]


def test_anthropic_client_package_works(calling):
    anthropic = pytest.importorskip("anthropic", reason="needs the anthropic package")
    ask: dict[str, Any] = {"model": "tales", "max_tokens": 12, "messages": MESSAGES}
    with anthropic.Anthropic(base_url=calling.url, api_key=KEY, max_retries=0) as client:
        whole = client.messages.create(**ask, extra_body={"seed": 3})
        with client.messages.stream(**ask, extra_body={"seed": 3}) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert text == "".join(b.text for b in whole.content if b.type == "text")
        assert final.usage.output_tokens == whole.usage.output_tokens
        assert client.messages.count_tokens(model="tales", messages=MESSAGES).input_tokens > 0
        called = client.messages.create(**ask | CALLING, extra_body={"seed": 1})
        uses = [block for block in called.content if block.type == "tool_use"]
        assert all(set(use.input) == {"v"} for use in uses)
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(**ask | {"model": "other"})
        with pytest.raises(anthropic.BadRequestError, match="top_q"):
            client.messages.create(**ask, extra_body={"top_q": 1})
    with anthropic.Anthropic(base_url=calling.url, api_key="wrong", max_retries=0) as client:  # noqa: SIM117
        with pytest.raises(anthropic.AuthenticationError):
            client.messages.create(**ask)
