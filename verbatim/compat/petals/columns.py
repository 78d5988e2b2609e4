"""Padded rows of token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verbatim.compat.batches import pad_rows, prompt_mask
from verbatim.errors import InvalidRequest
from verbatim.tensors import check_padded, rows_of


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """Rows of ids with padding.

    Attributes:
        ids: `[B, L]` int64, on the CPU.
        mask: `[B, L]` bool, False on pads, anywhere in a row.
        ends: for each row, the column after the token that ended it, or None.
    """

    ids: Tensor
    mask: Tensor
    ends: tuple[int | None, ...]

    @classmethod
    def empty(cls, num_rows: int) -> TokenColumns:
        ids = torch.empty(num_rows, 0, dtype=torch.int64)
        return cls(ids, ids.bool(), (None,) * num_rows)

    @property
    def num_rows(self) -> int:
        return self.ids.shape[0]

    @property
    def width(self) -> int:
        return self.ids.shape[1]

    def rows(self) -> list[list[int]]:
        """Return the ids of each row without its pads."""
        return [i[m].tolist() for i, m in zip(self.ids, self.mask, strict=True)]

    def first(self, width: int) -> TokenColumns:
        """Return the columns before `width`."""
        ends = tuple(None if end is None or end > width else end for end in self.ends)
        return TokenColumns(self.ids[:, :width], self.mask[:, :width], ends)

    def followed_by(self, ids: Tensor, mask: Tensor) -> TokenColumns:
        """Return these columns with more appended; all rows become unfinished."""
        both = torch.cat([self.ids, ids], dim=1), torch.cat([self.mask, mask], dim=1)
        return TokenColumns(*both, (None,) * self.num_rows)

    def grown(self, new: list[list[int]], ended: list[bool], fill_id: int) -> TokenColumns:
        """Return these columns with the new ids of each row appended, padded to the longest.

        Args:
            ended: whether a row's last new token is its end; ignored for a row without new ids.
        """
        ends = list(self.ends)
        for row, new_ids in enumerate(new):
            if new_ids:
                ends[row] = self.width + len(new_ids) if ended[row] else None
        mask = pad_rows([[1] * len(new_ids) for new_ids in new], 0).bool()
        joined = self.followed_by(pad_rows(new, fill_id), mask)
        return TokenColumns(joined.ids, joined.mask, tuple(ends))

    def repeated(self, copies: int) -> TokenColumns:
        """Return each row `copies` times."""
        ids, mask = (t.repeat_interleave(copies, dim=0) for t in (self.ids, self.mask))
        return TokenColumns(ids, mask, tuple(end for end in self.ends for _ in range(copies)))


def input_columns(inputs: Any, attention_mask: Any, pad_id: int | None) -> TokenColumns:
    """Return a call's inputs as columns; without a mask, leading pads are masked.

    Raises:
        InvalidRequest: not integers `[B, P]`, pads at the end of a row, or a row without a token.
    """
    check_padded(inputs, attention_mask, name="inputs")
    ids = inputs.detach().to("cpu", torch.int64)
    if not ids.numel():
        raise InvalidRequest(f"inputs has shape {list(ids.shape)}: at least one token is needed")
    given = None if attention_mask is None else attention_mask.detach().cpu()
    mask = prompt_mask(ids, given, pad_id).bool()
    rows_of(ids, mask)  # refuses empty rows
    return TokenColumns(ids.clone(), mask, (None,) * ids.shape[0])


def bos_column(bos_id: Any, model_bos: Any, vocab_size: int) -> TokenColumns:
    """Return one row with only the BOS id.

    Raises:
        InvalidRequest: there is no BOS id.
    """
    token_id = next((i for i in (bos_id, model_bos) if isinstance(i, int)), -1)
    if not 0 <= token_id < vocab_size:
        raise InvalidRequest(
            "inputs=None at the beginning starts from the model's BOS, and this one has none; give inputs "
            "or bos_token_id"
        )
    ids = torch.tensor([[token_id]])
    return TokenColumns(ids, torch.ones_like(ids, dtype=torch.bool), (None,))
