"""Where the K and V of one forward lie, for kernels that write and read them in the middle of a layer."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from verbatim.batch import Batch
from verbatim.kv.store import KVStore

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64


class _Rows(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("slots", "query_starts", "context_lens", "block_tables")),
        *((name, _LONG) for name in ("count", "sequences", "max_blocks", "block_size")),
    ]


class DirectRows:
    """The rows of a forward over a plain `KVStore`.

    Attributes:
        address: of the struct that `kernels/layer.cpp` calls Rows.
        count: of the rows.
        dtype: of K and V.
    """

    def __init__(self, store: KVStore, batch: Batch, slots: Tensor) -> None:
        assert slots.dtype == torch.int64 and slots.is_contiguous()
        tables = (batch.query_starts, batch.context_lens, batch.block_tables)
        assert all(t.dtype == torch.int32 and t.is_contiguous() for t in tables)
        num_sequences, max_blocks = batch.block_tables.shape
        self.count, self.dtype = len(slots), store.layers[0][0].dtype
        self._store, self._kept = store, (slots, tables)
        self._struct = _Rows(
            slots.data_ptr(),
            *(t.data_ptr() for t in tables),
            self.count,
            num_sequences,
            max_blocks,
            store.block_size,
        )
        self.address = ctypes.addressof(self._struct)

    def stores(self, layer: int) -> tuple[int, int]:
        """The addresses of K and V of one layer."""
        k, v = self._store.layers[layer]
        return k.data_ptr(), v.data_ptr()

    def all_stores(self) -> Any:
        """Those of K and V of the first layer, of the second, and so on, as an array for the kernels."""
        return self._store.addresses()


def direct_rows(store: KVStore, batch: Batch, slots: Tensor) -> DirectRows | None:
    """These rows if kernels can reach their K and V, else None: a store of another kind, or elsewhere."""
    if type(store) is not KVStore or not store.layers or not store.layers[0][0].is_cpu:
        return None
    return DirectRows(store, batch, slots)
