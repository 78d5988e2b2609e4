"""Reasoning has a field of its own in answers and histories; structured outputs begin after it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from support.pairwise import slow_but
from support.serving import Served, talking
from support.tool_templates import HARMONY, HERMES, THINKING

NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
SCHEMA = {"type": "object", "properties": {"v": NUMBER}, "required": ["v"]}
SCHEMA |= {"additionalProperties": False}
ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hi"}], "temperature": 1.0, "top_p": 1.0, "seed": 2,
    "max_tokens": 120,
}  # fmt: skip
LOW = {"reasoning_effort": "low"}


@pytest.fixture(scope="module", params=slow_but(["special"], ["text", "tokens", "special"]))
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """A model with a logit bias that makes it end its reasoning soon."""
    template = THINKING + HERMES[: HERMES.index("{%- for")]
    how = dict(added=request.param != "text", special=request.param == "special")
    with talking(template, **how) as server:
        added = server.llm.tokenizer.hf.get_added_vocab()
        server.bias = {str(added.get("</think>", 261)): 3.0, "1": -100.0}
        yield server


def answers(served: Served, **body: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Return an unstreamed choice and the texts of the stream, which must be equal."""
    body = ASK | {"logit_bias": served.bias} | body
    whole = served.post("/v1/chat/completions", **body)["choices"][0]
    texts = {"content": "", "reasoning_content": ""}
    for piece in served.stream("/v1/chat/completions", **body)[:-1]:
        for name in texts:
            texts[name] += piece["choices"][0]["delta"].get(name) or ""
    assert texts["content"] == (whole["message"]["content"] or "")
    assert texts["reasoning_content"] == (whole["message"]["reasoning_content"] or "")
    return whole, texts


def test_reasoning_is_split_from_content(served):
    _, texts = answers(served, **LOW)
    assert texts["reasoning_content"]
    assert "think>" not in texts["content"] or served.bias.get("261")
    _, plain = answers(served, reasoning_effort="none")
    assert not plain["reasoning_content"]
    error = served.refused("/v1/chat/completions", ASK | {"reasoning_effort": 5})
    assert error["param"] == "reasoning_effort"


@pytest.mark.parametrize("seed", slow_but([0], range(3)))
@pytest.mark.parametrize("effort", slow_but(["low"], ["low", "none"]))
def test_structured_output_begins_after_reasoning(served, seed, effort):
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    for structure in (
        {"response_format": schema}, {"regex": "a/[bc]+d"}, {"choice": ["yes", 'n"o']},
        {"grammar": 'start: "}" | n\nn: %json {"type": "null"} // {'},
    ):  # fmt: skip
        body = structure | {"seed": seed, "max_tokens": 150, "reasoning_effort": effort}
        whole, texts = answers(served, **body)
        if whole["finish_reason"] == "length":
            continue
        content = texts["content"]
        if "regex" in structure:
            assert content[:2] == "a/"
        elif "choice" in structure:
            assert content in structure["choice"]
        elif "grammar" in structure:
            assert content in ("}", "null")
        else:
            jsonschema.validate(json.loads(content), SCHEMA)


def test_grammar_error_names_its_own_line(served):
    error = served.refused("/v1/chat/completions", ASK | LOW | {"grammar": "start: a\na: /[/\n"})
    assert "at 2(" in error["message"]


def test_error_of_a_derived_grammar_names_the_field(served):
    parameters = {"type": "object", "properties": {"a": {"type": "odd"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    for name, value in (("regex", "("), ("tools", tools)):
        error = served.refused("/v1/chat/completions", ASK | LOW | {name: value})
        assert error["param"] == name
        assert error["message"].startswith(f"{name}: ")


def test_usage_counts_reasoning_tokens(served):
    body = ASK | LOW | {"logit_bias": served.bias, "logprobs": True}
    whole = served.post("/v1/chat/completions", **body)
    tokens = [entry["token"] for entry in whole["choices"][0]["logprobs"]["content"]]
    text, count = "", 0
    while "</think>" not in text and count < len(tokens):
        text += tokens[count]
        count += 1
    usage = whole["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": count}
    with_usage = body | {"stream_options": {"include_usage": True}}
    assert served.stream("/v1/chat/completions", **with_usage)[-2]["usage"] == usage
    del body["messages"], body["logprobs"], body["max_tokens"], body["reasoning_effort"]
    body |= {"input": "Hi", "reasoning": {"effort": "low"}, "max_output_tokens": 120}
    responses_usage = served.post("/v1/responses", **body)["usage"]
    assert responses_usage["output_tokens_details"] == {"reasoning_tokens": count}
    plain = served.post("/v1/chat/completions", **ASK | {"reasoning_effort": "none"})["usage"]
    assert plain["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_grammar_keeps_reasoning_from_spelling_end_mark(served):
    """The reader sees only text, so the grammar must not let reasoning contain its end mark as text."""
    ids = served.llm.tokenizer.encode("<>/hiknt", special_tokens=False)
    body = ASK | LOW | {"regex": "a", "max_tokens": 300, "n": 4}
    body |= {"logit_bias": served.bias | {str(i): 2.0 for i in ids}}
    for choice in served.post("/v1/chat/completions", **body)["choices"]:
        assert choice["message"]["content"] in ("", "a", None)


def test_tool_calls_follow_reasoning(served):
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    body = ASK | LOW | {"tools": tools, "tool_choice": "required", "logit_bias": served.bias}
    body |= {"max_tokens": 800, "parallel_tool_calls": False}
    (choice,) = served.post("/v1/chat/completions", **body)["choices"]
    if choice["finish_reason"] != "length":
        (call,) = choice["message"]["tool_calls"]
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)


def test_responses_reasoning_items_round_trip(served):
    body = {
        "input": "Hi", "reasoning": {"effort": "low"}, "logit_bias": served.bias, "seed": 2,
        "max_output_tokens": 120, "temperature": 1.0, "top_p": 1.0,
    }  # fmt: skip
    whole = served.post("/v1/responses", **body)
    events = served.stream("/v1/responses", **body)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))

    def plain(items: list[dict[str, Any]]) -> list[Any]:
        return [(item["type"], item["content"]) for item in items]

    assert plain(events[-1]["response"]["output"]) == plain(whole["output"])
    assert whole["output"][0]["type"] == "reasoning"
    (reasoning,) = whole["output"][0]["content"]
    deltas = [e["delta"] for e in events if e["type"] == "response.reasoning_text.delta"]
    assert "".join(deltas) == reasoning["text"]
    assert whole["reasoning"]["effort"] == "low"
    with_logprobs = body | {"include": ["message.output_text.logprobs"]}
    assert "reasoning" in served.refused("/v1/responses", with_logprobs)["message"]

    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "B"}]
    messages[1]["reasoning_content"] = "A"
    user = {"role": "user", "content": "Go"}
    chat = served.post("/v1/chat/completions", messages=[*messages, user], max_tokens=2)
    item = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [
        {"type": "reasoning_text", "text": "A"}]}  # fmt: skip
    items = [messages[0], item, {"role": "assistant", "content": "B"}, user]
    again = served.post("/v1/responses", input=items, max_output_tokens=2)
    assert again["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    del messages[1]["reasoning_content"]
    without = served.post("/v1/chat/completions", messages=[*messages, user], max_tokens=2)
    assert without["usage"]["prompt_tokens"] < chat["usage"]["prompt_tokens"]


def test_tokenize_counts_messages_as_chat_does():
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "B"}]
    messages[1]["reasoning_content"] = "A"  # which this template calls `thinking`
    messages.append({"role": "user", "content": "Go"})
    with talking(HARMONY, added=True, special=True) as server:
        chat = server.post("/v1/chat/completions", messages=messages, max_tokens=2)
        count = server.post("/tokenize", messages=messages)["count"]
        assert count == chat["usage"]["prompt_tokens"]
        named = [{"role": "user", "content": "Hi", "name": "Ann"}]
        assert "messages[0].name" in server.refused("/tokenize", {"messages": named})["message"]


def test_structured_output_is_the_whole_text_of_gpt_oss():
    """Only before tool calls, the model may also write in the channel `commentary`, which is text."""
    with talking(HARMONY, added=True, special=True) as server:
        end = server.llm.tokenizer.hf.get_added_vocab()["<|end|>"]
        body = ASK | {"choice": ["yes"], "n": 4, "logit_bias": {str(end): 4.0}}
        for choice in server.post("/v1/chat/completions", **body)["choices"]:
            assert "yes".startswith(choice["message"]["content"])
