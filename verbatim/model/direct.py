"""Addresses of K and V and their slots, for fused layer kernels."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from verbatim.batch import Batch
from verbatim.kv.states import StateRows
from verbatim.kv.store import KVStore

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64


class _Rows(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("slots", "query_starts", "context_lens", "block_tables")),
        *((name, _POINTER) for name in ("state_sources", "state_rows", "state_targets")),
        *((name, _LONG) for name in ("count", "sequences", "max_blocks", "block_size", "writes")),
        ("adapted", _POINTER),
        ("num_adapted", _LONG),
    ]


class DirectRows:
    """The rows of a forward, and the memory of its `KVStore`.

    Attributes:
        address: of the struct `Rows` of `kernels/layer.cpp`.
        count: number of rows.
        dtype: of K and V; None: kernels can't attend in them, only use states.
    """

    def __init__(self, store: KVStore, batch: Batch, slots: Tensor) -> None:
        assert slots.dtype == torch.int64 and slots.is_contiguous()
        states = () if store.states is None else StateRows.of(batch)[1:]
        tables = (batch.query_starts, batch.context_lens, batch.block_tables, *states)
        assert all(t.dtype == torch.int32 and t.is_contiguous() for t in tables)
        num_sequences, max_blocks = batch.block_tables.shape
        in_place = store.in_place and bool(store.tensors)
        self.count, self.dtype = len(slots), store.tensors[0].dtype if in_place else None
        self._store, self._kept = store, (slots, tables)
        self._struct = _Rows(
            slots.data_ptr(),
            *(t.data_ptr() for t in tables),
            *((None,) * (6 - len(tables))),
            self.count,
            num_sequences,
            max_blocks,
            store.block_size,
            len(states[-1]) if states else 0,
        )
        self.address: Any = ctypes.byref(self._struct)

    def adapt(self, groups: ctypes.Array[Any]) -> None:
        """Give rows their adapters, as `AdaptedRows` of `kernels/lora.h`."""
        self._groups = groups
        self._struct.adapted, self._struct.num_adapted = ctypes.addressof(groups), len(groups)

    def stores(self, layer: int) -> tuple[int, int]:
        """Return the addresses of K and V of one layer that attends."""
        k, v = self._store.layer(layer)
        return k.data_ptr(), v.data_ptr()

    def states(self, first: int, count: int) -> tuple[int | None, ...]:
        """Return the addresses of the states of `count` recurrent operations; of two at least, or None."""
        assert self._store.states is not None
        found = [state.data_ptr() for state in self._store.states.tensors[first : first + count]]
        return (*found, None, None)[:2]

    def all_stores(self, num_states: list[int]) -> Any:
        """Return the addresses of what each layer stores, in turn, as an array for the kernels.

        Args:
            num_states: of each layer; one without keeps K and V.
        """
        if not any(num_states):
            return self._store.addresses
        layer = first = 0
        found: list[int | None] = []
        for count in num_states:
            found += self.states(first, count) if count else self.stores(layer)
            first += count
            layer += not count
        return (_POINTER * len(found))(*found)
