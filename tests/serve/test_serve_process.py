"""`verbatim serve` as a process: how it begins, drains, ends, and what its clients see of that."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import threading
import time
from typing import Any

import httpx
import pytest

from support.programs import VERBATIM
from support.serving import command, running

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
        self._thread = threading.Thread(target=self._read, args=(url, LONG | change))
        self._thread.start()
        assert self.begun.wait(30)

    def _read(self, url: str, body: dict[str, Any]) -> None:
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as stream:
                for line in stream.iter_lines():
                    self.lines.append(line)
                    self.begun.set()
        except httpx.HTTPError as error:
            self.error = error
        self.begun.set()

    def end(self) -> list[str]:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return [line for line in self.lines if line]


def ended(process: subprocess.Popen[str], within_s: float = 30) -> tuple[int, str]:
    _, told = process.communicate(timeout=within_s)
    return process.returncode, told


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_a_signal_lets_what_runs_come_to_its_end(number):
    with running() as (process, url):
        reader = Reader(url)
        process.send_signal(number)
        time.sleep(0.3)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
        lines = reader.end()
        assert reader.error is None
        assert lines[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in lines[-2]
        code, told = ended(process)
    assert code == 0
    assert "1 requests run to their end" in told
    assert "Traceback" not in told


def test_a_second_signal_ends_it_at_once():
    with running() as (process, url):
        readers = [Reader(url, seed=seed, n=8) for seed in range(4)]
        whole: list[httpx.Response] = []
        body = LONG | {"stream": False, "n": 8}
        asks = threading.Thread(
            target=lambda: whole.append(httpx.post(f"{url}/v1/completions", json=body, timeout=60))
        )
        asks.start()
        while httpx.get(f"{url}/v1/engine").json()["under_way"] < 5:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        code, told = ended(process)
        assert time.monotonic() - begun < 10
        for reader in readers:
            assert "data: [DONE]" not in reader.end()
        asks.join()
    assert whole[0].status_code == 503
    assert whole[0].json()["error"]["message"] == "the server has ended"
    assert code == 0
    assert "ending now" in told
    assert "Traceback" not in told


def test_the_drain_has_an_end():
    with running("--drain-timeout-s", "1") as (process, url):
        readers = [Reader(url, seed=seed, n=8) for seed in range(8)]
        process.send_signal(signal.SIGTERM)
        code, told = ended(process)
        for reader in readers:
            assert "data: [DONE]" not in reader.end()
    assert code == 0
    assert "Traceback" not in told


@pytest.mark.parametrize("redirection", ["> /dev/full", "> >(true)"])
def test_a_log_that_can_not_be_written_costs_nothing(redirection):
    line = ["bash", "-c", f'exec "$@" {redirection}', "bash", *VERBATIM, "serve", "--port", "0"]
    with running(line=line) as (process, url):
        time.sleep(0.2)  # the reader of the pipe is gone
        for _ in range(3):
            assert httpx.get(f"{url}/v1/models").status_code == 200
        process.send_signal(signal.SIGTERM)
        code, told = ended(process)
    assert code == 0
    assert "Logging error" not in told
    assert "Traceback" not in told


def test_log_lines_begin_with_the_time(tmp_path):
    log = tmp_path / "log"
    line = ["bash", "-c", f'exec "$@" > {log}', "bash", *VERBATIM, "serve", "--port", "0"]
    with running(line=line) as (process, url):
        assert httpx.get(f"{url}/v1/models").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert ended(process)[0] == 0
    lines = log.read_text().splitlines()
    assert any("GET /v1/models" in line for line in lines)
    time_of_day = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ")
    assert all(map(time_of_day.match, lines)), lines


def test_a_kill_is_a_connection_error_to_clients():
    with running() as (process, url):
        reader = Reader(url)
        process.kill()
        reader.end()
        assert isinstance(reader.error, httpx.TransportError)
        process.wait()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")


def test_a_key_from_the_environment_and_one_from_a_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# ours\nkey-in-a-file\n\n")
    with running("--api-key-file", str(file), VERBATIM_API_KEY="key-of-the-shell") as (_, url):
        for key, status in [("key-in-a-file", 200), ("key-of-the-shell", 200), ("# ours", 401)]:
            answer = httpx.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == status


def test_what_can_not_be_served_is_one_line_and_a_status(tmp_path):
    empty = tmp_path / "keys"
    empty.write_text("# none\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        cases = [
            (["--port", port], 1, f"can't listen at 127.0.0.1:{port}"),
            (["--host", "0.0.0.0"], 2, "--no-api-key"),
            (["--host", "203.0.113.1", "--no-api-key"], 1, "can't listen"),
            (["--log-level", "loud"], 2, "--log-level"),
            (["--port", "70000"], 2, "65535"),
            (["--max-requests", "0"], 1, "max_requests=0"),
            (["--api-key-file", "/nowhere"], None, "/nowhere"),
            (["--api-key-file", str(empty)], 2, "no key"),
            (["--cors-origin", "*"], 1, "origin"),
            (["/no/such/model"], 1, "/no/such/model"),
        ]
        for args, status, said in cases:
            done = subprocess.run(command(*args), capture_output=True, text=True, timeout=20)
            assert said in done.stderr, (args, done.stderr)
            assert status is None or done.returncode == status, (args, done.stderr)
            assert done.returncode != 0
            assert "Traceback" not in done.stderr
            assert done.stdout == ""
