"""Opening of an offloaded model."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from verbatim.errors import NotSupported
from verbatim.kv.states import open_states
from verbatim.model.decoder import Decoder
from verbatim.model.draft_layers import DraftLayers
from verbatim.model.early_exit import open_draft_layers
from verbatim.placement.offload.choice import Offload
from verbatim.placement.offload.kv import TieredKVStore
from verbatim.placement.offload.runner import Offloaded
from verbatim.placement.offload.tiers import Tiers, groups_of
from verbatim.placement.options import Placed, ToOpen


def open_offloaded(model: ToOpen, offload: Offload) -> Placed:
    """Open a model with weights, K and V in the tiers of a plan.

    Raises:
        OutOfBlocks, NotSupported: the budgets are too small.
        TierFailed: a file can't be read.
    """
    with ExitStack() as undo:
        tiers = Tiers(model.loaded, offload, model.options, model.limit, model.draft)
        undo.callback(tiers.close)
        decoder = tiers.inspect()
        layers = open_draft_layers(model.draft, decoder, model.loaded)
        runner = open_tiered(tiers, decoder, layers, *tiers.num_blocks(decoder.spec, layers))
        undo.pop_all()
    return Placed(runner, tiers.options)


def open_tiered(
    tiers: Tiers, decoder: Decoder, layers: DraftLayers, num_blocks: int, num_states: int
) -> Offloaded:
    """Allocate K and V, and return the runner, which closes `tiers`.

    Raises:
        NotSupported: approximate attention, and the model chooses the keys itself.
        TierFailed: the disk has no room.
    """
    spec, offload, options = decoder.spec, tiers.offload, tiers.options
    if spec.is_sparse and offload.attention_top_k is not None:
        raise NotSupported(
            f"attention_top_k={offload.attention_top_k}: not supported for models with an indexer or "
            "records, which choose the keys themselves"
        )
    dtype = options.kv_dtype or spec.dtype
    store = TieredKVStore(
        spec.layers,
        num_blocks,
        options.block_size,
        dtype,
        torch.device("cpu"),
        percents=tiers.plan.kv,
        groups=groups_of(tiers.weights.units, spec.slots),
        scratch=tiers.scratch,
        trace=tiers.trace,
        overlap=offload.overlap,
        cpu_cache_compute=offload.cpu_cache_compute,
        top_k=offload.attention_top_k,
    )
    with ExitStack() as undo:
        undo.callback(store.release)
        store.states = open_states(spec.states, num_states)
        layers.open_stores(num_blocks, options.block_size, dtype)
        runner = Offloaded(decoder, store, tiers, layers)
        undo.pop_all()
    return runner
