"""Fused layers: the decoder layers of a model that are run by a call or two of the kernels each.

A layer is taken for one of the common shape by what its modules make of one another's outputs, generously.
Whether it really is one is tried: with random rows, what it hands to its attention and what it returns must
be, bit for bit, what its own forward makes of them. Of layers that are built alike one is tried. Those that
fail stay plain, and `report` tells why.
"""

from __future__ import annotations

import collections
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from verbatim import kernels
from verbatim.batch import Batch
from verbatim.errors import TierFailed
from verbatim.model.fingerprint import Fingerprint
from verbatim.model.flat import BLOCK_SIZE, noise_store, span_batch, trial_logits
from verbatim.model.gpu_layer import fuse_on_gpu
from verbatim.model.invariant import overridden
from verbatim.model.layer import FusedLayer
from verbatim.model.layer_trial import SPANS, AroundLayers, LayerCall, LayerProbe, fuse
from verbatim.model.limits import max_length_of
from verbatim.model.mixers import recurs
from verbatim.model.patching import Forwards, fields_of, gate_of
from verbatim.model.spec import ModelSpec, inner_model
from verbatim.model.structs import NotFusable, why_not
from verbatim.model.whole import ModelPart, WholeModel


class FusedLayers:
    """The fused forwards of one model.

    Args:
        module: as `Decoder` has it, not patched at the moment.
        spec: of it.
        forwards: of it, as for `patched`.
        part: the module has only some layers of a model.
        enabled: False fuses none.

    Attributes:
        layers: those of the CPU kernels, in the order in which they are called.
        forwards: as for `patched`, to be put in after the plain ones, which they fall back to.
        whole: the model in one call for all layers; None: it runs layer by layer.
        report: how many layers are fused, how many are not, and for what reasons (the number of each); of
            these, "parts": how many attentions and MLPs are fused; and "whole": "yes" where all layers run in
            one call, else why not. None if not enabled.
    """

    def __init__(
        self,
        module: nn.Module,
        spec: ModelSpec,
        forwards: Forwards,
        part: ModelPart | None = None,
        *,
        enabled: bool = True,
    ) -> None:
        self._enabled = enabled
        self.forwards: Forwards = []
        self.layers: list[FusedLayer] = []
        self.whole: WholeModel | None = None
        self._whole_fits = False  # after the last check
        self._why_not_whole = "not all of its layers are fused"
        self._moves = False  # weights of layers are in memory only while their gates are open
        self._num_parts = 0
        self._plain: collections.Counter[str] = collections.Counter()
        self._snapshot: Fingerprint | None = None
        if not enabled:
            return
        on_gpu = kernels.triton_serves(next(module.parameters()).device)
        if not on_gpu and kernels.library() is None:
            self._plain["there are no compiled kernels"] = len({i for i, _ in spec.slots})
            return
        probes: list[LayerProbe] = []
        calls: list[LayerCall] = []
        alike: dict[Any, LayerProbe] = {}
        plain = {id(fields): forward for fields, forward in forwards}
        gates = {id(part.__dict__): gate for part in module.modules() if (gate := gate_of(part))}
        plain |= {fields: gate.forward for fields, gate in gates.items()}
        self._moves = bool(gates)
        layers = _layers_of(module, spec)
        parts = [] if on_gpu else _parts_of(layers)
        for number, (layer, attention) in enumerate([*parts, *layers]):
            try:
                if layer is None:
                    raise NotFusable("its attention is in no layer")
                own = plain.get(id(layer.__dict__)) or partial(type(layer).forward, layer)
                way, is_part = fuse_on_gpu if on_gpu else fuse, number < len(parts)
                probes.append(LayerProbe(layer, attention, spec, way, calls, alike, own, is_part))
            except NotFusable as reason:
                self._plain[str(reason)] += number >= len(parts)
        if not probes:
            return
        places: Forwards = [(probe.layer.__dict__, probe) for probe in probes]
        failure = ""
        try:
            batch, logits = _run(module, spec, [*forwards, *places])
        except TierFailed:
            raise
        except Exception as error:  # any error of a foreign model
            failure = f"the trial failed: {why_not(error)}"
        finally:
            for probe in probes:
                if probe.gate is not None:  # `patched` put the probe in its place, and took it out
                    probe.layer.__dict__["forward"] = probe.gate
        inside = set[nn.Module]()  # of fused layers
        for probe in dict.fromkeys([*(call.probe for call in calls), *probes]):
            if probe.layer in inside:
                continue
            try:
                built = probe.fused(failure)
            except Exception as error:
                self._plain[why_not(error)] += not probe.is_part
                continue
            if isinstance(built, FusedLayer):
                if not self._moves:  # else before its first forward
                    built.prepare()
                self.layers.append(built)
                forward = built.forward(probe.plain)
            else:
                forward = built
            inside.update(probe.layer.modules())
            if probe.is_part:
                self._num_parts += 1
                forward = overridden(forward, child=True)  # it leaves the override of its layer
            self.forwards.append((fields_of(probe.layer), forward))
        if self._moves:
            self._why_not_whole = "its weights are not all in memory"
        if self._moves or not self.layers or self._plain.total():
            return
        try:
            whole = WholeModel(module, spec, self.layers, part)
            with torch.no_grad():
                whole.check(calls, batch, logits)
            self.whole, self._why_not_whole = whole, ""
        except Exception as error:
            self._why_not_whole = why_not(error)

    def unchanged(self, *, hooks: bool, watched: bool = True) -> bool:
        """Return whether all layers are as they were inspected, before a forward.

        Args:
            hooks: external code runs in the middle of this forward, so each layer has to inspect itself.
            watched: the caller has the module, and may have edited it since the last inspection.
        """
        if hooks or self._moves:  # hooks are handed the modules, and may edit them
            self._snapshot = None
            return False
        snapshot = self._snapshot
        if snapshot is not None and (snapshot.unchanged() if watched else snapshot.same_code()):
            return True
        self._snapshot = None
        fit = [layer.fits() for layer in self.layers]  # each of them, so that all are prepared
        if not fit or not all(fit):
            return False
        prints = [layer.fingerprint for layer in self.layers]
        self._whole_fits = self.whole is not None and self.whole.fits()
        if self.whole is not None:
            prints.append(self.whole.fingerprint)
        if self.whole is None or self._whole_fits:
            self._snapshot = Fingerprint.joined(prints)
        return True

    def forget(self) -> None:
        """Inspect again before the next forward, even if no caller holds the module."""
        self._snapshot = None
        if self.whole is not None:
            self.whole.forget()

    def whole_now(self) -> WholeModel | None:
        """Return the model as one call, if it is `unchanged`."""
        return self.whole if self._whole_fits else None

    @property
    def report(self) -> dict[str, Any] | None:
        if not self._enabled:
            return None
        return {
            "layers": len(self.forwards) - self._num_parts,
            "plain": sum(self._plain.values()),
            "parts": self._num_parts,
            "reasons": dict(+self._plain),
            "whole": "no: " + self._why_not_whole if self.whole is None else "yes",
        }


def _layers_of(module: nn.Module, spec: ModelSpec) -> list[tuple[nn.Module | None, nn.Module]]:
    """Return each attention or recurrent module, and its layer.

    That is the innermost entry of a list that has it, or the module that it is a part of, if no list has it.
    """
    attending = {owner for owner, _ in spec.slots}
    attending |= {id(mixer) for mixer in module.modules() if spec.states and recurs(mixer)}
    found = {id(part): (None, part) for part in module.modules() if id(part) in attending}
    for _, outer in [*found.values()]:  # an indexer is in the module that attends
        for part in [*outer.modules()][1:]:
            found.pop(id(part), None)
    layers: dict[int, tuple[nn.Module | None, nn.Module]] = dict(found)
    for parent in module.modules():
        layers |= {id(part): (parent, part) for part in parent.children() if id(part) in found}
    for entries in module.modules():
        if isinstance(entries, nn.ModuleList):
            for layer in entries:
                parts = {id(part): part for part in layer.modules() if id(part) in found}
                layers |= {of: (layer, part) for of, part in parts.items() if part is not layer}
    return list(layers.values())


def _parts_of(
    layers: list[tuple[nn.Module | None, nn.Module]],
) -> list[tuple[nn.Module, nn.Module | None]]:
    """Return what may be an attention, with the module that attends, or an MLP: each module with children."""
    attending = {id(attention) for _, attention in layers}
    inside = {part: None for layer, _ in layers if layer is not None for part in layer.modules()}
    for layer, _ in layers:
        inside.pop(layer, None)  # type: ignore[arg-type]
    found = {p: [m for m in p.modules() if id(m) in attending] for p in inside if p._modules}
    return [(part, next(iter(own), None)) for part, own in found.items() if len(own) < 2]


def _run(module: nn.Module, spec: ModelSpec, forwards: Forwards) -> tuple[Batch, Tensor]:
    """Run a few tokens at positions all over the context, with trials in place of the layers.

    Returns:
        Them, and the logits `[R, V]` of some.
    """
    config: Any = getattr(inner_model(module), "config", None)
    limit = None if config is None else max_length_of(config)[0]
    rows = sum(stop - start for start, stop in SPANS.values())
    last = max(rows, limit or 4096) - 1
    device = next(module.parameters()).device
    ids = torch.arange(rows) * 7 % max(1, spec.vocab_size - 3) + 1
    positions = torch.tensor([0, 1, last // 3, 2 * last // 3, last])
    batch = span_batch(SPANS, ids)
    slots = batch.slots(BLOCK_SIZE).to(device)
    batch.logit_rows = torch.tensor([0, rows - 1])
    if not any(shape.records for shape in spec.layers):  # which are looked up by positions
        batch.positions = positions
    store = noise_store(spec.layers, [], spec.dtype, device)
    context = AroundLayers(spec.slots, batch.to(device), store, rows=slots)
    return context.batch, trial_logits(module, spec, forwards, context)
