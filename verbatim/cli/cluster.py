"""`verbatim cluster`: start, join, stop and inspect a cluster of machines."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from verbatim.cli.terminal import WrongUsage, size_text
from verbatim.errors import NotSupported, VerbatimError

PORT = 6379
_TIMEOUT_S = 120.0  # timeout of a Ray command
_STORE_BYTES = 100_000_000  # size of Ray's object store, which stages do not use

cluster = typer.Typer(
    name="cluster",
    help="Run a model over several machines (Ray starts the processes).",
    no_args_is_help=True,
    add_completion=False,
)
_Extra = Annotated[
    list[str] | None, typer.Argument(help="After --: options passed to `ray start`.")
]
_Address = Annotated[
    str | None,
    typer.Option(
        "--node-ip-address", metavar="IP", help="Address that other machines use for this one."
    ),
]


@cluster.command()
def start(
    extra: _Extra = None,
    port: Annotated[
        int, typer.Option("--port", min=1, max=65535, help="Port to listen on.")
    ] = PORT,
    node_ip_address: _Address = None,
) -> None:
    """Make this machine the head of a cluster, and print the commands for the others.

    Joining requires this machine's token, which is created if there is none.
    """
    _check_ray()
    ip_option = _own_address(node_ip_address)
    from verbatim.placement.distributed.ray_hosts import make_token, token_path

    is_new = make_token()
    output = _ray("start", "--head", f"--port={port}", *ip_option, *_RAY_OPTIONS, *(extra or []))
    found = re.search(r"Local node IP: (\S+)", output)
    address = f"{node_ip_address or (found[1] if found else socket.gethostname())}:{port}"
    source = "RAY_AUTH_TOKEN"
    copy_token = "export RAY_AUTH_TOKEN=...  # the same"
    if not os.environ.get(source):
        source = str(token_path())
        copy_token = (
            f"mkdir -p ~/.ray && scp {address.rpartition(':')[0]}:{source} ~/.ray/auth_token"
        )
    typer.echo(f"""\
This machine is the head of a cluster at {address}, with the {"new " if is_new else ""}token in {source}.

On each of the other machines, with the same Verbatim and the same model files:

  {copy_token}
  verbatim cluster join {address}

Then, on any of them:

  verbatim generate "Once upon a time" --model MODEL --cluster {address}
  LLM("MODEL", placement=Cluster(address="{address}"))
  verbatim cluster status --address {address}

Anyone who has the token and can reach these machines can run code on them. It is sent unencrypted.""")


@cluster.command()
def join(
    head: Annotated[
        str, typer.Argument(help="HOST:PORT of the head, as `verbatim cluster start` prints it.")
    ],
    extra: _Extra = None,
    node_ip_address: _Address = None,
) -> None:
    """Join this machine to a cluster."""
    _check_ray()
    from verbatim.placement.distributed.ray_hosts import answers, has_token

    host, port = _host_port(head)
    ip_option = _own_address(node_ip_address)
    if not has_token():
        raise VerbatimError(
            f"this machine has no token: copy the head's with `mkdir -p ~/.ray && "
            f"scp {host}:.ray/auth_token ~/.ray/auth_token`"
        )
    if not answers((host, port)):
        raise VerbatimError(
            f"no answer from {host}:{port}: is a cluster started there (`verbatim cluster start`)?"
        )
    _ray("start", f"--address={host}:{port}", *ip_option, *_RAY_OPTIONS[1:], *(extra or []))
    typer.echo(f"This machine has joined the cluster at {host}:{port}.")


@cluster.command()
def stop() -> None:
    """Stop every Ray process on this machine, including those it did not start."""
    _check_ray()
    output = _ray("stop")
    was_running = "Did not find any active Ray processes" not in output
    typer.echo(
        "Ray stopped on this machine." if was_running else "Ray was not running on this machine."
    )


@cluster.command()
def status(
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            metavar="HOST:PORT",
            help="Address of the cluster. Default: RAY_ADDRESS, or the cluster of this machine.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the machines of a cluster, and the stages of each open model."""
    _check_ray()
    from verbatim.placement.distributed.ray_hosts import cluster_status

    status = cluster_status(address)
    typer.echo(json.dumps(status) if as_json else _text(status))


# ---- Ray's commands

_RAY_OPTIONS = (
    "--include-dashboard=false",
    "--disable-usage-stats",
    f"--object-store-memory={_STORE_BYTES}",
)


def _check_ray() -> None:
    if find_spec("ray") is None:
        raise NotSupported("`verbatim cluster` needs Ray: pip install '.[cluster]'")
    mode = os.environ.get("RAY_AUTH_MODE", "token")
    if mode.lower() != "token":
        raise WrongUsage(f"RAY_AUTH_MODE={mode}: a Verbatim cluster uses token mode; unset it")


def _own_address(address: str | None) -> list[str]:
    """Return Ray's option for an address of this machine; refuse others, for which Ray would wait forever."""
    if address is None:
        return []
    try:
        family = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except (OSError, UnicodeError) as error:  # UnicodeError: a name such as "a..b"
        why = getattr(error, "strerror", None) or "not a host name"
        raise WrongUsage(
            f"--node-ip-address {address!r} is not an address of this machine: {why}"
        ) from None
    return [f"--node-ip-address={address}"]


def _host_port(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon:
        return text, PORT
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise WrongUsage(f"{text!r}: must be HOST:PORT, such as 10.0.0.1:{PORT}")
    return host, int(port)


def _ray(*arguments: str) -> str:
    """Run a Ray command and return its output; raise VerbatimError with its last line if it fails."""
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
    line = [sys.executable, "-m", "ray.scripts.scripts", *arguments, "--log-style=record"]
    with tempfile.TemporaryFile() as output:  # a pipe would stay open in the daemons
        files: dict[str, Any] = dict(stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            status = subprocess.run(line, **files, env=environment, timeout=_TIMEOUT_S).returncode
        except subprocess.TimeoutExpired:
            raise VerbatimError(
                f"`ray {arguments[0]}` did not finish within {_TIMEOUT_S:.0f} s: see "
                "/tmp/ray/session_latest/logs"
            ) from None
        output.seek(0)
        text = output.read().decode(errors="replace")
    if status:
        raise VerbatimError(_reason(arguments[0], text))
    return text


def _reason(command: str, text: str) -> str:
    if "InvalidAuthToken" in text or "AuthenticationError" in text:
        return (
            "this machine's token (~/.ray/auth_token, RAY_AUTH_TOKEN_PATH or RAY_AUTH_TOKEN) differs from "
            "the cluster's: copy it from the head"
        )
    lines = [line.rpartition(" -- ")[2].strip() for line in text.splitlines()]
    reasons = [line for line in lines if line and set(line) - set("-=^~ ")]
    return f"`ray {command}` failed: {reasons[-1] if reasons else 'no reason given'}"


# ---- output


def _text(status: Mapping[str, Any]) -> str:
    lines = [f"cluster at {status['address']}"]
    lines += [
        f"  machine {m['machine']}: {m['cores']:.0f} cores, {size_text(m['memory_bytes'])} of memory"
        + ("" if m["reachable"] else ", unreachable")
        for m in status["machines"]
    ]
    for name, stages in status["clusters"].items():
        rows = [_HEADER, *map(_row, stages)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += ["", f"model {name}"]
        lines += ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    if not status["clusters"]:
        lines += ["", "no open models"]
    return "\n".join(lines)


_HEADER = tuple("stage layers machine pid weights K/V batches tokens/s hop restarts".split())


def _row(stage: Mapping[str, Any]) -> tuple[str, ...]:
    if stage["silent"]:
        return ("?", "does not answer", *[""] * 8)
    machine = stage["address"][0]
    if stage["layers"] is None:
        return ("idle", "", machine, str(stage["pid"]), *[""] * 6)
    first, end = stage["layers"]
    hop = stage["hop_s"]
    return (
        str(stage["index"]),
        f"{first} to {end - 1}",
        machine,
        str(stage["pid"]),
        size_text(stage["weight_bytes"]),
        size_text(stage["kv_bytes"]),
        str(stage["frames"]),
        f"{stage['tokens_per_s']:.1f}",
        "" if hop is None else f"{hop * 1000:.2f} ms",
        str(stage["restarts"]),
    )
