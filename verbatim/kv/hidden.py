"""The store of hidden states, by the same blocks as K and V."""

from __future__ import annotations

import torch
from torch import Tensor

from verbatim.kv.flat import BlockStore


class HiddenStore(BlockStore):
    """One hidden state per position, `[block, position in it, H]`, in the same blocks as K and V.

    As for K and V, memory is reserved at once, and committed by the OS when first written.

    Attributes:
        block_size: positions in a block.
        rows: `[blocks * block_size, H]`, by slot (`Batch.slots`); empty after `release`.
    """

    token_axis = 1

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
    def tensors(self) -> list[Tensor]:
        """The states as `[blocks, block_size, H]`."""
        return [self.rows.view(-1, self.block_size, self._shape[1])]

    def write(self, slots: Tensor, hidden: Tensor) -> None:
        """Write `hidden` `[T, H]` at `slots` `[T]`."""
        self.rows.index_copy_(
            0, slots, hidden.to(self.rows)
        )  # plain indexing would wake all threads

    def read(self, slots: Tensor) -> Tensor:
        """Return a copy of the states at `slots` `[T]`: `[T, H]`."""
        return self.rows.index_select(0, slots)

    def release(self) -> None:
        """Free the memory."""
        self.rows = self.rows.new_empty(0, self._shape[1])

    def allocate(self) -> None:
        """Allocate memory again after `release`, uninitialized."""
        if not len(self.rows):
            with torch.inference_mode(False):  # as for K and V
                self.rows = self.rows.new_empty(self._shape)
