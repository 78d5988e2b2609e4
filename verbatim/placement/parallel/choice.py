"""`TensorParallel`, `PipelineParallel`, `ExpertParallel`: the options of parallel ranks, validated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from verbatim.errors import InvalidRequest, NotSupported
from verbatim.options import positive
from verbatim.placement.cluster.choice import Cluster
from verbatim.placement.offload.choice import Offload


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """Tensor parallelism over processes of one machine: each holds some columns of every weight matrix, some
    attention heads with their K and V, and some experts.

    Columns are gathered, and nothing is summed over processes, so all bits equal those of one process.

    Under torchrun, or if torch.distributed is initialized, its ranks are used: each opens the same model and
    makes the same calls of `generate`, `score` and `chat`; rank 0 runs them, and all get its results.
    Otherwise `size` - 1 processes are started, and stopped by `close()`.

    Args:
        size: number of ranks, including this process.
        exact: must be True. Summing partial products over ranks, which sends less and gives other bits, is
            not supported.
        timeout_s: seconds that ranks wait for another one, in a forward and at opening.

    Raises:
        InvalidRequest, NotSupported: a value out of range or not supported.
    """

    size: int
    exact: bool = True
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        positive("size", self.size)
        if self.exact is not True:
            raise NotSupported(
                f"exact={self.exact!r}: not supported; weights are split by columns and results gathered, "
                "which gives the bits of one process; leave it at True"
            )
        _check_seconds(self.timeout_s)


@dataclass(frozen=True, slots=True)
class PipelineParallel:
    """Pipeline parallelism over processes of one machine: each holds some layers and their K and V.

    A `Cluster` with a stage on each rank. Under torchrun, or if torch.distributed is initialized, its ranks
    are used, as for `TensorParallel`, and rank 0 has the last layers; otherwise `size` processes are started
    on this machine, and replaced if they are lost.

    Args:
        size: number of stages.
        timeout_s: seconds of computing one micro-batch, or of silence at opening, after which a rank is lost.
        offload: as of `Cluster`.

    Raises:
        InvalidRequest: a value out of range.
    """

    size: int
    timeout_s: float = 300.0
    offload: Offload | None = None

    def __post_init__(self) -> None:
        positive("size", self.size)
        Cluster(offload=self.offload)  # checks it
        _check_seconds(self.timeout_s)


@dataclass(frozen=True, slots=True)
class ExpertParallel:
    """Expert parallelism: the experts are split over the ranks of a process group, the rest is replicated.

    Each rank has its own requests, or none. Rows are sent to the ranks of their experts and back, so all
    ranks run the same number of forwards: all must call `generate`, `score` or `rl.rollout` equally often,
    and a rank without requests runs the smallest batch.

    Args:
        process_group: a torch.distributed group with gloo. None: all ranks.
    """

    process_group: Any = None


Ranked = TensorParallel | PipelineParallel | ExpertParallel


def _check_seconds(value: Any) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not (math.isfinite(value) and value > 0)
    ):
        raise InvalidRequest(f"timeout_s={value!r}: must be a number of seconds above 0")
