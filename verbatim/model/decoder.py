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
from verbatim.kv.flat import HiddenStore
from verbatim.kv.store import KVStore
from verbatim.model.context import IMPLEMENTATION, ForwardContext, activate, flat_attention
from verbatim.model.experts import flat_experts, how_run, reads_back
from verbatim.model.flat import BLOCK_SIZE, FlatContext, logits_of, noise_store, span_batch
from verbatim.model.fused import FusedLayers
from verbatim.model.hidden import head_of, hidden_rows, recorded
from verbatim.model.invariant import InvariantMode
from verbatim.model.lora import Adapters
from verbatim.model.patching import exclusive, patched, plain_numbers, replaced_forwards
from verbatim.model.routing import Records, Routing
from verbatim.model.spec import ModelSpec, inner_model
from verbatim.model.tree import Tree, hooked_everywhere
from verbatim.model.trial import inspect_model
from verbatim.model.whole import ModelPart
from verbatim.protocols import Forward

_TRIAL_TOKENS = 8  # tokens of a trial forward

_INSPECTED = ("transformers.", "torch.", "verbatim.")  # packages whose models the tests cover


class Order(Protocol):
    """The cut of a forward into micro-batches, and the order of their work."""

    def learning(self) -> AbstractContextManager[None]:
        """Record the order of work in the block, which runs the model's forward."""
        ...

    def cut(self, batch: Batch) -> list[Batch]:
        """Cut `batch` into micro-batches, in row order."""
        ...

    def run(
        self, contexts: Sequence[ForwardContext], forwards: Sequence[Callable[[], Tensor]]
    ) -> list[Tensor]:
        """Run `forwards`, each with its context active; return their results."""
        ...


def register() -> None:
    """Register Verbatim's attention and experts in transformers; idempotent."""
    from transformers import AttentionInterface
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    AttentionInterface.register(IMPLEMENTATION, flat_attention)
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, flat_experts)


class Steps(Protocol):
    """Recorded steps of one decoder."""

    @property
    def status(self) -> int | str:
        """The number of recorded sizes, or why nothing is recorded any more."""
        ...

    def run(
        self,
        decoder: Decoder,
        batch: Batch,
        store: KVStore,
        records: Records,
        body: HiddenStore | None,
    ) -> Forward | None:
        """Do the work of `Decoder.run`, or return None if no recorded step can."""
        ...


class Decoder:
    """Runs a module's own forward on a `Batch`, with K and V in a `KVStore`.

    The module is inspected again whenever its structure has changed (an adapter was added, a layer
    parametrized), so a live module may be edited between calls.

    Args:
        module: a transformers causal language model, possibly wrapped; used in place.
        weak: hold only a weak reference to the module.
        order: cuts a forward into micro-batches; None: there is one.
        fused: run supported layers by one or two kernel calls each, or all by one call,
            bit-identically.
        unseen: the module has no other users, so it is not edited until `module` is read.
        batch_invariant: False leaves products and activations to the module, not batch-invariant; faster on a
            GPU.
        part: the module has only some layers of a model.
        origin: decoder of a module that has parts of this one; if that may be edited, so may this one.

    Attributes:
        fused: number of fused layers, and why others are not (`FusedLayers.report`); None: disabled.
        steps: runs the forwards that it can; None: none are recorded.

    Raises:
        UnsupportedModel: the module can't run on flat batches; the message has the reason.
    """

    steps: Steps | None = None

    def __init__(
        self,
        module: nn.Module,
        *,
        weak: bool = False,
        order: Order | None = None,
        fused: bool = True,
        unseen: bool = False,
        batch_invariant: bool = True,
        part: ModelPart | None = None,
        origin: Decoder | None = None,
    ) -> None:
        register()
        self._origin = origin
        self._views: weakref.WeakSet[Decoder] = weakref.WeakSet()
        self._part = part
        self._batch_invariant = batch_invariant
        self._fuse = fused
        self._order = order
        self._watched = not unseen
        self._module: Callable[[], nn.Module | None] = (
            weakref.ref(module) if weak else lambda: module
        )
        with exclusive:
            with nullcontext() if order is None else order.learning():
                self.spec: ModelSpec = inspect_model(module)
            self.adapters = Adapters(self.spec.dtype)
            self._prepare(module)
        self._watched |= self._tree.has_hooks()  # hooks of the model's own code

    def view(self, module: nn.Module, part: ModelPart | None = None) -> Decoder:
        """Return a decoder of another module that has parts of this one's, with the same settings.

        Raises:
            UnsupportedModel: as `Decoder`.
        """
        view = Decoder(
            module,
            fused=self._fuse,
            unseen=True,
            batch_invariant=self._batch_invariant,
            part=part,
            origin=self,
        )
        self._views.add(view)
        return view

    @property
    def is_watched(self) -> bool:
        """Return whether the module may have been edited since the last forward."""
        return self._watched or (self._origin is not None and self._origin.is_watched)

    def _expect_edits(self) -> None:
        """Inspect the module before each forward from now on, and repeat no recorded steps."""
        if not self._watched:
            self._watched = True
            self.record_steps(lambda _: None)

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
        # Forwards of the module's own are not overridden. Micro-batches take turns in the middle of a
        # forward, and share the thread's override. Code that is not transformers' own may have branches that
        # the inspection's tokens do not take.
        covered = {id(fields) for fields, _ in self._unfused}
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
        self._head_reads_body = False  # what the head is given is what the body returns

    def load_adapter(self, adapter: Adapter) -> list[str]:
        """Hold an adapter, or what a part of a model has of it, as `Adapters.load`.

        Raises:
            NotSupported, InvalidRequest: it does not fit the model.
        """
        with exclusive:
            self.refresh()
            if not self.adapters.numbers:
                self.adapters.attach(self.held, self._unfused, self._layers.layers)
            return self.adapters.load(adapter, partial=self._part is not None)

    def unload_adapter(self, number: int) -> None:
        """Drop an adapter; do nothing if it is not held."""
        self.adapters.unload(number)

    def refresh(self) -> None:
        """Inspect the module again if it was edited since the last forward.

        Raises:
            ModelChanged: its KV layout, vocabulary, dtype or routing changed.
        """
        with exclusive:
            module = self.held
            if not self.is_watched or self._tree.unchanged():
                return
            before, now = self.spec, inspect_model(module)
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

    @property
    def module(self) -> nn.Module:
        """The module, for callers that may edit it; raises EngineClosed if it is gone."""
        self._expect_edits()
        return self.held

    @property
    def held(self) -> nn.Module:
        """The module, for callers that only read it, or report edits by `weights_moved`."""
        module = self._module()
        if module is None:
            raise EngineClosed("this engine was closed, or the module it was made for is gone")
        return module

    @property
    def owner(self) -> nn.Module:
        """The module whose parameters these are, by the names that callers know: itself."""
        return self.held

    @property
    def architecture(self) -> str:
        """The class of the model."""
        return type(inner_model(self.held)).__name__

    def how_experts_run(self) -> dict[str, int]:
        """Return the number of layers by the way their experts run, in words; empty without experts."""
        fused = {id(layer.experts) for layer in self._layers.layers}
        found: collections.Counter[str] = collections.Counter()
        for module in self.held.modules():
            way = how_run(module, self.spec.dtype)
            if way is not None:
                found["in the kernel call of their layer" if id(module) in fused else way] += 1
        return dict(found)

    def weights_moved(self) -> None:
        """Update after the module's tensors moved in memory."""
        for decoder in (self, *self._views):
            decoder._layers.forget()

    def close(self) -> None:
        """Drop the references to the module."""
        self._module = lambda: None
        self.adapters, self.steps = Adapters(self.spec.dtype), None
        for name in ("_tree", "_forwards", "_unfused", "_layers"):
            vars(self).pop(name, None)

    def forward(self, batch: Batch, store: KVStore) -> Tensor:
        """Return logits `[R, V]` of `batch.logit_rows`, in the model's dtype; write K and V to `store`."""
        return self.run(batch, store).logits

    def run(
        self,
        batch: Batch,
        store: KVStore,
        records: Records = MappingProxyType({}),
        body: HiddenStore | None = None,
        *,
        hooks: bool = True,
    ) -> Forward:
        """Run one forward; write K and V to `store`, what layers choose to `records`, and the body's
        output of every row, after the last norm, to `body`.

        Args:
            hooks: False disables the module's hooks, for a forward that its owner did not request.

        Raises:
            NotSupported: the batch wants hidden states or forced choices, and the model does not support it.
        """
        with exclusive:
            if self.steps is not None:
                made = self.steps.run(self, batch, store, records, body)
                if made is not None:
                    return made
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
                        own,
                        _routing(self.spec, part, own.device),
                        indices=indices,
                    )
                    for part, own in zip(batches, stores, strict=True)
                ]
                output = self._forward(self.held, contexts, body=body, hooks=hooks)
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
        """Draw tokens one after the other, as of `WholeModel.chain`; None where that is not possible.

        Args:
            hooks: as of `run`; where there are any, they are not skipped.
        """
        with exclusive:
            if self.is_watched or (hooks and hooked_everywhere()):
                return None  # angles may have been edited, and hooks see every forward
            trusted = self._layers.unchanged(hooks=False, watched=False)
            whole = self._layers.whole_now() if trusted and self._order is None else None
            if whole is None:
                return None
            with plain_numbers():
                context = FlatContext(self.spec.slots, batch, store)
                return whole.chain(context, rows, lengths)

    def record_steps(self, make: Callable[[Decoder], Steps | None]) -> None:
        """Run this decoder and its views by recorded steps from now on, or by none; forget those there are.

        Args:
            make: called for each of these decoders.
        """
        for decoder in (self, *self._views):
            decoder.steps = make(decoder)

    @property
    def runs_whole(self) -> bool:
        """Return whether all of its layers run in one call of the kernels."""
        return self._layers.whole is not None

    def steps_can_be_recorded(self) -> bool:
        """Return whether every forward runs the same operations, without hooks."""
        with exclusive:
            self.refresh()
            hooked = self._tree.has_hooks() if self.is_watched else hooked_everywhere()
            return not (self.spec.is_sparse or hooked)

    def check_experts_run_freely(self) -> None:
        """Raise NotSupported if experts wait for the GPU in every layer."""
        for module in self.held.modules():
            if reads_back(module):
                name = type(module).__name__
                raise NotSupported(f"{name} reads back how many rows each expert has")

    def forward_in_place(
        self, batch: Batch, rows: Tensor, store: KVStore, body: HiddenStore | None = None
    ) -> tuple[Forward, Tensor | None]:
        """Do the work of `run` for a batch on the store's device, with its slots `rows`, without copies.

        For graph capture; requires `steps_can_be_recorded`.

        Returns:
            What `run` does, and the experts of all routed layers, as of `Routing`.
        """
        with exclusive:
            routing = _routing(self.spec, batch, store.device)
            context = FlatContext(self.spec.slots, batch, store, routing, rows=rows)
            made = self._forward(self.held, [context], body=body, hooks=False)
            return made, None if routing is None else routing.record()

    def check_body(self, hidden_size: int) -> None:
        """Check by a trial that `run` can store the body's output, `hidden_size` numbers per row.

        Raises:
            NotSupported: it can't; the message has the reason.
        """
        with exclusive:
            self.refresh()
            spec, device = self.spec, next(self.held.parameters()).device
            ids = torch.arange(_TRIAL_TOKENS) * 7 % max(1, spec.vocab_size - 3) + 1
            store = noise_store(spec.layers, spec.states, spec.dtype, device, count=1)
            batch = replace(span_batch({0: (0, _TRIAL_TOKENS)}, ids), wants_hidden=True)
            context = FlatContext(spec.slots, batch, store)
            body = HiddenStore(hidden_size, 2, BLOCK_SIZE, spec.dtype, device)
            self._head_reads_body = False
            try:
                hidden = self._forward(self.held, [context], body=body, hooks=False).hidden
                assert hidden is not None
                self._head_reads_body = torch.equal(hidden, body.read(context.rows))
            except Exception as error:  # a body of any architecture
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
        """Run the forwards of all micro-batches; join their outputs."""
        spec, layers, adapters = self.spec, self._layers, self.adapters
        wants_hidden = contexts[0].batch.wants_hidden
        forwards_of_layers, fused = self._forwards, True
        groups = [group for context in contexts for group in context.adapted]
        if groups:
            forwards_of_layers = [*self._unfused, *adapters.forwards(groups)]
            fused = adapters.serves(groups, whole=False)
            if fused:
                forwards_of_layers += layers.forwards
                for context in contexts:
                    if context.direct is not None and context.adapted:
                        context.direct.adapt(adapters.structs(context.adapted))
        watched = self.is_watched
        hooked = hooks and (self._tree.has_hooks() if watched else hooked_everywhere())
        if hooked:  # a hook may keep references to modules, and edit them later
            self._expect_edits()
        trusted = layers.unchanged(hooks=hooked, watched=watched)
        for context in contexts:
            context.trusted = trusted
        context = contexts[0]
        serves = body is None or self._head_reads_body
        serves = serves and self._order is None and adapters.serves(groups, whole=True)
        whole = layers.whole_now() if serves and trusted else None
        if whole is not None:
            with plain_numbers():
                found = whole.run(context, body, watched=watched)
            if found is not None:
                return found if wants_hidden else Forward(found.logits)
        with (
            patched(self._tree, forwards_of_layers, hooks=hooks),
            self._mode(),
            recorded(head_of(inner_model(module)) if wants_hidden else None, contexts) as seen,
            recorded(
                None if body is None else inner_model(module).get_decoder(), contexts, outputs=True
            ) as made,
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
                for context, (last,) in zip(contexts, made, strict=True):
                    body.write(context.rows, last.flatten(0, -2))
        return Forward(_joined(logits), _joined(hidden) if hidden else None)

    def _mode(self) -> AbstractContextManager[object]:
        """Return the torch-function override that all of this forward needs; usually none."""
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
