"""A snapshot of a model's modules, compared in microseconds before each forward.

A live module belongs to a caller who may edit it between any two forwards, so each forward begins with
a comparison. Iterating over `module.modules()` takes a millisecond for a few hundred modules; the comparison
takes a twentieth of it, since no Python runs for a single module.
"""

from __future__ import annotations

import functools
import weakref
from itertools import chain, repeat
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import nn

_children_of, _training = itemgetter("_modules"), attrgetter("training")
_hooks, _pre_hooks = itemgetter("_forward_hooks"), itemgetter("_forward_pre_hooks")


class Tree:
    """Every module in `root`, and its state when the snapshot was made. `root` itself is held weakly."""

    def __init__(self, root: nn.Module) -> None:
        self._root = weakref.ref(root)
        _, *self._inner = root.modules()
        self._fields: list[dict[str, Any]] = [_fields_of(m) for m in (root, *self._inner)]
        self._found = self._current()

    @property
    def modules(self) -> list[nn.Module]:
        """All modules, in the order of `root.modules()`."""
        root = self._root()
        assert root is not None
        return [root, *self._inner]

    @functools.cached_property
    def configs(self) -> list[Any]:
        """Every transformers config that a module reads the attention implementation from, once each."""
        found = [m.__dict__.get("config") for m in self.modules]
        return list({id(c): c for c in found if hasattr(c, "_attn_implementation")}.values())

    def unchanged(self) -> bool:
        """Return whether modules, classes, positions and forwards are unchanged.

        Also the dtype of the first parameter counts.
        """
        return self._current() == self._found

    def _current(self) -> tuple[Any, ...]:
        modules, children = self.modules, [*map(_children_of, self._fields)]
        return (
            [*map(type, modules)],
            [*map(len, children)],
            [*map(id, chain.from_iterable(map(dict.values, children)))],
            [*map(dict.__contains__, self._fields, repeat("forward"))],
            next((p.dtype for p in modules[0].parameters()), None),
        )

    def has_hooks(self) -> bool:
        """Return whether hooks run in the middle of a forward."""
        return (
            any(map(_hooks, self._fields))
            or any(map(_pre_hooks, self._fields))
            or hooked_everywhere()
        )

    def in_training(self) -> list[nn.Module]:
        """Return the modules that are in training mode."""
        modules = self.modules
        return [m for m in modules if m.training] if any(map(_training, modules)) else []


def hooked_everywhere() -> bool:
    """Return whether global forward hooks are registered."""
    every = torch.nn.modules.module
    return bool(every._global_forward_hooks or every._global_forward_pre_hooks)


def _fields_of(module: nn.Module) -> dict[str, Any]:
    """Return a module's own dictionary. A scripted one keeps its children elsewhere, and can't be edited."""
    if isinstance(module.__dict__.get("_modules"), dict):
        return module.__dict__
    hooks, pre_hooks = module._forward_hooks, module._forward_pre_hooks
    return {
        "_modules": {},
        "_forward_hooks": hooks,
        "_forward_pre_hooks": pre_hooks,
    }
