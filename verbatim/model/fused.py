"""Fused layers: the decoder layers of a model that are run by a call or two of the kernels each.

A layer is taken for one of the common shape by the names of its parts, generously. Whether it really is
one is tried: with random rows, what it hands to its attention and what it returns must be, bit for bit,
what its own forward makes of them. A layer that fails stays plain, and `report` tells why.
"""

from __future__ import annotations

import collections
from typing import Any

import torch
from torch import Tensor, nn

from verbatim import kernels
from verbatim.batch import Batch
from verbatim.errors import first_line
from verbatim.model.fingerprint import Fingerprint
from verbatim.model.flat import BLOCK_SIZE, noise_store, span_batch, trial_logits
from verbatim.model.gpu_layer import fuse_on_gpu
from verbatim.model.layer import FusedLayer
from verbatim.model.layer_parts import MLP_NAMES, take_apart
from verbatim.model.layer_trial import SPANS, AroundLayers, LayerCall, LayerProbe, fuse
from verbatim.model.mixers import recurs
from verbatim.model.patching import Forwards
from verbatim.model.spec import ModelSpec, inner_model
from verbatim.model.structs import NotFusable
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
        report: how many layers are fused, how many are not, and for what reasons (the number of each);
            and "whole": "yes" where they run in one call, else why not; None if not enabled.
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
        for layer, attention in _layers_of(module, spec):
            try:
                if layer is None:
                    raise NotFusable("its attention is not in a layer with an MLP")
                parts = take_apart(layer, attention)
                probes.append(LayerProbe(parts, spec, fuse_on_gpu if on_gpu else fuse, calls))
            except NotFusable as reason:
                self._plain[str(reason)] += 1
        if not probes:
            return
        places: Forwards = [(probe.parts.layer.__dict__, probe) for probe in probes]
        try:
            batch, logits = _run(module, spec, [*forwards, *places])
        except Exception as error:  # any error of a foreign model
            failure = f"the trial failed: {type(error).__name__}: {first_line(error)}"
            for probe in probes:
                self._plain[probe.reason or failure] += 1
            return
        for probe in dict.fromkeys([*(call.probe for call in calls), *probes]):
            if probe.forward is None:
                self._plain[probe.reason or "it was not called in the trial"] += 1
                continue
            self.forwards.append((probe.parts.layer.__dict__, probe.forward))
            if probe.fused is not None:
                self.layers.append(probe.fused)
        if not self.layers or self._plain:
            return
        try:
            whole = WholeModel(module, spec, self.layers, part)
            with torch.no_grad():
                whole.check(calls, batch, logits)
            self.whole, self._why_not_whole = whole, ""
        except NotFusable as reason:
            self._why_not_whole = str(reason)
        except Exception as error:  # any error of a foreign model
            self._why_not_whole = f"{type(error).__name__}: {first_line(error)}"

    def unchanged(self, *, hooks: bool, watched: bool = True) -> bool:
        """Return whether all layers are as they were inspected, before a forward.

        Args:
            hooks: external code runs in the middle of this forward, so each layer has to inspect itself.
            watched: the caller has the module, and may have edited it since the last inspection.
        """
        if hooks:  # hooks are handed the modules, and may edit them
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

    def fused_experts(self) -> set[int]:
        """Return the ids of the experts modules that fused layers run."""
        return {id(layer.experts) for layer in self.layers if layer.experts is not None}

    def whole_now(self) -> WholeModel | None:
        """Return the model as one call, if it is `unchanged`."""
        return self.whole if self._whole_fits else None

    @property
    def report(self) -> dict[str, Any] | None:
        if not self._enabled:
            return None
        return {
            "layers": len(self.forwards),
            "plain": sum(self._plain.values()),
            "reasons": dict(self._plain),
            "whole": "no: " + self._why_not_whole if self.whole is None else "yes",
        }


def _layers_of(module: nn.Module, spec: ModelSpec) -> list[tuple[nn.Module | None, nn.Module]]:
    """Return each attention or recurrent module, and the layer that it is a direct part of."""
    attending = {owner for owner, _ in spec.slots}
    attending |= {id(mixer) for mixer in module.modules() if spec.states and recurs(mixer)}
    parents: dict[int, tuple[nn.Module | None, nn.Module]] = {}
    for parent in module.modules():
        if id(parent) in attending:
            parents.setdefault(id(parent), (None, parent))
        for child in parent._modules.values():
            if child is not None and id(child) in attending:
                has_mlp = any(isinstance(parent._modules.get(n), nn.Module) for n in MLP_NAMES)
                parents[id(child)] = (parent if has_mlp else None, child)
    return list(parents.values())


def _run(module: nn.Module, spec: ModelSpec, forwards: Forwards) -> tuple[Batch, Tensor]:
    """Run a few tokens at positions all over the context, with trials in place of the layers.

    Returns:
        Them, and the logits `[R, V]` of some.
    """
    config: Any = getattr(inner_model(module), "config", None)
    limit = getattr(config, "max_position_embeddings", None)
    rows = sum(stop - start for start, stop in SPANS.values())
    last = max(rows, limit if isinstance(limit, int) else 4096) - 1
    device = next(module.parameters()).device
    ids = torch.arange(rows) * 7 % max(1, spec.vocab_size - 3) + 1
    positions = torch.tensor([0, 1, last // 3, 2 * last // 3, last])
    batch = span_batch(SPANS, ids)
    slots = batch.slots(BLOCK_SIZE).to(device)
    batch.positions, batch.logit_rows = positions, torch.tensor([0, rows - 1])
    store = noise_store(spec.layers, [], spec.dtype, device)
    context = AroundLayers(spec.slots, batch.to(device), store, rows=slots)
    return context.batch, trial_logits(module, spec, forwards, context)
