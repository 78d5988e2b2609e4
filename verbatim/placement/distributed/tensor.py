"""Tensor parallelism: the share of each rank, and on rank 0 the group of the other ranks and the runner."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from verbatim.batch import Adapter, Batch, SamplePlan
from verbatim.common.heap import release_free_memory
from verbatim.common.shield import Shield
from verbatim.errors import StageFailed, TierFailed, VerbatimError, first_line
from verbatim.model.context import head_of
from verbatim.model.decoder import Decoder
from verbatim.model.draft_layers import DraftLayers
from verbatim.model.early_exit import open_draft_layers
from verbatim.model.products import threads
from verbatim.model.quantized import weight_bytes
from verbatim.model.spec import inner_model
from verbatim.placement.distributed.columns import HeadStore, own_layers, take_share
from verbatim.placement.distributed.exchange import Exchange
from verbatim.placement.distributed.group import StageGone, StageGroup, StageHandle
from verbatim.placement.distributed.hosts import Hosts
from verbatim.placement.distributed.launcher import WorkerProcess
from verbatim.placement.distributed.served import Served, draft_of, key_of
from verbatim.placement.distributed.wire import Message
from verbatim.placement.resident import Resident, open_store
from verbatim.protocols import Forward
from verbatim.weights.update import NewWeights

_REPORT_S = 3.0  # time limit for finding out which rank failed
_MORE_REPORTS_S = 0.05  # wait per rank for further reports, which may name the cause
_T = TypeVar("_T")
_EXIT_S = 2.0  # time until a process that closed its connection is known to have ended


class RankShare(Served):
    """A rank's share of a model; rank 0 calls its own directly, and those of other ranks by messages.

    All ranks make the calls that need no answer, so an error caused there by the batch or the model also
    occurs on rank 0, and is not reported.
    """

    calls = Served.calls | {"sizes", "share", "forward"}
    group: RankGroup | None = None  # the other ranks, on rank 0; None on these
    ranks: Exchange | None = None  # with the other ranks; None before `share`
    _args: Message
    # Set by `share`: the model, its draft layers and its division.
    decoder: Decoder
    draft_layers: DraftLayers
    placement: dict[str, Any]

    def call(self, message: Message) -> Any:
        try:
            return super().call(message)
        except BaseException as error:
            ours = isinstance(error, TierFailed) or not isinstance(error, VerbatimError)
            if ours or message["do"] == "share":
                self.leave()  # other ranks may wait for this one
            elif "call" not in message:
                return None
            raise

    def open(self, **args: Any) -> str:
        """Inspect the model, and return its numerics key.

        Args:
            args: `rank`, `size`, `source`, `options`, `draft` (see `describe_draft`), and `meeting` and
                `timeout_s` (see `Exchange`).
        """
        self.use(args["options"].device, args["rank"])
        options = replace(args["options"], device=self.device)
        self._args = {**args, "options": options}
        return key_of(self.skeleton(args["source"]), options)

    def share(self) -> None:
        """Read this rank's share of the weights, and inspect the model, on all ranks at the same time.

        Raises:
            UnsupportedModel: the model can't run flat batches; raised on all ranks.
            TierFailed: a file can't be read, or another rank is gone.
        """
        args, loaded, rank, size = self._args, self._loaded, self._args["rank"], self._args["size"]
        assert loaded is not None
        ranks, device = Exchange(args["meeting"], rank, size, args["timeout_s"]), self.device
        self.ranks, head = ranks, head_of(inner_model(loaded.module))
        with threads(args["options"].num_threads), ranks.on_all_ranks(), device.current():
            info = take_share(loaded, args["source"], ranks, device, head=head)
            self.placement = {"placement": "tensor parallel", "ranks": size, "exact": True, **info}
            loaded.move(device.torch)
            decoder = self.decoder = Decoder(
                loaded.module,
                fused=False,  # matrix products are split over ranks
                latent=device.stores_latent,
                batch_invariant=device.batch_invariant,
            )
            self.draft_layers = open_draft_layers(draft_of(args["draft"]), decoder, loaded)

    def sizes(self) -> Message:
        """Return the free memory after `share`, and the bytes of a token and of a slot of states here.

        Raises:
            NotSupported: the attention heads can't be split over this number of ranks.
        """
        spec, args = self.decoder.spec, self._args
        layers = own_layers(spec.layers, spec.query_heads, args["rank"], args["size"])
        return {
            **self.memory(),
            "token_bytes": args["options"].token_bytes(spec, self.draft_layers, layers),
            "state_bytes": sum(state.nbytes for state in spec.states),
        }

    def allocate(self, num_blocks: int, num_states: int) -> Message:
        """Allocate the KV store of this rank's heads, and all recurrent states, which are not split."""
        decoder, drafts, options = self.decoder, self.draft_layers, self._args["options"]
        assert self.ranks is not None and self._loaded is not None
        make = partial(HeadStore, query_heads=decoder.spec.query_heads, ranks=self.ranks)
        store = open_store(decoder.spec, options, drafts, num_blocks, num_states, make)
        parts = decoder, store, options.num_threads, drafts, self._loaded
        if self.group is None:
            self.runner = Resident(*parts)
        else:
            self.runner = LeadingRank(self.group, self.ranks, *parts)
        self.runner.placement = self.placement
        return {
            "kv_bytes": sum(each.nbytes for each in self.runner.stores),
            "weight_bytes": weight_bytes(decoder.raw_module),
            "row_widths": self.row_widths,
        }

    def leave(self) -> None:
        """Leave the exchange, so that other ranks do not wait for this one."""
        if self.ranks is not None:
            self.ranks.close()

    def close(self) -> None:
        """Free everything."""
        self.leave()
        super().close()


class RankGroup(StageGroup):
    """The ranks 1 to `size` - 1 of a tensor-parallel model, which are never replaced."""

    def __init__(self, hosts: Hosts, size: int, timeout_s: float) -> None:
        super().__init__(hosts, patience_s=timeout_s, step_timeout_s=timeout_s)
        self.size = size

    def start(self) -> None:
        """Start the other ranks; raises TierFailed if that fails."""
        try:
            self.members = self.launch(self.size - 1)
        except StageFailed as error:
            raise TierFailed(f"a rank of {self.size}: {error}") from None
        for rank, member in enumerate(self.members, start=1):
            member.index, member.name = rank, f"rank {rank} of {self.size}"
            if isinstance(member.host, WorkerProcess):
                member.name += f": process {member.host.pid}"

    def call_all(self, do: str, work: Callable[..., _T], **fields: Any) -> _T:
        """Make a call on all ranks: `work` on this one; return its result, as the others do not answer.

        Raises:
            TierFailed: a rank is gone, or failed alone; the message names it.
            VerbatimError: an error caused by the batch or the model, which is the same on all ranks.
        """
        self.notify(do, self.members, **fields)
        try:
            if self.lost:
                raise TierFailed("the call did not reach all ranks")
            return work(**fields)
        except TierFailed as error:
            raise self.failure(error) from error
        except VerbatimError:
            raise
        except Exception as error:  # the other ranks are still in the call that failed here
            text = f"{type(error).__name__}: {first_line(error)}"
            raise TierFailed(f"rank 0 of {self.size}: {text}") from error

    def call(
        self, do: str, members: list[StageHandle] | None = None, *args: Any, **fields: Any
    ) -> list[Any]:
        """See `StageGroup`. There is no time limit; raises TierFailed if one of all ranks is gone."""
        try:
            return super().call(do, members, *args, **{**fields, "patient": True})
        except StageGone as error:
            if members is not None:  # not all are started
                raise
            raise self.failure(error) from error

    def failure(self, error: Exception) -> TierFailed:
        """Find out which rank failed, and return the error that names it."""
        end = time.monotonic() + _REPORT_S
        reports: list[tuple[StageHandle, Message]] = []
        while not (self.lost or reports) and time.monotonic() < end:
            self.pump()
            reports += self.reports()
        for _ in self.members:
            self.pump(_MORE_REPORTS_S)
        # A rank that ended without a report is the cause of the reported failures.
        for member in self.lost:
            ended, host = "", member.host
            if isinstance(host, WorkerProcess) and host.wait(_EXIT_S):
                ended = f" has ended ({host.ended})"
            return TierFailed(f"{member.name}{ended}: {member.lost}")
        for member, report in reports:
            return TierFailed(f"{member.name}: {': '.join(report['error'])}")
        stuck = f"none is known to have ended, but one does not answer: {error}"
        return TierFailed(f"of {self.size} ranks, {stuck}")


class LeadingRank(Resident):
    """The runner of rank 0: makes each call on its own share and on the other ranks (`group`)."""

    def __init__(self, group: RankGroup, ranks: Exchange, *parts: Any) -> None:
        super().__init__(*parts)
        self.group, self.ranks = group, ranks
        # Runs at the latest when this object is freed, so its arguments must not refer to it.
        self._finalizer = weakref.finalize(self, group.close, os.getpid())
        self.memory: list[dict[str, Any]] = []  # results of `RankShare.allocate`, by rank
        self._asleep = False

    def forward(self, batch: Batch) -> Forward:
        return self._call_all("forward", super().forward, batch=batch)

    def draft(
        self, k: int, batch: Batch, plan: SamplePlan | None, lengths: list[int]
    ) -> list[list[int]]:
        own = partial(super().draft, k, batch, plan, lengths)  # the other ranks need no plan
        fields: Message = dict(k=k, batch=batch, plan=None, lengths=lengths)
        return self._call_all("draft", lambda **_: own(), **fields)

    def _call_all(self, do: str, work: Callable[..., _T], **fields: Any) -> _T:
        """See `RankGroup.call_all`. Ctrl-C is deferred, as either all ranks make the call or none."""
        with Shield().up():
            return self.group.call_all(do, work, **fields)

    def read_cache(self, kind: str, numbers: list[int], used: int | None = None) -> Tensor | None:
        rows = super().read_cache(kind, numbers, used)
        assert rows is not None
        if kind == "states":  # every rank has the states of all layers
            return rows
        with Shield().up():
            others = self.group.call("read_cache", kind=kind, numbers=numbers, used=used)
            return torch.cat([rows, *others], dim=1)

    def write_cache(self, kind: str, numbers: list[int], rows: Tensor) -> bool:
        own, *shares = [rows] * self.ranks.size
        if kind == "blocks":
            own, *shares = rows.split([sum(m["row_widths"][kind]) for m in self.memory], dim=1)
        with Shield().up():
            theirs = [{"rows": share} for share in shares]
            self.group.call("write_cache", per_member=theirs, kind=kind, numbers=numbers)
            return super().write_cache(kind, numbers, own)

    def new_weights(
        self, tensors: Mapping[str, Tensor], *, check_finite: bool
    ) -> Callable[[], None]:
        write = super().new_weights(tensors, check_finite=check_finite)
        new = NewWeights(self.original or {}, tensors, check_finite=False)
        writer, others = self.writer(), len(self.group.members)
        self.group.send_weights("prepare_weights", new, [writer.packed] * others)

        def write_all() -> None:
            with Shield().up():
                try:
                    self.group.send_weights("write_weights", new, [writer.exact] * others)
                    write()
                except BaseException:  # some ranks may have new weights: no forward is possible
                    self.ranks.close()
                    raise

        return write_all

    def load_adapter(self, adapter: Adapter) -> list[str]:
        """See `Runner`. Each rank holds the whole adapter, and adds its term to the gathered columns."""
        return self._call_all("load_adapter", super().load_adapter, adapter=adapter)

    def unload_adapter(self, number: int) -> None:
        self._call_all("unload_adapter", super().unload_adapter, number=number)

    def info(self) -> dict[str, Any]:
        kv_bytes = [0 if self._asleep else rank["kv_bytes"] for rank in self.memory]
        return {
            **super().info(),
            "rank_weight_bytes": [rank["weight_bytes"] for rank in self.memory],
            "kv_bytes": sum(kv_bytes),
            "rank_kv_bytes": kv_bytes,
        }

    def sleep(self, weights: bool) -> None:
        super().sleep(weights)
        self.group.call("sleep", weights=weights)
        self._asleep = True

    def wake(self) -> None:
        with ThreadPoolExecutor(1) as pool:  # all ranks read their weights at the same time
            future = pool.submit(super().wake)
            self.group.call("wake")
            future.result()
        self._asleep = False

    def close(self) -> None:
        with ExitStack() as last_first:
            last_first.callback(release_free_memory)
            last_first.callback(super().close)
            last_first.callback(self.ranks.close)
            last_first.callback(self._finalizer)
