"""`verbatim serve` as a process: startup, draining, shutdown, and what its clients receive."""

from __future__ import annotations

import signal
import subprocess
import threading
from functools import partial
from typing import Any

import httpx
import pytest

from support.programs import PATIENCE_S, VERBATIM, in_thread, until
from support.serving import running, wait_for_line

pytestmark = pytest.mark.slow
LONG = dict(model="storyteller", prompt="x", max_tokens=1800, ignore_eos=True, stream=True)


class Reader:
    """A stream that is read to its end in a thread."""

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
    _, stderr = process.communicate()
    return process.returncode, stderr


get = partial(httpx.get, timeout=PATIENCE_S)


def refuses_connections(url: str) -> bool:
    try:
        get(f"{url}/health")
    except httpx.ConnectError:
        return True
    except httpx.HTTPError:  # the server is closing its listener
        pass
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_signal_drains_running_requests(number):
    with running() as (process, url):
        reader = Reader(url, n=4)
        process.send_signal(number)
        wait_for_line(process, "shutting down; waiting for 1 requests")
        until(lambda: refuses_connections(url))
        lines = reader.end()
        assert reader.error is None
        assert lines[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in lines[-2]
        code, stderr = ended(process)
    assert code == 0
    assert "Traceback" not in stderr


def test_second_signal_ends_server_at_once():
    with running() as (process, url):
        # With so many choices none ends between the two signals.
        readers = [Reader(url, seed=seed, n=64) for seed in range(4)]
        body = LONG | {"stream": False, "n": 64}
        post = partial(httpx.post, json=body, timeout=PATIENCE_S)
        whole = in_thread(post, f"{url}/v1/completions")
        until(lambda: get(f"{url}/v1/engine").json()["under_way"] == 5)
        process.send_signal(signal.SIGTERM)
        wait_for_line(process, "shutting down; waiting for 5 requests")
        process.send_signal(signal.SIGTERM)
        code, stderr = ended(process)
        for reader in readers:
            assert "data: [DONE]" not in reader.end()
        answer = whole.result()
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "the server has ended"
    assert code == 0
    assert "ending now" in stderr
    assert "Traceback" not in stderr


def test_drain_ends_at_its_timeout():
    with running("--drain-timeout-s", "1") as (process, url):
        reader = Reader(url, n=64)
        process.send_signal(signal.SIGTERM)
        code, stderr = ended(process)
        assert "data: [DONE]" not in reader.end()
    assert code == 0
    assert "Traceback" not in stderr


@pytest.mark.parametrize("redirection", ["> /dev/full", "> >(true)"])
def test_unwritable_log_does_not_affect_server(redirection):
    line = ["bash", "-c", f'exec "$@" {redirection}', "bash", *VERBATIM, "serve", "--port", "0"]
    with running(line=line) as (process, url):
        for _ in range(3):
            assert get(f"{url}/v1/models").status_code == 200
        process.send_signal(signal.SIGTERM)
        code, stderr = ended(process)
    assert code == 0
    assert "Logging error" not in stderr
    assert "Traceback" not in stderr
