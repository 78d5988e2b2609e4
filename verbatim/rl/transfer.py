"""Weights between a trainer and a server, by a gloo process group of their own.

Rank 0 is the trainer; it broadcasts each tensor's bytes in the order that it announced by HTTP.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

from verbatim.errors import VerbatimError, first_line
from verbatim.weights.update import Weights, named_weights

T = TypeVar("T")
TIMEOUT_S = 120.0


class WeightGroup:
    """One end of the process group; not torch.distributed's default group.

    Args:
        host, port: the trainer's address.
        rank: 0 for the trainer.
        size: ranks of the group.
        timeout_s: of the meeting, and of each tensor.

    Raises:
        VerbatimError: the others did not come.
    """

    def __init__(
        self, host: str, port: int, rank: int, size: int, timeout_s: float = TIMEOUT_S
    ) -> None:
        from torch._C._distributed_c10d import TCPStore
        from torch.distributed import ProcessGroupGloo

        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        try:
            store = TCPStore(
                host, port, None, rank == 0, timedelta(seconds=timeout_s), wait_for_workers=False
            )
            options._devices = [gloo.create_device(hostname=_own_address(host, store.port))]
            self._group = gloo(store, rank, size, options)
        except (RuntimeError, OSError, ValueError) as error:
            raise VerbatimError(
                f"no process group with {host}:{port}: {first_line(error)}"
            ) from None

    def send(self, tensors: Iterable[Tensor]) -> None:
        """Broadcast tensors from rank 0."""
        for tensor in tensors:
            self._broadcast(tensor.detach().cpu().contiguous())

    def receive(self, size: int) -> Tensor:
        """Return the `size` bytes of the tensor that rank 0 broadcasts next.

        Raises:
            VerbatimError: it did not come, or is at least 16 bytes shorter. Where it is longer, gloo ends
                the process.
        """
        tensor = torch.zeros(size, dtype=torch.uint8)
        mark = torch.frombuffer(bytearray(os.urandom(16)), dtype=torch.uint8)
        if size >= len(mark):
            tensor[-len(mark) :] = mark
        self._broadcast(tensor)
        if size >= len(mark) and tensor[-len(mark) :].equal(mark):
            raise VerbatimError(f"a tensor of {size:,} bytes was announced, and a shorter one sent")
        return tensor

    def _broadcast(self, tensor: Tensor) -> None:
        if not tensor.numel():
            return
        try:
            self._group.broadcast(tensor.view(-1).view(torch.uint8), 0).wait()
        except RuntimeError as error:
            raise VerbatimError(f"the transfer of weights failed: {first_line(error)}") from None


def _own_address(host: str, port: int) -> str:
    """Return the address of this machine on the way to a host."""
    family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:  # a datagram socket connects without sending
        probe.connect(address)
        return str(probe.getsockname()[0])


class WeightSender:
    """Sends a trainer's weights to a server started with `verbatim serve --training`.

    Args:
        url: of the server.
        api_key: of the server.
        host: address of this machine, as the server reaches it.
        timeout_s: of the connection, and of each tensor.

    Raises:
        VerbatimError: the server refuses, or does not answer.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        host: str = "127.0.0.1",
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._url, self._key, self._timeout_s = url.rstrip("/"), api_key, timeout_s
        with socket.socket() as free:
            free.bind((host, 0))
            port = free.getsockname()[1]
        size = 1 + int(self._call("/get_world_size")["world_size"])
        self._trainer = {"trainer": secrets.token_hex(8)}
        init = {"master_address": host, "master_port": port, "rank_offset": 1, "world_size": size}
        self._group: WeightGroup = self._meanwhile(
            "/init_weight_transfer_engine",
            {"init_info": init, **self._trainer},
            lambda: WeightGroup(host, port, 0, size, timeout_s),
        )

    def send(self, weights: Weights, *, version: int | None = None) -> int:
        """Replace the server's weights: all of them or, on an error, none.

        Args:
            weights: as in `LLM.update_weights`.
            version: as in `LLM.update_weights`.

        Returns:
            The version.
        """
        tensors = named_weights(weights)
        self._call("/start_weight_update", self._trainer)
        info = {
            "names": list(tensors),
            "dtype_names": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
        }
        self._meanwhile(
            "/update_weights", {"update_info": info}, lambda: self._group.send(tensors.values())
        )
        answer = self._call("/finish_weight_update", {"version": version})
        return int(answer["weight_version"])

    def pause(self, mode: str = "keep") -> None:
        """Stop the server's steps, as `LLM.pause`."""
        self._call(f"/pause?mode={mode}", {})

    def resume(self) -> None:
        """Go on after `pause`."""
        self._call("/resume", {})

    def _meanwhile(self, path: str, body: dict[str, Any], work: Callable[[], T]) -> T:
        """Return the result of this end's part, done while the server does its own in a request."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        # A daemon, as a process group can't be interrupted, and the server may have refused.
        threading.Thread(target=run, name="verbatim-weights", daemon=True).start()
        self._call(path, body)
        return done.result(self._timeout_s)

    def _call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=4 * self._timeout_s) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise VerbatimError(f"{path}: {error.read(4096).decode(errors='replace')}") from None
        except OSError as error:
            raise VerbatimError(f"{self._url}: {first_line(error)}") from None
