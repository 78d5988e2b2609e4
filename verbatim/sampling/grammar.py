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
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from torch import Tensor

from verbatim.errors import InvalidRequest, RequestFailed
from verbatim.params import STRUCTURES, SamplingParams
from verbatim.sampling.json_schema import ANY_WHITESPACE, COMPACT, check_schema
from verbatim.sampling.vocabulary import Vocabulary
from verbatim.text.tokenizer import Tokenizer

MAX_COMPILED = 32  # grammars kept; a large one can take some megabytes
# llguidance walks a chain of rules, or of references, by recursion. The longest that MAX_STRUCTURE_CHARS
# allow take less than a quarter of this; a thread's usual stack they would overrun, which ends the process.
_STACK_BYTES = 256 << 20

NO_TOKEN = "no text fits it from here on, or none that the tokenizer's tokens can write"

_TEMPERATURE = re.compile(r"^\s*\w+\s*\[[^\]]*\btemperature\s*=", re.MULTILINE)


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
        self.vocabulary = Vocabulary(tokenizer, vocab_size)
        self.real = _bits(self.vocabulary.real_ids, self.num_words)
        self.first = ~_bits(self.vocabulary.never_first, self.num_words)
        self.eos = _bits((i for i in eos_ids if 0 <= i < vocab_size), self.num_words)
        wrapper: Any = self.vocabulary  # it has what llguidance reads of a TokenizerWrapper
        self._ll = LLTokenizer(wrapper)
        self.vocabulary.greedy = self._ll.greedy_tokenize
        self._limits = LLParserLimits(verbose_errors=False)
        self._compiled: OrderedDict[tuple[str, Any, bool], LLMatcher] = OrderedDict()
        self._lock = threading.Lock()  # of `_compiled`: many threads are admitted at once

    def knows(self, params: SamplingParams) -> bool:
        """Is the structure that `params` ask for there already, compiled?"""
        with self._lock:
            return any(_key(name, params) in self._compiled for name in STRUCTURES)

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
        key = _key(kind, params)
        with self._lock:
            matcher = self._compiled.pop(key, None)
        if matcher is None:
            matcher = self._compile(*key)
        state = GrammarState(self, matcher.deep_copy(), ends)
        try:
            empty = not bool(state.mask().any())
        except RequestFailed as error:
            raise InvalidRequest(f"{kind}: {error}") from None
        if empty:
            raise InvalidRequest(
                f"{kind}: only the empty text fits it, and no end of sequence ends it"
            )
        with self._lock:  # only what proved good is kept, the one used last at the end
            self._compiled[key] = matcher
            self._compiled.move_to_end(key)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return state

    def _compile(self, kind: str, text: Any, any_whitespace: bool) -> LLMatcher:
        def make() -> LLMatcher:
            source = _source(kind, text, any_whitespace)
            return LLMatcher(self._ll, source, log_level=0, limits=self._limits)

        try:
            matcher = _with_deep_stack(make)
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


def _with_deep_stack(make: Callable[[], LLMatcher]) -> LLMatcher:
    """What `make` gives, called in a thread with `_STACK_BYTES` of stack."""
    made: list[LLMatcher] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            made.append(make())
        except BaseException as error:
            raised.append(error)

    with _stack_lock:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="verbatim-grammar")
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if raised:
        raise raised[0]
    return made[0]


_stack_lock = threading.Lock()


def _bits(ids: Iterable[int], num_words: int) -> Tensor:
    """A mask with the bits of `ids`."""
    flags = torch.zeros(num_words, 32, dtype=torch.int64)
    flags.view(-1)[torch.tensor(list(ids), dtype=torch.int64)] = 1
    return (flags << torch.arange(32)).sum(dim=1).to(torch.int32)


def _key(kind: str, params: SamplingParams) -> tuple[str, Any, bool]:
    """What a compiled structure is kept by."""
    return kind, getattr(params, kind), params.any_whitespace


def _one_line(message: str) -> str:
    message = re.split(r"\n\s*\d+ \| ", message)[
        0
    ]  # llguidance shows the line, with a mark under it
    line = " ".join(message.replace("<non-verbose/>", "").split())
    return line if len(line) <= 600 else f"{line[:600]} ..."


def _source(kind: str, text: Any, any_whitespace: bool) -> str:
    """What llguidance compiles."""
    if kind == "json_schema":
        schema = json.loads(text)
        if schema is False:
            raise InvalidRequest("json_schema=false: no document validates")
        schema = {} if schema is True else schema
        check_schema(schema)
        return LLMatcher.grammar_from_json_schema(
            schema, overrides=ANY_WHITESPACE if any_whitespace else COMPACT
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
