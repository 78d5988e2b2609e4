"""A transformers module run on flat batches."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from verbatim.batch import Batch
from verbatim.errors import EngineClosed, ModelChanged
from verbatim.kv.store import KVStore
from verbatim.model.anatomy import Anatomy, look_at
from verbatim.model.attention import AttentionOptions, paged_attention, write_kv
from verbatim.model.borrow import (
    borrow,
    configs_of,
    exclusive,
    has_hooks,
    replaced_forwards,
    structure,
)
from verbatim.model.context import activate, register
from verbatim.model.invariant import InvariantMode


class Decoder:
    """Runs a module's own forward on a `Batch`, with K and V in a `KVStore`.

    The module is looked at again whenever its structure has changed (an adapter was added, a layer
    parametrized), so a live module may be edited between calls.

    Args:
        module: a transformers causal language model, possibly wrapped; used in place.
        weak: hold it only weakly, so that this decoder does not keep it alive.

    Raises:
        UnsupportedModel: it can't be run on flat batches; the message names the reason.
    """

    def __init__(self, module: nn.Module, *, weak: bool = False) -> None:
        register()
        self._module: Callable[[], nn.Module | None] = (
            weakref.ref(module) if weak else lambda: module
        )
        with exclusive:
            self.anatomy: Anatomy = look_at(module)
            self._prepare(module)

    def _prepare(self, module: nn.Module) -> None:
        self._structure = structure(module)
        self._forwards = replaced_forwards(module)
        self._configs = configs_of(module)

    def look_again(self) -> None:
        """Follow a module that was edited since the last forward.

        Raises:
            ModelChanged: what it stores for a token, its vocabulary or its dtype is another one.
        """
        with exclusive:
            module = self.module
            if structure(module) == self._structure:
                return
            before, now = self.anatomy, look_at(module)
            for name, old, new in (
                ("layers", before.layers, now.layers),
                ("vocabulary", before.vocab_size, now.vocab_size),
                ("dtype", before.dtype, now.dtype),
            ):
                if old != new:
                    raise ModelChanged(
                        f"the model's {name} changed since it was opened; open it again"
                    )
            self.anatomy = now
            self._prepare(module)

    @property
    def module(self) -> nn.Module:
        """The module itself; EngineClosed when it was held weakly and is gone."""
        module = self._module()
        if module is None:
            raise EngineClosed("this engine was closed, or the module it was made for is gone")
        return module

    def close(self) -> None:
        """Let go of the module."""
        self._module = lambda: None
        self._forwards, self._configs = [], []

    def forward(self, batch: Batch, store: KVStore) -> Tensor:
        """Logits `[R, V]` of `batch.logit_rows`, in the model's dtype; K and V go to `store`."""
        with exclusive:
            self.look_again()
            return self._forward(self.module, batch, store)

    def _forward(self, module: nn.Module, batch: Batch, store: KVStore) -> Tensor:
        anatomy = self.anatomy
        store.copy_blocks(batch.block_copies)
        inputs: dict[str, Any] = {"input_ids": batch.token_ids[None], "use_cache": False}
        if anatomy.takes_positions:
            inputs["position_ids"] = batch.positions[None]
        if anatomy.takes_logit_rows:
            inputs["logits_to_keep"] = batch.logit_rows
        with (
            borrow(module, self._forwards, self._configs),
            activate(_FlatPass(anatomy, batch, store)),
            # What a hook calls was not seen in the look, so the net is out for it.
            InvariantMode() if anatomy.needs_safety_net or has_hooks(module) else nullcontext(),
        ):
            logits: Tensor = module(**inputs).logits[0]
        return logits if anatomy.takes_logit_rows else logits[batch.logit_rows]


class _FlatPass:
    """Attention for one batch: write K and V at the batch's slots, then attend through the blocks."""

    def __init__(self, anatomy: Anatomy, batch: Batch, store: KVStore) -> None:
        self._slots = anatomy.slots
        self._batch = batch
        self._store = store
        self._rows = batch.slots(store.block_size)
        self._calls: dict[int, int] = {}

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        call = self._calls.get(id(module), 0)
        self._calls[id(module)] = call + 1
        k_store, v_store = self._store.layers[self._slots[id(module), call]]
        write_kv(k, v, k_store, v_store, self._rows)
        batch = self._batch
        return paged_attention(
            q,
            k_store,
            v_store,
            batch.query_starts,
            batch.context_lens,
            batch.block_tables,
            options,
        )
