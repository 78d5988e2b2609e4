"""The runners of tensor-parallel ranks."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from verbatim.batch import Adapter, Batch, SamplePlan
from verbatim.errors import TierFailed, VerbatimError, first_line
from verbatim.heap import give_back_freed
from verbatim.model.decoder import Decoder
from verbatim.model.draft_layers import DraftLayers
from verbatim.placement.distributed.columns import Cut
from verbatim.placement.distributed.gloo import Gloo
from verbatim.placement.distributed.heads import HeadStore
from verbatim.placement.distributed.rank_group import RankGroup
from verbatim.placement.resident import Resident
from verbatim.protocols import Forward
from verbatim.shield import Shield
from verbatim.weights.update import NewWeights, WeightWriter


class Rank(Resident):
    """A `Resident` with a share of the weights and of K and V; all ranks run its forwards together."""

    def __init__(
        self,
        decoder: Decoder,
        store: HeadStore,
        num_threads: int,
        draft_layers: DraftLayers,
        ranks: Gloo,
        cut: Cut,
    ) -> None:
        super().__init__(decoder, store, num_threads, draft_layers)
        self.ranks = ranks
        self.cut = cut
        self.packed, self.original = cut.report, cut.original
        self.checkpoint, self.cuts = cut.checkpoint, cut.ranges

    def check_replay(self, name: str) -> None:
        with self.ranks.everywhere():
            super().check_replay(name)

    def stamp(self) -> object:
        return None  # the parameters have no other users

    def close(self) -> None:
        self.ranks.close()
        super().close()


class LeadingRank(Rank):
    """Rank 0, which makes the other ranks do what it does.

    Args:
        rank: as of `Rank`.
        group: the others.

    Attributes:
        memory: of each rank, as of `RankShare.allocate`.
    """

    def __init__(self, *rank: Any, group: RankGroup) -> None:
        super().__init__(*rank)
        self.group = group
        # Runs if it is never closed; its arguments must not refer to this object.
        self._let_go = weakref.finalize(self, group.close, os.getpid())
        self.memory: list[dict[str, int]] = []

    def forward(self, batch: Batch) -> Forward:
        made: Forward = self._together("forward", batch=batch)
        return made

    def draft(
        self, k: int, batch: Batch, plan: SamplePlan | None, lengths: list[int]
    ) -> list[list[int]]:
        asked = dict(k=k, batch=batch, plan=plan, lengths=lengths)
        drawn: list[list[int]] = self._together("draft", {"plan": None}, **asked)
        return drawn

    def read_cache(self, kind: str, numbers: list[int], used: int | None = None) -> Tensor | None:
        own = super().read_cache(kind, numbers, used)
        assert own is not None
        if kind == "states":  # every rank has all of them
            return own
        return torch.cat([own, *self._rows_of_others(numbers, used)], dim=1)

    def _rows_of_others(self, blocks: list[int], used: int | None = None) -> list[Tensor]:
        asked = {"do": "read_cache", "kind": "blocks", "numbers": blocks, "used": used}
        with Shield().up():
            answers = self.group.ask(asked)
        return [answer["rows"] for answer in answers]

    def write_cache(self, kind: str, numbers: list[int], rows: Tensor) -> bool:
        shares = [rows] * self.ranks.size
        if kind == "blocks":
            others = [part.shape[1] for part in self._rows_of_others([])]
            shares = [*rows.split([rows.shape[1] - sum(others), *others], dim=1)]
        sent = {"rows": None, "shares": [share.contiguous() for share in shares]}
        self._together("write_cache", sent, kind=kind, numbers=numbers, rows=shares[0])
        return True

    def new_weights(
        self, tensors: Mapping[str, Tensor], *, check_finite: bool
    ) -> Callable[[], None]:
        write = super().new_weights(tensors, check_finite=check_finite)
        new = NewWeights(self.cut.original, tensors, check_finite=False)
        writer = WeightWriter(self.decoder.held)
        for piece in new.messages(writer.packed):
            self.group.ask({"do": "prepare_weights", "tensors": piece})

        def write_all() -> None:
            with Shield().up():
                for piece in new.messages(writer.exact):
                    self.group.tell({"do": "write_weights", "tensors": piece})
                write()

        return write_all

    def load_adapter(self, adapter: Adapter) -> None:
        """See `Runner`. Each rank holds all of it, and adds it to the gathered columns."""
        self._together("load_adapter", adapter=adapter)

    def unload_adapter(self, number: int) -> None:
        self._together("unload_adapter", number=number)

    def check_replay(self, name: str) -> None:
        self._together("check_replay", name=name)

    def _together(
        self, what: str, others: Mapping[str, Any] = MappingProxyType({}), **fields: Any
    ) -> Any:
        """Make a call on all ranks. Ctrl-C waits for its end, as all of them make it or none.

        Args:
            others: fields that are different on the other ranks.
        """
        with Shield().up():
            self.group.tell({"do": what, **fields, **others})
            try:
                return getattr(super(), what)(**fields)
            except TierFailed as error:
                raise self.group.failure(error) from error
            except VerbatimError:  # of the batch and the model, so it is the same on all ranks
                raise
            except Exception as error:  # the others are in the middle of what this one gave up
                told = f"{type(error).__name__}: {first_line(error)}"
                raise TierFailed(f"rank 0 of {self.group.size}: {told}") from error

    def info(self) -> dict[str, Any]:
        return {
            **super().info(),
            "placement": "tensor parallel",
            "ranks": self.ranks.size,
            "exact": True,
            "parameters": self.cut.total_parameters,
            "weight_bytes": self.cut.total_bytes,
            "rank_weight_bytes": [rank["weight_bytes"] for rank in self.memory],
            "kv_bytes": sum(rank["kv_bytes"] for rank in self.memory),
            "rank_kv_bytes": [rank["kv_bytes"] for rank in self.memory],
            "split_linears": len(self.cut.columns),
            "split_experts": len(self.cut.experts),
            "whole_linears": self.cut.whole,
        }

    def sleep(self, weights: bool) -> None:
        super().sleep(weights)
        self.group.ask({"do": "sleep", "weights": weights})

    def wake(self) -> None:
        with ThreadPoolExecutor(1) as pool:  # all ranks read at the same time
            own = pool.submit(super().wake)
            self.group.ask({"do": "wake"})
            own.result()

    def close(self) -> None:
        with ExitStack() as last_first:
            last_first.callback(give_back_freed)
            last_first.callback(super().close)
            last_first.callback(self._let_go)
