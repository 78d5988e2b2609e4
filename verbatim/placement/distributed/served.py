"""A share of a model that another process calls: a stage's layers, or a rank's columns and heads.

Calls run one at a time, in the order in which they are sent; pings are answered at any time.
"""

from __future__ import annotations

import os
import platform
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from verbatim._version import __version__
from verbatim.errors import NotSupported, VerbatimError
from verbatim.kernels import numerics_key
from verbatim.kv.flat import row_bytes
from verbatim.model.device import CPU, Device
from verbatim.model.early_exit import EarlyExit
from verbatim.model.loader import LoadedModel, ModelSource
from verbatim.model.mtp_source import Mtp
from verbatim.model.spec import inner_model
from verbatim.options import dtype_name
from verbatim.placement.distributed.link import Address, Link, LinkLost, Listener
from verbatim.placement.distributed.wire import DTYPE_NAMES, Buffer, Garbage, Message, encode
from verbatim.placement.options import EngineOptions
from verbatim.placement.resident import Resident
from verbatim.weights.identity import changed
from verbatim.weights.opening import reopen
from verbatim.weights.update import WeightWriter


def versions() -> dict[str, str]:
    """Return the versions of packages, which must be the same in all processes of a model."""
    return {
        "verbatim": __version__,
        "torch": torch.__version__.partition("+")[0],
        "transformers": transformers.__version__,
    }


def key_of(loaded: LoadedModel, options: EngineOptions, *, by_torch: bool = True) -> str:
    """Return the numerics key of a model that is about to be opened; it must be equal on all ranks.

    Args:
        by_torch: see `numerics_key`.
    """
    kv_dtype, kind = options.kv_dtype, loaded.quantization
    return numerics_key(
        dtype_name(inner_model(loaded.module).config.dtype),
        "auto" if kv_dtype is None else DTYPE_NAMES[kv_dtype],
        None if kind is None else kind.name,
        options.device.info(),
        by_torch=by_torch,
    )


def check_keys(keys: Iterable[tuple[str, str]]) -> None:
    """Check that processes, given by name and key, have the same numerics key.

    Raises:
        NotSupported: the keys differ, so the results would not be bit-identical.
    """
    (first, expected), *others = keys
    for name, key in others:
        if key != expected:
            raise NotSupported(
                f"{name} has the numerics key {key!r} and {first} {expected!r}: together, their "
                "results would not be bit-identical to either's; all need the same kernels and dtypes, and "
                "the same kind of GPU or CPUs on which torch rounds alike (docs/sameness.md)"
            )


def describe_draft(draft: Mtp | EarlyExit | None) -> Message | EarlyExit | None:
    """Return the draft options for a message; raise NotSupported if the layers are only in memory here."""
    if not isinstance(draft, Mtp):
        return draft
    if draft.model is not None and draft.beside is None:
        raise NotSupported(
            "draft=Mtp(model=...): other processes draft, and read the layers from files: name "
            "their folder"
        )
    return {"model": draft.beside}  # not an `Mtp`, which can't be made where its folder is missing


def draft_of(described: Message | EarlyExit | None) -> Mtp | EarlyExit | None:
    """Return the draft options from the result of `describe_draft`."""
    return Mtp(**described) if isinstance(described, dict) else described


class Skipped(Exception):
    """Raised by a call that is not answered, as another process is gone, or has failed and reports why."""


class Served:
    """Serves one share: each message contains the name and arguments of a method, of this class or `runner`.

    Args:
        loaded: the model without its weights, if this process has opened it already.
        source: the source of `loaded`.
    """

    calls: frozenset[str] = frozenset(  # names of the methods that a message may call
        {
            *("facts", "use", "open", "allocate", "deliver"),
            *("draft", "read_cache", "write_cache", "sleep", "wake"),
            *("load_adapter", "unload_adapter"),
            *("weight_names", "prepare_weights", "drop_weights", "write_weights"),
        }
    )
    concurrent: frozenset[str] = frozenset()  # the calls that run in separate threads
    runner: Resident | None = None  # None until the KV cache is allocated
    key: bytes  # the secret key of all processes
    address: Address  # at which this process listens
    # Start of the current computation; None if there is none, or it waits for another process.
    busy_since: float | None = None
    device = CPU  # of the computation and its memory
    _weights: WeightWriter | None = None

    def __init__(
        self, loaded: LoadedModel | None = None, source: ModelSource | None = None
    ) -> None:
        self._loaded, self._loaded_from = loaded, source
        self._inspecting = threading.Lock()  # a spare may still be in `warm`
        # From the head to the program that contains this share; None: no more follow.
        self.messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards all connections
        self._head: Link | None = None
        self._closed = False

    # Serving.

    @classmethod
    def serve(
        cls, key: str, host: str, model: Mapping[str, Any] | None, report: Callable[[int], None]
    ) -> None:
        """Serve a share until the head is gone; the target of this machine's worker processes.

        Args:
            key: the secret key in hexadecimal digits.
            model: the fields of a `ModelSource` to inspect in advance; None: no model.
            report: called with the port.
        """
        share, ended = cls(), threading.Event()
        share.listen(bytes.fromhex(key), host, ended.set)
        report(share.address[1])
        if model is not None:
            share.warm(model)
        ended.wait()

    def listen(self, key: bytes, host: str, ended: Callable[[], object] = lambda: None) -> None:
        """Serve one head until it is gone, or `hang_up` is called; then close, and call `ended`."""
        self.key, self._ended = key, ended
        self._listener = Listener(key, host, self.accept)
        self.address = host, self._listener.port
        self._worker = threading.Thread(target=self._work, name="verbatim-stage", daemon=True)
        self._worker.start()

    def accept(self, who: Message, link: Link) -> Callable[[], object]:
        """Return the function that serves an authenticated peer; raise VerbatimError to refuse it."""
        if who.get("role") != "head":
            raise VerbatimError(f"unknown role {who.get('role')!r}")
        with self._lock:
            if self._head is not None or self._closed:
                raise VerbatimError("this stage serves another head, or is closed")
            self._head = link
        return lambda: self._serve(link)

    def hang_up(self) -> None:
        """Close all connections; memory is freed after the call in progress."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._listener.close()
        if self._head is not None:
            self._head.close()
        self._inbox.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` until the share is closed."""
        self._worker.join(timeout_s)

    def report(self, message: Message | list[Buffer]) -> None:
        """Send a report to the head, if one is connected."""
        if self._head is not None:
            with suppress(LinkLost):  # noticed by the thread that reads from it
                self._head.send(message)

    def _serve(self, head: Link) -> None:
        try:
            while True:
                message = head.receive()
                do = str(message.get("do"))
                if do == "ping":
                    self._ping()
                elif do in self.concurrent:
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
        """Run queued calls, one after another."""
        while (message := self._inbox.get()) is not None:
            if self._closed and message.get("do") != "deliver":  # received before the end
                continue
            self.busy_since = time.monotonic()
            self._answer(message)
            self.busy_since = None
        self.close()
        self.messages.put(None)
        self._ended()

    def _answer(self, message: Message) -> None:
        """Run a call, and send its error or, if an answer is expected, its result."""
        tags: Message = {name: message.get(name) for name in ("call", "epoch", "step")}
        try:
            result = self.call(message)
            if tags["call"] is None:
                return
            answer = encode({**tags, "result": result})
        except Skipped:
            return
        except BaseException as error:  # also SystemExit: the head waits for an answer
            described = [type(error).__name__, str(error) or type(error).__name__]
            answer = encode({**tags, "error": described})
        self.report(answer)

    def call(self, message: Message) -> Any:
        """Run the call that `do` names in a message."""
        do = str(message.get("do"))
        if do not in self.calls:
            raise VerbatimError(f"unknown call {do!r}")
        fields = {name: value for name, value in message.items() if name not in ("do", "call")}
        method = getattr(self, do, None)
        return (getattr(self.running, do) if method is None else method)(**fields)

    def deliver(self, message: Message) -> None:
        """Pass a message from the head to the program that contains this share."""
        self.messages.put(message)

    # Calls.

    @property
    def running(self) -> Resident:
        """The runner; raise VerbatimError if there is none."""
        if self.runner is None:
            raise VerbatimError("this process has no memory for K and V yet, or sleeps")
        return self.runner

    def facts(self) -> Message:
        """Return the versions, the machine and the id of this process."""
        boot_id = Path("/proc/sys/kernel/random/boot_id")  # two machines may have one name
        machine = platform.node() + (boot_id.read_text() if boot_id.exists() else "")
        return {**versions(), "machine": machine, "pid": os.getpid()}

    def use(self, device: Device, number: int) -> Message:
        """Choose the device with `Device.nth`, and return the result of `memory`."""
        self.device = device.nth(number)
        return self.memory()

    def memory(self) -> Message:
        """Return the name of the device, and the bytes of its free memory."""
        return {"device": str(self.device.torch), "memory": self.device.available_memory}

    def warm(self, source: Mapping[str, Any]) -> None:
        """Inspect a model (fields of a `ModelSource`) so that `open` is fast; errors are left to `open`."""
        with self._inspecting, suppress(VerbatimError):
            self.skeleton(ModelSource(**source))

    def skeleton(self, source: ModelSource) -> LoadedModel:
        """Return the model without its weights, cached until its files change."""
        if self._loaded is None or self._loaded_from != source or changed(self._loaded):
            self._loaded, self._loaded_from = reopen(source), source
        return self._loaded

    def close(self) -> None:
        """Free everything."""
        self.drop_weights()
        if self.runner is not None:
            self.runner.close()

    @property
    def row_widths(self) -> dict[str, list[int]]:
        """The bytes of each store in a row of `Runner.read_cache`, by kind."""
        return {k: [*map(row_bytes, self.running.cached_in(k))] for k in ("blocks", "states")}

    @property
    def weights(self) -> WeightWriter:
        """The writer of new weights; holds what `prepare_weights` has quantized for `write_weights`."""
        if self._weights is None:
            self._weights = self.running.writer(whole=False)
        return self._weights

    def weight_names(self) -> Message:
        """Return the names of the weights in this share: `packed` (quantized) and `exact` ones."""
        return {"packed": self.weights.packed, "exact": self.weights.exact}

    def prepare_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Quantize new weights, to be written by `write_weights`."""
        self.weights.prepare(tensors)

    def drop_weights(self) -> None:
        """Discard what `prepare_weights` has quantized."""
        if self._weights is not None:
            self._weights.drop()
            self._weights = None

    def write_weights(self, tensors: Mapping[str, Tensor]) -> Message:
        """Write new weights and the prepared ones; return the new `info` of the runner."""
        self.running.write_weights(self.weights, tensors)
        return {"info": self.running.info()}
