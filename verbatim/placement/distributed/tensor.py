"""The runner of a tensor-parallel model: rank 0's."""

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
from verbatim.placement.distributed.columns import Cut
from verbatim.placement.distributed.gloo import Gloo
from verbatim.placement.distributed.rank_group import RankGroup
from verbatim.placement.resident import Resident
from verbatim.protocols import Forward
from verbatim.shield import Shield
from verbatim.weights.update import NewWeights, WeightWriter


class LeadingRank(Resident):
    """Rank 0's share of a model, whose calls make the other ranks do the same.

    Args:
        group: the others.
        ranks: all of them, in a forward.
        cut: what this one holds.
        parts: as of `Resident`.

    Attributes:
        memory: of each rank, as of `RankShare.allocate`.
    """

    def __init__(self, group: RankGroup, ranks: Gloo, cut: Cut, *parts: Any) -> None:
        super().__init__(*parts)
        self.group, self.ranks, self.cut = group, ranks, cut
        # Runs if it is never closed; its arguments must not refer to this object.
        self._let_go = weakref.finalize(self, group.close, os.getpid())
        self.memory: list[dict[str, Any]] = []

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
        asked = {"do": "read_cache", "kind": kind, "numbers": numbers, "used": used}
        with Shield().up():
            return torch.cat([own, *self.group.ask(asked)], dim=1)

    def write_cache(self, kind: str, numbers: list[int], rows: Tensor) -> bool:
        own, *shares = [rows] * self.ranks.size
        if kind == "blocks":
            own, *shares = rows.split([sum(m["row_widths"][kind]) for m in self.memory], dim=1)
        asked = {"do": "write_cache", "kind": kind, "numbers": numbers}
        with Shield().up():
            self.group.ask_each([{**asked, "rows": share} for share in shares])
            return super().write_cache(kind, numbers, own)

    def new_weights(
        self, tensors: Mapping[str, Tensor], *, check_finite: bool
    ) -> Callable[[], None]:
        write = super().new_weights(tensors, check_finite=check_finite)
        new = NewWeights(self.original or {}, tensors, check_finite=False)
        writer = WeightWriter(self.decoder.held)
        for piece in new.messages(writer.packed):
            self.group.ask({"do": "prepare_weights", "tensors": piece})

        def write_all() -> None:
            with Shield().up():
                for piece in new.messages(writer.exact):
                    self.group.tell({"do": "write_weights", "tensors": piece})
                write()

        return write_all

    def load_adapter(self, adapter: Adapter) -> list[str]:
        """See `Runner`. Each rank holds all of it, and adds it to the gathered columns."""
        names: list[str] = self._together("load_adapter", adapter=adapter)
        return names

    def unload_adapter(self, number: int) -> None:
        self._together("unload_adapter", number=number)

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
            **self.cut.info,
            "rank_weight_bytes": [rank["weight_bytes"] for rank in self.memory],
            "kv_bytes": sum(rank["kv_bytes"] for rank in self.memory),
            "rank_kv_bytes": [rank["kv_bytes"] for rank in self.memory],
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
            last_first.callback(self.ranks.close)
            last_first.callback(self._let_go)
