"""Validation of the options of `LLM`: numbers, switches and amounts of memory."""

from __future__ import annotations

import numbers
import os
import re
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from verbatim.checks import integer
from verbatim.errors import InvalidRequest

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_ANY_SIZE = 1 << 62  # a budget may be larger than this machine, for a plan of another one
_AMOUNT = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*|%)\s*$")


def thread_count(value: Any) -> int | None:
    """Return `num_threads`: None, or 1 to four times the processors (64 at least)."""
    most = max(64, 4 * (os.cpu_count() or 1))
    if value is not None and integer("num_threads", value) > most:
        raise InvalidRequest(f"num_threads={value}: at most {most} on this machine")
    return None if value is None else int(value)


def memory_bytes(value: int | str, total: int) -> int:
    """Return the bytes of 5000000, "512MB", "2GiB" or "40%" (of `total`).

    Raises:
        InvalidRequest: anything else, nothing, or more than `total`.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        amount = value
    else:
        match = _AMOUNT.match(value) if isinstance(value, str) else None
        unit = match[2].upper() if match else "?"
        if match is None or (unit != "%" and unit not in _UNITS):
            raise InvalidRequest(
                f"kv_memory={value!r}: must be bytes, an amount such as '512MB', or a share such as '40%'"
            )
        number = float(match[1])
        if unit == "%" and number > 100:
            raise InvalidRequest(f"kv_memory={value!r}: a share is at most 100%")
        amount = int(number * total / 100) if unit == "%" else int(number * _UNITS[unit])
    if not 0 < amount <= total:
        raise InvalidRequest(
            f"kv_memory={value!r} is {amount} bytes; must be between 1 and {total}, this machine's memory"
        )
    return amount


def budget(name: str, value: Any) -> int:
    """Return the bytes of 0, 5000000 or "16GB", which may be more than this machine has."""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        value = int(value)
        if value == 0:
            return 0
    try:
        if isinstance(value, str) and "%" in value:
            raise InvalidRequest("")
        return memory_bytes(value, _ANY_SIZE)
    except InvalidRequest:
        raise InvalidRequest(
            f"{name}={value!r}: must be bytes, 0 or more, or an amount such as '16GB'"
        ) from None


def total_memory() -> int:
    """Return the bytes of RAM in this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_memory() -> int:
    """Return the bytes of RAM that are free or can be freed now."""
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return total_memory()


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float32" for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


# The dtypes of tensors that processes send to each other, by name.
SENT_DTYPES = {
    dtype_name(dtype): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


def on_cpu() -> AbstractContextManager[Any]:
    """Run the block with the CPU as torch's default device."""
    if torch.get_default_device().type == "cpu":
        return nullcontext()
    return torch.device("cpu")


def rank_of(group: Any) -> int:
    """Return this process's rank in `process_group`; 0 where it is None.

    Raises:
        InvalidRequest: it is not a group, or this process is not in it.
    """
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
