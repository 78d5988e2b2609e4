"""Validation of integer arguments: Python's, numpy's, tensors with one element."""

from __future__ import annotations

import operator
from typing import Any

from verbatim.errors import InvalidRequest


def integer(name: str, value: Any, low: int) -> int:
    """Return `value` as a Python integer.

    Raises:
        InvalidRequest: `value` is not an integer, or is below `low`.
    """
    try:
        number = low - 1 if isinstance(value, bool) else operator.index(value)
    except (TypeError, RuntimeError):  # a tensor without data is the latter
        number = low - 1
    if number < low:
        raise InvalidRequest(f"{name}={value!r}: must be an integer, {low} or more")
    return number
