"""Layers for multi-token prediction on the last stage: behind its own layers, with the embedding beside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verbatim.batch import Draws
from verbatim.model.anatomy import inner_model
from verbatim.model.loader import LoadedModel
from verbatim.model.mtp import MtpLayers
from verbatim.model.mtp_source import load_mtp
from verbatim.placement.cluster.messages import pack_draws, unpack_batch, unpack_plan
from verbatim.placement.cluster.part import Part
from verbatim.placement.cluster.split import Split
from verbatim.sampling.sampler import sample_rows

Message = dict[str, Any]


def open_part(loaded: LoadedModel, split: Split, message: Message) -> tuple[Part, MtpLayers | None]:
    """The layers that a stage is told to hold, and, where they are the last ones, those that draft.

    Args:
        message: `first`, `end`, and `mtp`: None where nothing drafts, else where its layers are.

    Raises:
        UnsupportedModel, TierFailed: as of `Part`.
        NotSupported, InvalidRequest, ModelError: no layers that draft can be had; as of `load_mtp`.
    """
    end, mtp = message["end"], message["mtp"]
    drafts = mtp is not None and end == split.num_layers
    part = Part(loaded, message["first"], end, split=split, embeds=drafts)
    if not drafts:
        return part, None
    try:
        assert loaded.folder is not None
        beside = None if mtp["beside"] is None else Path(mtp["beside"])
        layers = load_mtp(inner_model(part.decoder.module), loaded.folder, beside)
        return part, MtpLayers(layers, part.decoder)
    except BaseException:
        part.close()
        raise


def drafted(mtp: MtpLayers, message: Message) -> Message:
    """One forward of layer `k` of a `batch`, and the draws of a `plan` from it; of none without a plan."""
    batch, plan = unpack_batch(message["batch"]), message["plan"]
    with mtp.borrowed():
        logits = mtp.run(message["k"], batch)
        none = Draws([], [], [], [], [])
        draws = none if plan is None else sample_rows(logits, unpack_plan(plan))
    return {"draws": pack_draws(draws)}
