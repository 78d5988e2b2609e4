"""From a forward's logits to draws: what each row asks of the sampler, and who draws it.

Rows are drawn where their logits are. Only those whose request has processors of its own come here, pass
through them, and are drawn by the same function.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from verbatim.batch import Draws, SamplePlan, SampleRow
from verbatim.core import Request, Sequence, Watch
from verbatim.engine.work import Chunk
from verbatim.errors import RequestFailed
from verbatim.protocols import Forward, Runner
from verbatim.sampling.logprobs import Mass
from verbatim.sampling.rows import draw_row
from verbatim.sampling.sampler import merge, sample_rows

Fail = Callable[[Request, BaseException], None]
Placed = tuple[int, SampleRow]  # a row of the plan, and the row of logits that it is for


def draw(runner: Runner, forward: Forward, chunks: list[Chunk], fail: Fail) -> Draws:
    """Draw for every chunk; each notes where its rows begin in the answer.

    A request whose row can't even be made (its processor raises, its structure gives up) fails alone
    and has no rows.
    """
    rows: list[SampleRow] = []
    places: list[int] = []  # the row of logits of each
    fetched: dict[int, Tensor] = {}  # rows of logits that processors have seen

    def fetch(place: int) -> Tensor:
        if place not in fetched:
            fetched[place] = runner.logits(forward, [place])[0]
        return fetched[place]

    for chunk in chunks:
        try:
            made = _target_rows(chunk)
            made += _processed_rows(chunk, fetch) if _has_processors(chunk) else _draw_rows(chunk)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a processor's sys.exit, a panic in a library: its own, too
            fail(chunk.sequence.request, error)
            continue
        chunk.first_draw, chunk.num_draws = len(rows), len(made)
        rows += [row for _, row in made]
        places += [place for place, _ in made]
    here = [i for i, row in enumerate(rows) if row.processed is not None]
    if not here:
        return runner.sample(forward, SamplePlan(rows, places))
    there = [i for i, row in enumerate(rows) if row.processed is None]
    logits = torch.stack([fetched[places[i]] for i in here])
    remote = SamplePlan([rows[i] for i in there], [places[i] for i in there])
    parts = sample_rows(logits, SamplePlan([rows[i] for i in here])), runner.sample(forward, remote)
    return merge(parts, (here, there))


def _target_rows(chunk: Chunk) -> list[Placed]:
    sequence, request = chunk.sequence, chunk.sequence.request
    known = request.num_prompt_rows_done
    targets = sequence.token_ids(known + 1, known + 1 + chunk.num_prompt_rows)
    return [
        (
            chunk.first_logits_row + i,
            SampleRow(
                request.params,
                request.seed,
                sequence.sample_index,
                known + 1 + i,
                target=target,
                num_logprobs=request.params.prompt_logprobs or 0,
            ),
        )
        for i, target in enumerate(targets)
    ]


def _draw_rows(chunk: Chunk) -> list[Placed]:
    """One row for the sequence, one behind each token of its draft, and one for each sample that is born
    with this draw.
    """
    if not chunk.draws:
        return []
    place = chunk.first_logits_row + chunk.num_prompt_rows
    made = [(place, draw_row(s, (), _mask(s))) for s in drawing(chunk)]
    for ahead, mask in enumerate(chunk.draft.masks, start=1):
        row = draw_row(chunk.sequence, chunk.draft.ids[:ahead], mask)
        made.append((place + ahead, row))
    return made


def _has_processors(chunk: Chunk) -> bool:
    return chunk.draws and bool(chunk.sequence.request.params.logits_processors)


def _processed_rows(chunk: Chunk, fetch: Callable[[int], Tensor]) -> list[Placed]:
    """`_draw_rows` of a request with processors, which are called exactly as if there were no draft.

    So the row behind a drafted token is made only once the rows before have drawn that very token, and
    that has not ended the sequence. If its processor raises there, those rows stand all the same.
    """
    request, drawers = chunk.sequence.request, drawing(chunk)
    watch: Watch | None = None
    made: list[Placed] = []
    for place, row in _draw_rows(chunk):
        logits = fetch(place)
        # As in transformers, processors of a beam search see log-probs.
        mass = Mass.of(logits) if request.search is not None else None
        row_in = logits.clone() if mass is None else mass.row(logits)
        ahead = place - chunk.first_logits_row - chunk.num_prompt_rows
        sequence = drawers[min(len(made), len(drawers) - 1)]  # who has a draft draws alone
        history = [*request.prompt_ids, *sequence.output_ids, *chunk.draft.ids[:ahead]]
        try:
            row.processed = _processed(request, torch.tensor(history, dtype=torch.int64), row_in)
        except RequestFailed as error:
            if not ahead:
                raise
            chunk.error = error
            break
        made.append((place, row))
        if ahead < len(chunk.draft.ids):
            (drawn,) = sample_rows(logits[None], SamplePlan([row])).ids
            if drawn != chunk.draft.ids[ahead]:
                break
            watch = watch or sequence.watch.fork()
            if watch.push(drawn) is not None:
                break
    return made


def _mask(sequence: Sequence) -> Tensor | None:
    return None if sequence.grammar is None else sequence.grammar.mask()


def drawing(chunk: Chunk) -> list[Sequence]:
    """The sequences that draw from the chunk's last row: all samples, where it is the prompt's."""
    sequence, request = chunk.sequence, chunk.sequence.request
    first = sequence.index == 0 and not sequence.output_ids and request.search is None
    return request.sequences if first else [sequence]


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
