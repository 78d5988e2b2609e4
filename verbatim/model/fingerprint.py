"""Detects changes of a module, in microseconds before each forward.

A live module belongs to a caller who may edit it between any two forwards. `Tree` compares its structure, and
`Fingerprint` the tensors, numbers and code that a fast path depends on, as lists in a few calls into C:
iterating over `module.modules()` takes a millisecond for a few hundred modules.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from itertools import chain, repeat
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from verbatim.model.structs import NotFusable


class Place(NamedTuple):
    """A reference to a tensor or a number: a dictionary and a key."""

    fields: dict[str, Any]
    name: str

    @property
    def tensor(self) -> Any:
        """The current tensor; None if it is missing."""
        return self.fields.get(self.name)


# Attributes that change while a module is patched or depend on its caller, or that no forward reads.
_IGNORED = frozenset(
    "gradient_checkpointing use_cache _attn_implementation_internal "
    "_experts_implementation_internal _is_hf_initialized".split()
).union(vars(nn.Module()))
_modules, _parameters, _buffers = map(attrgetter, ("_modules", "_parameters", "_buffers"))
_version, _training = attrgetter("_version"), attrgetter("training")
_children_of = itemgetter("_modules")
_hooks, _pre_hooks = itemgetter("_forward_hooks"), itemgetter("_forward_pre_hooks")
_LAYOUT = Tensor.data_ptr, Tensor.numel, Tensor.stride, attrgetter("dtype")


class Fingerprint:
    """Recorded layouts of tensors, values of numbers and forwards of classes.

    It is compared in a few calls into C: one joined fingerprint of all layers takes a fifth of the time of
    one per layer.

    Args:
        tensors: places of the tensors that kernels read in place; their values may change.
        numbers: places of numbers, strings and lists of them.
        classes: classes of the modules with replaced forwards.
    """

    def __init__(
        self, tensors: Iterable[Place], numbers: Iterable[Place] = (), classes: Iterable[type] = ()
    ) -> None:
        self._tensors, self._numbers = _distinct(tensors), _distinct(numbers)
        values = [*map(dict.get, *self._numbers)]
        self._collections = [i for i, x in enumerate(values) if type(x) in (list, dict)]
        self._values = self.values()
        self._classes: list[Any] = [*dict.fromkeys(classes)]
        self._forwards = [cls.forward for cls in self._classes]
        self._layouts: list[list[Any]] | None = None

    @classmethod
    def joined(cls, fingerprints: Iterable[Fingerprint]) -> Fingerprint:
        """Return one fingerprint for all of `fingerprints`, which must be unchanged."""
        parts = [*fingerprints]
        whole = cls(
            chain.from_iterable(map(Place, *part._tensors) for part in parts),
            chain.from_iterable(map(Place, *part._numbers) for part in parts),
            chain.from_iterable(part._classes for part in parts),
        )
        whole.record_layouts()
        return whole

    def same_code(self) -> bool:
        """Return whether the classes have the recorded forwards."""
        return [cls.forward for cls in self._classes] == self._forwards

    def same_values(self) -> bool:
        """Return whether numbers and strings have the recorded values."""
        return [*map(dict.get, *self._numbers)] == self._values

    def same_layouts(self) -> bool:
        """Return whether the tensors have the addresses and layouts of the last `record_layouts`."""
        return self._layouts is not None and self._layouts_now() == self._layouts

    def unchanged(self) -> bool:
        """Return whether layouts, numbers and code are unchanged; values of tensors may differ."""
        return self.same_layouts() and self.same_values() and self.same_code()

    def fits(self, prepare: Callable[[], None]) -> bool:
        """Return whether code and numbers are unchanged, and the kernels can read the tensors.

        Args:
            prepare: called if the tensors moved; raises NotFusable if the kernels can't read them.
        """
        if not (self.same_code() and self.same_values()):
            return False
        if self.same_layouts():
            return True
        self._layouts = None
        try:
            prepare()
        except NotFusable:
            return False
        self.record_layouts()
        return True

    def record_layouts(self) -> None:
        """Record the addresses and layouts of the tensors, and which are missing."""
        self._layouts = self._layouts_now()

    def _layouts_now(self) -> list[list[Any]]:
        tensors = [*map(dict.get, *self._tensors)]
        present = [tensor for tensor in tensors if tensor is not None]
        missing = [] if len(present) == len(tensors) else [tensor is None for tensor in tensors]
        return [missing, *([*map(read, present)] for read in _LAYOUT)]

    def values(self) -> list[Any]:
        """Return the current numbers, and copies of lists and dictionaries of them."""
        values = [*map(dict.get, *self._numbers)]
        for i in self._collections:
            values[i] = copy(values[i])
        return values


def _distinct(places: Iterable[Place]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the dictionaries and the names of distinct places."""
    distinct = {(id(fields), name): (fields, name) for fields, name in places}
    return [fields for fields, _ in distinct.values()], [name for _, name in distinct.values()]


def place_of(module: nn.Module, name: str) -> Place:
    """Return the place of a parameter, or of the attribute to which a hook assigns it."""
    return Place(module.__dict__ if name in module.__dict__ else module._parameters, name)


def numbers_of(
    modules: list[nn.Module], configs: Iterable[Any] = (), *, collections: bool = False
) -> list[Place]:
    """Return the places of numbers, strings and tuples of them in modules, their configs and `configs`.

    Args:
        collections: also lists and dictionaries of them, such as the scales of PEFT's adapters.
    """
    fields = [m.__dict__ for m in dict.fromkeys(modules)]
    owned = (f["config"] for f in fields if hasattr(f.get("config"), "__dict__"))
    configs = [config.__dict__ for config in chain(configs, owned)]
    return [
        Place(values, name)
        for values in (*fields, *{id(c): c for c in configs}.values())
        for name, value in values.items()
        if name not in _IGNORED and all(map(_is_plain, _entries(value) if collections else [value]))
    ]


def _entries(value: Any) -> Iterable[Any]:
    return value if type(value) is list else value.values() if type(value) is dict else [value]


def _is_plain(value: Any) -> bool:
    if type(value) is tuple:  # such as limits
        return all(map(_is_plain, value))
    return value is None or type(value) in (int, float, bool, str)


def tensors_of(modules: Iterable[nn.Module]) -> list[Place]:
    """Return the places of the parameters and buffers of modules, without those of their children."""
    dictionaries = [fields for m in modules for fields in (m._parameters, m._buffers)]
    return [Place(fields, name) for fields in dictionaries for name in fields]


def writes_to(module: nn.Module) -> object:
    """Return identities of modules and parameters, and versions of parameters, to detect writes."""
    modules = _modules_in(module)
    return _identities(modules, _tensors_in(map(_parameters, modules), ()))


class Watched:
    """The numbers, buffers and parameters of a live module, except those that its own forward changes.

    Such changes, for example of counters or by PEFT's adapters for experts, are found when it is inspected.
    """

    def __init__(self) -> None:
        self._changed: set[tuple[int, str]] = set()  # id of a dictionary, and name
        self._numbers = Fingerprint([])

    @contextmanager
    def inspecting(self, module: nn.Module) -> Iterator[None]:
        """Learn what the forwards in the block change."""
        before = _values_in(module)
        yield
        after = _values_in(module)
        self._changed |= {place for place in before.keys() & after if before[place] != after[place]}
        numbers = _settings_in(module)
        self._numbers = Fingerprint(
            [], [place for place in numbers if _key(place) not in self._changed]
        )

    def state(self, module: nn.Module) -> object:
        """Return a value that changes with what is watched."""
        modules = _modules_in(module)
        tensors = chain(map(_parameters, modules), map(_buffers, modules))
        return self._numbers.values(), _identities(modules, _tensors_in(tensors, self._changed))


def _key(place: Place) -> tuple[int, str]:
    return id(place.fields), place.name


def _settings_in(module: nn.Module) -> list[Place]:
    modules = [m for m in module.modules() if type(m) is not nn.Linear]
    return numbers_of(modules, collections=True)


def _values_in(module: nn.Module) -> dict[tuple[int, str], Any]:
    """Return all numbers, and the identities and versions of all tensors, by place."""
    values = {_key(place): copy(place.fields[place.name]) for place in _settings_in(module)}
    for place in tensors_of(module.modules()):
        if (tensor := place.tensor) is not None:
            values[_key(place)] = id(tensor), versions_of([tensor])
    return values


def _modules_in(module: nn.Module) -> list[nn.Module]:
    # Level by level with `map`, without Python code per module, as this runs at every step.
    layers, modules = [module], list[nn.Module]()
    while layers:
        modules += layers
        children = chain.from_iterable(map(dict.values, map(_modules, layers)))
        layers = [child for child in children if child is not None]
    return modules


def _tensors_in(
    dictionaries: Iterable[dict[str, Any]], left_out: Collection[tuple[int, str]]
) -> list[Tensor]:
    if not left_out:
        return [t for t in chain.from_iterable(map(dict.values, dictionaries)) if t is not None]
    return [
        tensor
        for fields in dictionaries
        for name, tensor in fields.items()
        if tensor is not None and (id(fields), name) not in left_out
    ]


def _identities(modules: list[nn.Module], tensors: list[Tensor]) -> object:
    return [*map(id, modules)], [*map(id, tensors)], versions_of(tensors)


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return the version counters of tensors; 0 for inference tensors, which have none."""
    try:
        return [*map(_version, tensors)]
    except RuntimeError:
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


class Tree:
    """The modules of `root` and their state when the snapshot was made. Holds a weak reference to `root`."""

    def __init__(self, root: nn.Module) -> None:
        self._root = weakref.ref(root)
        _, *self._inner = root.modules()
        self._fields: list[dict[str, Any]] = [_fields_of(m) for m in (root, *self._inner)]
        self._with_config = [fields for fields in self._fields if "config" in fields]
        self._children = [dict(children) for children in map(_children_of, self._fields)]
        self._initial = self._current()

    @property
    def modules(self) -> list[nn.Module]:
        """All modules, in the order of `root.modules()`."""
        root = self._root()
        assert root is not None
        return [root, *self._inner]

    @functools.cached_property
    def configs(self) -> list[Any]:
        """The distinct transformers configs from which modules read the attention implementation."""
        configs = [m.__dict__.get("config") for m in self.modules]
        return list({id(c): c for c in configs if hasattr(c, "_attn_implementation")}.values())

    def unchanged(self) -> bool:
        """Return whether modules, classes, configs, forwards set on instances, and the dtype are unchanged.

        Values in configs may differ.
        """
        same_children = [*map(_children_of, self._fields)] == self._children
        return same_children and self._current() == self._initial

    def _current(self) -> tuple[Any, ...]:
        modules = self.modules
        return (
            [*map(type, modules)],
            [*map(dict.__contains__, self._fields, repeat("forward"))],
            [*map(id, map(dict.get, self._with_config, repeat("config")))],
            next((p.dtype for p in modules[0].parameters()), None),
        )

    def has_hooks(self) -> bool:
        """Return whether there are forward hooks, on a module or global ones."""
        return has_hooks(self._fields)

    def code(self) -> tuple[list[int], ...]:
        """Return identities of the forward hooks and of the forwards set on instances."""
        own = map(dict.get, self._fields, repeat("forward"))
        hooks = filter(None, chain(map(_hooks, self._fields), map(_pre_hooks, self._fields)))
        return [*chain.from_iterable(hooks)], [*map(id, own)]

    def in_training(self) -> list[nn.Module]:
        """Return the modules that are in training mode."""
        modules = self.modules
        return [m for m in modules if m.training] if any(map(_training, modules)) else []


def has_hooks(fields: list[dict[str, Any]]) -> bool:
    """Return whether there are forward hooks, on modules with these dictionaries or global ones."""
    return any(map(_hooks, fields)) or any(map(_pre_hooks, fields)) or has_global_hooks()


def has_global_hooks() -> bool:
    """Return whether global forward hooks are registered."""
    every = torch.nn.modules.module
    return bool(every._global_forward_hooks or every._global_forward_pre_hooks)


def _fields_of(module: nn.Module) -> dict[str, Any]:
    """Return a module's `__dict__`, or a substitute for a scripted module, which has fixed children."""
    if isinstance(module.__dict__.get("_modules"), dict):
        return module.__dict__
    hooks, pre_hooks = module._forward_hooks, module._forward_pre_hooks
    return {"_modules": {}, "_forward_hooks": hooks, "_forward_pre_hooks": pre_hooks}
