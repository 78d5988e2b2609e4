"""`FusedLayers`: finds the decoder layers of a model that can run as one or two kernel calls each.

A layer is a candidate if the inputs and outputs of its modules fit the common structure. It is fused if its
output, K, V and states for random rows are bit-identical to those of its own forward. Only one layer of each
structure is tried. Layers that fail keep their forward; `report` says why.
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
from verbatim.model.layer_trial import SPANS, AroundLayers, LayerCall, LayerProbe, LayerTrial, fuse
from verbatim.model.limits import max_length_of
from verbatim.model.mixers import is_recurrent
from verbatim.model.patching import Forwards, fields_of, gate_of
from verbatim.model.spec import ModelSpec, inner_model
from verbatim.model.structs import NotFusable, why_not
from verbatim.model.whole import ModelPart, WholeModel


class FusedLayers:
    """The fused forwards of one model.

    Args:
        module: a `Decoder`'s module, not currently patched.
        spec: the module's spec.
        forwards: the module's plain forwards, as for `patched`.
        part: describes a module that has only some layers of a model; None: it has all.
        enabled: whether to fuse layers.

    Attributes:
        layers: the layers fused by the CPU kernels, in call order.
        forwards: the fused forwards, as for `patched`, to be listed after the plain ones.
        whole: the model with all layers in one kernel call; None: it runs layer by layer.
        report: counts of fused "layers", of "plain" ones and of their "reasons"; the number of "parts"
            (attention modules and MLPs fused within plain layers); "whole": "yes" if all layers run in one
            call, else why not. None if not enabled.
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
        self._whole_fits = False  # result of the last check
        self._why_not_whole = "not all of its layers are fused"
        self.has_gates = False  # True: weights are in memory only while their gate is open
        self._num_parts = 0
        self._plain: collections.Counter[str] = collections.Counter()
        self._snapshot: Fingerprint | None = None
        if not enabled:
            return
        on_gpu = kernels.uses_triton(next(module.parameters()).device)
        if not on_gpu and kernels.library() is None:
            self._plain["there are no compiled kernels"] = len({i for i, _ in spec.slots})
            return
        probes: list[LayerProbe] = []
        calls: list[LayerCall] = []
        trials: dict[Any, LayerTrial] = {}
        plain = {id(fields): forward for fields, forward in forwards}
        gates = {id(part.__dict__): gate for part in module.modules() if (gate := gate_of(part))}
        plain |= {fields: gate.forward for fields, gate in gates.items()}
        self.has_gates = bool(gates)
        layers = _layers_of(module, spec)
        parts = [] if on_gpu else _parts_of(layers)
        for number, (layer, attention) in enumerate([*parts, *layers]):
            try:
                if layer is None:
                    raise NotFusable("its attention is outside of its layers")
                original = plain.get(id(layer.__dict__)) or partial(type(layer).forward, layer)
                fuser, is_part = fuse_on_gpu if on_gpu else fuse, number < len(parts)
                probes.append(
                    LayerProbe(layer, attention, spec, fuser, calls, trials, original, is_part)
                )
            except NotFusable as reason:
                self._plain[str(reason)] += number >= len(parts)
        if not probes:
            return
        patches: Forwards = [(probe.layer.__dict__, probe) for probe in probes]
        failure = ""
        try:
            batch, logits = _run_probes(module, spec, [*forwards, *patches])
        except TierFailed:
            raise
        except Exception as error:  # a foreign model may raise anything
            failure = f"the trial failed: {why_not(error)}"
        finally:
            for probe in probes:
                if probe.gate is not None:  # `patched` replaced, then removed it
                    probe.layer.__dict__["forward"] = probe.gate
        fused_modules = set[nn.Module]()
        for probe in dict.fromkeys([*(call.probe for call in calls), *probes]):
            if probe.layer in fused_modules:
                continue
            try:
                built = probe.fused(failure)
            except Exception as error:
                self._plain[why_not(error)] += not probe.is_part
                continue
            if isinstance(built, FusedLayer):
                if not self.has_gates:  # else it is prepared before its first forward
                    built.prepare()
                self.layers.append(built)
                forward = built.forward(probe.plain)
            else:
                forward = built
            fused_modules.update(probe.layer.modules())
            if probe.is_part:
                self._num_parts += 1
                forward = overridden(forward, child=True)  # without the override of its layer
            self.forwards.append((fields_of(probe.layer), forward))
        if self.has_gates:
            self._why_not_whole = "its weights are not all in memory"
        if self.has_gates or not self.layers or self._plain.total():
            return
        try:
            whole = WholeModel(module, spec, self.layers, part)
            with torch.no_grad():
                whole.check(calls, batch, logits)
            self.whole, self._why_not_whole = whole, ""
        except Exception as error:
            self._why_not_whole = why_not(error)

    def unchanged(self, *, hooks: bool, editable: bool = True) -> bool:
        """Return whether no layer has changed since its inspection. Must be called before each forward.

        Args:
            hooks: whether external code runs within this forward, so that each layer must check itself.
            editable: whether a caller holds the module, and may have edited it since the last check.
        """
        if hooks or self.has_gates:  # hooks receive the modules, and may edit them
            self._snapshot = None
            return False
        snapshot = self._snapshot
        if snapshot is not None and (snapshot.unchanged() if editable else snapshot.same_code()):
            return True
        self._snapshot = None
        fit = [layer.fits() for layer in self.layers]  # a list, so that all are prepared
        if not fit or not all(fit):
            return False
        fingerprints = [layer.fingerprint for layer in self.layers]
        self._whole_fits = self.whole is not None and self.whole.fits()
        if self.whole is not None:
            fingerprints.append(self.whole.fingerprint)
        if self.whole is None or self._whole_fits:
            self._snapshot = Fingerprint.joined(fingerprints)
        return True

    def forget(self) -> None:
        """Force a full check of the layers before the next forward, even if the module is not editable."""
        self._snapshot = None
        if self.whole is not None:
            self.whole.forget()

    def usable_whole(self) -> WholeModel | None:
        """Return `whole` if it fits, else None; valid after `unchanged` has returned True."""
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
    """Return each attention or recurrent module as (layer, module).

    The layer is the innermost entry of a `ModuleList` that contains the module; outside of lists it is the
    module's parent, or None without one.
    """
    attending = {owner for owner, _ in spec.slots}
    attending |= {id(mixer) for mixer in module.modules() if spec.states and is_recurrent(mixer)}
    layers: dict[int, tuple[nn.Module | None, nn.Module]] = {}
    seen: set[tuple[int, int]] = set()

    def visit(part: nn.Module, parent: nn.Module | None, entry: nn.Module | None) -> None:
        if id(part) in attending:  # its children are not visited, such as indexers
            if entry is not None or id(part) not in layers:
                layers[id(part)] = parent if entry is None else entry, part
            return
        if (key := (id(part), id(entry))) in seen:
            return
        seen.add(key)
        for child in part.children():
            is_entry = isinstance(part, nn.ModuleList) and id(child) not in attending
            visit(child, part, child if is_entry else entry)

    visit(module, None, None)
    return list(layers.values())


def _parts_of(
    layers: list[tuple[nn.Module | None, nn.Module]],
) -> list[tuple[nn.Module, nn.Module | None]]:
    """Return the submodules of layers that may be an attention or MLP, each with the module that attends."""
    attending = {id(attention) for _, attention in layers}
    inside = {part: None for layer, _ in layers if layer is not None for part in layer.modules()}
    for layer, _ in layers:
        inside.pop(layer, None)  # type: ignore[arg-type]
    candidates = {p: [m for m in p.modules() if id(m) in attending] for p in inside if p._modules}
    return [(part, next(iter(attn), None)) for part, attn in candidates.items() if len(attn) < 2]


def _run_probes(module: nn.Module, spec: ModelSpec, forwards: Forwards) -> tuple[Batch, Tensor]:
    """Run a few tokens at positions spread over the context, with probes in place of the layers.

    Returns the batch, and the logits `[2, V]` of its first and last row.
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
    if not any(shape.records for shape in spec.layers):  # records are found by position
        batch.positions = positions
    store = noise_store(spec.layers, [], spec.dtype, device)
    context = AroundLayers(spec.slots, batch.to(device), store, rows=slots)
    return context.batch, trial_logits(module, spec, forwards, context)
