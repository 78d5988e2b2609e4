"""JSON schemas, handwritten and random."""

from __future__ import annotations

import random
from typing import Any

TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": ["integer", "null"]},
                "left": {"$ref": "#/$defs/node"},
                "right": {"anyOf": [{"$ref": "#/$defs/node"}, {"const": "leaf"}]},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
BY_HAND: list[Any] = [
    True,
    TREE,
    {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 12, "multipleOf": 4}]},
    {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "boolean"}]},
    {"enum": ["a", "a b", 'quo"te', "né\n", 3, 2.5, None, [1, {"x": []}], {"k": "v"}]},
    {"type": "string", "pattern": "^[a-f]{2,4}é?$"},
    {"type": "string", "format": "date"},
    {"type": "number", "exclusiveMinimum": -1.5, "maximum": 2.25},
    {
        "prefixItems": [{"type": "integer"}, {"type": "null"}],
        "items": False,
        "minItems": 1,
        "type": "array",
    },
    {
        "type": "object",
        "patternProperties": {"^n_": {"type": "integer"}},
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "additionalProperties": {"type": "string", "maxLength": 4},
    },
    {"type": "object", "required": ["x", "y"], "minProperties": 3, "maxProperties": 4},
    {
        "type": "object",
        "properties": {"tab\tand\x01": {"const": 1e-7}},
        "required": ["tab\tand\x01"],
    },
]


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    kinds = ["integer", "number", "string", "boolean", "null", "const", "enum"]
    kind = rng.choice(kinds + ["array", "object", "anyOf"] * 2 * bool(depth))
    if kind in ("integer", "number"):
        low = rng.randint(-300, 300)
        return {"type": kind, "minimum": low, "maximum": low + rng.randint(0, 500)}
    if kind == "string":
        low = rng.randint(0, 3)
        return {"type": kind, "minLength": low, "maxLength": low + rng.randint(0, 6)}
    if kind in ("const", "enum"):
        values = ["x y", "", "ü", True, None, 17, -0.25, [], [2, "b"], {"c": 1}, '\\"', "</s>"]
        return {"const": rng.choice(values)} if kind == "const" else {"enum": rng.sample(values, 3)}
    if kind == "array":
        low = rng.randint(0, 2)
        items = random_schema(rng, depth - 1)
        return {"type": kind, "items": items, "minItems": low, "maxItems": low + rng.randint(0, 2)}
    if kind == "object":
        names = rng.sample(["id", "a b", "né", 'q"', "x/y"], rng.randint(0, 3))
        return {
            "type": kind,
            "properties": {name: random_schema(rng, depth - 1) for name in names},
            "required": [name for name in names if rng.random() < 0.5],
            "additionalProperties": rng.choice([False, random_schema(rng, 0)]),
        }
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
    return {"type": kind}
