"""Padded batches of token ids, shared by the adapters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verbatim.errors import InvalidRequest


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
