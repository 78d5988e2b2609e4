"""Helpers that resolve `LLM` options on this machine: threads, memory, dtypes, ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from verbatim.common.checks import integer
from verbatim.errors import InvalidRequest


def thread_count(value: Any) -> int | None:
    """Validate `num_threads`: None, or 1 to four times the number of processors (or 64 if that is more)."""
    limit = max(64, 4 * (os.cpu_count() or 1))
    if value is not None and integer("num_threads", value) > limit:
        raise InvalidRequest(f"num_threads={value}: at most {limit} on this machine")
    return None if value is None else int(value)


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


# Files of a control group with its limit and its use, and the part of the use that is free on demand.
_GROUPS, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_FILES_V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "
_FILES_V2 = "memory.max", "memory.current", "inactive_file "


def _memory_limits() -> Iterator[tuple[int, int]]:
    """Yield the memory limit and the use, in bytes, of each control group with this process."""
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if "memory" in kinds.split(","):
            root, (limit_file, used_file, reclaimable) = _GROUPS / "memory", _FILES_V1
        elif not kinds:
            root, (limit_file, used_file, reclaimable) = _GROUPS, _FILES_V2
        else:
            continue
        # In a container, `path` may be the host's: only the root is there.
        group = root / path.lstrip("/")
        for folder in (group, *group.parents[: len(group.parts) - len(root.parts)]):
            try:
                limit, used = (int((folder / name).read_text()) for name in (limit_file, used_file))
                stat = (folder / "memory.stat").read_text().splitlines()
            except (OSError, ValueError):  # no such group, or no limit ("max")
                continue
            free = [int(x.split()[1]) for x in stat if x.startswith(reclaimable)]
            yield limit, used - sum(free)


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
