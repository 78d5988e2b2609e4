"""The work of one step: a chunk of rows per sequence, the batch that they form, and the draws.

The runner draws on the device of the logits. Logits of requests with their own logits processors are copied
to the CPU and processed here first.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from verbatim.batch import ZERO_STATE, Batch, Draw, SamplePlan, SampleRow
from verbatim.core import Request, Sequence
from verbatim.errors import RequestFailed, StageFailed
from verbatim.protocols import Forward, Runner
from verbatim.sampling.logprobs import Mass
from verbatim.sampling.sampler import sample_rows
from verbatim.sampling.stopping import StopWatch

Span = tuple[Sequence, int, list[int]]  # rows of a sequence: the first position, and the ids
Fail = Callable[[Request, BaseException], None]
IndexedRow = tuple[int, SampleRow]  # index of the logits row, and the plan's row


@dataclass(slots=True)
class Chunk:
    """The rows of one sequence in one batch."""

    sequence: Sequence
    num_rows: int  # without the draft
    num_prompt_rows: int  # leading logits rows that are prompt-logprob rows
    draws: bool  # whether tokens are drawn from the last row and from the draft rows
    max_draft: int = 0  # draft rows that are allocated
    # Proposed next tokens, verified in one forward: in the vocabulary, allowed by the sequence's grammar and
    # within its length limit. For each, the grammar's mask after it (`SampleRow.mask`), or None.
    draft_ids: list[int] = field(default_factory=list)
    draft_masks: list[Tensor | None] = field(default_factory=list)
    first_logits_row: int = 0
    # The draws of its logits rows, prompt rows first; one for each sample that draws from a row.
    results: list[Draw] = field(default_factory=list)
    num_accepted: int = 0  # accepted draft tokens
    is_complete: bool = False  # the sequence's grammar is complete, so nothing is drawn
    error: BaseException | None = None  # fails the request after the accepted tokens


@dataclass(slots=True)
class Schedule:
    """The work of one step, and the remaining capacity of its batch in rows."""

    rows: int
    prompt_rows: int
    chunks: list[Chunk] = field(default_factory=list)
    scheduled: set[Sequence] = field(default_factory=set)
    # (from, to), before the forward
    block_copies: list[tuple[int, int]] = field(default_factory=list)

    def add(self, chunk: Chunk) -> None:
        """Add a chunk, and subtract its rows from the capacity."""
        assert chunk.sequence not in self.scheduled
        self.chunks.append(chunk)
        self.scheduled.add(chunk.sequence)
        self.rows -= chunk.num_rows
        self.prompt_rows -= chunk.num_prompt_rows

    def batch(self) -> Batch:
        """Build the batch of the chunks and their drafts; set each chunk's `first_logits_row`."""
        spans: list[Span] = []
        logit_rows: list[int] = []
        sources: list[int] = []
        rows: list[int] = []
        targets: list[int] = []
        end_row = 0
        for chunk in self.chunks:
            sequence, draft = chunk.sequence, chunk.draft_ids
            start, stop = sequence.num_computed, sequence.num_computed + chunk.num_rows
            ids = sequence.token_ids(start, stop) + draft
            spans.append((sequence, start, ids))
            first_row, end_row = end_row, end_row + len(ids)
            states = sequence.states
            sources.append(states[start] if start and states else ZERO_STATE)
            for position in sorted(p for p in states if start < p <= start + len(ids)):
                rows.append(first_row + position - start - 1)
                targets.append(states[position])
            chunk.first_logits_row = len(logit_rows)
            if chunk.num_prompt_rows:
                first_prompt_row = first_row + len(sequence.request.prompt_tokens) - start
                logit_rows += range(first_prompt_row, first_prompt_row + chunk.num_prompt_rows)
            if chunk.draws:
                logit_rows += range(end_row - 1 - len(draft), end_row)
        requests = [chunk.sequence.request for chunk in self.chunks]
        return Batch.of(
            [(ids, start, sequence.blocks) for sequence, start, ids in spans],
            logit_rows,
            states=(sources, rows, targets),
            adapters=[request.adapter for request in requests],
            block_copies=self.block_copies,
            forced_experts=_forced(spans, "replay_routing"),
            forced_keys=_forced(spans, "replay_indices"),
            records_keys=any(request.params.record_indices for request in requests),
            wants_hidden=any(request.params.hidden_states for request in requests),
        )


def _forced(spans: list[Span], field: str) -> Tensor | None:
    """Return the choices that requests replay in these rows, -1 where the model selects; None if none do."""
    replayed = [getattr(sequence.request.params, field) for sequence, _, _ in spans]
    first = next((record for record in replayed if record is not None), None)
    if first is None:
        return None
    num_rows = sum(len(ids) for _, _, ids in spans)
    forced = torch.full((num_rows, *first.shape[1:]), -1, dtype=first.dtype)
    row = 0
    for (_, start, ids), record in zip(spans, replayed, strict=True):
        if record is not None:
            part = record[start : start + len(ids)]  # a record may be shorter
            forced[row : row + len(part)] = part
        row += len(ids)
    return forced


def draw(runner: Runner, forward: Forward, chunks: list[Chunk], fail: Fail) -> None:
    """Draw for every chunk, and set its `results`.

    If a row fails (its processor raises, its grammar fails), only its request fails, without results.
    """
    rows: list[SampleRow] = []
    logits_rows: list[int] = []
    drawing: list[tuple[Chunk, int]] = []  # the chunks that draw, with their numbers of rows

    @functools.cache
    def fetch(index: int) -> Tensor:
        """Return the logits of a row, for processors."""
        return runner.logits(forward, [index])[0]

    for chunk in chunks:
        try:
            indexed = _prompt_rows(chunk)
            grammar = chunk.sequence.grammar
            if chunk.draws and grammar is not None and grammar.is_complete():
                chunk.is_complete = True
            elif chunk.draws and chunk.sequence.request.params.logits_processors:
                indexed += _processed_rows(chunk, fetch)
            else:
                indexed += _draw_rows(chunk)
        except (KeyboardInterrupt, StageFailed):
            raise
        except BaseException as error:  # also a processor's sys.exit, or a panic in a library
            fail(chunk.sequence.request, error)
            continue
        drawing.append((chunk, len(indexed)))
        rows += [row for _, row in indexed]
        logits_rows += [index for index, _ in indexed]
    results = iter(runner.sample(forward, SamplePlan(rows, logits_rows)))
    for chunk, count in drawing:
        chunk.results = list(itertools.islice(results, count))


def _prompt_rows(chunk: Chunk) -> list[IndexedRow]:
    sequence, request = chunk.sequence, chunk.sequence.request
    num_done = len(request.prompt_tokens)
    targets = sequence.token_ids(num_done + 1, num_done + 1 + chunk.num_prompt_rows)
    return [
        (
            chunk.first_logits_row + i,
            SampleRow(
                request.params,
                request.seed,
                sequence.sample_index,
                num_done + 1 + i,
                target=target,
                num_logprobs=request.params.prompt_logprobs or 0,
            ),
        )
        for i, target in enumerate(targets)
    ]


def _draw_rows(chunk: Chunk) -> list[IndexedRow]:
    """Return one row for each sequence that draws, and one after each token of the draft."""
    if not chunk.draws:
        return []
    first = chunk.first_logits_row + chunk.num_prompt_rows
    rows = [
        (first, s.draw_row((), None if s.grammar is None else s.grammar.mask()))
        for s in drawing_sequences(chunk)
    ]
    for num_drafts, mask in enumerate(chunk.draft_masks, start=1):
        row = chunk.sequence.draw_row(chunk.draft_ids[:num_drafts], mask)
        rows.append((first + num_drafts, row))
    return rows


def _processed_rows(chunk: Chunk, fetch: Callable[[int], Tensor]) -> list[IndexedRow]:
    """Return `_draw_rows` after the request's processors, which are called exactly as without a draft.

    So the row after a draft token is processed only if that token is accepted and does not end the
    sequence. If a processor raises there, the previous rows remain valid.
    """
    request, samples = chunk.sequence.request, drawing_sequences(chunk)
    watch: StopWatch | None = None
    rows: list[IndexedRow] = []
    for index, row in _draw_rows(chunk):
        logits = fetch(index)
        # As in transformers, processors get log-probs in a beam search.
        mass = Mass.of(logits) if request.search is not None else None
        input_row = logits.clone() if mass is None else mass.row(logits)
        num_drafts = index - chunk.first_logits_row - chunk.num_prompt_rows
        sequence = samples[min(len(rows), len(samples) - 1)]  # with a draft there is only one
        history = [*request.prompt_ids, *sequence.output_ids, *chunk.draft_ids[:num_drafts]]
        try:
            row.processed = _process(request, torch.tensor(history, dtype=torch.int64), input_row)
        except RequestFailed as error:
            if not num_drafts:
                raise
            chunk.error = error
            break
        rows.append((index, row))
        if num_drafts < len(chunk.draft_ids):
            drawn = sample_rows(logits[None], SamplePlan([row]))[0].id
            if drawn != chunk.draft_ids[num_drafts]:
                break
            watch = watch or sequence.watch.fork()
            if watch.push(drawn):
                break
    return rows


def drawing_sequences(chunk: Chunk) -> list[Sequence]:
    """Return the sequences that draw from the chunk's last row: all samples, for the prompt's last row."""
    sequence, request = chunk.sequence, chunk.sequence.request
    first = sequence.index == 0 and not sequence.output_ids and request.search is None
    return request.sequences if first else [sequence]


def _process(request: Request, ids: Tensor, row: Tensor) -> Tensor:
    shape = row.shape
    for function in request.params.logits_processors:
        name = getattr(function, "__name__", type(function).__name__)
        try:
            row = function(ids, row)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise RequestFailed(
                f"request {request.request_id}: its logits processor {name} raised "
                f"{type(error).__name__}: {error}"
            ) from error
        if not (
            isinstance(row, Tensor)
            and row.layout is torch.strided
            and row.device.type != "meta"
            and row.shape == shape
            and row.is_floating_point()
        ):
            returned = f"{row.dtype} {list(row.shape)}" if isinstance(row, Tensor) else type(row)
            raise RequestFailed(
                f"request {request.request_id}: its logits processor {name} returned {returned}, not a "
                f"dense floating point tensor of shape {list(shape)} with data"
            )
    return row.detach().cpu().float().contiguous()
