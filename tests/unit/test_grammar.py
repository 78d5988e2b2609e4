"""Structured outputs: texts that the masks allow fit the structure; unsupported ones are rejected."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from support import toy_tokenizers
from support.schemas import BY_HAND, TREE, random_schema
from verbatim import storyteller
from verbatim.errors import InvalidRequest, RequestFailed
from verbatim.params import SamplingParams
from verbatim.sampling import grammar
from verbatim.sampling.grammar import GrammarCompiler, StructureState
from verbatim.sampling.vocabulary import Vocabulary
from verbatim.text.detokenizer import Detokenizer
from verbatim.text.tokenizer import Tokenizer

EOS = frozenset({0, 2})
V = 2080  # logits of a model; more than its tokenizer has ids


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.open(storyteller.path())


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer(), V, EOS)


def start(ends: bool = True, **structure: Any) -> StructureState:
    return compiler().start(SamplingParams(**structure), ends=ends)


def allowed(mask: Tensor) -> list[int]:
    assert mask.dtype == torch.int32
    bits = (mask[:, None] >> torch.arange(32)) & 1
    return bits.flatten().nonzero().flatten().tolist()


def walk(
    state: StructureState, rng: random.Random, vocabulary: Vocabulary, limit: int = 300
) -> list[int] | None:
    """Ids of a random completion without its end of sequence; None if it has no end within `limit`."""
    ids: list[int] = []
    while len(ids) < limit:
        options = allowed(state.mask())
        if EOS & set(options) and (rng.random() < 0.4 or set(options) <= EOS):
            return ids
        options = [i for i in options if i not in EOS]
        closing = [i for i in options if set(vocabulary.tokens[i]) & set(b'"]}')]
        if closing and rng.random() < 0.6:
            options = closing
        ids.append(rng.choice(options))
        assert not state.push(ids[-1])
    return None


def texts(structure: dict[str, Any], count: int, seed: int = 0) -> list[str]:
    """Decoded texts of the walks that ended."""
    rng = random.Random(seed)
    walks = [walk(start(**structure), rng, compiler().vocabulary) for _ in range(count)]
    return [tokenizer().decode(ids) for ids in walks if ids is not None]


def spell(state: StructureState, text: str) -> bool:
    """Push the longest allowed pieces of a text; return whether the structure is complete."""
    rest = text.encode()
    pieces = compiler().vocabulary.tokens
    while rest:
        fitting = [i for i in allowed(state.mask()) if pieces[i] and rest.startswith(pieces[i])]
        token_id = max(fitting, key=lambda i: len(pieces[i]))
        rest = rest[len(pieces[token_id]) :]
        state.push(token_id)
    return state.is_complete()


def push_last(state: StructureState, count: int) -> None:
    for _ in range(count):
        state.push(allowed(state.mask())[-1])


def takes(text: str, **structure: Any) -> bool:
    """Whether the structure accepts a text."""
    state = start(**structure)
    try:
        spell(state, text)
    except ValueError:  # no piece fits
        return False
    return set(allowed(state.mask())) >= EOS


# ---- JSON -------------------------------------------------------------------------------------------


def check_documents(schema: Any, count: int, seed: int) -> int:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(schema)
    done = texts({"json_schema": schema}, count, seed)
    for text in done:
        assert text == text.strip()
        validator.validate(json.loads(text))
    return len(done)


@pytest.mark.parametrize("schema", BY_HAND, ids=lambda schema: json.dumps(schema)[:40])
def test_random_walks_through_schema_masks_yield_valid_documents(schema):
    assert check_documents(schema, 12, seed=1) >= 6


def test_random_walks_through_random_schemas_yield_valid_documents():
    rng = random.Random(5)
    assert sum(check_documents(random_schema(rng), 3, seed) for seed in range(40)) > 60


@pytest.mark.slow
def test_random_walks_through_many_random_schemas_yield_valid_documents():
    rng = random.Random(6)
    assert sum(check_documents(random_schema(rng, 3), 4, seed) for seed in range(600)) > 1200


DOCUMENT = {"a": [1, {"b": "c"}]}
ITS_SCHEMA = {"type": "object", "properties": {"a": {"type": "array"}}, "required": ["a"]}


def test_json_allows_no_extra_whitespace_by_default():
    for separators in ((",", ":"), (", ", ": "), (", ", ":")):
        assert takes(json.dumps(DOCUMENT, separators=separators), json_schema=ITS_SCHEMA)
    refused = ('{"a":  []}', '{ "a":[]}', '{"a":[ 1]}', '{"a" :[]}', '{"a":[1 ,2]}', '{"a":\n[]}')
    for text in refused:
        assert not takes(text, json_schema=ITS_SCHEMA)


def test_any_whitespace_allows_indented_json():
    structure = dict(json_schema=ITS_SCHEMA, any_whitespace=True)
    for indent in (None, 1, 2, 4, "\t"):
        assert takes(json.dumps(DOCUMENT, indent=indent), **structure)
    assert takes(json.dumps(DOCUMENT, separators=(",", ":")), **structure)
    refused = ('{  "a":[]}', '{\n\n"a":[]}', ' {"a":[]}', '{"a":[]} ', '{"a":[]}\n', '{\r"a":[]}')
    for text in refused:
        assert not takes(text, **structure)


def test_schema_embedded_in_grammar_follows_the_same_whitespace_rules():
    text = json.dumps(ITS_SCHEMA)
    flexible = json.dumps(ITS_SCHEMA | {"x-guidance": {"whitespace_flexible": True}})
    compact = json.dumps(DOCUMENT, separators=(",", ":"))
    for before, begin in (("", ""), ('"%json {" ', "%json {"), ('/%json \\{x/ "/" ', "%json {x/")):
        grammar = f"// %json {{}}\nstart: {before}%json {text} | b\nb: %json {text}"
        assert takes(begin + compact, grammar=grammar)
        assert not takes(begin + json.dumps(DOCUMENT, indent=1), grammar=grammar)
    assert takes(json.dumps(DOCUMENT, indent=1), grammar=f"start: %json {flexible}")
    assert takes(
        json.dumps(DOCUMENT, indent=1), grammar=f"start: %json {text}", any_whitespace=True
    )


def test_escaped_property_name_cannot_bypass_its_schema():
    schema = {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
    assert takes('{"b":"x"}', json_schema=schema)
    assert not takes('{"\\u0061":"x"}', json_schema=schema)


@pytest.mark.parametrize("low", [0, 1, -3])
@pytest.mark.parametrize("placed", ["json_schema", "allOf", "grammar"])
def test_exclusive_bound_of_a_narrow_range_is_excluded(low, placed):
    assert takes(f"{2**52 + 1}", json_schema={"type": "integer", "exclusiveMinimum": 2**52})
    for schema in ({"maximum": low + 0.5}, {"exclusiveMinimum": low - 0.5}):
        key = "exclusiveMinimum" if "maximum" in schema else "exclusiveMaximum"
        parts = [{"type": "number", key: low}, schema]
        whole = {"allOf": parts} if placed == "allOf" else parts[0] | schema
        text = f"start: %json {json.dumps(whole)}"
        structure = {"grammar": text} if placed == "grammar" else {"json_schema": whole}
        within = low + (0.25 if "maximum" in schema else -0.25)
        assert takes(f"{within}", **structure)
        assert not takes(f"{low}", **structure)
        assert not takes("-0", **structure)


REFUSED_SCHEMAS: list[tuple[Any, str]] = [
    ({"not": {"type": "string"}}, "not supported: not"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"if": {}, "then": {}, "else": {}}, "else, if, then"),
    ({"type": "array", "contains": {}}, "contains"),
    ({"type": "object", "propertyNames": {}}, "propertyNames"),
    ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"$dynamicRef": "#a"}, r"\$dynamicRef"),
    (
        {"properties": {"a": {"items": {"maxLenght": 3}}}},
        "#/properties/a/items: not supported: maxLenght",
    ),
    (
        {"$schema": "http://json-schema.org/draft-07/schema#", "dependentRequired": {}},
        "dependentRequired",
    ),
    ({"$schema": "http://json-schema.org/draft-07/schema#", "prefixItems": []}, "prefixItems"),
    (
        {"$ref": "#/$defs/a/const", "$defs": {"a": {"const": {"nullable": True}}}},
        "const: not supported: null",
    ),
    ({"type": "string", "nullable": True}, "nullable"),
    ({"x-guidance": {"lenient": True}}, "x-guidance"),
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
    ({"type": "string", "format": "nonsense"}, "Unknown format: nonsense"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ({"$ref": "http://example.com/x"}, "example.com"),
    ({"$ref": "#/$defs/x"}, "does not exist"),
    ({"type": "object", "minProperties": 2}, "minProperties=2"),
    ({"const": 2**53 + 1}, "9007199254740993"),
    ({"enum": ["a", ["\x01"]]}, "control characters"),
    (False, "no document validates"),
    ({"enum": []}, "Unsatisfiable"),
    ({"type": "integer", "minimum": 5, "maximum": 2}, "minimum"),
    ({"type": "string", "minLength": 5, "maxLength": 2}, "minLength"),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "incompatible types"),
    ({"type": "object", "required": ["a"], "properties": {"a": False}}, "'a' is unsatisfiable"),
    ({"$ref": "#"}, "no valid continuation"),
    ({"type": "nonsense"}, "Invalid type"),
]


@pytest.mark.parametrize(
    ("schema", "reason"), REFUSED_SCHEMAS, ids=lambda case: json.dumps(case)[:30]
)
def test_unsupported_or_unsatisfiable_schema_is_rejected_with_the_reason(schema, reason):
    with pytest.raises(InvalidRequest, match=f"^json_schema.*{reason}") as raised:
        start(json_schema=schema)
    assert "\n" not in str(raised.value)
    if reason not in ("x-guidance", "no document validates"):
        with pytest.raises(InvalidRequest, match=f"^grammar.*{reason}"):
            start(grammar=f"start: %json {json.dumps(schema)}")


# ---- regular expressions, choices, grammars ---------------------------------------------------------


@pytest.mark.parametrize(
    "regex",
    [
        r"[a-c]{3,5}",
        r"(yes|no) ?!*",
        r"[0-9]{1,3}\.[0-9]",
        r"né[é日🙂]{2}",
        r" x|y",
        "^ab?$",
        "(?i)hello",
        "a*",
    ],
)
def test_random_walks_through_regex_masks_match_the_whole_regex(regex):
    done = texts({"regex": regex}, 15)
    assert len(done) == 15
    assert all(re.fullmatch(regex, text) for text in done)


def test_choice_masks_allow_every_choice_and_nothing_else():
    choices = [
        "yes",
        "yes sir",
        'q"uo\\te',
        "line\nbreak",
        "né",
        "日本",
        " lead",
        "a|b",
        "(c)*",
        "</s>",
    ]
    assert set(texts({"choice": choices}, 200)) == set(choices)
    assert not takes("ye", choice=choices)


def test_walks_through_recursive_lark_grammar_yield_valid_expressions():
    source = 'start: expr\nexpr: term ("+" term)*\nterm: /[0-9]{1,2}/ | "(" expr ")"'
    done = texts({"grammar": source}, 20)
    assert len(done) > 10
    assert all(isinstance(eval(re.sub(r"\b0+(?=\d)", "", text)), int) for text in done)


@pytest.mark.parametrize(
    ("structure", "reason"),
    [
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": r"(a)\1"}, "backreferences"),
        ({"regex": r"[^\x00-\x{10ffff}]"}, "no valid continuation"),
        ({"regex": "\ud800"}, "surrogate"),
        ({"choice": ["a", "\ud800"]}, "surrogate"),
        ({"grammar": "start: nowhere"}, "unknown name"),
        ({"grammar": "start: start"}, "no valid continuation"),
        ({"grammar": 'start[temperature=0.5]: "a"'}, "temperature"),
        ({"grammar": "start: <nosuch>"}, "unknown special token"),
    ],
)
def test_invalid_regex_choice_or_grammar_is_rejected_with_the_reason(structure, reason):
    with pytest.raises(InvalidRequest, match=f"^{next(iter(structure))}: .*{reason}"):
        start(**structure)


def test_grammar_dead_end_fails_the_request_when_reached():
    state = start(grammar='start: "a" x\nx: x "b"')
    with pytest.raises(RequestFailed, match="no valid continuation exists"):
        push_last(state, 3)


# ---- states -----------------------------------------------------------------------------------------


def test_all_eos_ids_are_allowed_exactly_where_the_structure_may_end():
    state = start(choice=["yes", "yes sir"])
    assert not EOS & set(allowed(state.mask()))
    assert not spell(state, "yes")
    assert set(allowed(state.mask())) > EOS
    assert not spell(state, " sir")
    assert set(allowed(state.mask())) == EOS
    assert state.push(2)  # nothing follows an end of sequence


def test_without_eos_ids_structure_is_complete_when_nothing_can_follow():
    state = start(ends=False, choice=["yes", "yes sir"])
    assert not spell(state, "yes")
    assert not EOS & set(allowed(state.mask()))
    assert spell(state, " sir")
    assert not allowed(state.mask())
    state = start(ends=False, regex="a+")
    assert not any(spell(state, "a") for _ in range(50))
    with pytest.raises(InvalidRequest, match="only the empty text"):
        start(ends=False, regex="(?:)")


def test_masks_exclude_special_tokens_and_ids_without_text():
    for structure in ({"regex": "(?s:.*)"}, {"json_schema": True}):
        state = start(**structure)
        for _ in range(3):
            mask = state.mask()
            assert mask.shape == (-(-V // 32),)
            ids = set(allowed(mask)) - EOS
            assert ids <= set(range(len(tokenizer().hf))) - tokenizer().special_ids
            state.push(min(ids, key=lambda i: -len(compiler().vocabulary.tokens[i])))


@pytest.mark.parametrize("width", [40, 64, 300, 2047, 2048, 2049])
def test_masks_fit_models_with_fewer_or_more_logits_than_tokenizer_ids(width):
    state = GrammarCompiler(tokenizer(), width, frozenset({0, 5000})).start(
        SamplingParams(regex="(?s:.*)"), ends=True
    )
    assert state.mask().shape == (-(-width // 32),)
    assert max(allowed(state.mask())) < min(width, 2048)
    assert 0 in allowed(state.mask())


def test_mask_of_a_state_is_cached_and_never_modified():
    state = start(json_schema=TREE)
    masks, copies = [], []
    for _ in range(12):
        masks.append(state.mask())
        assert state.mask() is masks[-1]
        copies.append(masks[-1].clone())
        state.push(allowed(masks[-1])[-1])
    assert all(map(torch.equal, masks, copies))


def test_structure_stays_cached_while_another_request_starts_with_it(monkeypatch):
    own, params = GrammarCompiler(tokenizer(), V, EOS), SamplingParams(json_schema=TREE)
    own.start(params, ends=True)
    cached, mask = [], StructureState.mask

    def recorded(state: StructureState) -> Tensor:
        cached.append(own.is_cached(params))
        return mask(state)

    monkeypatch.setattr(StructureState, "mask", recorded)
    own.start(params, ends=True)
    assert cached == [True]


def test_forked_states_are_independent_and_same_ids_give_same_masks():
    rng = random.Random(3)
    state = start(json_schema=TREE)
    ids: list[int] = []
    masks = []
    for _ in range(25):
        masks.append(state.mask())
        fork = state.fork()
        assert torch.equal(fork.mask(), masks[-1])
        walk(fork, rng, compiler().vocabulary, limit=4)  # must not advance the original
        options = [i for i in allowed(masks[-1]) if i not in EOS]
        if not options:
            break
        ids.append(rng.choice(options))
        state.push(ids[-1])
    fresh = GrammarCompiler(tokenizer(), V, EOS).start(SamplingParams(json_schema=TREE), ends=True)
    for token_id, mask in zip(ids, masks, strict=False):
        assert torch.equal(fresh.mask(), mask)
        fresh.push(token_id)
    unmasked = start(json_schema=TREE)
    for token_id in ids:  # without computing masks in between
        unmasked.push(token_id)
    assert torch.equal(unmasked.mask(), fresh.mask())


def test_pushing_a_disallowed_token_raises_assertion_error():
    state = start(regex="a")
    with pytest.raises(AssertionError, match="is not allowed"):
        state.push(tokenizer().encode_fragment("b")[0][0])


def test_exceeding_an_llguidance_limit_fails_the_request():
    small = GrammarCompiler(tokenizer(), V, EOS)
    small._limits = grammar.LLParserLimits(max_lexer_states=60, verbose_errors=False)
    state = small.start(SamplingParams(regex="(a|b)*c(a|b){400}"), ends=True)
    with pytest.raises(RequestFailed, match="llguidance: "):
        push_last(state, 100)


def test_cache_of_compiled_structures_is_bounded():
    own = GrammarCompiler(tokenizer(), V, EOS)
    for number in range(grammar.MAX_COMPILED + 5):
        own.start(SamplingParams(regex=f"a{{{number + 1}}}"), ends=True)
    assert len(own._compiled) == grammar.MAX_COMPILED
    for letter in "abc":
        own.start(SamplingParams(choice=[letter * 100_000]), ends=True)
    assert len(own._compiled) == 2


# ---- tokenizers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["byte_level", "byte_fallback", "byte_fallback_unstripped", "metaspace"]
)
def test_detokenized_text_fits_the_structure_with_every_kind_of_tokenizer(kind):
    toy = toy_tokenizers.EXACT[kind]()
    own = GrammarCompiler(toy, toy.vocab_size + 9, EOS)
    rng = random.Random(4)
    regex = " ?(the|fox)( the| dog| 日本)*"
    regex = regex.replace(" 日本", "") if kind == "metaspace" else regex
    structures: list[dict[str, Any]] = [
        {"regex": regex},
        {"choice": ["the", "they're here", " the fox"]},
    ]
    if kind != "metaspace":  # it has no braces
        structures.append({"json_schema": TREE})
    for structure in structures:
        for _ in range(12):
            state = own.start(SamplingParams(**structure), ends=True)
            ids = walk(state, rng, own.vocabulary, limit=150)
            if ids is None:
                continue
            detokenizer = Detokenizer(toy, prompt_tail_ids=toy.encode("fox"))
            completion = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
            assert toy.decode(ids) == completion
            if "regex" in structure:
                assert re.fullmatch(regex, completion)
            elif "choice" in structure:
                assert completion in structure["choice"]
            else:
                assert isinstance(json.loads(completion), dict)


def test_leading_space_that_the_tokenizer_drops_is_rejected():
    for toy in (toy_tokenizers.byte_fallback(), toy_tokenizers.metaspace()):
        own = GrammarCompiler(toy, toy.vocab_size, EOS)
        with pytest.raises(InvalidRequest, match="begins with a space, which the tokenizer drops"):
            own.start(SamplingParams(choice=[" the"]), ends=True)


def test_choice_that_the_vocabulary_cannot_spell_is_rejected():
    toy = toy_tokenizers.metaspace()
    with pytest.raises(InvalidRequest, match="the tokenizer can't produce one"):
        GrammarCompiler(toy, toy.vocab_size, EOS).start(SamplingParams(choice=["{}"]), ends=True)


OTHERS = toy_tokenizers.EXACT | {"in_python": toy_tokenizers.in_python}


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("word_piece", "cleans up spaces"),
        ("word_piece_uncleaned", "joins them by WordPiece"),
        ("suffixed", "joins them by BPEDecoder"),
        ("in_python", "ByT5Tokenizer is not one"),
    ],
)
def test_unsupported_tokenizers_are_rejected_with_the_reason(kind, reason):
    with pytest.raises(InvalidRequest, match=reason):
        GrammarCompiler(OTHERS[kind](), 400, EOS)


@pytest.mark.parametrize(
    "structure",
    [
        {"grammar": "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(9000)) + 'a9000: "x"'},
        {
            "json_schema": {"$ref": "#/$defs/a0"}
            | {"$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(3000)} | {"a3000": {}}}
        },
    ],
    ids=["rules", "references"],
)  # fmt: skip
def test_long_chain_of_rules_or_references_does_not_overflow_the_stack(structure):
    """An overflow would end the whole process, such as a server."""
    assert bool(start(**structure).mask().any())
