"""The data exchanged between engine and runner, all of it picklable.

`T` is the number of flat token rows, `S` the number of sequences, `R` the number of rows that need
logits, `V` the size of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from verbatim.errors import NotSupported
from verbatim.params import SamplingParams

_MAX_PYTHON_ELEMENTS = 512  # up to this many elements, Python is faster than torch

SCRATCH_BLOCK = 0  # never allocated to a sequence: padding reads and writes it
ZERO_STATE = 0  # the slot of the state before the first token; never allocated to a sequence
DRAW_FAILED = -1  # the id of a row with no drawable token


class AttentionBatch(NamedTuple):
    """The fields of a `Batch` that attention over a paged KV cache needs."""

    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor


@dataclass(slots=True)
class Batch:
    """A complete description of one forward over many sequences, without padding.

    The rows of a sequence are contiguous and in order: rows `query_starts[s]` to `query_starts[s + 1]`
    belong to sequence `s`. Row `j` of its `q` rows has position `context_lens[s] - q + j`, and attends to
    every earlier position of that sequence through `block_tables[s]`.

    In a model with recurrent layers, sequence `s` starts from the state in slot `state_sources[s]`, and the
    state after row `state_rows[w]` is written to slot `state_targets[w]`. No slot is both read and written,
    except that in a micro-batch, a piece of a sequence may overwrite the state that it reads.
    """

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, absolute
    query_starts: Tensor  # [S + 1] int32
    context_lens: Tensor  # [S] int32, positions in the KV cache after this forward
    block_tables: Tensor  # [S, blocks] int32, padded with SCRATCH_BLOCK
    logit_rows: Tensor  # [R] int64, indices into the T rows, ascending
    block_copies: list[tuple[int, int]] = field(default_factory=list)  # (from, to), done first
    wants_hidden: bool = False  # return the input of the LM head for the logit rows
    forced_experts: Tensor | None = None  # [T, layers, k] int16, -1 where the router selects
    forced_keys: Tensor | None = None  # [T, layers, k] int32, all -1 where the indexer selects
    records_keys: bool = False  # record the keys that indexers select
    state_sources: Tensor | None = None  # [S] int32; None: the model has no recurrent states
    state_rows: Tensor | None = None  # [W] int32, indices into the T rows, ascending
    state_targets: Tensor | None = None  # [W] int32
    adapters: Tensor | None = None  # [S] int64, `Adapter.number` or 0; None: no adapter is used
    entering: Tensor | None = None  # [T, H], hidden states from the previous stage

    @classmethod
    def of(
        cls,
        spans: Iterable[tuple[Sequence[int], int, list[int]]],
        logit_rows: Sequence[int] = (),
        *,
        states: tuple[list[int], list[int], list[int]] = ([], [], []),
        adapters: Sequence[int] = (),
        **fields: Any,
    ) -> Batch:
        """Build a batch from lists of numbers.

        Args:
            spans: for each sequence the ids of its rows, the position of the first row, and its block table.
            states: sources, rows and targets, as for `state_columns`.
            adapters: adapter number of each sequence, 0 for none; empty: no adapter is used.
            fields: other fields of `Batch`.
        """
        token_ids: list[int] = []
        positions: list[int] = []
        query_starts, context_lens, blocks = [0], [], []
        for ids, start, table in spans:
            end = start + len(ids)
            token_ids += ids
            positions += range(start, end)
            query_starts.append(len(token_ids))
            context_lens.append(end)
            blocks.append(table)
        if any(adapters):
            fields["adapters"] = torch.tensor(adapters, dtype=torch.int64)
        return cls(
            token_ids=torch.tensor(token_ids, dtype=torch.int64),
            positions=torch.tensor(positions, dtype=torch.int64),
            query_starts=torch.tensor(query_starts, dtype=torch.int32),
            context_lens=torch.tensor(context_lens, dtype=torch.int32),
            block_tables=block_tables(blocks),
            logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
            **state_columns(*states),
            **fields,
        )

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_sequences(self) -> int:
        return self.context_lens.shape[0]

    @property
    def attention(self) -> AttentionBatch:
        return AttentionBatch(self.query_starts, self.context_lens, self.block_tables)

    def to(self, device: torch.device) -> Batch:
        """Return this batch with its tensors on `device`."""
        moved: dict[str, Any] = {
            f.name: value.to(device, non_blocking=True)
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        return replace(self, **moved)

    def slots(self, block_size: int) -> Tensor:
        """Return the KV slot of each row: block times `block_size` plus offset, `[T]` int64."""
        if self.num_tokens + self.block_tables.numel() <= _MAX_PYTHON_ELEMENTS:
            positions, starts = self.positions.tolist(), self.query_starts.tolist()
            slots = [
                table[position // block_size] * block_size + position % block_size
                for s, table in enumerate(self.block_tables.tolist())
                for position in positions[starts[s] : starts[s + 1]]
            ]
            return torch.tensor(slots, dtype=torch.int64)
        lens = self.query_starts.diff().long()
        rows = torch.repeat_interleave(torch.arange(len(lens)), lens)
        blocks = self.block_tables[rows, self.positions // block_size].long()
        return blocks * block_size + self.positions % block_size


@dataclass(frozen=True, slots=True)
class LowRank:
    """The term that an adapter adds to a linear layer's `y = W x + b`: `scaling * B (A x)`."""

    a: Tensor  # [rank, K]
    b: Tensor  # [N, rank]
    scaling: float


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter of a model (Hu et al. 2021).

    Attributes:
        number: unique number, 1 or more; a later adapter of the same name has another number.
        layers: its matrices, by name of the model's linear layers.
    """

    name: str
    number: int
    layers: Mapping[str, LowRank]


@dataclass(frozen=True, slots=True)
class Choices:
    """The shape `[layers, k]` of the experts or keys that a model's layers select for each token.

    Attributes:
        layers: number of layers that select, in execution order.
        k: selections per layer; padded with -1 if there are fewer.
        count: number of experts; 0: the selections are positions up to the token's own.
        reason: why choices can't be recorded; None if they can.
        replay_reason: why recorded choices can't be replayed; None if they can.
    """

    layers: int = 0
    k: int = 0
    count: int = 0
    reason: str | None = None
    replay_reason: str | None = field(default=None, compare=False)

    @property
    def bytes_per_token(self) -> int:
        """Size of the record of one token."""
        return self.dtype.itemsize * self.layers * self.k

    @property
    def dtype(self) -> torch.dtype:
        if not self.count:
            return torch.int32
        return torch.uint8 if self.count <= 256 else torch.int16

    def check(self, what: str) -> None:
        """Raise NotSupported if choices can't be recorded."""
        if self.reason is not None:
            raise NotSupported(f"{what}: {self.reason}")

    def check_replay(self, what: str) -> None:
        """Raise NotSupported if choices can't be replayed."""
        self.check(what)
        if self.replay_reason is not None:
            raise NotSupported(f"{what}: {self.replay_reason}")


def block_tables(blocks: list[list[int]]) -> Tensor:
    """Return `Batch.block_tables` from the block list of each sequence."""
    tables = np.full((len(blocks), max(map(len, blocks))), SCRATCH_BLOCK, np.int32)
    for table, row in zip(tables, blocks, strict=True):
        table[: len(row)] = row
    return torch.from_numpy(tables)


def state_columns(sources: list[int], rows: list[int], targets: list[int]) -> dict[str, Any]:
    """Return the state fields of a `Batch`; empty if no state is to be written.

    `targets` has the slot for the state after each of `rows`, or `ZERO_STATE` if it is not written.
    """
    writes = [(row, slot) for row, slot in zip(rows, targets, strict=True) if slot != ZERO_STATE]
    if not writes:
        return {}
    return {
        "state_sources": torch.tensor(sources, dtype=torch.int32),
        "state_rows": torch.tensor([row for row, _ in writes], dtype=torch.int32),
        "state_targets": torch.tensor([slot for _, slot in writes], dtype=torch.int32),
    }


def dummy_batch(count: int = 1, width: int = 1) -> Batch:
    """Return a batch of `count` one-row sequences in the scratch block; block tables have `width` columns."""
    return Batch.of([([0], 0, [SCRATCH_BLOCK] * width)] * count, range(count))


@dataclass(frozen=True, slots=True)
class IdValues:
    """A number for each of some token ids.

    Attributes:
        ids: `[n]` int64, distinct.
        values: `[n]` float32.
    """

    ids: Tensor
    values: Tensor

    @classmethod
    def of(cls, values: Mapping[int, float]) -> IdValues:
        ids = torch.tensor(list(values), dtype=torch.int64)
        return cls(ids, torch.tensor(list(values.values()), dtype=torch.float32))

    def below(self, size: int) -> tuple[Tensor, Tensor]:
        """Return the ids from 0 to `size` (exclusive), and their values."""
        fits = (self.ids >= 0) & (self.ids < size)
        return (self.ids, self.values) if fits.all() else (self.ids[fits], self.values[fits])


@dataclass(slots=True)
class SampleRow:
    """The parameters that turn one row of logits into a token id.

    Attributes:
        params: the request's parameters.
        seed, sample_index, position: the identity of the draw; `position` is the absolute position of the
            token to be drawn (P for the first new token after a prompt of P ids).
        counts: for penalties, how often the completion has each id; 0 for ids that only the prompt has.
        bias: `logit_bias`.
        banned_ids: ids that can't be drawn at this step (`min_tokens`, completed `bad_words`).
        target: if not None, this is a prompt-logprob row: nothing is drawn, and the log-prob of this
            id is returned.
        num_logprobs: number of the likeliest ids to return.
        mask: the ids that the grammar allows: int32 `[ceil(V / 32)]`, bit `i % 32` of word `i // 32`.
        processed: `[V]` float32, the logits after the request's own processors, to draw from. The model's
            log-probs are still those of the unprocessed logits.
        num_candidates: if above 0, the row belongs to a beam: nothing is drawn, and this many candidates
            are returned.
    """

    params: SamplingParams
    seed: int
    sample_index: int
    position: int
    counts: IdValues | None = None
    bias: IdValues | None = None
    banned_ids: Sequence[int] = ()
    target: int | None = None
    num_logprobs: int = 0
    mask: Tensor | None = None
    processed: Tensor | None = None
    num_candidates: int = 0


@dataclass(slots=True)
class SamplePlan:
    """The draws to make, in order."""

    rows: list[SampleRow]
    logits_rows: list[int] | None = None  # logits row of each draw; None: row i for draw i

    def of(self, numbers: Sequence[int]) -> SamplePlan:
        """Return the plan for a subset of the rows."""
        logits_rows = self.logits_rows or range(len(self.rows))
        return SamplePlan([self.rows[i] for i in numbers], [logits_rows[i] for i in numbers])


class Candidate(NamedTuple):
    """One continuation of a beam."""

    token_id: int
    logprob: float  # of the raw model distribution
    score: float  # for ranking: the log-prob after penalties, biases, bans and structure


@dataclass(frozen=True, slots=True)
class Candidates:
    """The likeliest continuations of a beam, likeliest first; as columns, since few of them are read."""

    ids: list[int]
    logprobs: list[float]
    scores: list[float]

    def __iter__(self) -> Iterator[Candidate]:
        return map(Candidate, self.ids, self.logprobs, self.scores)


class Support(NamedTuple):
    """The ids of a row that the filters (top-k, top-p, min-p, typical) kept."""

    ids: list[int] | None  # ascending; None: all that can be drawn
    # Log of their probability mass after the temperature and before the filters.
    log_mass: float


class Draw(NamedTuple):
    """The result of one row of a `SamplePlan`."""

    id: int  # the drawn id, or the row's target; DRAW_FAILED
    logprob: float  # of the raw model distribution at temperature 1
    sampled_logprob: float  # of the distribution that was sampled; 0.0 at temperature 0
    top_ids: list[int]  # likeliest first (ties: lowest id), raw distribution
    top_logprobs: list[float]
    support: Support = Support(None, 0.0)  # set if requested
    candidates: Candidates | None = None  # for the row of a beam

    @property
    def top(self) -> list[tuple[int, float]]:
        """The likeliest ids with their log-probs."""
        return list(zip(self.top_ids, self.top_logprobs, strict=True))


Draws = list[Draw]  # one per row
