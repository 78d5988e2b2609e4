"""`Decoder`: runs a transformers module on flat batches."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor, nn

from verbatim.batch import Adapter, Batch, SampleRow
from verbatim.errors import EngineClosed, ModelChanged, NotSupported, first_line
from verbatim.kernels.functions import SUFFIX, has_kernels, in_team
from verbatim.kv.flat import HiddenStore
from verbatim.kv.store import KVStore
from verbatim.model.context import ForwardContext, activate, head_of, hidden_rows, record_values
from verbatim.model.experts import how_run, needs_sync
from verbatim.model.fingerprint import (
    Fingerprint,
    Place,
    Tree,
    Watched,
    has_global_hooks,
    numbers_of,
)
from verbatim.model.flat import BLOCK_SIZE, FlatContext, logits_of, noise_store, span_batch
from verbatim.model.fused import FusedLayers
from verbatim.model.invariant import InvariantMode
from verbatim.model.lora import Adapters
from verbatim.model.patching import exclusive, patched, replaced_forwards, without_torch_modes
from verbatim.model.quantized import is_linear, weights_of
from verbatim.model.routing import Records, Routing
from verbatim.model.spec import ModelSpec, inner_model
from verbatim.model.trial import inspect_model
from verbatim.model.whole import ModelPart
from verbatim.protocols import Forward

_TRIAL_TOKENS = 8  # tokens of a trial forward
_TEAM_ROWS = 16  # with more, torch's own operations are large enough to need several threads
_TEAM_NUMBERS = (
    2**18
)  # of a weight whose product with so many rows runs on several threads (threads.h)

_INSPECTED = ("transformers.", "torch.", "verbatim.")  # packages with models that the tests cover


class Order(Protocol):
    """A schedule that splits a forward into micro-batches and interleaves their work."""

    def learning(self) -> AbstractContextManager[None]:
        """Record the order of work within the `with` block, which runs the model's forward."""
        ...

    def cut(self, batch: Batch) -> list[Batch]:
        """Cut `batch` into micro-batches, in row order."""
        ...

    def run(
        self, contexts: Sequence[ForwardContext], forwards: Sequence[Callable[[], Tensor]]
    ) -> list[Tensor]:
        """Run `forwards`, each with its context active; return their outputs."""
        ...


class Steps(Protocol):
    """The recorded forwards of one decoder, such as CUDA graphs."""

    @property
    def status(self) -> int | str:
        """The number of recorded batch sizes, or why recording has stopped."""
        ...

    def run(
        self,
        decoder: Decoder,
        batch: Batch,
        store: KVStore,
        records: Records,
        body: HiddenStore | None,
    ) -> Forward | None:
        """Run a recorded step in place of `Decoder.run`; return None if none fits the batch."""
        ...


class Decoder:
    """Runs a module's own forward on a `Batch`, with K and V in a `KVStore`.

    A live module may be edited between calls: it is inspected again whenever its structure has changed.

    Args:
        module: a transformers causal language model, possibly wrapped; used in place.
        weak: hold only a weak reference to the module.
        order: cuts a forward into micro-batches; None: the batch runs as a whole.
        fused: run each supported layer as one or two kernel calls, or all layers as one, bit-identically.
        latent: whether the store holds the latent vectors of latent attention, not its keys and values.
        is_private: the module has no other users, so it is not edited until the property `module` is read.
        batch_invariant: False: run the module's own products and activations, which are faster on a GPU but
            not batch-invariant.
        part: describes a module that has only some layers of a model; None: it has all.
        origin: the decoder that this one is a `view` of; if that one is editable, so is this one.

    Attributes:
        fused: number of fused layers, and why others are not (`FusedLayers.report`); None: disabled.
        steps: recorded forwards, used for batches that they fit; None: none are recorded.

    Raises:
        UnsupportedModel: the module can't run on flat batches; the message says why.
    """

    steps: Steps | None = None
    _wants_team = False  # for short steps: kernels run some, but not all of it

    def __init__(
        self,
        module: nn.Module,
        *,
        weak: bool = False,
        order: Order | None = None,
        fused: bool = True,
        latent: bool = True,
        is_private: bool = False,
        batch_invariant: bool = True,
        part: ModelPart | None = None,
        origin: Decoder | None = None,
    ) -> None:
        self._origin = origin
        self._views: weakref.WeakSet[Decoder] = weakref.WeakSet()
        self._part = part
        self._batch_invariant = batch_invariant
        self._fuse, self._latent = fused, latent
        self._order = order
        self._editable = not is_private
        self._module: Callable[[], nn.Module | None] = (
            weakref.ref(module) if weak else lambda: module
        )
        self._watched = Watched()
        with exclusive:
            with nullcontext() if order is None else order.learning():
                self.spec = self._inspect(module)
            self.adapters = Adapters(self.spec.dtype)
            self._prepare(module)
        self._editable |= self._tree.has_hooks()  # hooks of the model's own code

    def view(self, module: nn.Module, part: ModelPart | None = None) -> Decoder:
        """Return a decoder with the same settings for a module that shares submodules with this one's."""
        view = Decoder(
            module,
            fused=self._fuse,
            latent=self._latent,
            is_private=True,
            batch_invariant=self._batch_invariant,
            part=part,
            origin=self,
        )
        self._views.add(view)
        return view

    @property
    def is_editable(self) -> bool:
        """Return whether the module may have been edited since the last forward."""
        return self._editable or (self._origin is not None and self._origin.is_editable)

    def _expect_edits(self) -> None:
        """Check the module for edits before each later forward, and drop recorded steps."""
        if not self._editable:
            self._editable = True
            self.record_steps(lambda _: None)

    def _inspect(self, module: nn.Module) -> ModelSpec:
        with self._watched.inspecting(module) if self._editable else nullcontext():
            return inspect_model(module, latent=self._latent)

    def _prepare(self, module: nn.Module) -> None:
        self._tree = Tree(module)
        callers = self.spec.override_in
        self._forwards = replaced_forwards(
            module, batch_invariant=self._batch_invariant, override_in=callers
        )
        self._unfused = list(self._forwards)
        self._layers = FusedLayers(
            module, self.spec, self._forwards, self._part, enabled=self._fuse
        )
        # Not while weights are read: the team's threads would take processors from the readers.
        self._wants_team = (
            self._order is None
            and not (self.runs_whole or self._layers.has_gates)
            and self.spec.dtype in SUFFIX
            and any(weight.numel() >= _TEAM_NUMBERS for weight in weights_of(module))
        )
        covered = {id(fields) for fields, _ in self._unfused}
        # Inspection, which compares windows with masks, and replaced forwards depend on these; other modules
        # read their numbers when they run.
        modules = [
            m
            for m in module.modules()
            if (id(m.__dict__) in covered and not is_linear(m)) or "sliding_window" in m.__dict__
        ]
        configs = self._tree.configs
        kinds = [Place(config.__dict__, "layer_types") for config in configs]
        self._numbers = Fingerprint([], [*numbers_of(modules, configs), *kinds])
        # The override must cover the whole forward in three cases: micro-batches alternate within a forward
        # and share the thread's override; foreign code may have branches that inspection did not run; a
        # forward replaced on an instance is not wrapped.
        calling = [m for m in module.modules() if type(m) in callers]
        self._override_all = bool(calling) and (
            self._order is not None
            or any(not type(m).__module__.startswith(_INSPECTED) for m in module.modules())
            or any(id(m.__dict__) not in covered for m in calling)
        )
        self._forwards += self._layers.forwards
        self.fused = self._layers.report
        if self.adapters.numbers:
            self.adapters.attach(module, self._unfused, self._layers.layers)
        self._head_reads_body = False  # whether the head's input is the body's output

    def load_adapter(self, adapter: Adapter) -> list[str]:
        """Load an adapter, or its matrices for the layers present here; see `Adapters.load`."""
        with exclusive:
            self.refresh()
            if not self.adapters.numbers:
                self.adapters.attach(self.raw_module, self._unfused, self._layers.layers)
            return self.adapters.load(adapter, partial=self._part is not None)

    def unload_adapter(self, number: int) -> None:
        """Drop an adapter; do nothing if it is not loaded."""
        self.adapters.unload(number)

    def refresh(self) -> None:
        """Inspect the module again if it was edited since the last forward.

        Raises:
            ModelChanged: the KV layout, states, vocabulary, dtype, routing or indexers changed.
        """
        with exclusive:
            module = self.raw_module
            if not self.is_editable or (self._tree.unchanged() and self._numbers.same_values()):
                return
            before, now = self.spec, self._inspect(module)
            for name, old, new in (
                ("layers", before.layers, now.layers),
                ("recurrent states", before.states, now.states),
                ("vocabulary", before.vocab_size, now.vocab_size),
                ("dtype", before.dtype, now.dtype),
                ("routed layers", before.routed, now.routed),
                ("indexers", before.indexed, now.indexed),
            ):
                if old != new:
                    raise ModelChanged(
                        f"the model's {name} changed since it was opened; open it again"
                    )
            self.spec = now
            self._prepare(module)

    def stamp(self) -> object:
        """Return a value that changes when the module is edited or its weights are written; see `Runner`."""
        with exclusive:  # another engine's forward patches the module
            return self._tree.code(), self._watched.state(self.owner)

    @property
    def module(self) -> nn.Module:
        """The module, for callers that may edit it; raises EngineClosed if it is gone."""
        self._expect_edits()
        return self.raw_module

    @property
    def raw_module(self) -> nn.Module:
        """The module, for callers that only read it or report their edits by `weights_moved`."""
        module = self._module()
        if module is None:
            raise EngineClosed("this engine was closed, or its module no longer exists")
        return module

    @property
    def owner(self) -> nn.Module:
        """The module with the parameter names known to callers; here `raw_module`."""
        return self.raw_module

    @property
    def architecture(self) -> str:
        """The name of the model's class."""
        return type(inner_model(self.raw_module)).__name__

    def how_experts_run(self) -> dict[str, int]:
        """Return the number of experts modules by a description of how they run; empty without experts."""
        fused = [layer.experts for layer in self._layers.layers]
        in_layer = dict.fromkeys(fused, "in the kernel call of their layer")
        modules = self.raw_module.modules()
        described = [(module, how_run(module, self.spec.dtype)) for module in modules]
        return dict(collections.Counter(in_layer.get(m, how) for m, how in described if how))

    def weights_moved(self) -> None:
        """Drop cached addresses and tables after the module's tensors moved in memory."""
        for decoder in (self, *self._views):
            decoder._layers.forget()

    def close(self) -> None:
        """Drop the references to the module."""
        self._module = lambda: None
        self.adapters, self.steps = Adapters(self.spec.dtype), None
        names = "_tree _numbers _watched _forwards _unfused _layers _wants_team"
        for name in names.split():
            vars(self).pop(name, None)

    def run(
        self,
        batch: Batch,
        store: KVStore,
        records: Records = MappingProxyType({}),
        body: HiddenStore | None = None,
        *,
        hooks: bool = True,
    ) -> Forward:
        """Run one forward, and write K and V to `store`.

        Args:
            records: stores for the experts and keys that the layers choose.
            body: store for the body's output of every row, after the last norm; None: not stored.
            hooks: False disables the module's hooks, for a forward that its owner did not request.

        Raises:
            NotSupported: the batch requires hidden states or forced choices, which the model can't provide.
        """
        work = partial(self._run, batch, store, records, body, hooks=hooks)
        with exclusive:
            few = self._wants_team and batch.num_tokens <= _TEAM_ROWS
            return in_team(work) if few and has_kernels(store.device) else work()

    def _run(
        self,
        batch: Batch,
        store: KVStore,
        records: Records,
        body: HiddenStore | None,
        *,
        hooks: bool,
    ) -> Forward:
        if self.steps is not None:
            recorded_output = self.steps.run(self, batch, store, records, body)
            if recorded_output is not None:
                return recorded_output
        self.refresh()
        spec = self.spec
        if batch.forced_experts is not None:
            spec.routed.check_replay("its routing can't be replayed")
        if batch.forced_keys is not None:
            spec.indexed.check_replay("its indices can't be replayed")
        if batch.wants_hidden and spec.hidden_reason is not None:
            raise NotSupported(f"no hidden states: {spec.hidden_reason}")
        routing = records.get("routing")
        indices = records.get("indices") if batch.records_keys else None
        for record in (routing, indices):
            if record is not None:
                record.copy_blocks(batch.block_copies)
        store.copy_blocks(batch.block_copies)
        batches = [batch] if self._order is None else self._order.cut(batch)
        with store.stores_for(batches) as stores:
            contexts = [
                FlatContext(
                    self.spec.slots,
                    part,
                    part_store,
                    _routing(self.spec, part, part_store.device),
                    indices=indices,
                )
                for part, part_store in zip(batches, stores, strict=True)
            ]
            output = self._forward(self.raw_module, contexts, body=body, hooks=hooks)
        if routing is not None:
            for context in contexts:
                assert context.routing is not None
                routing.write(context.rows, context.routing.record())
        return output

    def chain(
        self,
        batch: Batch,
        store: KVStore,
        rows: list[SampleRow],
        lengths: list[int],
        *,
        hooks: bool = False,
    ) -> list[list[int]] | None:
        """Draw several tokens of each sequence by `WholeModel.chain`.

        Returns None if it can't run, or with `hooks` if there are global hooks, which it would not run.
        """
        with exclusive:
            if self.is_editable or (hooks and has_global_hooks()):
                return None  # cached cos and sin may be outdated; hooks must run once per forward
            trusted = self._layers.unchanged(hooks=False, editable=False)
            whole = self._layers.usable_whole() if trusted and self._order is None else None
            if whole is None:
                return None
            with without_torch_modes():
                context = FlatContext(self.spec.slots, batch, store)
                return whole.chain(context, rows, lengths)

    def record_steps(self, make: Callable[[Decoder], Steps | None]) -> None:
        """Set the recorded steps of this decoder and its views to `make(decoder)`, which may be None."""
        for decoder in (self, *self._views):
            decoder.steps = make(decoder)

    @property
    def runs_whole(self) -> bool:
        """Return whether all layers run in one kernel call."""
        return self._layers.whole is not None

    def steps_can_be_recorded(self) -> bool:
        """Return whether the module has no hooks, so that every forward runs the same operations."""
        with exclusive:
            self.refresh()
            return not (self._tree.has_hooks() if self.is_editable else has_global_hooks())

    def check_runs_freely(self) -> None:
        """Raise NotSupported if experts or indexers synchronize with the GPU during a forward."""
        if self.spec.is_sparse:
            raise NotSupported("indexers copy the number of keys back from the GPU")
        for module in self.raw_module.modules():
            if needs_sync(module):
                name = type(module).__name__
                raise NotSupported(
                    f"{name} copies the number of rows of each expert back from the GPU"
                )

    def forward_in_place(
        self, batch: Batch, rows: Tensor, store: KVStore, body: HiddenStore | None = None
    ) -> tuple[Forward, Tensor | None]:
        """Run one forward without copies, for graph capture; requires `steps_can_be_recorded`.

        Batch and `rows`, its slots, are on the store's device.

        Returns:
            The output of `run`, and the experts of all routed layers (`Routing.record`) or None.
        """
        with exclusive:
            routing = _routing(self.spec, batch, store.device)
            context = FlatContext(self.spec.slots, batch, store, routing, rows=rows)
            output = self._forward(self.raw_module, [context], body=body, hooks=False)
            return output, None if routing is None else routing.record()

    def check_body(self, hidden_size: int) -> None:
        """Raise NotSupported if a trial shows that `run` can't store the body's output `[T, hidden_size]`."""
        with exclusive:
            self.refresh()
            spec, device = self.spec, next(self.raw_module.parameters()).device
            ids = torch.arange(_TRIAL_TOKENS) * 7 % max(1, spec.vocab_size - 3) + 1
            store = noise_store(spec.layers, spec.states, spec.dtype, device, count=1)
            batch = replace(span_batch({0: (0, _TRIAL_TOKENS)}, ids), wants_hidden=True)
            context = FlatContext(spec.slots, batch, store)
            body = HiddenStore(hidden_size, 2, BLOCK_SIZE, spec.dtype, device)
            self._head_reads_body = False
            try:
                hidden = self._forward(self.raw_module, [context], body=body, hooks=False).hidden
                assert hidden is not None
                self._head_reads_body = torch.equal(hidden, body.read(context.rows))
            except Exception as error:  # a foreign body may raise anything
                raise NotSupported(
                    f"{self.architecture}: the hidden states of its body can't be "
                    f"kept: {type(error).__name__}: {first_line(error)}"
                ) from error

    def _forward(
        self,
        module: nn.Module,
        contexts: list[FlatContext],
        *,
        body: HiddenStore | None = None,
        hooks: bool = True,
    ) -> Forward:
        """Run the forwards of all micro-batches, and join their outputs."""
        spec, layers, adapters = self.spec, self._layers, self.adapters
        wants_hidden = contexts[0].batch.wants_hidden
        layer_forwards, fused = self._forwards, True
        groups = [group for context in contexts for group in context.adapted]
        if groups:
            layer_forwards = [*self._unfused, *adapters.forwards(groups)]
            fused = adapters.can_fuse(groups, whole=False)
            if fused:
                layer_forwards += layers.forwards
                for context in contexts:
                    if context.direct is not None and context.adapted:
                        context.direct.adapt(adapters.structs(context.adapted))
        editable = self.is_editable
        hooked = hooks and (self._tree.has_hooks() if editable else has_global_hooks())
        if hooked:  # a hook may keep references to modules, and edit them later
            self._expect_edits()
        trusted = layers.unchanged(hooks=hooked, editable=editable)
        for context in contexts:
            context.trusted = trusted
        context = contexts[0]
        as_whole = body is None or self._head_reads_body
        as_whole = as_whole and self._order is None and adapters.can_fuse(groups, whole=True)
        whole = layers.usable_whole() if as_whole and trusted else None
        if whole is not None:
            with without_torch_modes():
                output = whole.run(context, body, editable=editable)
            if output is not None:
                return output if wants_hidden else Forward(output.logits)
        with (
            patched(self._tree, layer_forwards, hooks=hooks),
            self._mode(),
            record_values(head_of(inner_model(module)) if wants_hidden else None, contexts) as seen,
            record_values(
                None if body is None else inner_model(module).get_decoder(), contexts, outputs=True
            ) as body_outputs,
        ):
            if self._order is None:
                with activate(context):
                    logits = [logits_of(module, spec, context.batch)]
            else:
                forwards = [partial(logits_of, module, spec, c.batch) for c in contexts]
                logits = self._order.run(contexts, forwards)
            for context in contexts:
                adapters.check(context.adapted, context.changed, fused=fused)
            hidden = [
                hidden_rows(inputs, context.batch.logit_rows)
                for inputs, context in zip(seen, contexts, strict=True)
                if wants_hidden
            ]
            if body is not None:
                for context, (last,) in zip(contexts, body_outputs, strict=True):
                    body.write(context.rows, last.flatten(0, -2))
        return Forward(_joined(logits), _joined(hidden) if hidden else None)

    def _mode(self) -> AbstractContextManager[object]:
        """Return the torch-function override for a whole forward; usually none."""
        # Functions called by hooks were not inspected, so they need the override.
        override = self._batch_invariant and (self._override_all or self._tree.has_hooks())
        return InvariantMode() if override else nullcontext()


def _joined(rows: list[Tensor]) -> Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _routing(spec: ModelSpec, batch: Batch, device: torch.device) -> Routing | None:
    if not spec.routed.layers:
        return None
    rows, forced = batch.num_tokens, batch.forced_experts
    return Routing(spec.routed, spec.routed_modules, rows, forced, device)
