"""The nouns: `Request` and its `Sequence`s, and the results returned to the caller.

Ids are the truth; text is a view of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from verbatim.batch import Candidates, SampleRow, Support
from verbatim.beam import BeamSearch
from verbatim.params import SamplingParams
from verbatim.sampling.stopping import FinishReason as FinishReason
from verbatim.sampling.stopping import StopReason as StopReason
from verbatim.sampling.stopping import StopWatch

if TYPE_CHECKING:
    from verbatim.sampling.grammar import StructureState

TopLogprobs = list[tuple[int, float]]  # (id, log-prob), likeliest first


class BadWords:
    """The banned token sequences of a request; false if there are none."""

    def __init__(self, sequences: Iterable[tuple[int, ...]]) -> None:
        self._last: dict[tuple[int, ...], list[int]] = {}
        for *before, last in sequences:
            self._last.setdefault(tuple(before), []).append(last)
        self._lengths = sorted({len(before) for before in self._last})

    def __bool__(self) -> bool:
        return bool(self._last)

    @property
    def num_history(self) -> int:
        """Number of last ids that `blocked` needs."""
        return self._lengths[-1] if self._lengths else 0

    def blocked(self, history: SequenceOf[int]) -> list[int]:
        """Return the ids that would complete a banned sequence after these ids."""
        end = len(history)
        blocked = [
            self._last.get(tuple(history[end - length :]), ())
            for length in self._lengths
            if length <= end
        ]
        return list(dict.fromkeys(token_id for ids in blocked for token_id in ids))


@dataclass(slots=True)
class Completion:
    """One finished completion of a prompt.

    `token_ids`, `logprobs`, `sampled_logprobs` and, if requested, `top_logprobs` always have the same
    length: every token through the one that completed a stop. Only `text` is cut.
    """

    index: int  # 0 to `n - 1`
    sample_index: int  # of its noise: `index` plus the request's first sample index
    text: str  # "" where the engine has no tokenizer
    token_ids: list[int]
    logprobs: list[float]  # of the raw model distribution at temperature 1, one per token
    # Of the distribution drawn from; 0.0 at temperature 0. None for beams, which are not drawn.
    sampled_logprobs: list[float] | None
    top_logprobs: list[TopLogprobs] | None  # only with SamplingParams(logprobs=N)
    finish_reason: FinishReason
    stop_reason: StopReason
    seed: int  # reproduces this completion, together with `sample_index`
    # The weight version that generated each token, as counted by `update_weights`; one per token.
    weight_versions: list[int]
    # The ids that the filters left to draw each token from, ascending, None for all; and the logarithm of
    # their share of the distribution before the filters. Only with SamplingParams(support=True).
    supports: list[list[int] | None] | None = None
    log_masses: list[float] | None = None
    score: float | None = None  # of a beam: summed log-probs / length ** length_penalty
    hidden_states: Tensor | None = None  # [N, H]: input of the LM head for each token
    # [P + N - 1, layers, k] int16: the experts selected for each token. Fewer positions if the request
    # was aborted or timed out while its K and V were evicted.
    routing: Tensor | None = None
    # [P + N - 1, layers, k] int32: the positions that the indexer of each layer chose for each token,
    # ascending, then -1.
    indices: Tensor | None = None


@dataclass(slots=True)
class DraftStats:
    """Statistics of speculative decoding, of one request or since the engine was opened.

    Entry `j` of a list counts the `j + 1`-th tokens of drafts.
    """

    num_drafted: list[int] = field(default_factory=list)  # draft tokens that were verified
    num_accepted: list[int] = field(default_factory=list)  # of those: equal to the model's own draw
    # Forwards in which a sequence with drafting enabled drew tokens, counted per sequence.
    num_forwards: int = 0
    num_tokens: int = 0  # tokens drawn in those forwards
    # Proposed ids that were invalid or over the requested length, with all ids behind them.
    num_cut: int = 0
    num_errors: int = 0  # exceptions and invalid results of the proposer
    time_s: float = 0.0  # spent in the proposer

    @property
    def acceptance(self) -> list[float]:
        """Acceptance rate at each position of a draft; NaN where none was drafted."""
        pairs = zip(self.num_accepted, self.num_drafted, strict=True)
        return [accepted / drafted if drafted else math.nan for accepted, drafted in pairs]

    @property
    def tokens_per_forward(self) -> float:
        """Mean number of tokens drawn per sequence and forward; 1 without drafts, NaN before any."""
        return self.num_tokens / self.num_forwards if self.num_forwards else math.nan

    def note(self, drafted: int, accepted: int) -> None:
        """Count a draft of `drafted` verified tokens, of which the first `accepted` were accepted."""
        missing = [0] * (drafted - len(self.num_drafted))
        self.num_drafted += missing
        self.num_accepted += missing
        for j in range(drafted):
            self.num_drafted[j] += 1
            self.num_accepted[j] += j < accepted


@dataclass(slots=True)
class Metrics:
    """Timings of one request, in seconds on a monotonic clock."""

    queue_s: float = 0.0  # from arrival to its first forward
    first_token_s: float = 0.0  # from arrival to its first token
    total_s: float = 0.0  # from arrival to its last token
    per_token_s: float = 0.0  # mean time between two tokens
    num_cached_tokens: int = 0  # prompt tokens with cached KV
    preemptions: int = 0
    draft: DraftStats = field(default_factory=DraftStats)


@dataclass(slots=True)
class Result:
    """The output of one prompt."""

    request_id: str
    prompt: str | None  # None where ids were given
    prompt_token_ids: list[int]
    prompt_logprobs: list[float | None] | None  # P entries, the first None; if requested
    prompt_top_logprobs: list[TopLogprobs | None] | None
    outputs: list[Completion]  # in order of `index`
    num_cached_tokens: int  # prompt tokens with reused KV
    metrics: Metrics
    weight_version: int  # of the weights when it finished
    # [P - 1, H]: input of the LM head that predicts each prompt token after the first
    prompt_hidden_states: Tensor | None = None


@dataclass(slots=True)
class Delta:
    """The output that one step added to one completion of a streamed request.

    The `text`s of a completion's deltas join to its final text. Text that may be the beginning of a stop
    string, or of an incomplete character, is delayed until that is decided.
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
    num_accepted: int = 0  # leading `token_ids` that were accepted draft tokens
    weight_versions: list[int] = field(default_factory=list)  # one per token
    supports: list[list[int] | None] | None = None  # as in `Completion`
    log_masses: list[float] | None = None


class Token(NamedTuple):
    """The records of one token of a sequence, as `Completion` describes them."""

    logprob: float = math.nan
    sampled_logprob: float = math.nan
    weight_version: int = 0
    top_logprobs: TopLogprobs | None = None
    support: Support = Support(None, 0.0)
    hidden: Tensor | None = None  # [H], if requested


@dataclass(slots=True, eq=False, kw_only=True)
class CachedBlocks:
    """The KV cache and the recurrent states of one sequence, in blocks and slots of one runner.

    Attributes:
        blocks: the block table.
        num_computed: number of tokens whose K and V are in `blocks`.
        num_indexed: number of leading blocks that are in the prefix cache.
        states: for recurrent layers, maps a number of tokens to the slot of the state after them.
        num_draft_computed: by MTP layer, number of leading positions whose K and V are in `blocks`.
    """

    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_indexed: int = 0
    states: dict[int, int] = field(default_factory=dict)
    num_draft_computed: dict[int, int] = field(default_factory=dict)

    def take_from(self, other: CachedBlocks) -> None:
        """Move everything from `other`, which is empty afterwards."""
        empty = CachedBlocks()
        for name in CachedBlocks.__slots__:
            setattr(self, name, getattr(other, name))
            setattr(other, name, getattr(empty, name))

    def truncate_draft_cache(self, num_tokens: int) -> None:
        """Keep only slots of MTP layers that depend on no token after the first `num_tokens`."""
        for layer, count in self.num_draft_computed.items():
            self.num_draft_computed[layer] = min(count, max(0, num_tokens - 1 - layer))


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence(CachedBlocks):
    """The ids of one sample, or one beam, of one request, with their KV cache."""

    request: Request
    index: int
    watch: StopWatch
    grammar: StructureState | None = None
    output_ids: list[int] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)  # the record of each of `output_ids`
    routing: Tensor | None = None  # read from its blocks when it ends
    indices: Tensor | None = None  # likewise
    number: int = 0  # order of arrival, the tie-breaker of `rank`; kept through preemption
    keys: list[bytes] = field(default_factory=list)  # of its full blocks, computed or not
    snapshot: bytes | None = None  # key of its latest state that was cached while decoding
    # Candidates of a beam's next token, until all beams of its request have theirs; and its record.
    candidates: Candidates | None = None
    next_token: Token = field(default_factory=Token)
    score: float = 0.0  # of a beam
    num_sent: int = 0  # tokens already sent as deltas
    # Of a finished sequence whose choices were lost with a stage: positions to compute again to record them.
    num_recorded: int | None = None

    @property
    def sample_index(self) -> int:
        """The sample index of this sequence's noise."""
        return self.request.first_sample + self.index

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_ids) + len(self.output_ids)

    @property
    def num_needed(self) -> int:
        """Number of tokens that must be computed: before the next one can be drawn, or to be recorded."""
        return self.num_tokens if self.num_recorded is None else self.num_recorded

    @property
    def num_uncomputed(self) -> int:
        """Number of needed tokens that are not computed yet."""
        return self.num_needed - self.num_computed

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.watch.finish_reason

    @property
    def finished(self) -> bool:
        return self.watch.finish_reason is not None

    @property
    def next_prompt_row(self) -> int | None:
        """The first position whose prompt-logprob row is missing; None if none is."""
        request = self.request
        if not request.needs_prompt_rows or self.index != 0:
            return None
        done = len(request.prompt_tokens)  # an eviction does not discard them
        return done if done < request.num_input_tokens - 1 else None

    @property
    def rank(self) -> tuple[float, int]:
        """Scheduling order: the smallest is scheduled first and preempted last."""
        return (self.request.rank, self.number)

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Return the ids at positions `start` to `stop` of prompt and completion."""
        prompt = self.request.prompt_ids
        if stop <= len(prompt):
            return prompt[start:stop]
        if start >= len(prompt):
            return self.output_ids[start - len(prompt) : stop - len(prompt)]
        return prompt[start:] + self.output_ids[: stop - len(prompt)]

    def draw_row(self, ahead: SequenceOf[int] = (), mask: Tensor | None = None) -> SampleRow:
        """Return the row that draws the token after this sequence and the ids `ahead`.

        It equals the row of plain decoding after those ids.

        Args:
            mask: the ids that the grammar allows there, as `SampleRow.mask`; None allows all.
        """
        request, params = self.request, self.request.params
        output_ids = [*self.output_ids, *ahead] if ahead else self.output_ids
        banned = sorted(request.stop_ids) if len(output_ids) < params.min_tokens else []
        if request.bad_words:
            start = max(0, self.num_tokens - request.bad_words.num_history)
            banned += request.bad_words.blocked([*self.token_ids(start, self.num_tokens), *ahead])
        if request.allowed_mask is not None:
            mask = request.allowed_mask if mask is None else mask & request.allowed_mask
        penalized = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        needs_history = penalized != (1.0, 0.0, 0.0)
        return SampleRow(
            params,
            request.seed,
            self.sample_index,
            self.num_tokens + len(ahead),
            prompt_ids=request.prompt_ids if needs_history else (),
            output_ids=output_ids if needs_history else (),
            banned_ids=banned,
            num_logprobs=params.logprobs or 0,
            mask=mask,
            num_candidates=0 if request.search is None else request.search.num_candidates,
        )

    def push(self, token_id: int, token: Token) -> None:
        """Append one token; finish the sequence if the token ends it or completes its grammar."""
        self.output_ids.append(token_id)
        self.tokens.append(token)
        if not self.watch.push(token_id) and self.grammar is not None:
            if self.grammar.push(token_id):
                self.complete()

    def complete(self) -> None:
        """Finish the sequence because its grammar is complete."""
        self.watch.finish(FinishReason.STOP)

    def fork(self, index: int) -> Sequence:
        """Return an independent copy of the output so far, without blocks."""
        return Sequence(
            self.request,
            index,
            self.watch.fork(),
            None if self.grammar is None else self.grammar.fork(),
            output_ids=list(self.output_ids),
            tokens=list(self.tokens),
            keys=list(self.keys),
            number=self.number,
        )


@dataclass(slots=True, eq=False, weakref_slot=True)
class SessionCache(CachedBlocks):
    """The KV cache of one session between its turns; during a turn, its sequence has it.

    Attributes:
        max_length: maximum number of tokens of the conversation.
        idle_timeout_s: idle time after which blocks and reservation are returned; None for no limit.
        token_ids: the computed tokens.
        adapter: the adapter that computed them, as `Request.adapter`.
        is_private: the blocks must not enter the prefix cache: they were loaded from a file, or computed
            before the prefix cache was cleared.
        last_used: end of the last turn, on the monotonic clock; infinite during a turn.
        closed: the session is closed and keeps no more blocks.
        turn: the sequence that holds the blocks during a turn.
    """

    max_length: int
    idle_timeout_s: float | None = None
    token_ids: list[int] = field(default_factory=list)
    adapter: int = 0
    is_private: bool = False
    last_used: float = field(default_factory=time.monotonic)
    closed: bool = False
    turn: Sequence | None = None


# How much earlier a request must arrive to go before one of the next better priority.
PRIORITY_STEP_S = 60.0


@dataclass(slots=True, eq=False)
class Request:
    """One prompt with its parameters, from admission to result.

    The first sequence computes the prompt; the others fork from it. During a beam search `sequences` are
    the live beams, best first; at its end, the best hypotheses.
    """

    request_id: str
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int  # with `resumed_ids`; from `params.max_tokens` and the length limit
    stop_ids: frozenset[int]  # that end a completion: `stop_token_ids` of one id, end of sequence
    bad_words: BadWords  # sequences of several ids
    arrival: float  # time.monotonic()
    begin: Callable[[Request], None]  # creates its initial sequences
    # Ids that can be drawn at any step, as a `SampleRow.mask`: `allowed_token_ids`, `bad_words` of one id.
    allowed_mask: Tensor | None = None
    first_sample: int = 0  # sample index of completion 0
    resumed_ids: list[int] = field(default_factory=list)  # completion tokens of an earlier request
    resumed_text: str = ""  # their text, already sent
    session_cache: SessionCache | None = None  # of a session's turn
    shown_ids: frozenset[int] = frozenset()  # special tokens that stay in the text
    adapter: int = 0  # `Adapter.number`; 0: none
    sequences: list[Sequence] = field(default_factory=list)
    search: BeamSearch[Sequence] | None = None  # with `num_beams`
    # The records of the prompt's positions 1, 2, ..., if log-probs or hidden states of them are requested.
    prompt_tokens: list[Token] = field(default_factory=list)
    metrics: Metrics = field(default_factory=Metrics)
    was_scheduled: bool = False
    num_lost: int = 0  # of its steps, with a stage, since its last result
    num_ended: int = 0  # sequences with a final delta
    weight_version: int = 0  # of the weights that generate its next token
    # Called with its deltas in the thread of the step; None: they are not read.
    deliver: Callable[[Delta], object] | None = None
    on_end: Callable[[], object] | None = None  # called in the thread of the step that ended it
    error: BaseException | None = None
    result: Result | None = None  # set once, when the last sequence has ended

    @property
    def finished(self) -> bool:
        return self.result is not None or self.error is not None

    @property
    def deadline(self) -> float:
        """The time at which it ends with the reason "timeout", on the monotonic clock."""
        timeout_s = self.params.timeout_s
        return math.inf if timeout_s is None else self.arrival + timeout_s

    @property
    def num_input_tokens(self) -> int:
        """Number of tokens before the first generated one."""
        return len(self.prompt_ids) + len(self.resumed_ids)

    @property
    def is_prefill_only(self) -> bool:
        """True if the request generates no tokens."""
        return self.max_tokens == len(self.resumed_ids)

    def restart(self) -> None:
        """Discard all output and start over, with the same seed and rank."""
        self.prompt_tokens = []
        self.metrics, self.was_scheduled, self.num_ended = Metrics(), False, 0
        self.begin(self)

    @property
    def rank(self) -> float:
        """Scheduling order, smallest first: the arrival time, shifted by the priority.

        New arrivals get ever larger ranks, so no request starves.
        """
        return self.arrival + PRIORITY_STEP_S * self.params.priority

    @property
    def needs_prompt_rows(self) -> bool:
        """True if logits or hidden states of every prompt position are requested, which are not cached."""
        return self.params.prompt_logprobs is not None or self.params.hidden_states
