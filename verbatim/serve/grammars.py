"""Grammars of answers: `Marks` and, for tool-call arguments that are not a JSON object, `ArgumentFormat`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verbatim.errors import InvalidRequest, NotSupported
from verbatim.params import MAX_STRUCTURE_CHARS
from verbatim.sampling.json_schema import close_objects
from verbatim.serve.fields import Function
from verbatim.text.tokenizer import Tokenizer

ANYTHING = r"(.|\n)*"  # Lark's `.` matches no line end


class Marks:
    """The marks of a tokenizer, as text and in grammars.

    Attributes:
        special_ids: ids of the marks that are special tokens, which are left out of the text by default.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._ids = {} if tokenizer is None else tokenizer.marks
        self.special_ids = frozenset[int]() if tokenizer is None else tokenizer.special_ids

    def within(self, text: str) -> Marks:
        """Return the marks that occur in `text`; a tokenizer may have thousands."""
        subset = Marks(None)
        subset._ids = {mark: i for mark, i in self._ids.items() if mark in text}
        subset.special_ids = self.special_ids & {*subset._ids.values()}
        return subset

    def lark(self, text: str) -> str:
        """Return the Lark expression of a text that may contain marks."""
        names = sorted(filter(text.__contains__, self._ids), key=len, reverse=True)
        split = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
        parts = [
            f"<[{self._ids[part]}]>" if part in self._ids else json.dumps(part, ensure_ascii=False)
            for part in split
            if part
        ]
        return " ".join(parts) or '""'

    def until(self, rule: str, mark: str, body: str = ANYTHING) -> str:
        """Return a Lark rule, `rule` in lower case, for text that matches `body` up to the first `mark`.

        A `Reader` sees only text, so the text must not spell out a mark that is a token.
        """
        if mark in self._ids:
            text = rule.upper()
            return f"{rule}: {text} {self.lark(mark)}\n{text_without(text, [mark], body)}"
        return f"{rule}[lazy]: /{body}/ {self.lark(mark)}\n"


NO_MARKS = Marks(None)


def text_without(rule: str, marks: Sequence[str], body: str = ANYTHING) -> str:
    """Return a Lark terminal, with a name in upper case, of text that contains none of the marks."""
    marked = "|".join(re.escape(mark).replace("/", r"\/") for mark in marks)
    return f"{rule}: /{body}/ & ~/{ANYTHING}({marked}){ANYTHING}/\n"


def overlap(text: str, *marks: str) -> int:
    """Return the length of the longest suffix of `text` that may begin a mark."""
    tail = text[max(0, len(text) - max(map(len, marks)) + 1) :]
    begins = {mark[0] for mark in marks}
    for at, character in enumerate(tail):
        if character in begins and any(mark.startswith(tail[at:]) for mark in marks):
            return len(tail) - at
    return 0


# ---- arguments

ANY_OBJECT: dict[str, Any] = {"type": "object"}
_DECODER = json.JSONDecoder(parse_constant=int)  # raises ValueError: JSON has no NaN or Infinity
_WORDS = {"True": "true", "False": "false", "None": "null"}  # Python's spelling: JSON's
_KINDS: dict[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object",
    type(None): "null",
}  # fmt: skip
_NOTES = frozenset({"type", "title", "description", "default", "examples", "$comment"})
_FLAG_KEYS = _NOTES | {"enum"}  # keys of a schema of a boolean or null
_STRING_KEYS = _NOTES | {"enum", "const", "anyOf", "$ref", "minLength", "maxLength"}
_OBJECT_KEYS = _NOTES | {"properties", "required", "additionalProperties", "$defs", "definitions"}
_OBJECT_KEYS |= {"$schema", "$id"}  # keys of the schema of all arguments
# Limits per argument, since a schema may refer to itself.
_MAX_REFERENCES, _MAX_VARIANTS = 64, 4096


def schema_of(function: Function) -> dict[str, Any]:
    """Return the JSON schema of a function's arguments; its type defaults to object."""
    schema = close_objects(function.parameters or ANY_OBJECT)
    return schema if "$ref" in schema else ANY_OBJECT | schema


def read_json(text: str, at: int) -> tuple[str, int]:
    """Return the JSON text at position `at`, unchanged, and the position after it."""
    end = _DECODER.raw_decode(text, at)[1]
    return text[at:end], end


@dataclass(frozen=True, slots=True)
class ArgumentFormat:
    """A model's notation of one argument: `head`, the value, `tail`.

    Attributes:
        head: text before the value; NAME stands for the argument's name.
        tail: text after the value.
        between: separator of arguments.
        raw: whether strings are unquoted. If not, values are JSON, but with Python's True, False and None.
    """

    head: str
    tail: str = ""
    between: str = ""
    raw: bool = False

    def rules(self, rule: str, function: Function, marks: Marks) -> list[str]:
        """Return the Lark rules of a function's arguments, the required ones first.

        The rules of raw strings have the same names and text in all functions.

        Raises:
            InvalidRequest, NotSupported: an invalid schema, or one that this format can't enforce.
            TypeError, AttributeError, KeyError: a keyword of the schema has a value of the wrong type.
        """
        schema = schema_of(function)
        properties, required = schema.get("properties", {}), schema.get("required", [])
        names = str.isidentifier if self.between else re.compile(r"[\w.\-]+").fullmatch
        if not all(map(names, properties)) or "$ref" in schema:
            raise NotSupported(
                f"tools: {function.name}: the model's call format requires parameter names that are "
                "identifiers"
            )
        if len(set(required)) < len(required) or not set(required) <= set(properties):
            raise InvalidRequest(
                f"tools: {function.name}: required must name properties, each of them once"
            )
        _refuse(function.name, set(schema) - _OBJECT_KEYS)
        rules, pairs, length = list[str](), dict[str, str](), 0
        for name, value in properties.items():
            head = marks.lark(self.head.replace("NAME", name))
            pairs[name] = f"{head} {self._value(function.name, value, schema, marks, rules)}"
            length += len(pairs[name])
            if length > MAX_STRUCTURE_CHARS:
                limit = f"more than {MAX_STRUCTURE_CHARS} characters"
                raise InvalidRequest(f"tools: {function.name}: its grammar has {limit}")
        between = f"{marks.lark(self.between)} " if self.between else ""
        first = f" {between}".join(pairs.pop(name) for name in required)
        later = ""  # name of the rule of this optional argument and those after it
        for number, pair in enumerate(reversed(pairs.values())):
            more = f" ({between}{later})? | {later}" if later else ""
            later = f"{rule}_last_{number + 1}"
            rules.append(f"{later}: {pair}{more}\n")
        optional = f" ({between if first else ''}{later})?" if later else ""
        return [f"{rule}: {first}{optional}\n", *rules]

    def _value(
        self, name: str, value: Any, root: dict[str, Any], marks: Marks, rules: list[str]
    ) -> str:
        """Return the Lark expression of a value and its tail; append the rules that it uses to `rules`."""
        kinds = _kinds(value, root)
        if self.raw and (kinds is None or "string" in kinds):
            return self._raw(name, _raw_schema(name, value, root), marks, rules)
        tail = marks.lark(self.tail)
        if isinstance(value, dict) and value.get("type") in ("boolean", "null"):
            _refuse(name, set(value) - _FLAG_KEYS)
            words = {json.dumps(None)} if value["type"] == "null" else {"true", "false"}
            if "enum" in value:
                words = set(map(json.dumps, value["enum"]))
            words = {python for python, word in _WORDS.items() if word in words} | (
                words if self.raw else set()
            )
            return f"({' | '.join(map(json.dumps, sorted(words)))}) {tail}"
        text = json.dumps(value)
        if isinstance(value, dict) and '"$ref"' in text:
            definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
            text = json.dumps(value | definitions)
        return f"%json {text} {tail}"

    def _raw(self, name: str, value: dict[str, Any], marks: Marks, rules: list[str]) -> str:
        tail = self.tail
        choices = value.get("enum", [value["const"]] if "const" in value else None)
        if choices is not None:
            texts = [text if isinstance(text, str) else json.dumps(text) for text in choices]
            if any(tail.strip() in text for text in texts):
                raise NotSupported(
                    f"tools: {name}: an enum has {tail.strip()!r}, which ends arguments"
                )
            return f"({' | '.join(map(json.dumps, texts))}) {marks.lark(tail)}"
        text, body = "raw", ANYTHING
        if "minLength" in value or "maxLength" in value:
            min_length, max_length = value.get("minLength", 0), value.get("maxLength", "")
            text, body = f"raw_{min_length}_{max_length}", rf"(.|\n){{{min_length},{max_length}}}"
        mark = tail.strip()
        lead, rest = tail.split(mark)
        rules.append(marks.until(text, mark, body + lead.replace("\n", r"\n")))
        return f"{text} {marks.lark(rest)}"

    def read(self, text: str, at: int, function: Function) -> tuple[str, int]:
        """Return the arguments at `at` as a JSON object, and their end; raise ValueError if invalid."""
        root, parts = schema_of(function), list[str]()
        properties = root.get("properties", {})
        head = re.escape(self.head).replace("NAME", r"([\w.\-]+)")
        while match := re.compile((re.escape(self.between) if parts else "") + head).match(
            text, at
        ):
            at = match.end()
            kinds = _kinds(properties.get(match[1], {}), root)
            if self.raw and (kinds is None or "string" in kinds):
                end = text.index(self.tail, at)
                value, at = _raw_to_json(text[at:end], kinds), end
            elif word := re.compile("True|False|None").match(text, at):
                value, at = _WORDS[word[0]], word.end()
            else:
                value, at = read_json(text, at)
            if not text.startswith(self.tail, at):
                raise ValueError
            at += len(self.tail)
            parts.append(f"{json.dumps(match[1])}: {value}")
        return f"{{{', '.join(parts)}}}", at


PYTHONIC = ArgumentFormat("NAME=", between=", ")


def _refuse(name: str, keys: set[str]) -> None:
    if keys:
        raise NotSupported(
            f"tools: {name}: the model's call format can't enforce "
            f"{', '.join(map(repr, sorted(keys)))} of its schema"
        )


def _variants(schema: Any, root: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the alternatives of a schema, with references, `anyOf` and `oneOf` expanded.

    Each alternative includes the keys next to these. An unknown reference, or a schema with too many
    alternatives, remains a `$ref`. Returns [{}] if any value is allowed.
    """
    variants, todo, num_references = list[dict[str, Any]](), [schema], 0
    while todo:
        part = todo.pop()
        if not isinstance(part, dict):
            variants.append({})
            continue
        key = next((key for key in ("$ref", "anyOf", "oneOf") if part.get(key)), None)
        siblings = {name: value for name, value in part.items() if name != key}
        if key == "$ref" and isinstance(part[key], str):
            num_references += 1
            defs, _, name = part[key].removeprefix("#/").partition("/")
            target = root.get(defs, {}).get(name) if defs in ("$defs", "definitions") else None
            target = target or {"$ref": None}
            todo.append(siblings | target if isinstance(target, dict) else target)
        elif key is not None and isinstance(part[key], list):
            options = reversed(part[key])
            todo += [siblings | each if isinstance(each, dict) else siblings for each in options]
        else:
            variants.append(part)
        if num_references > _MAX_REFERENCES or len(todo) + len(variants) > _MAX_VARIANTS:
            return [{"$ref": None}]
    return variants


def _kinds(schema: Any, root: dict[str, Any]) -> set[str] | None:
    """Return the JSON types of the values that a schema allows; None for any type."""
    kinds: set[str] = set()
    for variant in _variants(schema, root):
        if "enum" in variant or "const" in variant:
            kinds |= {_KINDS[type(v)] for v in variant.get("enum", [variant.get("const")])}
        elif "type" in variant:
            kinds |= {variant["type"]} if isinstance(variant["type"], str) else set(variant["type"])
        else:
            return None
    return kinds


def _raw_schema(name: str, schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    """Return the constraints on an unquoted string; raise NotSupported if they can't be enforced."""
    variants = _variants(schema, root)
    for part in (schema, *variants):
        _refuse(name, set(part if isinstance(part, dict) else ()) - _STRING_KEYS)
    _refuse(name, {key for part in variants for key in part} & {"$ref"})
    if len(variants) == 1:
        return variants[0]
    if all("enum" in part or "const" in part or part.get("type") == "null" for part in variants):
        values = [part.get("enum", [part.get("const")]) for part in variants]
        return {"enum": [value for options in values for value in options]}
    # The type of the value depends on its text, so no other constraint can be enforced.
    _refuse(name, {key for part in variants for key in part} - _NOTES)
    return {}


def _raw_to_json(text: str, kinds: set[str] | None) -> str:
    """Return unquoted text as JSON: a string, unless it parses as another type that is allowed."""
    if kinds != {"string"}:
        word = _WORDS.get(text, text)
        try:
            kind = _KINDS[type(_DECODER.decode(word))]
        except (ValueError, RecursionError):
            kind = "string"
        types = {kind, "number"} if kind == "integer" else {kind}
        if kind != "string" and (kinds is None or types & kinds):
            return word
    return json.dumps(text, ensure_ascii=False)
