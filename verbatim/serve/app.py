"""`make_app`: the server as an ASGI application over an open `LLM`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from verbatim._version import __version__
from verbatim.api.llm import LLM
from verbatim.common.plain import to_plain
from verbatim.serve.bodies import BodyRoute, model_of, refusal_of_body
from verbatim.serve.chat import ChatRequest
from verbatim.serve.completions import CompletionRequest
from verbatim.serve.errors import Json, Refusal, refusal_of
from verbatim.serve.events import event_response, json_response
from verbatim.serve.guard import Guard
from verbatim.serve.messages import MessagesRequest, count_tokens
from verbatim.serve.native import (
    GenerateRequest,
    ScoreRequest,
    detokenize,
    load_adapter,
    tokenize,
    unload_adapter,
)
from verbatim.serve.responses import ResponsesRequest
from verbatim.serve.service import Client, Service
from verbatim.serve.settings import ServeSettings
from verbatim.serve.training import training_routes

log = logging.getLogger("verbatim.serve")
PAGE = Path(__file__).with_name("page") / "index.html"
_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "An unknown field or an invalid value; the message names it."},
    401: {"description": "No API key, or an invalid one."},
    403: {"description": "The server does not allow it."},
    404: {"description": "The model is not the served one."},
    408: {"description": "The body took too long to arrive."},
    415: {"description": "The content type is not JSON."},
    413: {"description": "The body is too long."},
    429: {"description": "Too many requests; Retry-After says when to retry."},
    503: {"description": "The server is shutting down, or the model failed."},
}


def make_app(llm: LLM, settings: ServeSettings | None = None) -> FastAPI:
    """Build the application for one engine. `app.state.service` is its `Service`.

    Raises:
        NotSupported: an engine that several ranks of the caller drive together.
        InvalidRequest: the model's generation_config.json has invalid sampling defaults for chats.
    """
    settings = settings or ServeSettings()
    service = Service(llm, settings)
    app = FastAPI(
        title="Verbatim",
        version=__version__,
        description="Text generation: the same tokens everywhere.",
        docs_url="/docs" if settings.docs else None,
        redoc_url=None,
        openapi_url="/openapi.json" if settings.docs else None,
    )
    app.router.route_class = BodyRoute
    app.state.service = service
    app.add_middleware(Guard, service=service)
    if settings.cors_origins:  # outside the guard: a browser's preflight has no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            # Packages for web pages add their own, such as OpenAI's X-Stainless-Lang.
            allow_headers=["*"],
        )
    # FastAPI's own errors; `Guard` answers all others.
    app.add_exception_handler(RequestValidationError, _refuse)
    app.add_exception_handler(HTTPException, _refuse)
    _add_posts(app, service)
    _add_models(app, service)
    _add_operations(app, service)
    if settings.training:
        app.include_router(training_routes(service))
    return app


def _add_posts(app: FastAPI, service: Service) -> None:
    """Add the endpoints that take a body."""
    for tag, path, handler in (
        ("OpenAI", "/v1/completions", CompletionRequest),
        ("OpenAI", "/v1/chat/completions", ChatRequest),
        ("OpenAI", "/v1/responses", ResponsesRequest),
        ("Anthropic", "/v1/messages", MessagesRequest),
        ("Anthropic", "/v1/messages/count_tokens", count_tokens),
        ("Verbatim", "/v1/generate", GenerateRequest),
        ("Verbatim", "/v1/logprobs", ScoreRequest),
        ("Verbatim", "/tokenize", tokenize),
        ("Verbatim", "/detokenize", detokenize),
        ("Operations", "/v1/load_lora_adapter", load_adapter),
        ("Operations", "/v1/unload_lora_adapter", unload_adapter),
    ):
        endpoint = _endpoint(service, handler)
        endpoint.__name__ = path.strip("/").replace("/", "_")
        app.post(path, description=model_of(handler).__doc__, responses=_ERRORS, tags=[tag])(
            endpoint
        )


def _endpoint(service: Service, handler: Any) -> Callable[..., Any]:
    """Return the endpoint for `handler`: a request class, or a coroutine function that returns the answer."""

    async def endpoint(http: Request, body: Any) -> Response:
        if not isinstance(handler, type):
            return json_response(http, partial(handler, service, body))
        address = "" if http.client is None else http.client.host
        client = Client(str(getattr(http.state, "key", "")), address)
        request: Any = handler(service, body)
        if getattr(body, "stream", None):
            return event_response(http, request.events(client), done=request.ends_with_done)
        return json_response(http, partial(request.answer, client))

    endpoint.__annotations__["body"] = model_of(handler)
    return endpoint


def _add_models(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models", tags=["OpenAI"])
    async def list_models() -> Response:
        return Json({"object": "list", "data": service.models()})

    @app.get("/v1/models/{model:path}", responses={404: _ERRORS[404]}, tags=["OpenAI"])
    async def retrieve_model(model: str) -> Response:
        name = service.check_model(model) or service.name
        return Json(next(entry for entry in service.models() if entry["id"] == name))


def _add_operations(app: FastAPI, service: Service) -> None:
    @app.head("/health", include_in_schema=False)
    @app.get("/health", tags=["Operations"])
    async def health() -> Response:
        """Liveness: the process responds and its engine is open."""
        if service.llm.engine.closed:
            raise Refusal(503, "the engine is closed")
        return Json({"status": "ok"})

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready", tags=["Operations"])
    async def ready() -> Response:
        """Readiness: new generations are accepted."""
        if service.draining:
            raise Refusal(503, "the server is shutting down")
        await health()
        return Json({"status": "ready"})

    @app.get("/metrics", tags=["Operations"])
    async def metrics() -> Response:
        """Metrics in Prometheus' text format."""
        text = service.metrics.text(await service.stats())
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/engine", tags=["Operations"])
    async def engine() -> Response:
        """Model information, placement of the layers, and current state."""
        stats = await service.stats()
        info = await service.info() | {"model": service.name}
        state = {"stats": stats, "under_way": service.num_in_progress}
        return Json(to_plain({"info": info, "places": places_of(info)} | state))

    if service.settings.playground:

        @app.get("/", include_in_schema=False)
        async def playground() -> Response:
            return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers=_PAGE_HEADERS)


# No external resources, and no framing.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


async def _refuse(_: Request, error: Exception) -> Response:
    """Return an error in OpenAI's format."""
    if isinstance(error, RequestValidationError):
        return refusal_of_body(error.errors(), skip=1).response()
    return refusal_of(error).response()


def places_of(info: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tiers or stages that hold a model's layers, from `LLM.info`.

    Returns:
        For each its `name`, `weight_bytes` (including embedding and head), and `layers`: the fraction of
        each layer's weights there, 0 to 1.
    """
    places: list[tuple[str, int, list[float]]] = []
    if "unit_tiers" in info:
        units: Mapping[str, Mapping[str, int]] = info["unit_tiers"]
        layers = [sizes for name, sizes in units.items() if name.rpartition(".")[2].isdigit()]
        for tier in ("gpu", "cpu", "disk"):
            if nbytes := sum(sizes.get(tier, 0) for sizes in units.values()):
                shares = [sizes.get(tier, 0) / (sum(sizes.values()) or 1) for sizes in layers]
                places.append((tier, nbytes, shares))
    elif "stages" in info:
        for number, stage in enumerate(info["stages"]):
            first, end = stage["layers"]
            shares = [float(first <= layer < end) for layer in range(info["layers"])]
            name = f"stage {number} on {stage['machine']}"
            places.append((name, stage["weight_bytes"], shares))
    else:
        places.append(("memory", info["weight_bytes"], [1.0] * info["layers"]))
    return [
        {"name": name, "weight_bytes": nbytes, "layers": shares} for name, nbytes, shares in places
    ]
