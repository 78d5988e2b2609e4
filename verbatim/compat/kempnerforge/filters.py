"""KempnerForge's filters as Verbatim's sampling fields; imports no torch, for a fast command."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

_KEEPS_ONE_ID = 1e-30  # a top_p that the likeliest id alone reaches


def filters(temperature: Any, top_k: Any, top_p: Any, vocab_size: int) -> dict[str, Any]:
    """Return Verbatim's sampling fields; `SamplingParams` refuses values out of range."""
    is_count = isinstance(top_k, Integral) and not isinstance(top_k, bool)
    return {
        "temperature": temperature,
        "top_k": min(int(top_k), vocab_size) if is_count else top_k,
        "top_p": _KEEPS_ONE_ID if is_zero(top_p) else top_p,
    }


def is_zero(value: Any) -> bool:
    """Return whether a number, which a bool is not, is 0."""
    return isinstance(value, Real) and value is not False and value == 0
