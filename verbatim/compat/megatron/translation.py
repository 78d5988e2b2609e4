"""Translation of Megatron's tokenizers, requests and results to and from the engine's."""

from __future__ import annotations

import copy
import operator
import time
import warnings
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import dropwhile
from typing import Any, cast

import torch
from torch import Tensor, nn

from verbatim.api.llm import LLM
from verbatim.api.tensors import engine_of
from verbatim.common.checks import check_kind, integer
from verbatim.compat.megatron.request import (
    DynamicInferenceRequest,
    InferenceRequest,
    SamplingParams,
    Status,
    TopN,
)
from verbatim.compat.shared import accepts
from verbatim.core import FinishReason, Request, TopLogprobs
from verbatim.errors import InvalidRequest, NotSupported
from verbatim.params import SamplingParams as EngineParams
from verbatim.text.detokenizer import Detokenizer
from verbatim.text.tokenizer import Tokenizer


class Translation:
    """Translates requests and results for one model and its tokenizer.

    Args:
        model: an open `LLM`, or a live module.
        tokenizer: Hugging Face's or Megatron's; None takes the LLM's, if it has one.
        max_sequence_length: limit of prompt and completion together; None takes the engine's.
    """

    def __init__(
        self, model: LLM | nn.Module, tokenizer: Any, max_sequence_length: int | None
    ) -> None:
        self.model, self._max_sequence_length = model, max_sequence_length
        default = engine_of(model).tokenizer
        self.set_tokenizer(default.hf if tokenizer is None and default is not None else tokenizer)

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Replace the tokenizer by one of either kind, or None."""
        if tokenizer is not None and not hasattr(adapted(tokenizer), "decode"):
            raise InvalidRequest(
                f"tokenizer={tokenizer!r}: must be Hugging Face's or Megatron's kind, or None"
            )
        self.tokenizer = tokenizer
        vars(self).pop("text", None)

    @cached_property
    def text(self) -> Tokenizer | None:
        """Verbatim's `Tokenizer` over `tokenizer`, created on first use."""
        if isinstance(self.tokenizer, Tokenizer | None):
            return self.tokenizer
        return Tokenizer(adapted(self.tokenizer))

    @property
    def llm(self) -> LLM:
        """The engine; a new one if the module's layers have changed."""
        return engine_of(self.model)

    @property
    def max_sequence_length(self) -> int:
        """Maximum length of prompt and completion together."""
        limit = self.llm.max_length
        return limit if self._max_sequence_length is None else min(limit, self._max_sequence_length)

    def need_tokenizer(self, purpose: str) -> Any:
        """Return the tokenizer; raise InvalidRequest if there is none."""
        if self.tokenizer is None:
            raise InvalidRequest(f"{purpose} needs a tokenizer")
        return self.tokenizer

    def admit(self, request: InferenceRequest, row: int, seed: int) -> Request:
        """Return the engine's request, with all fields checked.

        Args:
            row: index in the batch; the sample index, unless the request has its own seed.
            seed: seed of requests without their own.
        """
        if not isinstance(request, InferenceRequest):
            raise InvalidRequest(f"{request!r}: must be an InferenceRequest")
        if request.encoder_prompt is not None:
            raise NotSupported(
                "encoder_prompt: only decoder models are supported; leave it at None"
            )
        check_kind("prompt", request.prompt, str | None, "a string or None")
        params = SamplingParams.of(request.sampling_params)
        self._check_text(params)
        ids = _caller_ids(request)
        if ids is None:
            if request.prompt is None:
                number = request.request_id
                raise InvalidRequest(f"request {number} has neither prompt nor prompt_tokens")
            tokenizer = self.need_tokenizer("a prompt given as text")
            ids = tokenize_prompt(tokenizer, request.prompt, params.add_BOS)
        end, top_n = self._termination_id(params), params.top_n_logprobs
        reports_prompt = any(params.prompt_outputs(isinstance(request, DynamicInferenceRequest)))
        engine_params = EngineParams(
            **params.sampling(),
            max_tokens=self._max_tokens(params, len(ids)),
            stop=tuple(params.stop_words or ()),
            stop_token_ids=() if end is None else (end,),
            min_tokens=params.min_tokens,
            include_stop_str_in_output=params.detokenize_stop_sequence,
            ignore_eos=True,  # only the termination id ends a completion
            seed=seed if params.seed is None else params.seed,
            logprobs=top_n or None,
            prompt_logprobs=top_n if reports_prompt else None,
            # Set for Megatron's router replay.
            record_routing=bool(
                getattr(self.llm.engine.config, "moe_enable_routing_replay", False)
            ),
        )
        admission = self.llm.engine.admission.with_tokenizer(
            self.text, self.max_sequence_length, "max_sequence_length"
        )
        return admission.admit(ids, engine_params, first_sample=row if params.seed is None else 0)

    def begin(self, request: InferenceRequest, admitted: Request) -> None:
        """Prepare the caller's request to start: clear its outputs, and set its prompt fields and status."""
        # A copy: the caller may change theirs for the next request.
        request.sampling_params = copy.copy(request.sampling_params or SamplingParams())
        request.clear_outputs()
        if _caller_ids(request) is None:
            assert request.prompt is not None
            request.prompt_tokens = list(admitted.prompt_ids)
            request._tokenized = list(admitted.prompt_ids)
        request.prompt_length = len(admitted.prompt_ids)
        if request.arrival_time is None:
            request.arrival_time = time.time()
        request.status = Status.ACTIVE_AND_GENERATING_TOKENS

    def settle(
        self,
        request: InferenceRequest,
        admitted: Request,
        count: int | None = None,
        reason: BaseException | None = None,
    ) -> None:
        """Fill in the outputs of an ended request, or its error.

        Args:
            count: number of tokens to keep if the caller ended the request; None takes the engine's result.
            reason: the error to report for an aborted request.
        """
        error, result = admitted.error, admitted.result
        if result is None or result.outputs[0].finish_reason is FinishReason.ABORT:
            error = error or reason
        if error is None:
            try:
                self._fill(request, admitted, count)
            except Exception as failure:  # raised by the tokenizer
                error = failure
        if error is not None:
            request.status, request.error = Status.FAILED, error

    def _fill(self, request: InferenceRequest, admitted: Request, count: int | None) -> None:
        params = cast(SamplingParams, request.sampling_params)
        metrics, sequence = admitted.metrics, admitted.sequences[0]
        ids, tokens = sequence.output_ids[:count], sequence.tokens[:count]
        is_dynamic = isinstance(request, DynamicInferenceRequest)
        # A request that ended during prefill has only part of its prompt's log-probs.
        prompt_tokens = admitted.prompt_tokens
        prompt_complete = len(prompt_tokens) == len(admitted.prompt_ids) - 1
        prompt_logprobs, prompt_tops = params.prompt_outputs(is_dynamic)
        request.status = Status.COMPLETED
        request.generated_length = len(ids)
        request.generated_tokens = list(ids) if is_dynamic else torch.tensor(ids, dtype=torch.int64)
        request.tpot = [metrics.first_token_s, *[metrics.per_token_s] * (len(ids) - 1)][: len(ids)]
        if params.return_log_probs:
            request.generated_log_probs = [token.logprob for token in tokens]
            if prompt_logprobs and prompt_complete:
                request.prompt_log_probs = [token.logprob for token in prompt_tokens]
        if params.top_n_logprobs:
            request.generated_top_n_logprobs = self.by_text(t.top_logprobs or [] for t in tokens)
            if prompt_tops and prompt_complete:
                tops = (token.top_logprobs or [] for token in prompt_tokens)
                request.prompt_top_n_logprobs = self.by_text(tops)
        completion = admitted.result.outputs[0] if count is None and admitted.result else None
        if params.detokenize_generations and self.text is not None:
            if completion is not None:
                text = completion.text
            else:
                text = self.detokenize(ids, remove_EOD=not params.detokenize_stop_sequence)
            prompt, prompt_ids = request.prompt, admitted.prompt_ids
            if prompt is None:
                prompt = self.detokenize(prompt_ids, remove_EOD=False)
            request.generated_text = self.with_end(params, ids, text)
            request.text = prompt + request.generated_text
            if params.return_segments:
                request.generated_segments = self.segments(ids, prompt_ids)
                request.segments = self.segments(prompt_ids) + request.generated_segments
        if completion is not None:
            request.routing_indices = completion.routing
        if isinstance(request, DynamicInferenceRequest):
            request.ttft = metrics.first_token_s if ids else None
            request.latency = metrics.total_s or time.monotonic() - admitted.arrival
            request.num_cached_tokens = metrics.num_cached_tokens

    def by_text(self, tops: Iterable[TopLogprobs]) -> TopN:
        """Return {text: log-prob} for each position; of ids with the same text, the likeliest is kept."""
        entries: TopN = []
        for top in tops:
            entry: dict[str, float] = {}
            for token, logprob in top:
                entry.setdefault(self.detokenize([token], False, False), logprob)
            entries.append(entry)
        return entries

    def detokenize(
        self, ids: Sequence[int], remove_EOD: bool = True, skip_special_tokens: bool = True
    ) -> str:
        """Return the text of ids."""
        return detokenize(self.need_tokenizer("text"), ids, remove_EOD, skip_special_tokens)

    def segmenter(
        self, prompt: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> Detokenizer | None:
        """Return a detokenizer for the text of each id after a prompt; None without a tokenizer.

        The text of a character of several ids belongs to the last one; `flush` returns the remaining text.
        """
        if self.text is None:
            return None
        return Detokenizer(
            self.text, skip_special_tokens=skip_special_tokens, prompt_tail_ids=list(prompt)
        )

    def segments(
        self, ids: Sequence[int], prompt: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> list[str]:
        """Return the text of each id after `prompt`; joined, they are the whole text."""
        segmenter = self.segmenter(prompt, skip_special_tokens)
        assert segmenter is not None
        texts = [segmenter.push(token) for token in ids]
        return texts and [*texts[:-1], texts[-1] + segmenter.flush()]

    def with_end(self, params: SamplingParams, ids: list[int], text: str) -> str:
        """Return the text of a completion, with its `eod` if the params keep it."""
        if not params.detokenize_stop_sequence or ids[-1:] != [eod_of(self.tokenizer)]:
            return text
        end = self.detokenize(ids[-1:], remove_EOD=False, skip_special_tokens=False)
        return text if text.endswith(end) else text + end

    def _max_tokens(self, params: SamplingParams, prompt_length: int) -> int | None:
        """Return the requested number of new tokens, clamped to the limit; admission checks the prompt."""
        num_tokens = params.num_tokens_to_generate
        if params.num_tokens_total is not None:
            num_tokens = params.num_tokens_total - prompt_length
            if num_tokens < 0:
                raise InvalidRequest(
                    f"num_tokens_total={params.num_tokens_total}: the prompt alone has {prompt_length}"
                )
        room = self.max_sequence_length - prompt_length
        if num_tokens is None or num_tokens <= room or room <= 0:
            return num_tokens
        warnings.warn(
            f"{num_tokens} tokens after a prompt of {prompt_length} exceed the limit of "
            f"{self.max_sequence_length} for both; {room} are generated",
            stacklevel=2,
        )
        return room

    def _termination_id(self, params: SamplingParams) -> int | None:
        if params.no_early_termination or params.termination_id == -1:
            return None
        vocab_size = self.llm.engine.admission.vocab_size
        if params.termination_id is not None:
            return integer("termination_id", params.termination_id, 0, vocab_size - 1)
        eod = None if self.tokenizer is None else eod_of(self.tokenizer)
        return eod if eod is not None and eod < vocab_size else None

    def _check_text(self, params: SamplingParams) -> None:
        for name in ("stop_words", "return_segments", "top_n_logprobs"):
            if getattr(params, name):
                self.need_tokenizer(name)
        if params.return_segments and not params.detokenize_generations:
            raise InvalidRequest("return_segments=True needs detokenize_generations=True")


def _caller_ids(request: InferenceRequest) -> list[int] | None:
    """Return the prompt ids given by the caller; None if the text has to be tokenized."""
    tokens = request.prompt_tokens
    if tokens is None:
        return None
    try:
        ids = list(tokens.tolist() if isinstance(tokens, Tensor) else tokens)
    except TypeError:
        raise InvalidRequest(
            f"prompt_tokens={tokens!r}: must be a list or a tensor of ids"
        ) from None
    return None if request.prompt is not None and ids == request._tokenized else ids


# ---- tokenizers of both kinds: Hugging Face's, and Megatron's (`tokenize`, `detokenize`, `bos`, `eod`)


class _MegatronAdapter:
    """A Megatron tokenizer with the methods of transformers' tokenizers that Verbatim uses."""

    clean_up_tokenization_spaces = False

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.bos_token_id, self.eos_token_id = (_id(tokenizer, name) for name in ("bos", "eod"))
        self.all_special_ids = [i for i in (self.bos_token_id, self.eos_token_id) if i is not None]

    def __len__(self) -> int:
        return int(self._tokenizer.vocab_size)

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [int(i) for i in self._tokenizer.tokenize(text)]}

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return self.decode([token_id])

    def decode(self, ids: list[int], skip_special_tokens: bool = False, **_: Any) -> str:
        """Return the text of ids; `skip_special_tokens` is passed on if the tokenizer accepts it."""
        detokenize = self._tokenizer.detokenize
        if accepts(detokenize, ids, skip_special_tokens=True):
            return str(detokenize(ids, skip_special_tokens=skip_special_tokens))
        return str(detokenize(ids))


def adapted(tokenizer: Any) -> Any:
    """Return a tokenizer with transformers' interface; a Megatron one, with `detokenize`, is wrapped."""
    return _MegatronAdapter(tokenizer) if hasattr(tokenizer, "detokenize") else tokenizer


def eod_of(tokenizer: Any) -> int | None:
    """Return the end-of-document id; None if there is none."""
    return _id(adapted(tokenizer), "eos_token_id")


def tokenize_prompt(tokenizer: Any, prompt: str, add_BOS: bool = False) -> list[int]:
    """Return the ids of a prompt, with exactly one leading `bos` if `add_BOS`, else without any.

    Raises:
        InvalidRequest: `add_BOS`, and the tokenizer has no `bos`.
    """
    hf = adapted(tokenizer)
    bos = _id(hf, "bos_token_id")
    if add_BOS and bos is None:
        raise InvalidRequest("add_BOS=True: the tokenizer has no bos")
    ids = Tokenizer(hf).encode(prompt) if hf is tokenizer else hf(prompt)["input_ids"]
    rest = list(dropwhile(lambda i: i == bos, ids))
    return [bos, *rest] if add_BOS and bos is not None else rest


def detokenize(
    tokenizer: Any,
    tokens: Sequence[int],
    remove_EOD: bool = True,
    skip_special_tokens: bool = True,
) -> str:
    """Return the text of ids, without trailing `eod`s if `remove_EOD`.

    `skip_special_tokens` is passed on if the tokenizer accepts it.
    """
    ids, eod = list(tokens), eod_of(tokenizer)
    while remove_EOD and ids and ids[-1] == eod:
        ids.pop()
    return str(adapted(tokenizer).decode(ids, skip_special_tokens=skip_special_tokens))


def _id(tokenizer: Any, name: str) -> int | None:
    try:  # Megatron's base class raises for a missing attribute
        value = operator.index(getattr(tokenizer, name))
    except (AttributeError, NotImplementedError, TypeError):
        return None
    return value if value >= 0 else None
