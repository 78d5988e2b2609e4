"""Tensors indexed by block or slot, and conversion of blocks to rows of bytes, to store them elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class BlockStore:
    """Tensors with the block, or the slot, as their first dimension.

    Their memory is reserved at once, and committed by the OS when first written.

    Attributes:
        token_axis: dimension of positions in the tensors of `read_blocks`, or None.
    """

    token_axis: int | None = None

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self.allocate()

    def _allocated(self) -> list[Tensor]:
        raise NotImplementedError

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors; empty after `release`."""
        return self._tensors

    def release(self) -> None:
        """Free the memory."""
        self._tensors.clear()

    def allocate(self) -> None:
        """Allocate the memory, unless it is allocated."""
        if not self._tensors:
            with torch.inference_mode(False):  # else writable in inference mode only
                self._tensors += self._allocated()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def read_blocks(self, blocks: list[int]) -> list[Tensor]:
        """Return copies of whole blocks: one tensor `[n, ...]` for each of `tensors`."""
        return [tensor[blocks] for tensor in self.tensors]

    def write_blocks(self, blocks: list[int], contents: list[Tensor]) -> None:
        """Write whole blocks, in the format of `read_blocks`."""
        for tensor, content in zip(self.tensors, contents, strict=True):
            tensor[blocks] = content.to(tensor.device)

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole blocks, given as pairs (from, to)."""
        if not copies:
            return
        source = torch.tensor([a for a, _ in copies])
        target = torch.tensor([b for _, b in copies])
        for tensor in self.tensors:
            tensor[target] = tensor[source]


class HiddenStore(BlockStore):
    """One hidden state per position, `[block, position in block, H]`, in the same blocks as K and V."""

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
        self._shape = num_blocks, block_size, hidden_size
        self._dtype, self._device = dtype, device
        super().__init__()

    def _allocated(self) -> list[Tensor]:
        return [torch.empty(self._shape, dtype=self._dtype, device=self._device)]

    @property
    def rows(self) -> Tensor:
        """The hidden states `[blocks * block_size, H]`, by slot (`Batch.slots`)."""
        return self.tensors[0].flatten(0, 1)

    def write(self, slots: Tensor, hidden: Tensor) -> None:
        """Write `hidden` `[T, H]` at `slots` `[T]`."""
        rows = self.rows
        slots = slots.to(rows.device)
        rows.index_copy_(0, slots, hidden.to(rows))  # indexing would wake all threads

    def read(self, slots: Tensor) -> Tensor:
        """Return a copy of the states at `slots` `[T]`: `[T, H]`."""
        rows = self.rows
        return rows.index_select(0, slots.to(rows.device))


def read_rows(
    stores: Sequence[BlockStore | None], blocks: list[int], used: int | None = None
) -> Tensor:
    """Copy blocks of the stores that are not None to rows `[n, bytes]` uint8 on the CPU.

    Args:
        used: number of used positions in the last block; the others are zeroed. None: all.
    """
    parts: list[Tensor] = []
    for store in filter(None, stores):
        copied = store.read_blocks(blocks)
        if used is not None and store.token_axis is not None and blocks:
            for part in copied:
                axis = store.token_axis - 1
                part[-1].narrow(axis, used, part[-1].shape[axis] - used).zero_()
        parts += copied
    rows = [part.flatten(1).contiguous().view(torch.uint8).cpu() for part in parts]
    return torch.cat(rows, dim=1) if rows else torch.empty(len(blocks), 0, dtype=torch.uint8)


def row_bytes(store: BlockStore | None) -> int:
    """Return the bytes per block of a store; 0 for None."""
    parts = [] if store is None else store.read_blocks([])
    return sum(part.shape[1:].numel() * part.element_size() for part in parts)


def write_rows(stores: Sequence[BlockStore | None], blocks: list[int], rows: Tensor) -> None:
    """Write blocks from rows as returned by `read_rows`."""
    begin = 0
    for store in filter(None, stores):
        contents = []
        for like in store.read_blocks([]):
            end = begin + like.shape[1:].numel() * like.element_size()
            # A copy: a view in another dtype must begin at a multiple of its size.
            flat = rows[:, begin:end].clone(memory_format=torch.contiguous_format).flatten()
            contents.append(flat.view(like.dtype).view(len(blocks), *like.shape[1:]))
            begin = end
        store.write_blocks(blocks, contents)
    assert begin == rows.shape[1], (begin, rows.shape)
