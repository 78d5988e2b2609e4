"""What a user may say about several ranks, checked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from verbatim.errors import InvalidRequest, NotSupported
from verbatim.options import positive


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """A model over several processes of one machine: each holds some columns of every product, some heads of
    attention with their K and V, and some experts.

    Columns are gathered and nothing is added up over processes, so every bit is that of one process.

    Under torchrun, or where torch.distributed is initialised, these are its ranks: each opens the same model
    and makes the same calls of `generate`, `score` and `chat`; rank 0 runs them, and all get its results.
    Elsewhere, `size` - 1 processes are started, and end with `close()`.

    Args:
        size: ranks, this process included.
        exact: True. Adding parts of products up over ranks, which is less to send and gives other bits, is
            not built.
        timeout_s: seconds that a rank may keep the others waiting, in a forward and when it is opened.

    Raises:
        InvalidRequest, NotSupported: a value out of range or not built.
    """

    size: int
    exact: bool = True
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        positive("size", self.size)
        if self.exact is not True:
            raise NotSupported(
                f"exact={self.exact!r} is not built: products are cut by columns and gathered, which gives "
                "the bits of one process; leave it at True"
            )
        _check_seconds(self.timeout_s)


@dataclass(frozen=True, slots=True)
class PipelineParallel:
    """A model over several processes of one machine, each with some layers and their K and V.

    Hidden states go from rank to rank by gloo. Rank 0 holds the last layers and draws, so logits never
    travel. Processes are found or started as for `TensorParallel`; only one rank computes at a time.

    Args:
        size: ranks, this process included.
        timeout_s: seconds that a rank may keep the others waiting, in a forward and when it is opened.

    Raises:
        InvalidRequest: a value out of range.
    """

    size: int
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        positive("size", self.size)
        _check_seconds(self.timeout_s)


@dataclass(frozen=True, slots=True)
class ExpertParallel:
    """A mixture-of-experts model whose experts are spread over the ranks of a process group.

    Everything else is on every rank, which has requests of its own, or none. A token's rows are sent to where
    its experts are and back, so the ranks make equally many forwards: all of them call `generate`, `score` or
    `rl.rollout` equally often, and a rank without requests makes the smallest batch.

    Args:
        process_group: of torch.distributed, with gloo; None: all ranks.
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
