"""A model that was opened elsewhere, once more, without its weights."""

from __future__ import annotations

from pathlib import Path

from verbatim import storyteller
from verbatim.model.dcp.load import config_from_dict, load_dcp
from verbatim.model.loader import LoadedModel, ModelSource, load
from verbatim.placement.offload.checkpoint import open_skeleton
from verbatim.placement.offload.dcp import leave_there


def load_again(source: ModelSource) -> LoadedModel:
    """A model without its weights, as somebody has opened it elsewhere; it has no tokenizer.

    Raises:
        ModelError, NotSupported: it can't be had here.
    """
    if source.config is not None:
        assert source.model is not None
        config = config_from_dict(source.config)
        return load_dcp(Path(source.model), config, dtype=source.dtype, leave=leave_there)
    return load(
        storyteller.path() if source.model is None else source.model,
        dtype=source.dtype,
        revision=source.revision,
        trust_remote_code=source.trust_remote_code,
        with_tokenizer=False,
        skeleton=open_skeleton,
    )
