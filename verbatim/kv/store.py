"""The tensors that hold K and V, block by block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention call stores for each token."""

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def elements(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim)


class KVStore:
    """K and V of `num_blocks` blocks in every layer, laid out `[block, KV head, token, width]`.

    A head's tokens lie together, so a decode step reads each tile of keys as one run of memory. The
    memory is reserved at once and touched by the operating system only where it is written.
    """

    def __init__(
        self,
        layers: list[LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks

        def blocks(heads: int, width: int) -> Tensor:
            return torch.empty(num_blocks, heads, block_size, width, dtype=dtype, device=device)

        with torch.inference_mode(
            False
        ):  # or it could be written in the caller's inference mode only
            self.layers: list[tuple[Tensor, Tensor]] = [
                (blocks(s.kv_heads, s.key_dim), blocks(s.kv_heads, s.value_dim)) for s in layers
            ]

    @property
    def nbytes(self) -> int:
        return sum(k.nbytes + v.nbytes for k, v in self.layers)

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to), in every layer."""
        if not copies:
            return
        source = torch.tensor([a for a, _ in copies])
        target = torch.tensor([b for _, b in copies])
        for k, v in self.layers:
            k[target] = k[source]
            v[target] = v[source]


def bytes_per_token(layers: list[LayerShape], dtype: torch.dtype) -> int:
    """KV bytes that one token takes over all layers."""
    return sum(shape.elements for shape in layers) * dtype.itemsize
