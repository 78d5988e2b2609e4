"""The forward context of the engine, and the small memories in which forwards are compared at opening."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.batch import ZERO_STATE, Batch
from verbatim.kernels.options import AnyOptions, AttentionOptions, IndexOptions
from verbatim.kv.states import StateRows, StateShape, Update, open_states
from verbatim.kv.store import KVStore, LayerShape
from verbatim.model.context import activate
from verbatim.model.differential import noise
from verbatim.model.direct import DirectRows
from verbatim.model.invariant import InvariantMode
from verbatim.model.lora import groups_of
from verbatim.model.patching import Forwards, patched
from verbatim.model.routing import ChoiceStore, Routing
from verbatim.model.spec import ModelSpec

BLOCK_SIZE = 16  # of a `noise_store`


class FlatContext:
    """Attention for one batch: write K and V at the batch's slots, then attend through the blocks.

    Args:
        slots: as `ModelSpec.slots`.
        routing: records the experts of tokens; None: not recorded.
        indices: records the keys that indexers choose; None: not recorded.
        rows: the batch's slots, if it is on the store's device; None computes and moves both.

    Attributes:
        batch, routing: the arguments, with the batch on the store's device.
        rows: the batch's slots, also there.
        direct: addresses of them, of K and V and of states, for kernels; None on a GPU.
        adapted: the rows that have adapters.
        changed: names of the linear layers that adapters were added to.
        trusted: no fused layer was edited since it was inspected, so none needs to check itself.
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
        self._num_indexed = 0  # choices that indexers have made
        is_cpu = store.device.type == "cpu"
        self.direct = DirectRows(store, batch, self.rows) if is_cpu else None
        self._calls: dict[int, int] = {}
        self.positions = batch.positions[None]
        self._num_states = 0  # recurrent operations run

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
            self.routing.note(experts, index)

    def forced_experts(self) -> Tensor | None:
        """Return the forced experts of the running router's layer, `[T, k]`, or None."""
        return None if self.routing is None else self.routing.forced_experts()

    def layer_of(self, module: nn.Module) -> int:
        """Return the store's layer for this call of `module`; each call may have its own."""
        call = self._calls.get(id(module), 0)
        self._calls[id(module)] = call + 1
        return self._slots[id(module), call]

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: AnyOptions
    ) -> Tensor:
        layer = self.layer_of(module)
        self._store.write(layer, k, v, self.rows)
        out = self._attend(layer, q, options)
        return self._chosen(out) if isinstance(options, IndexOptions) else out

    def _chosen(self, chosen: Tensor) -> Tensor:
        """Replace what an indexer chose `[T, G, k]` where it is forced, and record it."""
        own = slice(self._num_indexed, self._num_indexed + chosen.shape[1])
        if self.batch.forced_keys is not None:
            forced = self.batch.forced_keys[:, own]
            chosen = torch.where(forced[..., :1] < 0, chosen, forced)
        if self._indices is not None:
            self._indices.write(self.rows, chosen, own)
        self._num_indexed = own.stop
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
        """Apply rotary embeddings `[T, R]` to queries and keys, and `attend`; on a GPU."""
        layer = self.layer_of(module)
        if cos is None or sin is None:
            self._store.write(layer, k, v, self.rows)
        else:
            q = self._store.write_rotated(layer, q, k, v, cos, sin, self.rows)
        return self._attend(layer, q, options)

    def _attend(self, layer: int, q: Tensor, options: AnyOptions) -> Tensor:
        return self._store.attend(layer, q, self.batch.attention, options)


_kept_noise = functools.lru_cache(maxsize=8)(noise)  # most layers have the same shapes


def noise_store(
    layers: list[LayerShape],
    states: list[StateShape],
    dtype: torch.dtype,
    device: torch.device,
    count: int = 2,
) -> KVStore:
    """Return a store of noise for the sequences of a `span_batch`; `count` of them at most."""
    store = KVStore(layers, 1 + count, BLOCK_SIZE, dtype, device)
    store.states = open_states(states, 1 + 2 * count, device)
    for tensor in contents_of(store):
        tensor[:] = _kept_noise(tuple(tensor.shape[1:]), tensor.dtype)
    if store.states is not None:
        for tensor in store.states.tensors:
            tensor[ZERO_STATE] = 0
    return store


def contents_of(store: KVStore) -> list[Tensor]:
    """Return all K, V and states of a store."""
    return [*store.tensors, *([] if store.states is None else store.states.tensors)]


def span_batch(spans: Mapping[int, tuple[int, int]], ids: Tensor) -> Batch:
    """Return a batch of tokens `ids` `[T]`, with logits of all.

    A sequence's state is read from the slot that a forward from 0 writes.

    Args:
        spans: the first and last position, exclusive, by the number of a sequence; at most `BLOCK_SIZE`.
    """
    bounds = torch.tensor([0, *(stop - start for start, stop in spans.values())]).cumsum(0)
    slots = [(1 + 2 * s if a else ZERO_STATE, 1 + 2 * s + (a > 0)) for s, (a, _) in spans.items()]
    sources, targets = torch.tensor(slots, dtype=torch.int32).t().contiguous()
    return Batch(
        token_ids=ids,
        positions=torch.cat([torch.arange(*span) for span in spans.values()]),
        query_starts=bounds.int(),
        context_lens=torch.tensor([stop for _, stop in spans.values()], dtype=torch.int32),
        block_tables=torch.tensor([[1 + s] for s in spans], dtype=torch.int32),
        logit_rows=torch.arange(len(ids)),
        state_sources=sources,
        state_rows=bounds[1:].int() - 1,
        state_targets=targets,
    )


def trial_logits(
    module: nn.Module, spec: ModelSpec, forwards: Forwards, context: FlatContext
) -> Tensor:
    """Run the module's own forward in a context, without hooks: `[R, V]` of the rows that need logits.

    Args:
        forwards: of the module, as for `patched`.
    """
    with (
        patched(module, forwards, hooks=False),
        activate(context),
        InvariantMode() if spec.needs_override else nullcontext(),
    ):
        return logits_of(module, spec, context.batch)


def logits_of(module: nn.Module, spec: ModelSpec, batch: Batch) -> Tensor:
    """Run the module's own forward in the active context: `[R, V]` of the rows that need logits."""
    inputs: dict[str, Any] = {"input_ids": batch.token_ids[None], "use_cache": False}
    if spec.takes_positions:
        inputs["position_ids"] = batch.positions[None]
    if spec.takes_logit_rows:
        inputs["logits_to_keep"] = batch.logit_rows
    logits: Tensor = module(**inputs).logits[0]
    return logits if spec.takes_logit_rows else logits[batch.logit_rows]
