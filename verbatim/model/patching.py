"""Patching a module for one forward, and restoring it.

A live module belongs to a caller, such as a trainer or a notebook. During a forward it has our attention, our
experts and batch-invariant forwards for known layers. Afterwards its config, training mode and forwards are
restored, even after an exception.

Only one module in the process is patched at a time: two engines may share a module, or two modules a config,
and the second patch would save our settings as the owner's. The owner's calls take no lock, so a module must
not be called from another thread while an engine runs it.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from verbatim.model.adapters import adapter_for
from verbatim.model.context import IMPLEMENTATION, in_forwards
from verbatim.model.fingerprint import Tree
from verbatim.model.invariant import forward_for, gate_forward, is_gate, overridden

Forwards = list[tuple[dict[str, Any], Callable[..., Any]]]
Silenced = list[tuple[nn.Module, str, Any]]  # layer, name of the field, original hooks

# Held while a module is patched or inspected. Re-entrant, as a hook may use another engine.
exclusive = threading.RLock()

_CONFIG_FIELDS = ("_attn_implementation_internal", "_experts_implementation_internal")
_HOOK_FIELDS = ("_forward_hooks", "_forward_pre_hooks")


def holds_exclusive() -> bool:
    """Return whether the calling thread holds `exclusive`, for example in a hook."""
    is_held: bool = exclusive._is_owned()  # type: ignore[attr-defined]
    return is_held


def _free_in_child() -> None:
    """Release the lock in a forked child, where the thread that held it doesn't exist."""
    if not holds_exclusive():
        exclusive._at_fork_reinit()  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_free_in_child)


def replaced_forwards(
    module: nn.Module,
    *,
    batch_invariant: bool = True,
    override_in: frozenset[type[nn.Module]] = frozenset(),
) -> Forwards:
    """Return the instance dictionary of each known layer, with the forward to patch in.

    Without `batch_invariant`, these are only routers and experts, which flat batches require, and norms, for
    speed. Otherwise the classes in `override_in` run their own code under `InvariantMode`. Without an active
    forward context a new forward calls the original, as a hook may call a layer of another module.
    """
    forwards: Forwards = []
    gates = {
        id(child)
        for parent in module.modules()
        for name, child in parent._modules.items()
        if batch_invariant and is_gate(parent, name)
    }
    callers = override_in if batch_invariant else frozenset()
    parents = (parent for parent in module.modules() if type(parent) in callers)
    children = {id(child) for parent in parents for child in _called_by(parent)}
    for layer in module.modules():
        forward = replacement_of(layer, batch_invariant=batch_invariant)
        if id(layer) in gates and forward is not None:
            forward = gate_forward(layer)
        original = partial(type(layer).forward, layer)
        if type(layer) in callers or id(layer) in children:
            if "forward" not in layer.__dict__:
                forward = overridden(forward or original, child=type(layer) not in callers)
        if forward is not None:
            forwards.append((layer.__dict__, in_forwards(forward, original)))
    return forwards


def _called_by(parent: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of a module; lists and dictionaries are replaced by their entries."""
    for child in parent.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _called_by(child)
        else:
            yield child


def replacement_of(layer: nn.Module, *, batch_invariant: bool = True) -> Callable[..., Any] | None:
    """Return the replacement for a layer's forward; None without one, or if the owner has replaced it."""
    return adapter_for(layer) or forward_for(layer, batch_invariant=batch_invariant)


class WeightGate(ABC):
    """A forward, set on a module, that provides the module's weights while the inner forward runs.

    The inner one is `forward`, which the engine may patch in this object's dictionary (`fields_of`).
    """

    def __init__(self, module: nn.Module) -> None:
        self._forward = forward_of(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    @abstractmethod
    def open(self) -> AbstractContextManager[None]:
        """Provide the weights within the block."""


def gate_of(layer: nn.Module) -> WeightGate | None:
    """Return the gate of a layer; None if its weights are always in memory."""
    forward = layer.__dict__.get("forward")
    return forward if isinstance(forward, WeightGate) else None


def has_own_forward(layer: nn.Module) -> bool:
    """Return whether the owner has replaced the forward of a layer, or of a part of it, on the instance."""
    return any("forward" in m.__dict__ and gate_of(m) is None for m in layer.modules())


def fields_of(layer: nn.Module) -> dict[str, Any]:
    """Return the dictionary in which a layer's forward is patched: that of its gate, if any."""
    gate = gate_of(layer)
    return layer.__dict__ if gate is None else gate.__dict__


def forward_of(layer: nn.Module) -> Callable[..., Any]:
    """Return the forward that the engine runs for a layer, without hooks.

    It is the one set on the instance, or the replacement for its class, or the class's own.
    """
    forward = layer.__dict__.get("forward") or replacement_of(layer)
    return type(layer).forward.__get__(layer) if forward is None else forward


@contextmanager
def patched(
    module: nn.Module | Tree,
    forwards: Forwards,
    *,
    hooks: bool = True,
    attention: str | None = IMPLEMENTATION,
) -> Iterator[None]:
    """Prepare `module` for a flat forward without gradients within the block.

    Args:
        module: the module or its `Tree`.
        forwards: the forwards to patch in, from `replaced_forwards`.
        hooks: whether forward hooks run; False for a forward that the user did not request.
        attention: name of the attention in transformers' registry; experts are ours unless it is "eager".
            None changes neither.
    """
    tree = module if isinstance(module, Tree) else Tree(module)
    silenced: Silenced = []
    chosen = attention, "eager" if attention == "eager" else IMPLEMENTATION
    with exclusive:
        training = tree.in_training()
        configs = [] if attention is None else tree.configs
        settings = [(c, {f: c.__dict__.get(f) for f in _CONFIG_FIELDS}) for c in configs]
        try:
            if not hooks:
                _silence(tree, silenced)
            for layer in training:
                layer.training = False
            for config in configs:
                config.__dict__.update(zip(_CONFIG_FIELDS, chosen, strict=True))
            for attributes, forward in forwards:
                attributes["forward"] = forward
            with without_torch_modes():
                yield
        finally:
            try:
                _restore(forwards, settings, training, silenced)
            except KeyboardInterrupt:  # Ctrl-C in between: repeat from the start
                _restore(forwards, settings, training, silenced)
                raise


@contextmanager
def without_torch_modes() -> Iterator[None]:
    """Disable gradients, inference mode and autocast within the block."""
    with ExitStack() as stack:
        # Modes are entered only if needed, as each takes longer than a small layer.
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' report of unused keys, and its progress bar."""
    from transformers.utils import logging

    level, had_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if had_bar:
            logging.enable_progress_bar()


def _restore(
    forwards: Forwards,
    settings: list[tuple[Any, dict[str, Any]]],
    training: list[nn.Module],
    silenced: Silenced,
) -> None:
    """Restore everything; idempotent."""
    for attributes, _ in forwards:
        attributes.pop("forward", None)
    for config, values in settings:
        config.__dict__.update(values)
    for layer in training:
        layer.training = True
    for layer, field, value in silenced:
        setattr(layer, field, value)


def _silence(tree: Tree, silenced: Silenced) -> None:
    """Remove all hooks, saving each before its removal, so that Ctrl-C loses none."""
    for layer in tree.modules:
        for field in _HOOK_FIELDS:
            hooks = getattr(layer, field)
            if hooks:
                silenced.append((layer, field, hooks))
                setattr(layer, field, type(hooks)())
