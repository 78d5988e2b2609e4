"""`verbatim serve`: serve a model with OpenAI's API."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verbatim.cli.offload import OFFLOAD
from verbatim.cli.options import ADAPTERS, MODEL, open_llm, takes
from verbatim.cli.placing import CLUSTER, placement_of, report_placement
from verbatim.cli.terminal import WrongUsage, command, note
from verbatim.files import read_file

if TYPE_CHECKING:
    from verbatim.serve.settings import ServeSettings

KEYS = "VERBATIM_API_KEY"
_SERVER, _LIMITS = "Server", "Limits"


@command
@takes(*MODEL, ADAPTERS, *OFFLOAD, *CLUSTER, positional_model=True)
def serve(
    host: Annotated[
        str, typer.Option(help="Address to listen on.", rich_help_panel=_SERVER)
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            help="Port to listen on; 0 picks a free one.",
            min=0,
            max=65535,
            rich_help_panel=_SERVER,
        ),
    ] = 8000,
    name: Annotated[
        str | None,
        typer.Option(help="Model name in the API.", rich_help_panel=_SERVER),
    ] = None,
    api_key_file: Annotated[
        str | None,
        typer.Option(
            help=f"File of API keys, one per line, in addition to those in ${KEYS}.",
            metavar="PATH",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    no_api_key: Annotated[
        bool,
        typer.Option(
            "--no-api-key",
            help="Accept requests without an API key.",
            rich_help_panel=_SERVER,
        ),
    ] = False,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Origin of web pages that may call the API (CORS). Repeatable.",
            metavar="URL",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    adapter_root: Annotated[
        str | None,
        typer.Option(
            help="Folder from which clients with the API key may load LoRA adapters. Default: none.",
            metavar="FOLDER",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    playground: Annotated[
        bool, typer.Option(help="Serve the playground at /.", rich_help_panel=_SERVER)
    ] = True,
    docs: Annotated[
        bool, typer.Option(help="Serve /docs and /openapi.json.", rich_help_panel=_SERVER)
    ] = True,
    chat_defaults: Annotated[
        bool,
        typer.Option(
            help="Sample chats with the defaults of the model's generation_config.json.",
            rich_help_panel=_SERVER,
        ),
    ] = True,
    logprobs_mode: Annotated[
        str,
        typer.Option(
            help="Log-probs of drawn tokens: raw_logprobs (of the model) or processed_logprobs (of the "
            "distribution drawn from, which TRL needs).",
            rich_help_panel=_SERVER,
        ),
    ] = "raw_logprobs",
    training: Annotated[
        bool,
        typer.Option(
            "--training",
            help="Let clients pause the engine and replace its weights.",
            rich_help_panel=_SERVER,
        ),
    ] = False,
    max_update_bytes: Annotated[
        int | None,
        typer.Option(
            help="With --training: maximum bytes of new weights. Default: 8 for each parameter.",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    update_timeout_s: Annotated[
        float | None,
        typer.Option(
            help="With --training: seconds after which a silent trainer loses its update. Default: 120.",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    log_level: Annotated[
        str,
        typer.Option(
            help="Log level: critical, error, warning, info or debug.", rich_help_panel=_SERVER
        ),
    ] = "info",
    max_requests: Annotated[
        int | None,
        typer.Option(
            help="Maximum requests in progress or queued; more get status 429. Default: 512.",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    max_choices: Annotated[
        int | None,
        typer.Option(
            help="Maximum completions per request. Default: 128.", rich_help_panel=_LIMITS
        ),
    ] = None,
    max_body_bytes: Annotated[
        int | None,
        typer.Option(
            help="Maximum size of a request body. Default: 4194304.", rich_help_panel=_LIMITS
        ),
    ] = None,
    max_response_bytes: Annotated[
        int | None,
        typer.Option(
            help="Maximum estimated size of a response. Default: 33554432.", rich_help_panel=_LIMITS
        ),
    ] = None,
    max_connections: Annotated[
        int | None,
        typer.Option(
            help="Maximum connections. Default: as many as `ulimit -n` allows, at most 4096.",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    max_connections_per_address: Annotated[
        int | None,
        typer.Option(
            help="Maximum connections from one address. Default: half of --max-connections.",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    negative_priorities: Annotated[
        bool,
        typer.Option(
            "--negative-priorities",
            help="Accept priorities below 0, which run before other clients' requests.",
            rich_help_panel=_LIMITS,
        ),
    ] = False,
    request_timeout_s: Annotated[
        float | None,
        typer.Option(
            help="End a generation after this many seconds. Default: no limit.",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    drain_timeout_s: Annotated[
        int,
        typer.Option(
            help="Seconds to let requests finish at shutdown.",
            min=0,
            rich_help_panel=_LIMITS,
        ),
    ] = 60,
    **values: Any,
) -> None:
    """Serve a model: OpenAI's API, Verbatim's own endpoints, and a playground at /.

    SIGTERM or Ctrl-C lets requests in progress finish; a second one ends them.
    """
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise WrongUsage(f"serve needs {error.name}: pip install '.[serve]'") from None
    if log_level not in LEVELS:
        raise WrongUsage(f"--log-level {log_level!r}: must be one of {', '.join(LEVELS)}")
    given = {
        "max_requests": max_requests,
        "max_choices": max_choices,
        "max_body_bytes": max_body_bytes,
        "max_response_bytes": max_response_bytes,
        "max_connections": max_connections,
        "max_connections_per_address": max_connections_per_address,
        "timeout_s": request_timeout_s,
        "max_update_bytes": max_update_bytes,
        "update_timeout_s": update_timeout_s,
    }
    settings = _settings(
        host,
        no_api_key,
        api_key_file,
        name=name,
        adapter_root=adapter_root,
        cors_origins=tuple(cors_origin or ()),
        playground=playground,
        docs=docs,
        chat_defaults=chat_defaults,
        logprobs_mode=logprobs_mode,
        training=training,
        negative_priorities=negative_priorities,
        **{key: value for key, value in given.items() if value is not None},
    )
    placement = placement_of({**values, "stats": None})
    # A log that can't be written, on a full disk or a closed pipe, must not end the server.
    logging.raiseExceptions = False
    with open_llm(values, placement) as llm:
        from verbatim.serve.server import run  # imports what opening a model imports with care

        report_placement(llm, placement)
        run(llm, settings, host, port, log_level=log_level, drain_s=drain_timeout_s, say=note)


LEVELS = ("critical", "error", "warning", "info", "debug")


def _settings(
    host: str, no_api_key: bool, api_key_file: str | None, **fields: Any
) -> ServeSettings:
    from verbatim.serve.settings import LOCAL_HOSTS, ServeSettings, is_local

    keys = _keys(api_key_file)
    if no_api_key and keys:
        raise WrongUsage(f"--no-api-key can't be combined with a key in --api-key-file or ${KEYS}")
    if not keys and not no_api_key and not is_local(host):
        raise WrongUsage(
            f"--host {host} accepts requests from other machines: set a key (${KEYS} or --api-key-file), or "
            "pass --no-api-key"
        )
    if is_local(host) and not keys:  # guards against DNS rebinding; a web page has no key
        fields["hosts"] = tuple(dict.fromkeys((*LOCAL_HOSTS, host.lower().strip("[]"))))
    return ServeSettings(api_keys=keys, **fields)


def _keys(path: str | None) -> tuple[str, ...]:
    keys = _lines(os.environ.get(KEYS, ""))
    if path is not None:
        file_keys = _lines(read_file(path, path))
        if not file_keys:  # otherwise the server would accept every request
            raise WrongUsage(f"--api-key-file {path}: the file has no key")
        keys += file_keys
    return tuple(dict.fromkeys(keys))


def _lines(text: str) -> list[str]:
    """Return the keys of a text, one per line, without comments."""
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]
