"""Normalization of the `prompts` and `params` arguments, one or many, to lists."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

from verbatim.engine.admission import Prompt
from verbatim.errors import InvalidRequest
from verbatim.params import SamplingParams


def _is_id(entry: Any) -> bool:
    """Return whether a list's entry is a number rather than a prompt; a 0-d array is a number."""
    return isinstance(entry, int | float) or getattr(entry, "ndim", None) == 0


def as_prompts(prompts: Any) -> tuple[list[Prompt], bool]:
    """Return the prompts as a list, and whether it was a single one: a string, or a list of ids."""
    if isinstance(prompts, str):
        return [prompts], True
    if getattr(prompts, "ndim", 1) > 1:
        return list(prompts), False
    if not isinstance(prompts, SequenceOf) and not hasattr(prompts, "ndim"):
        raise InvalidRequest(
            f"prompts={prompts!r}: must be a string, a list of ids, or a list of either"
        )
    entries = [] if getattr(prompts, "ndim", 1) == 0 else list(prompts)
    if not entries:
        raise InvalidRequest("the prompt is empty: at least one token is needed")
    return ([prompts], True) if _is_id(entries[0]) else (entries, False)


def as_params(params: Any, count: int) -> list[SamplingParams]:
    """Return a list of parameters, one for each of `count` prompts."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    each = list(params) if isinstance(params, SequenceOf) else [params]
    if len(each) != count:
        raise InvalidRequest(
            f"{len(each)} params for {count} prompts: must be one for all, or one per prompt"
        )
    return each
