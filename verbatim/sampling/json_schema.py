"""The supported subset of JSON Schema, limits of compilation, and the format of documents."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from verbatim.errors import InvalidRequest

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Without \uXXXX, a string has only one spelling, so that keys can't be repeated in another spelling.
_ESCAPES: JsonCompileOptions = {"json_allowed_escapes": 'nrbtf\\"'}
# Options of llguidance. A compact document has no whitespace except a space after a colon or comma. "Any
# whitespace" between parts is one space, or one line break with up to 32 spaces or 16 tabs after it: without
# a bound, a model can generate whitespace forever.
COMPACT: JsonCompileOptions = _ESCAPES | {
    "whitespace_flexible": False,
    "key_separator": r":\x20?",
    "item_separator": r",\x20?",
}
ANY_WHITESPACE: JsonCompileOptions = _ESCAPES | {
    "whitespace_pattern": r"\x20|\n(?:\x20{0,32}|\t{0,16})"
}

_ANNOTATIONS = frozenset(
    "$anchor $defs definitions $schema $id id $comment title description default deprecated readOnly "
    "writeOnly examples contentMediaType contentEncoding".split()
)
_MAPS = frozenset(["properties", "patternProperties", "$defs", "definitions"])
_LISTS = frozenset(["anyOf", "oneOf", "allOf", "prefixItems"])
_SINGLES = frozenset(["items", "additionalItems", "additionalProperties"])
_NUMBERS = frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"])
_KEYWORDS = _ANNOTATIONS | _MAPS | _LISTS | _SINGLES | _NUMBERS
_KEYWORDS |= frozenset(
    "$ref const enum type minItems maxItems required minProperties maxProperties minLength maxLength "
    "pattern format".split()
)
_CONSTANTS = _NUMBERS | {"const", "enum"}
_OPEN_KEYWORDS = frozenset(["additionalProperties", "patternProperties", "minProperties"])
_CHOICES = frozenset(["$ref", "anyOf", "oneOf"])
_OLD_DRAFT = re.compile("draft-0[0-7]|2019-09")
# Comments and literals of a Lark grammar, and the beginning of a schema in it.
LARK_LITERAL = r'//[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])*/'
_EMBEDDED = re.compile(rf"{LARK_LITERAL}|(?P<schema>%json\s*)")
_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")  # would require \uXXXX


def check_schema(root: dict[str, Any]) -> None:
    """Refuse what llguidance silently ignores or gets wrong.

    These are unknown keywords (which JSON Schema treats as annotations), integers beyond double precision,
    control characters in constants, and key counts that repeated keys would satisfy.
    """
    old = bool(_OLD_DRAFT.search(str(root.get("$schema", ""))))
    for path, schema, _ in _schemas(root):

        def refuse(why: str, path: str = path) -> None:
            raise InvalidRequest(f"json_schema: {path}: {why}")

        if unknown := sorted(schema.keys() - _KEYWORDS):
            refuse(f"not supported: {', '.join(unknown)}")
        if "prefixItems" in schema and (
            old or "additionalItems" in schema or isinstance(schema.get("items"), list)
        ):
            refuse("prefixItems is not supported with a draft before 2020-12 or its keywords")
        required = schema.get("required", [])
        least = schema.get("minProperties", 0)
        known = len(set(map(str, required))) if isinstance(required, list) else 0
        free = (
            schema.get("additionalProperties", True) is not False or "patternProperties" in schema
        )
        if isinstance(least, int) and least > known + 1 and free:
            refuse(
                f"minProperties={least} is not supported with {known} required properties: "
                "unlisted keys may repeat, so at most one more than the required properties can "
                "be guaranteed"
            )
        for key in sorted(schema.keys() & _CONSTANTS):
            if why := _why_unsupported(schema[key]):
                refuse(f"{key}: {why}")


def close_objects(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a stricter schema, in which objects have only listed properties unless they mention others.

    Otherwise a model, especially a small one, may invent properties. A schema with several parts for one
    value is returned unchanged.
    """
    stricter: dict[str, Any] = json.loads(json.dumps(schema))
    for _, part, _ in _schemas(stricter):
        if "allOf" in part or ("properties" in part and part.keys() & _CHOICES):
            return schema
        if part.get("properties") and not part.keys() & _OPEN_KEYWORDS:
            part["additionalProperties"] = False
    return stricter


def narrow_bounds(root: dict[str, Any]) -> None:
    """Move exclusive bounds that are integers inwards, by the smallest step or 1e-15.

    For 0 < x <= 0.5, llguidance would allow 0: the bound without a fraction, if both have one integer part.
    """
    for _, schema, _ in _schemas(root):
        for key, sign in (("exclusiveMinimum", 1), ("exclusiveMaximum", -1)):
            bound: Any = schema.get(key)
            # Only the bound nearer to 0 would be included.
            if type(bound) in (int, float) and bound % 1 == 0 and 0 <= bound * sign < 2**52:
                schema[key] = sign * max(math.nextafter(abs(bound), math.inf), 1e-15)


# llguidance intersects the automata of `allOf`, `$ref` and adjacent keywords. Time and memory grow with the
# product of their sizes, which its own limits don't count. `multipleOf` has as many states as its value. The
# factor for a pattern is measured: 8 patterns take milliseconds, 20 take seconds.
MAX_PRODUCT = 100_000
_PATTERN_STATES = 4
MAX_PATTERN_PROPERTIES = 100  # in a whole schema; each is compared with all others
MAX_MULTIPLES = 1_000_000  # the sum of all multipleOf


def check_cost(root: dict[str, Any]) -> None:
    """Refuse schemas that would take very long to compile.

    References by `$id` can reach any object, so all objects count as schemas.
    """
    products: dict[int, int] = {}  # by id of a schema
    num_pattern_properties = sum_multiples = 0
    for path, schema, parts in _schemas(root, anywhere=True):
        multiple = _coprime(schema.get("multipleOf"))
        patterns = schema.get("patternProperties")
        num_pattern_properties += len(patterns) if isinstance(patterns, dict) else 0
        sum_multiples += multiple
        product = multiple * _PATTERN_STATES ** (("pattern" in schema) + ("format" in schema))
        either = 1
        for how, _, part in parts:
            # A part without a product is a reference to an enclosing schema, which adds nothing.
            size = products.get(id(part), 1)
            product *= size if how == "all" else 1
            either = max(either, size if how == "any" else 1)
        product *= either
        if product > MAX_PRODUCT:
            raise InvalidRequest(
                f"json_schema: {path}: too many patterns, formats and multipleOf apply to one value: the "
                f"product of {_PATTERN_STATES} for each pattern or format and of multipleOf may be "
                f"{MAX_PRODUCT}"
            )
        products[id(schema)] = product
    if num_pattern_properties > MAX_PATTERN_PROPERTIES:
        raise InvalidRequest(
            f"json_schema: {num_pattern_properties} patternProperties; at most {MAX_PATTERN_PROPERTIES}"
        )
    if sum_multiples > MAX_MULTIPLES:
        raise InvalidRequest(
            f"json_schema: the multipleOf add up to {sum_multiples}; at most {MAX_MULTIPLES}"
        )


_Parts = list[tuple[str, str, dict[str, Any]]]


def _schemas(
    root: dict[str, Any], *, anywhere: bool = False
) -> Iterator[tuple[str, dict[str, Any], _Parts]]:
    """Yield (path, schema, `_parts`) once for each schema in `root`, after those of its parts."""
    todo: list[tuple[str, dict[str, Any], _Parts | None]] = [("#", root, None)]
    seen: set[int] = set()
    while todo:
        path, schema, parts = todo.pop()
        if parts is not None:
            yield path, schema, parts
        elif id(schema) not in seen:
            seen.add(id(schema))
            parts = _parts(root, path, schema, anywhere)
            todo.append((path, schema, parts))
            todo += [(where, part, None) for _, where, part in parts]


def _parts(root: dict[str, Any], path: str, schema: dict[str, Any], anywhere: bool) -> _Parts:
    """Return the parts of a schema as (how it applies to the value: "all", "any" or "none", path, part).

    Args:
        anywhere: whether to include objects outside of schema keywords, such as examples.
    """
    parts: list[tuple[str, str, Any]] = []
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            # The target may be outside of schema keywords.
            parts.append(("all", value, _resolve_pointer(root, value)))
        elif key in _MAPS and isinstance(value, dict):
            parts += [("none", f"{path}/{key}/{name}", part) for name, part in value.items()]
        elif isinstance(value, list) and (key in _LISTS or key == "items"):
            how = {"allOf": "all", "anyOf": "any", "oneOf": "any"}.get(key, "none")
            parts += [(how, f"{path}/{key}/{index}", part) for index, part in enumerate(value)]
        elif key in _SINGLES:
            parts.append(("none", f"{path}/{key}", value))
        elif anywhere:
            parts += [("none", where, each) for where, each in _objects(f"{path}/{key}", value)]
    return [
        (how, place, each)
        for how, where, part in parts
        if anywhere or isinstance(part, dict)
        for place, each in _objects(where, part)
    ]


def _objects(path: str, value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the outermost objects of a JSON value, with their paths."""
    todo = [(path, value)]
    while todo:
        where, each = todo.pop()
        if isinstance(each, dict):
            yield where, each
        elif isinstance(each, list):
            todo += [(f"{where}/{index}", entry) for index, entry in enumerate(each)]


def format_embedded(grammar: str, options: JsonCompileOptions) -> str:
    """Check the schemas in a Lark grammar, and add `options` to them.

    Schemas with `x-guidance`, which has options of llguidance, are not checked.

    llguidance's defaults allow any whitespace, which a model can generate forever.
    """
    decoder, parts, at = json.JSONDecoder(), list[str](), 0
    for match in _EMBEDDED.finditer(grammar):
        if match["schema"] is None or match.start() < at:  # a literal, or within a schema
            continue
        try:
            schema, end = decoder.raw_decode(grammar, match.end())
            if isinstance(schema, dict):
                if "x-guidance" not in schema:
                    check_schema(schema)
                check_cost(schema)
                narrow_bounds(schema)
        except json.JSONDecodeError:
            continue  # not a schema; llguidance reports the error
        except InvalidRequest as error:
            raise InvalidRequest(f"grammar: %json: {error}") from None
        if isinstance(schema, dict):
            text = json.dumps({"x-guidance": options} | schema)
            parts += [grammar[at : match.end()], text]
            at = end
    return "".join(parts) + grammar[at:]


def _coprime(value: Any) -> int:
    """Return a number's digits without the factors 2 and 5, which add no states to a decimal automaton."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value or value != value:
        return 1
    digits = Decimal(str(abs(value))).as_tuple().digits
    number = int("".join(map(str, digits)))
    for factor in (2, 5):
        while number and number % factor == 0:
            number //= factor
    return max(1, number)


def _why_unsupported(value: Any) -> str | None:
    """Return why a constant is not supported, or None."""
    if isinstance(value, list):
        return next(filter(None, map(_why_unsupported, value)), None)
    if isinstance(value, dict):
        return _why_unsupported(list(value.values()))
    if isinstance(value, str) and _UNWRITABLE.search(value):
        return f"{value!r} has control characters, which are not supported"
    if isinstance(value, int) and abs(value) > 2**53:
        return f"{value} exceeds 2**53, the largest exact integer"
    return None


def _resolve_pointer(root: Any, pointer: str) -> Any:
    """Return the target of a JSON pointer; None if it is missing, which llguidance reports."""
    for part in pointer.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(root, list) and part.isdecimal() and int(part) < len(root):
            root = root[int(part)]
        else:
            root = root.get(part) if isinstance(root, dict) else None
    return root
