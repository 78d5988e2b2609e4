"""The loaded LoRA adapters, by the names that requests use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress

from verbatim.batch import Adapter, LowRank
from verbatim.common.spelling import did_you_mean
from verbatim.core import Request
from verbatim.errors import InvalidRequest, VerbatimError
from verbatim.protocols import Runner


class LoadedAdapters:
    """Loads and unloads the adapters of a runner, under the engine lock. Names can be read from any thread.

    An unloaded adapter stays in memory until the requests in `active` that use it have ended.
    """

    def __init__(self, runner: Runner, active: Iterable[Request]) -> None:
        self._runner, self._active = runner, active
        # By name: the adapter's number, and its properties (numbers of layers and parameters, and the rank).
        self._loaded: dict[str, tuple[int, dict[str, int]]] = {}
        self._retired: set[int] = set()  # numbers of unloaded adapters that are still in memory
        self._last_number = 0

    @property
    def names(self) -> list[str]:
        """The names of the adapters, in the order of loading."""
        return list(self._loaded)

    def number_of(self, name: str | None) -> int:
        """Return the number of an adapter, 0 for None; raise InvalidRequest if no adapter has this name."""
        if name is None:
            return 0
        loaded = self._loaded.get(name)
        if loaded is None:
            names = self.names
            known = f"must be one of {', '.join(map(repr, names))}" if names else "none is loaded"
            raise InvalidRequest(f"adapter={name[:200]!r}: {known}{did_you_mean(name, names)}")
        return loaded[0]

    def load(self, name: str, layers: Mapping[str, LowRank], *, replace: bool = False) -> None:
        """Load an adapter; with `replace`, later requests use it instead of the loaded one of the same name.

        Raises:
            InvalidRequest: the name is in use, or the matrices do not fit the model.
            NotSupported: as `Runner.load_adapter`.
        """
        if name in self._loaded and not replace:
            raise InvalidRequest(
                f"adapter {name!r} is loaded; unload it first, or load it with replace=True"
            )
        self._last_number += 1  # also if loading fails: a number is never used twice
        number = self._last_number
        try:
            self._runner.load_adapter(Adapter(name, number, layers))
        except BaseException:
            self._retired.add(number)  # a part of it may be in memory
            with suppress(VerbatimError):  # of the placement; a later call tries again
                self.free()
            raise
        if (old := self._loaded.pop(name, None)) is not None:
            self._retired.add(old[0])
        info = {
            "layers": len(layers),
            "rank": max(low.a.shape[0] for low in layers.values()),
            "parameters": sum(low.a.numel() + low.b.numel() for low in layers.values()),
        }
        self._loaded[name] = number, info
        self.free()

    def unload(self, name: str) -> None:
        """Unload an adapter, or raise InvalidRequest; requests that already use it continue with it."""
        self._retired.add(self.number_of(name))
        del self._loaded[name]
        self.free()

    def free(self) -> None:
        """Free the memory of unloaded adapters that no request uses any more."""
        if not self._retired:
            return
        for number in self._retired - {request.adapter for request in self._active}:
            self._runner.unload_adapter(number)
            self._retired.discard(number)  # last: after an error, the next call tries again

    def info(self) -> dict[str, dict[str, int]]:
        """Return the properties of the loaded adapters by name, as plain values."""
        return {name: dict(info) for name, (_, info) in self._loaded.items()}
