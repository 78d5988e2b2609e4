"""Converts results to plain values for JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any


def to_json(value: Any) -> str:
    """Return a result as one line of JSON, keyed by field names; NaN and infinities become null."""
    return json.dumps(to_plain(value), ensure_ascii=False, allow_nan=False)


def to_plain(value: Any) -> Any:
    """Convert a value to dicts, lists and numbers; a tensor becomes nested lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: to_plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(entry) for entry in value]
    if dataclasses.is_dataclass(value):
        return {
            field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    return to_plain(value.tolist()) if hasattr(value, "tolist") else value
