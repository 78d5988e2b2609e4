"""An offloaded model: weights, K and V in three tiers."""

from __future__ import annotations

import os
import weakref
from contextlib import ExitStack
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

from verbatim.batch import Batch, Draws, SamplePlan
from verbatim.errors import NotSupported, TierFailed
from verbatim.heap import give_back_freed
from verbatim.model.decoder import Decoder
from verbatim.model.draft_layers import DraftLayers
from verbatim.model.early_exit import open_draft_layers
from verbatim.placement.offload.choice import Offload
from verbatim.placement.offload.forecast import Measured
from verbatim.placement.offload.kv import TieredKVStore
from verbatim.placement.offload.report import plan_line
from verbatim.placement.offload.tiers import Tiers, groups_of
from verbatim.placement.offload.units import Slot
from verbatim.placement.offload.update import TierWriter
from verbatim.placement.options import Placed, ToOpen
from verbatim.placement.resident import Resident, open_store
from verbatim.protocols import Forward

_DRAWING = 28  # bytes a logit where much is asked for: copies in float32 and what sorting takes


class Timings(NamedTuple):
    """Seconds of the thread that computes, since the model was opened."""

    load_s: float  # waiting for weights, K and V, activations
    compute_s: float
    store_s: float  # waiting for K and V and activations to be written


class Offloaded(Resident):
    """A `Resident` with parameters, K and V and activations that are read on demand.

    Args:
        decoder: of `tiers`.
        tiers: the weights, closed with this.
    """

    def __init__(
        self, decoder: Decoder, store: TieredKVStore, tiers: Tiers, draft_layers: DraftLayers
    ) -> None:
        super().__init__(decoder, store, tiers.options.num_threads, draft_layers, tiers.loaded)
        self.store: TieredKVStore = store
        self.offload, self.forecast, self.weights = tiers.offload, tiers.forecast, tiers.weights
        self.plan, self.trace = self.forecast.plan, self.weights.trace
        self._measured = Measured()
        # Runs if it is never closed; its arguments must not refer to this object.
        self._let_go = weakref.finalize(self, _let_go, os.getpid(), tiers, store)

    @property
    def whole_module(self) -> None:
        """None: parameters are here only while they are used."""
        return None

    def info(self) -> dict[str, Any]:
        top_k = self.store.top_k
        return {
            **super().info(),
            "placement": "offload",
            "quantization": None if self.packed is None else self.packed.info(),
            "unit_tiers": {unit.name: _tiers_of(unit.slots) for unit in self.weights.units.order}
            | {layer.name: _tiers_of(layer.slots) for layer in self.weights.units.experts},
            "kv_tiers": self.store.bytes_by_tier(),
            "attention": "exact" if top_k is None else f"approximate: top {top_k} keys",
            "plan_summary": plan_line(self.forecast),
            "plan": self.plan.as_dict(),
            "prediction": self.forecast.prediction.as_dict(),
        }

    def forward(self, batch: Batch) -> Forward:
        if self.weights.is_mixed:
            raise TierFailed("an update of the weights went wrong; call update_weights again")
        self.weights.files.check()
        before, begin = self.timings().compute_s, perf_counter()
        read = self.weights.bytes_read
        done = super().forward(batch)
        seconds, compute_s = perf_counter() - begin, self.timings().compute_s - before
        self._measured.add_forward(batch, seconds, compute_s, self.weights.bytes_read - read)
        return done

    def sample(self, forward: Forward, plan: SamplePlan) -> Draws:
        begin, sample, rows = perf_counter(), super().sample, range(len(plan.rows))
        at_once = self._rows_at_once(len(rows))
        pieces = [rows[first : first + at_once] for first in rows[::at_once]]
        draws = [draw for piece in pieces for draw in sample(forward, plan.of(piece))]
        self._measured.sample_s += perf_counter() - begin
        self._measured.draws += 1
        self._measured.tokens += sum(row.target is None for row in plan.rows)
        return draws

    def _rows_at_once(self, rows: int) -> int:
        """Return how many rows to draw at once, within the memory for logits."""
        room = None if self.plan.budget is None else self.plan.memory.get("logits")
        if room is None:
            return max(1, rows)
        return max(1, room // (_DRAWING * self.vocab_size))

    def stats(self) -> dict[str, Any]:
        """Return predictions beside measurements, and the `Timings`."""
        found = self._measured.beside(self.forecast, self._peaks())
        return {"offload": found, "offload_seconds": self.timings()._asdict()}

    def _peaks(self) -> dict[str, int]:
        """Return the bytes in memory by kind."""
        in_place = sum(slot.tier_bytes for slot in self.weights.units.slots if slot.tier != "disk")
        experts, device_ring = self.weights.experts, self.weights.device_ring
        kv = self.store.bytes_by_tier()
        return {
            "weights": in_place,
            "experts": 0 if experts is None else experts.nbytes,
            "expert buffers": 0 if experts is None else experts.buffer_bytes,
            "ring": self.weights.ring.nbytes,
            "GPU ring": 0 if device_ring is None else device_ring.nbytes,
            "K and V": kv["gpu"] + kv["cpu"],
            "K and V buffers": self.store.staging_bytes,
            "GPU K and V buffers": self.store.device_staging_bytes,
        }

    def timings(self) -> Timings:
        """Return the timings of all forwards so far."""
        s = self.trace.seconds
        within = s("wait experts") + s("wait K and V")  # a layer that computes
        # A GPU's threads read and make what this one waits for.
        on_gpu = self.weights.device_ring is not None
        waited, made = s("wait device weights"), 0.0
        if not on_gpu:
            waited, made = s("wait weights"), s("make weights")
        return Timings(
            load_s=waited + within + s("read hidden states"),
            compute_s=s("compute weights") + made - within - s("store K and V"),
            store_s=s("store K and V") + s("flush K and V") + s("write hidden states"),
        )

    def writer(self, *, whole: bool = True) -> TierWriter:
        assert self.original is not None
        return TierWriter(self.weights, self.original)

    def close(self) -> None:
        with ExitStack() as last_first:
            last_first.callback(self.trace.write)
            last_first.callback(give_back_freed)
            last_first.callback(super().close)
            last_first.callback(self._let_go)


def _tiers_of(slots: list[Slot]) -> dict[str, int]:
    """Return the bytes of weights in each tier that has any."""
    held: dict[str, int] = {}
    for slot in slots:
        held[slot.tier] = held.get(slot.tier, 0) + slot.tier_bytes
    return held


def _let_go(process: int, tiers: Tiers, store: TieredKVStore) -> None:
    """End threads, free memory and disk space. A fork has none of these threads."""
    if os.getpid() == process:
        with ExitStack() as last_first:
            last_first.callback(tiers.close)
            last_first.callback(store.release)


def open_offloaded(model: ToOpen, offload: Offload) -> Placed:
    """Open a model with weights, K and V in the tiers of a plan.

    Raises:
        OutOfBlocks, NotSupported: the budgets are too small.
        TierFailed: a file can't be read.
    """
    with ExitStack() as undo:
        tiers = Tiers(model, offload)
        undo.callback(tiers.close)
        decoder = tiers.inspect()
        with tiers.options.device.current():
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
    spec, offload, weights = decoder.spec, tiers.offload, tiers.weights
    if spec.is_sparse and offload.attention_top_k is not None:
        raise NotSupported(
            f"attention_top_k={offload.attention_top_k}: not supported for models with an indexer or "
            "records, which choose the keys themselves"
        )
    make = partial(
        TieredKVStore,
        percents=weights.plan.kv,
        groups=groups_of(weights.units, spec.slots),
        scratch=weights.scratch,
        trace=weights.trace,
        overlap=offload.overlap,
        top_k=offload.attention_top_k,
        is_apart=tiers.options.device.beside_ram is not None,
    )
    store = open_store(spec, tiers.options, layers, num_blocks, num_states, make)
    return Offloaded(decoder, store, tiers, layers)
