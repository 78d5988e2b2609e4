"""Validates prompts and parameters, and creates `Request`s, before any forward runs."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Iterator, Mapping, Set
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from verbatim.batch import IdValues
from verbatim.common.checks import check_kind
from verbatim.core import BadWords, Request, Sequence, SessionCache, Token
from verbatim.engine.adapters import LoadedAdapters
from verbatim.engine.beams import BeamSearch
from verbatim.errors import InvalidRequest, NotSupported, PromptTooLong, RequestFailed
from verbatim.params import CHOICES, SamplingParams
from verbatim.protocols import Runner
from verbatim.sampling.processors import bitmask, check_vocabulary, in_mask
from verbatim.sampling.stopping import StopWatch, single_stop_ids
from verbatim.text.detokenizer import Detokenizer
from verbatim.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from verbatim.sampling.grammar import GrammarCompiler, StructureState

Prompt = str | SequenceOf[int]


@dataclass(eq=False)
class Admission:
    """Creates requests within the limits of one model.

    Attributes:
        tokenizer: None if prompts and outputs are ids only.
        runner: provides the model's vocabulary and capabilities.
        max_length: maximum number of tokens of prompt and completion together.
        limit_source: the origin of `max_length`, for error messages.
        eos_ids: the model's end-of-sequence ids.
        adapters: the loaded adapters.
        drafts: whether the engine uses speculative decoding.
        placeholders: config field by id, for the ids of images and sounds, which prompts must not contain.
    """

    tokenizer: Tokenizer | None
    runner: Runner
    max_length: int
    limit_source: str
    eos_ids: frozenset[int]
    adapters: LoadedAdapters
    drafts: bool = False
    placeholders: Mapping[int, str] = field(default_factory=dict)
    _request_numbers: Iterator[int] = field(default_factory=partial(itertools.count, 1))
    _compiler: GrammarCompiler | None = None  # created for the first structured request

    @property
    def vocab_size(self) -> int:
        return self.runner.vocab_size

    def with_tokenizer(
        self, tokenizer: Tokenizer | None, max_length: int, source: str
    ) -> Admission:
        """Return an admission for the same engine, with another tokenizer and a limit that is not higher.

        Args:
            source: the origin of `max_length` if it is lower.
        """
        source = source if max_length < self.max_length else self.limit_source
        return replace(
            self, tokenizer=tokenizer, max_length=max_length, limit_source=source, _compiler=None
        )

    def admit(
        self,
        prompt: Prompt | None,
        params: SamplingParams,
        *,
        first_sample: int = 0,
        ids: list[int] | None = None,
        resumed_ids: SequenceOf[int] = (),
        resumed_text: str = "",
        session_cache: SessionCache | None = None,
        shown_ids: frozenset[int] = frozenset(),
    ) -> Request:
        """Return a request for `prompt`, a string or a sequence of ids.

        Args:
            first_sample: the sample index of completion 0.
            ids: all ids before the completion, ending with the prompt's; None: only the prompt's.
            resumed_ids: tokens of the completion that were generated earlier.
            resumed_text: text of `resumed_ids` that was already sent.
            session_cache: the session's cache if the request is a session's turn; sets the length limit.
            shown_ids: special tokens that stay in the text.

        Raises:
            InvalidRequest: an empty prompt, an id outside the vocabulary, text without a tokenizer, an
                invalid structure.
            PromptTooLong: prompt and completion exceed the length limit.
            NotSupported: a feature or a combination of features that the model does not support.
        """
        self._check_params(params)
        limit_tokens, source = self.max_length, self.limit_source
        if session_cache is not None:
            limit_tokens, source = session_cache.max_length, "the session's max_length"
            for name in ("n", "num_beams"):
                if getattr(params, name) != 1:
                    raise NotSupported(
                        f"{name}={getattr(params, name)} in a session: a turn has one completion; "
                        "use generate with session.token_ids for several"
                    )
        if ids is None:
            ids = self.prompt_ids(prompt)
        num_tokens = len(ids) + len(resumed_ids)
        room = limit_tokens - num_tokens
        if room < 0 or (room == 0 and params.max_tokens != 0):
            raise PromptTooLong(
                f"the prompt has {num_tokens} tokens; the limit for prompt and completion together is "
                f"{limit_tokens} ({source})"
            )
        if params.max_tokens is not None and params.max_tokens > room:
            raise PromptTooLong(
                f"the prompt's {num_tokens} tokens and max_tokens={params.max_tokens} make "
                f"{num_tokens + params.max_tokens}; the limit for both together is {limit_tokens} "
                f"({source})"
            )
        new_tokens = room if params.max_tokens is None else params.max_tokens
        bad_words = self._bad_words(params)
        request = Request(
            request_id=f"request-{next(self._request_numbers)}",
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_ids=ids,
            params=params,
            # 53 bits survive every JSON reader unrounded.
            seed=secrets.randbits(53) if params.seed is None else params.seed,
            max_tokens=len(resumed_ids) + new_tokens,
            stop_ids=single_stop_ids(params, self.eos_ids),
            bad_words=BadWords(w for w in bad_words if len(w) > 1),
            allowed_mask=self._allowed_mask(params, {w[0] for w in bad_words if len(w) == 1}),
            bias=IdValues.of(params.logit_bias) if params.logit_bias else None,
            arrival=time.monotonic(),
            begin=self._begin,
            first_sample=first_sample,
            resumed_ids=list(resumed_ids),
            resumed_text=resumed_text,
            session_cache=session_cache,
            shown_ids=shown_ids,
        )
        if params.min_tokens > request.max_tokens:
            raise InvalidRequest(
                f"min_tokens={params.min_tokens} is more than the {request.max_tokens} tokens that the "
                f"prompt of {len(ids)} leaves of {limit_tokens} ({source})"
            )
        self._check_replay(params, len(ids) + request.max_tokens)
        self._begin(request)
        return request

    def _begin(self, request: Request) -> None:
        """Create the initial sequences of a request."""
        params, first = request.params, self._sequence(request)
        if params.num_beams > 1:
            request.sequences = [first]
            max_tokens = max(1, request.max_tokens)
            request.search = BeamSearch(first, params, len(request.stop_ids), max_tokens)
        else:
            request.sequences = [first, *(first.fork(index) for index in range(1, params.n))]

    def _sequence(self, request: Request) -> Sequence:
        detokenizer = None
        if self.tokenizer is not None:
            detokenizer = Detokenizer(
                self.tokenizer,
                skip_special_tokens=request.params.skip_special_tokens,
                shown_ids=request.shown_ids,
                prompt_tail_ids=request.prompt_ids,
            )
        watch = StopWatch(
            request.params,
            stop_ids=request.stop_ids,
            max_tokens=request.max_tokens,
            detokenizer=detokenizer,
        )
        sequence = Sequence(request, 0, watch, self._grammar(request))
        if request.resumed_ids:
            _resume(sequence, watch)
        return sequence

    def compiles(self, params: SamplingParams) -> bool:
        """Return whether `admit` would compile a structure, which can take seconds."""
        compiler = self._compiler
        return params.structure is not None and not (compiler and compiler.is_cached(params))

    def _grammar(self, request: Request) -> StructureState | None:
        """Return the initial grammar state of a completion; None for unstructured output."""
        params = request.params
        if params.structure is None:
            return None
        tokenizer = self._need_tokenizer(params.structure)
        if self._compiler is None:
            from verbatim.sampling.grammar import GrammarCompiler

            self._compiler = GrammarCompiler(tokenizer, self.vocab_size, self.eos_ids)
        return self._compiler.start(params, ends=bool(self.eos_ids) and not params.ignore_eos)

    def prompt_ids(self, prompt: Prompt | None, *, begins: bool = True) -> list[int]:
        """Return the ids of a prompt.

        Args:
            begins: the prompt begins a sequence, so the tokenizer may add special tokens and a space to text.

        Raises:
            InvalidRequest: as `admit`.
            NotSupported: an id that represents an image or a sound.
        """
        if isinstance(prompt, str):
            tokenizer = self._need_tokenizer("a prompt given as text")
            ids = tokenizer.encode(prompt) if begins else tokenizer.encode_rest(prompt)
            invalid_ids = [value for value in ids if value >= self.vocab_size]
            if invalid_ids:
                raise InvalidRequest(
                    f"prompt: the tokenizer returns id {invalid_ids[0]}, outside of the model's 0 to "
                    f"{self.vocab_size - 1}; it belongs to another model"
                )
        else:
            ids, vocab_size = _as_list(prompt), self.vocab_size
            for value in ids:
                if isinstance(value, bool) or not isinstance(value, int):
                    raise InvalidRequest(f"prompt: {value!r} is not a token id")
                if not 0 <= value < vocab_size:
                    raise InvalidRequest(f"prompt: id {value} is outside 0 to {vocab_size - 1}")
        if not ids:
            raise InvalidRequest("the prompt is empty: at least one token is needed")
        for value in self.placeholders.keys() & ids:
            raise NotSupported(
                f"prompt: id {value} is the model's {self.placeholders[value]}; only text is supported"
            )
        return ids

    def _check_params(self, params: SamplingParams) -> None:
        check_kind("params", params, SamplingParams, "a SamplingParams")
        check_vocabulary(params, self.vocab_size)
        self.adapters.number_of(params.adapter)
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > self.vocab_size:
                raise InvalidRequest(
                    f"{name}={getattr(params, name)} is more than the vocabulary of "
                    f"{self.vocab_size}"
                )
        if params.num_beams > 1 and params.draft and self.drafts:
            raise NotSupported(
                f"num_beams={params.num_beams} on an engine with drafts: beam search can't verify draft "
                "tokens; set draft=False for this request"
            )
        if params.hidden_states and self.runner.hidden_reason is not None:
            raise NotSupported(f"hidden_states: {self.runner.hidden_reason}")
        for name in params.records:
            self.runner.choices[name].check(f"record_{name}")
            if params.num_beams > 1:
                raise NotSupported(
                    f"record_{name} with num_beams={params.num_beams}: beams share blocks and drop "
                    f"them; score the best one with record_{name} instead"
                )

    def _check_replay(self, params: SamplingParams, most_tokens: int) -> None:
        """Raise InvalidRequest if a replayed record does not fit the model or the request."""
        for name in CHOICES:
            record, choices = getattr(params, f"replay_{name}"), self.runner.choices[name]
            if record is None:
                continue
            choices.check_replay(f"replay_{name}")
            if tuple(record.shape[1:]) != (choices.layers, choices.k) or len(record) > most_tokens:
                raise InvalidRequest(
                    f"replay_{name} has shape {list(record.shape)}; this model and request take up to "
                    f"[{most_tokens}, {choices.layers}, {choices.k}]"
                )
            if choices.count and record.numel() and int(record.max()) >= choices.count:
                raise InvalidRequest(
                    f"replay_{name} names expert {int(record.max())}; there are {choices.count}"
                )

    def _allowed_mask(self, params: SamplingParams, banned: Set[int]) -> Tensor | None:
        """Return the bit mask of the ids that can be drawn at any step; None for all ids."""
        allowed = params.allowed_token_ids
        if allowed is None and not banned:
            return None
        mask = bitmask(range(self.vocab_size) if allowed is None else allowed, self.vocab_size)
        return mask & ~bitmask((i for i in banned if i < self.vocab_size), self.vocab_size)

    def _bad_words(self, params: SamplingParams) -> list[tuple[int, ...]]:
        ids: list[tuple[int, ...]] = []
        for word in params.bad_words:
            if isinstance(word, str):
                ids += self._need_tokenizer("bad_words as strings").encode_fragment(word)
            else:
                ids.append(tuple(word))
        return ids

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequest(f"{what} needs a tokenizer, and this engine has none; give ids")
        return self.tokenizer


def _resume(sequence: Sequence, watch: StopWatch) -> None:
    """Advance a new sequence past the resumed tokens of its completion, which must fit its structure."""
    request, grammar = sequence.request, sequence.grammar
    ids = request.resumed_ids
    for count, token_id in enumerate(ids if grammar is not None else ()):
        assert grammar is not None
        try:
            fits = in_mask(grammar.mask(), token_id)
            ended = fits and (grammar.push(token_id) or grammar.is_complete())
        except RequestFailed as error:
            raise InvalidRequest(str(error)) from error
        if not fits or ended:
            why = "the structure is complete" if fits else f"token {count + 1} does not fit it"
            raise InvalidRequest(
                f"{request.params.structure} for a completion that continues after {len(ids)} tokens: {why}"
            )
    watch.resume(ids, request.resumed_text)
    sequence.output_ids = list(ids)
    sequence.tokens = [Token()] * len(ids)  # placeholders that are never returned
    sequence.num_sent = len(ids)


def _as_list(prompt: Any) -> list[Any]:
    """Convert a list, a tuple, an array or a one-dimensional tensor to a list of Python numbers."""
    if getattr(prompt, "ndim", 1) != 1 or isinstance(prompt, bytes | bytearray | Mapping | Set):
        raise InvalidRequest(f"prompt={prompt!r}: must be a string or a list of token ids")
    try:
        values = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
    except TypeError:
        raise InvalidRequest(
            f"prompt={prompt!r}: must be a string or a list of token ids"
        ) from None
    return [value.item() if getattr(value, "ndim", None) == 0 else value for value in values]


def _is_id(entry: Any) -> bool:
    """Return whether an entry of a list is a token id rather than a prompt; a 0-d array is an id."""
    return isinstance(entry, int | float) or getattr(entry, "ndim", None) == 0


def as_prompts(prompts: Any) -> tuple[list[Prompt], bool]:
    """Return the prompts as a list, and whether `prompts` was a single one: a string or a list of ids."""
    if isinstance(prompts, str):
        return [prompts], True
    if getattr(prompts, "ndim", 1) > 1:
        return list(prompts), False
    if not isinstance(prompts, SequenceOf) and not hasattr(prompts, "ndim"):
        raise InvalidRequest(
            f"prompts={prompts!r}: must be a string, a list of ids, or a list of either"
        )
    entries = [] if getattr(prompts, "ndim", 1) == 0 else list(prompts)
    if not entries:
        raise InvalidRequest("the prompt is empty: at least one token is needed")
    return ([prompts], True) if _is_id(entries[0]) else (entries, False)


def as_params(params: Any, count: int) -> list[SamplingParams]:
    """Return a list of parameters, one for each of `count` prompts."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    params_list = list(params) if isinstance(params, SequenceOf) else [params]
    if len(params_list) != count:
        raise InvalidRequest(
            f"{len(params_list)} params for {count} prompts: must be one for all, or one per prompt"
        )
    return params_list
