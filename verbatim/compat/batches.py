"""Arguments, padded batches and seeds, shared by the adapters."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from verbatim.core import Completion, FinishReason
from verbatim.core import Sequence as Row
from verbatim.errors import InvalidRequest, RequestFailed


def integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Return `value`, an integer of Python, numpy or a tensor with one element, as Python's.

    Raises:
        InvalidRequest: `value` is not an integer, or is outside of `low` to `high`.
    """
    try:
        number = low - 1 if isinstance(value, bool) else operator.index(value)
    except (TypeError, RuntimeError):  # a tensor without data is the latter
        number = low - 1
    if number < low or (high is not None and number > high):
        upper = " or more" if high is None else f" to {high}"
        raise InvalidRequest(f"{name}={value!r}: must be an integer, {low}{upper}")
    return number


def optional_integer(name: str, value: Any, low: int, high: int | None = None) -> int | None:
    """Return `integer`, or None for None."""
    return None if value is None else integer(name, value, low, high)


def by_name(groups: dict[str, str]) -> dict[str, str]:
    """Return the reason of each name, from names separated by spaces for each reason."""
    return {name: reason for reason, names in groups.items() for name in names.split()}


def draw_seed() -> int:
    """Draw a seed from torch's default generator, so that `torch.manual_seed` repeats a run."""
    return int(torch.randint(2**53, ()))


def pad_rows(
    rows: Sequence[Sequence[int]],
    fill_id: int,
    *,
    num_rows: int | None = None,
    width: int | None = None,
    left: bool = False,
) -> Tensor:
    """Return `rows` as an int64 tensor `[num_rows, width]`, filled up with `fill_id`.

    Args:
        num_rows: missing rows hold only `fill_id`; None takes `len(rows)`.
        width: longer rows are cut at the end; None takes the longest row's length.
        left: put the padding in front of the ids.
    """
    if width is None:
        width = max(map(len, rows), default=0)
    batch = torch.full((len(rows) if num_rows is None else num_rows, width), fill_id)
    for target, row in zip(batch, rows, strict=False):
        ids = torch.tensor(row[:width], dtype=torch.int64)
        target[width - len(ids) if left else 0 :][: len(ids)] = ids
    return batch


def append_rows(ids: Tensor, rows: Sequence[Sequence[int]], fill_id: int, width: int) -> Tensor:
    """Return `ids` with `width` more columns: `rows`, then `fill_id`.

    The result `[B, P + width]` int64 is an ordinary tensor, not an inference tensor, on the device of `ids`.
    """
    with torch.inference_mode(False), torch.no_grad():
        tail = pad_rows(rows, fill_id, num_rows=len(ids), width=width)
        return torch.cat([ids.long(), tail.to(ids.device)], dim=1)


def prompt_mask(ids: Tensor, attention_mask: Tensor | None, pad_id: int | None) -> Tensor:
    """Return `attention_mask`, by default one that is 0 on leading pads; later pads are tokens.

    Raises:
        InvalidRequest: `attention_mask` is 0 at the end of a row.
    """
    if attention_mask is not None:
        if attention_mask.numel():
            for row in (attention_mask[:, -1] == 0).nonzero().flatten().tolist():
                raise InvalidRequest(
                    f"attention_mask has padding at the end of row {row}; rows must be padded on the left"
                )
        return attention_mask
    if pad_id is None or not ids.numel():
        return torch.ones_like(ids, dtype=torch.int64)
    return (ids != pad_id).long().cummax(dim=1).values


def check_complete(row: int, output: Completion | Row) -> None:
    """Raise RequestFailed if the row was aborted, for example by closing a shared engine."""
    if output.finish_reason is FinishReason.ABORT:
        raise RequestFailed(f"row {row} was ended from outside, by close() or pause('abort')")
