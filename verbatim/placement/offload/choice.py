"""`Offload`: the options of offloading, validated."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verbatim.common.checks import budget, integer, path, switch
from verbatim.errors import InvalidRequest

TIERS = ("gpu", "cpu", "disk")
_MAX_COUNT = 2**31 - 1
Percents = tuple[float, float, float]  # gpu, cpu, disk; the sum is 100


@dataclass(frozen=True, slots=True)
class Offload:
    """Offloading over three tiers: the device ("gpu"), the host's RAM ("cpu") and the disk.

    Weights on the disk are read directly from the checkpoint's safetensors, once per step for all running
    sequences, while earlier layers compute. Outputs do not depend on the placement.

    With `LLM(..., device="cuda")` the model computes on the GPU, and data in RAM or on the disk is copied to
    it ahead of use. On the CPU both upper tiers are RAM, each with its own budget, and their contents are
    used in place.

    Args:
        gpu: budget of the device tier: bytes, or "16GB". Covers everything: weights, K and V, buffers,
            activations. None: 60% of the available memory; on the CPU 0 if `cpu` is given.
        cpu: budget of the RAM tier: weights, K and V, and read buffers. None: 60% of the available memory; on
            the CPU 0.
        disk: folder for K and V and activations that leave memory, and for quantized weights. Files there are
            unnamed and disappear with the process. None: the system's folder for temporary files.
        weights: percents in (gpu, cpu, disk) with sum 100; of two values, the rest is on disk. None: chosen
            by the policy, within the budgets.
        kv: percents of K and V in (gpu, cpu, disk), as `weights`.
        activations: percents of the hidden states of waiting micro-batches, as `weights`.
        batch_size: sequences per micro-batch. None: chosen by the policy.
        micro_batches: micro-batches per read of a layer; `batch_size` times this many sequences run at
            once. None: chosen by the policy.
        overlap: whether reads and writes overlap with computation.
        cpu_cache_compute: compute attention over K and V of the cpu tier on the CPU. No effect without a GPU;
            True is refused with one, since GPU and CPU attention are not bit-identical.
        attention_top_k: number of highest-scoring keys that each query attends to. An approximation: outputs
            differ from those of the full model. None: all.
        policy: speeds from which settings that are None are chosen. "auto": measured on this machine; None:
            those of a nominal machine.
        workload: prompt tokens and new tokens of a typical request, for the policy.
        disk_limit: budget of `disk`: bytes, or "100GB". None: no limit.
        trace: file for a trace of reads, writes and computation in Chrome's format, written when the model
            is closed.

    Raises:
        InvalidRequest: a value is out of range; the message names it and the allowed values.
    """

    gpu: int | None = None
    cpu: int | None = None
    disk: Path | None = None
    weights: Percents | None = None
    kv: Percents | None = None
    activations: Percents | None = None
    batch_size: int | None = None
    micro_batches: int | None = None
    overlap: bool = True
    cpu_cache_compute: bool | None = None
    attention_top_k: int | None = None
    policy: str | None = "auto"
    workload: tuple[int, int] = (512, 128)
    disk_limit: int | None = None
    trace: Path | None = None

    if TYPE_CHECKING:  # the accepted types; the fields above have the resolved types

        def __init__(
            self,
            gpu: int | str | None = None,
            cpu: int | str | None = None,
            disk: str | os.PathLike[str] | None = None,
            weights: Sequence[float] | None = None,
            kv: Sequence[float] | None = None,
            activations: Sequence[float] | None = None,
            batch_size: int | None = None,
            micro_batches: int | None = None,
            overlap: bool = True,
            cpu_cache_compute: bool | None = None,
            attention_top_k: int | None = None,
            policy: str | None = "auto",
            workload: tuple[int, int] = (512, 128),
            disk_limit: int | str | None = None,
            trace: str | os.PathLike[str] | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        count = partial(integer, low=1, high=_MAX_COUNT, optional=True)
        for names, resolve in (
            (("gpu", "cpu", "disk_limit"), budget),
            (("weights", "kv", "activations"), percents),
            (("batch_size", "micro_batches", "attention_top_k"), count),
            (("cpu_cache_compute",), switch),
            (("disk", "trace"), path),
        ):
            for name in names:
                if (value := getattr(self, name)) is not None:
                    object.__setattr__(self, name, resolve(name, value))
        switch("overlap", self.overlap)
        if self.policy not in ("auto", None):
            raise InvalidRequest(f"policy={self.policy!r}: must be 'auto' or None")
        try:
            prompt, new = self.workload
        except (TypeError, ValueError):
            raise InvalidRequest(
                f"workload={self.workload!r}: must be (prompt tokens, new tokens)"
            ) from None
        workload = integer("workload[0]", prompt), integer("workload[1]", new)
        object.__setattr__(self, "workload", workload)

    def replace(self, **changes: Any) -> Offload:
        """Return a copy with these fields changed."""
        return replace(self, **changes)


def percents(name: str, value: Any) -> Percents:
    """Validate percents in (gpu, cpu, disk) with sum 100; of only two values, the rest is on disk."""
    message = (
        f"{name}={value!r}: must be percents in (gpu, cpu, disk) with sum 100, such as (20, 50, 30)"
    )
    value = value.tolist() if hasattr(value, "tolist") else value  # an array
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) not in (2, 3):
        raise InvalidRequest(message)
    for share in value:
        is_number = isinstance(share, numbers.Real) and not isinstance(share, bool)
        if not is_number or not math.isfinite(share) or not 0 <= share <= 100:
            raise InvalidRequest(message)
    gpu, cpu = float(value[0]), float(value[1])
    disk = float(value[2]) if len(value) == 3 else 100.0 - gpu - cpu
    if disk < 0 or abs(gpu + cpu + disk - 100) > 1e-6:
        raise InvalidRequest(message)
    return gpu, cpu, disk


def assign_tiers(sizes: Sequence[int], percents: Percents) -> list[str]:
    """Return a tier for each of `sizes`, so that every range has about these percents in each tier."""
    sums, total, tiers = [0.0, 0.0, 0.0], 0.0, []
    for size in sizes:
        total += size
        missing = [total * share / 100 - had for share, had in zip(percents, sums, strict=True)]
        best = max(range(3), key=lambda i: (percents[i] > 0, missing[i]))
        sums[best] += size
        tiers.append(TIERS[best])
    return tiers
