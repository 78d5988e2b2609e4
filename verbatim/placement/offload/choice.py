"""What a user may say about offloading, checked."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verbatim.errors import InvalidRequest
from verbatim.options import budget, positive, switch

Percents = tuple[float, float, float]  # gpu, cpu, disk; together 100


@dataclass(frozen=True, slots=True)
class Offload:
    """A model spread over three tiers: the device ("gpu"), the host's RAM ("cpu") and the disk.

    Weights on the disk are read straight from the checkpoint's safetensors, once in each step for all
    sequences that run, while the layers before them compute. No word depends on where anything lies.

    On a machine without a GPU both of the upper tiers are RAM, each with its own budget, and what lies in
    either is used where it is.

    Args:
        gpu: what the device tier may hold: bytes, or "16GB". With None and no `cpu`: 60% of the memory
            that is available. Everything counts against it: weights, K and V, buffers, activations.
        cpu: the same of the host's RAM; None: nothing.
        disk: a folder for K and V and activations that leave memory, and for compressed weights. What is
            written there has no name and is gone with the process. None: the system's folder for
            temporary files.
        weights: percents in (gpu, cpu, disk), together 100; two of them leave the rest to the disk. None
            lets the policy choose, within the budgets.
        kv: the same for K and V.
        activations: the same for the hidden states of micro-batches that wait for their turn.
        batch_size: sequences of a micro-batch, which computes at once. None lets the policy choose.
        micro_batches: of them that share each reading of a layer; `batch_size` times this is what
            runs at once. None lets the policy choose.
        overlap: read and write while computing; False does one after the other.
        cpu_cache_compute: attention over K and V in the cpu tier runs there; False copies them to the
            device first. None: wherever no copy is needed.
        attention_top_k: each query attends only to this many of the likeliest earlier tokens. This is
            an approximation: the words are others than those of the whole model. None attends to all.
        policy: "auto" measures this machine and chooses what was left open; None takes simple defaults.
        workload: (prompt tokens, new tokens) of a typical request, for the policy.
        disk_limit: what may be written to `disk`: bytes, or "100GB". None: as much as it needs.
        trace: a file for a trace of reads, writes and computation, in Chrome's format, written by `close`.

    Raises:
        InvalidRequest: a value out of range; the message names it and what is allowed.
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

    if TYPE_CHECKING:  # what may be said, beside what it is then settled to

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
        def settle(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        for name in ("gpu", "cpu", "disk_limit"):
            value = getattr(self, name)
            settle(name, None if value is None else budget(name, value))
        for name in ("weights", "kv", "activations"):
            value = getattr(self, name)
            settle(name, None if value is None else percents(name, value))
        for name in ("batch_size", "micro_batches", "attention_top_k"):
            if getattr(self, name) is not None:
                positive(name, getattr(self, name))
        switch("overlap", self.overlap)
        if self.cpu_cache_compute is not None:
            switch("cpu_cache_compute", self.cpu_cache_compute)
        if self.policy not in ("auto", None):
            raise InvalidRequest(f"policy={self.policy!r}: must be 'auto' or None")
        for name in ("disk", "trace"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str | os.PathLike):
                raise InvalidRequest(f"{name}={value!r}: must be a path")
            settle(name, None if value is None else Path(value).expanduser())
        try:
            prompt, new = self.workload
        except (TypeError, ValueError):
            raise InvalidRequest(
                f"workload={self.workload!r}: must be (prompt tokens, new tokens)"
            ) from None
        settle("workload", (positive("workload[0]", prompt), positive("workload[1]", new)))

    def replace(self, **changes: Any) -> Offload:
        """The same with other values."""
        return Offload(**{f.name: getattr(self, f.name) for f in fields(self)} | changes)


def percents(name: str, value: Any) -> Percents:
    """Two or three percents as three that make 100."""
    said = f"{name}={value!r}: must be percents in (gpu, cpu, disk) that make 100, as (20, 50, 30)"
    value = value.tolist() if hasattr(value, "tolist") else value  # an array
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) not in (2, 3):
        raise InvalidRequest(said)
    for share in value:
        is_number = isinstance(share, numbers.Real) and not isinstance(share, bool)
        if not is_number or not math.isfinite(share) or not 0 <= share <= 100:
            raise InvalidRequest(said)
    gpu, cpu = float(value[0]), float(value[1])
    disk = float(value[2]) if len(value) == 3 else 100.0 - gpu - cpu
    if disk < 0 or abs(gpu + cpu + disk - 100) > 1e-6:
        raise InvalidRequest(said)
    return gpu, cpu, disk
