"""A tensor-parallel model as rank 0 sees it: the other ranks, and the runner."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from verbatim.batch import Adapter, Batch, SamplePlan
from verbatim.errors import StageFailed, TierFailed, VerbatimError, first_line
from verbatim.heap import give_back_freed
from verbatim.placement.distributed.columns import Cut
from verbatim.placement.distributed.gloo import Gloo
from verbatim.placement.distributed.group import StageGone, StageGroup, StageHandle
from verbatim.placement.distributed.hosts import Hosts
from verbatim.placement.distributed.launcher import WorkerProcess
from verbatim.placement.distributed.wire import Message
from verbatim.placement.resident import Resident
from verbatim.protocols import Forward
from verbatim.shield import Shield
from verbatim.weights.update import NewWeights, WeightWriter

_TELL_S = 3.0  # in which it becomes known who is gone
_MORE_S = 0.05  # for the reports of others, which may have caused it
_T = TypeVar("_T")
_ENDED_S = 0.5  # in which a process that hung up is known to have ended


class RankGroup(StageGroup):
    """The ranks 1 to `size` - 1 of a tensor-parallel model, which are never replaced.

    Raises:
        TierFailed: one does not come, or has other versions.
    """

    def __init__(self, hosts: Hosts, size: int, timeout_s: float) -> None:
        super().__init__(hosts, patience_s=timeout_s, step_timeout_s=timeout_s)
        self.size = size
        try:
            self.members = self.launch(size - 1)
        except StageFailed as error:
            self.close()
            raise TierFailed(f"a rank of {size}: {error}") from None
        except BaseException:
            self.close()
            raise
        for rank, member in enumerate(self.members, start=1):
            member.index, member.name = rank, f"rank {rank} of {size}"
            if isinstance(member.host, WorkerProcess):
                member.name += f": process {member.host.pid}"

    def together(self, do: str, work: Callable[[], _T], **fields: Any) -> _T:
        """Let the other ranks make a call, and return what this one makes of it.

        Args:
            work: this rank's call.

        Raises:
            TierFailed: a rank is gone, or failed alone; the message names it.
            VerbatimError: an error of the batch or the model, so it is the same on all ranks.
        """
        self.tell(do, self.members, **fields)
        try:
            if self.lost:
                raise TierFailed("some ranks don't have it")
            return work()
        except TierFailed as error:
            raise self.failure(error) from error
        except VerbatimError:
            raise
        except Exception as error:  # the others are in the middle of what this one gave up
            told = f"{type(error).__name__}: {first_line(error)}"
            raise TierFailed(f"rank 0 of {self.size}: {told}") from error

    def ask(self, do: str, own: Iterable[Message] | None = None, **fields: Any) -> list[Any]:
        """Return each rank's answer, as `call`.

        Raises:
            TierFailed: one is gone.
            VerbatimError: one could not do what was asked for.
        """
        try:
            return self.call(do, own=own, patient=True, **fields)
        except StageGone as error:
            raise self.failure(error) from error

    def failure(self, error: Exception) -> TierFailed:
        """Return the error that names the rank that failed, once it is known."""
        end = time.monotonic() + _TELL_S
        reports: list[tuple[StageHandle, Message]] = []
        while not (self.lost or reports) and time.monotonic() < end:
            self.pump()
            reports += self.reports()
        for _ in self.members:
            self.pump(_MORE_S)
        # Who went without a word took the others along.
        for member in self.lost:
            ended, host = "", member.host
            if isinstance(host, WorkerProcess) and host.wait(_ENDED_S):
                ended = f" has ended ({host.ended})"
            return TierFailed(f"{member.name}{ended}: {member.lost}")
        for member, report in reports:
            return TierFailed(f"{member.name}: {': '.join(report['error'])}")
        stuck = f"no rank is known to be gone, but one does not answer: {error}"
        return TierFailed(f"of {self.size} ranks, {stuck}")


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
        return self._together("forward", partial(super().forward, batch), batch=batch)

    def draft(
        self, k: int, batch: Batch, plan: SamplePlan | None, lengths: list[int]
    ) -> list[list[int]]:
        draft = partial(super().draft, k, batch, plan, lengths)
        return self._together("draft", draft, k=k, batch=batch, plan=None, lengths=lengths)

    def _together(self, do: str, work: Callable[[], _T], **fields: Any) -> _T:
        """See `RankGroup.together`. Ctrl-C waits for its end, as all make the call or none."""
        with Shield().up():
            return self.group.together(do, work, **fields)

    def read_cache(self, kind: str, numbers: list[int], used: int | None = None) -> Tensor | None:
        own = super().read_cache(kind, numbers, used)
        assert own is not None
        if kind == "states":  # every rank has all of them
            return own
        with Shield().up():
            others = self.group.ask("read_cache", kind=kind, numbers=numbers, used=used)
            return torch.cat([own, *others], dim=1)

    def write_cache(self, kind: str, numbers: list[int], rows: Tensor) -> bool:
        own, *shares = [rows] * self.ranks.size
        if kind == "blocks":
            own, *shares = rows.split([sum(m["row_widths"][kind]) for m in self.memory], dim=1)
        with Shield().up():
            theirs = [{"rows": share} for share in shares]
            self.group.ask("write_cache", theirs, kind=kind, numbers=numbers)
            return super().write_cache(kind, numbers, own)

    def new_weights(
        self, tensors: Mapping[str, Tensor], *, check_finite: bool
    ) -> Callable[[], None]:
        write = super().new_weights(tensors, check_finite=check_finite)
        new = NewWeights(self.original or {}, tensors, check_finite=False)
        writer = WeightWriter(self.decoder.held)
        for piece in new.messages(writer.packed):
            self.group.ask("prepare_weights", tensors=piece)

        def write_all() -> None:
            with Shield().up():
                for piece in new.messages(writer.exact):
                    self.group.ask("write_weights", tensors=piece)
                write()

        return write_all

    def load_adapter(self, adapter: Adapter) -> list[str]:
        """See `Runner`. Each rank holds all of it, and adds it to the gathered columns."""
        load = partial(super().load_adapter, adapter)
        return self._together("load_adapter", load, adapter=adapter)

    def unload_adapter(self, number: int) -> None:
        unload = partial(super().unload_adapter, number)
        self._together("unload_adapter", unload, number=number)

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
        self.group.ask("sleep", weights=weights)

    def wake(self) -> None:
        with ThreadPoolExecutor(1) as pool:  # all ranks read at the same time
            own = pool.submit(super().wake)
            self.group.ask("wake")
            own.result()

    def close(self) -> None:
        with ExitStack() as last_first:
            last_first.callback(give_back_freed)
            last_first.callback(super().close)
            last_first.callback(self.ranks.close)
            last_first.callback(self._let_go)
