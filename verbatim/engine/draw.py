"""Builds the sample plan of a step, and draws.

Rows are drawn by the runner, where their logits are. Those of a request with its own logits processors are
fetched, and processed here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from verbatim.batch import SamplePlan, SampleRow
from verbatim.core import Request, Sequence
from verbatim.engine.work import Chunk
from verbatim.errors import RequestFailed, StageFailed
from verbatim.protocols import Forward, Runner
from verbatim.sampling.logprobs import Mass
from verbatim.sampling.sampler import sample_rows
from verbatim.sampling.stopping import StopWatch

Fail = Callable[[Request, BaseException], None]
IndexedRow = tuple[int, SampleRow]  # a row of the plan, with the index of its logits row


def draw(runner: Runner, forward: Forward, chunks: list[Chunk], fail: Fail) -> None:
    """Draw for every chunk, and set its `results`.

    A request with a failing row (its processor raises, its grammar fails) fails alone and has no results.
    """
    rows: list[SampleRow] = []
    logits_rows: list[int] = []
    drawing: list[tuple[Chunk, int]] = []  # with the number of its rows
    fetched: dict[int, Tensor] = {}  # logits rows for processors

    def fetch(index: int) -> Tensor:
        if index not in fetched:
            fetched[index] = runner.logits(forward, [index])[0]
        return fetched[index]

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
    results = runner.sample(forward, SamplePlan(rows, logits_rows))
    start = 0
    for chunk, count in drawing:
        chunk.results = results[start : start + count]
        start += count


def _prompt_rows(chunk: Chunk) -> list[IndexedRow]:
    sequence, request = chunk.sequence, chunk.sequence.request
    done = len(request.prompt_tokens)
    targets = sequence.token_ids(done + 1, done + 1 + chunk.num_prompt_rows)
    return [
        (
            chunk.first_logits_row + i,
            SampleRow(
                request.params,
                request.seed,
                sequence.sample_index,
                done + 1 + i,
                target=target,
                num_logprobs=request.params.prompt_logprobs or 0,
            ),
        )
        for i, target in enumerate(targets)
    ]


def _draw_rows(chunk: Chunk) -> list[IndexedRow]:
    """Return one row for each sequence that draws, and one behind each token of the draft."""
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

    So the row behind a draft token is processed only if that token is accepted and does not end the
    sequence. If a processor raises there, the rows before remain valid.
    """
    request, samples = chunk.sequence.request, drawing_sequences(chunk)
    watch: StopWatch | None = None
    rows: list[IndexedRow] = []
    for index, row in _draw_rows(chunk):
        logits = fetch(index)
        # As in transformers, processors of a beam search see log-probs.
        mass = Mass.of(logits) if request.search is not None else None
        row_in = logits.clone() if mass is None else mass.row(logits)
        num_drafts = index - chunk.first_logits_row - chunk.num_prompt_rows
        sequence = samples[min(len(rows), len(samples) - 1)]  # with a draft there is only one
        history = [*request.prompt_ids, *sequence.output_ids, *chunk.draft_ids[:num_drafts]]
        try:
            row.processed = _process(request, torch.tensor(history, dtype=torch.int64), row_in)
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
    """Return the sequences that draw from the chunk's last row: for the prompt's last row, all samples."""
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
        if not _is_valid(row, shape):
            returned = f"{row.dtype} {list(row.shape)}" if isinstance(row, Tensor) else type(row)
            raise RequestFailed(
                f"request {request.request_id}: its logits processor {name} returned {returned}, not a "
                f"dense floating point tensor of shape {list(shape)} with data"
            )
    return row.detach().cpu().float().contiguous()


def _is_valid(row: object, shape: torch.Size) -> bool:
    return (
        isinstance(row, Tensor)
        and row.layout is torch.strided
        and row.device.type != "meta"
        and row.shape == shape
        and row.is_floating_point()
    )
