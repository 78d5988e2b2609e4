"""Megatron's requests as the engine's, and what became of them back again."""

from __future__ import annotations

import copy
import time
import uuid
import warnings
from collections.abc import Iterable, Sequence
from itertools import dropwhile
from typing import Any, cast

import torch
from torch import Tensor, nn

from verbatim.compat.megatron.params import SamplingParams
from verbatim.compat.megatron.request import (
    DynamicInferenceRequest,
    InferenceRequest,
    Status,
    TopN,
    clear_outputs,
)
from verbatim.compat.megatron.tokenizer import (
    Segments,
    bos_of,
    detokenize,
    eod_of,
    tokenize,
    wrap,
)
from verbatim.core import Completion, Request, TopLogprobs
from verbatim.engine.admission import Admission
from verbatim.errors import InvalidRequest, NotSupported
from verbatim.llm import LLM
from verbatim.tensors import engine_of


class Translation:
    """Between one model with its tokenizer and Megatron's nouns.

    Args:
        model: an open `LLM`, or a live module.
        tokenizer: of either kind; None takes the LLM's own, if it has one.
        max_sequence_length: prompt and completion together; None leaves the engine's limit.
    """

    def __init__(
        self, model: LLM | nn.Module, tokenizer: Any, max_sequence_length: int | None
    ) -> None:
        self._model = model
        own = engine_of(model).tokenizer
        self.tokenizer = own.hf if tokenizer is None and own is not None else tokenizer
        self.text = None if self.tokenizer is None else wrap(self.tokenizer)
        self._max_sequence_length = max_sequence_length

    @property
    def llm(self) -> LLM:
        """The engine; of a module whose layers have changed, a new one."""
        return engine_of(self._model)

    @property
    def max_sequence_length(self) -> int:
        """Prompt and completion together."""
        limit = self.llm.max_length
        return limit if self._max_sequence_length is None else min(limit, self._max_sequence_length)

    def need_tokenizer(self, what: str) -> Any:
        """The tokenizer; raises InvalidRequest where there is none."""
        if self.tokenizer is None:
            raise InvalidRequest(f"{what} needs a tokenizer, and there is none")
        return self.tokenizer

    def admit(self, request: InferenceRequest, row: int, seed: int) -> Request:
        """The engine's request; whatever is wrong is refused here.

        Args:
            row: its place in the batch: the sample index, unless it has a seed of its own.
            seed: of those requests that have none.
        """
        if request.encoder_prompt is not None:
            raise NotSupported("encoder_prompt: only decoders are run; leave it at None")
        params = request.sampling_params or SamplingParams()
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(f"sampling_params={params!r}: must be Megatron's SamplingParams")
        params.check()
        self._check_text(params)
        ids = self._prompt_ids(request, params)
        house = params.house(
            max_tokens=self._max_tokens(params, len(ids)),
            termination_id=self._termination_id(params),
            seed=seed if params.seed is None else params.seed,
        )
        llm = self.llm
        own = llm.engine.admission
        admission = Admission(
            self.text, own.runner, self.max_sequence_length, own.limit_source, frozenset()
        )
        admitted = admission.admit(ids, house, first_sample=row if params.seed is None else 0)
        admitted.request_id = f"megatron-{uuid.uuid4().hex}"
        return admitted

    def begin(self, request: InferenceRequest, admitted: Request) -> None:
        """Note on the caller's side that a request has come in."""
        # A copy: who changes theirs for the next request must not change this one.
        request.sampling_params = copy.copy(request.sampling_params or SamplingParams())
        clear_outputs(request)
        if _given_ids(request) is None:
            assert request.prompt is not None
            request.prompt_tokens = list(admitted.prompt_ids)
            request._tokenized = request.prompt, list(admitted.prompt_ids)
        request.prompt_length = len(admitted.prompt_ids)
        if request.arrival_time is None:
            request.arrival_time = time.time()
        request.status = Status.ACTIVE_AND_GENERATING_TOKENS

    def fill(self, request: InferenceRequest, admitted: Request, completion: Completion) -> None:
        """Write down what became of a request that has ended."""
        params = cast(SamplingParams, request.sampling_params)
        # One that was ended during its prefill knows only a part of its prompt's.
        whole = params.reports_prompt and (
            len(admitted.prompt_logprobs) == len(admitted.prompt_ids) - 1
        )
        ids, metrics = completion.token_ids, admitted.metrics
        dynamic = isinstance(request, DynamicInferenceRequest)
        request.status = Status.COMPLETED
        request.generated_length = len(ids)
        request.generated_tokens = list(ids) if dynamic else torch.tensor(ids, dtype=torch.int64)
        request.tpot = [metrics.first_token_s, *[metrics.per_token_s] * (len(ids) - 1)][: len(ids)]
        if params.return_log_probs:
            request.generated_log_probs = list(completion.logprobs)
            if whole:
                request.prompt_log_probs = list(admitted.prompt_logprobs)
        if params.top_n_logprobs:
            request.generated_top_n_logprobs = self.by_text(completion.top_logprobs or [])
            if whole:
                request.prompt_top_n_logprobs = self.by_text(admitted.prompt_top_logprobs)
        if params.detokenize_generations and self.text is not None:
            self._fill_text(request, params, admitted.prompt_ids, completion)
        if isinstance(request, DynamicInferenceRequest):
            request.ttft = metrics.first_token_s if ids else None
            request.latency = metrics.total_s or time.monotonic() - admitted.arrival
            request.num_cached_tokens = metrics.num_cached_tokens

    def by_text(self, tops: Iterable[TopLogprobs]) -> TopN:
        """{text: log-prob} of each position; of ids with equal texts the likeliest stays."""
        found: TopN = []
        for top in tops:
            entry: dict[str, float] = {}
            for token, logprob in top:
                entry.setdefault(self.detokenize([token], False, False), logprob)
            found.append(entry)
        return found

    def detokenize(
        self,
        ids: Sequence[int],
        remove_EOD: bool = True,
        skip_special_tokens: bool = True,
    ) -> str:
        """The text of ids."""
        return detokenize(self.need_tokenizer("text"), ids, remove_EOD, skip_special_tokens)

    def segments(self, ids: Sequence[int], skip_special_tokens: bool = True) -> list[str]:
        """The text of each of some ids."""
        assert self.text is not None
        parts = Segments(self.text, skip_special_tokens=skip_special_tokens)
        parts.extend(ids, last=True)
        return parts.texts

    def _fill_text(
        self,
        request: InferenceRequest,
        params: SamplingParams,
        prompt_ids: list[int],
        completion: Completion,
    ) -> None:
        assert self.text is not None
        prompt = self._prompt_text(request, prompt_ids)
        text = self.with_end(params, completion.token_ids, completion.text)
        request.generated_text, request.text = text, prompt + text
        if params.return_segments:
            parts = Segments(self.text, prompt_ids)
            parts.extend(completion.token_ids, last=True)
            request.generated_segments = parts.texts
            request.segments = self.segments(prompt_ids) + parts.texts

    def with_end(self, params: SamplingParams, ids: list[int], text: str) -> str:
        """The text of a completion with its `eod`, where that is to stay."""
        if not params.detokenize_stop_sequence or ids[-1:] != [eod_of(self.tokenizer)]:
            return text
        end = self.detokenize(ids[-1:], remove_EOD=False, skip_special_tokens=False)
        return text if text.endswith(end) else text + end

    def _prompt_ids(self, request: InferenceRequest, params: SamplingParams) -> list[int]:
        given = _given_ids(request)
        if given is not None:
            return given
        if request.prompt is None:
            raise InvalidRequest(
                f"request {request.request_id} has neither prompt nor prompt_tokens"
            )
        tokenizer = self.need_tokenizer("a prompt given as text")
        return tokenize(tokenizer, request.prompt, params.add_BOS)

    def _prompt_text(self, request: InferenceRequest, ids: list[int]) -> str:
        """The prompt as it was given, if `ids` are its own; else their text."""
        if request.prompt is not None:
            if request._tokenized == (request.prompt, ids):
                return request.prompt
            bos = bos_of(self.tokenizer)
            bare = list(dropwhile(lambda token: token == bos, ids))
            if tokenize(self.tokenizer, request.prompt, add_BOS=False) == bare:
                return request.prompt
        return self.detokenize(ids, remove_EOD=False)

    def _max_tokens(self, params: SamplingParams, prompt_length: int) -> int | None:
        """What is asked for, within the limit; too long a prompt is the admission's business."""
        asked = params.num_tokens_to_generate
        if params.num_tokens_total is not None:
            asked = params.num_tokens_total - prompt_length
            if asked < 0:
                raise InvalidRequest(
                    f"num_tokens_total={params.num_tokens_total}: the prompt alone has {prompt_length}"
                )
        room = self.max_sequence_length - prompt_length
        if asked is None or asked <= room or room <= 0:
            return asked
        warnings.warn(
            f"{asked} tokens after a prompt of {prompt_length} are over the limit of "
            f"{self.max_sequence_length} for both; {room} are generated",
            stacklevel=2,
        )
        return room

    def _termination_id(self, params: SamplingParams) -> int | None:
        if params.no_early_termination or params.termination_id == -1:
            return None
        if params.termination_id is not None:
            return params.termination_id
        eod = None if self.tokenizer is None else eod_of(self.tokenizer)
        return eod if eod is not None and eod < self.llm.engine.admission.vocab_size else None

    def _check_text(self, params: SamplingParams) -> None:
        for name in ("stop_words", "return_segments", "top_n_logprobs"):
            if getattr(params, name):
                self.need_tokenizer(name)
        if params.return_segments and not params.detokenize_generations:
            raise InvalidRequest("return_segments=True needs detokenize_generations=True")


def _given_ids(request: InferenceRequest) -> list[int] | None:
    """The prompt's ids as the caller gave them; None where they are to be made of its text."""
    given = request.prompt_tokens
    if given is None:
        return None
    ids = given.tolist() if isinstance(given, Tensor) else list(given)
    made = request._tokenized is not None and ids == request._tokenized[1]
    return None if made and request.prompt is not None else ids
