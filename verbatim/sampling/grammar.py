"""`GrammarCompiler` and `GrammarState`: structured outputs, by the library llguidance.

A structure speaks of the completion's own text, special tokens left out. So every id is handed to
llguidance as the bytes that it adds to that text, which also settles which tokenizers can be served:
those whose pieces add the same text wherever they stand. Of ids that add another text at the beginning
(a SentencePiece tokenizer drops its first space) none may come first.

llguidance is given an end of sequence of its own, one id past the model's; the real ones are set
wherever the structure may end. Where the structure leaves no choice of text, llguidance allows only the
token that the tokenizer itself would put there.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer as Backend
from torch import Tensor

from verbatim.errors import InvalidRequest, RequestFailed
from verbatim.params import STRUCTURES, SamplingParams
from verbatim.text.detokenizer import _piece_bytes
from verbatim.text.tokenizer import Tokenizer

MAX_COMPILED = 32  # grammars kept; a large one can take some megabytes

NO_TOKEN = "no text fits it from here on, or none that the tokenizer's tokens can write"

# Between the parts of a JSON document there may be nothing, one space, or one line break with up to 32
# spaces or 16 tabs behind it. With any whitespace at all, a model can go on printing it for ever.
JSON_WHITESPACE = r"\x20|\n(?:\x20{0,32}|\t{0,16})"
# No \uXXXX: a string has one spelling only, so that no key can be another one in disguise.
JSON_ESCAPES = 'nrbtf\\"'

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
_OLD_DRAFT = re.compile("draft-0[0-7]|2019-09")
_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")  # only \uXXXX could write them
_TEMPERATURE = re.compile(r"^\s*\w+\s*\[[^\]]*\btemperature\s*=", re.MULTILINE)
_BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")
_STEPS = ("Replace", "ByteFallback", "Fuse", "Strip", "Metaspace")  # of decoders, besides ByteLevel


class GrammarCompiler:
    """Turns what requests ask for into states; one per engine, made on the first such request.

    Compiled structures are kept, the `MAX_COMPILED` used last.

    Args:
        tokenizer: the model's.
        vocab_size: `V`, the width of the model's logits; the tokenizer may have fewer or more ids.
        eos_ids: what ends a completion; ids outside `V` are left out.

    Raises:
        InvalidRequest: the tokenizer is not of a kind that this can be done with.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self.num_words = -(-vocab_size // 32)
        self.eos_ids = eos_ids
        self.vocabulary = _Vocabulary(tokenizer, vocab_size)
        self.real = _bits(self.vocabulary.real_ids, self.num_words)
        self.first = ~_bits(self.vocabulary.never_first, self.num_words)
        self.eos = _bits((i for i in eos_ids if 0 <= i < vocab_size), self.num_words)
        wrapper: Any = self.vocabulary  # it has what llguidance reads of a TokenizerWrapper
        self._ll = LLTokenizer(wrapper)
        self.vocabulary.greedy = self._ll.greedy_tokenize
        self._limits = LLParserLimits(verbose_errors=False)
        self._compiled: OrderedDict[tuple[str, Any], LLMatcher] = OrderedDict()

    def start(self, params: SamplingParams, *, ends: bool) -> GrammarState | None:
        """The state before the first token, None where `params` ask for no structure.

        Args:
            params: at most one of `json_schema`, `regex`, `grammar` and `choice` is set.
            ends: whether an id of `eos_ids` ends the completion.

        Raises:
            InvalidRequest: the structure can't be read, asks for something that is not done, or nothing
                fits it; the message names the field and gives llguidance's reason.
        """
        kind = next((name for name in STRUCTURES if getattr(params, name) is not None), None)
        if kind is None:
            return None
        text = getattr(params, kind)
        matcher = self._compiled.get((kind, text))
        if matcher is None:
            matcher = self._compile(kind, text)
            self._compiled[kind, text] = matcher
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end((kind, text))
        state = GrammarState(self, matcher.deep_copy(), ends)
        try:
            empty = not bool(state.mask().any())
        except RequestFailed as error:
            raise InvalidRequest(f"{kind}: {error}") from None
        if empty:
            raise InvalidRequest(
                f"{kind}: only the empty text fits it, and no end of sequence ends it"
            )
        return state

    def _compile(self, kind: str, text: Any) -> LLMatcher:
        try:
            matcher = LLMatcher(self._ll, _source(kind, text), log_level=0, limits=self._limits)
        except UnicodeEncodeError:
            raise InvalidRequest(
                f"{kind}: the text is not Unicode, it has half a surrogate pair"
            ) from None
        except (ValueError, RecursionError) as error:
            if isinstance(error, InvalidRequest):
                raise
            raise InvalidRequest(f"{kind}: {_one_line(str(error))}") from None
        warnings = matcher.get_grammar_warnings()  # of what llguidance would leave out
        if matcher.is_error() or warnings:
            reason = matcher.get_error() or "; ".join(warnings)
            raise InvalidRequest(f"{kind}: {_one_line(reason)}")
        return matcher


class GrammarState:
    """Where one completion stands in its structure. Depends on the ids pushed and on nothing else."""

    def __init__(self, compiler: GrammarCompiler, matcher: LLMatcher, ends: bool) -> None:
        self._compiler = compiler
        self._matcher = matcher
        self._ends = ends
        self._has_text = False
        self._mask: Tensor | None = None

    def mask(self) -> Tensor:
        """The ids that may come next: int32 `[ceil(V / 32)]`, bit `i % 32` of word `i // 32`.

        The ids of `eos_ids` are among them where the structure may end. All zero once it is complete
        and no end of sequence ends it. The tensor is never written to again.

        Raises:
            RequestFailed: llguidance met one of its limits, or no id of the vocabulary can go on.
        """
        if self._mask is None:
            self._mask = self._compute()
        return self._mask

    def push(self, token_id: int) -> bool:
        """Take the next token in; True if nothing can follow it, not even an end of sequence.

        Raises:
            RequestFailed: llguidance met one of its limits.
            AssertionError: the structure does not allow this id.
        """
        if self._ends and token_id in self._compiler.eos_ids:
            return True
        if not self._allows(token_id):
            raise AssertionError(f"id {token_id} was drawn, which the structure does not allow")
        self._matcher.consume_token(token_id)
        self._check()
        self._has_text = self._has_text or self._compiler.vocabulary.has_text(token_id)
        self._mask = None
        if self._ends or not self._matcher.is_accepting():
            return False
        return self._matcher.is_stopped() or not bool(self.mask().any())

    def fork(self) -> GrammarState:
        """A copy that goes its own way from here."""
        copy = GrammarState(self._compiler, self._matcher.deep_copy(), self._ends)
        copy._has_text, copy._mask = self._has_text, self._mask
        return copy

    def _allows(self, token_id: int) -> bool:
        if not 0 <= token_id < 32 * self._compiler.num_words:
            return False
        return bool(self.mask()[token_id // 32] >> (token_id % 32) & 1)

    def _compute(self) -> Tensor:
        compiler = self._compiler
        words = torch.empty(compiler.vocabulary.num_words, dtype=torch.int32)
        self._matcher.unsafe_compute_mask_ptr(words.data_ptr(), words.nbytes)
        self._check()
        mask = words[: compiler.num_words] & compiler.real
        accepting = self._matcher.is_accepting()
        if not self._has_text:
            found = bool(mask.any())
            mask &= compiler.first
            if found and not accepting and not bool(mask.any()):
                raise RequestFailed(
                    "every text that fits begins with a space, which the tokenizer drops there"
                )
        if accepting and self._ends:
            mask |= compiler.eos
        elif not accepting and not bool(mask.any()):
            raise RequestFailed(NO_TOKEN)
        return mask

    def _check(self) -> None:
        if not self._matcher.is_error():
            return
        reason = self._matcher.get_error()
        raise RequestFailed(
            NO_TOKEN if "NoExtensionBias" in reason else f"llguidance: {_one_line(reason)}"
        )


class _Vocabulary:
    """The bytes that each id adds to a text; what llguidance asks of a tokenizer is the first block."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.tokens: list[bytes] = [b""] * (vocab_size + 1)
        self.eos_token_id = vocab_size
        self.special_token_ids: list[int] = []

        self.num_words = -(-(vocab_size + 1) // 32)
        self.real_ids: list[int] = []
        self.never_first: list[int] = []
        self.greedy: Any = None
        self._backend = _backend(tokenizer)
        is_bytes = [step["type"] for step in tokenizer.decoder_steps] == ["ByteLevel"]
        has_fallback = any(step["type"] == "ByteFallback" for step in tokenizer.decoder_steps)
        added = self._backend.get_added_tokens_decoder()
        decode = self._backend.decoder.decode
        for i in range(min(vocab_size, tokenizer.vocab_size + len(added) + 1)):
            piece = tokenizer.piece(i)
            if piece is None:
                continue
            self.real_ids.append(i)
            # A name in angle brackets is what a grammar calls a token by, special or not.
            if i in tokenizer.special_ids or (i in added and re.fullmatch("<.+>", piece)):
                self.special_token_ids.append(i)
                self.tokens[i] = piece.encode()
            elif is_bytes:
                self.tokens[i] = _piece_bytes(piece)
            elif has_fallback and (byte := _BYTE_PIECE.fullmatch(piece)):
                self.tokens[i] = bytes([int(byte[1], 16)])
                if self.tokens[i].isascii() and decode([piece]).encode() != self.tokens[i]:
                    self.never_first.append(i)
            else:
                text = decode(["x", piece])[1:]
                self.tokens[i] = text.encode()
                if decode([piece]) != text:
                    self.never_first.append(i)
        self._special = frozenset(self.special_token_ids)
        if not is_bytes:
            self._backend = _without_prefix(self._backend)

    def __call__(self, text: bytes | str) -> list[int]:
        """How the tokenizer would spell `text` within a completion, or else the longest pieces."""
        text = text.decode() if isinstance(text, bytes) else text
        ids = list(self._backend.encode(text, add_special_tokens=False).ids)
        in_range = all(i < self.eos_token_id and i not in self._special for i in ids)
        if in_range and b"".join(self.tokens[i] for i in ids) == text.encode():
            return ids
        longest: list[int] = self.greedy(text)
        return longest

    def has_text(self, token_id: int) -> bool:
        return token_id not in self._special and self.tokens[token_id] != b""


def _backend(tokenizer: Tokenizer) -> Backend:
    """The tokenizers library's object, if its pieces add the same text wherever they stand."""
    name, steps = type(tokenizer.hf).__name__, tokenizer.decoder_steps
    backend = getattr(tokenizer.hf, "backend_tokenizer", None)
    if not isinstance(backend, Backend) or not steps:
        raise InvalidRequest(
            f"structured outputs need a fast tokenizer with a decoder; {name} is none"
        )
    kinds = [step["type"] for step in steps]
    replaced = [step["pattern"].get("String", "") for step in steps if step["type"] == "Replace"]
    stripped = [step["stop"] for step in steps if step["type"] == "Strip"]
    plain = all(kind in _STEPS for kind in kinds) and all(len(text) == 1 for text in replaced)
    if tokenizer.cleans_up or (kinds != ["ByteLevel"] and not (plain and not any(stripped))):
        how = "cleans up spaces" if tokenizer.cleans_up else f"joins them by {', '.join(kinds)}"
        raise InvalidRequest(
            "structured outputs need a tokenizer whose pieces add the same text wherever they stand "
            f"(byte-level or SentencePiece); {name} {how}"
        )
    return backend


def _without_prefix(backend: Backend) -> Backend:
    """A copy that puts no space before a text, truncates nothing and pads nothing."""

    def mend(step: Any) -> Any:
        if not isinstance(step, dict):
            return step
        for key in ("normalizers", "pretokenizers"):
            if key in step:
                parts = [mend(part) for part in step[key]]
                step = step | {key: [part for part in parts if part is not None]}
        if step["type"] == "Prepend":
            return None
        return step | {"prepend_scheme": "never"} if step["type"] == "Metaspace" else step

    parts = json.loads(backend.to_str())
    changed = {key: mend(parts[key]) for key in ("normalizer", "pre_tokenizer")}
    return Backend.from_str(json.dumps(parts | changed | {"truncation": None, "padding": None}))


def _bits(ids: Iterable[int], num_words: int) -> Tensor:
    """A mask with the bits of `ids`."""
    flags = torch.zeros(num_words, 32, dtype=torch.int64)
    flags.view(-1)[torch.tensor(list(ids), dtype=torch.int64)] = 1
    return (flags << torch.arange(32)).sum(dim=1).to(torch.int32)


def _one_line(message: str) -> str:
    message = re.split(r"\n\s*\d+ \| ", message)[
        0
    ]  # llguidance shows the line, with a mark under it
    line = " ".join(message.replace("<non-verbose/>", "").split())
    return line if len(line) <= 600 else f"{line[:600]} ..."


def _source(kind: str, text: Any) -> str:
    """What llguidance compiles."""
    if kind == "json_schema":
        schema = json.loads(text)
        if schema is False:
            raise InvalidRequest("json_schema=false: nothing fits it")
        schema = {} if schema is True else schema
        _check_schema(schema)
        return LLMatcher.grammar_from_json_schema(
            schema,
            overrides={"whitespace_pattern": JSON_WHITESPACE, "json_allowed_escapes": JSON_ESCAPES},
        )
    if kind == "choice":
        texts = [
            "".join(c if c.isalnum() and c.isascii() else rf"\x{{{ord(c):x}}}" for c in t)
            for t in text
        ]
        if bad := next((t for t in text if any("\ud800" <= c <= "\udfff" for c in t)), None):
            raise InvalidRequest(f"choice: {bad!r} is not Unicode, it has half a surrogate pair")
        return LLMatcher.grammar_from_regex("|".join(texts))
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if _TEMPERATURE.search(text):
        raise InvalidRequest("grammar: temperature= of a rule is not supported; set the request's")
    return LLMatcher.grammar_from_lark(text)


def _check_schema(root: dict[str, Any]) -> None:
    """Refuse by name what llguidance would leave out silently, or get wrong.

    That is: keywords it does not know (it takes them for annotations, as JSON Schema does), integers
    beyond double precision, control characters in constants, and counts of keys that repeated keys
    would satisfy.
    """
    old = bool(_OLD_DRAFT.search(str(root.get("$schema", ""))))
    todo: list[tuple[str, Any]] = [("#", root)]
    seen: set[int] = set()
    while todo:
        path, schema = todo.pop()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))

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
                f"minProperties={least} is not supported with {known} required properties: keys that are "
                "not listed can repeat, so that one more than those is the most that can be promised"
            )
        for key, value in schema.items():
            if key in ("const", "enum") or key in _NUMBERS:
                if why := _unfit(value):
                    refuse(f"{key}: {why}")
            elif key in _MAPS and isinstance(value, dict):
                todo += [(f"{path}/{key}/{name}", part) for name, part in value.items()]
            elif isinstance(value, list) and (key in _LISTS or key == "items"):
                todo += [(f"{path}/{key}/{index}", part) for index, part in enumerate(value)]
            elif key in _SINGLES:
                todo.append((f"{path}/{key}", value))
            elif key == "$ref" and isinstance(value, str) and value.startswith("#/"):
                todo.append((value, _at(root, value)))  # it may lie where no schema is expected


def _unfit(value: Any) -> str | None:
    """Why a constant can't be promised."""
    if isinstance(value, list):
        return next(filter(None, map(_unfit, value)), None)
    if isinstance(value, dict):
        return _unfit(list(value.values()))
    if isinstance(value, str) and _UNWRITABLE.search(value):
        return f"{value!r} has control characters, which are not supported"
    if isinstance(value, int) and abs(value) > 2**53:
        return f"{value} is beyond the integers that are exact, 2**53"
    return None


def _at(root: Any, pointer: str) -> Any:
    """What a JSON pointer leads to; None where nothing is there, which llguidance then says."""
    for part in pointer[2:].split("/"):
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(root, list) and part.isdecimal() and int(part) < len(root):
            root = root[int(part)]
        else:
            root = root.get(part) if isinstance(root, dict) else None
    return root
