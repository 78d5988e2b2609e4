"""A share of a model that another process calls: a stage's layers, or a rank's columns and heads."""

from __future__ import annotations

from typing import Any

from verbatim.errors import VerbatimError
from verbatim.kv.flat import row_bytes
from verbatim.placement.resident import Resident
from verbatim.weights.update import WeightWriter

Message = dict[str, Any]


class Served:
    """Makes calls of messages: each method takes the fields of one, and returns those of the answer.

    Attributes:
        calls: the methods that a message may name.
        runner: runs the share; None while it has no memory for K and V.

    Raises:
        VerbatimError: by all methods, while there is no runner.
    """

    calls: frozenset[str] = frozenset(
        {
            *("draft", "check_replay", "read_cache", "write_cache", "sleep", "wake"),
            *("load_adapter", "unload_adapter"),
            *("weight_names", "prepare_weights", "write_weights"),
        }
    )
    runner: Resident | None = None
    _weights: WeightWriter | None = None

    def call(self, message: Message) -> Any:
        """Make the call that a message names by `do`."""
        return getattr(self, message["do"])(message)

    @property
    def running(self) -> Resident:
        """The runner."""
        if self.runner is None:
            raise VerbatimError("this process has no memory for K and V yet, or sleeps")
        return self.runner

    def draft(self, message: Message) -> Message:
        """Run a draft layer, and draw from its logits by a plan, if there is one."""
        runner = self.running
        with runner.drafting():
            return {"draws": runner.draft(message["k"], message["batch"], message["plan"])}

    def check_replay(self, message: Message) -> None:
        """Check whether the choices of these layers can be forced."""
        name = message["name"]
        if self.running.choices[name].layers:
            self.running.check_replay(name)

    def read_cache(self, message: Message) -> Message:
        """Return the rows of blocks or slots, as of `Runner.read_cache`, and each store's bytes in one."""
        runner, kind = self.running, message["kind"]
        rows = runner.read_cache(kind, message["numbers"], message["used"])
        return {"rows": rows, "widths": [row_bytes(store) for store in runner.cached_in(kind)]}

    def write_cache(self, message: Message) -> None:
        """Write the rows of blocks or slots."""
        self.running.write_cache(message["kind"], message["numbers"], message["rows"])

    def load_adapter(self, message: Message) -> Message:
        """Hold an adapter's matrices for the layers here, and return their names."""
        return {"names": self.running.decoder.load_adapter(message["adapter"], partial=True)}

    def unload_adapter(self, message: Message) -> None:
        """Drop an adapter, if it is held."""
        self.running.unload_adapter(message["number"])

    def sleep(self, message: Message) -> None:
        """Free the KV memory; with `weights`, also that of the weights."""
        self.running.sleep(message["weights"])

    def wake(self, message: Message) -> None:
        """Allocate the memory again, and read the weights.

        Raises:
            ModelChanged: the files hold another model by now. It sleeps on.
        """
        self.running.wake()

    @property
    def weights(self) -> WeightWriter:
        """The writer of new weights, kept from `prepare_weights` to `write_weights`."""
        if self._weights is None:
            self._weights = self.running.writer(whole=False)
        return self._weights

    def weight_names(self, message: Message) -> Message:
        """Return the names of the weights that are held here, quantized ones apart."""
        return {"packed": self.weights.packed, "exact": self.weights.exact}

    def prepare_weights(self, message: Message) -> None:
        """Quantize new weights, which `write_weights` writes."""
        self.weights.prepare(message["tensors"])

    def write_weights(self, message: Message) -> Message:
        """Write new weights, and those that were prepared; return `PackingReport.info` of them."""
        self.weights.write(message["tensors"])
        self.running.decoder.weights_moved()
        report = self.running.packed
        if report is None:
            return {"quantization": None}
        report.squares |= self.weights.squares
        return {"quantization": report.info()}
