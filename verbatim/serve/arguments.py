"""Arguments of calls that are written one by one, not as a JSON object: their grammar and reading."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from verbatim.errors import InvalidRequest, NotSupported
from verbatim.sampling.json_schema import closed
from verbatim.serve.fields import Function
from verbatim.serve.marks import ANYTHING, Marks

ANY_OBJECT: dict[str, Any] = {"type": "object"}
_DECODER = json.JSONDecoder()
_WORDS = {"True": "true", "False": "false", "None": "null"}  # of Python
_KINDS: dict[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object",
    type(None): "null",
}  # fmt: skip
_NOTES = frozenset({"type", "title", "description", "default", "examples", "$comment"})
_OF_FLAGS = _NOTES | {"enum"}  # keys of a schema of booleans or null
_OF_STRINGS = _NOTES | {"enum", "const", "anyOf", "$ref", "minLength", "maxLength"}
_OF_ARGUMENTS = _NOTES | {"properties", "required", "additionalProperties", "$defs", "definitions"}
_OF_ARGUMENTS |= {"$schema", "$id"}  # keys of the schema of all arguments
# Of one argument: a schema may refer to itself many times.
_MAX_REFERENCES, _MAX_VARIANTS = 64, 4096


def schema_of(function: Function) -> dict[str, Any]:
    """Return the schema of a function's arguments, which are an object."""
    schema = closed(function.parameters or ANY_OBJECT)
    return schema if "$ref" in schema else ANY_OBJECT | schema


def read_json(text: str, at: int) -> tuple[str, int]:
    """Return the JSON at a position, as it is written, and where it ends."""
    end = _DECODER.raw_decode(text, at)[1]
    return text[at:end], end


@dataclass(frozen=True, slots=True)
class ArgumentFormat:
    """The text of one argument: `head`, its value, `tail`.

    Attributes:
        head: with NAME for the argument's name.
        between: of two arguments.
        raw: strings are written without quotes; else all values but Python's words are JSON.
    """

    head: str
    tail: str = ""
    between: str = ""
    raw: bool = False

    def rules(self, rule: str, function: Function, marks: Marks) -> list[str]:
        """Return the rules of a function's arguments, the required ones first.

        Rules of raw strings are the same for all functions.

        Raises:
            InvalidRequest, NotSupported: a schema that is none, or that this format can't be held to.
        """
        try:
            return self._rules(rule, function, marks)
        except (TypeError, AttributeError, KeyError) as error:
            # A keyword has a value of another type.
            raise InvalidRequest(f"tools: {function.name}: not a JSON schema: {error}") from None

    def _rules(self, rule: str, function: Function, marks: Marks) -> list[str]:
        schema = schema_of(function)
        properties, required = schema.get("properties", {}), schema.get("required", [])
        self._check(function.name, schema, properties, required)
        rules, pairs = list[str](), dict[str, str]()
        for name, value in properties.items():
            head = marks.lark(self.head.replace("NAME", name))
            pairs[name] = f"{head} {self._value(function.name, value, schema, marks, rules)}"
        between = f"{marks.lark(self.between)} " if self.between else ""
        first = f" {between}".join(pairs.pop(name) for name in required)
        later = ""  # the rule of the optional arguments from one on
        for number, pair in enumerate(reversed(pairs.values())):
            more = f" ({between}{later})? | {later}" if later else ""
            later = f"{rule}_last_{number + 1}"
            rules.append(f"{later}: {pair}{more}\n")
        optional = f" ({between if first else ''}{later})?" if later else ""
        return [f"{rule}: {first}{optional}\n", *rules]

    def _check(
        self, name: str, schema: dict[str, Any], properties: dict[str, Any], required: list[str]
    ) -> None:
        names = str.isidentifier if self.between else re.compile(r"[\w.\-]+").fullmatch
        if not all(map(names, properties)) or "$ref" in schema:
            raise NotSupported(
                f"tools: {name}: the model's format of calls needs parameters that are names"
            )
        if len(set(required)) < len(required) or not set(required) <= set(properties):
            raise InvalidRequest(f"tools: {name}: required must name properties, each of them once")
        _refuse(name, set(schema) - _OF_ARGUMENTS)

    def _value(
        self, name: str, value: Any, root: dict[str, Any], marks: Marks, rules: list[str]
    ) -> str:
        """Return the expression of a value and the tail; add rules that it needs."""
        kinds = _kinds(value, root)
        if self.raw and (kinds is None or "string" in kinds):
            return self._raw(name, _plain(name, value, root), marks, rules)
        tail = marks.lark(self.tail)
        if isinstance(value, dict) and value.get("type") in ("boolean", "null"):
            _refuse(name, set(value) - _OF_FLAGS)
            words = {json.dumps(None)} if value["type"] == "null" else {"true", "false"}
            if "enum" in value:
                words = set(map(json.dumps, value["enum"]))
            words = {python for python, word in _WORDS.items() if word in words} | (
                words if self.raw else set()
            )
            return f"({' | '.join(map(json.dumps, sorted(words)))}) {tail}"
        if isinstance(value, dict):
            value = value | {key: root[key] for key in ("$defs", "definitions") if key in root}
        return f"%json {json.dumps(value)} {tail}"

    def _raw(self, name: str, value: dict[str, Any], marks: Marks, rules: list[str]) -> str:
        tail = self.tail
        given = value.get("enum", [value["const"]] if "const" in value else None)
        if given is not None:
            texts = [text if isinstance(text, str) else json.dumps(text) for text in given]
            if any(tail.strip() in text for text in texts):
                raise NotSupported(
                    f"tools: {name}: an enum has {tail.strip()!r}, which ends arguments"
                )
            return f"({' | '.join(map(json.dumps, texts))}) {marks.lark(tail)}"
        text, body = "raw", ANYTHING
        if "minLength" in value or "maxLength" in value:
            least, most = value.get("minLength", 0), value.get("maxLength", "")
            text, body = f"raw_{least}_{most}", rf"(.|\n){{{least},{most}}}"
        mark = tail.strip()
        lead, rest = tail.split(mark)
        rules.append(marks.until(text, mark, body + lead.replace("\n", r"\n")))
        return f"{text} {marks.lark(rest)}"

    def read(self, text: str, at: int, function: Function) -> tuple[str, int]:
        """Return the arguments at a position as a JSON object, and where they end.

        Raises:
            ValueError: no arguments of this format.
        """
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
                value, at = _of_raw(text[at:end], kinds), end
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
            f"tools: {name}: the model's format of calls can't be held to "
            f"{', '.join(map(repr, sorted(keys)))} of its schema"
        )


def _variants(schema: Any, root: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the alternatives of a schema, each with the keys beside `anyOf` or a reference.

    References are replaced where they are known; those that are not, and schemas with very many alternatives,
    remain a `$ref`. [{}] for any value.
    """
    variants, todo, num_references = list[dict[str, Any]](), [schema], 0
    while todo:
        part = todo.pop()
        if not isinstance(part, dict):
            variants.append({})
            continue
        key = next((key for key in ("$ref", "anyOf", "oneOf") if part.get(key)), None)
        beside = {name: value for name, value in part.items() if name != key}
        if key == "$ref" and isinstance(part[key], str):
            num_references += 1
            where, _, name = part[key].removeprefix("#/").partition("/")
            found = root.get(where, {}).get(name) if where in ("$defs", "definitions") else None
            found = found or {"$ref": None}
            todo.append(beside | found if isinstance(found, dict) else found)
        elif key is not None and isinstance(part[key], list):
            some = reversed(part[key])
            todo += [beside | each if isinstance(each, dict) else beside for each in some]
        else:
            variants.append(part)
        if num_references > _MAX_REFERENCES or len(todo) + len(variants) > _MAX_VARIANTS:
            return [{"$ref": None}]
    return variants


def _kinds(schema: Any, root: dict[str, Any]) -> set[str] | None:
    """Return the types of the values that fit a schema; None for any."""
    kinds: set[str] = set()
    for variant in _variants(schema, root):
        if "enum" in variant or "const" in variant:
            kinds |= {_KINDS[type(v)] for v in variant.get("enum", [variant.get("const")])}
        elif "type" in variant:
            kinds |= {variant["type"]} if isinstance(variant["type"], str) else set(variant["type"])
        else:
            return None
    return kinds


def _plain(name: str, schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a raw string, without references and with few keys.

    Raises:
        NotSupported: a schema that text without quotes can't be held to.
    """
    variants = _variants(schema, root)
    for part in (schema, *variants):
        _refuse(name, set(part if isinstance(part, dict) else ()) - _OF_STRINGS)
    _refuse(name, {key for part in variants for key in part} & {"$ref"})
    if len(variants) == 1:
        return variants[0]
    if all("enum" in part or "const" in part or part.get("type") == "null" for part in variants):
        values = [part.get("enum", [part.get("const")]) for part in variants]
        return {"enum": [value for some in values for value in some]}
    # The type decides how a text is read, and nothing else of one of several types is known then.
    _refuse(name, {key for part in variants for key in part} - _NOTES)
    return {}


def _of_raw(text: str, kinds: set[str] | None) -> str:
    """Return a text without quotes as JSON: a string, unless the schema allows what it reads as."""
    if kinds != {"string"}:
        word = _WORDS.get(text, text)
        try:
            kind = _KINDS[type(json.loads(word))]
        except (ValueError, RecursionError):
            kind = "string"
        alike = {kind, "number"} if kind == "integer" else {kind}
        if kind != "string" and (kinds is None or alike & kinds):
            return word
    return json.dumps(text, ensure_ascii=False)
