"""Opens an engine from `LLM`'s options, and forecasts the memory and speed of offloading."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from verbatim import kernels
from verbatim.api.drafters import open_drafting
from verbatim.api.source import open_model
from verbatim.draft.config import Drafter
from verbatim.engine.admission import Admission
from verbatim.engine.drafting import Drafting
from verbatim.engine.engine import Engine
from verbatim.engine.handle import EngineHandle
from verbatim.engine.lockstep import collective_of
from verbatim.engine.scheduler import Scheduler
from verbatim.errors import EngineClosed, InvalidRequest, NotSupported
from verbatim.kv.prefix_folder import PrefixFolder
from verbatim.model.early_exit import EarlyExit, open_draft_layers
from verbatim.model.limits import eos_ids_of, max_length_of, placeholders_of
from verbatim.model.loader import LoadedModel, ModelSource
from verbatim.model.mtp_source import Mtp
from verbatim.model.spec import inner_model
from verbatim.placement.distributed.choice import (
    Cluster,
    ExpertParallel,
    PipelineParallel,
    TensorParallel,
)
from verbatim.placement.distributed.experts import open_expert_parallel
from verbatim.placement.distributed.opening import (
    open_cluster,
    open_pipeline_parallel,
    open_tensor_parallel,
)
from verbatim.placement.distributed.ranks import FollowingRunner
from verbatim.placement.distributed.runner import Clustered
from verbatim.placement.kv_caches import open_kv_caches, takes_kv_caches
from verbatim.placement.offload.choice import Offload
from verbatim.placement.offload.cost import Forecast
from verbatim.placement.offload.planner import forecast
from verbatim.placement.offload.runner import open_offloaded, units_of
from verbatim.placement.options import EngineOptions, OpenRequest, Placed
from verbatim.placement.resident import open_decoder, open_resident
from verbatim.protocols import Runner
from verbatim.text.tokenizer import Tokenizer
from verbatim.weights.identity import files_digest

_PROMPT_LOGITS_BYTES = 256 * 2**20  # limit for the logits of one chunk of prompt log-probs


def open_engine(
    loaded: LoadedModel,
    options: EngineOptions,
    *,
    draft: Drafter | None = None,
    num_draft_tokens: int | None = None,
    weak: bool = False,
    placement: Any = None,
    source: ModelSource | None = None,
    max_unread: int = 65_536,
) -> EngineHandle:
    """Open the engine of an `LLM`.

    Args:
        weak: whether to hold only a weak reference to the module.
        source: the files from which other processes load the model; None for a live module.
    """
    if kernels.missing():
        warnings.warn(kernels.MISSING, RuntimeWarning, stacklevel=4)
    if isinstance(draft, EarlyExit) and isinstance(placement, ExpertParallel):
        raise NotSupported(
            f"draft={draft!r}: not supported with placement=ExpertParallel, whose ranks draft for "
            "requests of their own and need each other's experts; use 'ngram', 'mtp' or a smaller model"
        )
    module: Any = loaded.module
    with_caches = takes_kv_caches(module)
    config = module.config if with_caches else inner_model(module).config
    model_limit = (config.max_seq_len, "max_seq_len") if with_caches else max_length_of(config)
    limit = resolve_length(options, *model_limit)
    files = None if options.prefix_folder is None else _identify(loaded, options, source)
    layers = draft if isinstance(draft, EarlyExit | Mtp) else None
    to_open = OpenRequest(loaded, source, options, limit[0], layers)
    if placement is None:
        placed = _open_here(to_open, weak)
    else:
        open_ = next(open_ for kind, open_ in _OPENERS.items() if isinstance(placement, kind))
        placed = open_(to_open, placement)
    runner, options = placed.runner, placed.options
    try:
        handle = open_runner(
            runner,
            options,
            name=loaded.name,
            tokenizer=loaded.tokenizer,
            limit=limit,
            eos_ids=eos_ids_of(loaded.generation_config, config),
            placeholders=placeholders_of(loaded.wrapper or config),
            live=loaded.live,
            config=config,
            generation_config=loaded.generation_config,
            drafting=open_drafting(draft, num_draft_tokens, runner, options, loaded),
            max_unread=max_unread,
            collective=collective_of(placed.collective),
        )
        if isinstance(runner, Clustered):
            _enable_recovery(runner, handle.scheduler)
        if files is not None:
            _open_prefix_folder(handle, options, files)
        return handle
    except BaseException:
        runner.close()
        raise


_OPENERS: dict[type, Callable[[OpenRequest, Any], Placed]] = {
    Offload: open_offloaded,
    Cluster: open_cluster,
    TensorParallel: open_tensor_parallel,
    PipelineParallel: open_pipeline_parallel,
    ExpertParallel: open_expert_parallel,
}


def _open_here(model: OpenRequest, weak: bool) -> Placed:
    """Open a model in this process's memory."""
    loaded, _, options, limit, draft = model
    if takes_kv_caches(loaded.module):
        if draft is not None:
            raise NotSupported(
                f"draft={draft!r}: the layers of a module with kv_caches can't be run one by one"
            )
        return Placed(open_kv_caches(loaded, options, limit, weak=weak), options)
    decoder = open_decoder(loaded, options, weak=weak)
    with options.device.current():
        layers = open_draft_layers(draft, decoder, loaded)
    return Placed(open_resident(decoder, loaded, options, limit, layers), options)


def _identify(loaded: LoadedModel, options: EngineOptions, source: ModelSource | None) -> str:
    """Return a digest of a model's weights, for the names of prefix files."""
    what = f"prefix_folder={str(options.prefix_folder)!r}"
    if loaded.live or source is None:
        raise NotSupported(f"{what}: a live module's weights may change without notice")
    if source.trust_remote_code:
        raise NotSupported(f"{what}: with trust_remote_code, the model's code may change")
    return files_digest(loaded)


def _open_prefix_folder(handle: EngineHandle, options: EngineOptions, files: str) -> None:
    """Let the engine load and store cached prefixes in files."""
    if isinstance(handle.runner, FollowingRunner):
        return  # rank 0 reads and writes them
    scheduler, info, path = handle.scheduler, handle.info(), options.prefix_folder
    assert path is not None
    # K and V also depend on the kind of attention, and on the heads of this rank.
    attention = info.get("attention", "exact"), info.get("ranks")
    layout = options.block_size, repr(options.quantization), attention
    model = f"{files} {info['numerics_key']} {layout}"
    pools = {"blocks": scheduler.pool}
    if scheduler.states.enabled:
        pools["states"] = scheduler.states.pool
    try:
        folder = PrefixFolder(path, options.prefix_folder_bytes, model, handle.runner, pools)
    except NotSupported as error:
        raise NotSupported(f"prefix_folder={str(path)!r}: {error}") from None
    call = weakref.WeakMethod(handle.call)  # the folder's thread must not keep the handle alive

    def between_steps(work: Callable[[], Any]) -> Any:
        if (handle_call := call()) is None:
            raise EngineClosed("the LLM was garbage-collected")
        return handle_call(work)

    folder.between_steps = between_steps
    scheduler.prefixes.folder = folder


def _enable_recovery(runner: Clustered, scheduler: Scheduler) -> None:
    """Let the cluster evict all sequences when a stage is lost, so that they are recomputed."""
    # Weak: the scheduler may refer to the runner, and the runner's stages end when it is collected.
    weak_scheduler = weakref.proxy(scheduler)

    def evict() -> int:
        num_computed: int = sum(s.num_computed for s in weak_scheduler.running)
        weak_scheduler.evict_all()
        return num_computed

    runner.group.evict = evict
    runner.group.at_rest = lambda: not any(s.num_computed for s in weak_scheduler.running)


def resolve_length(
    options: EngineOptions, limit: int | None, source: str
) -> tuple[int | None, str]:
    """Return `max_length`, or else the model's limit, with the name of its source."""
    if options.max_length is None:
        return limit, source
    if limit is not None and options.max_length > limit:
        raise InvalidRequest(
            f"max_length={options.max_length}: the model's limit is {limit} ({source})"
        )
    return options.max_length, "max_length"


def open_runner(
    runner: Runner,
    options: EngineOptions,
    *,
    tokenizer: Any = None,
    limit: tuple[int | None, str] = (None, ""),
    eos_ids: frozenset[int] = frozenset(),
    live: bool = True,
    placeholders: Mapping[int, str] | None = None,
    drafting: Drafting | None = None,
    **handle: Any,
) -> EngineHandle:
    """Build an engine around a runner.

    Args:
        tokenizer: a transformers tokenizer, or None to work with ids only.
        limit: maximum length of prompt and completion together, and the name of its source. None: the
            capacity of the KV cache.
        live: whether the caller owns the module and may change its weights.
        placeholders: ids that prompts must not contain, as in `Admission`.
        handle: further arguments of `EngineHandle`.
    """
    length, source = limit
    capacity = (runner.num_blocks - 1) * options.block_size
    if length is None or capacity < length:
        length, source = capacity, "what kv_memory holds"
    prompt_rows = max(16, _PROMPT_LOGITS_BYTES // (4 * runner.vocab_size))
    scheduler = Scheduler(
        runner,
        options.max_batch_tokens,
        options.max_sequences,
        min(prompt_rows, options.prompt_rows or prompt_rows),
        prefix_cache=options.prefix_cache,
    )
    engine = Engine(
        runner, scheduler, max_waiting=options.max_waiting, drafting=drafting, live=live
    )
    admission = Admission(
        None if tokenizer is None else Tokenizer(tokenizer),
        runner,
        length,
        source,
        eos_ids,
        engine.adapters,
        drafting is not None,
        placeholders or {},
    )
    return EngineHandle(engine, admission, **handle)


def plan_offload(source: ModelSource, offload: Offload, options: EngineOptions) -> Forecast:
    """Forecast memory and speed of an offloaded model, from the headers of its files.

    Raises:
        ModelError, NotSupported: the model can't be opened with these options; see also `forecast`.
    """
    loaded = open_model(source, False, in_memory=False)
    limit, _ = resolve_length(options, *max_length_of(inner_model(loaded.module).config))
    opened = OpenRequest(loaded, source, options, limit, None)
    return forecast(opened, offload, units_of(opened, offload))
