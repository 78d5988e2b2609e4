"""The layout of prompts and completions of different lengths in tensors of one shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

PADDING_SIDES = ("left", "right")


@dataclass(frozen=True, slots=True)
class RolloutLayout:
    """The layout of G rows for each of B prompts.

    Attributes:
        prompt_lengths: `[B]` int64.
        response_lengths: `[B, G]` int64.
        left: True: padding before the prompts, which end at the same column. False: padding after each row.
    """

    prompt_lengths: Tensor
    response_lengths: Tensor
    left: bool

    @classmethod
    def of(
        cls, prompts: list[int], responses: list[list[int]], group: int, *, left: bool
    ) -> RolloutLayout:
        """Return the layout of these lengths; there may be no prompts."""
        lengths = torch.tensor(responses, dtype=torch.int64).reshape(len(prompts), group)
        return cls(torch.tensor(prompts, dtype=torch.int64), lengths, left)

    @property
    def shape(self) -> tuple[int, int]:
        """B and G."""
        return self.response_lengths.shape[0], self.response_lengths.shape[1]

    @property
    def width(self) -> int:
        """P + N: the length of padded sequences."""
        return _longest(self.prompt_lengths) + self.longest_response

    @property
    def longest_response(self) -> int:
        return _longest(self.response_lengths)

    @property
    def starts(self) -> Tensor:
        """`[B, 1]`: the column at which a row's prompt begins."""
        at = _longest(self.prompt_lengths) - self.prompt_lengths
        return (at if self.left else torch.zeros_like(at))[:, None]

    def columns(self) -> Tensor:
        """Return `[B, G, N]`: the column of each completion token; a valid column for padding too."""
        first = (self.starts + self.prompt_lengths[:, None])[..., None]
        at = (first + torch.arange(self.longest_response)).clamp(max=max(self.width - 1, 0))
        return at.expand(*self.shape, -1).contiguous()

    def action_mask(self) -> Tensor:
        """Return `[B, G, N]` bool: True on completion tokens."""
        return torch.arange(self.longest_response) < self.response_lengths[..., None]

    def attention_mask(self) -> Tensor:
        """Return `[B, G, P + N]` int64: 1 on prompt and completion, 0 on padding."""
        starts = self.starts[..., None]
        ends = starts + self.prompt_lengths[:, None, None] + self.response_lengths[..., None]
        at = torch.arange(self.width)
        return ((at >= starts) & (at < ends)).long()

    def sequences(self, rows: list[list[list[Any]]], pad: Any, dtype: torch.dtype) -> Tensor:
        """Return `[B, G, P + N]` with rows of prompt and completion values."""
        padded = torch.full((*self.shape, self.width), pad, dtype=dtype)
        for b, group in enumerate(rows):
            for g, row in enumerate(group):
                start = int(self.starts[b])
                padded[b, g, start : start + len(row)] = torch.tensor(row, dtype=dtype)
        return padded

    def responses(self, rows: list[list[list[Any]]], pad: Any, dtype: torch.dtype) -> Tensor:
        """Return `[B, G, N]` with rows of one value per completion token."""
        padded = torch.full((*self.shape, self.longest_response), pad, dtype=dtype)
        for b, group in enumerate(rows):
            for g, row in enumerate(group):
                padded[b, g, : len(row)] = torch.tensor(row, dtype=dtype)
        return padded

    def records(
        self, rows: list[list[Tensor | None]], shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """Return `[B, G, P + N, *shape]` with records `[tokens, *shape]`; -1 without a record."""
        padded = torch.full((*self.shape, self.width, *shape), -1, dtype=dtype)
        for b, group in enumerate(rows):
            for g, row in enumerate(group):
                if row is not None:
                    start = int(self.starts[b])
                    padded[b, g, start : start + len(row)] = row
        return padded

    def per_row(self, rows: list[list[Any]], dtype: torch.dtype) -> Tensor:
        """Return `[B, G]` with one value per row."""
        return torch.tensor(rows, dtype=dtype).reshape(self.shape)


def _longest(lengths: Tensor) -> int:
    return int(lengths.max()) if lengths.numel() else 0
