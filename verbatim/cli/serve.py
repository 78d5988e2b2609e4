"""`verbatim serve`: serve a model with OpenAI's API."""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import Any

from verbatim.cli.options import ADAPTERS, MODEL, Option, fields_of, given, helps, takes
from verbatim.cli.placing import CLUSTER, OFFLOAD, opened, placement_of
from verbatim.cli.terminal import WrongUsage, need_packages, note
from verbatim.errors import InvalidRequest
from verbatim.files import read_file
from verbatim.serve.settings import LEVELS, ServeSettings

KEYS = "VERBATIM_API_KEY"
_SERVER, _LIMITS = "Server", "Limits"

_field = partial(fields_of, ServeSettings())

# Those with the name of a field of ServeSettings set it.
SERVER = (
    Option("host", str, _SERVER, "Address to listen on. Default: 127.0.0.1."),
    Option("port", int, _SERVER, "Port to listen on; 0 picks a free one. Default: 8000."),
    *_field(_SERVER, "name"),
    Option(
        "api_key_file",
        str,
        _SERVER,
        f"File of API keys, one per line, in addition to those in ${KEYS}.",
        "PATH",
    ),
    *_field(_SERVER, "no_api_key"),
    Option(
        "cors_origin",
        list[str],
        _SERVER,
        "Origin of web pages that may call the API (CORS). Repeatable.",
        "URL",
    ),
    *_field(_SERVER, "adapter_root", "FOLDER"),
    *_field(_SERVER, "playground docs chat_defaults logprobs_mode training"),
    Option("log_level", str, _SERVER, f"Log level: {', '.join(LEVELS)}. Default: info."),
    *_field(_LIMITS, "max_requests max_choices max_body_bytes max_response_bytes max_connections"),
    *_field(_LIMITS, "max_connections_per_address negative_priorities max_update_bytes"),
    *_field(_LIMITS, "update_timeout_s"),
    Option("request_timeout_s", float, _LIMITS, helps(ServeSettings)["timeout_s"]),
    Option(
        "drain_timeout_s",
        int,
        _LIMITS,
        "Seconds to let requests finish at shutdown. Default: 60.",
    ),
)


@takes(*SERVER, *MODEL, ADAPTERS, *OFFLOAD, *CLUSTER, positional_model=True)
def serve(**values: Any) -> None:
    """Serve a model: OpenAI's API, Verbatim's own endpoints, and a playground at /.

    SIGTERM or Ctrl-C lets requests in progress finish; a second one ends them.
    """
    need_packages("serve", "fastapi", "prometheus_client", "uvicorn")
    fields = given(values, SERVER)
    host, port = fields.pop("host", "127.0.0.1").strip("[]"), fields.pop("port", 8000)
    if not 0 <= port <= 65535:
        raise WrongUsage(f"--port {port}: must be 0 to 65535")
    log_level, drain_s = fields.pop("log_level", "info"), fields.pop("drain_timeout_s", 60)
    if log_level not in LEVELS:
        raise WrongUsage(f"--log-level {log_level!r}: must be one of {', '.join(LEVELS)}")
    if drain_s < 0:
        raise WrongUsage(f"--drain-timeout-s {drain_s}: must be 0 or more")
    settings = _settings(host, fields)
    placement = placement_of(values)
    # A log that can't be written, on a full disk or a closed pipe, must not end the server.
    logging.raiseExceptions = False
    with opened(values, placement) as llm:
        from verbatim.serve.server import run  # imports what opening a model imports with care

        run(llm, settings, host, port, log_level=log_level, drain_s=drain_s, say=note)


def _settings(host: str, fields: dict[str, Any]) -> ServeSettings:
    keys = _keys(fields.pop("api_key_file", None))
    fields["cors_origins"] = tuple(fields.pop("cors_origin", ()))
    fields["timeout_s"] = fields.pop("request_timeout_s", None)
    if keys and fields.get("no_api_key"):
        raise WrongUsage(f"--no-api-key can't be combined with a key in --api-key-file or ${KEYS}")
    settings = ServeSettings(api_keys=keys, **fields)
    try:
        return settings.at(host)
    except InvalidRequest as error:
        raise WrongUsage(str(error)) from None


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
