"""From a folder and a placement on several ranks to a runner."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from verbatim.batch import dummy_batch
from verbatim.errors import InvalidRequest, ModelError, NotSupported, TierFailed
from verbatim.kv.quantized import KVDtype
from verbatim.kv.store import bytes_per_token
from verbatim.model.anatomy import inner_model
from verbatim.model.decoder import Decoder
from verbatim.model.experts import is_stacked
from verbatim.model.loader import LoadedModel
from verbatim.model.mtp_source import Mtp, open_mtp
from verbatim.numerics import numerics_key
from verbatim.options import available_memory
from verbatim.placement.cluster.link import connect
from verbatim.placement.cluster.shape import PartShape
from verbatim.placement.options import EngineOptions
from verbatim.placement.parallel.choice import (
    ExpertParallel,
    PipelineParallel,
    Ranked,
    TensorParallel,
)
from verbatim.placement.parallel.crew import HOST, Crew
from verbatim.placement.parallel.exchange import ExchangedExperts, Group, differing
from verbatim.placement.parallel.following import Following, described
from verbatim.placement.parallel.heads import HeadStore, own_layers
from verbatim.placement.parallel.launch import check_size, launched, share_place
from verbatim.placement.parallel.member import Member
from verbatim.placement.parallel.ranks import Gloo
from verbatim.placement.parallel.runner import Leading
from verbatim.placement.parallel.share import Shared, open_share, take_share
from verbatim.placement.parallel.stages import PipelineLead, Stage, open_part, stage_of
from verbatim.placement.resident import open_resident
from verbatim.protocols import Runner

_KV_SHARE = 0.4  # of the memory that is available, for K and V of all ranks together


@dataclass(slots=True)
class Placed:
    """A rank of several.

    Attributes:
        together: what connects this process to others that make the same calls; None: it is alone.
    """

    runner: Runner
    together: Crew | Member | Group | None = None


def open_parallel(
    loaded: LoadedModel,
    choice: Ranked,
    options: EngineOptions,
    limit: int | None,
    mtp: Mtp | None,
    *,
    trust_remote_code: bool,
) -> Placed:
    """This process's rank of a model on several.

    Args:
        loaded: without its weights.
        limit: tokens of one sequence at most.
        mtp: draft with these layers; only with `ExpertParallel`.

    Raises:
        InvalidRequest, NotSupported: the ranks are others than `choice` says, or can't work together.
        UnsupportedModel, ModelError: a rank can't open the model.
        TierFailed: a rank is gone.
        OutOfBlocks: `kv_memory` is too small.
    """
    if isinstance(choice, ExpertParallel):
        return _open_experts(loaded, choice, options, limit, mtp)
    rank, world = launched()
    check_size(choice.size, world)
    if rank:
        port, key = share_place(rank, None)
        link = connect((HOST, port), key, {"rank": rank}, choice.timeout_s)
        link.receive()  # welcome
        member = Member(link, rank, loaded)
        try:
            told = member.serve("ready")
        except BaseException:
            member.close()
            raise
        runner: Runner = Following(member, told)
        return Placed(runner, member)
    crew = Crew(choice.size)
    with ExitStack() as undo:
        undo.callback(crew.close)
        if world > 1:
            share_place(0, (crew.port, crew.key))
        else:
            crew.start()
        leading = _lead(crew, loaded, choice, options, limit, trust_remote_code)
        crew.tell({"do": "ready", **described(leading)})
        undo.pop_all()
    if world == 1:
        return Placed(leading)
    crew.follows = True
    return Placed(leading, crew)


def _lead(
    crew: Crew,
    loaded: LoadedModel,
    choice: TensorParallel | PipelineParallel,
    options: EngineOptions,
    limit: int | None,
    trust_remote_code: bool,
) -> Leading:
    """Open every rank's share."""
    timeout_s, size = choice.timeout_s, choice.size
    crew.wait_for_all(timeout_s)
    dtype = str(inner_model(loaded.module).config.dtype).removeprefix("torch.")
    kv_dtype = "auto" if options.kv_dtype is None else _name(options.kv_dtype)
    num_threads = options.num_threads or max(1, torch.get_num_threads() // size)
    meeting = crew.folder / "meeting"
    crew.tell(
        {
            "do": "open",
            "folder": str(loaded.folder),
            "config": loaded.config,
            "dtype": dtype,
            "kv_dtype": kv_dtype,
            "trust_remote_code": trust_remote_code,
            "quantization": None if loaded.quantization is None else asdict(loaded.quantization),
            "size": size,
            "meeting": str(meeting),
            "timeout_s": timeout_s,
            "num_threads": num_threads,
            "layers": isinstance(choice, PipelineParallel),
        }
    )
    _check_keys(crew, numerics_key(dtype, kv_dtype), timeout_s)
    crew.tell({"do": "share"})
    with ExitStack() as undo:
        try:
            ranks = Gloo(meeting, 0, size, timeout_s)
            undo.callback(ranks.close)
            if isinstance(choice, PipelineParallel):
                stages = _lead_stages(crew, loaded, ranks, options, limit, num_threads)
                undo.pop_all()
                return stages
            shared = open_share(loaded, ranks, num_threads)
        except TierFailed as error:
            raise crew.failure(error) from error
        answers = crew.answers(timeout_s)
        anatomy = shared.decoder.anatomy
        settled = options.kv_dtype or anatomy.dtype
        blocks = _num_blocks(shared, size, options, settled, limit)
        told = {"num_blocks": blocks, "block_size": options.block_size, "kv_dtype": _name(settled)}
        crew.tell({"do": "store", **told})
        store = HeadStore(
            anatomy.layers, anatomy.query_heads, ranks, blocks, options.block_size, settled
        )
        undo.callback(store.release)
        kv = crew.answers(timeout_s)
        runner = Leading(
            shared.decoder,
            store,
            num_threads,
            ranks,
            shared.cut,
            crew=crew,
            weight_bytes=[shared.weight_bytes, *_in_order(answers, "weight_bytes")],
            kv_bytes=[store.nbytes, *_in_order(kv, "kv_bytes")],
        )
        runner.forward(dummy_batch())  # whatever can go wrong between ranks does so here
        runner.num_forwards = 0
        undo.pop_all()
    return runner


def _lead_stages(
    crew: Crew,
    loaded: LoadedModel,
    ranks: Gloo,
    options: EngineOptions,
    limit: int | None,
    num_threads: int,
) -> PipelineLead:
    """Open the last layers, and a place for K and V on every rank."""
    size = ranks.size
    part = open_part(loaded, 0, size, num_threads)
    try:
        answers = crew.answers(ranks.timeout_s)
        for rank, answer in sorted(answers.items()):
            if "gone" in answer:
                raise ModelError(f"rank {rank} of {size}: {answer['gone']}")
        shapes = [PartShape.from_dict(a["shape"]) for _, a in sorted(answers.items())] + [
            part.shape
        ]
        dtype = options.kv_dtype or part.shape.kv_dtype
        routed = [0 if shape.routed is None else shape.routed[0] for shape in shapes]
        before = [sum(routed[: stage_of(rank, size)]) for rank in range(size)]
        blocks = options.num_blocks(sum(bytes_per_token(s.layers, dtype) for s in shapes), limit)
        told = {"num_blocks": blocks, "block_size": options.block_size, "kv_dtype": _name(dtype)}
        crew.tell({"do": "store", "first_routed": before, **told})
        stage = Stage(part, ranks, num_threads, blocks, options.block_size, dtype, before[0])
        kv = _in_order(crew.answers(ranks.timeout_s), "kv_bytes")
        kv_bytes = [stage.store.nbytes, *kv]
        runner = PipelineLead(stage, shapes, ranks, num_threads, crew=crew, kv_bytes=kv_bytes)
        runner.forward(dummy_batch())
        runner.num_forwards = 0
    except BaseException:
        part.close()
        raise
    return runner


def _check_keys(crew: Crew, own: str, timeout_s: float) -> None:
    for rank, answer in sorted(crew.answers(timeout_s).items()):
        if "gone" in answer:
            raise ModelError(f"rank {rank} of {crew.size}: {answer['gone']}")
        if answer["key"] != own:
            raise NotSupported(differing(rank, answer["key"], own))


def _num_blocks(
    shared: Shared, size: int, options: EngineOptions, dtype: KVDtype, limit: int | None
) -> int:
    """Blocks of K and V, of which all ranks have as many; the budget is that of all together."""
    anatomy = shared.decoder.anatomy
    layers = [
        layer
        for rank in range(size)
        for layer in own_layers(anatomy.layers, anatomy.query_heads, rank, size)
    ]
    recorded = 0 if anatomy.routed is None else anatomy.routed.bytes_per_token * size
    return options.num_blocks(bytes_per_token(layers, dtype) + recorded, limit)


def _open_experts(
    loaded: LoadedModel,
    choice: ExpertParallel,
    options: EngineOptions,
    limit: int | None,
    mtp: Mtp | None,
) -> Placed:
    """Everything but the experts of other ranks."""
    group = Group(choice.process_group)
    module = loaded.module
    if not any(map(is_stacked, module.modules())):
        raise InvalidRequest(
            f"placement=ExpertParallel: {type(inner_model(module)).__name__} hands no tokens to experts "
            "through transformers' experts interface; TensorParallel shares its products"
        )
    dtype = str(inner_model(module).config.dtype).removeprefix("torch.")
    kv_dtype = "auto" if options.kv_dtype is None else _name(options.kv_dtype)
    kind = loaded.quantization
    group.check_equal(numerics_key(dtype, kv_dtype, None if kind is None else kind.name))
    cut = take_share(loaded, group, head=None, linears=False, share=ExchangedExperts)
    decoder = Decoder(module, fused=options.fused)
    layers = None if mtp is None else open_mtp(mtp, decoder, loaded)
    if options.kv_bytes is None:
        options = replace(options, kv_bytes=int(available_memory() * _KV_SHARE) // group.size)
    runner = open_resident(decoder, loaded, options, limit, layers)
    runner.packed = cut.report
    runner.placement = {
        "placement": "expert parallel",
        "ranks": group.size,
        "rank": group.rank,
        "parameters": cut.total_parameters,
        "split_experts": len(cut.experts),
    }
    return Placed(runner, group)


def _in_order(answers: dict[int, dict[str, Any]], name: str) -> list[int]:
    return [int(answers[rank][name]) for rank in sorted(answers)]


def _name(dtype: KVDtype) -> str:
    return str(dtype.name if hasattr(dtype, "name") else dtype).removeprefix("torch.")
