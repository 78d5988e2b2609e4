"""Patching a module for one forward, and restoring it.

A live module belongs to a caller: a trainer, a notebook. For the length of a forward it gets our
attention, our experts and row-invariant forwards for the layers we know; then its config, its mode and
its forwards are what they were, also after an exception.

One patch at a time in the whole process: two engines may share a module, or two modules a config, and
the second would take our settings for the owner's. The owner's own use is not locked out, so a module
is not to be called from another thread while an engine runs it.
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
from verbatim.model.invariant import forward_for, gate_forward, is_gate, overridden
from verbatim.model.tree import Tree

Forwards = list[tuple[dict[str, Any], Callable[..., Any]]]
Silenced = list[tuple[nn.Module, str, Any]]  # a layer, a field of it, the hooks that stood there

# Held while a module is patched, and while one is inspected, which must not find another engine's
# forwards in it. Re-entrant: a hook may use another engine.
exclusive = threading.RLock()
_held = threading.Condition(exclusive)

_CONFIG_FIELDS = ("_attn_implementation_internal", "_experts_implementation_internal")
_HOOK_FIELDS = ("_forward_hooks", "_forward_pre_hooks")


def holds_exclusive() -> bool:
    """Return whether the calling thread is inside of a forward, in a hook."""
    try:
        _held.notify(0)
    except RuntimeError:  # held by another thread, or by none
        return False
    return True


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
    """Return the instance dictionary of each known layer, and the forward to patch in.

    With `batch_invariant` False only what a flat batch asks for: routers, experts, and norms, where the
    kernel is the faster one; otherwise the own code of the classes `override_in` runs under `InvariantMode`.

    The new forward steps aside where no pass of ours is active, for a hook that calls a layer of
    another module which happens to be shared.
    """
    found: Forwards = []
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
        own = partial(type(layer).forward, layer)
        if type(layer) in callers or id(layer) in children:
            if "forward" not in layer.__dict__:
                forward = overridden(forward or own, child=type(layer) not in callers)
        if forward is not None:
            found.append((layer.__dict__, in_forwards(forward, own)))
    return found


def _called_by(parent: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of a module, and those of its lists, which are not called themselves."""
    for child in parent.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _called_by(child)
        else:
            yield child


def replacement_of(layer: nn.Module, *, batch_invariant: bool = True) -> Callable[..., Any] | None:
    """Return the replacement of a layer's forward, else None; one replaced on the instance is kept."""
    return forward_for(layer, batch_invariant=batch_invariant) or adapter_for(layer)


class WeightGate(ABC):
    """A forward on a module's instance that provides the module's weights while the inner one runs.

    The inner one, `forward`, is what the engine runs for the module, unless another is patched in: in this
    object's dictionary (`fields_of`), as on a module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._own = forward_of(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._own(*args, **kwargs)

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    @abstractmethod
    def open(self) -> AbstractContextManager[None]:
        """Provide the weights in the block."""


def gate_of(layer: nn.Module) -> WeightGate | None:
    """Return the gate of a layer; None: its weights stay where they are."""
    forward = layer.__dict__.get("forward")
    return forward if isinstance(forward, WeightGate) else None


def fields_of(layer: nn.Module) -> dict[str, Any]:
    """Return the dictionary in which a layer's forward is patched: its gate's, if it has one."""
    gate = gate_of(layer)
    return layer.__dict__ if gate is None else gate.__dict__


def forward_of(layer: nn.Module) -> Callable[..., Any]:
    """Return the forward that the engine runs for a layer, without its hooks: one of its instance, the
    replacement by its class, or else its own.
    """
    known = layer.__dict__.get("forward") or replacement_of(layer)
    return type(layer).forward.__get__(layer) if known is None else known


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
        module: itself, or its tree where one is at hand.
        forwards: of this module, from `replaced_forwards`.
        hooks: False silences the module's forward hooks, for a forward that the user did not ask for.
        attention: its name in transformers' registry; experts are ours unless it is "eager". None leaves
            both to the module.
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
            with plain_numbers():
                yield
        finally:
            try:
                _give_back(forwards, settings, training, silenced)
            except KeyboardInterrupt:  # Ctrl-C in its middle: once more from the start
                _give_back(forwards, settings, training, silenced)
                raise


@contextmanager
def plain_numbers() -> Iterator[None]:
    """Run the block without gradients, inference tensors and autocast, whatever the caller has enabled."""
    with ExitStack() as stack:
        # Modes are entered only where needed, as they take longer than a small layer.
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


def _give_back(
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
    """Remove the hooks, each recorded first so that Ctrl-C in between loses none."""
    for layer in tree.modules:
        for field in _HOOK_FIELDS:
            hooks = getattr(layer, field)
            if hooks:
                silenced.append((layer, field, hooks))
                setattr(layer, field, type(hooks)())
