"""The loaded LoRA adapters, by the names that requests use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verbatim.batch import Adapter, LowRank
from verbatim.core import Request
from verbatim.errors import InvalidRequest
from verbatim.protocols import Runner
from verbatim.spelling import did_you_mean


class LoadedAdapters:
    """Loads and unloads adapters of a runner, under the engine lock; names are read from any thread.

    An unloaded adapter stays in memory until the requests that use it have ended.

    Args:
        active: the unfinished requests, by id.
    """

    def __init__(self, runner: Runner, active: Mapping[str, tuple[Request, Any]]) -> None:
        self._runner, self._active = runner, active
        self._numbers: dict[str, int] = {}
        self._info: dict[str, dict[str, int]] = {}  # numbers of layers and parameters, and the rank
        self._retired: set[int] = set()  # numbers of unloaded adapters that are still in memory
        self._last = 0

    @property
    def names(self) -> list[str]:
        """The names of the adapters, in the order of loading."""
        return list(self._numbers)

    def number_of(self, name: str | None) -> int:
        """Return the number of an adapter, 0 for None.

        Raises:
            InvalidRequest: no adapter has this name.
        """
        if name is None:
            return 0
        number = self._numbers.get(name)
        if number is None:
            names = self.names
            known = f"must be one of {', '.join(map(repr, names))}" if names else "none is loaded"
            raise InvalidRequest(f"adapter={name[:200]!r}: {known}{did_you_mean(name, names)}")
        return number

    def load(self, name: str, layers: Mapping[str, LowRank], *, replace: bool) -> None:
        """Load an adapter; with `replace`, later requests use it in place of one of the same name.

        Raises:
            InvalidRequest: the name is taken, or the matrices do not fit the model.
            NotSupported: as `Runner.load_adapter`.
        """
        if name in self._numbers and not replace:
            raise InvalidRequest(
                f"adapter {name!r} is loaded; unload it first, or load it with replace=True"
            )
        self._last += 1  # also if loading fails: a number is never used twice
        self._runner.load_adapter(Adapter(name, self._last, layers))
        if (old := self._numbers.pop(name, None)) is not None:
            self._retired.add(old)
        self._info[name] = {
            "layers": len(layers),
            "rank": max(low.a.shape[0] for low in layers.values()),
            "parameters": sum(low.a.numel() + low.b.numel() for low in layers.values()),
        }
        self._numbers[name] = self._last
        self.free()

    def unload(self, name: str) -> None:
        """Remove an adapter's name; requests that use it go on.

        Raises:
            InvalidRequest: no adapter has this name.
        """
        self._retired.add(self.number_of(name))
        del self._numbers[name], self._info[name]
        self.free()

    def free(self) -> None:
        """Free the unloaded adapters that no request uses any more."""
        if not self._retired:
            return
        for number in self._retired - {request.adapter for request, _ in self._active.values()}:
            self._retired.discard(number)
            self._runner.unload_adapter(number)

    def info(self) -> dict[str, dict[str, int]]:
        """Return the properties of the loaded adapters by name, as plain values."""
        return {name: dict(self._info[name]) for name in self._numbers}
