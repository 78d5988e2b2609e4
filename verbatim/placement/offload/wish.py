"""What a plan is to be made for: the model, the user's choices, the limits."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, replace

from verbatim.options import available_memory
from verbatim.placement.offload.choice import Offload, Percents
from verbatim.placement.offload.machine import NOMINAL, Machine
from verbatim.placement.offload.shape import ModelShape
from verbatim.placement.options import EngineOptions

IN_MEMORY: Percents = (100.0, 0.0, 0.0)
ANY = 1 << 60  # bytes: as many as it takes
_KV_SHARE = 0.4  # of the memory that is available, for K and V, where no budget is given
_SHARE = 0.6  # of the memory that is available, where no budget is given


@dataclass(frozen=True, slots=True)
class Wish:
    """What is given: the model, the user's choices, the limits.

    Attributes:
        gpu, cpu, disk: bytes that the tiers may hold, beside the checkpoint.
        budget: of gpu and cpu together; None: as much as it takes.
        workload: (prompt, new) tokens, within the model's limit.
        limit: tokens of a sequence at most.
        most_kv: bytes of K and V at most, where no budget says so.
    """

    shape: ModelShape
    offload: Offload
    options: EngineOptions
    machine: Machine
    gpu: int
    cpu: int
    disk: int
    budget: int | None
    workload: tuple[int, int]
    limit: int | None
    most_kv: int = ANY

    @property
    def context(self) -> int:
        return sum(self.workload)

    def kv_bytes(self, sequences: int) -> int:
        """Of so many sequences, in whole blocks, and the scratch block; and of one sequence of the longest
        length, as far as a quarter of the budget goes, since the workload is only what is usual."""
        if self.options.kv_bytes is not None:
            return self.options.kv_bytes
        block = self.options.block_size
        a_block = block * self.shape.kv_bytes_per_token
        blocks = sequences * -(-self.context // block) + 1
        if self.limit is not None and self.budget is not None:
            longest = -(-self.limit // block) + 1
            blocks = max(blocks, min(longest, self.budget // 4 // max(1, a_block)))
        return min(blocks, max(2, self.most_kv // max(1, a_block))) * a_block

    def within(self, budget: int) -> Wish:
        """The same with another budget of gpu and cpu together, in the same proportion."""
        if self.offload.gpu is None or self.offload.cpu is None:
            return replace(self, budget=budget, gpu=budget, cpu=budget)
        gpu = budget * self.gpu // max(1, self.gpu + self.cpu)
        return replace(self, budget=budget, gpu=gpu, cpu=budget - gpu)


def wish_of(
    shape: ModelShape, offload: Offload, options: EngineOptions, machine: Machine, limit: int | None
) -> Wish:
    """The same from what a user says.

    Args:
        limit: tokens of a sequence at most; None: any number.
    """
    gpu, cpu, budget = offload.gpu, offload.cpu, None
    if gpu is not None or cpu is not None:
        budget = (gpu or 0) + (cpu or 0)
    elif offload.weights is None:
        gpu = budget = int(available_memory() * _SHARE)
    # Where one budget is given, it is for all that is in memory, whatever its tier is called.
    together = ANY if budget is None else budget
    folder = offload.disk or tempfile.gettempdir()
    disk = ANY if offload.disk_limit is None else offload.disk_limit
    try:
        stat = os.statvfs(folder)
        disk = min(disk, int(stat.f_bavail * stat.f_frsize * 0.9))
    except OSError:
        pass  # whoever opens the folder says what is wrong with it
    prompt, new = offload.workload
    if limit is not None:
        prompt = min(prompt, max(1, limit - 1))
        new = min(new, max(1, limit - prompt))
    return Wish(
        shape,
        offload,
        options,
        machine,
        together if cpu is None else gpu or 0,
        together if gpu is None or cpu is None else cpu,
        disk,
        budget,
        (prompt, new),
        limit,
        int(available_memory() * _KV_SHARE) if budget is None else ANY,
    )


def may_spill(shape: ModelShape, offload: Offload, options: EngineOptions) -> bool:
    """Might K and V or activations go to the disk?"""
    if (offload.kv or IN_MEMORY)[2] or (offload.activations or IN_MEMORY)[2]:
        return True
    wish = wish_of(shape, offload, options, NOMINAL, None)
    return (
        offload.kv is None
        and wish.budget is not None
        and (wish.kv_bytes(options.max_sequences) + shape.nbytes > wish.budget)
    )
