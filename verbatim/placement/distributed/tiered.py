"""Offloaded stages: what their plans are made from, and what these have room for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from verbatim.model.draft_layers import DraftLayers
from verbatim.model.loader import LoadedModel
from verbatim.model.mtp_source import Mtp
from verbatim.model.spec import ModelSpec
from verbatim.placement.distributed.wire import Message
from verbatim.placement.offload.planner import BUDGET_SHARE
from verbatim.placement.offload.report import plan_line
from verbatim.placement.offload.tiers import Tiers
from verbatim.placement.options import DEFAULT_KV_SHARE, EngineOptions

_LIMITS = ("max_sequences", "max_batch_tokens", "prompt_rows")  # of `EngineOptions`


def placing(
    message: Message, share: float, draft: Mtp | None
) -> Callable[[LoadedModel], Tiers] | None:
    """Return what reads a stage's weights into the tiers of a plan; None: they stay in memory.

    Args:
        message: as of `Layers.open`. `memory` is this stage's, and so are `kv_bytes`, which are None if such
            a stage was never opened.
        share: the part of the model's layers that the stage has.
        draft: MTP layers beside them.
    """
    if message["offload"] is None:
        return None

    def place(own: LoadedModel) -> Tiers:
        offload, options, kv_bytes = message["offload"], message["options"], message["kv_bytes"]
        if kv_bytes is None and options.kv_bytes is not None:
            kv_bytes = int(options.kv_bytes * share)
        if offload.gpu is None and offload.cpu is None:
            if offload.weights is None:
                offload = offload.replace(gpu=int(message["memory"] * BUDGET_SHARE))
            elif kv_bytes is None:
                kv_bytes = int(message["memory"] * DEFAULT_KV_SHARE)
        options = replace(options, kv_bytes=kv_bytes, quantization=own.quantization)
        return Tiers(own, offload, options, message["limit"], draft)

    return place


def limits_of(tiers: Tiers, spec: ModelSpec, drafts: DraftLayers) -> Message:
    """Return what a stage's plan has room for."""
    blocks, states = tiers.num_blocks(spec, drafts)
    return {
        "num_blocks": blocks,
        "num_states": states if spec.states else None,
        **{name: getattr(tiers.options, name) for name in _LIMITS},
        "plan": plan_line(tiers.plan, tiers.forecast.prediction),
    }


def joined_limits(
    options: EngineOptions, limits: Sequence[Message]
) -> tuple[EngineOptions, int, int]:
    """Return options, blocks and slots of states that all stages have room for."""
    least: dict[str, int] = {name: min(stage[name] for stage in limits) for name in _LIMITS}
    states = [stage["num_states"] for stage in limits if stage["num_states"] is not None]
    blocks = min(stage["num_blocks"] for stage in limits)
    return replace(options, **least), blocks, min(states, default=0)  # type: ignore[arg-type]
