"""`KVStore`: the tensors of K and V, by block."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from verbatim.batch import AttentionBatch, Batch
from verbatim.kernels.options import AnyOptions, IndexOptions
from verbatim.kernels.packing import Packing
from verbatim.kv.attention import paged_attention, write_kv
from verbatim.kv.flat import BlockStore
from verbatim.kv.indexing import attend_to_chosen, attend_to_records, choose_keys
from verbatim.kv.states import StateShape, StateStore
from verbatim.quantization.formats import KVDtype, row_nbytes
from verbatim.quantization.rows import unpack_rows


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The shape of K and V of one token in one layer.

    Attributes:
        value_dim: width of a value; 0 for the keys of an indexer.
        records: whether keys are also the values, and the store of values holds records of windows.
        latent: whether keys are also the values, and are stored once.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    records: bool = False
    latent: bool = False

    @property
    def stored_dims(self) -> tuple[int, int]:
        """Widths of a row in the stores of keys and of values."""
        return self.key_dim, 0 if self.latent else self.value_dim

    @property
    def elements(self) -> int:
        return self.kv_heads * sum(self.stored_dims)


class KVStore(BlockStore):
    """K and V of `num_blocks` blocks in every layer, laid out `[block, KV head, token, width]`.

    A head's tokens are adjacent, so a decode step reads each tile of keys as contiguous memory.

    Args:
        dtype: dtype of K and V, or a `Packing` that quantizes them to uint8 rows of `row_bytes`.

    Attributes:
        shapes: shapes of K and V, by layer.
        dtype_name: "float32", "bfloat16", "int8" or "int4".
        device: device of the tensors.
        addresses: data pointers of `tensors`, as an array for the kernels.
        batch_invariant: as for `paged_attention`.
        in_place: whether layer kernels may read and write the tensors of `layer`.
        states: states of recurrent layers, allocated and released by the runner; None without such layers.
    """

    token_axis = 2
    batch_invariant = in_place = True
    states: StateStore | None = None

    def __init__(
        self,
        layers: list[LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: KVDtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.dtype = dtype
        self.packing = packing = dtype if isinstance(dtype, Packing) else None
        self.dtype_name = packing.name if packing else str(dtype).removeprefix("torch.")
        self.device = device
        self.shapes = layers
        super().__init__()

    def _allocated(self) -> list[Tensor]:
        """Return new tensors, K and V of each layer in turn."""
        pairs = [self._blocks(shape, self.num_blocks) for shape in self.shapes]
        both = zip(self.shapes, pairs, strict=True)
        pointers = [x.data_ptr() for shape, (k, v) in both for x in (k, k if shape.latent else v)]
        self.addresses: Any = (ctypes.c_void_p * len(pointers))(*pointers)
        return [x for pair in pairs for x in pair]

    def _blocks(self, shape: LayerShape, count: int) -> tuple[Tensor, Tensor]:
        """Return new tensors for K and V of `count` blocks of a layer."""
        stored = torch.uint8 if isinstance(self.dtype, Packing) else self.dtype
        row_sizes = (row_nbytes(self.dtype, d) // stored.itemsize for d in shape.stored_dims)
        k, v = (
            torch.empty(
                count, shape.kv_heads, self.block_size, size, dtype=stored, device=self.device
            )
            for size in row_sizes
        )
        return k, v

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return K and V of a layer, `[block, KV head, token, width]`."""
        k, v = self._pair(layer)
        return (k, k) if self.shapes[layer].latent else (k, v)

    def _pair(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the two stored tensors of a layer."""
        return self._tensors[2 * layer], self._tensors[2 * layer + 1]

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Write the rows `k` `[T, Hkv, Dk]` and `v` `[T, Hkv, Dv]` to the slots `[T]` (`Batch.slots`)."""
        write_kv(k, v, *self.layer(layer), slots, self.packing)

    def write_rotated(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor
    ) -> Tensor:
        """Rotate `q` and `k` by `cos` and `sin` `[T, R]`, `write` `k` and `v`, and return `q`; GPU only."""
        from verbatim.kernels.triton import rope

        return rope.rope_and_write(q, k, v, cos, sin, *self.layer(layer), slots, self.packing)

    def attend(self, layer: int, q: Tensor, batch: AttentionBatch, options: AnyOptions) -> Tensor:
        """Compute `paged_attention` over one layer: `q` `[T, H, Dk]` to `[T, H, Dv]`.

        With `IndexOptions`, choose keys instead, as `choose_keys` does.
        """
        k, v = self.layer(layer)
        if isinstance(options, IndexOptions):
            unpack = None
            if self.packing is not None:
                unpack = partial(unpack_rows, width=q.shape[2], packing=self.packing)
            return choose_keys(q, k, batch, options, unpack)
        attention = partial(
            paged_attention,
            batch_invariant=self.batch_invariant,
            packing=self.packing,
            value_size=self.shapes[layer].value_dim,
        )
        if options.chosen is not None:
            attention = partial(attend_to_chosen, attention)
        elif options.records is not None:
            attention = partial(attend_to_records, attention)
        return attention(q, k, v, batch, options)

    def rows(self, tensor: Tensor, width: int, blocks: Tensor) -> Tensor:
        """Return blocks of a layer's K or V as `[Hkv, n * block_size, width]`, dequantized."""
        selected = tensor.index_select(0, blocks).transpose(0, 1).flatten(1, 2)
        return selected if self.packing is None else unpack_rows(selected, width, self.packing)

    @contextmanager
    def stores_for(self, batches: list[Batch]) -> Iterator[list[KVStore]]:
        """Yield the stores for the micro-batches of one forward."""
        yield [self] * len(batches)


def bytes_per_token(layers: list[LayerShape], dtype: KVDtype) -> int:
    """Return the KV bytes of one token in all layers."""
    return sum(s.kv_heads * row_nbytes(dtype, width) for s in layers for width in s.stored_dims)


def cache_info(
    layers: list[LayerShape], states: list[StateShape], dtype: KVDtype, draft_bytes: int
) -> dict[str, Any]:
    """Return bytes per token (plus `draft_bytes`) and per state, in total and by kind, for `LLM.info`."""
    records = [LayerShape(s.kv_heads, 0, s.value_dim) for s in layers if s.records]
    both = [replace(s, value_dim=0) if s.records else s for s in layers if s.value_dim]
    tokens = {
        "keys_and_values": bytes_per_token(both, dtype),
        "records": bytes_per_token(records, dtype),
        "index_keys": bytes_per_token([s for s in layers if not s.value_dim], dtype),
        "draft_layers": draft_bytes,
    }
    kinds = Counter[str]()
    for state in states:
        kinds[f"{state.kind}s"] += state.nbytes
    return {
        "kv_bytes_per_token": sum(tokens.values()),
        "kv_bytes_per_token_by_kind": {kind: nbytes for kind, nbytes in tokens.items() if nbytes},
        "state_bytes": kinds.total(),
        "state_bytes_by_kind": dict(kinds),
    }
