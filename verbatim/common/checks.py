"""Validates types, numbers and amounts of memory in arguments; extracts the docs of settings."""

from __future__ import annotations

import dataclasses
import inspect
import math
import numbers
import operator
import os
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verbatim.errors import InvalidRequest

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_MAX_BUDGET = 1 << 62  # a budget may exceed this machine's memory, to plan for another machine
_AMOUNT = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*|%)\s*$")


def as_index(value: Any) -> int | None:
    """Convert an integer of Python, numpy or torch to an int; None for anything else, including a bool."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except (TypeError, RuntimeError):  # RuntimeError: a tensor without data
        return None


def integer(
    name: str,
    value: Any,
    low: int = 1,
    high: int | None = None,
    *,
    why: str = "",
    optional: bool = False,
) -> int:
    """Convert an integer of Python, numpy or torch, from `low` to `high`, to an int.

    Args:
        why: origin of `high`, for the error message.
        optional: whether the error message says that None is allowed.

    Raises:
        InvalidRequest: anything else.
    """
    index = as_index(value)
    if index is None or index < low or (high is not None and index > high):
        upper = " or more" if high is None else f" to {high}{why and f' ({why})'}"
        or_none = ", or None" if optional else ""
        raise InvalidRequest(f"{name}={value!r}: must be an integer, {low}{upper}{or_none}")
    return index


def optional_integer(name: str, value: Any, low: int = 1, high: int | None = None) -> int | None:
    """Return `integer(...)`, or None for None."""
    return None if value is None else integer(name, value, low, high, optional=True)


def number(
    name: str,
    value: Any,
    low: float,
    high: float | None = None,
    *,
    above: bool = False,
    unit: str = "",
) -> float:
    """Convert a finite number from `low` to `high` to a float.

    Args:
        above: whether `low` itself is excluded.
        unit: unit for the error message, such as " of seconds".

    Raises:
        InvalidRequest: anything else.
    """
    try:
        is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
        real = float(value) if is_real else math.nan
    except OverflowError:
        real = math.inf
    fits = math.isfinite(real) and (real > low if above else real >= low)
    if not fits or (high is not None and real > high):
        lower = f" above {low:g}" if above else f", {low:g} or more"
        upper = "" if high is None else f" and at most {high:g}"
        shown = real if is_real else value
        raise InvalidRequest(f"{name}={shown!r}: must be a finite number{unit}{lower}{upper}")
    return real


def optional_seconds(name: str, value: Any, *, above: bool = False) -> float | None:
    """Return a number of seconds, 0 or more, or None for None."""
    return None if value is None else number(name, value, 0.0, above=above, unit=" of seconds")


def switch(name: str, value: Any) -> bool:
    """Return `value` if it is a bool."""
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name}={value!r}: must be True or False")
    return value


def check_kind(name: str, value: Any, kind: Any, expected: str) -> None:
    """Raise InvalidRequest unless `value` is an instance of `kind`, a type or a union of types."""
    if not isinstance(value, kind):
        raise InvalidRequest(f"{name}={value!r}: must be {expected}")


def path(name: str, value: Any) -> Path:
    """Convert a string or another path that a file can have to a Path, with "~" expanded.

    Raises:
        InvalidRequest: anything else, such as "" or "a\\0b".
    """
    try:
        encoded = b"" if isinstance(value, bytes) else os.fsencode(value)
    except (TypeError, UnicodeEncodeError):
        encoded = b""
    if not encoded or b"\0" in encoded:
        raise InvalidRequest(f"{name}={value!r}: must be a path")
    return Path(os.path.expanduser(os.fsdecode(value)))


def check_fields(settings: Any, numbers: Mapping[str, tuple[Any, ...]]) -> None:
    """Check the numeric and bool fields of a dataclass; numbers are converted to Python's types.

    `numbers` maps a field's name to one of the functions above and its limits.
    """
    for name, (check, *limits) in numbers.items():
        object.__setattr__(settings, name, check(name, getattr(settings, name), *limits))
    for field in dataclasses.fields(settings):
        if field.type == "bool":
            switch(field.name, getattr(settings, field.name))


def memory_bytes(value: int | str, total: int) -> int:
    """Convert 5000000, "512MB", "2GiB" or "40%" (of `total`) to bytes.

    Raises:
        InvalidRequest: anything else, 0, or more than `total`.
    """
    amount = _bytes_of(value, total)
    if amount is None:
        raise InvalidRequest(
            f"kv_memory={value!r}: must be bytes, an amount such as '512MB', or a share such as '40%'"
        )
    if amount > total and isinstance(value, str) and "%" in value:
        raise InvalidRequest(f"kv_memory={value!r}: a share is at most 100%")
    if not 0 < amount <= total:
        raise InvalidRequest(
            f"kv_memory={value!r} is {amount} bytes; must be between 1 and {total}, this machine's memory"
        )
    return amount


def budget(name: str, value: Any) -> int:
    """Convert 0, 5000000 or "16GB" to bytes; it may be more than this machine's memory."""
    amount = _bytes_of(value)
    if amount is None or not 0 <= amount <= _MAX_BUDGET:
        raise InvalidRequest(
            f"{name}={value!r}: must be bytes, 0 to {_MAX_BUDGET}, or an amount such as '16GB'"
        )
    return amount


def _bytes_of(value: Any, total: int | None = None) -> int | None:
    """Convert a number, an amount or, with `total`, a share to bytes; None for anything else."""
    match = _AMOUNT.match(value) if isinstance(value, str) else None
    if match is None:
        return as_index(value)
    share = total / 100 if total is not None and match[2] == "%" else None
    unit = _UNITS.get(match[2].upper(), share)
    return None if unit is None else int(min(float(match[1]) * unit, 2.0**63))


def field_docs(settings: type) -> dict[str, str]:
    """Return the text of each field in a class's docstring; "" for other names, and under `python -OO`."""
    doc = inspect.cleandoc(settings.__doc__ or "")
    section = re.split(r"^(?:Args|Attributes):\n", doc, maxsplit=1, flags=re.MULTILINE)[-1]
    entries = re.split(r"^    (?=\w)", section.partition("\n\n")[0], flags=re.MULTILINE)[1:]
    pairs = (" ".join(entry.split()).partition(": ") for entry in entries)
    return defaultdict(str, {name: text for name, _, text in pairs})
