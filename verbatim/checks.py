"""Validation of numbers and switches that callers pass."""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

from verbatim.errors import InvalidRequest


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
