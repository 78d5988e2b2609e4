"""Opening of a model on several ranks."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from verbatim.batch import dummy_batch
from verbatim.errors import TierFailed
from verbatim.kv.store import bytes_per_token
from verbatim.placement.distributed.choice import Cluster, PipelineParallel, TensorParallel
from verbatim.placement.distributed.columns import check_keys
from verbatim.placement.distributed.drafts import describe
from verbatim.placement.distributed.following import Following, FollowingRunner, Leading, described
from verbatim.placement.distributed.gloo import meeting_place
from verbatim.placement.distributed.heads import own_layers
from verbatim.placement.distributed.hosts import Hosts, LocalHosts
from verbatim.placement.distributed.launcher import HOST
from verbatim.placement.distributed.layers import Layers
from verbatim.placement.distributed.opening import open_cluster
from verbatim.placement.distributed.rank_group import RankGroup
from verbatim.placement.distributed.rank_share import RankShare
from verbatim.placement.distributed.served import Served
from verbatim.placement.distributed.stage import Stage
from verbatim.placement.distributed.tensor import LeadingRank
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
    hosts = Hosts(key, other_ranks(world)) if world > 1 else LocalHosts(key, "rank")
    group = RankGroup(hosts, choice.size, choice.timeout_s)
    with ExitStack() as undo:
        undo.callback(group.close)
        leading = _lead(group, model, choice)
        together = Leading(group.members) if world > 1 else None
        if together is not None:
            together.tell(described(leading))
        undo.pop_all()
    return Placed(leading, model.options, together)


def open_pipeline_parallel(model: ToOpen, choice: PipelineParallel) -> Placed:
    """Open a `Cluster` with a stage on each rank; arguments and errors as of `open_cluster`.

    Without ranks that the user started, its processes are started on this machine.
    """
    cluster = Cluster(stages=choice.size, step_timeout_s=choice.timeout_s, offload=choice.offload)
    rank, world, key = meet(choice.size)
    if world == 1:
        return open_cluster(model, replace(cluster, hosts=LocalHosts(key)))
    if rank:
        return _follow(rank, world, key, model.options, Layers())
    own = Stage(key, HOST, Layers())
    hosts = Hosts(key, [*other_ranks(world), RankHost(0, own.address, own)])
    ranks = replace(cluster, hosts=hosts, spares=0)
    placed = open_cluster(model, ranks)
    runner: Any = placed.runner
    together = Leading(runner.group.members[:-1])
    try:
        together.tell(described(runner))
    except BaseException:
        runner.close()
        raise
    return replace(placed, together=together)


def _follow(rank: int, world: int, key: bytes, options: EngineOptions, share: Served) -> Placed:
    """Open a rank other than 0 of ranks that the user started."""
    stage = Stage(key, HOST, share)
    together = Following(stage)
    try:
        exchange(rank, world, str(stage.address[1]))
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
        "do": "open",
        "source": source,
        "options": replace(options, num_threads=num_threads),
        "size": size,
        "timeout_s": choice.timeout_s,
        "draft": describe(draft),
        "meeting": meeting_place(),
    }
    own = RankShare(loaded, source)
    with ExitStack() as undo:
        undo.callback(own.close)
        first, *others = ({**order, "rank": rank} for rank in range(size))
        keys = [own.call(first)["key"], *(answer["key"] for answer in group.ask_each(others))]
        check_keys(keys)
        group.tell({"do": "share"})
        try:
            own.share()
        except TierFailed as error:
            raise group.failure(error) from error
        assert own.ranks is not None
        own.make_runner = partial(LeadingRank, group, own.ranks, own.cut)
        spec = own.decoder.spec
        state_bytes = size * sum(state.nbytes for state in spec.states)
        num_states = options.num_states(state_bytes)
        blocks = _num_blocks(own, size, options, limit, num_states * state_bytes)
        stores = {"do": "allocate", "num_blocks": blocks, "num_states": num_states}
        of_others = group.ask(stores)
        memory = [own.call(stores), *of_others]
        runner = own.runner
        assert isinstance(runner, LeadingRank)
        runner.memory = memory
        runner.forward(dummy_batch())  # whatever can go wrong between ranks does so here
        runner.num_forwards = 0
        undo.pop_all()
    return runner


def _num_blocks(
    share: RankShare,
    size: int,
    options: EngineOptions,
    limit: int | None,
    state_bytes: int,
) -> int:
    """Return the number of blocks, the same on all ranks; the budget is that of all together."""
    spec = share.decoder.spec
    dtype = options.kv_dtype or spec.dtype
    layers = [
        layer
        for rank in range(size)
        for layer in own_layers(spec.layers, spec.query_heads, rank, size)
    ]
    more = share.draft_layers.bytes_per_token(dtype)
    more += spec.choices["routing"].bytes_per_token
    token_bytes = bytes_per_token(layers, dtype) + more * size
    return options.num_blocks(token_bytes, limit, state_bytes)
