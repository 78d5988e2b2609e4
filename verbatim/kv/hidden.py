"""Hidden states of every position whose K and V are kept, block by block."""

from __future__ import annotations

import torch
from torch import Tensor


class HiddenStore:
    """One hidden state a position, `[block, position in it, H]`, in the blocks that hold K and V.

    As with K and V, memory is reserved at once and touched only where it is written.

    Attributes:
        block_size: positions in a block.
        rows: `[blocks * block_size, H]`, by slot (`Batch.slots`); of no row once released.
    """

    def __init__(
        self,
        hidden_size: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self._shape = (num_blocks * block_size, hidden_size)
        self.rows = torch.empty(0, hidden_size, dtype=dtype, device=device)
        self.allocate()

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes

    def write(self, slots: Tensor, hidden: Tensor) -> None:
        """Put `hidden` `[T, H]` at `slots` `[T]`."""
        self.rows.index_copy_(0, slots, hidden.to(self.rows))  # indexing wakes all threads for it

    def read(self, slots: Tensor) -> Tensor:
        """What lies at `slots` `[T]`: `[T, H]`, a copy."""
        return self.rows.index_select(0, slots)

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to)."""
        if copies:
            blocks = self._blocks()
            blocks[[b for _, b in copies]] = blocks[[a for a, _ in copies]]

    def poison(self, blocks: list[int]) -> None:
        """Make everything in `blocks` read as NaN, so that a test sees who reads it."""
        self._blocks()[blocks] = torch.nan

    def release(self) -> None:
        """Give the memory back."""
        self.rows = self.rows.new_empty(0, self._shape[1])

    def allocate(self) -> None:
        """Take memory again after `release`; what was in it is gone."""
        if not len(self.rows):
            with torch.inference_mode(False):  # as for K and V
                self.rows = self.rows.new_empty(self._shape)

    def _blocks(self) -> Tensor:
        return self.rows.view(-1, self.block_size, self._shape[1])
