"""Padded batches of token ids: checked, read row by row, and padded again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verbatim.errors import InvalidRequest

_ID_DTYPES = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """A padded batch of token ids.

    Attributes:
        ids: `[B, L]` int64, on the CPU.
        mask: `[B, L]` bool, False at padding, which may be anywhere in a row.
        ends: for each row, the column after the token that ended it; None if it has not ended.
    """

    ids: Tensor
    mask: Tensor
    ends: tuple[int | None, ...]

    @classmethod
    def of(
        cls,
        ids: Any,
        attention_mask: Any,
        *,
        name: str = "input_ids",
        pad_id: int | None = None,
        left: bool = False,
    ) -> PaddedRows:
        """Check and copy a batch in which every row has tokens.

        Args:
            pad_id: without a mask, leading pad ids are padding and later ones are tokens; None: no padding.
            left: whether padding after a row's tokens is rejected.

        Raises:
            InvalidRequest: as `check_padded`, and for a row without tokens.
        """
        check_padded(ids, attention_mask, name=name)
        ids = ids.detach().to("cpu", torch.int64, copy=True)
        if attention_mask is not None:
            mask = attention_mask.detach().cpu().bool()
        elif pad_id is None or not ids.numel():
            mask = torch.ones_like(ids, dtype=torch.bool)
        else:
            mask = (ids != pad_id).cummax(dim=1).values
        has_tokens = mask.any(dim=1)
        for row in (~has_tokens).nonzero().flatten().tolist():
            why = "" if attention_mask is None else ": attention_mask is 0 in all of it"
            raise InvalidRequest(f"row {row} of {name} has no tokens{why}")
        for row in (~mask[:, -1]).nonzero().flatten().tolist() if left and len(ids) else ():
            raise InvalidRequest(
                f"attention_mask has padding at the end of row {row} of {name}; rows must be padded on the "
                "left"
            )
        return cls(ids, mask, (None,) * len(ids))

    @property
    def num_rows(self) -> int:
        return self.ids.shape[0]

    @property
    def width(self) -> int:
        return self.ids.shape[1]

    def rows(self) -> list[list[int]]:
        """Return the ids of each row without padding."""
        return [ids[mask].tolist() for ids, mask in zip(self.ids, self.mask, strict=True)]

    def joined(
        self,
        new: Sequence[Sequence[int]],
        fill_id: int,
        width: int | None = None,
        device: torch.device | None = None,
    ) -> Tensor:
        """Return the ids with `width` more columns, `[B, L + width]`: `new`, then `fill_id`.

        An ordinary tensor, not an inference tensor, on `device` or the CPU. None as width takes that of the
        longest new row.
        """
        with torch.inference_mode(False), torch.no_grad():
            padded = pad_rows(new, fill_id, num_rows=self.num_rows, width=width)
            return torch.cat([self.ids, padded], dim=1).to(device)

    def grown(self, new: list[list[int]], ended: list[bool], fill_id: int) -> PaddedRows:
        """Return these columns with the new ids of each row appended, padded to the longest row.

        `ended` has for each row whether its last new token ends it; ignored for rows without new ids.
        """
        ends = [self.width + len(ids) if end else None for ids, end in zip(new, ended, strict=True)]
        ends = [end if ids else old for ids, end, old in zip(new, ends, self.ends, strict=True)]
        mask = pad_rows([[1] * len(ids) for ids in new], 0).bool()
        return self.followed_by(PaddedRows(pad_rows(new, fill_id), mask, tuple(ends)))

    def followed_by(self, other: PaddedRows) -> PaddedRows:
        """Return these columns and then those of `other`, with its ends."""
        ids = torch.cat([self.ids, other.ids], dim=1)
        return PaddedRows(ids, torch.cat([self.mask, other.mask], dim=1), other.ends)

    def first(self, width: int) -> PaddedRows:
        """Return the columns before `width`."""
        ends = tuple(None if end is None or end > width else end for end in self.ends)
        return PaddedRows(self.ids[:, :width], self.mask[:, :width], ends)

    def repeated(self, copies: int) -> PaddedRows:
        """Return each row `copies` times."""
        ids, mask = (t.repeat_interleave(copies, dim=0) for t in (self.ids, self.mask))
        return PaddedRows(ids, mask, tuple(end for end in self.ends for _ in range(copies)))


def check_padded(ids: Any, attention_mask: Any, *, name: str = "input_ids") -> None:
    """Raise InvalidRequest unless these are ids `[rows, length]`, with padding only at the ends of rows."""
    if not _has_dense_data(ids) or ids.ndim != 2 or ids.dtype not in _ID_DTYPES:
        shown = type(ids).__name__
        if isinstance(ids, Tensor):
            shown = f"{ids.dtype} {list(ids.shape)} on {ids.device}"
            shown += "" if ids.layout == torch.strided else f", {ids.layout}"
        raise InvalidRequest(
            f"{name} must be an integer tensor of shape [rows, length], not {shown}"
        )
    if attention_mask is None:
        return
    if not _has_dense_data(attention_mask) or attention_mask.shape != ids.shape:
        shape = getattr(attention_mask, "shape", type(attention_mask).__name__)
        raise InvalidRequest(
            f"attention_mask has shape {shape}; it must be a tensor of {name}' shape, {ids.shape}, "
            "dense and with data"
        )
    if not ((attention_mask == 0) | (attention_mask == 1)).all():
        raise InvalidRequest("attention_mask must hold only 0 (padding) and 1 (a token)")
    steps = attention_mask.long().diff(dim=1, prepend=attention_mask.new_zeros(len(ids), 1).long())
    if ((steps == 1).sum(dim=1) > 1).any():
        raise InvalidRequest("attention_mask has padding in the middle of a row")


def _has_dense_data(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta


def pad_rows(
    rows: Sequence[Sequence[int]],
    fill_id: int,
    *,
    num_rows: int | None = None,
    width: int | None = None,
    left: bool = False,
) -> Tensor:
    """Return `rows` as an int64 tensor `[num_rows, width]` on the CPU, padded with `fill_id`.

    Args:
        num_rows: rows beyond `rows` hold only `fill_id`; None: `len(rows)`.
        width: longer rows are cut at the end; None: the length of the longest row.
        left: whether to pad on the left.
    """
    if width is None:
        width = max(map(len, rows), default=0)
    shape = len(rows) if num_rows is None else num_rows, width
    batch = torch.full(shape, fill_id, dtype=torch.int64, device="cpu")
    for target, row in zip(batch, rows, strict=False):
        ids = torch.tensor(row[:width], dtype=torch.int64, device="cpu")
        target[width - len(ids) if left else 0 :][: len(ids)] = ids
    return batch


def fill(mask: Tensor, values: Tensor, padding: float) -> Tensor:
    """Return a tensor with `values` in order where `mask` is True, and `padding` elsewhere."""
    filled = torch.full((*mask.shape, *values.shape[1:]), padding, dtype=values.dtype)
    filled[mask] = values
    return filled
