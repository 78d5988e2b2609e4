"""Documents are compact: a small model fills no answer with whitespace, or with properties of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from support.serving import Served, serving
from verbatim import LLM
from verbatim.sampling.json_schema import closed

SAYS = [{"role": "user", "content": "Tell me of an animal."}]
SCHEMA: dict[str, Any] = {  # as pydantic writes it: it doesn't forbid other properties
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "legs": {"type": "integer", "minimum": 0, "maximum": 8},
        "tame": {"type": "boolean"},
    },
    "required": ["name", "legs", "tame"],
}
FORM = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}
MANY = {"n": 20, "seed": 1}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with LLM() as llm, serving(llm) as server:
        yield server


def texts_of(served: Served, path: str, **body: Any) -> list[str]:
    if path == "/v1/generate":
        outputs = served.post(path, prompt="An animal:", params=MANY | body)["outputs"]
        return [output["text"] for output in outputs]
    body |= {"messages": SAYS} if "chat" in path else {"prompt": "An animal:"}
    choices = served.post(path, **MANY, **body)["choices"]
    return [c["message"]["content"] if "chat" in path else c["text"] for c in choices]


@pytest.mark.parametrize(
    ("path", "structure"),
    [
        ("/v1/chat/completions", {"response_format": FORM}),
        ("/v1/completions", {"json_schema": SCHEMA | {"additionalProperties": False}}),
        ("/v1/generate", {"json_schema": SCHEMA | {"additionalProperties": False}}),
    ],
    ids=["response_format", "completions", "generate"],
)
def test_no_document_of_three_fields_is_cut_at_80_tokens(served, path, structure):
    for text in texts_of(served, path, **structure, max_tokens=80):
        jsonschema.validate(json.loads(text), SCHEMA)


def test_any_object_has_no_free_whitespace(served):
    texts = texts_of(
        served, "/v1/chat/completions", response_format={"type": "json_object"}, max_tokens=80
    )
    assert all(text.startswith("{") for text in texts)
    for text in texts:  # without its strings, the last of which may be cut
        assert not re.search(r"\s\s|[\n\t]", re.sub(r'"(\\.|[^"\\])*("|\\?$)', "", text))


def test_a_schema_that_allows_other_properties_has_them(served):
    schema = {
        "type": "object", "properties": {"a": {"const": 1}}, "required": ["a"],
        "additionalProperties": {"const": 2},
    }  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    texts = texts_of(served, "/v1/chat/completions", response_format=form, max_tokens=80)
    assert any(text.count(":") > 1 for text in texts)


OPEN: list[dict[str, Any]] = [
    {"type": "object"},
    {"properties": {"a": {}}, "additionalProperties": True},
    {"properties": {"a": {}}, "patternProperties": {"^x": {}}},
    {"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}, {"required": ["a"]}]},
    {
        "$defs": {"A": {"properties": {"a": {}}}},
        "allOf": [{"$ref": "#/$defs/A"}, {"required": ["b"]}],
    },
]


@pytest.mark.parametrize("schema", OPEN, ids=range(len(OPEN)))
def test_a_schema_of_several_parts_for_one_value_stays_as_it_is(schema):
    assert closed(schema) == schema


def test_objects_within_a_schema_are_closed_too():
    node = {"properties": {"v": {}}}
    schema = {"items": node, "$defs": {"Node": node}, "const": node}
    shut = node | {"additionalProperties": False}
    assert closed(schema) == {"items": shut, "$defs": {"Node": shut}, "const": node}
    assert node == {"properties": {"v": {}}}


def test_a_response_and_a_message_have_the_listed_properties(served):
    text = served.post(
        "/v1/responses", input="Hi", max_output_tokens=80, seed=1,
        text={"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
    )["output"][0]["content"][0]["text"]  # fmt: skip
    assert json.loads(text).keys() == SCHEMA["properties"].keys()
    (block,) = served.post(
        "/v1/messages", messages=SAYS, max_tokens=80, seed=1,
        output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
    )["content"]  # fmt: skip
    assert json.loads(block["text"]).keys() == SCHEMA["properties"].keys()
