"""Structured output with the library llguidance: `GrammarCompiler` and `StructureState`.

A structure constrains the completion's text without special tokens, so llguidance must know the bytes that
each id adds to it, which requires a tokenizer with context-free pieces. Ids that add a different text at the
beginning (a SentencePiece tokenizer drops its first space) can't come first.

llguidance uses an additional end-of-sequence id, one past the model's ids; the real ones are allowed if the
structure can end. If only one text is possible, llguidance allows only the tokenizer's own encoding of it.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from torch import Tensor

from verbatim.errors import InvalidRequest, RequestFailed
from verbatim.params import MAX_STRUCTURE_CHARS, SamplingParams
from verbatim.sampling.json_schema import (
    ANY_WHITESPACE,
    COMPACT,
    LARK_LITERAL,
    check_cost,
    check_schema,
    format_embedded,
    narrow_bounds,
)
from verbatim.sampling.processors import bitmask, in_mask
from verbatim.sampling.vocabulary import Vocabulary
from verbatim.text.tokenizer import Tokenizer

MAX_COMPILED = 32  # cached structures
MAX_COMPILED_CHARS = 2 * MAX_STRUCTURE_CHARS  # of their sources; one takes up to 170 MB
# llguidance recurses along chains of rules and references. The longest that fit in MAX_STRUCTURE_CHARS take
# less than a quarter of this; they would overflow a thread's default stack, which kills the process.
_STACK_BYTES = 256 << 20

# Limits for computing one mask; a request that exceeds them fails. They count steps of the parser and the
# lexer, not time, so a request fails at the same token on every machine.
LIMITS: dict[str, int] = {
    "step_max_items": 16_000,  # Earley items, and one for each `_IDS_PER_ITEM` ids of the vocabulary
    "max_items_in_row": 4000,  # ... at one position
    "step_lexer_fuel": 200_000,  # nodes of regular expressions
    "max_lexer_states": 250_000,  # over all masks
    "initial_lexer_fuel": 1_000_000,  # nodes during compilation
    "max_grammar_size": 500_000,  # symbols
}
_IDS_PER_ITEM = 4
# CPU time of a mask above which later masks are computed by `_slow_pool`. It is short, as threads of normal
# priority that compute masks continuously delay the steps.
SLOW_S = 2.5e-4
_QUICK_PER_SLOW = 16  # quick masks per `SLOW_S` of a slow one until a grammar is quick again
# Maximum number of intersections in a grammar. Each doubles the compilation time, which LIMITS don't count.
MAX_AND = 8
_LITERAL = re.compile(LARK_LITERAL)

NO_TOKEN = "no valid continuation exists, or the tokenizer can't produce one"

_Key = tuple[str, Any, bool]  # `SamplingParams.structure`, its text or choices, `any_whitespace`
_TEMPERATURE = re.compile(r"^\s*\w+\s*\[[^\]]*\btemperature\s*=", re.MULTILINE)


class GrammarCompiler:
    """Compiles structures of requests; one per engine, created on the first such request.

    The `MAX_COMPILED` most recently used ones, of at most `MAX_COMPILED_CHARS`, are cached.

    Args:
        tokenizer: the model's tokenizer.
        vocab_size: V, the width of the model's logits; the tokenizer may have fewer or more ids.
        eos_ids: ids that end a completion; those beyond V are ignored.

    Raises:
        InvalidRequest: the tokenizer does not support structures.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self.num_words = -(-vocab_size // 32)
        self.eos_ids = eos_ids
        self.vocabulary = Vocabulary(tokenizer, vocab_size)
        self.real_mask = bitmask(self.vocabulary.real_ids, vocab_size)
        self.first_mask = ~bitmask(self.vocabulary.never_first, vocab_size)
        self.eos_mask = bitmask((i for i in eos_ids if 0 <= i < vocab_size), vocab_size)
        wrapper: Any = self.vocabulary  # implements llguidance's TokenizerWrapper
        self._ll = LLTokenizer(wrapper)
        self.vocabulary.greedy = self._ll.greedy_tokenize
        self.max_items = LIMITS["step_max_items"] + vocab_size // _IDS_PER_ITEM
        limits: dict[str, Any] = LIMITS | {"step_max_items": self.max_items}
        self._limits = LLParserLimits(verbose_errors=False, **limits)
        self._compiled: OrderedDict[_Key, _Compiled] = OrderedDict()
        self._lock = threading.Lock()  # guards `_compiled`, used by many threads

    def is_cached(self, params: SamplingParams) -> bool:
        """Return whether the structure of `params` is cached."""
        with self._lock:
            return _key(params) in self._compiled

    def start(self, params: SamplingParams, *, ends: bool) -> StructureState:
        """Return the state before the first token.

        Args:
            params: parameters with one of `json_schema`, `regex`, `grammar` and `choice`.
            ends: whether an id of `eos_ids` ends the completion.

        Raises:
            InvalidRequest: the structure is invalid, unsupported or unsatisfiable; the message names the
                field and llguidance's reason.
        """
        key = _key(params)
        with self._lock:
            compiled = self._compiled.get(key)
        compiled = compiled or self.compile(key)
        state = StructureState(self, compiled, ends)
        try:
            empty = not bool(state.mask().any())
        except RequestFailed as error:
            raise InvalidRequest(str(error)) from None
        if empty:
            raise InvalidRequest(
                f"{params.structure}: it matches only the empty text, and the completion can't "
                "end with an end-of-sequence token"
            )
        with self._lock:  # cache valid structures only, the last used one at the end
            if state.compiled is compiled:
                self._compiled[key] = compiled
                self._compiled.move_to_end(key)
            while (
                len(self._compiled) > MAX_COMPILED
                or sum(map(_num_chars, self._compiled)) > MAX_COMPILED_CHARS
            ):
                self._compiled.popitem(last=False)
        return state

    def drop(self, compiled: _Compiled) -> None:
        """Remove `compiled` from the cache."""
        with self._lock:
            if self._compiled.get(compiled.key) is compiled:
                del self._compiled[compiled.key]

    def compile(self, key: _Key) -> _Compiled:
        """Compile a structure without the cache; raise InvalidRequest as `start` does."""
        kind, text, any_whitespace = key

        def make() -> LLMatcher:
            source = _source(kind, text, any_whitespace)
            return LLMatcher(self._ll, source, log_level=0, limits=self._limits)

        try:
            matcher = _with_deep_stack(make)
        except (ValueError, RecursionError) as error:
            if isinstance(error, InvalidRequest):
                raise
            raise InvalidRequest(f"{kind}: {_one_line(str(error))}") from None
        warnings = matcher.get_grammar_warnings()  # parts that llguidance would ignore
        if matcher.is_error() or warnings:
            reason = matcher.get_error() or "; ".join(warnings)
            raise InvalidRequest(f"{kind}: {_one_line(reason)}")
        return _Compiled(key, matcher, LLMatcher(self._ll, "", log_level=0))


class _Compiled:
    """A compiled structure with its llguidance lexer, which is shared by all its states.

    Attributes:
        lock: held while one of the states computes. llguidance also locks the lexer, but waits for its lock
            without releasing the GIL.
        slow_for: number of quick masks needed until this structure counts as quick again.
    """

    def __init__(self, key: _Key, matcher: LLMatcher, failed: LLMatcher) -> None:
        self.key = key
        self.matcher = matcher
        self.lock = threading.Lock()
        self.slow_for = 0
        self._failed = failed

    def consume(self, matcher: LLMatcher, token_id: int) -> None:
        """Push a token to the matcher of a state."""
        if self.slow_for:
            # consume_token would hold the GIL, for up to 100 ms. This call releases it, but only for two or
            # more matchers. The second one is in an error state, so it does nothing.
            _executor().consume_token_par([(matcher, token_id), (self._failed, 0)])
        else:
            matcher.consume_token(token_id)

    def note_time(self, spent_s: float) -> None:
        """Record the CPU time of a mask."""
        slow = int(spent_s / SLOW_S) * _QUICK_PER_SLOW
        self.slow_for = max(self.slow_for - 1, slow)


class StructureState:
    """The state of one completion in its structure, which depends only on the pushed ids.

    Masks are computed by `mask`, or in advance by a thread (`prepare`). Nothing else uses the matcher, so it
    needs no lock.

    Args:
        ends: whether an id of `eos_ids` ends the completion.
    """

    def __init__(self, compiler: GrammarCompiler, compiled: _Compiled, ends: bool) -> None:
        self.compiled = compiled
        self._compiler = compiler
        self._matcher = compiled.matcher.deep_copy()
        self._ends = ends
        self._ids: list[int] = []  # pushed ids
        self._num_consumed = 0  # ids pushed to the matcher
        self._has_text = False
        self._owns_lexer = False  # no other state uses it
        self._mask: Tensor | None = None
        self._job: Future[Tensor] | None = None

    @property
    def is_slow(self) -> bool:
        """True if computing masks takes long."""
        return self.compiled.slow_for > 0

    @property
    def ready(self) -> bool:
        """True if `mask` returns immediately."""
        return self._mask is not None or (self._job is not None and self._job.done())

    def prepare(self) -> Future[Tensor] | None:
        """Start computing the mask in a thread; return the running computation, or None if it is done."""
        if self._mask is None and self._job is None:
            pool = _slow_pool() if self.is_slow else _quick_pool()
            self._job = pool.submit(self._compute)
        return None if self.ready else self._job

    def mask(self) -> Tensor:
        """Return the ids that can come next: int32 `[ceil(V / 32)]`, bit `i % 32` of word `i // 32`.

        They include `eos_ids` if the structure can end here and `ends` is set. The mask is zero if the
        structure is complete and `ends` is not set. The tensor is not modified later.

        Raises:
            RequestFailed: one of the `LIMITS` is exceeded, or no id of the vocabulary fits.
        """
        if self._mask is None:
            self._mask = self._compute() if self._job is None else self._job.result()
            self._job = None
        return self._mask

    def push(self, token_id: int) -> bool:
        """Append the next token; return whether it is an end of sequence.

        Raises:
            RequestFailed: as `mask`.
            AssertionError: the structure does not allow this id.
        """
        if self._ends and token_id in self._compiler.eos_ids:
            return True
        assert in_mask(self.mask(), token_id), f"id {token_id} was drawn but is not allowed"
        self._ids.append(token_id)
        self._mask = None
        return False

    def is_complete(self) -> bool:
        """Return whether nothing can follow, not even an end of sequence; raise as `mask`."""
        return not self._ends and not bool(self.mask().any())

    def fork(self) -> StructureState:
        """Return an independent copy."""
        if self._job is not None:  # it uses the matcher
            wait([self._job])
        copy = StructureState.__new__(StructureState)
        self._owns_lexer = False
        copy.__dict__.update(self.__dict__, _matcher=self._matcher.deep_copy(), _ids=[*self._ids])
        return copy

    def _compute(self) -> Tensor:
        try:
            return self._next_mask()
        except _LexerFailed:
            if self._owns_lexer:
                raise
        # The lexer's limits also count the work of other requests, and a failed lexer fails for all. Repeat
        # this completion with a separate lexer, so that its result depends on itself alone.
        self._compiler.drop(self.compiled)
        self.compiled = self._compiler.compile(self.compiled.key)
        self.compiled.slow_for = _QUICK_PER_SLOW
        self._matcher, self._owns_lexer = self.compiled.matcher.deep_copy(), True
        ids, self._ids = self._ids, []
        self._num_consumed, self._has_text = 0, False
        for token_id in ids:
            self._next_mask()
            self._ids.append(token_id)
        return self._next_mask()

    def _next_mask(self) -> Tensor:
        compiler, compiled = self._compiler, self.compiled
        words = torch.empty(compiler.vocabulary.num_words, dtype=torch.int32, device="cpu")
        with compiled.lock:
            for token_id in self._ids[self._num_consumed :]:
                compiled.consume(self._matcher, token_id)
                self._check()
                self._num_consumed += 1
                self._has_text = self._has_text or compiler.vocabulary.has_text(token_id)
            begin = time.thread_time()  # without the time of other threads
            self._matcher.unsafe_compute_mask_ptr(words.data_ptr(), words.nbytes)
            compiled.note_time(time.thread_time() - begin)
            self._check()
            accepting = self._matcher.is_accepting()
        kind = compiled.key[0]
        mask = words[: compiler.num_words] & compiler.real_mask
        if not self._has_text:
            has_ids = bool(mask.any())
            mask &= compiler.first_mask
            if has_ids and not accepting and not bool(mask.any()):
                raise RequestFailed(
                    f"{kind}: every match begins with a space, which the tokenizer drops at the "
                    "start of a completion"
                )
        if accepting and self._ends:
            mask |= compiler.eos_mask
        elif not accepting and not bool(mask.any()):
            raise RequestFailed(f"{kind}: {NO_TOKEN}")
        return mask

    def _check(self) -> None:
        """Raise RequestFailed if the matcher has failed."""
        if not self._matcher.is_error():
            return
        reason, kind = _one_line(self._matcher.get_error()), self.compiled.key[0]
        if "NoExtensionBias" in reason:
            raise RequestFailed(f"{kind}: {NO_TOKEN}")
        if "lexer error" in reason:
            budget = f"{LIMITS['step_lexer_fuel']} lexer steps per token, {LIMITS['max_lexer_states']} states"
            raise _LexerFailed(f"{kind}: over the budget of {budget} (llguidance: {reason})")
        if "items" in reason:
            rows = f"{LIMITS['max_items_in_row']} at one position"
            budget = f"{self._compiler.max_items} parser items per token, {rows}"
            raise RequestFailed(f"{kind}: over the budget of {budget} (llguidance: {reason})")
        raise RequestFailed(f"{kind}: llguidance: {reason}")


class _LexerFailed(RequestFailed):
    """The shared lexer of a structure exceeded one of its limits."""


@cache
def _quick_pool() -> ThreadPoolExecutor:
    """Return the threads for masks that are expected to be quick."""
    return ThreadPoolExecutor(2, "grammar-masks")


@cache
def _slow_pool() -> ThreadPoolExecutor:
    """Return the threads for slow masks, with the lowest priority."""
    return ThreadPoolExecutor(2, "grammar-slow-masks", initializer=_lower_priority)


@cache
def _executor() -> LLExecutor:
    """Return the executor that pushes tokens without the GIL, in threads with the lowest priority."""
    with ThreadPoolExecutor(1, initializer=_lower_priority) as thread:
        return thread.submit(LLExecutor, 2).result()


def _lower_priority() -> None:
    """Give this thread the lowest priority; only on Linux, as priorities are per thread there."""
    if hasattr(os, "setpriority") and sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def _after_fork() -> None:
    for threads in (_quick_pool, _slow_pool, _executor):
        threads.cache_clear()


os.register_at_fork(after_in_child=_after_fork)  # threads don't exist in a child


def _with_deep_stack(make: Callable[[], LLMatcher]) -> LLMatcher:
    """Call `make` in a thread with `_STACK_BYTES` of stack."""
    pool = ThreadPoolExecutor(1, "verbatim-grammar", initializer=_lower_priority)
    with _stack_lock:
        previous = threading.stack_size(_STACK_BYTES)
        try:
            future = pool.submit(make)  # starts the thread
        finally:
            threading.stack_size(previous)
    pool.shutdown(wait=False)
    return future.result()


_stack_lock = threading.Lock()


def _num_chars(key: _Key) -> int:
    source = key[1]
    return len(source) if isinstance(source, str) else sum(map(len, source))


def _key(params: SamplingParams) -> _Key:
    name = params.structure
    assert name is not None
    return name, getattr(params, name), params.any_whitespace


def _one_line(message: str) -> str:
    # Drop llguidance's excerpt of the source line.
    message = re.split(r"\n\s*\d+ \| ", message)[0]
    line = " ".join(message.replace("<non-verbose/>", "").split())
    return line if len(line) <= 600 else f"{line[:600]} ..."


def _source(kind: str, text: Any, any_whitespace: bool) -> str:
    """Return the source that llguidance compiles."""
    options = ANY_WHITESPACE if any_whitespace else COMPACT
    if kind == "json_schema":
        schema = json.loads(text)
        if schema is False:
            raise InvalidRequest("json_schema=false: no document validates")
        schema = {} if schema is True else schema
        check_schema(schema)
        check_cost(schema)
        narrow_bounds(schema)
        return LLMatcher.grammar_from_json_schema(schema, overrides=options)
    if kind == "choice":
        texts = [
            "".join(c if c.isalnum() and c.isascii() else rf"\x{{{ord(c):x}}}" for c in t)
            for t in text
        ]
        return LLMatcher.grammar_from_regex("|".join(texts))
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if _TEMPERATURE.search(text):
        raise InvalidRequest("grammar: temperature= of a rule is not supported; set the request's")
    if (count := _LITERAL.sub("", text).count("&")) > MAX_AND:
        raise InvalidRequest(f"grammar: {count} intersections (&); at most {MAX_AND}")
    return LLMatcher.grammar_from_lark(format_embedded(text, options))
