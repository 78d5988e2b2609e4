"""Opening of a model on several ranks."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from verbatim.batch import dummy_batch
from verbatim.placement.distributed.choice import Cluster, PipelineParallel, TensorParallel
from verbatim.placement.distributed.following import Following, FollowingRunner, Leading, described
from verbatim.placement.distributed.gloo import meeting_place
from verbatim.placement.distributed.group import StageHandle
from verbatim.placement.distributed.heads import own_layers
from verbatim.placement.distributed.hosts import Hosts, LocalHosts
from verbatim.placement.distributed.launcher import HOST
from verbatim.placement.distributed.opening import open_cluster
from verbatim.placement.distributed.plan import kv_sizes
from verbatim.placement.distributed.rank_share import RankShare
from verbatim.placement.distributed.runner import Clustered
from verbatim.placement.distributed.served import Served, check_keys, describe_draft
from verbatim.placement.distributed.stage_share import StageShare
from verbatim.placement.distributed.tensor import LeadingRank, RankGroup
from verbatim.placement.distributed.torchrun import RankHost, exchange, meet, other_ranks
from verbatim.placement.distributed.wire import Message
from verbatim.placement.options import EngineOptions, Placed, ToOpen


def open_tensor_parallel(model: ToOpen, choice: TensorParallel) -> Placed:
    """Open a model whose weights are split by columns.

    Raises:
        InvalidRequest, NotSupported: the ranks are others than `choice` says, or can't work together.
        UnsupportedModel, ModelError: a rank can't open the model.
        TierFailed: a rank is gone.
        OutOfBlocks: `kv_memory` is too small.
    """
    rank, world, key = meet(choice.size)
    if rank:
        return _follow(rank, world, key, model.options, RankShare(model.loaded, model.source))
    hosts = Hosts(key, other_ranks(world)) if world > 1 else LocalHosts(key, "rank_share:RankShare")
    group = RankGroup(hosts, choice.size, choice.timeout_s)
    try:
        placed = Placed(_lead(group, model, choice), model.options)
    except BaseException:
        group.close()
        raise
    return placed if world == 1 else _led(placed, group.members)


def open_pipeline_parallel(model: ToOpen, choice: PipelineParallel) -> Placed:
    """Open a `Cluster` with a stage on each rank; arguments and errors as of `open_cluster`.

    Without ranks that the user started, its processes are started on this machine.
    """
    cluster = Cluster(stages=choice.size, step_timeout_s=choice.timeout_s, offload=choice.offload)
    rank, world, key = meet(choice.size)
    if world == 1:
        return open_cluster(model, replace(cluster, hosts=LocalHosts(key)))
    if rank:
        return _follow(rank, world, key, model.options, StageShare())
    own = StageShare()
    own.listen(key, HOST)
    hosts = Hosts(key, [*other_ranks(world), RankHost(0, own.address, own)])
    ranks = replace(cluster, hosts=hosts, spares=0)
    placed = open_cluster(model, ranks)
    return _led(placed, cast(Clustered, placed.runner).group.members[:-1])


def _led(placed: Placed, others: list[StageHandle]) -> Placed:
    """Let other ranks follow this one, which has opened the model."""
    runner: Any = placed.runner
    together = Leading(runner.group, others)
    try:
        together.tell(described(runner))
    except BaseException:
        runner.close()
        raise
    return replace(placed, together=together)


def _follow(rank: int, world: int, key: bytes, options: EngineOptions, share: Served) -> Placed:
    """Open a rank other than 0 of ranks that the user started."""
    share.listen(key, HOST)
    together = Following(share)
    try:
        exchange(rank, world, str(share.address[1]))
        runner: Any = FollowingRunner(together, together.wait())
        return Placed(runner, options, together)
    except BaseException:
        together.close()
        raise


def _lead(group: RankGroup, model: ToOpen, choice: TensorParallel) -> LeadingRank:
    """Open the share of every rank."""
    loaded, source, options, limit, draft = model
    size = choice.size
    num_threads = options.num_threads or max(1, torch.get_num_threads() // size)
    order: Message = {
        "source": source,
        "options": replace(options, num_threads=num_threads),
        "size": size,
        "timeout_s": choice.timeout_s,
        "draft": describe_draft(draft),
        "meeting": meeting_place(),
    }
    own = RankShare(loaded, source)
    with ExitStack() as undo:
        undo.callback(own.close)
        key = own.open(**order, rank=0)["key"]
        others = group.ask("open", [{"rank": rank} for rank in range(1, size)], **order)
        keys = [key, *(answer["key"] for answer in others)]
        check_keys((f"rank {rank}", key) for rank, key in enumerate(keys))
        group.together("share", own.share)
        assert own.ranks is not None
        own.make_runner = partial(LeadingRank, group, own.ranks, own.cut)
        spec = own.decoder.spec
        heads = [own_layers(spec.layers, spec.query_heads, rank, size) for rank in range(size)]
        token_bytes = [options.token_bytes(spec, own.draft_layers, layers) for layers in heads]
        state_bytes = [sum(state.nbytes for state in spec.states)] * size
        free = [(m["device"], m["memory"]) for m in (own.memory(), *group.ask("memory"))]
        _, blocks, num_states = kv_sizes(options, limit, free, token_bytes, state_bytes)
        of_others = group.ask("allocate", num_blocks=blocks, num_states=num_states)
        memory = [own.allocate(blocks, num_states), *of_others]
        runner = own.runner
        assert isinstance(runner, LeadingRank)
        runner.memory = memory
        runner.forward(dummy_batch())  # whatever can go wrong between ranks does so here
        runner.num_forwards = 0
        undo.pop_all()
    return runner
