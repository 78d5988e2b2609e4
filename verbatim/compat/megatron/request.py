"""`InferenceRequest`, one prompt and its outputs, and its `SamplingParams`."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from torch import Tensor

from verbatim.common.checks import check_fields, check_kind, integer, number, optional_integer
from verbatim.errors import InvalidRequest, NotSupported
from verbatim.params import MAX_LOGPROBS

_NUMBERS: dict[str, tuple[Any, ...]] = {
    "temperature": (number, 0.0),
    "top_k": (integer, 0),
    "top_p": (number, 0.0, 1.0),
    "top_n_logprobs": (integer, 0, MAX_LOGPROBS),
    "min_tokens": (integer, 0),
    "streaming_interval": (integer, 1),
    "num_tokens_to_generate": (optional_integer, 0),
    "num_tokens_total": (optional_integer, 0),
    "termination_id": (optional_integer, -1),
    "seed": (optional_integer, 0, 2**63 - 1),
}
# Switches that only matter between Megatron's processes, with the reason why they must be off.
_REFUSED = {
    "streaming": "there is no reply socket; pass an AsyncStream in active_streams",
    "do_kv_handoff": "KV blocks are not transferred to another engine",
}


@dataclass(slots=True)
class SamplingParams:
    """Sampling parameters of one request, under Megatron's names.

    Fields may be changed until the request is submitted, which checks them again. Other attributes
    can't be set.

    Attributes:
        temperature: logits are divided by it; 0 takes the largest logit.
        top_k: keep the k largest logits; 0 keeps all; 1 takes the largest, whatever the temperature.
        top_p: keep the fewest tokens that reach this probability; 0.0 and 1.0 keep all. With
            `top_k`, the k largest are selected first.
        return_log_probs: report log-probs of the raw distribution, for prompt and completion.
        skip_prompt_log_probs: omit the prompt's top-n and, in a dynamic request, its log-probs.
        return_segments: report the text of every token, `segments` and `generated_segments`.
        num_tokens_to_generate: maximum number of new tokens, at least 0; clamped to the length limit, with
            a warning. None generates up to the limit.
        num_tokens_total: the same for prompt and completion together; only one of the two may be set.
        termination_id: id that ends the completion; None takes the tokenizer's `eod`, -1 disables it.
        top_n_logprobs: report the n likeliest tokens of every position as {text: log-prob}.
        return_prompt_top_n_logprobs: deprecated; follows from top_n_logprobs and skip_prompt_log_probs.
        add_BOS: begin a text prompt with the tokenizer's `bos`; by default it has none.
            Prompts given as ids are not changed.
        min_tokens: number of tokens before which the termination id is not drawn, and no stop word ends
            the completion.
        stop_words: strings that end the completion. The text is cut before them, the ids are not.
        detokenize_stop_sequence: keep the stop word, or the `eod`, in the text.
        return_prompt_tokens: no effect: a finished request always has its prompt's ids.
        detokenize_generations: False returns ids without text.
        streaming, do_kv_handoff: only the defaults are accepted. `streaming_interval` has no effect: an
            `AsyncStream` receives every step's tokens.
        seed: in [0, 2**63); None draws a seed per batch from torch's default generator.
        no_early_termination: continue after the termination id.
        no_detokenize_streaming_text: send ids and no text to streams.

    Raises:
        InvalidRequest: a value out of range, or contradicting values.
        NotSupported: an unsupported field.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    return_log_probs: bool = False
    skip_prompt_log_probs: bool = False
    return_segments: bool = False
    num_tokens_to_generate: int | None = None
    num_tokens_total: int | None = None
    termination_id: int | None = None
    top_n_logprobs: int = 0
    return_prompt_top_n_logprobs: bool = False
    add_BOS: bool = False  # noqa: N815
    min_tokens: int = 0
    stop_words: list[str] | None = None
    detokenize_stop_sequence: bool = False
    return_prompt_tokens: bool = False
    detokenize_generations: bool = True
    streaming: bool = False
    streaming_interval: int = 1
    do_kv_handoff: bool = False
    seed: int | None = None
    no_early_termination: bool = False
    no_detokenize_streaming_text: bool = False

    def __post_init__(self) -> None:
        self._resolve(prompt_top_n_requested=self.return_prompt_top_n_logprobs)

    def add_attributes(self, attribute_value_pair: Mapping[str, Any]) -> None:
        """Set several fields; raise NotSupported, and set none, if one is unknown."""
        if not isinstance(attribute_value_pair, Mapping):
            raise InvalidRequest(f"{attribute_value_pair!r}: must be a dict of fields and values")
        known = {field.name for field in fields(self)}
        for name in attribute_value_pair:
            if name not in known:
                raise NotSupported(
                    f"{name}: not a field; must be one of {', '.join(sorted(known))}"
                )
        for name, value in attribute_value_pair.items():
            setattr(self, name, value)
        self._resolve(
            prompt_top_n_requested=bool(attribute_value_pair.get("return_prompt_top_n_logprobs"))
        )

    @classmethod
    def of(cls, params: Any) -> SamplingParams:
        """Return `params` after checking them; the defaults for None.

        Raises:
            InvalidRequest: an object of another type. Also the errors of `check`.
        """
        if params is None:
            return cls()
        check_kind("sampling_params", params, cls, "Megatron's SamplingParams")
        checked: SamplingParams = params
        checked.check()
        return checked

    def serialize(self) -> dict[str, Any]:
        """Return the values of all fields."""
        return dataclasses.asdict(self)

    @classmethod
    def deserialize(cls, data: Mapping[str, Any]) -> SamplingParams:
        """Return parameters from the output of `serialize`."""
        params = cls()
        # Derived from the other fields; setting it is deprecated.
        params.add_attributes({**data, "return_prompt_top_n_logprobs": False})
        return params

    def check(self) -> None:
        """Raise for invalid values; called again when a request is submitted.

        Other numeric types, such as numpy's, are converted to Python's.
        """
        check_fields(self, _NUMBERS)
        for name, why in _REFUSED.items():
            if getattr(self, name):
                raise NotSupported(f"{name}=True: {why}; leave it at False")
        if self.num_tokens_to_generate is not None and self.num_tokens_total is not None:
            raise InvalidRequest(
                f"num_tokens_to_generate={self.num_tokens_to_generate} and "
                f"num_tokens_total={self.num_tokens_total}: give one of them"
            )
        check_kind("stop_words", self.stop_words, list | tuple | None, "a list of strings")

    def prompt_outputs(self, dynamic: bool) -> tuple[bool, bool]:
        """Return whether the prompt's log-probs are reported, and whether its top-n is."""
        skips = self.skip_prompt_log_probs
        logprobs = self.return_log_probs and not (skips and dynamic)
        return logprobs, self.top_n_logprobs > 0 and not skips

    def sampling(self) -> dict[str, Any]:
        """Return temperature, top-k and top-p as Verbatim's fields."""
        if self.top_k == 1:
            return {"temperature": 0.0}
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p or 1.0}

    def _resolve(self, *, prompt_top_n_requested: bool) -> None:
        self.check()
        follows = self.top_n_logprobs > 0 and not self.skip_prompt_log_probs
        if prompt_top_n_requested:
            if not follows:
                raise InvalidRequest(
                    "return_prompt_top_n_logprobs=True needs top_n_logprobs above 0 and "
                    f"skip_prompt_log_probs=False; they are {self.top_n_logprobs} and "
                    f"{self.skip_prompt_log_probs}"
                )
            warnings.warn(
                "return_prompt_top_n_logprobs is deprecated: it follows from top_n_logprobs and "
                "skip_prompt_log_probs",
                DeprecationWarning,
                stacklevel=4,
            )
        self.return_prompt_top_n_logprobs = follows


class Status(Enum):
    """The state of a request."""

    WAITING_IN_QUEUE = 1
    ACTIVE_AND_GENERATING_TOKENS = 2
    ACTIVE_BUT_NOT_GENERATING_TOKENS = 3
    COMPLETED = 4
    FAILED = 5


TopN = list[dict[str, float]]  # for each position {text: log-prob}, likeliest first


@dataclass(kw_only=True, slots=True)
class InferenceRequest:
    """One request of a static batch. Fields below `status` are set when it ends, and cleared when it starts.

    Ids, log-probs and top-n of the completion have the same length, and include the token that ended it.
    Only text is cut. If two ids have the same text, a top-n entry keeps the likelier.

    Attributes:
        request_id: an integer chosen by the caller.
        prompt: the text, which is tokenized if `prompt_tokens` is None.
        sampling_params: None takes the defaults.
        inference_parameters: the former name of `sampling_params`.
        prompt_tokens: ids, `[P]`; they override `prompt`. Ids that were tokenized from `prompt` are
            tokenized again when the request is reused.
        encoder_prompt: not supported.
        text: prompt and completion together; without a `prompt` it starts with the text of the ids.
        segments, generated_segments: the text of each token, with and without the prompt's.
        generated_tokens: `[N]` int64; a list in a dynamic request.
        generated_sequence_lengths: N of every request of the batch, `[B]` int32.
        prompt_log_probs, prompt_top_n_logprobs: P - 1 entries, from the prompt's second token on.
        routing_indices: the experts of each token but the last, `[P + N - 1, layers, k]` int16, if the
            model's config has `moe_enable_routing_replay`.
        tpot: seconds from each token to the next; the first entry counts from arrival.
        error: the exception of a failed request.
    """

    request_id: int
    prompt: str | None = None
    sampling_params: SamplingParams | None = None
    inference_parameters: SamplingParams | None = None
    prompt_tokens: list[int] | Tensor | None = None
    prompt_length: int | None = None
    arrival_time: float | None = None
    encoder_prompt: str | None = None
    status: Status | None = None

    text: str | None = None
    generated_text: str | None = None
    segments: list[str] | None = None
    generated_segments: list[str] | None = None
    generated_sequence_lengths: Tensor | None = None
    generated_tokens: Tensor | list[int] | None = None
    prompt_log_probs: list[float] | None = None
    generated_log_probs: list[float] | None = None
    prompt_top_n_logprobs: TopN | None = None
    generated_top_n_logprobs: TopN | None = None
    generated_length: int | None = None
    routing_indices: Tensor | None = None
    tpot: list[float] = field(default_factory=list)
    error: BaseException | None = None
    # The ids of the last prompt that was tokenized here.
    _tokenized: list[int] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.inference_parameters is not None and self.sampling_params is None:
            warnings.warn(
                "inference_parameters was renamed to sampling_params",
                DeprecationWarning,
                stacklevel=3,
            )
            self.sampling_params = self.inference_parameters

    def clear_outputs(self) -> None:
        """Set all fields below `status` to their defaults."""
        blank = DynamicInferenceRequest(request_id=0)
        names = [each.name for each in fields(blank) if each.init]
        for name in names[names.index("status") + 1 :]:
            if hasattr(self, name):
                setattr(self, name, getattr(blank, name))


@dataclass(kw_only=True, slots=True)
class DynamicInferenceRequest(InferenceRequest):
    """One request of a dynamic batch; `generated_tokens` grows with every step.

    Attributes:
        ttft: seconds from arrival to the first token.
        latency: seconds from arrival to the last token.
        num_cached_tokens: prompt tokens with cached K and V.
    """

    ttft: float | None = None
    latency: float | None = None
    num_cached_tokens: int = 0

    def succeeded(self) -> bool:
        """Return whether the request ended without an error."""
        return self.status is Status.COMPLETED

    def failed(self) -> bool:
        """Return whether the request ended with an `error`."""
        return self.status is Status.FAILED
