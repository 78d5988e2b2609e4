"""Integers as callers hand them over: Python's, numpy's, tensors of one."""

from __future__ import annotations

import operator
from typing import Any

from verbatim.errors import InvalidRequest


def integer(name: str, value: Any, low: int) -> int:
    """`value` as a Python integer.

    Raises:
        InvalidRequest: it is none, or below `low`.
    """
    try:
        found = low - 1 if isinstance(value, bool) else operator.index(value)
    except (TypeError, RuntimeError):  # a tensor without data is the latter
        found = low - 1
    if found < low:
        raise InvalidRequest(f"{name}={value!r}: must be an integer, {low} or more")
    return found
