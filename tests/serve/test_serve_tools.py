"""Tool calls: arguments fit their schema even from a random model; streams equal unstreamed answers."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from support.pairwise import slow_but
from support.serving import Served, talking
from support.tool_templates import (
    BARE,
    DEEPSEEK,
    GLM,
    GLM_47,
    HARMONY,
    HERMES,
    KIMI,
    MISTRAL,
    MISTRAL_ARGS,
    PYTHONIC,
    QWEN_CODER,
)
from verbatim.errors import InvalidRequest, NotSupported, VerbatimError
from verbatim.serve.answers import ChannelReader, Reader, Reasoning, split_parts
from verbatim.serve.fields import Function
from verbatim.serve.formats import CallFormat, ParsedCall, ToolUse

KINDS: dict[str, dict[str, Any]] = {
    "text": dict(template=HERMES, added=False),
    "tokens": dict(template=HERMES, added=True),
    "bare": dict(template=BARE, added=False),
    "special": dict(template=HERMES, added=True, special=True),
    "mistral": dict(template=MISTRAL, added=True, special=True),
    "args": dict(template=MISTRAL_ARGS, added=True, special=True),
    "deepseek": dict(template=DEEPSEEK, added=True),
    "pythonic": dict(template=PYTHONIC, added=False),
    "qwen-coder": dict(template=QWEN_CODER, added=True),
    "glm": dict(template=GLM, added=True),
    "kimi": dict(template=KIMI, added=True, special=True),
    "harmony": dict(template=HARMONY, added=True, special=True),
}


@pytest.fixture(scope="module", params=slow_but([*KINDS][1::5], KINDS))
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    with talking(**KINDS[request.param]) as server:
        server.kind = request.param
        yield server


NODE = {"type": "object", "properties": {"v": {"type": "integer"}}, "required": ["v"]}
SCHEMAS: dict[str, dict[str, Any] | None] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 6},
            "unit": {"enum": ["</tool_call>", "\n", '"']},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
    "tree": {  # as written by pydantic: references from the schema's own root
        "type": "object",
        "properties": {"node": {"$ref": "#/$defs/Node"}},
        "required": ["node"],
        "additionalProperties": False,
        "$defs": {"Node": NODE | {"additionalProperties": False}},
    },
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
ASK = {"messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS, "temperature": 1.0}
# The model would seldom generate a mark of a tool call by itself.
TALKATIVE = {"max_tokens": 220, "top_p": 1.0}


MARKED = ("<tool_call>", "[TOOL_CALLS]", "<｜tool▁calls▁begin｜>")


def check(calls: list[dict[str, Any]]) -> None:
    for call in calls:
        assert call["type"] == "function"
        function = call["function"]
        jsonschema.validate(json.loads(function["arguments"]), SCHEMAS[function["name"]])


def test_named_tool_is_called(served):
    for name in SCHEMAS:
        named = {"type": "function", "function": {"name": name}}
        body = ASK | TALKATIVE | {"tool_choice": named, "n": 2, "seed": 1}
        # gpt-oss may think before it calls, and a random model would seldom stop to.
        end = served.llm.tokenizer.hf.get_added_vocab().get("<|end|>")
        body |= {"n": 8, "max_tokens": 400, "logit_bias": {str(end): 8.0}} if end else {}
        choices = served.post("/v1/chat/completions", **body)["choices"]
        calls = [call for c in choices for call in c["message"].get("tool_calls", [])]
        check(calls)
        assert {call["function"]["name"] for call in calls} == {name}


def test_large_tools_and_histories_are_tokenized_apart_from_other_requests(served, monkeypatch):
    threads: list[str] = []

    def render(*arguments: Any, **variables: Any) -> list[int]:
        threads.append(threading.current_thread().name)
        return [0]

    monkeypatch.setattr("verbatim.serve.chat.render_chat", render)
    monkeypatch.setattr("verbatim.serve.native.render_chat", render)
    function = {"name": "f", "description": "x" * 70_000}
    tools = [{"type": "function", "function": function}]
    served.post("/v1/chat/completions", **ASK | {"tools": tools, "max_tokens": 1})
    call = {"name": "f", "arguments": json.dumps("x" * 70_000)}
    calls = [{"type": "function", "id": "c", "function": call}]
    served.post("/tokenize", messages=[{"role": "assistant", "tool_calls": calls}])
    assert [name.rpartition("_")[0] for name in threads] == ["verbatim-large-inputs"] * 2


CHOICES: list[dict[str, Any]] = [
    {"tool_choice": "required"},
    {"tool_choice": "required", "parallel_tool_calls": False},
    {"tool_choice": "auto"},
    {"tool_choice": "none"},
    {"tool_choice": "required", "max_tokens": 20},
    {"tool_choice": "required", "stop": ["node", "city"]},
    {"tool_choice": "required", "logprobs": True},
]


@pytest.mark.parametrize(
    ("served", "choice"),
    [
        # Two choices of each kind, and each choice of three or four kinds; in the fast suite, of one kind.
        pytest.param(kind, choice, marks=[pytest.mark.slow] * (i != j))
        for i, kind in enumerate(KINDS)
        for j, choice in enumerate(CHOICES)
        if (i - j) % 7 in (0, 3)
    ],
    ids=lambda value: value if isinstance(value, str) else json.dumps(value),
    indirect=["served"],
)
def test_streamed_tool_calls_equal_unstreamed_calls(served, choice):
    body = ASK | TALKATIVE | {"n": 2, "seed": 3} | choice
    if choice["tool_choice"] == "auto":  # so that the model begins a call at all
        added = served.llm.tokenizer.hf.get_added_vocab()
        mark = {"bare": ord("{") - 31, "pythonic": ord("[") - 31}.get(served.kind)
        mark = next((i for m, i in added.items() if m in MARKED), mark)
        body |= {"logit_bias": {str(mark): 8.0}} if mark else {}
    whole = served.post("/v1/chat/completions", **body)["choices"]
    pieces = [p["choices"][0] for p in served.stream("/v1/chat/completions", **body)[:-1]]
    for one in whole:
        mine = [piece for piece in pieces if piece["index"] == one["index"]]
        deltas = [piece["delta"] for piece in mine]
        assert "".join(d.get("content") or "" for d in deltas) == (one["message"]["content"] or "")
        calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        assert [call["index"] for call in calls] == list(range(len(calls)))
        wanted = [call["function"] for call in one["message"].get("tool_calls", [])]
        assert [call["function"] for call in calls] == wanted
        assert mine[-1]["finish_reason"] == one["finish_reason"]
        check(one["message"].get("tool_calls", []))
        if choice["tool_choice"] == "none":
            assert not calls
        if choice["tool_choice"] == "required" and "stop" not in choice:
            assert one["finish_reason"] in ("tool_calls", "length")
        if one["finish_reason"] == "tool_calls":
            assert calls
            if "parallel_tool_calls" in choice:
                assert len(calls) == 1 and one["message"]["content"] is None
        if "logprobs" in choice:
            streamed = [e for p in mine if p["logprobs"] for e in p["logprobs"]["content"]]
            assert streamed == one["logprobs"]["content"]
        if "stop" in choice or body["max_tokens"] == 20:  # an incomplete call is returned as text
            assert not calls
            assert one["message"]["content"] or one["message"]["reasoning_content"]


def test_responses_tool_calls_and_results_round_trip(served):
    tools = [{"type": "function", "name": n, "parameters": s} for n, s in SCHEMAS.items()]
    body = {
        "input": "Hi", "tools": tools, "tool_choice": {"type": "function", "name": "weather"},
        "seed": 1, "max_output_tokens": 200, "temperature": 1.0,
    }  # fmt: skip
    harmony = served.kind == "harmony"
    if harmony:  # keep reasoning messages short
        end = served.llm.tokenizer.hf.convert_tokens_to_ids("<|end|>")
        body["logit_bias"] = {str(end): 8.0}
    with_logprobs = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    # Tokens of a call belong to no text.
    error = served.refused("/v1/responses", body | with_logprobs)
    assert "logprobs" in error["message"] and "tools" in error["message"]
    without = body | with_logprobs | {"tool_choice": "none", "max_output_tokens": 3}
    if harmony:
        assert "reasoning" in served.refused("/v1/responses", without)["message"]
    else:
        served.post("/v1/responses", **without)
    whole = served.post("/v1/responses", **body)
    events = served.stream("/v1/responses", **body)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))

    def plain(items: list[dict[str, Any]]) -> list[Any]:
        return [(i["type"], i.get("name"), i.get("arguments"), i.get("content")) for i in items]

    assert plain(events[-1]["response"]["output"]) == plain(whole["output"])
    (call,) = [item for item in whole["output"] if item["type"] == "function_call"]
    jsonschema.validate(json.loads(call["arguments"]), SCHEMAS["weather"])
    kinds = [event["type"] for event in events if "item" in event or "arguments" in event["type"]]
    assert kinds[-4:] == [
        "response.output_item.added", "response.function_call_arguments.delta",
        "response.function_call_arguments.done", "response.output_item.done",
    ]  # fmt: skip
    assert harmony or len(kinds) == 4
    back: list[Any] = [
        {"role": "user", "content": "Hi"}, call,
        {"type": "function_call_output", "call_id": call["call_id"], "output": [
            {"type": "input_text", "text": "sun"}, {"type": "input_text", "text": "ny"}]},
    ]  # fmt: skip
    again = served.post("/v1/responses", input=back, tools=tools, seed=1, max_output_tokens=4)
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": call["call_id"], "type": "function",
             "function": {"name": call["name"], "arguments": call["arguments"]}}]},
        {"role": "tool", "content": "sunny", "tool_call_id": call["call_id"]},
    ]  # fmt: skip
    chat = served.post(
        "/v1/chat/completions", messages=messages, seed=1, max_tokens=4,
        tools=[{"type": "function", "function": {"name": n, "parameters": s}} for n, s in SCHEMAS.items()],
    )  # fmt: skip
    assert again["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    sent = messages[1]["tool_calls"][0]["function"]
    sent["arguments"] = '{"city": "\\ud83d"}'  # a model may write half a character
    served.post("/v1/chat/completions", messages=messages, max_tokens=1)
    sent["arguments"] = "{"
    error = served.refused("/v1/chat/completions", {"messages": messages})
    assert error["param"] == "messages.1.tool_calls.0.function.arguments"
    assert "'{': Invalid JSON" in error["message"]


def function(**schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


# Tests that do not depend on the format.
any_kind = pytest.mark.parametrize("served", ["tokens"], indirect=True)


@any_kind
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tools": [TOOLS[0], TOOLS[0]]}, "same name"),
        ({"tool_choice": {"type": "function", "function": {"name": "nope"}}}, "nope"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "name"),
        ({"tools": [{"type": "web_search"}]}, "type"),
        ({"tools": [function(not_={})]}, "not_"),
        ({"tools": [function(type="string")]}, "object"),
        ({"regex": "a"}, "regex"),
        ({"response_format": {"type": "json_object"}}, "tools"),
        ({"tools": [function(properties={"\ud800": {}})]}, ""),
    ],
    ids=["twice", "unknown", "bad-name", "kind", "schema", "no-object", "regex", "format", "surrogate"],
)  # fmt: skip
def test_invalid_tools_are_rejected(served, change, said):
    content = json.dumps(ASK | {"model": served.service.name, "max_tokens": 2} | change)
    headers = {"content-type": "application/json"}
    answer = served.client.post("/v1/chat/completions", content=content, headers=headers)
    assert answer.status_code == 400, answer.text
    assert said in answer.text


@any_kind
def test_empty_tool_list_is_the_same_as_none(served):
    """Programs that build requests send an empty list together with a tool choice."""
    body = {"messages": ASK["messages"], "max_tokens": 2, "seed": 1}
    plain = served.post("/v1/chat/completions", **body)["choices"]
    none = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}
    assert served.post("/v1/chat/completions", **body, **none)["choices"] == plain
    served.post("/v1/responses", input="Hi", max_output_tokens=2, **none)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    metadata = {"user_id": None}
    served.post("/v1/messages", **body, tools=[], tool_choice=choice, metadata=metadata)
    error = served.refused("/v1/chat/completions", body | {"tools": [], "tool_choice": "required"})
    assert "requires tools" in error["message"]


def test_skip_special_tokens_applies_with_tools(served):
    special = "<s>"
    number = served.llm.tokenizer.hf.convert_tokens_to_ids(special)
    body = {"messages": ASK["messages"], "tools": TOOLS, "max_tokens": 3, "seed": 1}
    body |= {"allowed_token_ids": [number, ord("a") - 31], "logit_bias": {str(number): 50.0}}
    body |= {"tool_choice": "none"}
    for skip, shown in ((False, True), (True, False), (None, False)):
        options = {} if skip is None else {"skip_special_tokens": skip}
        (choice,) = served.post("/v1/chat/completions", **body, **options)["choices"]
        assert (special in str(choice["message"])) == shown


def tool(name: str, **schema: Any) -> Function:
    return Function(name=name, parameters=schema or None)


def use(**how: Any) -> ToolUse:
    found = ToolUse.resolve([tool("f"), tool("g")], None, None, how.pop("template", HERMES))
    assert found is not None
    return found


def read(reader: Reader, text: str, size: int) -> tuple[str, str, list[ParsedCall]]:
    """Push a text in pieces; return its text, reasoning and calls."""
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    parts = [part for piece in pieces for part in reader.push(piece)]
    return split_parts([*parts, *reader.push("", last=True)])


CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "</tool_call>"}}\n</tool_call>'
TEXTS = {
    "none": "Just a text.\n\n",
    "one": f"Let me see.\n\n{CALL}\n",
    "behind": f"{CALL}\nand\n more\n",
    "several": f"a\n{CALL}\n{CALL}\n\nb\n{CALL}",
    "cut": f"a\n{CALL}\n<tool_call>\n" + '{"name": "f", "argu',
    "half a mark": "2 <tool\n\n<tool_cal",
    "unknown": '<tool_call>\n{"name": "h", "arguments": {}}\n</tool_call> x',
    "no JSON": '<tool_call>\n{"name": "f", "arguments": {]}\n</tool_call> x',
}


@pytest.mark.parametrize("name", TEXTS)
def test_reader_gives_same_result_for_any_piece_size(name):
    text = TEXTS[name]

    def plain(said: str, _: str, calls: list[ParsedCall]) -> tuple[str, list[str]]:
        return said, [call.arguments for call in calls]

    whole = plain(*split_parts(Reader(use()).push(text, last=True)))
    assert len(whole[1]) == {"one": 1, "behind": 1, "several": 3, "cut": 1}.get(name, 0)
    if name == "several":
        assert whole[0] == "ab"
    if not whole[1]:
        assert whole[0] == text
    for size in (1, 2, 3, 7, 11):
        reader = Reader(use())
        assert plain(*read(reader, text, size)) == whole
        assert reader.num_calls == len(whole[1])


def test_end_marks_within_arguments_do_not_end_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is such a mark parsed again with each piece of text."""
    value, num_read, parse = "</tool_call>" * 2000, 0, CallFormat.parse

    def counted(*arguments: Any) -> Any:
        nonlocal num_read
        num_read += 1
        return parse(*arguments)

    monkeypatch.setattr(CallFormat, "parse", counted)
    text = f'<tool_call>\n{{"name": "f", "arguments": {{"x": "{value}"}}}}\n</tool_call>'
    _, _, calls = read(Reader(use()), text, 12)
    assert [call.arguments for call in calls] == [f'{{"x": "{value}"}}']
    assert num_read < 10


def test_arguments_keep_their_exact_text():
    """They are not converted to Python numbers, which have no 1e999."""
    text = '{"name": "g", "parameters": {"big": 1e999, "many": 123456789012345678901.50}}'
    (call,) = Reader(use(template=BARE)).push(text, last=True)
    assert isinstance(call, ParsedCall)
    assert call.arguments == text[len('{"name": "g", "parameters": ') : -1]
    assert Reader(use(template=BARE)).push(" " + text, last=True) == [" " + text]


OUTPUTS = {
    MISTRAL: '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"b": "]"}}]',
    MISTRAL_ARGS: '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{"b": "]"}',
    DEEPSEEK: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    '{"a": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n'
    '{"b": "]"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    DEEPSEEK.replace("```json", ""): "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
    '{"a": 1}<｜tool▁call▁end｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>{"b": "]"}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>",
    PYTHONIC: '[f(a=1), g(b="]")]',
    KIMI: '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}'
    '<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{"b": "]"}'
    "<|tool_call_end|><|tool_calls_section_end|>",
    QWEN_CODER: "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=g>\n<parameter=b>\n]\n</parameter>\n</function>\n</tool_call>",
    GLM: "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n"
    "<tool_call>g\n<arg_key>b</arg_key>\n<arg_value>]</arg_value>\n</tool_call>",
    GLM_47: "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
    "<tool_call>g<arg_key>b</arg_key><arg_value>]</arg_value></tool_call>",
}


@pytest.mark.parametrize("number", range(len(OUTPUTS)))
@pytest.mark.parametrize("before", ["", "Let me see.\n"])
def test_tool_calls_of_each_format_are_parsed(number, before):
    template, text = [*OUTPUTS.items()][number]
    used = use(template=template)
    if used.format.bare:
        before = ""
    for size in (1, 3, 1000):
        content, _, calls = read(Reader(used), before + text, size)
        assert content == before.strip()
        assert [(c.name, c.arguments) for c in calls] == [("f", '{"a": 1}'), ("g", '{"b": "]"}')]
    if template == KIMI:
        assert [call.id for call in calls] == ["functions.f:0", "functions.g:1"]
    cut = Reader(used).push(text[:-1], last=True)  # an incomplete call is returned as text
    if not used.format.repeats and text[-1] != "}":
        assert split_parts(cut) == (text[:-1], "", [])


RAW = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "nan": {"type": ["number", "string"]},
        "flag": {"type": "boolean"},
        "list": {"type": "array", "items": {"type": "string"}},
        "any": {},
        "kind": {"$ref": "#/$defs/Kind"},
        "when": {"type": "string", "anyOf": [{"title": "A day"}, {"title": "An hour"}]},
    },
    "$defs": {"Kind": {"enum": ["a", "b"], "type": "string"}},
}
WRITTEN = {  # unquoted text written by a model, and its value
    "text": ('5 </tool_call>\n "', '5 </tool_call>\n "'),
    "maybe": ("null", None),
    "nan": ("NaN", "NaN"),
    "flag": ("True", True),
    "list": ('["</arg_value>"]', ["</arg_value>"]),
    "any": ('{"a": 1}', {"a": 1}),
    "kind": ("b", "b"),
    "when": ("12", "12"),
}


@pytest.mark.parametrize("template", [QWEN_CODER, GLM, GLM_47], ids=["qwen", "glm", "glm-4.7"])
def test_unquoted_arguments_are_parsed_by_their_schema(template):
    used = ToolUse.resolve([tool("f", **RAW)], None, None, template)
    form, argument = used.format, used.format.arguments
    pieces = ((argument.head.replace("NAME", name), text) for name, (text, _) in WRITTEN.items())
    written = "".join(head + text + argument.tail for head, text in pieces)
    text = f"{form.begin}{form.head.replace('NAME', 'f')}{written}{form.tail}{form.end}"
    for size in (1, 5, 1000):
        _, _, (call,) = read(Reader(used), text, size)
        assert json.loads(call.arguments) == {name: value for name, (_, value) in WRITTEN.items()}


@pytest.mark.parametrize("template", [QWEN_CODER, PYTHONIC], ids=["raw", "pythonic"])
@pytest.mark.parametrize(
    "schema",
    [
        {"properties": 5},
        {"properties": {"a": {}}, "required": 5},
        {"properties": {"a": {"enum": 5}}},
        {"properties": {"a": {"type": [{}]}}},
        {"properties": {"a": {"type": "string", "pattern": "x"}}, "oneOf": []},
        {"properties": {"a": {"enum": ["</parameter>"]}}, "not": {}},
        {"properties": {"a b": {"type": "string"}}},
    ],
    ids=json.dumps,
)
def test_invalid_argument_schemas_are_rejected(template, schema):
    def grammar() -> str:
        found = ToolUse.resolve([tool("f", **schema)], None, None, template)
        assert found is not None
        return found.grammar()

    with pytest.raises(VerbatimError, match="f: "):
        grammar()


@pytest.mark.parametrize(
    ("part", "key"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}], "maxLength": 3}, "maxLength"),
        ({"anyOf": [{"$ref": "#/$defs/Part"}] * 2000}, "$ref"),  # 2000 ** n alternatives
    ],
    ids=["limit", "circles"],
)
def test_unsupported_keys_behind_a_reference_are_rejected_by_name(part, key):
    schema = {"properties": {"a": {"$ref": "#/$defs/Part"}}, "$defs": {"Part": part}}
    used = ToolUse.resolve([tool("f", **schema)], None, None, QWEN_CODER)
    assert used is not None
    with pytest.raises(NotSupported, match=f"f: .*{re.escape(repr(key))}"):
        used.grammar()


def test_definitions_are_repeated_only_where_they_are_referenced_and_up_to_a_limit():
    text = "x" * 200_000

    def grammar(value):
        properties = {f"p{i}": value for i in range(50)}
        schema = {"properties": properties, "$defs": {"Part": {"title": text}}}
        return ToolUse.resolve([tool("f", **schema)], None, None, QWEN_CODER).grammar()

    assert text not in grammar({"type": "integer"})
    with pytest.raises(InvalidRequest, match="f: its grammar has more than"):
        grammar({"items": {"$ref": "#/$defs/Part"}, "type": "array"})


CHANNELS = {
    "<|channel|>analysis<|message|>A\nB<|end|><|start|>assistant<|channel|>final<|message|>Text": (
        "A\nB", "Text", []),
    "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>commentary to=functions.f "
    '<|constrain|>json<|message|>{"a": 1}<|call|>': ("A", "", ['{"a": 1}']),
    '<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant to=functions.g<|channel|>commentary json'
    '<|message|>{"b": 2}': ("", "Wait.", ['{"b": 2}']),
    "Text": ("", "Text", []),
    "<|channel|>analysis<|message|>A <|en": ("A <|en", "", []),
    '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a': (
        "", '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a', []),
    "<|channel|>commentary to=functions.f json<|message|>": (
        "", "<|channel|>commentary to=functions.f json<|message|>", []),
}  # fmt: skip


@pytest.mark.parametrize("text", CHANNELS)
def test_harmony_channels_become_reasoning_text_and_calls(text):
    used = use(template=HARMONY)
    for size in (1, 2, 3, 1000):
        content, reasoning, calls = read(ChannelReader(used), text, size)
        assert (reasoning, content, [call.arguments for call in calls]) == CHANNELS[text]


def test_pythonic_arguments_become_json():
    text = '[f(a=True, b=None, c=[1, "x"], d={})]'
    (call,) = Reader(use(template=PYTHONIC)).push(text, last=True)
    assert isinstance(call, ParsedCall)
    assert json.loads(call.arguments) == {"a": True, "b": None, "c": [1, "x"], "d": {}}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (dict(allOf=[dict(required=["a"])]), "'allOf'"),
        (dict(minProperties=1), "'minProperties'"),
        (dict(properties=dict(a=dict(type="boolean", const=True))), "'const'"),
        (dict(required=["x"]), "required"),
        (dict(properties=dict(a={}), required=["a", "a"]), "required"),
    ],
)
def test_schema_not_expressible_as_keyword_arguments_is_rejected(schema, words):
    found = ToolUse.resolve([tool("f", **schema)], None, None, PYTHONIC)
    with pytest.raises(VerbatimError, match=words):
        found.grammar()


THOUGHTS = {
    "<think>\nA\nB\n</think>\n\nText": ("A\nB", "Text"),
    "\n<think>\n</think>\nText": ("", "Text"),
    "Text <think>x</think>": ("", "Text <think>x</think>"),
    "<think>\nA </thin": ("A </thin", ""),
    "<thin": ("", "<thin"),
}


@pytest.mark.parametrize("text", THOUGHTS)
def test_reasoning_is_split_from_text_for_any_piece_size(text):
    marks = ("<think>", "</think>")
    for size in (1, 2, 3, 1000):
        content, reasoning, _ = read(Reader(None, marks), text, size)
        assert (reasoning, content) == THOUGHTS[text]
    inside = Reader(None, marks, opened=True)
    assert inside.push("A\n</think>\n\nB", last=True) == [Reasoning("A"), "B"]
