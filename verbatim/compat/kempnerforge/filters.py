"""Translates KempnerForge's filters to Verbatim's. Imports no torch, so that the command starts fast."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

_KEEPS_ONE_ID = 1e-30  # a top_p that keeps only the likeliest id
_LARGEST_TOP_K = 2**63 - 1  # an int64; more than the vocabulary keeps all


def filters(temperature: Any, top_k: Any, top_p: Any) -> dict[str, Any]:
    """Return Verbatim's sampling fields; `SamplingParams` checks their ranges."""
    is_count = isinstance(top_k, Integral) and not isinstance(top_k, bool)
    return {
        "temperature": temperature,
        "top_k": min(int(top_k), _LARGEST_TOP_K) if is_count else top_k,
        "top_p": _KEEPS_ONE_ID if is_zero(top_p) else top_p,
    }


def is_zero(value: Any) -> bool:
    """Return whether a value is the number 0; a bool is not a number."""
    return isinstance(value, Real) and value is not False and value == 0
