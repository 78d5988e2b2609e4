"""Opening of a model in stages."""

from __future__ import annotations

import itertools
import os
import secrets
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from verbatim.errors import InvalidRequest, OutOfBlocks
from verbatim.model.early_exit import EarlyExit
from verbatim.model.mtp_source import Mtp, mtp_size
from verbatim.model.spec import inner_model
from verbatim.placement.distributed.choice import Cluster
from verbatim.placement.distributed.group import StageHandle
from verbatim.placement.distributed.hosts import Hosts, LocalHosts
from verbatim.placement.distributed.plan import LayerSizes, kv_sizes
from verbatim.placement.distributed.ray_hosts import RayHosts
from verbatim.placement.distributed.runner import Clustered
from verbatim.placement.distributed.served import describe_draft
from verbatim.placement.distributed.split import Split
from verbatim.placement.distributed.stage_line import StageLine
from verbatim.placement.distributed.stage_share import LIMITS
from verbatim.placement.distributed.wire import Message
from verbatim.placement.options import EngineOptions, Placed, ToOpen
from verbatim.weights.identity import fingerprint

_ALIKE = 0.7  # of a machine's speed
_FEWEST = 2  # stages by default


def open_cluster(model: ToOpen, cluster: Cluster) -> Placed:
    """Open a model in stages.

    Raises:
        UnsupportedModel: its layers can't be cut apart.
        NotSupported: an address without Ray, machines that would give other bits, or no MTP layers.
        StageFailed: there are no machines, or a stage was lost meanwhile.
        OutOfBlocks: the model or one block has no room.
    """
    loaded, source, options, limit, draft = model
    with ExitStack() as undo:
        if cluster.hosts is not None:
            undo.callback(cluster.hosts.close)
        split = Split(loaded)
        described = describe_draft(draft)
        first, last, everywhere = split.outside_bytes(draft)
        if isinstance(draft, Mtp):
            assert loaded.folder is not None
            last += mtp_size(inner_model(loaded.module), loaded.folder, draft.beside)[1]
        cuts, spills = tuple(split.cuts), cluster.offload is not None
        layout = LayerSizes(tuple(split.layer_bytes), (first, last), everywhere, cuts, spills)
        _check(cluster, layout)
        hosts: Any = cluster.hosts
        if hosts is None:
            hosts = _hosts(cluster.address)
            undo.callback(hosts.close)
        told: Message = {
            "source": source,
            "options": options,
            "limit": limit,
            "draft": described,
            "offload": cluster.offload,
        }
        group = StageLine(hosts, cluster, layout, told, fingerprint(loaded))
        undo.callback(group.close)
        stages = _count(cluster, layout, hosts)
        members = group.members = group.launch(stages)
        ranges = _ranges(cluster, layout, members)
        if isinstance(draft, EarlyExit) and (draft.layers or 0) > ranges[0][1]:
            raise InvalidRequest(
                f"draft={draft!r}: the first stage holds {ranges[0][1]} layers, and drafts with these alone"
            )
        for index, member in enumerate(members):
            member.index = index
        group.open(members, ranges)
        token_bytes = [member.shape["token_bytes"] for member in members]
        state_bytes = [member.shape["state_bytes"] for member in members]
        if cluster.offload is None:
            free = [(m.memory_at, m.shape["memory"]) for m in members]
            options, blocks, num_states = kv_sizes(options, limit, free, token_bytes, state_bytes)
        else:
            limits = [member.shape["limits"] for member in members]
            options, blocks, num_states = _joined_limits(options, limits)
            # A stage that is opened again has the same room.
            kv_bytes = blocks * options.block_size * sum(token_bytes)
            kv_bytes += num_states * sum(state_bytes)
            told["options"] = replace(told["options"], kv_bytes=kv_bytes)
        group.blocks = dict(num_blocks=blocks, num_states=num_states)
        group.allocate(members, members)
        group.connect()
        group.prepare_spares()
        runner = Clustered(group, loaded.module.state_dict(keep_vars=True))
        undo.pop_all()
    return Placed(runner, options)


def _hosts(address: str | None) -> Hosts:
    """Return Ray's machines where there is a Ray cluster, and this machine otherwise."""
    key = secrets.token_bytes(32)
    ray = sys.modules.get("ray")
    if address or os.environ.get("RAY_ADDRESS") or (ray is not None and ray.is_initialized()):
        return RayHosts(address, key, secrets.token_hex(4))
    return LocalHosts(key)


def _check(cluster: Cluster, layout: LayerSizes) -> None:
    """Refuse stages that this model can't be cut into, before any process is started."""
    most = len(layout.cuts) + 1
    if cluster.stages is not None and cluster.stages > most:
        raise InvalidRequest(
            f"stages={cluster.stages}: the model can be cut into {most} stages at most"
        )
    if cluster.layers is None:
        return
    if sum(cluster.layers) != len(layout.layer_bytes):
        raise InvalidRequest(
            f"layers={cluster.layers} are {sum(cluster.layers)}; the model has "
            f"{len(layout.layer_bytes)} layers"
        )
    for cut in itertools.accumulate(cluster.layers[:-1]):
        if cut not in layout.cuts:
            raise InvalidRequest(
                f"layers={cluster.layers}: the model can't be cut in front of layer {cut}; it can in "
                f"front of {list(layout.cuts)}"
            )


def _count(cluster: Cluster, layout: LayerSizes, hosts: Hosts) -> int:
    if cluster.layers is not None:
        return len(cluster.layers)
    if cluster.stages is not None:
        return cluster.stages
    return min(len(layout.cuts) + 1, max(_FEWEST, len(hosts.machines())))


def _ranges(
    cluster: Cluster, layout: LayerSizes, members: list[StageHandle]
) -> list[tuple[int, int]]:
    """Return each stage's range of layers: as given, or by memory and speed."""
    if cluster.layers is not None:
        return list(itertools.pairwise([0, *itertools.accumulate(cluster.layers)]))
    on = Counter(member.memory_at for member in members)
    room = [member.facts["memory"] / on[member.memory_at] for member in members]
    speed = {at: max(m.facts["speed"] for m in members if m.memory_at == at) for at in on}
    fastest = max(speed.values())
    # Small differences are noise, and the same machine should get the same layers the next time.
    speed = {at: fastest if s > _ALIKE * fastest else s for at, s in speed.items()}
    try:
        return layout.divide(room, [speed[member.memory_at] for member in members])
    except OutOfBlocks:
        if not layout.spills:
            raise
        return layout.divide(
            [layout.room(0)] * len(room), room
        )  # about as much of each is on disks


def _joined_limits(
    options: EngineOptions, limits: Sequence[Message]
) -> tuple[EngineOptions, int, int]:
    """Return options, blocks and slots of states that all stages have room for."""
    least: dict[str, int] = {name: min(stage[name] for stage in limits) for name in LIMITS}
    states = [stage["num_states"] for stage in limits if stage["num_states"] is not None]
    blocks = min(stage["num_blocks"] for stage in limits)
    return replace(options, **least), blocks, min(states, default=0)  # type: ignore[arg-type]
