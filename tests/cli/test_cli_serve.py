"""`verbatim serve`: settings and startup errors."""

from __future__ import annotations

import logging
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from verbatim.cli.commands import app
from verbatim.cli.serve import KEYS, _settings
from verbatim.cli.terminal import WrongUsage


def test_api_keys_come_from_environment_and_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nkey-in-a-file\n\n")
    monkeypatch.setenv(KEYS, "key-of-the-shell")
    settings = _settings({"api_key_file": str(file), "host": "0.0.0.0"})
    assert settings.api_keys == ("key-of-the-shell", "key-in-a-file")
    with pytest.raises(WrongUsage, match=r"no_api_key: .*\$VERBATIM_API_KEY"):
        _settings({"no_api_key": True})
    file.write_text("# none\n")
    with pytest.raises(WrongUsage, match="no key"):
        _settings({"api_key_file": str(file)})


@pytest.fixture
def taken() -> Any:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield str(listener.getsockname()[1])


@pytest.mark.parametrize(
    ("args", "status", "said"),
    [
        (["--port", "TAKEN"], 1, "can't listen at 127.0.0.1:TAKEN"),
        (["--host", "0.0.0.0"], 2, "--no-api-key"),
        (["--host", "[203.0.113.1]", "--no-api-key"], 1, "can't listen at 203.0.113.1:"),
        (["--host", "a..b", "--no-api-key"], 1, "can't listen at a..b:8000: not a host name"),
        (["--log-level", "loud"], 2, "log_level='loud': must be one of critical, error,"),
        (["--port", "70000"], 2, "port=70000: must be an integer, 0 to 65535"),
        (["--drain-timeout-s", "-1"], 2, "drain_timeout_s=-1: must be an integer, 0 or more"),
        (["--body-timeout-s", "0"], 2, "body_timeout_s=0.0: must be"),
        (["--request-timeout-s", "0"], 2, "request_timeout_s=0.0: must be"),
        (["--max-requests", "0"], 2, "max_requests=0"),
        (["--api-key-file", "/nowhere"], 1, "/nowhere"),
        (["--cors-origin", "*"], 2, "origin"),
        (["/no/such/model"], 1, "/no/such/model"),
    ],
)
def test_startup_errors_are_one_line_with_exit_status(
    taken: str, monkeypatch: pytest.MonkeyPatch, args: list[str], status: int, said: str
) -> None:
    monkeypatch.delenv(KEYS, raising=False)
    monkeypatch.setattr(logging, "raiseExceptions", True)  # restored afterwards
    monkeypatch.setattr("verbatim.kernels.missing", lambda: False)
    done = CliRunner().invoke(app, ["serve", *(arg.replace("TAKEN", taken) for arg in args)])
    assert (done.exit_code, done.stdout) == (status, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("verbatim: ") and said.replace("TAKEN", taken) in line
