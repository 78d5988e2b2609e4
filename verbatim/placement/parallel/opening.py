"""Opening of a model on several ranks."""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from verbatim.batch import dummy_batch
from verbatim.errors import InvalidRequest, NotSupported, TierFailed
from verbatim.kv.store import bytes_per_token
from verbatim.model.decoder import Decoder
from verbatim.model.early_exit import open_draft_layers
from verbatim.model.experts import is_stacked
from verbatim.model.spec import inner_model
from verbatim.options import available_memory
from verbatim.placement.cluster.choice import Cluster
from verbatim.placement.cluster.drafts import describe
from verbatim.placement.cluster.hosts import LocalHosts
from verbatim.placement.cluster.layers import Layers
from verbatim.placement.cluster.opening import open_cluster
from verbatim.placement.cluster.stage import Stage
from verbatim.placement.launcher import HOST
from verbatim.placement.options import EngineOptions, Placed, ToOpen
from verbatim.placement.parallel.choice import ExpertParallel, PipelineParallel, TensorParallel
from verbatim.placement.parallel.exchange import ExchangedExperts, Group, differing
from verbatim.placement.parallel.following import Following, described
from verbatim.placement.parallel.group import (
    Follower,
    Followers,
    RankGroup,
    RankHost,
    RankHosts,
)
from verbatim.placement.parallel.heads import own_layers
from verbatim.placement.parallel.launch import check_size, exchange, launched, meet
from verbatim.placement.parallel.rank_share import RankShare
from verbatim.placement.parallel.runner import Leading
from verbatim.placement.parallel.share import Shared, key_of, take_share
from verbatim.placement.resident import open_resident
from verbatim.placement.served import Message, Served

_KV_SHARE = 0.4  # of the memory that is available, for K and V of all ranks together


def open_tensor_parallel(model: ToOpen, choice: TensorParallel) -> Placed:
    """Open a model whose weights are split by columns.

    Raises:
        InvalidRequest, NotSupported: the ranks are others than `choice` says, or can't work together.
        UnsupportedModel, ModelError: a rank can't open the model.
        TierFailed: a rank is gone.
        OutOfBlocks: `kv_memory` is too small.
    """
    rank, world = launched()
    check_size(choice.size, world)
    key = meet(rank, world) if world > 1 else secrets.token_bytes(32)
    if rank:
        return _follow(rank, world, key, model.options, RankShare(model.loaded, model.source))
    hosts = RankHosts(key, _others(world)) if world > 1 else LocalHosts(key, "serve_rank")
    group = RankGroup(hosts, choice.size, choice.timeout_s)
    with ExitStack() as undo:
        undo.callback(group.close)
        leading = _lead(group, model, choice)
        followers = Followers(group.members) if world > 1 else None
        if followers is not None:
            followers.tell({"do": "ready", **described(leading)})
        undo.pop_all()
    return Placed(leading, model.options, followers)


def open_pipeline_parallel(model: ToOpen, choice: PipelineParallel) -> Placed:
    """Open a `Cluster` with a stage on each rank; arguments and errors as of `open_cluster`.

    Without ranks that the user started, its processes are started on this machine.
    """
    cluster = Cluster(stages=choice.size, step_timeout_s=choice.timeout_s, offload=choice.offload)
    rank, world = launched()
    check_size(choice.size, world)
    if world == 1:
        return open_cluster(model, replace(cluster, hosts=LocalHosts(secrets.token_bytes(32))))
    key = meet(rank, world)
    if rank:
        return _follow(rank, world, key, model.options, Layers())
    own = Stage(key, HOST, Layers())
    hosts = RankHosts(key, [*_others(world), RankHost(0, own.address, own)])
    ranks = replace(cluster, hosts=hosts, spares=0)
    placed = open_cluster(model, ranks)
    runner: Any = placed.runner
    followers = Followers(runner.group.members[:-1])
    try:
        followers.tell({"do": "ready", **described(runner)})
    except BaseException:
        runner.close()
        raise
    return replace(placed, together=followers)


def _others(world: int) -> list[RankHost]:
    """Return the ranks 1 to `world` - 1, which call `_follow`."""
    ports = exchange(0, world, "-")
    return [RankHost(rank, (HOST, int(ports[rank]))) for rank in range(1, world)]


def _follow(rank: int, world: int, key: bytes, options: EngineOptions, share: Served) -> Placed:
    """Open a rank other than 0 of ranks that the user started."""
    stage = Stage(key, HOST, share)
    follower = Follower(stage)
    try:
        exchange(rank, world, str(stage.address[1]))
        runner: Any = Following(follower, follower.wait())
        return Placed(runner, options, follower)
    except BaseException:
        follower.close()
        raise


def _lead(group: RankGroup, model: ToOpen, choice: TensorParallel) -> Leading:
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
    }
    own = RankShare(loaded, source, partial(Leading, group=group))
    with ExitStack() as undo, TemporaryDirectory(prefix="verbatim-ranks-") as folder:
        undo.callback(own.close)
        order["meeting"] = str(Path(folder, "meeting"))
        keys = [own.open({**order, "rank": 0})["key"]]
        keys += [answer["key"] for answer in group.ask(order)]
        for rank, key in enumerate(keys):
            if key != keys[0]:
                raise NotSupported(differing(rank, key, keys[0]))
        group.tell({"do": "share"})
        try:
            own.share({"do": "share"})
        except TierFailed as error:
            raise group.failure(error) from error
        spec = own.shared.decoder.spec
        state_bytes = size * sum(state.nbytes for state in spec.states)
        num_states = options.num_states(state_bytes)
        blocks = _num_blocks(own.shared, size, options, limit, num_states * state_bytes)
        stores = {"do": "allocate", "num_blocks": blocks, "num_states": num_states}
        others = group.ask(stores)
        memory = [own.allocate(stores), *others]
        runner = own.runner
        assert isinstance(runner, Leading)
        runner.memory = memory
        runner.forward(dummy_batch())  # whatever can go wrong between ranks does so here
        runner.num_forwards = 0
        undo.pop_all()
    return runner


def _num_blocks(
    shared: Shared,
    size: int,
    options: EngineOptions,
    limit: int | None,
    state_bytes: int,
) -> int:
    """Return the number of blocks, the same on all ranks; the budget is that of all together."""
    spec = shared.decoder.spec
    dtype = options.kv_dtype or spec.dtype
    layers = [
        layer
        for rank in range(size)
        for layer in own_layers(spec.layers, spec.query_heads, rank, size)
    ]
    more = shared.draft_layers.bytes_per_token(dtype)
    more += spec.choices["routing"].bytes_per_token
    token_bytes = bytes_per_token(layers, dtype) + more * size
    return options.num_blocks(token_bytes, limit, state_bytes)


def open_expert_parallel(model: ToOpen, choice: ExpertParallel) -> Placed:
    """Open everything but the experts of other ranks; arguments and errors as of `open_tensor_parallel`."""
    group = Group(choice.process_group)
    loaded, source, options, limit, draft = model
    module = loaded.module
    if not any(map(is_stacked, module.modules())):
        raise InvalidRequest(
            f"placement=ExpertParallel: {type(inner_model(module)).__name__} hands no tokens to experts "
            "through transformers' experts interface; TensorParallel shares its products"
        )
    group.check_equal(key_of(loaded, options))
    cut = take_share(loaded, source, group, head=None, linears=False, share=ExchangedExperts)
    decoder = Decoder(module, fused=options.fused)
    layers = open_draft_layers(draft, decoder, loaded)
    if options.kv_bytes is None:
        options = replace(options, kv_bytes=int(available_memory() * _KV_SHARE) // group.size)
    runner = open_resident(decoder, loaded, options, limit, layers)
    runner.packed, runner.original, runner.cuts = cut.report, cut.original, cut.ranges
    runner.checkpoint = cut.checkpoint
    runner.placement = {
        "placement": "expert parallel",
        "ranks": group.size,
        "rank": group.rank,
        "parameters": cut.total_parameters,
        "split_experts": len(cut.experts),
    }
    return Placed(runner, options, group)
