"""Draft layers in other processes: their options as plain data, and their sizes."""

from __future__ import annotations

from verbatim.errors import NotSupported
from verbatim.model.early_exit import EarlyExit
from verbatim.model.loader import LoadedModel
from verbatim.model.mtp_source import Mtp, mtp_size
from verbatim.model.spec import inner_model
from verbatim.placement.distributed.split import Split
from verbatim.placement.distributed.wire import Message


def describe(draft: Mtp | EarlyExit | None) -> Message | None:
    """Return what another process needs to open draft layers, as plain data.

    Raises:
        NotSupported: they are in this process's memory only.
    """
    if isinstance(draft, Mtp):
        if draft.model is not None and draft.beside is None:
            raise NotSupported(
                "draft=Mtp(model=...): other processes draft, and read the layers from files: name "
                "their folder"
            )
        return {"mtp": True, "beside": draft.beside and str(draft.beside)}
    return None if draft is None else {"mtp": False, "layers": draft.layers}


def options_of(described: Message | None) -> Mtp | EarlyExit | None:
    """Return the options that `describe` described."""
    if described is None:
        return None
    return Mtp(described["beside"]) if described["mtp"] else EarlyExit(described["layers"])


def extra_bytes(
    draft: Mtp | EarlyExit | None, loaded: LoadedModel, split: Split
) -> tuple[int, int]:
    """Return the bytes of weights that the first and the last stage hold to draft.

    Raises:
        NotSupported, InvalidRequest: the model has no such layers.
    """
    if draft is None:
        return 0, 0
    if isinstance(draft, EarlyExit):
        return split.outside_bytes[1], 0
    assert loaded.folder is not None
    _, nbytes = mtp_size(inner_model(loaded.module), loaded.folder, draft.beside)
    return 0, split.embedding_bytes + nbytes
