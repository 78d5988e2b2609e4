"""`verbatim serve` as a process: how it begins, drains, ends, and what its clients see of that."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import threading
from functools import partial
from typing import Any

import httpx
import pytest

from support.programs import PATIENCE_S, VERBATIM, in_thread, until
from support.serving import command, running, said

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


def test_log_lines_begin_with_the_time(tmp_path):
    log = tmp_path / "log"
    line = ["bash", "-c", f'exec "$@" > {log}', "bash", *VERBATIM, "serve", "--port", "0"]
    with running(line=line) as (process, url):
        assert get(f"{url}/v1/models").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert ended(process)[0] == 0
    lines = log.read_text().splitlines()
    assert any("GET /v1/models" in line for line in lines)
    time_of_day = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ")
    assert all(map(time_of_day.match, lines)), lines


def test_a_key_from_the_environment_and_one_from_a_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# ours\nkey-in-a-file\n\n")
    with running("--api-key-file", str(file), VERBATIM_API_KEY="key-of-the-shell") as (_, url):
        for key, status in [("key-in-a-file", 200), ("key-of-the-shell", 200), ("# ours", 401)]:
            answer = get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == status


def test_what_can_not_be_served_is_one_line_and_a_status(tmp_path):
    empty = tmp_path / "keys"
    empty.write_text("# none\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        cases = [
            (["--port", port], 1, f"can't listen at 127.0.0.1:{port}"),
            (["--host", "0.0.0.0"], 2, "--no-api-key"),
            (["--host", "[203.0.113.1]", "--no-api-key"], 1, "can't listen at 203.0.113.1:"),
            (["--host", "a..b", "--no-api-key"], 1, "can't listen at a..b:8000: not a host name"),
            (["--log-level", "loud"], 2, "--log-level"),
            (["--port", "70000"], 2, "65535"),
            (["--max-requests", "0"], 1, "max_requests=0"),
            (["--api-key-file", "/nowhere"], None, "/nowhere"),
            (["--api-key-file", str(empty)], 2, "no key"),
            (["--cors-origin", "*"], 1, "origin"),
            (["/no/such/model"], 1, "/no/such/model"),
        ]
        for args, status, said in cases:
            done = subprocess.run(command(*args), capture_output=True, text=True)
            assert said in done.stderr, (args, done.stderr)
            assert status is None or done.returncode == status, (args, done.stderr)
            assert done.returncode != 0
            assert "Traceback" not in done.stderr
            assert done.stdout == ""
