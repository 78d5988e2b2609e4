"""The layers of a stage with their KV cache and recent outputs."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from verbatim.batch import Batch
from verbatim.errors import VerbatimError
from verbatim.kv.hidden import HiddenStore
from verbatim.kv.store import cache_info
from verbatim.model.draft_layers import DraftLayers
from verbatim.model.loader import LoadedModel, ModelSource
from verbatim.model.mtp_source import Mtp
from verbatim.model.patching import threads
from verbatim.model.spec import ModelSpec
from verbatim.numerics import numerics_key
from verbatim.options import available_memory, dtype_name
from verbatim.placement.distributed.drafts import options_of
from verbatim.placement.distributed.part import Part
from verbatim.placement.distributed.served import Served
from verbatim.placement.distributed.split import Split
from verbatim.placement.distributed.wire import Message, dtype_named
from verbatim.placement.offload.planner import BUDGET_SHARE
from verbatim.placement.offload.report import plan_line
from verbatim.placement.offload.runner import open_tiered
from verbatim.placement.offload.tiers import Tiers
from verbatim.placement.options import DEFAULT_KV_SHARE, EngineOptions
from verbatim.placement.resident import Resident, open_store
from verbatim.protocols import Forward
from verbatim.weights.identity import fingerprint

LIMITS = ("max_sequences", "max_batch_tokens", "prompt_rows")  # of `EngineOptions`, by a plan


class Layers(Served):
    """The layers of one stage. Arguments and results are those of messages."""

    calls = Served.calls | {"record"}

    def __init__(self) -> None:
        super().__init__()
        self.part: Part | None = None
        self._kept: HiddenStore | None = None
        self._options: EngineOptions
        self._split: Split | None = None
        self._first_of: dict[str, int] = {}

    def facts(self) -> Message:
        """See `Served`. `speed` is the read bandwidth in bytes/s."""
        return {**super().facts(), "speed": _bytes_per_second()}

    def skeleton(self, source: ModelSource) -> LoadedModel:
        loaded = super().skeleton(source)
        if self._split is None or self._split.skeleton is not loaded:
            self._split = Split(loaded)
        return loaded

    def open(self, **message: Any) -> Message:
        """Read a range of a model's layers, after freeing those held before.

        Raises:
            ModelError, NotSupported: it can't be had here.
        """
        self.close()
        options = self._options = message["options"]
        with self._inspecting, threads(options.num_threads):
            loaded = self.skeleton(message["source"])
            assert self._split is not None
            first, end, place = message["first"], message["end"], None
            if message["offload"] is not None:
                place = partial(_tiers_of, message, (end - first) / self._split.num_layers)
            draft = options_of(message["draft"])
            part = Part(loaded, first, end, split=self._split, draft=draft, place=place)
            self.part = part
        for adapter in message.get("adapters", ()):
            part.decoder.load_adapter(adapter)
        spec, report = part.decoder.spec, part.own.packed
        dtype = options.kv_dtype or spec.dtype
        return {
            "architecture": part.decoder.architecture,
            "parameters": part.num_parameters,
            "weight_bytes": part.weight_bytes,
            "quantization": None if report is None else report.info(),
            "dtype": dtype_name(spec.dtype),
            "kv_dtype": dtype_named(dtype),
            "vocab_size": self._split.vocab_size,
            "choices": spec.choices,
            "hidden_reason": spec.hidden_reason if part.is_last else None,
            **cache_info(spec.layers, spec.states, dtype, part.drafts.bytes_per_token(dtype)),
            "draft": part.drafts.info(),
            "limits": None if part.tiers is None else _limits_of(part.tiers, spec, part.drafts),
            "numerics_key": numerics_key(
                dtype_name(spec.dtype),
                dtype_named(dtype),
                None if report is None else report.info()["requested"],
            ),
            "fingerprint": fingerprint(loaded),
            "memory": available_memory(),
        }

    def allocate(
        self, num_blocks: int, num_states: int, keep_bytes: int, first_of: dict[str, int]
    ) -> Message:
        """Allocate the KV store, and the store of recent outputs.

        Args:
            first_of: the number of layers before this part that choose, by `CHOICES`.
        """
        part, options = self._opened(), self._options
        decoder, drafts, size = part.decoder, part.drafts, options.block_size
        self._first_of = first_of
        if part.tiers is not None:
            self.runner = open_tiered(part.tiers, decoder, drafts, num_blocks, num_states)
        else:
            store = open_store(decoder.spec, options, drafts, num_blocks, num_states)
            self.runner = Resident(decoder, store, options.num_threads, drafts, part.own)
        self._kept = None
        kept = 0
        if not part.is_last:
            assert self._split is not None
            width, hidden_dtype = self._split.hidden_size, self._split.hidden_dtype
            kept = min(num_blocks, keep_bytes // (width * hidden_dtype.itemsize * size))
            if kept:
                self._kept = HiddenStore(width, kept, size, hidden_dtype, torch.device("cpu"))
                self.runner.stores.append(self._kept)
        return {"kept_blocks": kept, "row_widths": self.row_widths}

    def entering(self, num_tokens: int) -> Tensor:
        """Return memory for the hidden states `[T, H]` from the stage before."""
        assert self._split is not None
        return torch.empty(num_tokens, self._split.hidden_size, dtype=self._split.hidden_dtype)

    def run(self, batch: Batch, hidden: Tensor | None, *, kept: bool = False) -> Forward:
        """Run one micro-batch; return its output, with the hidden states that leave in the place of logits.

        Args:
            hidden: `[T, H]` from the stage before; None on the first.
            kept: don't compute, but take what was kept of the last time.
        """
        part, runner = self._opened(), self.running
        store = runner.store
        if kept:
            assert self._kept is not None
            return Forward(self._kept.read(batch.slots(store.block_size)))

        def own(name: str, forced: Tensor | None) -> Tensor | None:
            """Return what the layers here are forced to choose, of that of all layers."""
            first, count = self._first_of[name], runner.choices[name].layers
            return forced[:, first : first + count] if forced is not None and count else None

        batch.forced_experts = own("routing", batch.forced_experts)
        batch.forced_keys = own("indices", batch.forced_keys)
        part.enter(batch, hidden)
        return runner.forward(batch)

    def keep(self, batch: Batch, leaving: Tensor) -> None:
        """Keep the hidden states that leave this stage, as far as there is room for their blocks."""
        kept, size = self._kept, self._options.block_size
        if kept is None:
            return
        limit = len(kept.rows)
        kept.copy_blocks([(a, b) for a, b in batch.block_copies if max(a, b) * size < limit])
        slots = batch.slots(size)
        if int(slots.max()) < limit:
            kept.write(slots, leaving)
        else:
            inside = slots < limit
            kept.write(slots[inside], leaving[inside])

    def record(self, name: str, **fields: Any) -> Tensor | None:
        """Return what was chosen for a sequence's tokens, from its blocks; None if no layer here chooses."""
        if self.runner is None or name not in self.runner.records:
            return None
        return self.runner.record(name, **fields)

    def close(self) -> None:
        """Free everything."""
        if self.runner is not None:
            self.runner.close()
        if self.part is not None:
            self.part.close()
        self.part = self.runner = self._weights = self._kept = None

    def status(self) -> Message:
        part, runner = self.part, self.runner
        if part is None:
            return {"layers": None, "weight_bytes": 0, "kv_bytes": 0, "kept_bytes": 0}
        kept_bytes = 0 if self._kept is None else self._kept.nbytes
        held = 0 if runner is None else sum(store.nbytes for store in runner.stores)
        return {
            "layers": [part.first, part.end],
            "weight_bytes": part.weight_bytes,
            "kv_bytes": held - kept_bytes,
            "kept_bytes": kept_bytes,
        }

    def _opened(self) -> Part:
        if self.part is None:
            raise VerbatimError("this stage holds no layers yet, or sleeps")
        return self.part


def _tiers_of(message: Message, share: float, own: LoadedModel, draft: Mtp | None) -> Tiers:
    """Return the weights of a stage, read into the tiers of a plan.

    Args:
        message: as of `Layers.open`. `memory` is this stage's, and so are `kv_bytes`, which are None if such
            a stage was never opened.
        share: the part of the model's layers that the stage has.
        own: the layers.
        draft: MTP layers beside them.
    """
    offload, options, kv_bytes = message["offload"], message["options"], message["kv_bytes"]
    if kv_bytes is None and options.kv_bytes is not None:
        kv_bytes = int(options.kv_bytes * share)
    if offload.gpu is None and offload.cpu is None:
        if offload.weights is None:
            offload = offload.replace(gpu=int(message["memory"] * BUDGET_SHARE))
        elif kv_bytes is None:
            kv_bytes = int(message["memory"] * DEFAULT_KV_SHARE)
    options = replace(options, kv_bytes=kv_bytes, quantization=own.quantization)
    return Tiers(own, offload, options, message["limit"], draft)


def _limits_of(tiers: Tiers, spec: ModelSpec, drafts: DraftLayers) -> Message:
    """Return what a stage's plan has room for."""
    blocks, states = tiers.num_blocks(spec, drafts)
    return {
        "num_blocks": blocks,
        "num_states": states if spec.states else None,
        **{name: getattr(tiers.options, name) for name in LIMITS},
        "plan": plan_line(tiers.plan, tiers.forecast.prediction),
    }


def _bytes_per_second() -> float:
    """Measure this process's read bandwidth in bytes/s: the median of a few tries."""
    block = torch.ones(1 << 22)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        block.sum()
        times.append(time.perf_counter() - begin)
    return block.nbytes / sorted(times)[2]
