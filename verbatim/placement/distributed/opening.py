"""Opens a model in pipeline stages, or on several ranks."""

from __future__ import annotations

import itertools
import os
import secrets
import sys
from collections import Counter
from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, cast

from verbatim.batch import dummy_batch
from verbatim.errors import InvalidRequest, OutOfBlocks
from verbatim.model.early_exit import EarlyExit
from verbatim.options import default_threads
from verbatim.placement.distributed.choice import Cluster, PipelineParallel, TensorParallel
from verbatim.placement.distributed.exchange import meeting_place
from verbatim.placement.distributed.group import StageHandle
from verbatim.placement.distributed.hosts import Hosts, LocalHosts
from verbatim.placement.distributed.launcher import HOST
from verbatim.placement.distributed.ranks import (
    Following,
    FollowingRunner,
    Leading,
    RankHost,
    describe_runner,
    exchange,
    meet,
    other_ranks,
)
from verbatim.placement.distributed.ray_hosts import RayHosts
from verbatim.placement.distributed.runner import Clustered
from verbatim.placement.distributed.served import Served, check_keys, describe_draft
from verbatim.placement.distributed.split import LayerSizes, Split
from verbatim.placement.distributed.stage_line import StageLine
from verbatim.placement.distributed.stage_share import StageShare
from verbatim.placement.distributed.tensor import LeadingRank, RankGroup, RankShare
from verbatim.placement.distributed.wire import Message
from verbatim.placement.options import DEFAULT_KV_SHARE, EngineOptions, OpenRequest, Placed
from verbatim.weights.identity import fingerprint

_SAME_SPEED = 0.7  # speeds from this fraction of the highest count as equal
_MIN_STAGES = 2  # by default


def open_cluster(model: OpenRequest, cluster: Cluster) -> Placed:
    """Open a model in pipeline stages.

    Raises:
        UnsupportedModel: the model can't be cut between layers.
        NotSupported: Ray is not installed, machines would compute different bits, or MTP layers are missing.
        StageFailed: there are no machines, or a stage was lost meanwhile.
        OutOfBlocks: the memory does not hold the model and one block.
    """
    loaded, source, options, limit, draft = model
    with ExitStack() as undo:
        if cluster.hosts is not None:
            undo.callback(cluster.hosts.close)
        split = Split(loaded)
        draft_fields = describe_draft(draft)
        layout = split.sizes(draft, spills=cluster.offload is not None)
        _check(cluster, layout)
        hosts: Any = cluster.hosts
        if hosts is None:
            hosts = _hosts(cluster.address)
            undo.callback(hosts.close)
        arguments: Message = {
            "source": source,
            "options": options,
            "limit": limit,
            "draft": draft_fields,
            "offload": cluster.offload,
        }
        group = StageLine(hosts, cluster, layout, arguments, fingerprint(loaded))
        undo.callback(group.close)
        stages = len(cluster.layers or ()) or cluster.stages
        if stages is None:
            stages = min(len(layout.cuts) + 1, max(_MIN_STAGES, len(hosts.machines())))
        members = group.members = group.launch(stages)
        ranges = _ranges(cluster, layout, members)
        if isinstance(draft, EarlyExit) and (draft.layers or 0) > ranges[0][1]:
            raise InvalidRequest(
                f"draft={draft!r}: the first stage holds {ranges[0][1]} layers, and can draft "
                "only with these"
            )
        for index, member in enumerate(members):
            member.index = index
        group.open(members, ranges)
        if cluster.offload is None:
            shares = [(member.memory_at, member.shape) for member in members]
            options, blocks, num_states = kv_sizes(options, limit, shares)
        else:
            limits = [member.shape["limits"] for member in members]
            options, blocks, num_states = _joined_limits(options, limits)
        group.blocks = dict(num_blocks=blocks, num_states=num_states)
        group.allocate(members, members)
        group.connect()
        group.prepare_spares()
        runner = Clustered(group, loaded.module.state_dict(keep_vars=True))
        undo.pop_all()
    return Placed(runner, options)


def _hosts(address: str | None) -> Hosts:
    """Return the machines of a Ray cluster if there is one, otherwise this machine."""
    key = secrets.token_bytes(32)
    ray = sys.modules.get("ray")
    if address or os.environ.get("RAY_ADDRESS") or (ray is not None and ray.is_initialized()):
        return RayHosts(address, key, secrets.token_hex(4))
    return LocalHosts(key)


def _check(cluster: Cluster, layout: LayerSizes) -> None:
    """Raise InvalidRequest if the model can't be cut into the requested stages."""
    max_stages = len(layout.cuts) + 1
    if cluster.stages is not None and cluster.stages > max_stages:
        raise InvalidRequest(
            f"stages={cluster.stages}: the model can be cut into {max_stages} stages at most"
        )
    if cluster.layers is None:
        return
    if sum(cluster.layers) != len(layout.layer_bytes):
        raise InvalidRequest(
            f"layers={cluster.layers} add up to {sum(cluster.layers)}; the model has "
            f"{len(layout.layer_bytes)} layers"
        )
    for cut in itertools.accumulate(cluster.layers[:-1]):
        if cut not in layout.cuts:
            raise InvalidRequest(
                f"layers={cluster.layers}: the model can't be cut before layer {cut}; it can be "
                f"cut before layers {list(layout.cuts)}"
            )


def _ranges(
    cluster: Cluster, layout: LayerSizes, members: list[StageHandle]
) -> list[tuple[int, int]]:
    """Return each stage's range of layers: as in `cluster`, else by memory and speed."""
    if cluster.layers is not None:
        return list(itertools.pairwise([0, *itertools.accumulate(cluster.layers)]))
    counts = Counter(member.memory_at for member in members)
    room = [member.facts["memory"] / counts[member.memory_at] for member in members]
    speed = {at: max(m.facts["speed"] for m in members if m.memory_at == at) for at in counts}
    fastest = max(speed.values())
    # Small differences are noise, and must not change the division between runs.
    speed = {at: fastest if s > _SAME_SPEED * fastest else s for at, s in speed.items()}
    try:
        return layout.divide(room, [speed[member.memory_at] for member in members])
    except OutOfBlocks:
        if not layout.spills:
            raise
        # In proportion to memory, so that every stage has the same fraction on disk.
        return layout.divide([layout.room(0)] * len(room), room)


def kv_sizes(
    options: EngineOptions,
    limit: int | None,
    shares: Sequence[tuple[Hashable, Message]],
) -> tuple[EngineOptions, int, int]:
    """Return the options with the KV budget of all processes, and the numbers of blocks and state slots.

    The default budget is for as many tokens as fit into `DEFAULT_KV_SHARE` of the smallest memory.

    Args:
        limit: maximum tokens of one sequence.
        shares: for each process, a key of its memory, equal if processes share one; and its free `memory`,
            the `token_bytes` of one token in its blocks and the `state_bytes` of one slot of its states.

    Raises:
        OutOfBlocks: the memory doesn't hold one block, or the slots of one sequence.
    """
    token_total = sum(share["token_bytes"] for _, share in shares)
    state_total = sum(share["state_bytes"] for _, share in shares)
    if options.kv_bytes is None:
        needed, free = Counter[Hashable](), dict[Hashable, int]()
        for memory, share in shares:
            needed[memory] += max(1, share["token_bytes"] or share["state_bytes"])
            free[memory] = min(share["memory"], free.get(memory, share["memory"]))
        num_tokens = min(DEFAULT_KV_SHARE * free[memory] / needed[memory] for memory in needed)
        options = replace(options, kv_bytes=int(num_tokens * needed.total()))
    num_states = options.num_states(state_total)
    return options, options.num_blocks(token_total, limit, num_states * state_total), num_states


def _joined_limits(
    options: EngineOptions, limits: Sequence[Message]
) -> tuple[EngineOptions, int, int]:
    """Return the options, blocks and state slots that fit on all stages."""
    lowest: Message = {}
    for name, limit in itertools.chain(*(stage.items() for stage in limits)):
        lowest[name] = min(limit, lowest.get(name, limit))
    blocks, states = lowest.pop("num_blocks"), lowest.pop("num_states", 0)
    return replace(options, **lowest), blocks, states


def open_tensor_parallel(model: OpenRequest, choice: TensorParallel) -> Placed:
    """Open a model with tensor parallelism: weights are split by columns.

    Raises:
        InvalidRequest, NotSupported: the number of ranks is not `choice.size`, or they are incompatible.
        UnsupportedModel, ModelError: a rank can't open the model.
        TierFailed: a rank is gone.
        OutOfBlocks: `kv_memory` is too small.
    """
    rank, world, key = meet(choice.size)
    if rank:
        return _open_rank(rank, world, key, model.options, RankShare(model.loaded, model.source))
    hosts = (
        Hosts(key, other_ranks(world, key)) if world > 1 else LocalHosts(key, "tensor:RankShare")
    )
    group = RankGroup(hosts, choice.size, choice.timeout_s)
    try:
        group.start()
        placed = Placed(_open_shares(group, model, choice), model.options)
    except BaseException:
        group.close()
        raise
    return placed if world == 1 else _with_followers(placed, group.members)


def open_pipeline_parallel(model: OpenRequest, choice: PipelineParallel) -> Placed:
    """Open a `Cluster` with a stage on each rank; raises the errors of `open_cluster`.

    If the user started no ranks, processes are started on this machine.
    """
    cluster = Cluster(stages=choice.size, step_timeout_s=choice.timeout_s, offload=choice.offload)
    rank, world, key = meet(choice.size)
    if world == 1:
        return open_cluster(model, replace(cluster, hosts=LocalHosts(key)))
    if rank:
        return _open_rank(rank, world, key, model.options, StageShare())
    share = StageShare()
    share.listen(key, HOST)
    hosts = Hosts(key, [*other_ranks(world, key), RankHost(0, share.address, key)])
    placed = open_cluster(model, replace(cluster, hosts=hosts, spares=0))
    return _with_followers(placed, cast(Clustered, placed.runner).group.members[:-1])


def _with_followers(placed: Placed, others: list[StageHandle]) -> Placed:
    """Make rank 0, which has opened the model, the leader of the other ranks started by the user."""
    runner: Any = placed.runner
    collective = Leading(runner.group, others)
    try:
        collective.broadcast(describe_runner(runner))
    except BaseException:
        runner.close()
        raise
    return replace(placed, collective=collective)


def _open_rank(rank: int, world: int, key: bytes, options: EngineOptions, share: Served) -> Placed:
    """Open the model on a rank other than 0, started by the user."""
    share.listen(key, HOST)
    collective = Following(share)
    try:
        exchange(rank, world, str(share.address[1]))
        runner: Any = FollowingRunner(collective, collective.wait())
        return Placed(runner, options, collective)
    except BaseException:
        collective.close()
        raise


def _open_shares(group: RankGroup, model: OpenRequest, choice: TensorParallel) -> LeadingRank:
    """Open the shares of all ranks; return the runner of rank 0."""
    loaded, source, options, limit, draft = model
    size = choice.size
    num_threads = options.num_threads or max(1, default_threads() // size)
    order: Message = {
        "source": source,
        "options": replace(options, num_threads=num_threads),
        "size": size,
        "timeout_s": choice.timeout_s,
        "draft": describe_draft(draft),
    }
    share = RankShare(loaded, source)
    share.group = group
    with meeting_place(size) as order["meeting"], ExitStack() as undo:
        undo.callback(share.close)
        keys = [share.open(**order, rank=0)]
        keys += group.call("open", per_member=[{"rank": rank} for rank in range(1, size)], **order)
        check_keys((f"rank {rank}", key) for rank, key in enumerate(keys))
        group.call_all("share", share.share)
        sizes = [share.sizes(), *group.call("sizes")]
        shares = [(each["device"], each) for each in sizes]
        _, blocks, num_states = kv_sizes(options, limit, shares)
        memory = [share.allocate(blocks, num_states)]
        memory += group.call("allocate", num_blocks=blocks, num_states=num_states)
        runner = cast(LeadingRank, share.runner)
        runner.memory = memory
        runner.forward(dummy_batch())  # so that problems between ranks show now
        runner.num_forwards = 0
        undo.pop_all()
    return runner
