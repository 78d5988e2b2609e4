"""Draft layers on a stage: MTP layers on the last one, and the model's first layers on the first one."""

from __future__ import annotations

from verbatim.errors import NotSupported
from verbatim.model.draft_layers import DraftLayers
from verbatim.model.early_exit import EarlyExit, EarlyExitLayers, open_draft_layers
from verbatim.model.loader import LoadedModel
from verbatim.model.mtp_source import Mtp, mtp_size
from verbatim.model.spec import inner_model
from verbatim.placement.distributed.part import Part
from verbatim.placement.distributed.split import Split
from verbatim.placement.distributed.tiered import placing
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


def open_part(loaded: LoadedModel, split: Split, message: Message) -> tuple[Part, DraftLayers]:
    """Open the layers of a stage, and its draft layers.

    Args:
        message: `first`, `end`, and `draft`, as of `describe`.

    Raises:
        UnsupportedModel, TierFailed: as of `Part`.
        NotSupported, InvalidRequest, ModelError: the draft layers can't be opened.
    """
    first, end, draft = message["first"], message["end"], options_of(message["draft"])
    mtp = draft if isinstance(draft, Mtp) and end == split.num_layers else None
    exits = isinstance(draft, EarlyExit) and first == 0
    part = Part(
        loaded,
        first,
        end,
        split=split,
        embeds=mtp is not None,
        exits=exits,
        place=placing(message, (end - first) / split.num_layers, mtp),
    )
    try:
        if isinstance(draft, EarlyExit) and exits:
            return part, EarlyExitLayers(part.decoder, draft.layers, part.whole)
        if mtp is not None:
            return part, open_draft_layers(mtp, part.decoder, loaded)
    except BaseException:
        part.close()
        raise
    return part, DraftLayers()
