"""A share of a model that another process calls: a stage's layers, or a rank's columns and heads."""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
import transformers
from torch import Tensor

from verbatim._version import __version__
from verbatim.errors import VerbatimError
from verbatim.kv.flat import row_bytes
from verbatim.model.loader import LoadedModel, ModelSource
from verbatim.options import available_memory
from verbatim.placement.distributed.wire import Message
from verbatim.placement.resident import Resident
from verbatim.weights.identity import changed
from verbatim.weights.opening import reopen
from verbatim.weights.update import WeightWriter


def versions() -> dict[str, str]:
    """Return the versions that all processes of a model must have in common."""
    return {
        "verbatim": __version__,
        "torch": torch.__version__.partition("+")[0],
        "transformers": transformers.__version__,
    }


class Served:
    """Makes the calls of messages, whose other fields are the arguments of a method here or of `runner`.

    Args:
        loaded: the model without its weights, where it was opened here before.
        source: of `loaded`.

    Attributes:
        calls: the methods of this class or of `runner` that a message may name.
        runner: runs the share; None while it has no memory for K and V.

    Raises:
        VerbatimError: by all methods, while there is no runner.
    """

    calls: frozenset[str] = frozenset(
        {
            *("facts", "open", "allocate"),
            *("draft", "read_cache", "write_cache", "sleep", "wake"),
            *("load_adapter", "unload_adapter"),
            *("weight_names", "prepare_weights", "write_weights"),
        }
    )
    runner: Resident | None = None
    _weights: WeightWriter | None = None

    def __init__(
        self, loaded: LoadedModel | None = None, source: ModelSource | None = None
    ) -> None:
        self._loaded, self._loaded_from = loaded, source
        self._inspecting = threading.Lock()  # a spare may still be getting ready

    def facts(self) -> Message:
        """Return the versions, cores and memory of this process."""
        return {
            **versions(),
            "machine": platform.node(),
            "pid": os.getpid(),
            "memory": available_memory(),
        }

    def warm(self, source: Mapping[str, Any]) -> None:
        """Inspect a model without reading weights, so that `open` is fast, and reports its errors.

        Args:
            source: the fields of a `ModelSource`.
        """
        with self._inspecting, suppress(VerbatimError):
            self.skeleton(ModelSource(**source))

    def skeleton(self, source: ModelSource) -> LoadedModel:
        """Return the model without weights, cached until its files change."""
        if self._loaded is None or self._loaded_from != source or changed(self._loaded):
            self._loaded, self._loaded_from = reopen(source), source
        return self._loaded

    def call(self, message: Message) -> Any:
        """Make the call that a message names by `do`."""
        fields = {name: value for name, value in message.items() if name not in ("do", "call")}
        own = getattr(self, message["do"], None)
        return (getattr(self.running, message["do"]) if own is None else own)(**fields)

    @property
    def running(self) -> Resident:
        """The runner."""
        if self.runner is None:
            raise VerbatimError("this process has no memory for K and V yet, or sleeps")
        return self.runner

    def status(self) -> Message:
        """Return what is held here, as plain values."""
        return {}

    def close(self) -> None:
        """Free everything."""
        if self.runner is not None:
            self.runner.close()

    @property
    def row_widths(self) -> dict[str, list[int]]:
        """The bytes of each store in a row of `Runner.read_cache`, by kind."""
        return {k: [*map(row_bytes, self.running.cached_in(k))] for k in ("blocks", "states")}

    @property
    def weights(self) -> WeightWriter:
        """The writer of new weights, kept from `prepare_weights` to `write_weights`."""
        if self._weights is None:
            self._weights = self.running.writer(whole=False)
        return self._weights

    def weight_names(self) -> Message:
        """Return the names of the weights that are held here, quantized ones apart."""
        return {"packed": self.weights.packed, "exact": self.weights.exact}

    def prepare_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Quantize new weights, which `write_weights` writes."""
        self.weights.prepare(tensors)

    def write_weights(self, tensors: Mapping[str, Tensor]) -> Message:
        """Write new weights, and those that were prepared; return `PackingReport.info` of them."""
        self.running.write_weights(self.weights, tensors)
        report = self.running.packed
        return {"quantization": None if report is None else report.info()}
