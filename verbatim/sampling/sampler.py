"""The sampler: from rows of logits to token ids and log-probs.

Every row is sampled independently: no result depends on other rows or on the number of threads. The compiled
one-pass sampler and the torch reference draw the same ids. With logits on a GPU, unfiltered rows are drawn
there, bit-identically, and the others on the CPU.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from functools import partial

import torch
from torch import Tensor

from verbatim import kernels
from verbatim.batch import DRAW_FAILED, Candidates, Draw, Draws, SamplePlan, SampleRow, Support
from verbatim.common.checks import integer
from verbatim.errors import InvalidRequest
from verbatim.options import on_cpu
from verbatim.params import SamplingParams
from verbatim.sampling import fast
from verbatim.sampling.logprobs import Mass, likeliest
from verbatim.sampling.noise import gumbel_row
from verbatim.sampling.processors import edit, is_greedy, warp

# Draws rows of a plan from the logits rows with the given indices; None: another sampler must draw the row.
Sample = Callable[[list[SampleRow], list[int]], Iterable[Draw | None]]
MAX_POSITION = 2**32 - 1


def sample_rows(logits: Tensor, plan: SamplePlan) -> Draws:
    """Draw an id, or score the target, for each row of a plan.

    A drawn id is `argmax(warp(edit(logits)) + gumbel)`; at temperature 0 the largest logit after penalties,
    biases and bans. Ties go to the lowest id.

    A row that can't be drawn does not affect the others: if its logits have NaN or +inf, or nothing above
    -inf, its id is -1, both log-probs are NaN and its lists are empty. The engine then fails that request.

    Args:
        logits: `[R, V]`, any floating dtype and device; not modified.
        plan: one `SampleRow` per row of logits; or with `logits_rows`, any number of them.

    Returns:
        A `Draw` for each row. `logprob` is from the raw logits at temperature 1, `sampled_logprob` from the
        distribution drawn from (0.0 at temperature 0, NaN for targets); the top lists omit ids of probability
        0.
    """
    places = _places(logits, plan)
    logits, rows = logits.detach(), plan.rows
    draws: list[Draw | None] = [None] * len(rows)

    def fill(supports: Callable[[SampleRow], bool], sample: Sample, places: list[int]) -> None:
        """Draw the missing rows that `sample` supports."""
        indices = [i for i, draw in enumerate(draws) if draw is None and supports(rows[i])]
        if indices:
            drawn = sample([rows[i] for i in indices], [places[i] for i in indices])
            for i, draw in zip(indices, drawn, strict=True):
                draws[i] = draw

    if logits.is_floating_point() and kernels.uses_triton(logits.device):
        fill(fast.gpu_supports, partial(fast.gpu_sample_rows, logits), places)
    host_logits, host_places = logits, places
    if not logits.is_cpu and None in draws:
        used = sorted({place for place, draw in zip(places, draws, strict=True) if draw is None})
        host_logits = logits[torch.tensor(used, device=logits.device)].cpu()
        host_places = [bisect_left(used, place) for place in places]
    if kernels.library() is not None:
        fill(fast.supports, partial(fast.sample_rows, host_logits), host_places)

    def reference(rows: list[SampleRow], places: list[int]) -> Iterable[Draw]:
        return map(_reference_row, (host_logits[place].float() for place in places), rows)

    fill(lambda row: True, reference, host_places)
    complete = [draw for draw in draws if draw is not None]
    for i, (row, draw) in enumerate(zip(rows, complete, strict=True)):
        if row.params.support and row.target is None and draw.id >= 0:
            support = _support_of(logits[places[i]].cpu(), row, draw.id)
            complete[i] = draw._replace(support=support)
    return complete


def _places(logits: Tensor, plan: SamplePlan) -> list[int]:
    """Validate a plan; return the index of the row of logits for each of its rows."""
    num_rows, places = len(plan.rows), plan.logits_rows
    if logits.dim() != 2 or num_rows != (logits.shape[0] if places is None else len(places)):
        raise ValueError(f"{num_rows} rows to sample, but logits are {list(logits.shape)}")
    for row in plan.rows:
        if row.target is not None and not 0 <= row.target < logits.shape[1]:
            raise ValueError(f"target={row.target}: must be 0 to {logits.shape[1] - 1}")
    if places is None:
        return list(range(num_rows))
    if places and not 0 <= min(places) <= max(places) < logits.shape[0]:
        raise ValueError(f"rows {min(places)} to {max(places)} of logits {list(logits.shape)}")
    return places


def _reference_row(raw: Tensor, row: SampleRow) -> Draw:
    """Draw one row `[V]`."""
    mass = Mass.of(raw)
    if mass is None:
        return _failed()
    sampled_logprob, candidates = math.nan, None
    if row.num_candidates:
        candidates = _candidates(raw, mass, row)
        # Nothing is drawn. If there are candidates, nothing has failed either.
        token_id = DRAW_FAILED if candidates is None else 0
    elif row.target is not None:
        token_id = row.target
    else:
        token_id, sampled_logprob = _draw(edit(raw, row), row)
    if token_id < 0:
        return _failed()
    top_ids = likeliest(raw, row.num_logprobs)
    logprob = mass.row(raw[token_id]).item()
    tops = top_ids.tolist(), mass.row(raw[top_ids]).tolist()
    return Draw(token_id, logprob, sampled_logprob, *tops, candidates=candidates)


def _failed() -> Draw:
    return Draw(DRAW_FAILED, math.nan, math.nan, [], [])


def _candidates(raw: Tensor, mass: Mass, row: SampleRow) -> Candidates | None:
    """Return the most likely continuations of a beam, ties by id; None if a score is NaN or +inf.

    As in transformers, penalties and processors edit log-probs, which are not normalized again.
    """
    logprobs = mass.row(raw)
    scores = edit(logprobs, row)
    if not scores.max() < math.inf:
        return None
    ids = likeliest(scores, row.num_candidates)
    return Candidates(ids.tolist(), logprobs[ids].tolist(), scores[ids].tolist())


def _draw(edited: Tensor, row: SampleRow) -> tuple[int, float]:
    """Draw an id from an edited row `[V]`; return it and its log-prob: (DRAW_FAILED, NaN) if none is left."""
    if not torch.isfinite(edited.max()):
        return DRAW_FAILED, math.nan
    if is_greedy(edited, row.params.temperature):
        return _first_index(edited, edited.max()), 0.0
    logits = warp(edited, row.params)
    scores = logits + gumbel_row(row.seed, row.sample_index, row.position, logits.shape[0])
    token_id = _first_index(scores, scores.max())
    mass = Mass.of(logits)
    assert mass is not None  # every filter keeps the largest logit
    return token_id, mass.row(logits[token_id]).item()


def _first_index(values: Tensor, value: Tensor) -> int:
    return int((values == value).nonzero()[0])


def _support_of(raw: Tensor, row: SampleRow, token_id: int) -> Support:
    """Return the support of a row that drew `token_id` from raw logits `[V]`."""
    params = row.params
    logits = edit(raw.float(), row)
    if is_greedy(logits, params.temperature):
        return Support([token_id], 0.0)
    logits = logits / params.temperature
    if params.typical_p == 1 and kernels.library() is not None:
        return fast.support(logits, params)
    has_top_k = 0 < params.top_k < len(logits)
    if not (has_top_k or params.top_p < 1 or params.min_p > 0 or params.typical_p < 1):
        return Support(None, 0.0)
    filtered = warp(logits, params.replace(temperature=1.0))
    kept, total = Mass.of(filtered), Mass.of(logits)
    assert kept is not None and total is not None  # a token was drawn from them
    ids = (filtered > -math.inf).nonzero()[:, 0].tolist()
    # The typical filter may drop the largest logit, to which the masses are relative.
    shift = kept.top - total.top
    return Support(ids, shift + (math.log(kept.total) - math.log(total.total)))


def sample(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    *,
    seed: int | None = None,
    position: int | SequenceOf[int] | Tensor | None = None,
) -> Tensor:
    """Draw one token id per row of logits: `[B, V]` to `[B]` int64, on the logits' device.

    Row `b` draws with sample index `b`. With the seed and positions of `generate`, a custom loop draws the
    same tokens.

    Args:
        logits: `[B, V]`, any floating dtype.
        temperature: as in `SamplingParams`, like `top_k` and `top_p`.
        top_k: how many of the most probable tokens can be drawn; 0: all.
        top_p: the most probable tokens can be drawn, as few as have this probability together; 1: all.
        seed: 64-bit seed of the noise; None: drawn from torch's default generator, so that
            `torch.manual_seed` makes a run repeatable.
        position: absolute position of the token to draw, one for all rows or one per row. Required with a
            seed, as otherwise every step of a loop would draw with the same noise.

    Raises:
        InvalidRequest: a value is out of range, only one of seed and position is given, or a row has no token
            that can be drawn.
    """
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    if not isinstance(logits, Tensor):
        raise InvalidRequest(f"logits must be a tensor [B, V], not {type(logits).__name__}")
    has_values = logits.layout == torch.strided and not logits.is_meta
    if logits.dim() != 2 or not logits.is_floating_point() or not has_values:
        raise InvalidRequest(
            f"logits must be a dense floating point tensor [B, V], not {logits.dtype} "
            f"{list(logits.shape)}, {logits.layout} on {logits.device}"
        )
    if logits.shape[1] == 0:
        raise InvalidRequest(f"logits {list(logits.shape)} have an empty vocabulary dimension")
    positions = _positions(seed, position, logits.shape[0])
    with on_cpu():
        if seed is None:
            seed = int(torch.randint(-(2**63), 2**63 - 1, ())) & (2**64 - 1)
        rows = [SampleRow(params, seed, b, where) for b, where in enumerate(positions)]
        ids = [draw.id for draw in sample_rows(logits, SamplePlan(rows))]
    if DRAW_FAILED in ids:
        raise InvalidRequest(
            f"row {ids.index(DRAW_FAILED)} of logits contains NaN or +inf, or only -inf"
        )
    return torch.tensor(ids, dtype=torch.int64, device=logits.device)


def _positions(
    seed: int | None, position: int | SequenceOf[int] | Tensor | None, num_rows: int
) -> list[int]:
    if (seed is None) != (position is None):
        given, missing = ("position", "seed") if seed is None else ("seed", "position")
        raise InvalidRequest(
            f"a {given} without a {missing}: pass both, or neither for random noise at each call"
        )
    if position is None:
        return [0] * num_rows
    if isinstance(position, Tensor):
        position = position.tolist()
    positions = list(position) if isinstance(position, Iterable) else [position] * num_rows
    if len(positions) != num_rows:
        raise InvalidRequest(f"{len(positions)} positions for {num_rows} rows of logits")
    return [integer("position", value, 0, MAX_POSITION) for value in positions]
