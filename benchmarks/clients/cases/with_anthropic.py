"""The `anthropic` package: messages, streams, tools, a count of tokens."""

from __future__ import annotations

import anthropic
from case import MESSAGES, MODEL, URL, run

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
SCHEMA = {"type": "object", "properties": {"legs": {"type": "integer"}}, "required": ["legs"]}
TOOL = {"name": "animal", "description": "An animal.", "input_schema": SCHEMA}


def message_whole_and_streamed() -> None:
    ask = {"model": MODEL, "messages": MESSAGES, "max_tokens": 20, "extra_body": {"seed": 3}}
    whole = client.messages.create(**ask, metadata={"user_id": None})
    with client.messages.stream(**ask) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text


def tools() -> None:
    ask = {"model": MODEL, "tools": [TOOL], "max_tokens": 200}
    done = client.messages.create(**ask, messages=MESSAGES, tool_choice={"type": "any"})
    (use,) = [block for block in done.content if block.type == "tool_use"][:1]
    assert isinstance(use.input["legs"], int)
    assert done.stop_reason == "tool_use"
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "A cat."}
        for block in done.content if block.type == "tool_use"
    ]  # fmt: skip
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": done.content},
        {"role": "user", "content": results},
    ]
    assert client.messages.create(**ask | {"max_tokens": 5}, messages=turns).content is not None


def count_of_tokens() -> None:
    assert client.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens > 0


def errors_have_their_classes() -> None:
    try:
        client.messages.create(model="other", messages=MESSAGES, max_tokens=5)
    except anthropic.NotFoundError:
        return
    raise AssertionError("no NotFoundError")


run(message_whole_and_streamed, tools, count_of_tokens, errors_have_their_classes)
