"""The overhead of serving, and a server under the load of many clients at once.

    python benchmarks/serve.py --overhead [--layers 28] [--rounds 3]
    python benchmarks/serve.py --load [--streams 200] [--seconds 60]
    python benchmarks/serve.py --bombs [--streams 8]

`--overhead`: 32 streams over HTTP and the same 32 requests in process take turns, on Qwen3-0.6B's shape
with random weights; tokens/s and time to the first token, medians over the rounds. The client is another
process, which shares the machine's cores with the server: its own time counts as overhead.

`--load`: `--streams` streams at once of the storyteller, from another process. A tenth of the clients
disconnect in the middle, and invalid bodies are sent in between. The server's resources afterwards are
compared with those before, and 200 answers with their solo runs.

`--bombs`: the time between tokens of one stream of the storyteller, idle and while the hundred structures of
`tests/support/bombs.py` are requested by the same process, `--streams` of them at once.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import multiprocessing
import os
import random
import resource
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

PROMPTS = [
    "Once upon a time",
    "The dragon",
    "Lily and Ben",
    "In the middle of the forest",
    "One day",
]
MODEL = b'{"model": "storyteller", '
BROKEN = [
    b"{", b"[]", b"\xff", b"", b"[" * 5000, b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    b'{"prompt": 5}', b'{"prompt": []}', b'{"prompt": "x", "nope": 1}', b'{"prompt": "x", "n": 100000}',
    b'{"prompt": "x", "max_tokens": 1e400}', b'{"prompt": "x", "temperature": -1}',
    b'{"prompt": "x", "grammar": "start: ("}', b'{"prompt": "x", "regex": "(", "stream": true}',
    b'{"prompt": "x", "json_schema": {"type": "no"}}', b'{"prompt": [1, 99999999]}',
    b'{"prompt": "\\ud800", "stop": ["\\udfff"], "logit_bias": {"x": 1}}',
]  # fmt: skip
BROKEN = [body.replace(b"{", MODEL, body.startswith(b'{"')) for body in BROKEN]


class Findings:
    """Results of a load: answers by status, whole texts by request, times between pieces."""

    def __init__(self) -> None:
        self.statuses: dict[int, int] = {}
        self.texts: dict[tuple[str, int, int], str] = {}
        self.gaps: list[float] = []
        self.first: list[float] = []
        self.left = 0

    def count(self, status: int) -> None:
        self.statuses[status] = self.statuses.get(status, 0) + 1


class ClientRequest(asyncio.Protocol):
    """One request over its own connection. Data is parsed only at the end, so that clients keep up.

    Args:
        path: path of the endpoint.
        disconnects_after: number of pieces after which the client disconnects; None: it stays to the end.
    """

    def __init__(self, path: str, body: bytes, disconnects_after: int | None = None) -> None:
        self._path, self._body = path, body
        self._disconnects_after = disconnects_after
        self.begun = time.monotonic()
        self.ended = asyncio.get_running_loop().create_future()
        self.received: list[tuple[float, bytes]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        head = (
            f"POST {self._path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(self._body)}\r\n\r\n"
        )
        transport.write(head.encode() + self._body)

    def data_received(self, data: bytes) -> None:
        self.received.append((time.monotonic(), data))
        if self._disconnects_after is not None and len(self.received) > self._disconnects_after:
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.ended.set_result(error)

    @property
    def status(self) -> int:
        return int(self.received[0][1].split(b" ", 2)[1])

    def body(self) -> bytes:
        """Return the body of the chunked answer."""
        rest = b"".join(data for _, data in self.received).partition(b"\r\n\r\n")[2]
        parts = []
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            parts.append(rest[: int(size, 16)])
            rest = rest[int(size, 16) + 2 :]
        return b"".join(parts)

    def text(self) -> str:
        """Return the joined text of the stream."""
        lines = self.body().decode().splitlines()
        assert lines[-2] == "data: [DONE]", lines[-4:]
        pieces = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        return "".join(piece["choices"][0]["text"] for piece in pieces)

    def times(self) -> list[float]:
        """Return the arrival time of each token."""
        arrivals, tail, mark = list[float](), b"", b"data: {"
        for moment, data in self.received:
            seen = tail + data
            arrivals += [moment] * seen.count(mark)
            tail = seen[-len(mark) + 1 :]  # a mark may be split
        return arrivals


async def send_request(
    url: str, path: str, body: bytes, disconnects_after: int | None = None, *, within_s: float = 60
) -> ClientRequest:
    """Send a request; return it when it is answered, or when the client has disconnected.

    Raises:
        ConnectionError: the connection failed, or there was no answer.
    """
    host, _, port = url.removeprefix("http://").partition(":")
    _, request = await asyncio.get_running_loop().create_connection(
        lambda: ClientRequest(path, body, disconnects_after), host, int(port)
    )
    async with asyncio.timeout(within_s):
        error = await request.ended
    if error is not None or not request.received:
        raise ConnectionError(f"{body!r:.200}: {error}")
    return request


async def load(url: str, streams: int, seconds: float, seed: int = 0) -> Findings:
    """Run `streams` clients, each of which sends requests until the time is over."""
    findings, rng, end = Findings(), random.Random(seed), time.monotonic() + seconds
    completed: list[tuple[tuple[str, int, int], ClientRequest]] = []

    async def ask(body: bytes, disconnects_after: int | None = None) -> ClientRequest:
        request = await send_request(url, "/v1/completions", body, disconnects_after)
        findings.count(request.status)
        return request

    async def run_client() -> None:
        while time.monotonic() < end:
            if rng.random() < 0.1:
                await ask(rng.choice(BROKEN))
            case = (rng.choice(PROMPTS), rng.randrange(40), rng.randrange(8, 65))
            body = dict(zip(("prompt", "seed", "max_tokens"), case, strict=True)) | {
                "model": "storyteller",
                "stream": True,
            }
            disconnects_after = rng.randrange(8) if rng.random() < 0.1 else None
            request = await ask(json.dumps(body).encode(), disconnects_after)
            if disconnects_after is None:
                completed.append((case, request))
            else:
                findings.left += 1

    await asyncio.gather(*(run_client() for _ in range(streams)))
    for case, request in completed:
        assert request.status == 200, request.received
        text, times = request.text(), request.times()
        assert findings.texts.setdefault(case, text) == text, case
        findings.first.append(times[0] - request.begun)
        findings.gaps += [b - a for a, b in itertools.pairwise(times)]
    return findings


def _load(url: str, jobs: Any, answers: Any) -> None:
    while (job := jobs.get()) is not None:
        try:
            answers.put(asyncio.run(load(url, *job)))
        except BaseException as error:
            answers.put(RuntimeError(f"a client failed: {error!r}"))
            raise


def held(server: Any) -> dict[str, int]:
    """Return this process's resources once the server is idle: MB, tasks, file descriptors, threads."""
    server.until_idle()
    end = time.monotonic() + 10
    while server.num_connections() and time.monotonic() < end:
        time.sleep(0.02)
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "MB": pages * resource.getpagesize() >> 20,
        "tasks": server.num_tasks(),
        "connections": server.num_connections(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "blocks": server.llm.stats()["blocks_used"],
    }


def run_load(streams: int, seconds: float) -> None:
    from support.serving import serving
    from verbatim import LLM, SamplingParams
    from verbatim.serve.server import frozen_heap

    context = multiprocessing.get_context("spawn")
    with LLM() as llm, serving(llm) as server, frozen_heap():
        jobs, answers = context.Queue(), context.Queue()
        client = context.Process(daemon=True, target=_load, args=(server.url, jobs, answers))
        client.start()

        def run_job(*job: Any) -> Findings:
            jobs.put(job)
            findings = answers.get(timeout=seconds + 60)
            if isinstance(findings, Exception):
                raise findings
            return findings

        run_job(streams, min(10.0, seconds), 1)  # warms up
        before, steps = held(server), llm.stats()["forwards"]
        findings = run_job(streams, seconds)
        after, steps = held(server), llm.stats()["forwards"] - steps
        jobs.put(None)
        client.join()
        sample = random.Random(1).sample(sorted(findings.texts), min(200, len(findings.texts)))
        wrong = 0
        for prompt, seed, length in sample:
            params = SamplingParams(seed=seed, max_tokens=length)
            (result,) = llm.generate([prompt], params)
            wrong += result.outputs[0].text != findings.texts[prompt, seed, length]
        gaps, first = sorted(findings.gaps), sorted(findings.first)
        print(
            f"{streams} streams for {seconds:g} s: answers by status {findings.statuses}, "
            f"{findings.left} clients left in the middle, {len(gaps) + len(first)} pieces, {steps} steps"
        )
        print(f"between tokens: median {1e3 * statistics.median(gaps):.1f} ms, "
              f"p99 {1e3 * gaps[len(gaps) * 99 // 100]:.1f} ms, most {1e3 * gaps[-1]:.0f} ms; "
              f"first token: median {1e3 * statistics.median(first):.0f} ms, "
              f"p99 {1e3 * first[len(first) * 99 // 100]:.0f} ms")  # fmt: skip
        print(f"held before: {before}\nheld after:  {after}")
        print(f"{len(sample)} answers compared with their solo runs: {wrong} differ")
        assert not wrong
        assert set(findings.statuses) == {200, 400}
        assert after["MB"] - before["MB"] < 100
        for what in ("tasks", "connections", "descriptors", "blocks"):
            assert after[what] <= before[what], what


# ---- bombs


async def bombard(url: str, at_once: int) -> tuple[list[float], list[float], dict[int, int]]:
    """Return the times between a client's tokens, idle and beside bombs, and the bombs' answers by status."""
    from support.bombs import bombs

    waiting, statuses = bombs(), Findings()
    body = {
        "model": "storyteller", "prompt": PROMPTS[0], "seed": 3, "max_tokens": 200, "ignore_eos": True,
        "stream": True,
    }  # fmt: skip

    async def gaps(seconds: float) -> list[float]:
        times, end = list[float](), time.monotonic() + seconds
        while time.monotonic() < end and (seconds < 100 or any(not task.done() for task in tasks)):
            request = await send_request(url, "/v1/completions", json.dumps(body).encode())
            times += [b - a for a, b in itertools.pairwise(request.times())]
        return times

    async def send_bombs() -> None:
        while waiting:
            _, fields = waiting.pop()
            parts = [
                '"model": "storyteller", "prompt": "Once", "seed": 1, "max_tokens": 40, "timeout_s": 60'
            ]
            for name, value in fields.items():  # a schema is JSON already
                parts.append(f'"{name}": {value if name == "json_schema" else json.dumps(value)}')
            request = await send_request(
                url, "/v1/completions", f"{{{', '.join(parts)}}}".encode(), within_s=300
            )
            statuses.count(request.status)

    tasks: list[asyncio.Task[None]] = []
    await gaps(1.0)  # warms up
    idle = await gaps(4.0)
    tasks = [asyncio.create_task(send_bombs()) for _ in range(at_once)]
    beside = await gaps(600.0)
    await asyncio.gather(*tasks)
    return idle, beside, statuses.statuses


def _bombard(url: str, at_once: int, answers: Any) -> None:
    answers.put(asyncio.run(bombard(url, at_once)))


def run_bombs(at_once: int) -> None:
    from support.serving import serving
    from verbatim import LLM
    from verbatim.serve.server import frozen_heap

    context = multiprocessing.get_context("spawn")
    with LLM() as llm, serving(llm) as server, frozen_heap():
        answers = context.Queue()
        client = context.Process(daemon=True, target=_bombard, args=(server.url, at_once, answers))
        client.start()
        idle, beside, statuses = answers.get(timeout=900)
        client.join()
        assert server.idle()
    print(f"{at_once} bombs at once: answers by status {statuses}")
    for name, gaps in (("idle", idle), ("beside bombs", beside)):
        cuts = statistics.quantiles(gaps, n=100)
        print(f"{name}: {len(gaps)} tokens, median {1e3 * cuts[49]:.2f} ms, 95th {1e3 * cuts[94]:.2f} ms, "
              f"most {1e3 * max(gaps):.0f} ms")  # fmt: skip


# ---- overhead


async def _ask_all(url: str, prompts: list[list[int]], length: int) -> tuple[float, list[float]]:
    """Return the seconds until all are answered, and until each one's first token."""

    async def one(prompt: list[int]) -> ClientRequest:
        params = {"max_tokens": length, "ignore_eos": True, "temperature": 0.0}
        body = {"prompt": prompt, "stream": True, "params": params}
        return await send_request(url, "/v1/generate", json.dumps(body).encode(), within_s=300)

    begin = time.monotonic()
    answers = await asyncio.gather(*map(one, prompts))
    seconds = time.monotonic() - begin
    for answer in answers:
        assert answer.status == 200, answer.received
        assert len(answer.times()) == length, answer.received
    return seconds, [answer.times()[0] - answer.begun for answer in answers]


def _client(url: str, jobs: Any, answers: Any) -> None:
    while (job := jobs.get()) is not None:
        answers.put(asyncio.run(_ask_all(url, *job)))


def _in_process(llm: Any, prompts: list[list[int]], length: int) -> tuple[float, list[float]]:
    from verbatim import SamplingParams

    params = SamplingParams(max_tokens=length, ignore_eos=True, temperature=0.0)
    begun = time.perf_counter()
    results = llm.generate(prompts, params)
    return time.perf_counter() - begun, [result.metrics.first_token_s for result in results]


def run_overhead(layers: int, rounds: int, streams: int, length: int) -> None:
    import torch
    from decode import WIDTH, make_model

    from support.serving import serving
    from verbatim import LLM

    model = make_model(torch.bfloat16, num_hidden_layers=layers)
    rng = torch.Generator().manual_seed(0)

    def prompts(count: int) -> list[list[int]]:
        return torch.randint(0, 150_000, (count, 16), generator=rng).tolist()

    context = multiprocessing.get_context("spawn")
    with (
        LLM(model, kv_memory="1GB", max_length=2048, prefix_cache=False) as llm,
        serving(llm) as server,
    ):
        jobs, answers = context.Queue(), context.Queue()
        client = context.Process(target=_client, args=(server.url, jobs, answers))
        client.start()

        def over_http(asked: list[list[int]], tokens: int) -> tuple[float, list[float]]:
            jobs.put((asked, tokens))
            result: tuple[float, list[float]] = answers.get(timeout=300)
            return result

        for ask in (over_http, lambda *job: _in_process(llm, *job)):
            ask(prompts(streams), 4)  # warms up
        speeds: tuple[list[float], list[float]] = ([], [])
        waits: tuple[list[float], list[float]] = ([], [])
        for number in range(rounds):
            many, turns = prompts(streams), [0, 1] if number % 2 else [1, 0]
            for which in turns:
                ask = over_http if which else (lambda *job: _in_process(llm, *job))
                seconds, _ = ask(many, length)
                speeds[which].append(streams * length / seconds)
            for one in prompts(5):
                for which in turns:
                    ask = over_http if which else (lambda *job: _in_process(llm, *job))
                    waits[which].extend(ask([one], 2)[1])
        jobs.put(None)
        client.join()
    speed = [statistics.median(each) for each in speeds]
    wait = [1e3 * statistics.median(each) for each in waits]
    ratio = statistics.median(b / a for a, b in zip(*speeds, strict=True))
    print(f"{layers} layers of {WIDTH.get('num_hidden_layers', 28)}, "
          f"{streams} streams of {length} tokens, {rounds} rounds")  # fmt: skip
    print(f"tokens/s: {speed[0]:.1f} in process, {speed[1]:.1f} served, ratio {ratio:.3f}")
    print(f"first token: {wait[0]:.1f} ms in process, {wait[1]:.1f} ms served, "
          f"{wait[1] - wait[0]:.1f} more")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--overhead", action="store_true")
    parser.add_argument("--load", action="store_true")
    parser.add_argument("--bombs", action="store_true")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--streams", type=int, default=None)
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    if args.overhead:
        run_overhead(args.layers, args.rounds, args.streams or 32, args.tokens)
    if args.load:
        run_load(args.streams or 200, args.seconds)
    if args.bombs:
        run_bombs(args.streams or 8)


if __name__ == "__main__":
    main()
