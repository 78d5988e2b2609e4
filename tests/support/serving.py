"""Servers on a free port, in a thread of this process or in a separate process."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import socket
import subprocess
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from support.programs import PATIENCE_S, VERBATIM, started
from support.programs import until as until
from support.tool_templates import tokenizer
from support.toys import make_toy
from verbatim import LLM
from verbatim.serve.app import make_app
from verbatim.serve.server import Server, listen, uvicorn_config
from verbatim.serve.service import Service
from verbatim.serve.settings import ServeSettings


class Client(httpx.Client):
    """A client with a long timeout that adds the model's name to requests that need it."""

    model = "storyteller"

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"timeout": PATIENCE_S} | settings)

    def build_request(self, method: str, url: Any, **rest: Any) -> httpx.Request:
        body, path = rest.get("json"), str(url)
        if isinstance(body, dict) and path.startswith("/v1/") and path not in NAMELESS:
            rest["json"] = {"model": self.model} | body
        return super().build_request(method, url, **rest)


Loop = asyncio.AbstractEventLoop
LORA = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
NAMELESS = ("/v1/generate", "/v1/logprobs", *LORA)


class QuickServer(Server):
    """A server that polls its connections and exit flag five times as often, so that tests wait less."""

    async def main_loop(self) -> None:
        counter = 0
        while not await self.on_tick(counter):
            counter += 1
            await asyncio.sleep(0.02)


class Served:
    """A running server, its engine and a client."""

    def __init__(self, llm: LLM, service: Service, port: int, loop: Loop, server: Server) -> None:
        self.llm, self.service, self.port, self.loop = llm, service, port, loop
        self._server = server
        self.url = f"http://127.0.0.1:{port}"
        self.client = Client(base_url=self.url)
        self.client.model = service.name

    def post(self, path: str, **body: Any) -> Any:
        """POST a body, check that it is served, and return the response."""
        answer = self.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refused(self, path: str, body: Any, status: int = 400) -> dict[str, Any]:
        """POST a body, check that it is refused with `status`, and return the error."""
        answer = self.client.post(path, json=body)
        assert answer.status_code == status, (answer.status_code, answer.text)
        error: dict[str, Any] = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    def stream(self, path: str, **body: Any) -> list[Any]:
        """Return the data of all events; `[DONE]` as text."""
        with self.client.stream("POST", path, json=body | {"stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            return [_data(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]

    def until_idle(self) -> None:
        """Wait until no request runs or waits, and no block is in use."""

        def is_idle() -> bool:
            stats = self.llm.stats()
            busy = stats["running"] + stats["waiting"] + stats["blocks_used"]
            return not busy and not self.service.num_in_progress

        until(is_idle)

    def num_tasks(self) -> int:
        """Return the number of tasks in the server's event loop, without the one that counts."""

        async def count() -> int:
            return len(asyncio.all_tasks()) - 1

        return asyncio.run_coroutine_threadsafe(count(), self.loop).result(PATIENCE_S)

    def connect(self, address: str = "127.0.0.1") -> socket.socket:
        """Open a raw socket to the server, from an address of this machine."""
        return socket.create_connection(("127.0.0.1", self.port), PATIENCE_S, (address, 0))

    def num_connections(self) -> int:
        """Return the number of open connections, also of those without a request."""
        return len(self._server.server_state.connections)


def _data(text: str) -> Any:
    return text if text == "[DONE]" else json.loads(text)


@contextmanager
def serving(llm: LLM, settings: ServeSettings | None = None) -> Iterator[Served]:
    """Run a server over an engine during a block."""
    changes: dict[str, Any] = dict(log_level="critical", drain_timeout_s=5)
    settings = dataclasses.replace(settings or ServeSettings(), **changes)
    app, listener = make_app(llm, settings), listen("127.0.0.1", 0)
    config = uvicorn_config(app, settings)
    server = QuickServer(config, app.state.service, lambda text: None, "")
    loops: list[Loop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve(sockets=[listener])

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    until(lambda: server.started)
    served = Served(llm, app.state.service, listener.getsockname()[1], loops[0], server)
    try:
        yield served
    finally:
        served.client.close()
        server.should_exit = True
        thread.join(PATIENCE_S)
        listener.close()
        assert not thread.is_alive()


@contextmanager
def talking(template: str, *, settings: Any = None, **tokens: bool) -> Iterator[Served]:
    """Run a server over a random model with a chat template; `tokens` as in `tokenizer`."""
    # A toy has flat logits, so that a marker is not too unlikely and no token is certain.
    hf = tokenizer(template, **tokens)
    sizes = dict(vocab_size=max(264, len(hf)), max_position_embeddings=4096)
    module = make_toy("llama", eos_token_id=1, bos_token_id=0, **sizes)
    with LLM(module, tokenizer=hf, max_length=4096) as llm, serving(llm, settings) as server:
        yield server


def routes_of(routes: Iterable[Any]) -> Iterator[Any]:
    """Yield all routes, including those of included routers and mounted applications."""
    for route in routes:
        inner = getattr(getattr(route, "original_router", route), "routes", None)
        yield from [route] if inner is None else routes_of(inner)


def request_of(body: Any, path: str = "/v1/completions", **headers: str) -> bytes:
    """Return the bytes of an HTTP request, for a raw socket; `body` is bytes or a dict."""
    is_raw = isinstance(body, bytes)
    content = body if is_raw else json.dumps({"model": Client.model} | body).encode()
    fields = {"Host": "localhost", "Content-Type": "application/json"} | headers
    fields |= {"Content-Length": str(len(content))}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode() + content


def received(link: socket.socket) -> bytes:
    """Return all bytes of a connection until the server closes it."""
    found = b""
    while more := link.recv(65536):
        found += more
    return found


@contextmanager
def running(
    *args: str, line: list[str] | None = None, **env: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `verbatim serve` with `args`, or a whole command line; yield the process and its address."""
    line = line or [*VERBATIM, "serve", "--log-level", "warning", "--port", "0", *args]
    with started(line, stderr=subprocess.PIPE, text=True, env=os.environ | env) as process:
        yield process, wait_for_line(process, r"serving \S+ at (http://\S+) ")[1]


def wait_for_line(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    """Wait for a line on a process's stderr that matches `pattern`."""
    assert process.stderr is not None
    lines = []
    while line := process.stderr.readline():
        lines.append(line)
        if found := re.match(pattern, line):
            return found
    raise AssertionError("".join(lines))
