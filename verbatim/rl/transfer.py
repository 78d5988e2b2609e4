"""New weights from a trainer to a server, over a connection of their own.

The trainer listens, and sends its address and a key by HTTP; the server connects. Then the tensors of an
update follow in the order that was announced by HTTP.
"""

from __future__ import annotations

import json
import secrets
import threading
import urllib.error
import urllib.request
import weakref
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import Any

from torch import Tensor

from verbatim.errors import VerbatimError, first_line
from verbatim.placement.distributed.link import Link, Listener
from verbatim.weights.update import Weights, named_weights

TIMEOUT_S = 120.0


class WeightSender:
    """Sends a trainer's weights to a server started with `verbatim serve --training`.

    Args:
        url: of the server.
        api_key: of the server.
        host: address of this machine, as the server reaches it.
        timeout_s: of the connection, and without progress of a tensor.

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
        self._url, self._api_key, self._timeout_s = url.rstrip("/"), api_key, timeout_s
        key, links = secrets.token_bytes(32), SimpleQueue[Link]()

        def accept(who: dict[str, Any], link: Link) -> Callable[[], object]:
            return lambda: links.put(link)

        listener = Listener(key, host, accept)
        self._trainer = {"trainer": key.hex()}
        init = {"master_address": host, "master_port": listener.port}
        try:
            self._call("/init_weight_transfer_engine", {"init_info": init, **self._trainer})
            self._link = links.get(timeout=timeout_s)
            self._link.limit_sending(timeout_s)
        finally:
            listener.close()
        weakref.finalize(self, self._link.close)

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
        # A daemon, as the server may have refused.
        sending = threading.Thread(target=self._send, args=(tensors.values(),), daemon=True)
        sending.start()
        try:
            self._call("/update_weights", {"update_info": info})
        except BaseException:  # it may have been broken off within a tensor
            self._link.close()
            raise
        sending.join()
        answer = self._call("/finish_weight_update", {"version": version})
        return int(answer["weight_version"])

    def pause(self, mode: str = "keep") -> None:
        """Stop the server's steps, as `LLM.pause`."""
        self._call(f"/pause?mode={mode}", {})

    def resume(self) -> None:
        """Go on after `pause`."""
        self._call("/resume", {})

    def _send(self, tensors: Iterable[Tensor]) -> None:
        try:
            for tensor in tensors:
                self._link.send({"tensor": tensor.detach().cpu().contiguous()})
        except Exception:  # the server's answer has the reason
            self._link.close()

    def _call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"Content-Type": "application/json"}
        if self._api_key is not None:
            headers["Authorization"] = f"Bearer {self._api_key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=4 * self._timeout_s) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise VerbatimError(f"{path}: {error.read(4096).decode(errors='replace')}") from None
        except OSError as error:
            raise VerbatimError(f"{self._url}: {first_line(error)}") from None
