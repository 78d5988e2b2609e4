"""`InferenceRequest`: one prompt going in, everything that was made of it coming back."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor

from verbatim.compat.megatron.params import SamplingParams


class Status(Enum):
    """Where a request stands."""

    WAITING_IN_QUEUE = 1
    ACTIVE_AND_GENERATING_TOKENS = 2
    ACTIVE_BUT_NOT_GENERATING_TOKENS = 3
    COMPLETED = 4
    FAILED = 5


TopN = list[dict[str, float]]  # for each position {text: log-prob}, likeliest first

_OUTPUTS = (
    "text",
    "generated_text",
    "segments",
    "generated_segments",
    "generated_sequence_lengths",
    "generated_tokens",
    "prompt_log_probs",
    "generated_log_probs",
    "prompt_top_n_logprobs",
    "generated_top_n_logprobs",
    "generated_length",
    "error",
)


@dataclass(kw_only=True, slots=True)
class InferenceRequest:
    """One request of a static batch. What is filled in when it has ended stands below `status`.

    It may be used again: when it begins, what was filled in before is cleared.

    Ids, log-probs and top-n of the completion have the same length always: every token through the one
    that ended it. Only text is cut. Where two ids have the same text, a top-n entry keeps the likelier.

    Attributes:
        request_id: any number; the caller's own.
        prompt: the text, tokenized where `prompt_tokens` is None.
        sampling_params: None takes the defaults.
        inference_parameters: the former name of `sampling_params`.
        prompt_tokens: ids, `[P]`; they win over `prompt`. Those that were made of a prompt here are made
            anew when the request is used again.
        encoder_prompt: refused, there are no encoders here.
        text: prompt and completion together; of a `prompt` whose ids were not the ones used, the text of
            these.
        segments, generated_segments: the text of each token, of both and of the completion alone.
        generated_tokens: `[N]` int64; a list where the request is dynamic.
        generated_sequence_lengths: N of every request of the batch, `[B]` int32.
        prompt_log_probs, prompt_top_n_logprobs: P - 1 entries, for the prompt's second token and on.
        tpot: seconds from each token to the next; the first from the arrival.
        error: what ended it, where it failed.
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
    tpot: list[float] = field(default_factory=list)
    error: BaseException | None = None
    # The last prompt that was tokenized here, and its ids.
    _tokenized: tuple[str, list[int]] | None = field(
        default=None, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.inference_parameters is not None and self.sampling_params is None:
            warnings.warn(
                "inference_parameters is now called sampling_params",
                DeprecationWarning,
                stacklevel=3,
            )
            self.sampling_params = self.inference_parameters


@dataclass(kw_only=True, slots=True)
class DynamicInferenceRequest(InferenceRequest):
    """One request of a dynamic batch; `generated_tokens` grows with every step.

    Attributes:
        ttft: seconds from arrival to the first token.
        latency: seconds from arrival to the last.
        num_cached_tokens: prompt tokens whose K and V were there already.
    """

    ttft: float | None = None
    latency: float | None = None
    num_cached_tokens: int = 0

    def succeeded(self) -> bool:
        """It ended without an error."""
        return self.status is Status.COMPLETED

    def failed(self) -> bool:
        """An error ended it; `error` says which."""
        return self.status is Status.FAILED


def clear_outputs(request: InferenceRequest) -> None:
    """Forget what became of it the last time."""
    for name in _OUTPUTS:
        setattr(request, name, None)
    request.tpot = []
    if isinstance(request, DynamicInferenceRequest):
        request.ttft = request.latency = None
        request.num_cached_tokens = 0
