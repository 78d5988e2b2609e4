"""`verbatim serve`: an engine behind OpenAI's endpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verbatim.cli.offload import OFFLOAD
from verbatim.cli.options import MODEL, open_llm, read_text, takes
from verbatim.cli.placing import CLUSTER, placement_of, tell_placement
from verbatim.cli.terminal import WrongUsage, command, note

if TYPE_CHECKING:
    from verbatim.serve.settings import ServeSettings

KEYS = "VERBATIM_API_KEY"
_SERVER, _LIMITS = "Server", "Limits"


@command
@takes(*(option for option in MODEL if option.name != "model"), *OFFLOAD, *CLUSTER)
def serve(
    model: Annotated[
        str | None,
        typer.Argument(help="A folder or a hub id; the small model in the package if left out."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on.", rich_help_panel=_SERVER)
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(help="Port; 0 takes a free one.", min=0, max=65535, rich_help_panel=_SERVER),
    ] = 8000,
    name: Annotated[
        str | None,
        typer.Option(help="What clients call the model.", rich_help_panel=_SERVER),
    ] = None,
    api_key_file: Annotated[
        str | None,
        typer.Option(
            help=f"A file of API keys, one a line; ${KEYS} has one, too.",
            metavar="PATH",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    no_api_key: Annotated[
        bool,
        typer.Option(
            "--no-api-key", help="Let anybody in who can reach it.", rich_help_panel=_SERVER
        ),
    ] = False,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Web pages of this origin may call it.", metavar="URL", rich_help_panel=_SERVER
        ),
    ] = None,
    playground: Annotated[
        bool, typer.Option(help="Serve the page at /.", rich_help_panel=_SERVER)
    ] = True,
    docs: Annotated[
        bool, typer.Option(help="Serve /docs and /openapi.json.", rich_help_panel=_SERVER)
    ] = True,
    chat_defaults: Annotated[
        bool,
        typer.Option(
            help="Let the model's generation_config.json settle what a chat leaves open.",
            rich_help_panel=_SERVER,
        ),
    ] = True,
    log_level: Annotated[
        str,
        typer.Option(help="critical, error, warning, info or debug.", rich_help_panel=_SERVER),
    ] = "info",
    max_requests: Annotated[
        int | None,
        typer.Option(
            help="Requests under way or waiting; more are 429. Default: 512.",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    max_choices: Annotated[
        int | None,
        typer.Option(help="Completions of one request. Default: 128.", rich_help_panel=_LIMITS),
    ] = None,
    max_body_bytes: Annotated[
        int | None,
        typer.Option(help="Of a request. Default: 4194304.", rich_help_panel=_LIMITS),
    ] = None,
    request_timeout_s: Annotated[
        float | None,
        typer.Option(help="A generation ends after so many seconds.", rich_help_panel=_LIMITS),
    ] = None,
    drain_timeout_s: Annotated[
        int,
        typer.Option(
            help="How long a stopped server lets what runs come to its end.",
            min=0,
            rich_help_panel=_LIMITS,
        ),
    ] = 60,
    **values: Any,
) -> None:
    """Serve a model: OpenAI's endpoints, Verbatim's own, a page to try it at /.

    SIGTERM or Ctrl-C lets what runs come to its end; a second one ends it.
    """
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise WrongUsage(f"serve needs {error.name}: pip install 'verbatim[serve]'") from None
    if log_level not in LEVELS:
        raise WrongUsage(f"--log-level {log_level!r}: must be one of {', '.join(LEVELS)}")
    given = {
        "max_requests": max_requests,
        "max_choices": max_choices,
        "max_body_bytes": max_body_bytes,
        "timeout_s": request_timeout_s,
    }
    settings = _settings(
        host,
        no_api_key,
        api_key_file,
        name=name,
        cors_origins=tuple(cors_origin or ()),
        playground=playground,
        docs=docs,
        chat_defaults=chat_defaults,
        **{key: value for key, value in given.items() if value is not None},
    )
    placement = placement_of({**values, "stats": None})
    with open_llm({**values, "model": model}, placement) as llm:
        tell_placement(llm, placement)
        from verbatim.serve.server import run

        run(llm, settings, host, port, log_level=log_level, drain_s=drain_timeout_s, say=note)


LEVELS = ("critical", "error", "warning", "info", "debug")


def _settings(
    host: str, no_api_key: bool, api_key_file: str | None, **fields: Any
) -> ServeSettings:
    from verbatim.serve.settings import LOCAL_HOSTS, ServeSettings, is_local

    keys = _keys(api_key_file)
    if no_api_key and keys:
        raise WrongUsage(f"--no-api-key, and yet a key is given by --api-key-file or ${KEYS}")
    if not keys and not no_api_key and not is_local(host):
        raise WrongUsage(
            f"--host {host} lets other machines in: give a key (${KEYS} or --api-key-file), or say "
            "--no-api-key"
        )
    if is_local(host) and not keys:  # whoever has a key is no page that came along
        fields["hosts"] = tuple(dict.fromkeys((*LOCAL_HOSTS, host.lower().strip("[]"))))
    return ServeSettings(api_keys=keys, **fields)


def _keys(path: str | None) -> tuple[str, ...]:
    keys = _lines(os.environ.get(KEYS, ""))
    if path is not None:
        found = _lines(read_text(path, Path(path).read_bytes))
        if not found:  # or whoever thinks that a key is needed would let everybody in
            raise WrongUsage(f"--api-key-file {path}: there is no key in it")
        keys += found
    return tuple(dict.fromkeys(keys))


def _lines(text: str) -> list[str]:
    """Keys, one a line; comments are none."""
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]
