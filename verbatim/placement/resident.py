"""The runner of a model in this process's memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from verbatim.batch import Adapter, Batch, Choices, Draws, SamplePlan
from verbatim.common.heap import release_free_memory
from verbatim.errors import NotSupported, OutOfBlocks, VerbatimError
from verbatim.kernels.functions import has_kernels
from verbatim.kv.flat import BlockStore, read_rows, write_rows
from verbatim.kv.states import StateStore
from verbatim.kv.store import KVStore, cache_info
from verbatim.model.decoder import Decoder
from verbatim.model.device import Device
from verbatim.model.draft_layers import DraftLayers
from verbatim.model.loader import Checkpoint, LoadedModel
from verbatim.model.products import threads
from verbatim.model.quantized import weight_info
from verbatim.model.routing import open_records
from verbatim.model.spec import ModelSpec
from verbatim.options import dtype_name
from verbatim.placement import recorded
from verbatim.placement.options import EngineOptions
from verbatim.placement.recorded import ON_CPU, RecordedSteps
from verbatim.placement.tape import record_on_cpu
from verbatim.protocols import Forward, Runner
from verbatim.quantization.report import PackingReport
from verbatim.sampling.sampler import sample_rows
from verbatim.weights.lazy import Cut
from verbatim.weights.update import NewWeights, WeightWriter


class Resident(Runner):
    """Runs the decoder and the sampler in this process.

    Args:
        num_threads: threads of torch's pool during a forward or a draw; None: torch's setting.
        draft_layers: the model's draft layers, with their stores open.
        loaded: the loaded model, with its checkpoint and report on quantization.
    """

    _record_after_wake = False
    checkpoint: Checkpoint | None = None  # to drop and restore the weights; None for a live module
    packed: PackingReport | None = None  # report on quantized weights
    original: Mapping[str, Tensor] | None = None  # the state dict before quantization and cuts
    cuts: Mapping[str, Cut] = MappingProxyType({})  # ranges of partially held weights
    placement: Mapping[str, Any] = MappingProxyType({"placement": "resident"})  # for `info`

    def __init__(
        self,
        decoder: Decoder,
        store: KVStore,
        num_threads: int | None,
        draft_layers: DraftLayers | None = None,
        loaded: LoadedModel | None = None,
    ) -> None:
        if loaded is not None:
            self.checkpoint, self.packed = loaded.checkpoint, loaded.packed
            self.original, self.cuts = loaded.original, loaded.cuts
        self.decoder = decoder
        self.store = store
        self.draft_layers = draft_layers or DraftLayers()
        self.draft_info = self.draft_layers.info()
        states = [] if store.states is None else [store.states]
        # Those that `sleep` frees; records stay.
        self.stores: list[BlockStore] = [store, *states, *self.draft_layers.stores]
        self.vocab_size = decoder.spec.vocab_size
        self.block_size = store.block_size
        self.num_blocks = store.num_blocks
        self.num_states = 0 if store.states is None else store.states.num_slots
        self.num_forwards = 0
        spec = decoder.spec
        self.hidden_reason = spec.hidden_reason
        # The recorded choices, by `params.CHOICES`, with the block numbers of `store`.
        self.records = open_records(spec.choices, store.num_blocks, store.block_size)
        self._num_threads = num_threads
        self._device = Device(store.device, store.batch_invariant)

    @property
    def module(self) -> nn.Module:
        """The module. Raises EngineClosed if it was held weakly and has been freed."""
        return self.decoder.module

    @property
    def whole_module(self) -> nn.Module | None:
        """The module, if it holds all parameters as in the checkpoint; otherwise None."""
        asleep = self.checkpoint is not None and self.checkpoint.dropped
        return None if asleep or self.packed is not None or self.cuts else self.module

    @property
    def choices(self) -> Mapping[str, Choices]:
        return self.decoder.spec.choices

    def refresh(self) -> None:
        """Inspect a live module again if it was edited; raise ModelChanged if its layout changed."""
        self.decoder.refresh()

    def forward(self, batch: Batch) -> Forward:
        self.num_forwards += 1
        for store in self.draft_layers.stores:
            store.copy_blocks(batch.block_copies)
        with threads(self._num_threads), self._device.current():
            body = self.draft_layers.hidden
            output = self.decoder.run(batch, self.store, self.records, body)
        if output.hidden is not None:  # read on the CPU; logits stay on the device that draws
            output.hidden = output.hidden.cpu()
        return output

    def draft(
        self, k: int, batch: Batch, plan: SamplePlan | None, lengths: list[int]
    ) -> list[list[int]]:
        layers, store = self.draft_layers, self.store
        with threads(self._num_threads), self._device.current():
            if plan is not None and lengths:
                drawn = layers.chain(k, batch, store, plan.rows, lengths)
                if drawn is not None:
                    return drawn
            logits = layers.run(k, batch, store)
            return [] if plan is None else [[draw.id] for draw in sample_rows(logits, plan)]

    def record_steps(self) -> None:
        """Enable recorded steps, also of draft layers; the model must never be edited afterwards.

        On a CPU, steps are recorded only if the kernels can't run all layers in one call.
        """
        if not recorded.enabled():
            return
        if self._device.is_gpu:
            recorder = recorded.cuda_recorder(self.store.device)
            self.decoder.record_steps(lambda _: RecordedSteps(recorder))
        elif has_kernels(self.store.device) and self.decoder.fused is not None:
            self.decoder.record_steps(
                lambda decoder: None if decoder.runs_whole else RecordedSteps(record_on_cpu, ON_CPU)
            )

    def sample(self, forward: Forward, plan: SamplePlan) -> Draws:
        with threads(self._num_threads), self._device.current():
            return sample_rows(forward.logits, plan)

    def logits(self, forward: Forward, rows: list[int]) -> Tensor:
        return forward.logits[rows].float().cpu()

    def record(self, name: str, block_table: list[int], num_tokens: int) -> Tensor:
        self.choices[name].check(f"the model's {name} can't be recorded")
        return self.records[name].read(block_table, num_tokens)

    def read_cache(self, kind: str, numbers: list[int], used: int | None = None) -> Tensor | None:
        return read_rows(self.cached_in(kind), numbers, used)

    def write_cache(self, kind: str, numbers: list[int], rows: Tensor) -> bool:
        write_rows(self.cached_in(kind), numbers, rows)
        return True

    def cached_in(self, kind: str) -> list[BlockStore | None]:
        """Return the stores that hold a cached prefix, for a kind of `read_cache`.

        Not included are recorded indices, as their requests share no blocks, and K and V of MTP layers, which
        are recomputed from the hidden states.
        """
        if kind == "states":
            return [self.store.states]
        return [self.store, self.records.get("routing"), self.draft_layers.hidden]

    def info(self) -> dict[str, Any]:
        spec, drafts, states = self.decoder.spec, self.draft_layers, self.store.states
        kv_dtype = self.store.dtype
        gpu, steps = self._device.info(), self.decoder.steps
        return {
            "architecture": self.decoder.architecture,
            **weight_info(self.decoder.owner),
            **self.placement,
            **({} if gpu is None else {"gpu": gpu}),
            "dtype": dtype_name(spec.dtype),
            **({} if self.packed is None else {"quantization": self.packed.info()}),
            "layers": sum(shape.value_dim > 0 for shape in spec.layers),
            "routing_bytes": self.records["routing"].nbytes if "routing" in self.records else 0,
            "kv_bytes": sum(store.nbytes for store in self.stores),
            "kv_dtype": self.store.dtype_name,
            **cache_info(spec.layers, spec.states, kv_dtype, drafts.bytes_per_token(kv_dtype)),
            **({} if states is None else {"state_slots": states.num_slots}),
            **self.draft_info,
            "override": sorted(spec.needs_override),
            "torch_functions": sorted(spec.torch_functions),
            "fused": self.decoder.fused,
            "recorded_steps": None if steps is None else steps.status,
            "experts": self.decoder.how_experts_run(),
        }

    def new_weights(
        self, tensors: Mapping[str, Tensor], *, check_finite: bool
    ) -> Callable[[], None]:
        if self.checkpoint is not None and self.checkpoint.dropped:
            raise VerbatimError("the weights are asleep; call wake() before they are updated")
        if not isinstance(self.decoder.raw_module, nn.Module):
            name = self.decoder.architecture
            raise NotSupported(f"{name} is not a module, so it has no weights to update")
        new = NewWeights(self.original or self.decoder.owner, tensors, check_finite=check_finite)
        writer = self.writer()
        writer.prepare(new.tensors)
        return partial(self.write_weights, writer, new.tensors)

    def write_weights(self, writer: WeightWriter, tensors: Mapping[str, Tensor]) -> None:
        """Write new weights, and those that `writer` has prepared."""
        writer.write(tensors)
        if self.packed is not None:
            self.packed.squares |= writer.squares
        self.decoder.weights_moved()  # the new weights may include buffers

    def writer(self, *, whole: bool = True) -> WeightWriter:
        """Return a writer of new weights; unless `whole`, it skips weights that are not held here."""
        return WeightWriter(self.decoder.owner, self.cuts, whole=whole)

    def load_adapter(self, adapter: Adapter) -> list[str]:
        """See `Runner`. Return the names of the changed layers in this process."""
        return self.decoder.load_adapter(adapter)

    def unload_adapter(self, number: int) -> None:
        self.decoder.unload_adapter(number)

    def stamp(self) -> object:
        return self.decoder.stamp()

    def sleep(self, weights: bool) -> None:
        if weights:
            if self.checkpoint is None:
                raise NotSupported(
                    "sleep(weights=True): not supported for a live module; sleep() "
                    "frees only the KV memory"
                )
            self.checkpoint.drop(self.decoder.raw_module)
            self.decoder.weights_moved()
        if self.decoder.steps is not None:
            self._record_after_wake = True
            self.decoder.record_steps(lambda _: None)
        for store in self.stores:
            store.release()
        release_free_memory()

    def wake(self) -> None:
        if self.checkpoint is not None:
            self.checkpoint.restore(self.decoder.raw_module)
            self.decoder.weights_moved()
        for store in self.stores:
            store.allocate()
        if self._record_after_wake and not self.decoder.is_editable:
            self.record_steps()
        self._record_after_wake = False

    def close(self) -> None:
        for store in self.stores:
            store.release()
        self.records, self.original, self.stores = {}, None, []
        self.draft_layers.close()
        self.decoder.close()


def open_decoder(loaded: LoadedModel, options: EngineOptions, *, weak: bool = False) -> Decoder:
    """Return the decoder of a model, which is first moved to its device unless it is live.

    With `weak`, the decoder holds only a weak reference to the module.
    """
    device = options.device
    if device.is_gpu and not loaded.live:
        loaded.move(device.torch)
    with device.current():
        return Decoder(
            loaded.module,
            weak=weak,
            fused=options.fused,
            latent=device.stores_latent,
            is_private=not loaded.live,
            batch_invariant=device.batch_invariant,
        )


def open_resident(
    decoder: Decoder,
    loaded: LoadedModel,
    options: EngineOptions,
    limit: int | None,
    draft_layers: DraftLayers | None = None,
) -> Resident:
    """Allocate the stores of a decoder and of draft layers, and return the runner.

    Raises:
        OutOfBlocks: the memory does not hold one block, or can't be allocated.
    """
    spec, drafts = decoder.spec, draft_layers or DraftLayers()
    token_bytes = options.token_bytes(spec, drafts)
    state_bytes = sum(shape.nbytes for shape in spec.states)
    num_states = options.num_states(state_bytes)
    blocks = options.num_blocks(token_bytes, limit, num_states * state_bytes)
    try:
        store = open_store(spec, options, drafts, blocks, num_states)
    except RuntimeError as error:  # from torch's allocators, on CPU and GPU
        nbytes = blocks * options.block_size * token_bytes
        raise OutOfBlocks(
            f"the KV cache of {nbytes} bytes can't be allocated: lower kv_memory or max_length"
        ) from error
    runner = Resident(decoder, store, options.num_threads, drafts, loaded)
    if not loaded.live:  # a live module may be edited in undetectable ways
        runner.record_steps()
    return runner


def open_store(
    spec: ModelSpec,
    options: EngineOptions,
    drafts: DraftLayers,
    num_blocks: int,
    num_states: int,
    make: Callable[..., Any] = KVStore,
) -> Any:
    """Allocate K and V with `make`, recurrent states, and the stores of draft layers."""
    dtype, device = options.kv_dtype or spec.dtype, options.device.torch
    drafts.open_stores(num_blocks, options.block_size, dtype)
    states = StateStore(spec.states, num_states, device) if spec.states else None
    store = make(spec.layers, num_blocks, options.block_size, dtype, device)
    store.states, store.batch_invariant = states, options.device.batch_invariant
    return store
