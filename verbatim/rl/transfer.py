"""Sends new weights from a trainer to a server, over a separate connection.

For each update the trainer listens on a port, and sends its address and a key to the server by HTTP. The
server connects, and answers the HTTP request when it has received and written the tensors.
"""

from __future__ import annotations

import json
import secrets
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from typing import Any

from torch import Tensor

from verbatim.errors import InvalidRequest, VerbatimError, first_line
from verbatim.options import SENT_DTYPES
from verbatim.placement.distributed.link import Link, Listener
from verbatim.weights.update import Weights, named_weights

TIMEOUT_S = 120.0


class WeightSender:
    """Sends a trainer's weights to a server started with `verbatim serve --training`.

    Args:
        host: address at which the server can reach this machine.
        timeout_s: maximum seconds until the server connects, and without progress in sending a tensor.

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
        self._url, self._api_key = url.rstrip("/"), api_key
        self._host, self._timeout_s = host, timeout_s
        self._call("/is_paused")

    def send(self, weights: Weights, *, version: int | None = None) -> int:
        """Replace the server's weights, as `LLM.update_weights`; return the version."""
        tensors, key = named_weights(weights, self._dtype), secrets.token_bytes(32)
        for name, tensor in tensors.items():
            if tensor.dtype not in SENT_DTYPES.values():
                raise InvalidRequest(
                    f"{name}: {tensor.dtype}: must be one of {', '.join(SENT_DTYPES)}"
                )

        def accept(hello: dict[str, Any], link: Link) -> Callable[[], object]:
            link.limit_sending(self._timeout_s)
            return lambda: serve(link)

        def serve(link: Link) -> None:
            try:
                self._send(link, tensors)
            except Exception as error:  # the server's HTTP answer follows, and states the reason
                failures.append(error)
            finally:
                link.close()

        failures: list[Exception] = []
        listener = Listener(key, self._host, accept)
        update = {
            "master_address": self._host,
            "master_port": listener.port,
            "key": key.hex(),
            "num_bytes": sum(tensor.nbytes for tensor in tensors.values()),
            "version": version,
        }
        try:
            return int(self._call("/update_weights", update)["weight_version"])
        except VerbatimError as error:
            raise error from next(iter(failures), None)
        finally:
            listener.close()

    def pause(self, mode: str = "keep") -> None:
        """Stop the server's steps, as `LLM.pause`."""
        self._call(f"/pause?mode={mode}", {})

    def resume(self) -> None:
        """Resume the server's steps."""
        self._call("/resume", {})

    def _dtype(self) -> str:
        """Return the dtype of the server's weights."""
        config = self._call("/server_info")["vllm_config"]["model_config"]
        return str(config["dtype"]).removeprefix("torch.")

    def _send(self, link: Link, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            link.send({"name": name, "tensor": tensor.detach().cpu().contiguous()})
        link.send({"end": True})

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
        except (OSError, ValueError, HTTPException) as error:  # no connection, or a damaged answer
            raise VerbatimError(f"{self._url}: {first_line(error)}") from None
