"""KempnerForge's filters in the house's names and ranges; without torch, for the command's sake."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

_KEEPS_ONE_ID = 1e-30  # a top_p that the likeliest id alone reaches


def filters(temperature: Any, top_k: Any, top_p: Any, vocab_size: int) -> dict[str, Any]:
    """The house's names and ranges; what is out of range is refused there."""
    some = isinstance(top_k, Integral) and not isinstance(top_k, bool)
    nothing = isinstance(top_p, Real) and top_p is not False and top_p == 0
    return {
        "temperature": temperature,
        "top_k": min(int(top_k), vocab_size) if some else top_k,
        "top_p": _KEEPS_ONE_ID if nothing else top_p,
    }
