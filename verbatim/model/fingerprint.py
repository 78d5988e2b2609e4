"""`Fingerprint`: the tensors, numbers and code that a fast path depends on, to detect changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from verbatim.model.structs import NotFusable

# A reference to a tensor or a number: its dictionary and name.
Place = tuple[dict[str, Any], str]
# Attributes that change while a module is patched, or with its caller, or that no forward reads.
_IGNORED = frozenset(
    "training _attn_implementation_internal _experts_implementation_internal _is_hf_initialized "
    "_is_full_backward_hook".split()
)
_modules, _parameters = attrgetter("_modules"), attrgetter("_parameters")
_version = attrgetter("_version")
_LAYOUT = Tensor.data_ptr, Tensor.numel, Tensor.stride, attrgetter("dtype")


class Fingerprint:
    """The layouts of tensors, the values of numbers and the forwards of classes, as they were.

    Everything is compared in a few calls into C, so the joined fingerprint of all layers takes a fifth of the
    time of theirs.

    Args:
        tensors: references of the tensors that kernels read where they are; their values may change.
        numbers: references of numbers, strings and lists of them.
        classes: of the modules whose forwards are replaced.
    """

    def __init__(
        self, tensors: Iterable[Place], numbers: Iterable[Place] = (), classes: Iterable[type] = ()
    ) -> None:
        self._tensors, self._numbers = _distinct(tensors), _distinct(numbers)
        self._values = [[*x] if type(x) is list else x for x in self._values_now()]
        self._classes: list[Any] = [*dict.fromkeys(classes)]
        self._forwards = [cls.forward for cls in self._classes]
        self._layouts: list[list[Any]] | None = None

    @classmethod
    def joined(cls, fingerprints: Iterable[Fingerprint]) -> Fingerprint:
        """Return the fingerprint of all, none of which has changed."""
        parts = [*fingerprints]
        whole = cls(
            chain.from_iterable(zip(*part._tensors, strict=True) for part in parts),
            chain.from_iterable(zip(*part._numbers, strict=True) for part in parts),
            chain.from_iterable(part._classes for part in parts),
        )
        whole.record_layouts()
        return whole

    def same_code(self) -> bool:
        """Return whether the classes have the forwards that they had."""
        return [cls.forward for cls in self._classes] == self._forwards

    def same_numbers(self) -> bool:
        """Return whether numbers and strings have their values."""
        return self._values_now() == self._values

    def same_layouts(self) -> bool:
        """Return whether the tensors lie where they lay at the last `record_layouts`."""
        return self._layouts is not None and self._layouts_now() == self._layouts

    def unchanged(self) -> bool:
        """Return whether nothing changed but perhaps the values of tensors."""
        return self.same_layouts() and self.same_numbers() and self.same_code()

    def fits(self, prepare: Callable[[], None]) -> bool:
        """Return whether nothing changed that kernels can't follow.

        Args:
            prepare: is called where tensors lie elsewhere; raises NotFusable if the kernels can't read them.
        """
        if not (self.same_code() and self.same_numbers()):
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
        """Record where the tensors lie, and which are missing."""
        self._layouts = self._layouts_now()

    def _layouts_now(self) -> list[list[Any]]:
        tensors = [*map(dict.get, *self._tensors)]
        there = [tensor for tensor in tensors if tensor is not None]
        missing = [] if len(there) == len(tensors) else [tensor is None for tensor in tensors]
        return [missing, *([*map(of, there)] for of in _LAYOUT)]

    def _values_now(self) -> list[Any]:
        return [*map(dict.get, *self._numbers)]


def _distinct(places: Iterable[Place]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the dictionaries and the names of distinct places."""
    distinct = {(id(fields), name): (fields, name) for fields, name in places}
    return [fields for fields, _ in distinct.values()], [name for _, name in distinct.values()]


def numbers_of(modules: list[nn.Module]) -> list[Place]:
    """Return references of the numbers and strings that forwards may depend on, also those of configs."""
    fields = [m.__dict__ for m in dict.fromkeys(modules)]
    configs = [f["config"].__dict__ for f in fields if hasattr(f.get("config"), "__dict__")]
    return [
        (values, name)
        for values in (*fields, *{id(c): c for c in configs}.values())
        for name, value in values.items()
        if name not in _IGNORED and (value is None or type(value) in (int, float, bool, str))
    ]


def tensors_of(modules: Iterable[nn.Module]) -> list[Place]:
    """Return references of the parameters and buffers of modules, without those of their children."""
    held = [fields for m in modules for fields in (m._parameters, m._buffers)]
    return [(fields, name) for fields in held for name in fields]


def writes_to(module: nn.Module) -> object:
    """Return the identity and the version counter of each parameter, to detect changes."""
    # Level by level, without Python for a single module, as this runs at every step.
    layers, found = [module], list[nn.Parameter | None]()
    while layers:
        found += chain.from_iterable(map(dict.values, map(_parameters, layers)))
        children = chain.from_iterable(map(dict.values, map(_modules, layers)))
        layers = [child for child in children if child is not None]
    parameters = [p for p in found if p is not None]
    try:
        return [*map(id, parameters)], [*map(_version, parameters)]
    except RuntimeError:  # inference tensors have no counter
        return [(id(p), 0 if p.is_inference() else p._version) for p in parameters]
