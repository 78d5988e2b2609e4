"""The forecast of an offloaded model, from file headers."""

from __future__ import annotations

from typing import Any

import torch

from verbatim.model.limits import max_length_of
from verbatim.model.spec import inner_model
from verbatim.opening import resolve_length
from verbatim.placement.offload.choice import Offload
from verbatim.placement.offload.forecast import Forecast, forecast
from verbatim.placement.offload.tiers import units_of
from verbatim.placement.options import EngineOptions
from verbatim.source import open_model
from verbatim.weights.skeleton import open_skeleton


def plan_offload(
    model: Any,
    offload: Offload,
    options: EngineOptions,
    *,
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    config: Any = None,
) -> Forecast:
    """Forecast memory and speed of an offloaded model, from the headers of its files.

    Args:
        model, dtype, revision, trust_remote_code, config: as for `LLM`.

    Raises:
        ModelError, NotSupported: the model can't be opened like this; see also `forecast`.
    """
    no_tokenizer: Any = False
    loaded = open_model(
        model, no_tokenizer, dtype, revision, trust_remote_code, config, skeleton=open_skeleton
    )
    units, _ = units_of(loaded, offload, options)
    limit, _ = resolve_length(options, *max_length_of(inner_model(loaded.module).config))
    return forecast(loaded, units, offload, options, limit)
