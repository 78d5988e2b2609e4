"""The nouns: a `Request` from admission to result, its `Sequence`s, and what is handed back.

Ids are the truth; text is a view of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from torch import Tensor

from verbatim.batch import Candidate
from verbatim.beam import BeamSearch
from verbatim.params import SamplingParams

TopLogprobs = list[tuple[int, float]]  # (id, log-prob), likeliest first


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"  # end of sequence, a stop id or a stop string; `stop_reason` says which
    LENGTH = "length"  # `max_tokens`, or the length limit
    TIMEOUT = "timeout"  # `timeout_s` was over
    ABORT = "abort"  # the caller went away
    ERROR = "error"


StopReason = int | str | tuple[int, ...] | None  # the id, the string or the ids; None for length


class Watch(Protocol):
    """Follows one completion token by token, and says what its text is and when it ends."""

    @property
    def text(self) -> str:
        """The text so far, cut where a stop string begins; without what was told before it was resumed."""
        ...

    @property
    def whole_text(self) -> str:
        """The same with what was told before."""
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

    def fork(self) -> Watch:
        """A copy that goes its own way from here."""
        ...


class GrammarState(Protocol):
    """Where one completion stands in the structure it must have."""

    def mask(self) -> Tensor:
        """The ids that may come next: int32 `[ceil(V / 32)]`, bit `i % 32` of word `i // 32`."""
        ...

    def push(self, token_id: int) -> bool:
        """Take the next token in; True if nothing can follow it, not even an end of sequence."""
        ...

    def fork(self) -> GrammarState:
        """A copy that goes its own way from here."""
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
    sampled_logprobs: list[float] | None  # of the distribution drawn from; 0.0 at temperature 0;
    # None for beams, which are not drawn
    top_logprobs: list[TopLogprobs] | None  # only with SamplingParams(logprobs=N)
    finish_reason: FinishReason
    stop_reason: StopReason
    seed: int  # reproduces this completion, together with `sample_index`
    # Of the weights each token was made with, as `update_weights` counts them; as long as `token_ids`.
    weight_versions: list[int]
    score: float | None = None  # of a beam: its summed log-probs over its length to the penalty
    hidden_states: Tensor | None = None  # [N, H]: what the head saw when it made each token
    # [P + N - 1, layers, k] int16: the experts each token was sent to. Fewer positions where it was
    # aborted, or ran out of time, while its K and V were evicted.
    routing: Tensor | None = None


@dataclass(slots=True)
class DraftFigures:
    """What drafting came to, for one request or since an engine was opened.

    Entry `j` of a list counts the `j + 1`-th tokens of drafts.
    """

    num_drafted: list[int] = field(default_factory=list)  # tokens that a forward looked at
    num_accepted: list[int] = field(default_factory=list)  # of those: what the model drew itself
    num_forwards: int = 0  # in which a sequence that could be drafted for drew tokens, each counted
    num_tokens: int = 0  # drawn in those
    num_cut: int = 0  # proposed ids that can't come next, or were too many; with all behind them
    num_errors: int = 0  # times that the proposer raised, or answered nonsense
    time_s: float = 0.0  # spent in the proposer

    @property
    def acceptance(self) -> list[float]:
        """Of the tokens drafted at each place of a draft, the share that stood; NaN for none."""
        pairs = zip(self.num_accepted, self.num_drafted, strict=True)
        return [accepted / drafted if drafted else math.nan for accepted, drafted in pairs]

    @property
    def tokens_per_forward(self) -> float:
        """Drawn for a sequence in one forward, at the mean; 1 without drafts, NaN before any."""
        return self.num_tokens / self.num_forwards if self.num_forwards else math.nan

    def note(self, drafted: int, accepted: int) -> None:
        """A forward has looked at `drafted` tokens, of which the first `accepted` stand."""
        missing = [0] * (drafted - len(self.num_drafted))
        self.num_drafted += missing
        self.num_accepted += missing
        for j in range(drafted):
            self.num_drafted[j] += 1
            self.num_accepted[j] += j < accepted


@dataclass(slots=True)
class Metrics:
    """Where a request's time went. Seconds on a monotonic clock."""

    queue_s: float = 0.0  # from arrival to its first forward
    first_token_s: float = 0.0  # from arrival to its first token
    total_s: float = 0.0  # from arrival to its last token
    per_token_s: float = 0.0  # from the first token to the last, over the tokens between
    num_cached_tokens: int = 0  # prompt tokens whose KV was there already
    preemptions: int = 0
    draft: DraftFigures = field(default_factory=DraftFigures)


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
    weight_version: int  # of the weights at its end
    prompt_hidden_states: Tensor | None = (
        None  # [P - 1, H]: what the head saw before each prompt token
    )


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
    sampled_logprobs: list[float] | None
    top_logprobs: list[TopLogprobs] | None
    finish_reason: FinishReason | None = None
    stop_reason: StopReason = None
    result: Result | None = None  # with the last delta of the request
    num_accepted: int = 0  # of `token_ids`: so many of the first were drafted, and stand


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """One growing row of ids with its block table: one sample, or one beam, of one request."""

    request: Request
    index: int
    watch: Watch
    grammar: GrammarState | None = None
    output_ids: list[int] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)  # one a token
    logprobs: list[float] = field(default_factory=list)
    sampled_logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)  # [H] each, one a token
    routing: Tensor | None = None  # read from its blocks when it ends
    number: int = 0  # the order of arrival among equals, kept through any preemption
    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)  # of its full blocks, computed or not
    num_computed: int = 0  # positions whose K and V are in the store
    num_remembered: int = 0  # its first blocks that others can find by their keys
    # By layer of those that draft for the model: positions whose K and V are in its blocks.
    num_draft_computed: dict[int, int] = field(default_factory=dict)
    candidates: list[Candidate] | None = (
        None  # how a beam may go on, until its request's others know
    )
    score: float = 0.0  # of a beam
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

    @property
    def unread_prompt_row(self) -> int | None:
        """The first prompt position whose row is still to be reported on; None where nothing is."""
        request = self.request
        if not request.reads_prompt_rows or self.index != 0:
            return None
        known = request.num_prompt_rows_read
        return known if known < request.num_given - 1 else None

    @property
    def rank(self) -> tuple[float, int]:
        """Smaller goes first, and is preempted last."""
        return (self.request.rank, self.number)

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Ids at positions `start` to `stop`, prompt and completion as one row."""
        prompt = self.request.prompt_ids
        if stop <= len(prompt):
            return prompt[start:stop]
        if start >= len(prompt):
            return self.output_ids[start - len(prompt) : stop - len(prompt)]
        return prompt[start:] + self.output_ids[: stop - len(prompt)]

    def rewind_drafters(self, num_slots: int) -> None:
        """Of what drafting layers have computed of it, at most the first `num_slots` are there."""
        for layer, count in self.num_draft_computed.items():
            self.num_draft_computed[layer] = min(count, num_slots)

    def push(self, token_id: int) -> None:
        """Grow by one token; its watch decides whether that ends it, or its structure where nothing can
        follow.
        """
        self.output_ids.append(token_id)
        self.weight_versions.append(self.request.weight_version)
        ended = self.watch.push(token_id)
        complete = self.grammar is not None and self.grammar.push(token_id)
        if ended is None and complete:
            self.watch.finish(FinishReason.STOP)
            ended = FinishReason.STOP, None
        if ended is not None:
            self.finish_reason, self.stop_reason = ended

    def fork(self, index: int) -> Sequence:
        """A copy of what was made so far, without blocks, that goes its own way from here."""
        return Sequence(
            self.request,
            index,
            self.watch.fork(),
            None if self.grammar is None else self.grammar.fork(),
            output_ids=list(self.output_ids),
            weight_versions=list(self.weight_versions),
            logprobs=list(self.logprobs),
            top_logprobs=list(self.top_logprobs),
            hidden=list(self.hidden),
            keys=list(self.keys),
            number=self.number,
        )


@dataclass(slots=True, eq=False, weakref_slot=True)
class Holding:
    """One session's share of the KV store.

    Attributes:
        max_length: tokens that it may come to.
        idle_timeout_s: how long it may be unused until its blocks and its room are given back; None for ever.
        token_ids: whose K and V are in `blocks`, one a position.
        blocks: held while it is idle; during a turn its sequence has them.
        num_remembered: its first blocks that others can find by their keys.
        num_draft_computed: as of a `Sequence`.
        is_private: what it holds was computed before everything was forgotten, and nobody else may find it.
        num_reserved: blocks of the pool that no other session may count on.
        in_use: a turn is under way.
        last_used: when the last one ended, on the monotonic clock.
        closed: nothing is kept any more.
    """

    max_length: int
    idle_timeout_s: float | None = None
    token_ids: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    num_remembered: int = 0
    num_draft_computed: dict[int, int] = field(default_factory=dict)
    is_private: bool = False
    num_reserved: int = 0
    in_use: bool = False
    last_used: float = field(default_factory=time.monotonic)
    closed: bool = False
    turn: Sequence | None = None  # which has its blocks now

    def cut(self, num_tokens: int, block_size: int) -> list[int]:
        """Keep the first `num_tokens` positions; the blocks that hold none of them."""
        needed = -(-num_tokens // block_size)
        rest = self.blocks[needed:]
        del self.blocks[needed:], self.token_ids[num_tokens:]
        self.num_remembered = min(self.num_remembered, len(self.token_ids) // block_size)
        for layer, count in self.num_draft_computed.items():
            # A slot of a drafting layer depends on the tokens behind it, too.
            self.num_draft_computed[layer] = min(count, max(0, len(self.token_ids) - 1 - layer))
        return rest


PRIORITY_STEP_S = 60.0  # how long a request waits until it goes before one a priority above it


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and everything asked of it; the same object from admission to result.

    Its first sequence computes the prompt; the others begin where that is done. A beam search has as
    many sequences as there are beams alive, best first, and in the end those that are handed out.
    """

    request_id: str
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    max_tokens: (
        int  # settled: `resumed_ids`, and `params.max_tokens` or what the length limit leaves
    )
    eos_ids: frozenset[int]  # empty with `ignore_eos`
    bad_word_ids: list[tuple[int, ...]]
    arrival: float  # time.monotonic()
    begin: Callable[[Request], None]  # makes its first sequences, with nothing done yet
    first_sample: int = 0  # sample index of completion 0
    resumed_ids: list[int] = field(default_factory=list)  # of its completion, made before
    resumed_text: str = ""  # what was told of those
    holding: Holding | None = None  # of the session whose turn it is
    sequences: list[Sequence] = field(default_factory=list)
    search: BeamSearch[Sequence] | None = None  # with `num_beams`
    prompt_logprobs: list[float] = field(default_factory=list)  # for positions 1, 2, ...
    prompt_top_logprobs: list[TopLogprobs] = field(default_factory=list)
    prompt_hidden: list[Tensor] = field(default_factory=list)  # [H] each, for positions 1, 2, ...
    metrics: Metrics = field(default_factory=Metrics)
    begun: bool = False  # some of it was scheduled once
    num_closed: int = 0  # sequences whose end was handed out
    weight_version: int = 0  # of the weights its next token is made with
    streamed: bool = False  # somebody reads it while it grows, so that what was sent must stand
    error: BaseException | None = None
    result: Result | None = None  # set once, when the last sequence has ended

    @property
    def finished(self) -> bool:
        return self.result is not None or self.error is not None

    @property
    def num_given(self) -> int:
        """Tokens that stand before the first one that it makes."""
        return len(self.prompt_ids) + len(self.resumed_ids)

    @property
    def makes_nothing(self) -> bool:
        """Was it asked for no token?"""
        return self.max_tokens == len(self.resumed_ids)

    def begin_again(self) -> None:
        """As if nothing had been done for it yet; its seed and its place among others stay."""
        self.prompt_logprobs, self.prompt_top_logprobs, self.prompt_hidden = [], [], []
        self.metrics, self.begun, self.num_closed = Metrics(), False, 0
        self.begin(self)

    @property
    def rank(self) -> float:
        """Smaller goes first: the arrival, moved by the priority. So nobody waits for ever."""
        return self.arrival + PRIORITY_STEP_S * self.params.priority

    def note_token(self) -> None:
        """It has made a token; the first one's time is kept."""
        if self.metrics.first_token_s == 0.0:
            self.metrics.first_token_s = time.monotonic() - self.arrival

    @property
    def reads_prompt_rows(self) -> bool:
        """Does it report something of every prompt position, so that none can come from a cache?"""
        return self.params.prompt_logprobs is not None or self.params.hidden_states

    @property
    def num_prompt_rows_read(self) -> int:
        """Prompt positions whose report is in; they stay in through an eviction."""
        wanted_hidden = self.params.hidden_states and self.params.prompt_logprobs is None
        return len(self.prompt_hidden if wanted_hidden else self.prompt_logprobs)
