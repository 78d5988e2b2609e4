"""`verbatim plan`: show the placement and the expected speed of an offloaded model."""

from __future__ import annotations

import json
import os
from typing import Annotated, Any

import typer

from verbatim.cli.options import MODEL, given_options, with_options
from verbatim.cli.placing import PLACING, offload_of
from verbatim.placement.offload.choice import Offload

# The options of `LLM` that affect a plan.
_OPTION_NAMES = (
    "model config revision trust_remote_code dtype device num_threads max_length kv_memory kv_dtype "
    "quantization block_size max_batch_tokens max_sequences"
).split()
_SOURCE = ("model", "config", "revision", "trust_remote_code", "dtype")
_OPTIONS = tuple(option for option in MODEL if option.name in _OPTION_NAMES)


@with_options(*PLACING, *_OPTIONS, positional_model=True)
def plan(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    **values: Any,
) -> None:
    """Show how a model larger than memory would run, without loading it.

    Measures the machine for a second or two, which includes reading the model's files.
    """
    offload, settings = offload_of(values) or Offload(), given_options(values, _OPTIONS)
    source = {"model": None} | {n: settings.pop(n) for n in _SOURCE if n in settings}
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from verbatim.api.opening import plan_offload
    from verbatim.model.device import resolve_device
    from verbatim.model.loader import ModelSource
    from verbatim.placement.offload.report import plan_text
    from verbatim.placement.options import engine_options

    device = resolve_device(settings.pop("device", "auto"), "auto")
    options = engine_options(device=device, **settings)
    forecast = plan_offload(ModelSource(**source), offload, options)
    if as_json:
        typer.echo(json.dumps(forecast.as_dict()))
        return
    typer.echo(plan_text(forecast))
