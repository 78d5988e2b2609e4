"""The forward context of the engine, and small batches and KV stores for trial forwards."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.batch import ZERO_STATE, Batch
from verbatim.kernels.functions import recorded_whole, struct_layout
from verbatim.kernels.options import AnyOptions, AttentionOptions, IndexOptions
from verbatim.kv.states import StateRows, StateShape, StateStore, Update
from verbatim.kv.store import KVStore, LayerShape
from verbatim.model.context import activate
from verbatim.model.differential import noise
from verbatim.model.invariant import InvariantMode
from verbatim.model.lora import groups_of
from verbatim.model.patching import Forwards, patched
from verbatim.model.routing import ChoiceStore, Routing
from verbatim.model.spec import ModelSpec

BLOCK_SIZE = 16  # tokens per block of a `noise_store`


class FlatContext:
    """The forward context of one batch: stores K and V at the batch's slots, and attends by block table.

    Args:
        slots: `ModelSpec.slots`.
        routing: record of the experts of each token; None: not recorded.
        indices: record of the keys that indexers choose; None: not recorded.
        rows: slots `[T]` of a batch that is already on the store's device; None: they are computed, and
            moved there with the batch.

    Attributes:
        batch, routing: the arguments, with the batch on the store's device.
        rows: the batch's slots `[T]`, also on that device.
        direct: addresses of slots, K, V and states for the kernels; None on a GPU.
        adapted: the ranges of rows that have adapters.
        changed: names of the linear layers to which adapters were applied.
        trusted: whether all fused layers are known to be unchanged, so that they don't check themselves.
    """

    def __init__(
        self,
        slots: dict[tuple[int, int], int],
        batch: Batch,
        store: KVStore,
        routing: Routing | None = None,
        *,
        indices: ChoiceStore | None = None,
        rows: Tensor | None = None,
    ) -> None:
        self._slots = slots
        groups = groups_of(batch)
        if rows is None:
            rows = batch.slots(store.block_size)
            if store.device.type != "cpu":
                batch, rows = batch.to(store.device), rows.to(store.device)
        self.rows = rows
        self.batch = batch
        self.adapted = groups
        self.changed: set[str] = set()
        self.trusted = False
        self._store = store
        self.routing = routing
        self._indices = indices
        self._num_indexed = 0  # choices made by indexers so far
        is_cpu = store.device.type == "cpu"
        self.direct = DirectRows(store, batch, self.rows) if is_cpu else None
        self._calls: dict[int, int] = {}
        self.positions = batch.positions[None]
        self._num_states = 0  # recurrent operations run so far

    def update_state(self, shape: StateShape, update: Update) -> Tensor:
        states = self._store.states
        assert states is not None
        return update(states.tensors[self.next_states(1)], StateRows.of(self.batch))

    def next_states(self, count: int) -> int:
        """Return the number of recurrent operations that have run, and count `count` more."""
        self._num_states += count
        return self._num_states - count

    def route(self, experts: nn.Module, index: Tensor) -> None:
        if self.routing is not None:
            self.routing.add(experts, index)

    def forced_experts(self) -> Tensor | None:
        """Return the forced experts `[T, k]` of the next routed layer, or None."""
        return None if self.routing is None else self.routing.forced_experts()

    def layer_of(self, module: nn.Module) -> int:
        """Return the index of the store's layer for this call of `module`; each call may have its own."""
        call = self._calls.get(id(module), 0)
        self._calls[id(module)] = call + 1
        return self._slots[id(module), call]

    def stores_latent(self, module: nn.Module) -> bool:
        layer = self._slots.get((id(module), 0))  # None: another model's, called by a hook
        return layer is not None and self._store.shapes[layer].latent

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: AnyOptions
    ) -> Tensor:
        layer = self.layer_of(module)
        self._store.write(layer, k, v, self.rows)
        out = self._attend(layer, q, options)
        return self._record_choice(out) if isinstance(options, IndexOptions) else out

    def _record_choice(self, chosen: Tensor) -> Tensor:
        """Replace an indexer's choice `[T, G, k]` by the forced one, if any; record and return it."""
        columns = slice(self._num_indexed, self._num_indexed + chosen.shape[1])
        if self.batch.forced_keys is not None:
            forced = self.batch.forced_keys[:, columns]
            chosen = torch.where(forced[..., :1] < 0, chosen, forced)
        if self._indices is not None:
            self._indices.write(self.rows, chosen, columns)
        self._num_indexed = columns.stop
        return chosen

    def attend_rotated(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        options: AttentionOptions,
    ) -> Tensor:
        """Rotate queries and keys by `cos` and `sin` `[T, R]`, unless None, and attend, all on a GPU."""
        layer = self.layer_of(module)
        if cos is None or sin is None:
            self._store.write(layer, k, v, self.rows)
        else:
            q = self._store.write_rotated(layer, q, k, v, cos, sin, self.rows)
        return self._attend(layer, q, options)

    def _attend(self, layer: int, q: Tensor, options: AnyOptions) -> Tensor:
        attend = self._store.attend
        if options.is_sparse:
            attend = recorded_whole(attend)
        return attend(layer, q, self.batch.attention, options)


_ROWS = """
    P slots query_starts context_lens block_tables state_sources state_rows state_targets
    L count sequences max_blocks block_size writes
    P adapted
    L num_adapted
"""


@struct_layout(_ROWS)
class _Rows(ctypes.Structure):
    """`Rows` of kernels/layer.cpp."""


class DirectRows:
    """The rows of a forward and the memory of its `KVStore`, for the kernels.

    Attributes:
        address: pointer to the struct, `Rows` of `kernels/layer.cpp`.
        count: number of rows.
        dtype: dtype of K and V; None if the kernels can't read K and V in place, and only use states.
    """

    def __init__(self, store: KVStore, batch: Batch, slots: Tensor) -> None:
        assert slots.dtype == torch.int64 and slots.is_contiguous()
        states = () if store.states is None else StateRows.of(batch)[1:]
        tables = (batch.query_starts, batch.context_lens, batch.block_tables, *states)
        assert all(t.dtype == torch.int32 and t.is_contiguous() for t in tables)
        num_sequences, max_blocks = batch.block_tables.shape
        in_place = store.in_place and bool(store.tensors)
        self.count, self.dtype = len(slots), store.tensors[0].dtype if in_place else None
        self._store, self._keep_alive = store, (slots, tables)
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
        """Set the adapters of the rows: an array of `AdaptedRows` of `kernels/lora.h`."""
        self._adapted = groups
        self._struct.adapted, self._struct.num_adapted = ctypes.addressof(groups), len(groups)

    def stores(self, layer: int) -> tuple[int, int]:
        """Return the addresses of K and V in one layer of the store."""
        k, v = self._store.layer(layer)
        return k.data_ptr(), v.data_ptr()

    def states(self, first: int, count: int) -> tuple[int | None, ...]:
        """Return the addresses of the states of up to two recurrent operations, padded with None to two."""
        assert self._store.states is not None
        pointers = [x.data_ptr() for x in self._store.states.tensors[first : first + count]]
        return (*pointers, None, None)[:2]

    def all_stores(self, num_states: list[int]) -> Any:
        """Return the addresses of each layer's K and V, or of its states, as an array for the kernels.

        Args:
            num_states: number of states of each layer; 0: it stores K and V.
        """
        if not any(num_states):
            return self._store.addresses
        layer = first = 0
        addresses: list[int | None] = []
        for count in num_states:
            addresses += self.states(first, count) if count else self.stores(layer)
            first += count
            layer += not count
        return (ctypes.c_void_p * len(addresses))(*addresses)


_cached_noise = functools.lru_cache(maxsize=8)(noise)  # most layers have the same shapes


def noise_store(
    layers: list[LayerShape],
    states: list[StateShape],
    dtype: torch.dtype,
    device: torch.device,
    count: int = 2,
) -> KVStore:
    """Return a store filled with noise, for a `span_batch` of at most `count` sequences."""
    store = KVStore(layers, 1 + count, BLOCK_SIZE, dtype, device)
    store.states = StateStore(states, 1 + 2 * count, device) if states else None
    for tensor in contents_of(store):
        tensor[:] = _cached_noise(tuple(tensor.shape[1:]), tensor.dtype)
    if store.states is not None:
        for tensor in store.states.tensors:
            tensor[ZERO_STATE] = 0
    return store


def contents_of(store: KVStore) -> list[Tensor]:
    """Return all tensors of K, V and states of a store."""
    return [*store.tensors, *([] if store.states is None else store.states.tensors)]


def span_batch(spans: Mapping[int, tuple[int, int]], ids: Tensor) -> Batch:
    """Return a batch of tokens `ids` `[T]`, with logits of all rows.

    A sequence that starts after position 0 reads the state written by a batch in which it starts at 0.

    Args:
        spans: first and end position (at most `BLOCK_SIZE`) by sequence number.
    """
    parts = ids.split([stop - start for start, stop in spans.values()])
    rows = [(p.tolist(), a, [1 + s]) for p, (s, (a, _)) in zip(parts, spans.items(), strict=True)]
    last = [end - 1 for end in accumulate(map(len, parts))]
    sources = [1 + 2 * s if start else ZERO_STATE for s, (start, _) in spans.items()]
    targets = [1 + 2 * s + (start > 0) for s, (start, _) in spans.items()]
    return Batch.of(rows, range(len(ids)), states=(sources, last, targets))


def trial_logits(
    module: nn.Module, spec: ModelSpec, forwards: Forwards, context: FlatContext
) -> Tensor:
    """Run the module's own forward in a context, with `forwards` but no hooks; return logits `[R, V]`."""
    with (
        patched(module, forwards, hooks=False),
        activate(context),
        InvariantMode() if spec.needs_override else nullcontext(),
    ):
        return logits_of(module, spec, context.batch)


def logits_of(module: nn.Module, spec: ModelSpec, batch: Batch) -> Tensor:
    """Run the module's own forward in the active context: logits `[R, V]` of `batch.logit_rows`."""
    inputs: dict[str, Any] = {"input_ids": batch.token_ids[None], "use_cache": False}
    if spec.takes_positions:
        inputs["position_ids"] = batch.positions[None]
    if spec.takes_logit_rows:
        inputs["logits_to_keep"] = batch.logit_rows
    logits: Tensor = module(**inputs).logits[0]
    return logits if spec.takes_logit_rows else logits[batch.logit_rows]
