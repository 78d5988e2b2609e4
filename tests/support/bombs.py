"""A hundred grammars and schemas that are costly to compile or follow; a server must stay responsive."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

Bomb = tuple[str, dict[str, Any]]  # a name, and fields of SamplingParams

# This grammar once blocked all requests of an engine.
AMBIGUOUS = "start: s\ns: s s s s | s s | x | x x\nx: /[a-z ]/ | /[a-z]/\n"


def bombs() -> list[Bomb]:
    """Return all hundred bombs."""
    made = [*_regexes(), *_grammars(), *_schemas(), *_choices()]
    assert len(made) == 100 and len({name for name, _ in made}) == 100, len(made)
    return made


def _regexes() -> Iterator[Bomb]:
    for count in (12, 16, 24, 64, 400):  # 2 ** count states
        yield f"regex-suffix-{count}", {"regex": f"([a-z ]*)a[a-z ]{{{count}}}"}
    for count in (10, 300, 2000, 100_000, 10**9):
        yield f"regex-count-{count}", {"regex": f"(([a-z]{{1,{count}}} ?){{1,{count}}})"}
    for depth in (3, 12, 40):
        yield f"regex-nested-{depth}", {"regex": "(" * depth + "a|b " + "){1,20}" * depth}
        yield f"regex-stars-{depth}", {"regex": "(" * depth + "[a-z] ?" + "*)+" * depth}
    for count in (10, 100, 1000):
        yield f"regex-optional-{count}", {"regex": "[a-z ]?" * count + "[a-z ]" * count}
        words = "|".join(f"[a-z ]*{chr(97 + i % 26)}[a-z ]{{{i % 40}}}z" for i in range(count))
        yield f"regex-union-{count}", {"regex": f"({words})"}
    dots = "|".join(f".*{chr(97 + i)}.*{chr(98 + i)}" for i in range(25))
    yield "regex-dots", {"regex": f"({dots})+"}
    yield "regex-unicode", {"regex": r"(\w{1,200}\W{1,200}\p{L}{0,200}){1,50}"}
    yield "regex-deep", {"regex": "(" * 20_000 + "a" + ")" * 20_000}


def _grammars() -> Iterator[Bomb]:
    yield "lark-ambiguous", {"grammar": AMBIGUOUS}
    for count in (2, 3, 5, 30):
        rule = " | ".join(" ".join(["s"] * n) for n in range(2, count + 2))
        yield f"lark-catalan-{count}", {"grammar": f"start: s\ns: {rule} | /[a-z ]/\n"}
    for count in (5, 20, 400):
        rules = "".join(f"r{i}: x r{i} | r{i} x | x\n" for i in range(count))
        either = " | ".join(f"r{i}" for i in range(count))
        yield f"lark-rivals-{count}", {"grammar": f"start: {either}\n{rules}x: /[a-z ]/\n"}
        both = "".join(f"e{i}: e{i + 1} e{i + 1}\n" for i in range(count))
        yield f"lark-doubling-{count}", {"grammar": f"start: e0\n{both}e{count}: /[a-z ]/ |\n"}
        chain = "".join(f"c{i}: c{i + 1} | c{i + 1} c0\n" for i in range(count))
        yield f"lark-chain-{count}", {"grammar": f"start: c0\n{chain}c{count}: /[a-z ]/\n"}
    for count in (10, 1000, 30_000):
        yield f"lark-right-{count}", {"grammar": f"start: x{{{count}}}\nx: /[a-z ]/ | /[a-z]/ x\n"}
        words = " | ".join(f'"w{i}"' for i in range(count // 4))
        yield f"lark-words-{count}", {"grammar": f"start: w+\nw: {words} | /[a-z ]+/\n"}
    letters = " | ".join(f'"{c}" p "{c}"' for c in "abcdefgh")
    singles = {
        "palindromes": f"start: p\np: {letters} | /[a-h]/ |\n",
        "nullable": "start: a\na: a b a | b |\nb: b a | a b | /[a-z ]/ |\n",
        "mutual": "start: a\na: b c | c b | A\nb: c a | a c | A\nc: a b | b a | A\nA: /[a-z ]/\n",
        "lexemes": _terms(200, lambda i: f"[a-z ]{{{i + 1}}}"),
        "overlap": _terms(60, lambda i: f"[a-z ]*{chr(97 + i % 26)}[a-z ]{{{i}}}"),
        "and": "start: T\nT: " + " & ".join(f"/.*a.{{{i}}}/" for i in range(12)) + "\n",
        "not": "start: T\nT: ~/(.*a.{14}b.*)/ & /[a-z ]{1,900}/\n",
    }
    for name, grammar in singles.items():
        yield f"lark-{name}", {"grammar": grammar}


def _terms(count: int, pattern: Callable[[int], str]) -> str:
    """Return a grammar of sequences of `count` terminals."""
    either = " | ".join(f"T{i}" for i in range(count))
    return f"start: t+\nt: {either}\n" + "".join(f"T{i}: /{pattern(i)}/\n" for i in range(count))


def _schemas() -> Iterator[Bomb]:
    def schema(name: str, value: Any, **more: Any) -> Bomb:
        return f"json-{name}", {"json_schema": json.dumps(value), **more}

    for depth in (10, 200, 4000):
        text = '{"items":' * depth + '{"type":"integer"}' + "}" * depth
        yield f"json-deep-items-{depth}", {"json_schema": text}
        nested = '{"anyOf":[' * depth + '{"type":"integer"}' + ',{"type":"string"}]}' * depth
        yield f"json-deep-any-{depth}", {"json_schema": nested}
    for count in (10, 300, 1200):
        refs = {f"d{i}": {"$ref": f"#/$defs/d{(i + 1) % count}"} for i in range(count)}
        yield schema(f"ref-cycle-{count}", {"$defs": refs, "$ref": "#/$defs/d0"})
        refs = {
            f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{j % count}"} for j in (i + 1, i * 7, i * 3)]}
            for i in range(count)
        }
        refs["d0"] = {"type": "array", "items": {"$ref": "#/$defs/d1"}}
        yield schema(f"ref-web-{count}", {"$defs": refs, "$ref": "#/$defs/d0"})
        refs = {
            f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2}
            for i in range(count)
        }
        refs[f"d{count}"] = {"type": "integer"}
        yield schema(f"ref-doubling-{count}", {"$defs": refs, "$ref": "#/$defs/d0"})
        refs = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(count)}
        refs[f"d{count}"] = {"type": "integer"}
        yield schema(f"ref-all-{count}", {"$defs": refs, "$ref": "#/$defs/d0"})
        yield schema(f"enum-{count}", {"enum": [f"value {i * 7919 % 10007}" for i in range(count)]})
        strings = [{"type": "string", "pattern": f"a.{{{i % 30}}}b"} for i in range(count)]
        yield schema(f"all-{count}", {"allOf": strings})
        strings = [{"type": "string", "pattern": f"^.*a.{{{i % 90}}}b$"} for i in range(count)]
        yield schema(f"any-{count}", {"anyOf": strings})
        properties = {f"key{i}": {"type": "string", "maxLength": i} for i in range(count)}
        yield schema(f"properties-{count}", {"type": "object", "properties": properties})
        keys = {
            f"^[a-z]*{chr(97 + i % 26)}[a-z]{{{i % 50}}}$": {"type": "integer"}
            for i in range(min(count, 300))
        }
        strict = {"type": "object", "patternProperties": keys, "additionalProperties": False}
        yield schema(f"keys-{count}", strict)
    for count in (100, 10_000, 10**7, 2**31):
        length = {"minLength": count, "maxLength": 2 * count}
        yield schema(f"length-{count}", {"type": "string", **length})
        items = {"minItems": count, "items": {"type": "integer"}}
        yield schema(f"items-{count}", {"type": "array", **items})
    fine = {"multipleOf": 0.000_123_457, "minimum": 1, "maximum": 1e9}
    yield schema("multiple", {"type": "number", **fine})
    kinds = [
        {"type": "array", "items": {"$ref": "#"}},
        {"type": "array", "prefixItems": [{"$ref": "#"}, {"$ref": "#"}]},
        {"type": "object", "additionalProperties": {"$ref": "#"}},
    ]
    yield schema("tree", {"anyOf": kinds}, any_whitespace=True)
    formats = ("date-time", "email", "hostname", "ipv6", "uri", "uuid", "duration")
    yield schema("formats", {"anyOf": [{"type": "string", "format": f} for f in formats]})


def _choices() -> Iterator[Bomb]:
    for count in (100, 5000):
        yield f"choice-{count}", {"choice": [f"once {i * 7919 % 99991}" for i in range(count)]}
        yield f"choice-long-{count}", {"choice": ["a" * i for i in range(1, min(count, 450))]}
