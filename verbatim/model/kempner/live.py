"""Runs a live KempnerForge `Transformer` as the equivalent transformers module, with shared parameters."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from verbatim.errors import EngineClosed, ModelChanged, VerbatimError
from verbatim.model.dcp.checkpoint import plain_name
from verbatim.model.decoder import Decoder
from verbatim.model.differential import largest_error, tolerance
from verbatim.model.fingerprint import Fingerprint, Place, Tree, numbers_of
from verbatim.model.kempner.config import ModelConfig
from verbatim.model.kempner.layout import adjust, key_of, transformers_config
from verbatim.model.loader import building
from verbatim.model.patching import exclusive, patched

_CLASS = "kempnerforge.model.transformer.Transformer"
_CODE = ("kempnerforge.model.", "torch.nn.modules.", "torch.distributed.algorithms._checkpoint.")
_TRIAL_TOKENS = 40


class LiveDecoder(Decoder):
    """A decoder for a caller's `Transformer`, which runs a skeleton that shares its parameters.

    Arguments are those of `Decoder`, with `skeleton_of(module)` as the skeleton.
    """

    def __init__(
        self, module: nn.Module, skeleton: nn.Module, *, weak: bool, **options: Any
    ) -> None:
        super().__init__(skeleton, **options)
        self._links = _links(skeleton, module) or []
        self._live: Callable[[], Any] = weakref.ref(module) if weak else lambda: module
        self._live_tree, self._live_settings = Tree(module), _settings(module)
        layers = self._live_tree.modules
        self._live_code = Fingerprint([], numbers_of(layers), map(type, layers))

    @property
    def owner(self) -> nn.Module:
        module: nn.Module | None = self._live()
        if module is None:
            raise EngineClosed("this engine was closed, or its module no longer exists")
        return module

    @property
    def architecture(self) -> str:
        return type(self.owner).__name__

    def refresh(self) -> None:
        """Share the parameters again, as the caller may have replaced some.

        Raises:
            ModelChanged: the layers, their numbers, code or hooks, or the config changed.
        """
        with exclusive:
            module, tree, code = self.owner, self._live_tree, self._live_code
            same = tree.unchanged() and code.same_values() and code.same_code()
            same = same and _settings(module) == self._live_settings
            if not same or tree.has_hooks():
                raise ModelChanged(
                    "the model's layers, hooks or config (such as its max_seq_len) changed since it was "
                    "opened; open it again"
                )
            _share(self._links)
            super().refresh()

    def close(self) -> None:
        super().close()
        self._live = lambda: None
        for name in ("_links", "_live_tree", "_live_code"):
            vars(self).pop(name, None)


def skeleton_of(module: nn.Module) -> nn.Module | None:
    """Return a transformers module that shares the parameters of `module` and computes the same function.

    Returns None if `module` has another class, hooks, replaced forwards or experts, or other results.
    """
    classes = [type(layer) for layer in module.modules()]
    if f"{classes[0].__module__}.{classes[0].__qualname__}" != _CLASS:
        return None
    own_code = all(f"{cls.__module__}.".startswith(_CODE) for cls in classes)
    edited = any("forward" in layer.__dict__ for layer in module.modules())
    if not own_code or edited or Tree(module).has_hooks() or _settings(module)[1]:
        return None
    skeleton = _build_skeleton(module)
    links = None if skeleton is None else _links(skeleton, module)
    if skeleton is None or links is None:
        return None
    _share(links)
    device = next(module.parameters()).device
    for layer in skeleton.modules():
        layer._buffers.update({k: b.to(device) for k, b in layer._buffers.items() if b is not None})
    return skeleton if _is_equivalent(skeleton, module) else None


def _settings(module: Any) -> tuple[dict[str, Any], bool]:
    """Return the fields of the module's config, and whether a layer records its attention weights."""
    fields = (field.name for field in dataclasses.fields(ModelConfig))
    values = {name: getattr(module.config, name) for name in fields if hasattr(module.config, name)}
    layers = (getattr(layer, "attention", None) for layer in module.layers.values())
    return values, any(getattr(layer, "capture_attention_weights", False) for layer in layers)


def _build_skeleton(module: nn.Module) -> nn.Module | None:
    """Return the module of the equivalent architecture; None if there is none."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    values, _ = _settings(module)
    # Some values are enum members.
    plain: dict[str, Any] = {k: str(v) if isinstance(v, str) else v for k, v in values.items()}
    auto: Any = AutoModelForCausalLM
    try:
        model = ModelConfig(**plain)
        if model.is_moe:
            return None  # transformers keeps all experts of a layer in one parameter
        # The memory of these weights is allocated and freed without being written.
        with building, no_init_weights(), torch.inference_mode(False):
            skeleton: nn.Module = auto.from_config(transformers_config(model))
            adjust(skeleton, model, {})
    except VerbatimError:
        return None
    return skeleton.eval()


def _links(skeleton: nn.Module, module: nn.Module) -> list[tuple[Place, Place]] | None:
    """Return pairs of corresponding parameters of `skeleton` and `module`; None if they don't match."""
    places: dict[str, Place] = {
        plain_name(f"{path}.{name}"): Place(layer._parameters, name)
        for path, layer in module.named_modules()
        for name in layer._parameters
    }
    links = [
        (Place(layer._parameters, name), places.pop(key_of(f"{path}.{name}"), None))
        for path, layer in skeleton.named_modules()
        for name, parameter in layer._parameters.items()
        if parameter is not None
    ]
    complete = [(ours, theirs) for ours, theirs in links if theirs is not None]
    same = len(complete) == len(links) and not any(
        fields[name] is not None for fields, name in places.values()
    )
    return complete if same else None


def _share(links: list[tuple[Place, Place]]) -> None:
    for (ours, name), (theirs, key) in links:
        ours[name] = theirs[key]


def _is_equivalent(skeleton: nn.Module, module: Any) -> bool:
    """Return whether both modules' own forwards give the same logits, up to rounding, for some tokens."""
    length = min(_TRIAL_TOKENS, module.config.max_seq_len)
    ids = torch.arange(length, device=next(module.parameters()).device)[None]
    ids = ids * 37 % module.config.vocab_size
    with patched(module, [], hooks=False, attention=None), torch.compiler.set_stance("force_eager"):
        theirs = module(ids)
        ours = skeleton(input_ids=ids, use_cache=False).logits
    scale = float(theirs.abs().max())
    return largest_error(ours, theirs) <= tolerance(theirs.dtype, scale)
