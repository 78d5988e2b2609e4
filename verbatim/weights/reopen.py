"""Opening a model once more in another process, without reading its weights."""

from __future__ import annotations

from pathlib import Path

from verbatim import storyteller
from verbatim.model.gguf import find_gguf, load_gguf
from verbatim.model.loader import LoadedModel, ModelSource, load
from verbatim.model.quantization import Quantization
from verbatim.weights.dcp_model import config_from_dict, load_dcp
from verbatim.weights.skeleton import open_skeleton


def reopen(source: ModelSource) -> LoadedModel:
    """Open a model with lazy weights and without a tokenizer.

    Raises:
        ModelError, NotSupported: it can't be opened here.
    """
    if source.config is not None:
        assert source.model is not None
        config = config_from_dict(source.config)
        loaded = load_dcp(Path(source.model), config, dtype=source.dtype)
    elif source.model is not None and (gguf := find_gguf(source.model)) is not None:
        loaded = load_gguf(
            gguf,
            dtype=source.dtype,
            with_tokenizer=False,
            skeleton=open_skeleton,
            unused_weights=source.unused_weights,
        )
    else:
        loaded = load(
            storyteller.path() if source.model is None else source.model,
            dtype=source.dtype,
            revision=source.revision,
            trust_remote_code=source.trust_remote_code,
            with_tokenizer=False,
            skeleton=open_skeleton,
            unused_weights=source.unused_weights,
        )
    if source.quantization is not None:
        loaded.quantization = Quantization(**source.quantization)
    return loaded
