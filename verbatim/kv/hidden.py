"""The store of hidden states, by the same blocks as K and V."""

from __future__ import annotations

import torch
from torch import Tensor

from verbatim.kv.flat import BlockStore


class HiddenStore(BlockStore):
    """One hidden state per position, `[block, position in it, H]`, in the same blocks as K and V.

    Attributes:
        block_size: positions in a block.
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
        shape = num_blocks, block_size, hidden_size
        super().__init__(lambda: [torch.empty(shape, dtype=dtype, device=device)])

    @property
    def rows(self) -> Tensor:
        """`[blocks * block_size, H]`, by slot (`Batch.slots`)."""
        return self.tensors[0].flatten(0, 1)

    def write(self, slots: Tensor, hidden: Tensor) -> None:
        """Write `hidden` `[T, H]` at `slots` `[T]`."""
        rows = self.rows
        slots = slots.to(rows.device)
        rows.index_copy_(0, slots, hidden.to(rows))  # plain indexing would wake all threads

    def read(self, slots: Tensor) -> Tensor:
        """Return a copy of the states at `slots` `[T]`: `[T, H]`."""
        rows = self.rows
        return rows.index_select(0, slots.to(rows.device))
