"""From a prompt and its params to a `Request`: bad input is refused here, before any forward runs."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Mapping, Set
from collections.abc import Sequence as SequenceOf
from typing import Any

from verbatim.core import Request, Sequence
from verbatim.errors import InvalidRequest, PromptTooLong
from verbatim.params import SamplingParams
from verbatim.sampling.processors import check_vocabulary
from verbatim.sampling.stopping import StopWatch
from verbatim.text.detokenizer import Detokenizer
from verbatim.text.tokenizer import Tokenizer

Prompt = str | SequenceOf[int]


class Admission:
    """Checks prompts against one model's limits.

    Args:
        tokenizer: None where only ids go in and out.
        vocab_size: width of the model's logits.
        max_length: prompt and completion together, in tokens.
        eos_ids: the model's end-of-sequence ids.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        max_length: int,
        limit_source: str,
        eos_ids: frozenset[int],
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_length = max_length
        self.limit_source = limit_source
        self.eos_ids = eos_ids
        self._count = itertools.count(1)

    def admit(self, prompt: Prompt, params: SamplingParams, *, first_sample: int = 0) -> Request:
        """A request for `prompt`, which is a string or a sequence of ids.

        Args:
            first_sample: the sample index of completion 0.

        Raises:
            InvalidRequest: an empty prompt, an id outside the vocabulary, text without a tokenizer.
            PromptTooLong: no room for a single token.
        """
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(f"params={params!r}: must be a SamplingParams")
        text = prompt if isinstance(prompt, str) else None
        ids = self._ids(prompt)
        self._check_params(params)
        room = self.max_length - len(ids)
        if room < 0 or (room == 0 and params.max_tokens != 0):
            raise PromptTooLong(
                f"the prompt has {len(ids)} tokens; the limit for prompt and completion together is "
                f"{self.max_length} ({self.limit_source})"
            )
        if params.max_tokens is not None and params.max_tokens > room:
            raise PromptTooLong(
                f"the prompt's {len(ids)} tokens and max_tokens={params.max_tokens} make "
                f"{len(ids) + params.max_tokens}; the limit for both together is {self.max_length} "
                f"({self.limit_source})"
            )
        request = Request(
            request_id=f"request-{next(self._count)}",
            prompt=text,
            prompt_ids=ids,
            params=params,
            # 53 bits survive every JSON reader unrounded.
            seed=secrets.randbits(53) if params.seed is None else params.seed,
            max_tokens=room if params.max_tokens is None else params.max_tokens,
            eos_ids=frozenset() if params.ignore_eos else self.eos_ids,
            bad_word_ids=self._bad_words(params),
            arrival=time.monotonic(),
            first_sample=first_sample,
        )
        request.sequences = [self._sequence(request, index) for index in range(params.n)]
        return request

    def _sequence(self, request: Request, index: int) -> Sequence:
        detokenizer = None
        if self.tokenizer is not None:
            detokenizer = Detokenizer(
                self.tokenizer,
                skip_special_tokens=request.params.skip_special_tokens,
                prompt_tail_ids=request.prompt_ids,
            )
        watch = StopWatch(
            request.params,
            eos_ids=request.eos_ids,
            max_tokens=request.max_tokens,
            detokenizer=detokenizer,
        )
        return Sequence(request, index, watch)

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            ids = self._need_tokenizer("a prompt given as text").encode(prompt)
            outside = [value for value in ids if value >= self.vocab_size]
            if outside:
                raise InvalidRequest(
                    f"prompt: the tokenizer gives id {outside[0]}, which is outside of the model's "
                    f"0 to {self.vocab_size - 1}; it belongs to another model"
                )
        else:
            ids = [self._id(value) for value in _plain(prompt)]
        if not ids:
            raise InvalidRequest("the prompt is empty: at least one token is needed")
        return ids

    def _id(self, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidRequest(f"prompt: {value!r} is not a token id")
        if not 0 <= value < self.vocab_size:
            raise InvalidRequest(f"prompt: id {value} is outside 0 to {self.vocab_size - 1}")
        return value

    def _check_params(self, params: SamplingParams) -> None:
        check_vocabulary(params, self.vocab_size)
        for wanted in ("logprobs", "prompt_logprobs"):
            if (getattr(params, wanted) or 0) > self.vocab_size:
                raise InvalidRequest(
                    f"{wanted}={getattr(params, wanted)} is more than the vocabulary of "
                    f"{self.vocab_size}"
                )

    def _bad_words(self, params: SamplingParams) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []
        for word in params.bad_words:
            if isinstance(word, str):
                found += self._need_tokenizer("bad_words as strings").encode_fragment(word)
            else:
                found.append(tuple(word))
        return found

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequest(f"{what} needs a tokenizer, and this engine has none; give ids")
        return self.tokenizer


def _plain(prompt: Any) -> list[Any]:
    """A list of Python numbers from a list, a tuple, an array or a one-dimensional tensor."""
    if getattr(prompt, "ndim", 1) != 1 or isinstance(prompt, bytes | bytearray | Mapping | Set):
        raise InvalidRequest(f"prompt={prompt!r}: must be a string or a list of token ids")
    try:
        values = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
    except TypeError:
        raise InvalidRequest(
            f"prompt={prompt!r}: must be a string or a list of token ids"
        ) from None
    return [value.item() if getattr(value, "ndim", None) == 0 else value for value in values]
