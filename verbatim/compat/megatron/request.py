"""`InferenceRequest`: one prompt and its outputs."""

from __future__ import annotations

import warnings
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum

from torch import Tensor

from verbatim.compat.megatron.params import SamplingParams


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
    """One request of a static batch. Fields below `status` are filled in when it has ended.

    It may be reused: these fields are cleared when it starts.

    Ids, log-probs and top-n of the completion have the same length: every token through the one
    that ended it. Only text is cut. If two ids have the same text, a top-n entry keeps the likelier.

    Attributes:
        request_id: any number, chosen by the caller.
        prompt: the text, tokenized if `prompt_tokens` is None.
        sampling_params: None takes the defaults.
        inference_parameters: the former name of `sampling_params`.
        prompt_tokens: ids, `[P]`; they override `prompt`. If they were tokenized from `prompt`, that
            is repeated when the request is reused.
        encoder_prompt: not supported.
        text: prompt and completion together; without a `prompt` it starts with the text of the ids.
        segments, generated_segments: the text of each token, of both and of the completion alone.
        generated_tokens: `[N]` int64; a list in a dynamic request.
        generated_sequence_lengths: N of every request of the batch, `[B]` int32.
        prompt_log_probs, prompt_top_n_logprobs: P - 1 entries, for the prompt's second token and on.
        routing_indices: the experts of each token but the last, `[P + N - 1, layers, k]` int16, if the
            model's config has `moe_enable_routing_replay`.
        tpot: seconds from each token to the next; the first from arrival.
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
        dynamic = isinstance(self, DynamicInferenceRequest)
        own = fields(DynamicInferenceRequest if dynamic else InferenceRequest)  # of no subclass
        names = [each.name for each in own]
        for each in own[names.index("status") + 1 :]:
            if each.init:
                factory = each.default_factory
                value = each.default if factory is MISSING else factory()
                setattr(self, each.name, value)


@dataclass(kw_only=True, slots=True)
class DynamicInferenceRequest(InferenceRequest):
    """One request of a dynamic batch; `generated_tokens` grows with every step.

    Attributes:
        ttft: seconds from arrival to the first token.
        latency: seconds from arrival to the last.
        num_cached_tokens: prompt tokens with cached K and V.
    """

    ttft: float | None = None
    latency: float | None = None
    num_cached_tokens: int = 0

    def succeeded(self) -> bool:
        """Return whether it ended without an error."""
        return self.status is Status.COMPLETED

    def failed(self) -> bool:
        """Return whether it ended with `error`."""
        return self.status is Status.FAILED
