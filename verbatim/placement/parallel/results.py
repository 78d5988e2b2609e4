"""Results as plain data and back, for ranks that return those of rank 0."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from verbatim.core import Completion, DraftStats, FinishReason, Metrics, Result

Message = dict[str, Any]


def pack_results(results: list[Result]) -> list[Message]:
    """Convert results to plain data."""
    packed = []
    for result in results:
        plain = _fields(result)
        plain["outputs"] = [
            {**_fields(c), "finish_reason": c.finish_reason.value} for c in result.outputs
        ]
        plain["metrics"] = {**_fields(result.metrics), "draft": _fields(result.metrics.draft)}
        packed.append(plain)
    return packed


def unpack_results(packed: list[Message]) -> list[Result]:
    """Convert plain data to results."""
    return [_result(plain) for plain in packed]


def _result(plain: Message) -> Result:
    metrics = {**plain["metrics"], "draft": DraftStats(**plain["metrics"]["draft"])}
    return Result(
        **{
            **plain,
            "prompt_top_logprobs": _tops(plain["prompt_top_logprobs"]),
            "outputs": [_completion(entry) for entry in plain["outputs"]],
            "metrics": Metrics(**metrics),
        }
    )


def _completion(plain: Message) -> Completion:
    reason = plain["stop_reason"]
    return Completion(
        **{
            **plain,
            "top_logprobs": _tops(plain["top_logprobs"]),
            "finish_reason": FinishReason(plain["finish_reason"]),
            "stop_reason": tuple(reason) if isinstance(reason, list) else reason,
        }
    )


def _tops(entries: list[Any] | None) -> list[Any] | None:
    """Convert to lists of pairs, or None, for each token."""
    if entries is None:
        return None
    return [None if pairs is None else [(i, value) for i, value in pairs] for pairs in entries]


def _fields(of: Any) -> Message:
    return {field.name: getattr(of, field.name) for field in fields(of)}
