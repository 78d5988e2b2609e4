"""What callers hand over as prompts and params, one or many, as lists."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

from verbatim.engine.admission import Prompt
from verbatim.errors import InvalidRequest
from verbatim.params import SamplingParams


def _is_id(entry: Any) -> bool:
    """Is this entry of a list a number, and not a prompt? Arrays count by their dimensions."""
    return isinstance(entry, int | float) or getattr(entry, "ndim", None) == 0


def as_prompts(prompts: Any) -> tuple[list[Prompt], bool]:
    """The prompts, and whether it was a single one: a string, or numbers that are its ids."""
    if isinstance(prompts, str):
        return [prompts], True
    if getattr(prompts, "ndim", 1) > 1:
        return list(prompts), False
    if not isinstance(prompts, SequenceOf) and not hasattr(prompts, "ndim"):
        raise InvalidRequest(
            f"prompts={prompts!r}: must be a string, a list of ids, or a list of those"
        )
    entries = [] if getattr(prompts, "ndim", 1) == 0 else list(prompts)
    if not entries:
        raise InvalidRequest("the prompt is empty: at least one token is needed")
    return ([prompts], True) if _is_id(entries[0]) else (entries, False)


def as_params(params: Any, count: int) -> list[SamplingParams]:
    """One for each of `count` prompts."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    each = list(params) if isinstance(params, SequenceOf) else [params]
    if len(each) != count:
        raise InvalidRequest(f"{len(each)} params for {count} prompts: one for all, or one each")
    return each
