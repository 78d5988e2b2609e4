"""Helpers that resolve `LLM` options on this machine: threads, memory, dtypes, ranks."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from verbatim.common.checks import integer
from verbatim.errors import InvalidRequest

# The size of torch's thread pool before it is set; 0: the environment sets it.
_SETTINGS = "OMP_NUM_THREADS", "MKL_NUM_THREADS"
_UNSET_THREADS = 0 if any(name in os.environ for name in _SETTINGS) else torch.get_num_threads()


def thread_count(value: Any) -> int | None:
    """Validate `num_threads`: None, or 1 to four times the number of processors (or 64 if that is more)."""
    limit = max(64, 4 * (os.cpu_count() or 1))
    if value is not None and integer("num_threads", value) > limit:
        raise InvalidRequest(f"num_threads={value}: at most {limit} on this machine")
    return None if value is None else int(value)


def default_threads() -> int:
    """Return the size of torch's thread pool; unless it was set, at most `processor_limit`."""
    count = torch.get_num_threads()
    return min(count, processor_limit()) if count == _UNSET_THREADS else count


@cache
def processor_limit() -> int:
    """Return the number of processors that this process's container may use, or that the machine has."""
    limits = [float(os.cpu_count() or 1)]
    v1 = "cpu.cfs_quota_us", "cpu.cfs_period_us"
    for quota, period in _group_files("cpu", v1, ("cpu.max",)):
        if quota not in ("max", "-1"):
            limits.append(int(quota) / int(period))
    return max(1, math.ceil(min(limits)))


def total_memory() -> int:
    """Return the bytes of RAM in this machine, or the limit of this process's container if it is lower."""
    return min([_installed_memory(), *(limit for limit, _ in _memory_limits())])


def available_memory() -> int:
    """Return the bytes of RAM that are free or freed on demand, within the container's limit."""
    available = _installed_memory()
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    available = int(line.split()[1]) * 1024
    except OSError:
        pass
    return max(0, min([available, *(limit - used for limit, used in _memory_limits())]))


def _installed_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


_GROUPS, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def _memory_limits() -> Iterator[tuple[int, int]]:
    """Yield the memory limit and the use, in bytes, of each control group with this process."""
    v1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"
    for limit, used, *stat in _group_files("memory", v1, ("memory.max", "memory.current", v1[2])):
        with suppress(ValueError):  # no limit ("max")
            pages = dict(zip(stat[::2], map(int, stat[1::2]), strict=True))
            # What is free on demand; version 1 has a total besides the group's own.
            free = pages.get("total_inactive_file", pages.get("inactive_file", 0))
            yield int(limit), int(used) - free


def _group_files(kind: str, v1: Sequence[str], v2: Sequence[str]) -> Iterator[list[str]]:
    """Yield the words in some files of each control group with this process that limits a `kind` of resource.

    Args:
        v1, v2: names of the files in the two versions of control groups.
    """
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds and kind not in kinds.split(","):
            continue
        root, names = (_GROUPS / kind, v1) if kinds else (_GROUPS, v2)
        # In a container, `path` may be the host's: only the root is there.
        group = root / path.lstrip("/")
        for folder in (group, *group.parents[: len(group.parts) - len(root.parts)]):
            with suppress(OSError):  # no such group
                yield " ".join((folder / name).read_text() for name in names).split()


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float32" for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


# The dtypes of tensors that may be sent between processes, by name.
SENT_DTYPES = {
    dtype_name(dtype): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


def on_cpu() -> AbstractContextManager[Any]:
    """Run the block with the CPU as torch's default device."""
    # Fast path: without torch function modes, the CPU is the default device. A finalizer may run at
    # interpreter exit, when the imports of `torch.get_default_device` would fail.
    has_no_modes = not torch._C._len_torch_function_stack()
    if has_no_modes or sys.is_finalizing() or torch.get_default_device().type == "cpu":
        return nullcontext()
    return torch.device("cpu")


def rank_of(group: Any) -> int:
    """Return this process's rank in a group, 0 for None; raise InvalidRequest if it is not in the group."""
    if group is None:
        return 0
    if not dist.is_initialized():
        raise InvalidRequest("process_group: torch.distributed is not initialised")
    try:
        rank = dist.get_rank(group)
    except Exception as error:
        raise InvalidRequest(f"process_group={group!r} is not a process group: {error}") from None
    if rank < 0:
        raise InvalidRequest("process_group: this process is not one of its ranks")
    return rank
