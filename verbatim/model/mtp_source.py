"""Where a model's layers for multi-token prediction come from: its checkpoint, or its owner's hands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verbatim.errors import InvalidRequest, ModelError, NotSupported, first_line
from verbatim.model.borrow import exclusive
from verbatim.model.dcp.folder import find_dcp
from verbatim.model.hidden import head_of
from verbatim.model.loader import building, quiet


def given_mtp(mtp: Any, inner: Any) -> Any:
    """The `MtpModel` that somebody hands over for the transformers model `inner`, checked.

    Raises:
        InvalidRequest: it is none, has no layers, or was made for another model.
    """
    from transformers.modeling_layers import MtpModel

    if not isinstance(mtp, MtpModel):
        raise InvalidRequest(f"Mtp(model={type(mtp).__name__}): must be transformers' MtpModel")
    if not len(mtp.layers):
        raise InvalidRequest("Mtp(model=...): it has 0 layers; 1 or more are needed")
    # The embedding is a copy where the original norms what it gives.
    head, embedding = head_of(inner), inner.get_input_embeddings()
    copied = hasattr(embedding, "embed_norm")
    if mtp.shared_head is not head or not (copied or mtp.embed_tokens is embedding):
        raise InvalidRequest(
            "Mtp(model=...): its embedding and head are not those of the model that it is to draft for; "
            "make it of that one, as MtpModel(model, num_mtp_layers), or MtpModel.from_pretrained(model)"
        )
    return mtp


def load_mtp(inner: Any, folder: Path) -> Any:
    """transformers' `MtpModel` of `inner`, with its weights from the checkpoint that `inner` came from.

    Args:
        inner: a transformers model; left as it is.

    Raises:
        NotSupported: its config names no such layers, or none that can be built; a DCP folder.
        ModelError: their weights are missing, incomplete or of other shapes.
    """
    from transformers.modeling_layers import MtpModel

    name, config = type(inner).__name__, inner.config.get_text_config(decoder=True)
    number = getattr(config, "num_mtp_layers", None)
    if number is None or isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise NotSupported(
            f"draft='mtp': {name} has no layers for multi-token prediction; num_mtp_layers is {number!r} "
            f"in the config of {folder}, and must be 1 or more"
        )
    if find_dcp(folder) is not None:
        raise NotSupported(
            f"draft='mtp': {folder} is a torch.distributed.checkpoint, and MTP layers are read from a folder "
            "with safetensors; hand them over as draft=Mtp(model=...), or draft by 'ngram' or 'early-exit'"
        )
    try:
        inner.config.get_mtp_config()
    except Exception as error:  # `layer_types` without `mtp_layer_types`, say
        raise NotSupported(
            f"draft='mtp': {folder} does not say what {name}'s MTP layers are: {first_line(error)}"
        ) from error
    try:
        with exclusive, building, _findable(inner, folder, config, number), quiet(progress=False):
            mtp: Any = MtpModel.from_pretrained(inner).eval()
    except Exception as error:  # reading and building raise whatever a damaged file leads to
        raise ModelError(
            f"draft='mtp': {folder} holds no {number} complete MTP layers for {name}: {first_line(error)}"
        ) from error
    for parameter, value in mtp.named_parameters():
        if value.is_meta:
            raise ModelError(f"draft='mtp': {folder} lacks the weights of {parameter}")
    return mtp


@contextmanager
def _findable(inner: Any, folder: Path, config: Any, number: int) -> Iterator[None]:
    """Let transformers find the weights: it reads the folder that the config names, and takes for weights of
    MTP layers what the model's class ignores. Many classes ignore nothing.
    """
    own, ignored = inner.__dict__, "_keys_to_ignore_on_load_unexpected"
    had, before, path = ignored in own, own.get(ignored), inner.config.name_or_path
    known = getattr(inner, ignored, None) or []
    first = config.num_hidden_layers
    numbered = [rf"(^|\.)layers\.{n}\." for n in range(first, first + number)]
    try:
        setattr(inner, ignored, [*known, *numbered])
        inner.config.name_or_path = str(folder)
        yield
    finally:
        inner.config.name_or_path = path
        if had:
            own[ignored] = before
        else:
            delattr(inner, ignored)
