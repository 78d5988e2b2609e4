"""From a forward's logits to draws: what each row asks of the sampler, and who draws it.

Rows are drawn where their logits are. Only those whose request has processors of its own come here, pass
through them, and are drawn by the same function.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from verbatim.batch import Draws, SamplePlan, SampleRow
from verbatim.core import Request, Sequence
from verbatim.engine.scheduler import Chunk
from verbatim.errors import RequestFailed
from verbatim.placement.runner import Forward, Runner
from verbatim.sampling.logprobs import Mass
from verbatim.sampling.processors import blocked_by_bad_words
from verbatim.sampling.sampler import merge, sample_rows
from verbatim.sampling.stopping import banned_until_min_tokens

Fail = Callable[[Request, BaseException], None]


def draw(runner: Runner, forward: Forward, chunks: list[Chunk], fail: Fail) -> Draws:
    """Draw for every chunk; each notes where its rows begin in the answer.

    A request whose row can't even be made (its processor raises, its structure gives up) fails alone
    and has no rows.
    """
    rows: list[SampleRow] = []
    logits_rows: list[int] = []
    fetched: dict[int, Tensor] = {}  # rows of logits that processors have seen
    for chunk in chunks:
        request, first = chunk.sequence.request, chunk.first_logits_row
        try:
            made = [*_target_rows(chunk), *_draw_rows(chunk)]
            places = [*range(first, first + chunk.num_prompt_targets)]
            places += [first + chunk.num_prompt_targets] * (len(made) - len(places))
            if chunk.draws and request.params.logits_processors:
                fetched[places[-1]] = runner.logits(forward, places[-1:])[0]
                _process(chunk, made, fetched[places[-1]])
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a processor's sys.exit, a panic in a library: its own, too
            fail(request, error)
            continue
        chunk.first_draw, chunk.num_draws = len(rows), len(made)
        rows += made
        logits_rows += places
    here = [i for i, row in enumerate(rows) if row.processed is not None]
    if not here:
        return runner.sample(forward, SamplePlan(rows, logits_rows))
    there = [i for i, row in enumerate(rows) if row.processed is None]
    logits = torch.stack([fetched[logits_rows[i]] for i in here])
    remote = SamplePlan([rows[i] for i in there], [logits_rows[i] for i in there])
    parts = sample_rows(logits, SamplePlan([rows[i] for i in here])), runner.sample(forward, remote)
    return merge(parts, (here, there))


def _target_rows(chunk: Chunk) -> list[SampleRow]:
    request = chunk.sequence.request
    known = request.num_prompt_rows_read
    return [
        SampleRow(
            request.params,
            request.seed,
            chunk.sequence.sample_index,
            position,
            target=request.prompt_ids[position],
            num_logprobs=request.params.prompt_logprobs or 0,
        )
        for position in range(known + 1, known + 1 + chunk.num_prompt_targets)
    ]


def _draw_rows(chunk: Chunk) -> list[SampleRow]:
    """One row for the sequence, and one for each sample that is born with this draw."""
    if not chunk.draws:
        return []
    return [_draw_row(sequence) for sequence in drawing(chunk)]


def drawing(chunk: Chunk) -> list[Sequence]:
    """The sequences that draw from the chunk's last row: all samples, where it is the prompt's."""
    sequence, request = chunk.sequence, chunk.sequence.request
    first = sequence.index == 0 and not sequence.output_ids and request.search is None
    return request.sequences if first else [sequence]


def _draw_row(sequence: Sequence) -> SampleRow:
    request, params = sequence.request, sequence.request.params
    banned = banned_until_min_tokens(params, request.eos_ids, len(sequence.output_ids))
    if request.bad_word_ids:
        banned += blocked_by_bad_words(
            request.bad_word_ids, request.prompt_ids + sequence.output_ids
        )
    penalized = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    needs_history = penalized != (1.0, 0.0, 0.0)
    return SampleRow(
        params,
        request.seed,
        sequence.sample_index,
        sequence.num_tokens,
        prompt_ids=request.prompt_ids if needs_history else (),
        output_ids=sequence.output_ids if needs_history else (),
        banned_ids=banned,
        num_logprobs=params.logprobs or 0,
        mask=None if sequence.grammar is None else sequence.grammar.mask(),
        num_candidates=0 if request.search is None else request.search.num_candidates,
    )


def _process(chunk: Chunk, rows: list[SampleRow], logits: Tensor) -> None:
    """Pass the drawn rows of a chunk through its request's own processors."""
    request = chunk.sequence.request
    # As in transformers, processors of a beam search see log-probs.
    mass = Mass.of(logits) if request.search is not None else None
    row_in = logits if mass is None else mass.row(logits)
    drawn = rows[chunk.num_prompt_targets :]
    for sequence, row in zip(drawing(chunk), drawn, strict=True):
        ids = torch.tensor(request.prompt_ids + sequence.output_ids, dtype=torch.int64)
        row.processed = _processed(request, ids, row_in.clone())


def _processed(request: Request, ids: Tensor, row: Tensor) -> Tensor:
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
        if not _is_row(row, shape):
            given = f"{row.dtype} {list(row.shape)}" if isinstance(row, Tensor) else type(row)
            raise RequestFailed(
                f"request {request.request_id}: its logits processor {name} gave {given}, not a dense "
                f"floating point tensor of shape {list(shape)} that holds numbers"
            )
    return row.detach().cpu().float().contiguous()


def _is_row(row: object, shape: torch.Size) -> bool:
    return (
        isinstance(row, Tensor)
        and row.layout is torch.strided
        and row.device.type != "meta"
        and row.shape == shape
        and row.is_floating_point()
    )
