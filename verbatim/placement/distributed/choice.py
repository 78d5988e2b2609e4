"""The options of `Cluster`, `TensorParallel`, `PipelineParallel` and `ExpertParallel`, validated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from verbatim.common.checks import check_fields, integer, number, optional_integer
from verbatim.errors import InvalidRequest, NotSupported
from verbatim.placement.offload.choice import Offload

MAX_STAGES = 512
_SECONDS = (partial(number, low=0.0, above=True, unit=" of seconds"),)
_NUMBERS: dict[str, tuple[Any, ...]] = {  # of `Cluster`
    **dict.fromkeys(("stages", "micro_batches"), (optional_integer, 1, MAX_STAGES)),
    **dict.fromkeys(("spares", "max_restarts"), (integer, 0, 64)),
    **dict.fromkeys(("patience_s", "step_timeout_s"), _SECONDS),
}
_SIZE_AND_TIMEOUT: dict[str, tuple[Any, ...]] = {"size": (integer,), "timeout_s": _SECONDS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A model in pipeline stages: processes with some of the layers each, on one or several machines.

    Outputs do not depend on the assignment of layers, on the machines, or on failures: a lost stage is
    replaced, and requests in progress are recomputed and continue with the same tokens. Use only machines
    that trust each other: see docs/cluster.md.

    Args:
        stages: number of stages. None: one per machine, and two on a single machine.
        address: "host:port" of a Ray cluster, as printed by `verbatim cluster start`. None: the cluster that
            this process is connected to, or `RAY_ADDRESS`; otherwise, without Ray, processes on this machine
            that end when the model is closed.
        layers: number of layers of each stage, in order. None: assigned by memory and measured speed.
        spares: idle processes that replace lost stages, 0 to 64.
        micro_batches: micro-batches per forward, which overlap in different stages. None: the number of
            stages if a forward has many rows, else one.
        max_restarts: maximum losses of stages that a request survives between two tokens, 0 to 64. Lost
            stages are replaced in any case.
        patience_s: seconds of silence after which a stage is lost.
        step_timeout_s: seconds of computing one micro-batch after which a stage is lost.
        hosts: a custom source of processes, with the interface of
            `verbatim.placement.distributed.hosts.Hosts`.
        offload: the memory tiers of each stage, with budgets per stage; without budgets, the stages of a
            machine share 60% of its available memory. None: all weights are in memory.

    Raises:
        InvalidRequest: a value is out of range; the message names the value and the range.
        NotSupported: `offload` with a trace.
    """

    stages: int | None = None
    address: str | None = None
    layers: Sequence[int] | None = None
    spares: int = 1
    micro_batches: int | None = None
    max_restarts: int = 3
    patience_s: float = 3.0
    step_timeout_s: float = 300.0
    hosts: Any = None
    offload: Offload | None = None

    def __post_init__(self) -> None:
        check_fields(self, _NUMBERS)
        if self.offload is not None and not isinstance(self.offload, Offload):
            raise InvalidRequest(f"offload={self.offload!r}: must be an Offload, or None")
        if self.offload is not None and self.offload.trace is not None:
            raise NotSupported(
                "offload=Offload(trace=...): not supported in stages of a Cluster, which may end at any "
                "time; a trace is written at the end"
            )
        if self.address is not None and not isinstance(self.address, str):
            raise InvalidRequest(f"address={self.address!r}: must be a string such as 'host:6379'")
        if self.layers is not None:
            self._resolve_layers()

    def _resolve_layers(self) -> None:
        value = self.layers
        if isinstance(value, str | bytes) or not isinstance(value, Sequence) or not value:
            raise InvalidRequest(f"layers={value!r}: must be the number of layers of each stage")
        layers = tuple(integer("layers", count) for count in value)
        if self.stages is not None and self.stages != len(layers):
            raise InvalidRequest(
                f"layers={layers} makes {len(layers)} stages, but stages={self.stages}"
            )
        object.__setattr__(self, "layers", layers)


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """Tensor parallelism over processes of one machine: each holds some columns of every weight matrix, some
    attention heads with their K and V, and some experts.

    Columns are gathered, and no sum is split over processes: results are bit-identical to one process.

    Under torchrun, or if torch.distributed is initialized, its ranks are used: each opens the same model and
    makes the same calls of `generate`, `score` and `chat`; rank 0 runs them, and all get its results.
    Otherwise `size` - 1 processes are started, and stopped by `close()`.

    Args:
        size: number of ranks, including this process.
        exact: must be True. Summing partial products over ranks, which sends less and gives other bits, is
            not supported.
        timeout_s: seconds that a rank waits for another, in a forward and at opening.

    Raises:
        InvalidRequest, NotSupported: a value is out of range or not supported.
    """

    size: int
    exact: bool = True
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        if self.exact is not True:
            raise NotSupported(
                f"exact={self.exact!r}: not supported; weights are split by columns and results "
                "gathered, which is bit-identical to one process; leave it at True"
            )
        check_fields(self, _SIZE_AND_TIMEOUT)


@dataclass(frozen=True, slots=True)
class PipelineParallel:
    """Pipeline parallelism over processes of one machine: each holds some layers and their K and V.

    A `Cluster` with a stage on each rank. Under torchrun, or if torch.distributed is initialized, its ranks
    are used, as for `TensorParallel`, and rank 0 has the last layers; otherwise `size` processes are started
    on this machine, and replaced if they are lost.

    Args:
        size: number of stages.
        timeout_s: seconds of computing one micro-batch, or of silence at opening, after which a rank is lost.
        offload: the memory tiers of each stage; see `Cluster`.

    Raises:
        InvalidRequest: a value is out of range.
    """

    size: int
    timeout_s: float = 300.0
    offload: Offload | None = None

    def __post_init__(self) -> None:
        check_fields(self, _SIZE_AND_TIMEOUT)
        Cluster(offload=self.offload)  # validates it


@dataclass(frozen=True, slots=True)
class ExpertParallel:
    """Expert parallelism: the experts are split over the ranks of a process group, the rest is replicated.

    Each rank has its own requests, or none. Rows are sent to the ranks of their experts and back, so all
    ranks must run the same number of forwards: all must make the same number of calls to `generate`, `score`
    or `rl.rollout`, and a rank without requests runs the smallest batch.

    Args:
        process_group: a torch.distributed group with gloo. None: all ranks.
    """

    process_group: Any = None


Ranked = TensorParallel | PipelineParallel | ExpertParallel
