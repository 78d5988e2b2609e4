"""Loading and unloading of LoRA adapters over HTTP, with vLLM's paths and fields."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from pydantic import Field

from verbatim.errors import InvalidRequest, ModelError, NotSupported
from verbatim.serve.errors import Refusal
from verbatim.serve.fields import Strict, Switch
from verbatim.serve.service import Client, Service


class LoadAdapter(Strict):
    """A LoRA adapter to load, from a folder inside of --adapter-root; needs an API key."""

    lora_name: str = Field(min_length=1, max_length=256, examples=["law"])
    lora_path: str = Field(
        min_length=1,
        max_length=4096,
        description="Its folder: inside of --adapter-root, or relative to it.",
        examples=["law-v2"],
    )
    load_inplace: Switch = Field(
        None, description="Take the place of an adapter of this name, for later requests."
    )


class UnloadAdapter(Strict):
    """A LoRA adapter to unload; running requests finish with it. Needs an API key."""

    lora_name: str = Field(min_length=1, max_length=256, examples=["law"])
    lora_int_id: int | None = Field(None, description="Has no effect.")


async def load_adapter(service: Service, body: LoadAdapter, _: Client) -> dict[str, Any]:
    """Load an adapter between two steps of the engine."""
    root = _root(service)
    if body.lora_name == service.name:
        raise InvalidRequest(f"lora_name={body.lora_name!r} is the name of the model")
    try:
        folder = (root / body.lora_path).resolve()
    except (OSError, ValueError):  # a loop of links, a null byte
        folder = Path("/")
    if not folder.is_relative_to(root):
        raise Refusal(
            403, f"lora_path={body.lora_path!r}: not inside of the server's --adapter-root"
        )
    try:
        await asyncio.to_thread(
            service.llm.load_adapter, body.lora_name, folder, replace=bool(body.load_inplace)
        )
    except (ModelError, NotSupported) as error:
        message = str(error).replace(str(folder), body.lora_path)  # not the server's own path
        raise InvalidRequest(f"lora_path: {message}") from None
    return {"status": "ok", "lora_name": body.lora_name}


async def unload_adapter(service: Service, body: UnloadAdapter, _: Client) -> dict[str, Any]:
    """Unload an adapter; running requests finish with it."""
    _root(service)
    await asyncio.to_thread(service.llm.unload_adapter, body.lora_name)
    return {"status": "ok", "lora_name": body.lora_name}


def _root(service: Service) -> Path:
    """Return the folder that adapters may be in; refuse where clients may not load any."""
    settings = service.settings
    if settings.adapter_root is None or not settings.api_keys:
        raise Refusal(
            403, "adapters are loaded only by a server with --adapter-root and an API key"
        )
    return Path(settings.adapter_root).resolve()
