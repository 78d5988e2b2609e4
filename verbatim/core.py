"""The core data types: `Request` and its `Sequence`s, and the results returned to the caller.

Token ids are authoritative; text is derived from them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from verbatim.batch import Candidates, IdValues, SampleRow, Support
from verbatim.params import SamplingParams
from verbatim.sampling.stopping import FinishReason as FinishReason
from verbatim.sampling.stopping import StopReason as StopReason
from verbatim.sampling.stopping import StopWatch

if TYPE_CHECKING:
    from verbatim.sampling.grammar import StructureState

TopLogprobs = list[tuple[int, float]]  # (id, log-prob), likeliest first


class BadWords:
    """The banned token sequences of a request; falsy if empty."""

    def __init__(self, sequences: Iterable[tuple[int, ...]]) -> None:
        self._last: dict[tuple[int, ...], list[int]] = {}
        for *prefix, last in sequences:
            self._last.setdefault(tuple(prefix), []).append(last)
        self._lengths = sorted({len(prefix) for prefix in self._last})

    def __bool__(self) -> bool:
        return bool(self._last)

    @property
    def num_history(self) -> int:
        """Maximum number of preceding ids that `blocked` needs."""
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
    length, and include the token that completed a stop. Only `text` is cut.
    """

    index: int  # 0 to `n - 1`
    sample_index: int  # selects the noise: `index` plus the request's first sample index
    text: str  # "" if the engine has no tokenizer
    token_ids: list[int]
    logprobs: list[float]  # of the raw model distribution at temperature 1, one per token
    # Of the distribution that was sampled; 0.0 at temperature 0. None for beams, which are not sampled.
    sampled_logprobs: list[float] | None
    top_logprobs: list[TopLogprobs] | None  # only with SamplingParams(logprobs=N)
    finish_reason: FinishReason
    stop_reason: StopReason
    seed: int  # reproduces this completion, together with `sample_index`
    # One per token: the version, as set by `update_weights`, of the weights that generated it.
    weight_versions: list[int]
    # For each token, the ids that the filters kept, ascending, None for all; and the log of their
    # probability mass before the filters. Only with SamplingParams(support=True).
    supports: list[list[int] | None] | None = None
    log_masses: list[float] | None = None
    score: float | None = None  # for beams: summed log-probs / length ** length_penalty
    hidden_states: Tensor | None = None  # [N, H]: input of the LM head for each token
    # [P + N - 1, layers, k] int16: the experts selected for each token. Fewer positions if the request
    # was aborted or timed out while its K and V were evicted.
    routing: Tensor | None = None
    # [P + N - 1, layers, k] int32: the positions that the indexer of each layer selected for each token,
    # ascending, padded with -1.
    indices: Tensor | None = None


@dataclass(slots=True)
class DraftStats:
    """Statistics of speculative decoding, of one request or since the engine was opened.

    Entry `j` of a list is about the `j + 1`-th tokens of all drafts.
    """

    num_drafted: list[int] = field(default_factory=list)  # draft tokens that were verified
    num_accepted: list[int] = field(default_factory=list)  # of those, equal to the model's draw
    # Forwards in which a sequence with drafting enabled drew tokens, counted per sequence.
    num_forwards: int = 0
    num_tokens: int = 0  # tokens drawn in those forwards
    # Proposed ids that were dropped: invalid ids and all after them, and ids beyond the requested length.
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
    num_cached_tokens: int = 0  # prompt tokens with cached K and V
    preemptions: int = 0
    draft: DraftStats = field(default_factory=DraftStats)


@dataclass(slots=True)
class Result:
    """The output of one prompt."""

    request_id: str
    prompt: str | None  # None if the prompt was given as ids
    prompt_token_ids: list[int]
    prompt_logprobs: list[float | None] | None  # if requested: P entries, the first None
    prompt_top_logprobs: list[TopLogprobs | None] | None
    outputs: list[Completion]  # in order of `index`
    num_cached_tokens: int  # prompt tokens with cached K and V
    metrics: Metrics
    weight_version: int  # when the request finished
    # [P - 1, H]: inputs of the LM head that predict the prompt tokens after the first
    prompt_hidden_states: Tensor | None = None


@dataclass(slots=True)
class Delta:
    """The output that one step added to one completion of a streamed request.

    The `text`s of a completion's deltas join to its final text. Text that may begin a stop string, or is
    part of an incomplete character, is held back until this is known.
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
    """The values recorded for one token of a sequence, as described in `Completion`."""

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
        num_computed: number of tokens with K and V in `blocks`.
        num_indexed: number of leading blocks that are in the prefix cache.
        states: for recurrent layers, maps a number of tokens to the slot of the state after them.
        num_draft_computed: number of leading positions with K and V in `blocks`, by MTP layer.
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
        """Drop the K and V of MTP layers that depend on tokens after the first `num_tokens`."""
        for layer, count in self.num_draft_computed.items():
            self.num_draft_computed[layer] = min(count, max(0, num_tokens - 1 - layer))


class TokenCounts:
    """Counts of a sequence's ids, for penalties; a step counts only the ids that are new since the last."""

    def __init__(self, prompt_ids: Iterable[int]) -> None:
        self._slots = {token_id: slot for slot, token_id in enumerate(dict.fromkeys(prompt_ids))}
        self._ids = np.fromiter(self._slots, np.int64, len(self._slots))
        self._counts = np.zeros(len(self._slots), np.float32)
        self._num_counted = 0

    def copy(self) -> TokenCounts:
        """Return an independent copy."""
        copied = TokenCounts(())
        copied._slots, copied._num_counted = dict(self._slots), self._num_counted
        copied._ids, copied._counts = self._ids.copy(), self._counts.copy()
        return copied

    def after(self, output_ids: SequenceOf[int], ahead: SequenceOf[int] = ()) -> IdValues:
        """Return how often each id of prompt and completion occurs in the completion and in `ahead`."""
        self._add(output_ids[self._num_counted :])
        self._num_counted = len(output_ids)
        counts = self.copy() if ahead else self
        counts._add(ahead)
        size = len(counts._slots)
        return IdValues(
            torch.from_numpy(counts._ids[:size].copy()),
            torch.from_numpy(counts._counts[:size].copy()),
        )

    def _add(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            slot = self._slots.setdefault(token_id, len(self._slots))
            if slot == len(self._ids):
                size = max(64, 2 * slot)
                self._ids.resize(size, refcheck=False)
                self._counts.resize(size, refcheck=False)
            self._ids[slot] = token_id
            self._counts[slot] += 1


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence(CachedBlocks):
    """One sample or one beam of a request: its ids and their KV cache."""

    request: Request
    index: int
    watch: StopWatch
    grammar: StructureState | None = None
    output_ids: list[int] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)  # one per entry of `output_ids`
    counts: TokenCounts | None = None  # from the first draw with penalties
    routing: Tensor | None = None  # read from the sequence's blocks when it ends
    indices: Tensor | None = None  # likewise
    number: int = 0  # order of arrival, the tie-breaker of `rank`; kept through preemption
    keys: list[bytes] = field(default_factory=list)  # prefix-cache keys of its full blocks
    snapshot: bytes | None = None  # key of the latest state that was cached while decoding
    # A beam's candidates, until all beams of its request have theirs; and the record of its next token.
    candidates: Candidates | None = None
    next_token: Token = field(default_factory=Token)
    score: float = 0.0  # beam search only
    num_sent: int = 0  # tokens already sent as deltas
    # Leading positions to recompute since the choices recorded for a finished sequence were lost; else None.
    num_recorded: int | None = None

    @property
    def sample_index(self) -> int:
        """Index that selects this sequence's noise."""
        return self.request.first_sample + self.index

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_ids) + len(self.output_ids)

    @property
    def num_needed(self) -> int:
        """Number of tokens to compute before the next one can be drawn, or before all are recorded."""
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
        """The first position without a prompt-logprob row; None if all rows are computed."""
        request = self.request
        if not request.needs_prompt_rows or self.index != 0:
            return None
        num_done = len(request.prompt_tokens)  # kept through evictions
        return num_done if num_done < request.num_input_tokens - 1 else None

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
        """Return the row that draws the token after this sequence and the draft ids `ahead`.

        It equals the row without drafts once those ids are accepted. `mask` has the ids that the grammar
        allows there, as `SampleRow.mask`; None allows all.
        """
        request, params = self.request, self.request.params
        num_drawn = len(self.output_ids) + len(ahead)
        banned = sorted(request.stop_ids) if num_drawn < params.min_tokens else []
        if request.bad_words:
            start = max(0, self.num_tokens - request.bad_words.num_history)
            banned += request.bad_words.blocked([*self.token_ids(start, self.num_tokens), *ahead])
        if request.allowed_mask is not None:
            mask = request.allowed_mask if mask is None else mask & request.allowed_mask
        penalized = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        if penalized != (1.0, 0.0, 0.0) and self.counts is None:
            self.counts = TokenCounts(request.prompt_ids)
        return SampleRow(
            params,
            request.seed,
            self.sample_index,
            self.num_tokens + len(ahead),
            counts=None if self.counts is None else self.counts.after(self.output_ids, ahead),
            bias=request.bias,
            banned_ids=banned,
            num_logprobs=params.logprobs or 0,
            mask=mask,
            num_candidates=0 if request.search is None else request.search.num_candidates,
        )

    def push(self, token_id: int, token: Token) -> None:
        """Append one token; finish the sequence if the token ends it."""
        self.output_ids.append(token_id)
        self.tokens.append(token)
        if not self.watch.push(token_id) and self.grammar is not None:
            self.grammar.push(token_id)

    def complete(self) -> None:
        """Finish the sequence because its grammar is complete."""
        self.watch.finish(FinishReason.STOP)

    def fork(self, index: int) -> Sequence:
        """Return an independent copy of the sequence so far, without blocks."""
        return Sequence(
            self.request,
            index,
            self.watch.fork(),
            None if self.grammar is None else self.grammar.fork(),
            output_ids=list(self.output_ids),
            tokens=list(self.tokens),
            counts=None if self.counts is None else self.counts.copy(),
            number=self.number,
        )


@dataclass(slots=True, eq=False, weakref_slot=True)
class SessionCache(CachedBlocks):
    """The KV cache of one session between its turns; during a turn, the turn's sequence holds it.

    Attributes:
        max_length: maximum number of tokens of the conversation.
        idle_timeout_s: idle time after which the blocks and the reservation are freed; None for no limit.
        token_ids: the computed tokens.
        adapter: number of the adapter that computed `token_ids`, as `Request.adapter`.
        is_private: the blocks must not enter the prefix cache: they were loaded from a file, or computed
            before the prefix cache was cleared.
        last_used: end of the last turn, on the monotonic clock; infinite during a turn.
        closed: the session is closed and must not hold blocks.
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


PRIORITY_STEP_S = 60.0  # waiting time that equals one step of priority


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
    max_tokens: int  # including `resumed_ids`; from `params.max_tokens` and the length limit
    stop_ids: frozenset[int]  # single ids that end a completion: `stop_token_ids`, end of sequence
    bad_words: BadWords  # banned sequences of two ids or more
    arrival: float  # time.monotonic()
    begin: Callable[[Request], None]  # creates its initial sequences
    # Ids that can be drawn at any step, as a `SampleRow.mask`: `allowed_token_ids`, single-id `bad_words`.
    allowed_mask: Tensor | None = None
    bias: IdValues | None = None  # `logit_bias`
    first_sample: int = 0  # sample index of completion 0
    resumed_ids: list[int] = field(default_factory=list)  # completion tokens of an earlier request
    resumed_text: str = ""  # their text, already sent
    session_cache: SessionCache | None = None  # set if the request is a session's turn
    shown_ids: frozenset[int] = frozenset()  # special tokens that stay in the text
    adapter: int = 0  # `Adapter.number`; 0: none
    sequences: list[Sequence] = field(default_factory=list)
    search: Any = None  # with `num_beams`: the `BeamSearch`
    # Values recorded for prompt positions 1, 2, ..., if their log-probs or hidden states are requested.
    prompt_tokens: list[Token] = field(default_factory=list)
    metrics: Metrics = field(default_factory=Metrics)
    was_scheduled: bool = False
    num_lost: int = 0  # consecutive steps that were lost with a stage
    num_ended: int = 0  # sequences that have had their final delta
    weight_version: int = 0  # of the weights that will generate the next token
    # Called with each delta, in the thread that runs the step; None: deltas are not read.
    deliver: Callable[[Delta], object] | None = None
    on_end: Callable[[], object] | None = None  # called at the end, in the same thread
    error: BaseException | None = None
    result: Result | None = None  # set once, when the last sequence has ended

    @property
    def finished(self) -> bool:
        return self.result is not None or self.error is not None

    @property
    def deadline(self) -> float:
        """The time at which the request ends with reason "timeout", on the monotonic clock."""
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
        """Scheduling order, smallest first: arrival time, shifted by the priority; so no request starves."""
        return self.arrival + PRIORITY_STEP_S * self.params.priority

    @property
    def needs_prompt_rows(self) -> bool:
        """True if logits or hidden states of all prompt positions, which are not cached, are requested."""
        return self.params.prompt_logprobs is not None or self.params.hidden_states
