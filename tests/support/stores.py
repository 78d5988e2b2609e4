"""Stores for forwards without an engine."""

from __future__ import annotations

import torch

from verbatim.kv.states import StateShape, open_states
from verbatim.kv.store import KVStore, LayerShape
from verbatim.model.decoder import Decoder


def poisoned_store(
    decoder: Decoder, num_blocks: int, block_size: int, num_states: int = 1
) -> KVStore:
    """A store in which all K, V and states that were never written are NaN."""
    a = decoder.spec
    return poisoned(a.layers, a.states, a.dtype, num_blocks, block_size, num_states)


def poisoned(
    layers: list[LayerShape],
    states: list[StateShape],
    dtype: torch.dtype,
    num_blocks: int,
    block_size: int,
    num_states: int = 1,
) -> KVStore:
    store = KVStore(layers, num_blocks, block_size, dtype, torch.device("cpu"))
    store.poison(list(range(num_blocks)))
    store.states = open_states(states, num_states)
    if store.states is not None:
        store.states.poison(range(num_states))
    return store
