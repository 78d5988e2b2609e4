"""Routes for trainers (pause, resume, weight updates), with vLLM's names, which TRL's clients call.

New weights are held until the update is finished, checked as a whole, and written between two steps: all of
them or, on an error, none. Requests in progress continue with the new weights. There is one update at a time:
others are refused until it finishes, its connection fails, or its trainer is silent for too long. An update
in parts has an id, so that no part joins another trainer's.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response
from torch import Tensor

from verbatim._version import __version__
from verbatim.errors import InvalidRequest, VerbatimError
from verbatim.placement.distributed.link import connect
from verbatim.serve.bodies import BodyRoute, parse_body
from verbatim.serve.errors import RETRY_AFTER_S, Json, Refusal
from verbatim.serve.fields import Strict, Switch
from verbatim.serve.service import Service

T = TypeVar("T")
log = logging.getLogger("verbatim.serve")
_MAX_TENSORS = 1 << 20
_PER_PARAM = 8  # default maximum bytes of an update per parameter: float32, tied ones sent twice
_MESSAGE_BYTES = 1 << 10  # maximum size of a message without its tensor
_SAFETENSORS = ("application/octet-stream", "application/x-safetensors")


class StartUpdate(Strict):
    """The beginning of an update in parts."""

    is_checkpoint_format: Literal[True] | None = None


Version = Annotated[
    int | None, Field(ge=0, lt=1 << 60, description="Default: the present version plus 1.")
]


class FinishUpdate(Strict):
    """The end of an update."""

    version: Version = None
    restart: Switch = None
    check_finite: Switch = None


class FinishParts(FinishUpdate):
    """The end of an update in parts."""

    update: str = Field(default="", max_length=64, description="Id from /start_weight_update.")


class SendUpdate(FinishUpdate):
    """An update that a trainer's `WeightSender` sends over a connection; it listens at an address."""

    master_address: str = Field(min_length=1, max_length=255)
    master_port: int = Field(ge=1, le=65535)
    key: str = Field(
        pattern="^[0-9a-f]{64}$", description="Of the connection: both sides prove to know it."
    )
    num_bytes: int = Field(ge=0, lt=1 << 60, description="Size of all tensors.")


_CONNECT_S = 5.0  # limit of each step of connecting to a trainer
_START, _FINISH = StartUpdate(), FinishParts()  # defaults of omitted bodies


class Updates:
    """Updates of a server's weights, one at a time."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lock = asyncio.Lock()  # one request at a time
        self._pending: dict[str, Tensor] | None = None  # None outside of an update in parts
        self._id = ""  # of the last update in parts
        self._expiry: asyncio.TimerHandle | None = None  # timeout of an update in parts
        settings = service.settings
        self._timeout_s = settings.update_timeout_s
        self._limit = settings.max_update_bytes or _PER_PARAM * int(
            service.llm.info()["parameters"]
        )

    @asynccontextmanager
    async def _exclusive(self, update: str | None = None) -> AsyncIterator[None]:
        """Exclude other requests during the block, and restart the update's timeout after it.

        Args:
            update: id of the update in parts to continue; None begins an update.

        Raises:
            Refusal: 409: another request or update is in progress, or `update` is not.
        """
        if self._lock.locked() or (update is None and self._pending is not None):
            raise Refusal(
                409,
                "another update of the weights is in progress; it is dropped when its trainer is silent for "
                f"{self._timeout_s:g} s (--update-timeout-s)",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )
        if update is not None and (self._pending is None or update != self._id):
            raise Refusal(
                409,
                f"no update {update!r:.80} is in progress: POST /start_weight_update returns the id of one "
                "(silence for --update-timeout-s drops it)",
            )
        async with self._lock:
            if self._expiry is not None:
                self._expiry.cancel()
            try:
                yield
            finally:
                if self._pending is not None:
                    loop = asyncio.get_running_loop()
                    self._expiry = loop.call_later(self._timeout_s, self._drop)

    def _drop(self) -> None:
        log.warning("an update of the weights was dropped: no request for %g s", self._timeout_s)
        self._pending = None

    async def start(self) -> str:
        """Begin an update in parts and return its id; raise a Refusal (409) if another is in progress."""
        async with self._exclusive():
            self._pending, self._id = {}, secrets.token_hex(8)
            return self._id

    async def receive(self, update: SendUpdate) -> int:
        """Receive the weights of a trainer, write them, and return their version.

        Raises:
            InvalidRequest, NotSupported: too many bytes, or as `LLM.update_weights`; nothing was changed.
            Refusal: 409: another update is in progress; 502: there is no `WeightSender` at the address, or
                it ended, sent unannounced data, or sent nothing within the time limit.
        """
        async with self._exclusive():
            self._check_size(update.num_bytes)
            try:
                tensors = await self._receive(update)
            except TimeoutError:
                raise Refusal(502, "the trainer has sent nothing for --update-timeout-s") from None
            except MemoryError:
                raise Refusal(502, "no memory for the new weights") from None
            except VerbatimError as error:
                raise Refusal(502, str(error)) from None
            return await self._write(tensors, update)

    async def _receive(self, update: SendUpdate) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        address, remaining = (update.master_address, update.master_port), update.num_bytes
        key = bytes.fromhex(update.key)
        link = await asyncio.to_thread(connect, address, key, {}, _CONNECT_S)
        try:
            while True:
                received = asyncio.to_thread(link.receive, remaining + _MESSAGE_BYTES)
                message = await asyncio.wait_for(received, self._timeout_s)
                if message.get("end"):
                    return tensors
                name, tensor = message.get("name"), message.get("tensor")
                if not isinstance(name, str) or not isinstance(tensor, Tensor) or name in tensors:
                    raise VerbatimError("the trainer sent something other than named tensors")
                if len(tensors) == _MAX_TENSORS:
                    raise VerbatimError(f"the trainer sent more than {_MAX_TENSORS} tensors")
                tensors[name], remaining = tensor, remaining - tensor.nbytes
        finally:
            link.close()

    async def take(self, body: bytes, version: int | None, update: str | None) -> int | None:
        """Add a safetensors file to an update in parts; without one, write it and return the version.

        Raises:
            InvalidRequest: not a safetensors file, or too many bytes; a part with a version.
            Refusal: 409: another update is in progress, or the one of this id is not.
        """
        if update is not None and version is not None:
            raise InvalidRequest(f"version={version}: of a part; /finish_weight_update takes it")

        def read() -> dict[str, Tensor]:
            from safetensors import SafetensorError
            from safetensors.torch import load

            try:
                return load(body)
            except (SafetensorError, KeyError, ValueError, RuntimeError):
                raise InvalidRequest("the body is not a safetensors file") from None

        async with self._exclusive(update):
            tensors = await asyncio.to_thread(read)
            self._check_size(sum(tensor.nbytes for tensor in tensors.values()))
            if self._pending is None:
                return await self._write(tensors, FinishUpdate(version=version))
            duplicate = next((name for name in tensors if name in self._pending), None)
            if duplicate is not None:
                raise InvalidRequest(f"weights name {duplicate:.200} twice")
            self._pending |= tensors
            return None

    async def finish(self, finish: FinishParts) -> int:
        """Write the weights of an update in parts, and return their version.

        Raises:
            Refusal: 409: the update is not in progress.
            InvalidRequest, NotSupported: as `LLM.update_weights`; nothing was changed.
        """
        async with self._exclusive(finish.update):
            tensors, self._pending = self._pending, None
            assert tensors is not None
            return await self._write(tensors, finish)

    async def _write(self, tensors: dict[str, Tensor], finish: FinishUpdate) -> int:
        return await asyncio.to_thread(
            lambda: self._service.llm.update_weights(
                tensors,
                version=finish.version,
                restart=bool(finish.restart),
                check_finite=bool(finish.check_finite),
            )
        )

    def _check_size(self, size: int) -> None:
        """Raise InvalidRequest if the update would have too many bytes."""
        size += sum(tensor.nbytes for tensor in (self._pending or {}).values())
        if size > self._limit:
            raise InvalidRequest(
                f"the update has {size:,} bytes; at most {self._limit:,} (--max-update-bytes)"
            )


def training_routes(service: Service) -> APIRouter:
    """Return the routes for trainers."""
    engine, updates = service.llm.engine, Updates(service)

    def check_origin(http: Request) -> None:
        """Refuse other web pages, which can send some requests without a CORS preflight."""
        origin = http.headers.get("origin")
        if origin is not None and origin not in service.settings.cors_origins:
            raise Refusal(403, f"Origin: {origin:.80}: not allowed (--cors-origin)")

    router = APIRouter(
        route_class=BodyRoute, dependencies=[Depends(check_origin)], tags=["Training"]
    )

    async def done(work: Callable[[], T], **answer: Any) -> Response:
        await asyncio.to_thread(work)
        return Json({"status": "ok", **answer})

    @router.get("/server_info")
    async def server_info() -> Response:
        """The part of vLLM's configuration that TRL's clients read."""
        info, stats = await service.info(), await service.stats()
        config = {
            "model_config": {
                "model": service.name,
                "dtype": f"torch.{info['dtype']}",
                "max_model_len": service.llm.max_length,
                "logprobs_mode": service.settings.logprobs_mode,
            },
            "weight_transfer_config": {"backend": "tcp"},
            "lora_config": None,
        }
        version = {"verbatim": __version__, "weight_version": stats["weight_version"]}
        return Json({"vllm_config": config, **version})

    @router.get("/get_world_size")
    async def get_world_size() -> Response:
        """Number of processes that receive weights: one, with any placement."""
        return Json({"world_size": 1})

    @router.post("/pause")
    async def pause(mode: Literal["keep", "abort", "wait", "drain"] = "keep") -> Response:
        """Stop the engine's steps: `keep` or `abort` the requests in progress, or `wait` for their end."""
        return await done(lambda: engine.pause("drain" if mode == "wait" else mode))

    @router.post("/resume")
    async def resume() -> Response:
        return await done(engine.resume)

    @router.get("/is_paused")
    async def is_paused() -> Response:
        return Json({"is_paused": (await service.stats())["paused"]})

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        """Clear the prefix cache. An update of the weights does so itself."""
        return await done(lambda: engine.call(engine.scheduler.prefixes.forget), success=True)

    @router.post("/start_weight_update")
    async def start_weight_update(body: StartUpdate = _START) -> Response:
        return Json({"status": "ok", "update": await updates.start()})

    @router.post("/update_weights")
    async def update_weights(
        http: Request, version: Version = None, update: str | None = None
    ) -> Response:
        """Tensors that a trainer's `WeightSender` sends, or a body that is a safetensors file.

        A file is a part of the `update` of this id; without one, an update of its own, with the `version`.
        """
        raw, kind = await http.body(), http.headers.get("content-type", "")
        written: int | None
        if kind.partition(";")[0].strip().lower() in _SAFETENSORS:
            written = await updates.take(raw, version, update)
        elif version is not None or update is not None:
            raise InvalidRequest("version and update in the query belong to a safetensors file")
        else:
            written = await updates.receive(parse_body(SendUpdate, raw))
        return Json({"status": "ok", "weight_version": written})

    @router.post("/finish_weight_update")
    async def finish_weight_update(body: FinishParts = _FINISH) -> Response:
        return Json({"status": "ok", "weight_version": await updates.finish(body)})

    return router
