"""The routes of a trainer, named as vLLM's, which TRL's clients call: pause, resume, new weights.

New weights are held until the update is finished, checked as a whole, and written between two steps: all of
them or, on an error, none. Requests in progress go on with them. One update at a time: others are refused
until it is finished, its connection fails, or its trainer is silent for too long.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Annotated, Any, Literal, TypeVar

import torch
from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response
from torch import Tensor

from verbatim._version import __version__
from verbatim.errors import InvalidRequest, VerbatimError
from verbatim.options import SENT_DTYPES
from verbatim.placement.distributed.link import Link, connect
from verbatim.serve.bodies import BodyRoute, parse_body
from verbatim.serve.errors import RETRY_AFTER_S, Json, Refusal
from verbatim.serve.fields import AtMost, Strict, Switch
from verbatim.serve.service import Service

T = TypeVar("T")
log = logging.getLogger("verbatim.serve")
MAX_TENSORS = 1 << 20
_DIMENSIONS = 8
_ROOM = 8  # default bytes of an update for each parameter: float32, and tied ones may come twice
_AROUND = 1 << 10  # bytes of a message beside those of its tensor
_SAFETENSORS = ("application/octet-stream", "application/x-safetensors")

Dimension = Annotated[int, Field(ge=0, lt=1 << 48)]
Shape = Annotated[list[Dimension], AtMost(_DIMENSIONS)]
Trainer = Annotated[
    str,
    Field(
        pattern="^[0-9a-f]{64}$",
        description="The trainer's key, of its choice. An update that names another one than that of the "
        "connection is refused.",
    ),
]


class InitInfo(Strict):
    """The address at which a trainer listens."""

    master_address: str = Field(min_length=1, max_length=255)
    master_port: int = Field(ge=1, le=65535)


class InitTransfer(Strict):
    """A request to connect to a trainer."""

    init_info: InitInfo
    trainer: Trainer


class StartUpdate(Strict):
    """The beginning of an update."""

    is_checkpoint_format: Literal[True] | None = None
    trainer: Trainer | None = None


class UpdateInfo(Strict):
    """The tensors that the trainer sends next, in order."""

    names: Annotated[list[str], AtMost(MAX_TENSORS)]
    dtype_names: Annotated[list[str], AtMost(MAX_TENSORS)]
    shapes: Annotated[list[Shape], AtMost(MAX_TENSORS)]
    packed: Literal[False] | None = None


class Update(Strict):
    """A part of an update."""

    update_info: UpdateInfo


Version = Annotated[
    int | None, Field(ge=0, lt=1 << 60, description="Default: the present version plus 1.")
]


class FinishUpdate(Strict):
    """The end of an update."""

    version: Version = None
    restart: Switch = None
    check_finite: Switch = None


_START, _FINISH = StartUpdate(), FinishUpdate()  # bodies that are left out


class Updates:
    """Updates of a server's weights, one at a time."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lock = asyncio.Lock()  # one request at a time
        self._link: Link | None = None
        self._trainer: str | None = None  # of the connection
        self._pending: dict[str, Tensor] | None = None  # None outside of an update
        self._expiry: asyncio.TimerHandle | None = None  # of the update
        settings = service.settings
        self._timeout_s = settings.update_timeout_s
        self._limit = settings.max_update_bytes or _ROOM * int(service.llm.info()["parameters"])

    @asynccontextmanager
    async def _turn(self, *, starts: bool = False) -> AsyncIterator[None]:
        """Keep other requests away.

        Args:
            starts: the request must not come within an update.

        Raises:
            Refusal: 409: another request is in progress, or an update.
        """
        if self._lock.locked() or (starts and self._pending is not None):
            raise Refusal(
                409,
                "another update of the weights is in progress; it is dropped when its trainer is silent for "
                f"{self._timeout_s:g} s (--update-timeout-s)",
                headers={"Retry-After": str(RETRY_AFTER_S)},
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
        self.close()  # something of it may be on its way

    async def join(self, init: InitInfo, trainer: str) -> None:
        """Connect to a trainer, in place of an earlier one.

        Raises:
            Refusal: 409: during an update; 502: there is no `WeightSender` at its address.
        """
        address = init.master_address, init.master_port
        async with self._turn(starts=True):
            self.close()
            with _bad_gateway():
                self._link = await asyncio.to_thread(connect, address, bytes.fromhex(trainer), {})
            self._trainer = trainer

    async def start(self, trainer: str | None) -> None:
        """Begin an update.

        Raises:
            Refusal: 409: another update is in progress, or the connection is another trainer's.
        """
        async with self._turn(starts=True):
            if trainer is not None and trainer != self._trainer:
                raise Refusal(
                    409, "another trainer has joined since: POST /init_weight_transfer_engine"
                )
            self._pending = {}

    def close(self) -> None:
        """Close the connection to the trainer."""
        link, self._link, self._trainer = self._link, None, None
        if link is not None:
            link.close()

    async def receive(self, info: UpdateInfo) -> None:
        """Receive tensors from the trainer.

        Raises:
            InvalidRequest: lists of different lengths, an unknown dtype, or too many bytes.
            Refusal: 409: no update was started, or there is no connection; 502: the trainer ended, sent other
                tensors, or nothing within the time limit. Then the update has ended.
        """
        async with self._turn():
            try:
                kinds = _announced(info)
                if self._pending is None:
                    raise _not_started()
                self._check_room(sum(dtype.itemsize * math.prod(shape) for dtype, shape in kinds))
                if self._link is None:
                    raise Refusal(409, "no connection: POST /init_weight_transfer_engine")
                with _bad_gateway():
                    tensors = [await self._next(self._link, *kind) for kind in kinds]
            except BaseException:  # the trainer may have sent what was not received
                self._pending = None
                self.close()
                raise
            self._add(dict(zip(info.names, tensors, strict=True)))

    async def _next(self, link: Link, dtype: torch.dtype, shape: list[int]) -> Tensor:
        """Return the trainer's next tensor, which must be of this kind."""
        most = dtype.itemsize * math.prod(shape) + _AROUND
        message = await asyncio.wait_for(asyncio.to_thread(link.receive, most), self._timeout_s)
        tensor = message.get("tensor")
        found = (tensor.dtype, list(tensor.shape)) if isinstance(tensor, Tensor) else None
        if not isinstance(tensor, Tensor) or found != (dtype, shape):
            raise VerbatimError(f"a tensor {dtype} {shape} was announced, and another one sent")
        return tensor

    async def take(self, body: bytes, finish: FinishUpdate) -> int | None:
        """Take tensors as a safetensors file, and return the version if no update was started.

        Raises:
            InvalidRequest: not such a file, or too many bytes.
        """

        def read() -> dict[str, Tensor]:
            from safetensors import SafetensorError
            from safetensors.torch import load

            try:
                return load(body)
            except (SafetensorError, KeyError, ValueError, RuntimeError):
                raise InvalidRequest("the body is not a safetensors file") from None

        async with self._turn():
            tensors = await asyncio.to_thread(read)
            self._check_room(sum(tensor.nbytes for tensor in tensors.values()))
            if self._pending is not None:
                self._add(tensors)
                return None
            return await self._write(tensors, finish)

    async def finish(self, finish: FinishUpdate) -> int:
        """Write the weights of an update, and return their version.

        Raises:
            Refusal: 409: no update was started.
            InvalidRequest, NotSupported: as `LLM.update_weights`; nothing was changed.
        """
        async with self._turn():
            tensors, self._pending = self._pending, None
            if tensors is None:
                raise _not_started()
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

    def _add(self, tensors: dict[str, Tensor]) -> None:
        assert self._pending is not None
        twice = next((name for name in tensors if name in self._pending), None)
        if twice is not None:
            raise InvalidRequest(f"weights name {twice:.200} twice")
        self._pending |= tensors

    def _check_room(self, size: int) -> None:
        """Refuse an update of too many bytes."""
        size += sum(tensor.nbytes for tensor in (self._pending or {}).values())
        if size > self._limit:
            raise InvalidRequest(
                f"the update has {size:,} bytes; at most {self._limit:,} (--max-update-bytes)"
            )


def _announced(info: UpdateInfo) -> list[tuple[torch.dtype, list[int]]]:
    """Return the dtype and the shape of each tensor."""
    if not len(info.names) == len(info.dtype_names) == len(info.shapes):
        raise InvalidRequest(
            f"{len(info.names)} names, {len(info.dtype_names)} dtype_names, {len(info.shapes)} shapes: "
            "must be as many"
        )
    if len(set(info.names)) < len(info.names):
        raise InvalidRequest("names: a weight is named twice")
    unknown = next((name for name in info.dtype_names if name not in SENT_DTYPES), None)
    if unknown is not None:
        raise InvalidRequest(f"dtype_names: {unknown:.40}: must be one of {', '.join(SENT_DTYPES)}")
    return [(SENT_DTYPES[n], shape) for n, shape in zip(info.dtype_names, info.shapes, strict=True)]


def _not_started() -> Refusal:
    return Refusal(
        409,
        "no update is in progress: POST /start_weight_update (an error of the connection drops one, and so "
        "does silence for --update-timeout-s)",
    )


@contextmanager
def _bad_gateway() -> Iterator[None]:
    """Turn an error of the connection to a trainer into status 502."""
    try:
        yield
    except TimeoutError:
        raise Refusal(502, "the trainer has sent nothing for --update-timeout-s") from None
    except MemoryError:
        raise Refusal(502, "no memory for the new weights") from None
    except VerbatimError as error:
        raise Refusal(502, str(error)) from None


def training_routes(service: Service) -> APIRouter:
    """Return the routes of a trainer."""
    engine, updates = service.llm.engine, Updates(service)
    service.on_close = updates.close

    def check_origin(http: Request) -> None:
        """Refuse web pages, which can send some requests to this server without asking it first."""
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
        return await done(engine.forget_cached, success=True)

    @router.post("/init_weight_transfer_engine")
    async def init_weight_transfer_engine(body: InitTransfer) -> Response:
        """Connect to a trainer's `WeightSender`."""
        await updates.join(body.init_info, body.trainer)
        return Json({"status": "ok"})

    @router.post("/start_weight_update")
    async def start_weight_update(body: StartUpdate = _START) -> Response:
        await updates.start(body.trainer)
        return Json({"status": "ok"})

    @router.post("/update_weights")
    async def update_weights(http: Request, version: Version = None) -> Response:
        """Tensors that the trainer sends, as JSON names them; or the body is a safetensors file.

        A file outside of an update is an update of its own, with the query's `version`.
        """
        raw, kind = await http.body(), http.headers.get("content-type", "")
        if kind.partition(";")[0].strip().lower() not in _SAFETENSORS:
            body = parse_body(Update, raw)
            assert isinstance(body, Update)
            await updates.receive(body.update_info)
            return Json({"status": "ok"})
        written = await updates.take(raw, FinishUpdate(version=version))
        return Json({"status": "ok", "weight_version": written})

    @router.post("/finish_weight_update")
    async def finish_weight_update(body: FinishUpdate = _FINISH) -> Response:
        return Json({"status": "ok", "weight_version": await updates.finish(body)})

    return router
