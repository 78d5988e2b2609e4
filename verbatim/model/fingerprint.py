"""`Fingerprint`: the tensors, numbers and code that a fast path depends on, to detect changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from operator import attrgetter, getitem
from typing import Any

from torch import Tensor, nn

from verbatim.model.structs import NotFusable

# A reference to a tensor or a number: its dictionary and name.
Place = tuple[dict[str, Any], str]
# Attributes that change while a module is patched, or with its caller.
_IGNORED = frozenset(
    {"training", "_attn_implementation_internal", "_experts_implementation_internal"}
)
_LAYOUT = Tensor.data_ptr, Tensor.numel, Tensor.stride, attrgetter("dtype")


class Fingerprint:
    """The layouts of tensors, the values of numbers and the forwards of classes, as they were.

    Everything is compared in a few calls into C, so the joined fingerprint of all layers takes a fifth of the
    time of theirs.

    Args:
        tensors: references of the tensors that kernels read where they are; their values may change.
        numbers: references of numbers and strings.
        classes: of the modules whose forwards are replaced.
    """

    def __init__(
        self, tensors: list[Place], numbers: Iterable[Place] = (), classes: Iterable[type] = ()
    ) -> None:
        self._tensors = tensors
        distinct = {(id(fields), name): (fields, name) for fields, name in numbers}
        self._numbers = [fields for fields, _ in distinct.values()]
        self._names = [name for _, name in distinct.values()]
        self._values = self._values_now()
        self._classes: list[Any] = [*dict.fromkeys(classes)]
        self._forwards = [cls.forward for cls in self._classes]
        self._layouts: list[list[Any]] | None = None

    @classmethod
    def joined(cls, fingerprints: Iterable[Fingerprint]) -> Fingerprint:
        """Return the fingerprint of all, none of which has changed."""
        parts = [*fingerprints]
        whole = cls(
            [*chain.from_iterable(part._tensors for part in parts)],
            chain.from_iterable(zip(part._numbers, part._names, strict=True) for part in parts),
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
        try:
            if self._layouts is None or self._layouts_now() != self._layouts:
                return False
        except (KeyError, TypeError):  # a tensor is gone
            return False
        return {*map(dict.get, *self._missing)} <= {None}

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
        there = [p for p in self._tensors if p[0].get(p[1]) is not None]
        missing = [p for p in self._tensors if p[0].get(p[1]) is None]
        self._present = [p[0] for p in there], [p[1] for p in there]
        self._missing = [p[0] for p in missing], [p[1] for p in missing]
        self._layouts = self._layouts_now()

    def _layouts_now(self) -> list[list[Any]]:
        tensors = [*map(getitem, *self._present)]
        return [[*map(of, tensors)] for of in _LAYOUT]

    def _values_now(self) -> list[Any]:
        return [*map(dict.get, self._numbers, self._names)]


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
