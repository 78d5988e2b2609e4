"""`verbatim cluster`, and the options that place a model in stages on a cluster."""

from __future__ import annotations

import json
import socket
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result as Invoked
from typer.testing import CliRunner

from verbatim.cli import cluster as commands
from verbatim.cli.commands import app
from verbatim.cli.placing import CLUSTER, OFFLOAD, placement_of
from verbatim.cli.terminal import WrongUsage
from verbatim.placement.distributed import ray_hosts
from verbatim.placement.distributed.choice import Cluster
from verbatim.placement.offload.choice import Offload

TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE", "RAY_ADDRESS")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home folder, without a Ray token."""
    for name in TOKENS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Collect the calls of Ray's own command, which does not run."""
    calls: list[tuple[str, ...]] = []

    def ray(*arguments: str) -> str:
        calls.append(arguments)
        return "INFO scripts.py:1 -- Local node IP: 10.9.8.7\n"

    monkeypatch.setattr(commands, "_ray", ray)
    return calls


def run(*arguments: str) -> Invoked:
    return CliRunner().invoke(app, ["cluster", *arguments])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def refused(invoked: Invoked, status: int) -> str:
    assert invoked.exit_code == status, invoked.output
    (line,) = invoked.stderr.splitlines()
    return line


def test_start_creates_private_token(home: Path, asked: list[Any]) -> None:
    done = run("start", "--port", "7001")
    assert done.exit_code == 0, done.output
    token = home / ".ray" / "auth_token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert len(token.read_text()) == 64
    assert "verbatim cluster join 10.9.8.7:7001" in done.stdout
    assert f"scp 10.9.8.7:{token}" in done.stdout
    assert token.read_text() not in done.output
    assert asked[0][:3] == ("start", "--head", "--port=7001")


def test_start_keeps_existing_token(home: Path, asked: list[Any], monkeypatch: Any) -> None:
    token = home / "mine"
    token.write_text("t" * 40)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    done = run("start", "--", "--num-cpus=3")
    assert done.exit_code == 0, done.output
    assert token.read_text() == "t" * 40
    assert not (home / ".ray").exists()
    assert asked[0][-1] == "--num-cpus=3"


def test_start_rejects_address_of_another_machine(asked: list[Any]) -> None:
    line = refused(run("start", "--node-ip-address", "192.0.2.200"), 2)
    assert "192.0.2.200" in line
    assert "is not an address of this machine" in line
    assert "not a host name" in refused(run("start", "--node-ip-address", "a..b"), 2)
    assert not asked


def test_join_reports_missing_token_or_unreachable_head(home: Path, asked: list[Any]) -> None:
    assert "copy " in refused(run("join", "10.0.0.1"), 1)
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text("t" * 40)
    port = free_port()
    assert f"no answer from 127.0.0.1:{port}" in refused(run("join", f"127.0.0.1:{port}"), 1)
    assert "must be HOST:PORT" in refused(run("join", "10.0.0.1:x"), 2)
    assert "no answer from a..b:1" in refused(run("join", "a..b:1"), 1)
    assert not asked
    with socket.create_server(("127.0.0.1", 0)) as head:
        port = head.getsockname()[1]
        done = run("join", f"127.0.0.1:{port}")
    assert done.exit_code == 0, done.output
    assert asked[0][:2] == ("start", f"--address=127.0.0.1:{port}")


def test_start_with_ray_auth_disabled_is_rejected(monkeypatch: Any, asked: list[Any]) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert "RAY_AUTH_MODE=disabled" in refused(run("start"), 2)
    assert not asked


def test_commands_without_ray_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "find_spec", lambda name: None)
    for arguments in (["start"], ["join", "10.0.0.1"], ["stop"], ["status"]):
        assert "pip install '.[cluster]'" in refused(run(*arguments), 1)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("a\nray.exceptions.AuthenticationError: RPC error: InvalidAuthToken", "copy "),
        ("2026 INFO x.py:1 -- fine\n2026 ERR x.py:2 -- no room\n-----\n", "failed: no room"),
        ("", "no reason given"),
    ],
    ids=["token", "line", "silent"],
)
def test_ray_failure_is_reported_in_one_line(
    said: str, told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "ray"
    program.write_text(f"#!/bin/sh\nprintf '%s' '{said}'\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert told in refused(run("stop"), 1)


def test_status_shows_every_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = {
        "layers": [0, 3], "index": 0, "address": ["10.0.0.1", 5], "pid": 41, "weight_bytes": 3_000_000,
        "kv_bytes": 4_000_000, "frames": 12, "tokens_per_s": 28.44, "hop_s": 0.00042, "restarts": 2,
        "silent": False,
    }  # fmt: skip
    idle = {**stage, "layers": None, "pid": 42}
    machine = {"machine": "10.0.0.1", "cores": 2.0, "memory_bytes": 8e9, "reachable": False}
    clusters = {"ab12": [stage, idle, {"silent": True}]}
    status = {"address": "10.0.0.1:6379", "machines": [machine], "clusters": clusters}
    monkeypatch.setattr(ray_hosts, "cluster_status", lambda address: status)
    done = run("status")
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.stdout.splitlines()]
    shown = "0 0 to 2 10.0.0.1 41 3 MB 4 MB 12 28.4 0.42 ms 2".split()
    assert shown in rows
    assert ["idle", "10.0.0.1", "42"] in rows
    assert ["?", "does", "not", "answer"] in rows
    assert "unreachable" in done.stdout
    assert json.loads(run("status", "--json").stdout) == status


def test_status_of_unreachable_address_is_an_error() -> None:
    port = free_port()
    line = refused(run("status", "--address", f"127.0.0.1:{port}"), 1)
    assert f"no Ray cluster at 127.0.0.1:{port}: no answer" in line


def every_option(**values: Any) -> dict[str, Any]:
    """Option values as typer passes them to a command: None if not given."""
    return {option.name: None for option in (*OFFLOAD, *CLUSTER)} | values


def test_options_make_cluster_placement() -> None:
    values = {"stages": 3, "cluster": "10.0.0.1:6379", "layers": "1,2,1", "spares": 0}
    cluster = Cluster(stages=3, address="10.0.0.1:6379", layers=(1, 2, 1), spares=0)
    assert placement_of(every_option(**values)) == cluster
    assert placement_of(every_option()) is None
    offloaded = Cluster(stages=2, offload=Offload(cpu="1GB"))
    assert placement_of(every_option(stages=2, cpu="1GB")) == offloaded


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"cluster": "h:1", "stats": True}, "--stats is for offloading"),
        ({"layers": "1,x"}, "--layers '1,x'"),
    ],
    ids=["stats", "layers"],
)
def test_invalid_cluster_options_are_usage_errors(values: dict[str, Any], told: str) -> None:
    with pytest.raises(WrongUsage, match=told):
        placement_of(every_option(**values))


def test_user_without_home_folder_gets_one_line_error(monkeypatch: Any, asked: list[Any]) -> None:
    monkeypatch.delenv("HOME")

    def unknown(uid: int) -> Any:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    for arguments in (["start"], ["join", "10.9.8.7"]):
        assert "no home folder for Ray's token" in refused(run(*arguments), 1)
    assert placement_of(every_option(disk="~nobody-of-this-name/x", cpu="1GB")) is not None
