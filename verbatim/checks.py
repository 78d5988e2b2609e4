"""Validation of numbers, switches and amounts of memory that callers pass; documentation of settings."""

from __future__ import annotations

import dataclasses
import inspect
import math
import numbers
import operator
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from verbatim.errors import InvalidRequest

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_ANY_SIZE = 1 << 62  # a budget may be larger than this machine, for a plan of another one
_AMOUNT = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*|%)\s*$")


def as_index(value: Any) -> int | None:
    """Return an integer of Python, numpy or torch as Python's; None for anything else, a bool included."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except (TypeError, RuntimeError):  # a tensor without data is the latter
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
    """Return an integer of Python, numpy or torch from `low` to `high` as Python's.

    Args:
        why: for the message, where `high` comes from.
        optional: for the message, if the caller allows None.

    Raises:
        InvalidRequest: anything else.
    """
    index = as_index(value)
    if index is None or index < low or (high is not None and index > high):
        upper = " or more" if high is None else f" to {high}{why and f' ({why})'}"
        none = ", or None" if optional else ""
        raise InvalidRequest(f"{name}={value!r}: must be an integer, {low}{upper}{none}")
    return index


def optional_integer(name: str, value: Any, low: int = 1, high: int | None = None) -> int | None:
    """Return `integer`, or None for None."""
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
    """Return a finite number from `low` to `high` as a float.

    Args:
        above: `low` itself is excluded.
        unit: for the message, as " of seconds".

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


def check_fields(settings: Any, numbers: Mapping[str, tuple[Any, ...]]) -> None:
    """Check the numbers and the switches of a dataclass; numbers become Python's.

    Args:
        numbers: by field, one of the functions above and its limits.
    """
    for name, (check, *limits) in numbers.items():
        object.__setattr__(settings, name, check(name, getattr(settings, name), *limits))
    for each in dataclasses.fields(settings):
        if each.type == "bool":
            switch(each.name, getattr(settings, each.name))


def memory_bytes(value: int | str, total: int) -> int:
    """Return the bytes of 5000000, "512MB", "2GiB" or "40%" (of `total`).

    Raises:
        InvalidRequest: anything else, nothing, or more than `total`.
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
    """Return the bytes of 0, 5000000 or "16GB", which may be more than this machine has."""
    amount = _bytes_of(value)
    if amount is None or not 0 <= amount <= _ANY_SIZE:
        raise InvalidRequest(
            f"{name}={value!r}: must be bytes, 0 or more, or an amount such as '16GB'"
        )
    return amount


def _bytes_of(value: Any, total: int | None = None) -> int | None:
    """Return the bytes of a number, an amount or, with `total`, a share; None for anything else."""
    match = _AMOUNT.match(value) if isinstance(value, str) else None
    if match is None:
        return as_index(value)
    share = total / 100 if total is not None and match[2] == "%" else None
    unit = _UNITS.get(match[2].upper(), share)
    return None if unit is None else int(min(float(match[1]) * unit, 2.0**63))


def field_docs(settings: type) -> dict[str, str]:
    """Return the text of each field of a class in its docstring; "" for others, as under `python -OO`."""
    doc = inspect.cleandoc(settings.__doc__ or "")
    listed = re.split(r"^(?:Args|Attributes):\n", doc, maxsplit=1, flags=re.MULTILINE)[-1]
    entries = re.split(r"^    (?=\w)", listed.partition("\n\n")[0], flags=re.MULTILINE)[1:]
    pairs = (" ".join(entry.split()).partition(": ") for entry in entries)
    return defaultdict(str, {name: text for name, _, text in pairs})
