"""`verbatim serve`: serve a model with OpenAI's API."""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import Any

from verbatim.cli.options import ADAPTERS, MODEL, Option, fields_of, given_options, with_options
from verbatim.cli.placing import CLUSTER, OFFLOAD, opened_llm, placement_of
from verbatim.cli.terminal import WrongUsage, need_packages, note
from verbatim.common.files import read_file
from verbatim.errors import InvalidRequest
from verbatim.serve.settings import ServeSettings

KEYS = "VERBATIM_API_KEY"
_SERVER, _LIMITS = "Server", "Limits"

_field = partial(fields_of, ServeSettings())

# Options with the name of a field of ServeSettings set that field.
SERVER = (
    *_field(_SERVER, "host port name"),
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
    *_field(_SERVER, "playground docs chat_defaults logprobs_mode training log_level"),
    *_field(_LIMITS, "max_requests max_choices max_body_bytes max_response_bytes max_connections"),
    *_field(_LIMITS, "max_connections_per_address negative_priorities max_update_bytes"),
    *_field(_LIMITS, "body_timeout_s request_timeout_s update_timeout_s drain_timeout_s"),
)


@with_options(*SERVER, *MODEL, ADAPTERS, *OFFLOAD, *CLUSTER, positional_model=True)
def serve(**values: Any) -> None:
    """Serve a model: OpenAI's API, Verbatim's own endpoints, and a playground at /.

    SIGTERM or Ctrl-C lets requests in progress finish; a second one ends them.
    """
    need_packages("serve", "fastapi", "prometheus_client", "uvicorn")
    settings = _settings(given_options(values, SERVER))
    placement = placement_of(values)
    # A log that can't be written, on a full disk or a closed pipe, must not end the server.
    logging.raiseExceptions = False
    with opened_llm(values, placement) as llm:
        from verbatim.serve.server import run  # late: opening the model controls what it imports

        run(llm, settings, say=note)


def _settings(fields: dict[str, Any]) -> ServeSettings:
    fields["api_keys"] = _keys(fields.pop("api_key_file", None))
    fields["cors_origins"] = tuple(fields.pop("cors_origin", ()))
    try:
        return ServeSettings(**fields).guarded()
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
