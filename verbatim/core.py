"""The nouns: a `Request` from admission to result, its `Sequence`s, and what is handed back.

Ids are the truth; text is a view of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from verbatim.params import SamplingParams

TopLogprobs = list[tuple[int, float]]  # (id, log-prob), likeliest first


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"  # end of sequence, a stop id or a stop string; `stop_reason` says which
    LENGTH = "length"  # `max_tokens`, or the length limit
    ABORT = "abort"  # the caller went away
    ERROR = "error"


StopReason = int | str | tuple[int, ...] | None  # the id, the string or the ids; None for length


class Watch(Protocol):
    """Follows one completion token by token, and says what its text is and when it ends."""

    @property
    def text(self) -> str:
        """The text so far, cut where a stop string begins."""
        ...

    def push(self, token_id: int) -> tuple[FinishReason, StopReason] | None:
        """Take the next token in; the reason if it ends the completion."""
        ...

    def take(self) -> str:
        """Text that is final and was not handed out before."""
        ...

    def finish(self, reason: FinishReason) -> None:
        """End it for a reason that no token gave."""
        ...


@dataclass(slots=True)
class Completion:
    """One finished completion of a prompt.

    `token_ids`, `logprobs`, `sampled_logprobs` and, where asked for, `top_logprobs` have the same
    length always: every token through the one that completed a stop. Only `text` is cut.
    """

    index: int  # which of the request's `n`
    sample_index: int  # of its noise; `index`, unless the request was told to start elsewhere
    text: str  # "" where the engine has no tokenizer
    token_ids: list[int]
    logprobs: list[float]  # of the raw model distribution at temperature 1, one a token
    sampled_logprobs: list[float]  # of the distribution drawn from; 0.0 at temperature 0
    top_logprobs: list[TopLogprobs] | None  # only with SamplingParams(logprobs=N)
    finish_reason: FinishReason
    stop_reason: StopReason
    seed: int  # reproduces this completion, together with `sample_index`


@dataclass(slots=True)
class Metrics:
    """Where a request's time went. Seconds on a monotonic clock."""

    queue_s: float = 0.0  # from arrival to its first forward
    first_token_s: float = 0.0  # from arrival to its first token
    total_s: float = 0.0  # from arrival to its last token
    preemptions: int = 0


@dataclass(slots=True)
class Result:
    """What became of one prompt."""

    request_id: str
    prompt: str | None  # None where ids were given
    prompt_token_ids: list[int]
    prompt_logprobs: list[float | None] | None  # P entries, the first None; when asked for
    prompt_top_logprobs: list[TopLogprobs | None] | None
    outputs: list[Completion]  # in order of `index`
    num_cached_tokens: int  # prompt tokens whose KV was reused instead of computed
    metrics: Metrics
    weight_version: int


@dataclass(slots=True)
class Delta:
    """What one step added to one completion of a streamed request.

    The `text`s of a completion's deltas join to its final text; nothing that might belong to a stop
    string or to half a character is sent before it is known.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[float]
    sampled_logprobs: list[float]
    top_logprobs: list[TopLogprobs] | None
    finish_reason: FinishReason | None = None
    stop_reason: StopReason = None
    result: Result | None = None  # with the last delta of the request


@dataclass(slots=True, eq=False)
class Sequence:
    """One growing row of ids with its block table: one sample of one request."""

    request: Request
    index: int
    watch: Watch
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampled_logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0  # positions whose K and V are in the store
    finish_reason: FinishReason | None = None
    stop_reason: StopReason = None
    num_sent: int = 0  # tokens already handed out as deltas

    @property
    def sample_index(self) -> int:
        """Which of the noise's samples this sequence draws with."""
        return self.request.first_sample + self.index

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_ids) + len(self.output_ids)

    @property
    def num_uncomputed(self) -> int:
        """Rows that still need a forward before the next token can be drawn."""
        return self.num_tokens - self.num_computed

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Ids at positions `start` to `stop`, prompt and completion as one row."""
        prompt = self.request.prompt_ids
        if stop <= len(prompt):
            return prompt[start:stop]
        if start >= len(prompt):
            return self.output_ids[start - len(prompt) : stop - len(prompt)]
        return prompt[start:] + self.output_ids[: stop - len(prompt)]


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and everything asked of it; the same object from admission to result."""

    request_id: str
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int  # settled: `params.max_tokens` or what the length limit leaves
    eos_ids: frozenset[int]  # empty with `ignore_eos`
    bad_word_ids: list[tuple[int, ...]]
    arrival: float  # time.monotonic()
    first_sample: int = 0  # sample index of completion 0
    sequences: list[Sequence] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)  # for positions 1, 2, ...
    prompt_top_logprobs: list[TopLogprobs] = field(default_factory=list)
    metrics: Metrics = field(default_factory=Metrics)
    weight_version: int = 0
    error: BaseException | None = None
    result: Result | None = None  # set once, when the last sequence has ended

    @property
    def finished(self) -> bool:
        return self.result is not None or self.error is not None
