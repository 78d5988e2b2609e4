"""`verbatim serve` as a process: how it begins, drains, ends, and what its clients see of that."""

from __future__ import annotations

import signal
import subprocess
import threading
from functools import partial
from typing import Any

import httpx
import pytest

from support.programs import PATIENCE_S, VERBATIM, in_thread, until
from support.serving import running, said

pytestmark = pytest.mark.slow
LONG = {
    "model": "storyteller",
    "prompt": "x",
    "max_tokens": 1800,
    "ignore_eos": True,
    "stream": True,
}


class Reader:
    """A stream that a thread reads to its end."""

    def __init__(self, url: str, **change: Any) -> None:
        self.lines: list[str] = []
        self.error: Exception | None = None
        self.begun = threading.Event()
        self._read_all = in_thread(self._read, url, LONG | change)
        assert self.begun.wait(PATIENCE_S)

    def _read(self, url: str, body: dict[str, Any]) -> None:
        try:
            url = f"{url}/v1/completions"
            with httpx.stream("POST", url, json=body, timeout=PATIENCE_S) as stream:
                for line in stream.iter_lines():
                    self.lines.append(line)
                    self.begun.set()
        except httpx.HTTPError as error:
            self.error = error
        self.begun.set()

    def end(self) -> list[str]:
        self._read_all.result()
        return [line for line in self.lines if line]


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, told = process.communicate()
    return process.returncode, told


get = partial(httpx.get, timeout=PATIENCE_S)


def refuses_connections(url: str) -> bool:
    try:
        get(f"{url}/health")
    except httpx.ConnectError:
        return True
    except httpx.HTTPError:  # the server closes its listener meanwhile
        pass
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_a_signal_lets_what_runs_come_to_its_end(number):
    with running() as (process, url):
        reader = Reader(url, n=4)
        process.send_signal(number)
        said(process, "shutting down; waiting for 1 requests")
        until(lambda: refuses_connections(url))
        lines = reader.end()
        assert reader.error is None
        assert lines[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in lines[-2]
        code, told = ended(process)
    assert code == 0
    assert "Traceback" not in told


def test_a_second_signal_ends_it_at_once():
    with running() as (process, url):
        # Many choices take minutes, so that none ends between the two signals.
        readers = [Reader(url, seed=seed, n=64) for seed in range(4)]
        body = LONG | {"stream": False, "n": 64}
        post = partial(httpx.post, json=body, timeout=PATIENCE_S)
        whole = in_thread(post, f"{url}/v1/completions")
        until(lambda: get(f"{url}/v1/engine").json()["under_way"] == 5)
        process.send_signal(signal.SIGTERM)
        said(process, "shutting down; waiting for 5 requests")
        process.send_signal(signal.SIGTERM)
        code, told = ended(process)
        for reader in readers:
            assert "data: [DONE]" not in reader.end()
        answer = whole.result()
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "the server has ended"
    assert code == 0
    assert "ending now" in told
    assert "Traceback" not in told


def test_the_drain_has_an_end():
    with running("--drain-timeout-s", "1") as (process, url):
        reader = Reader(url, n=64)
        process.send_signal(signal.SIGTERM)
        code, told = ended(process)
        assert "data: [DONE]" not in reader.end()
    assert code == 0
    assert "Traceback" not in told


@pytest.mark.parametrize("redirection", ["> /dev/full", "> >(true)"])
def test_a_log_that_can_not_be_written_costs_nothing(redirection):
    line = ["bash", "-c", f'exec "$@" {redirection}', "bash", *VERBATIM, "serve", "--port", "0"]
    with running(line=line) as (process, url):
        for _ in range(3):
            assert get(f"{url}/v1/models").status_code == 200
        process.send_signal(signal.SIGTERM)
        code, told = ended(process)
    assert code == 0
    assert "Logging error" not in told
    assert "Traceback" not in told
