"""A share of a model that another process calls: a stage's layers, or a rank's columns and heads.

It makes one call at a time, in the order in which its head sends them; pings are answered at any time.
"""

from __future__ import annotations

import os
import platform
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
import transformers
from torch import Tensor

from verbatim._version import __version__
from verbatim.device import CPU, Device
from verbatim.errors import NotSupported, VerbatimError
from verbatim.kernels import numerics_key
from verbatim.kv.flat import row_bytes
from verbatim.model.early_exit import EarlyExit
from verbatim.model.loader import LoadedModel, ModelSource
from verbatim.model.mtp_source import Mtp
from verbatim.model.spec import inner_model
from verbatim.options import dtype_name
from verbatim.placement.distributed.link import Address, Link, LinkLost, Listener
from verbatim.placement.distributed.wire import Buffer, Garbage, Message, dtype_named, encode
from verbatim.placement.options import EngineOptions
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


def key_of(loaded: LoadedModel, options: EngineOptions) -> str:
    """Return the numerics key of a model that is about to be opened, which all ranks must have in common."""
    kv_dtype, kind = options.kv_dtype, loaded.quantization
    return numerics_key(
        dtype_name(inner_model(loaded.module).config.dtype),
        "auto" if kv_dtype is None else dtype_named(kv_dtype),
        None if kind is None else kind.name,
        options.device.info(),
    )


def check_keys(keys: Iterable[tuple[str, str]]) -> None:
    """Check that processes have the same numerics key.

    Args:
        keys: the name of each process, and its key.

    Raises:
        NotSupported: they don't, so their results would not be bit-identical.
    """
    (first, expected), *others = keys
    for name, key in others:
        if key != expected:
            raise NotSupported(
                f"{name} has the numerics key {key!r} and {first} {expected!r}: together they would not "
                "give the bits of either; all need the same processor features or GPUs, kernels and dtypes"
            )


def describe_draft(draft: Mtp | EarlyExit | None) -> Message | None:
    """Return what another process needs to open draft layers, as plain data.

    Raises:
        NotSupported: they are in this process's memory only.
    """
    if isinstance(draft, Mtp):
        if draft.model is not None and draft.beside is None:
            raise NotSupported(
                "draft=Mtp(model=...): other processes draft, and read the layers from files: name "
                "their folder"
            )
        return {"mtp": True, "beside": draft.beside and str(draft.beside)}
    return None if draft is None else {"mtp": False, "layers": draft.layers}


def draft_of(described: Message | None) -> Mtp | EarlyExit | None:
    """Return the options that `describe_draft` described."""
    if described is None:
        return None
    return Mtp(described["beside"]) if described["mtp"] else EarlyExit(described["layers"])


class Skipped(Exception):
    """A call that is not answered: another process failed, and reports the reason, or is gone."""


class Served:
    """Makes the calls of messages, whose other fields are the arguments of a method here or of `runner`.

    Args:
        loaded: the model without its weights, where it was opened here before.
        source: of `loaded`.

    Attributes:
        calls: the methods of this class or of `runner` that a message may name.
        at_once: those that are made in a thread of their own, while others run.
        runner: runs the share; None while it has no memory for K and V.
        key: the secret of all processes.
        address: where this process listens.
        told: what the head tells the program around this share; None once it has nothing more to do.
        device: where this process computes, and has its memory.
        busy_since: when the present computation began; None: there is none, or it waits for another process.

    Raises:
        VerbatimError: by all methods, while there is no runner.
    """

    calls: frozenset[str] = frozenset(
        {
            *("facts", "use", "open", "allocate", "tell", "status"),
            *("draft", "read_cache", "write_cache", "sleep", "wake"),
            *("load_adapter", "unload_adapter"),
            *("weight_names", "prepare_weights", "write_weights"),
        }
    )
    at_once: frozenset[str] = frozenset()
    runner: Resident | None = None
    key: bytes
    address: Address
    busy_since: float | None = None
    device = CPU
    _weights: WeightWriter | None = None

    def __init__(
        self, loaded: LoadedModel | None = None, source: ModelSource | None = None
    ) -> None:
        self._loaded, self._loaded_from = loaded, source
        self._inspecting = threading.Lock()  # a spare may still be getting ready
        self.told: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of all connections
        self._head: Link | None = None
        self._closed = False

    # Serving.

    @classmethod
    def serve(
        cls, key: str, host: str, model: Mapping[str, Any] | None, report: Callable[[int], None]
    ) -> None:
        """Serve a share until the head is gone: what a worker process of this machine does.

        Args:
            key: in hexadecimal digits.
            host: as of `listen`.
            model: inspected in advance, if given.
            report: takes the port.
        """
        share, ended = cls(), threading.Event()
        share.listen(bytes.fromhex(key), host, ended.set)
        report(share.address[1])
        if model is not None:
            share.warm(model)
        ended.wait()

    def listen(self, key: bytes, host: str, ended: Callable[[], object] = lambda: None) -> None:
        """Begin to serve one head, until it is gone or `hang_up` is called.

        Args:
            key: the secret of all processes.
            host: the address at which other machines reach this one.
            ended: called when there is nothing more to do here.
        """
        self.key, self._ended = key, ended
        self._listener = Listener(key, host, self.accept)
        self.address = host, self._listener.port
        self._worker = threading.Thread(target=self._work, name="verbatim-stage", daemon=True)
        self._worker.start()

    def accept(self, who: Message, link: Link) -> Callable[[], object]:
        """Return what serves an authenticated peer; VerbatimError: nothing does."""
        if who.get("role") != "head":
            raise VerbatimError(f"role {who.get('role')!r} is not known")
        with self._lock:
            if self._head is not None or self._closed:
                raise VerbatimError("this stage serves another head, or is closed")
            self._head = link
        return lambda: self._serve(link)

    def hang_up(self) -> None:
        """Close all connections, and free everything after the call in progress."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._listener.close()
        if self._head is not None:
            self._head.close()
        self._inbox.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the computation in progress."""
        self._worker.join(timeout_s)

    def report(self, message: Message | list[Buffer]) -> None:
        """Send the head a report, if there is one."""
        if self._head is not None:
            with suppress(LinkLost):  # the thread that reads from it notices
                self._head.send(message)

    def _serve(self, head: Link) -> None:
        try:
            while True:
                message = head.receive()
                do = str(message.get("do"))
                if do == "ping":
                    self._ping()
                elif do in self.at_once:
                    threading.Thread(target=self._answer, args=(message,), daemon=True).start()
                else:
                    self._inbox.put(message)
        except (LinkLost, Garbage):
            pass
        finally:
            self.hang_up()

    def _ping(self) -> None:
        since = self.busy_since
        self.report({"busy_s": 0.0 if since is None else time.monotonic() - since})

    def _work(self) -> None:
        """Make queued calls, one after another."""
        while (message := self._inbox.get()) is not None:
            if self._closed and message.get("do") != "tell":  # sent before the end, and still read
                continue
            self.busy_since = time.monotonic()
            self._answer(message)
            self.busy_since = None
        self.close()
        self.told.put(None)
        self._ended()

    def _answer(self, message: Message) -> None:
        """Make a call, and send back its result if it is asked for, or its error."""
        which: Message = {name: message.get(name) for name in ("call", "epoch", "step")}
        try:
            result = self.call(message)
            if which["call"] is None:
                return
            answer = encode({**which, "result": result})
        except Skipped:
            return
        except Exception as error:
            described = [type(error).__name__, str(error) or type(error).__name__]
            answer = encode({**which, "error": described})
        self.report(answer)

    def call(self, message: Message) -> Any:
        """Make the call that a message names by `do`."""
        do = str(message.get("do"))
        if do not in self.calls:
            raise VerbatimError(f"{do!r} is nothing that a stage can do")
        fields = {name: value for name, value in message.items() if name not in ("do", "call")}
        own = getattr(self, do, None)
        return (getattr(self.running, do) if own is None else own)(**fields)

    def tell(self, told: Message) -> None:
        """Hand what the head says to the program around this share."""
        self.told.put(told)

    # The share.

    @property
    def running(self) -> Resident:
        """The runner."""
        if self.runner is None:
            raise VerbatimError("this process has no memory for K and V yet, or sleeps")
        return self.runner

    def facts(self) -> Message:
        """Return the versions, machine and number of this process."""
        return {**versions(), "machine": platform.node(), "pid": os.getpid()}

    def use(self, device: Device, number: int) -> Message:
        """Choose the device, as `Device.nth`, and return `memory`."""
        self.device = device.nth(number)
        return self.memory()

    def memory(self) -> Message:
        """Return the name of the device, and the bytes of its memory that are free."""
        return {"device": str(self.device.torch), "memory": self.device.available_memory}

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

    def status(self) -> Message:
        """Return the state of this process, as plain values."""
        return {
            "pid": os.getpid(),
            "address": list(self.address),
            "serving": self._head is not None,
        }

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
