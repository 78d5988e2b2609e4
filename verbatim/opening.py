"""From `LLM`'s options to a model that is ready to run: module, KV store, runner, engine."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from verbatim import kernels, storyteller
from verbatim.admission import Admission
from verbatim.draft.choice import Draft, DraftModel, DraftOptions, EarlyExit, Mtp
from verbatim.draft.early_exit import EarlyExitProposer
from verbatim.draft.model import DraftModelProposer
from verbatim.draft.mtp import MtpProposer
from verbatim.draft.proposer import Proposer
from verbatim.draft.vocabulary import check_same_ids, num_embeddings
from verbatim.engine.drafting import Drafting
from verbatim.engine.engine import Engine
from verbatim.engine.lengths import AdaptiveLengths, FixedLengths
from verbatim.engine.scheduler import Scheduler
from verbatim.errors import InvalidRequest, NotSupported
from verbatim.kv.blocks import BlockPool
from verbatim.kv.store import KVStore, bytes_per_token, make_store
from verbatim.model import early_exit as cut
from verbatim.model.anatomy import inner_model
from verbatim.model.dcp.folder import find_dcp
from verbatim.model.decoder import Decoder
from verbatim.model.limits import eos_ids_of, max_length_of
from verbatim.model.loader import DTYPES, LoadedModel, load
from verbatim.model.mtp import MtpLayers
from verbatim.model.mtp_source import given_mtp, load_mtp
from verbatim.model.products import probe_report
from verbatim.options import available_memory, dtype_name, memory_bytes, total_memory
from verbatim.placement.kv_caches import open_kv_caches, speaks_kv_caches
from verbatim.placement.options import EngineOptions
from verbatim.placement.resident import Resident
from verbatim.placement.runner import Runner
from verbatim.placement.wrapped import check_runnable, unwrap
from verbatim.text.tokenizer import Tokenizer

_PROMPT_LOGITS_BYTES = 256 * 2**20  # what the logits of one chunk of prompt log-probs may take
_DRAFT_KV_SHARE = 0.1  # of the memory that is available when a draft model is opened


@dataclass(slots=True)
class Opened:
    """Everything that `LLM` stands on."""

    admission: Admission
    engine: Engine
    config: Any  # the model's own
    generation_config: Any

    def info(self) -> dict[str, Any]:
        """What was opened and how it is run, as plain values."""
        runner, admission = self.engine.runner, self.admission
        placed = runner.info()
        return {
            **placed,
            "vocab_size": runner.vocab_size,
            "max_length": admission.max_length,
            "max_length_from": admission.limit_source,
            "eos_ids": sorted(admission.eos_ids),
            "block_size": runner.block_size,
            "num_blocks": runner.num_blocks,
            "numerics_key": numerics_key(placed["dtype"], placed["kv_dtype"]),
            "probe": _probe_findings(),
        }


def open_engine(
    loaded: LoadedModel,
    options: EngineOptions,
    drafts: DraftOptions | None = None,
    *,
    weak: bool = False,
) -> Opened:
    """Build the rooms under `LLM`; `weak` holds the module only weakly."""
    if kernels.missing():
        warnings.warn(kernels.MISSING, RuntimeWarning, stacklevel=3)
    drafts = drafts or DraftOptions()
    module: Any = loaded.module
    if speaks_kv_caches(module):
        config = module.config
        limit, source = settle_length(options, config.max_seq_len, "max_seq_len")
        runner: Runner = open_kv_caches(module, options, limit, weak=weak)
        if isinstance(drafts.draft, EarlyExit | Mtp):
            raise NotSupported(
                f"draft={drafts.draft!r}: the layers of a module with kv_caches can't be run one by one"
            )
        proposer = _open_proposer(drafts.draft, runner, options, loaded)
    else:
        decoder = Decoder(module, weak=weak)
        config = inner_model(module).config
        limit, source = settle_length(options, *max_length_of(config))
        mtp = open_mtp(drafts.draft, decoder, loaded) if isinstance(drafts.draft, Mtp) else None
        resident = open_resident(decoder, loaded, options, limit, mtp)
        runner, proposer = resident, _open_proposer(drafts.draft, resident, options, loaded)
    return open_runner(
        runner,
        options,
        tokenizer=loaded.tokenizer,
        limit=(limit, source),
        eos_ids=eos_ids_of(loaded.generation_config, config),
        live=loaded.live,
        config=config,
        generation_config=loaded.generation_config,
        drafting=None if proposer is None else _drafting(proposer, drafts, runner),
    )


def open_resident(
    decoder: Decoder,
    loaded: LoadedModel,
    options: EngineOptions,
    limit: int | None,
    mtp: MtpLayers | None = None,
) -> Resident:
    """The decoder with K and V in memory, and `mtp`, which draft for it, with theirs."""
    store = _make_store(decoder, options, limit, mtp)
    runner = Resident(decoder, store, options.num_threads, mtp)
    runner.checkpoint = loaded.checkpoint
    return runner


def open_mtp(draft: Mtp, decoder: Decoder, loaded: LoadedModel) -> MtpLayers:
    """The model's layers for multi-token prediction, without stores yet.

    Raises:
        InvalidRequest, NotSupported, ModelError: it has none, or none that can be run; the message tells.
    """
    inner = inner_model(decoder.module)
    if draft.model is not None:
        return MtpLayers(given_mtp(draft.model, inner), decoder)
    if loaded.checkpoint is None:
        raise InvalidRequest(
            "draft='mtp': a live module has no files to read MTP layers from; hand them over as "
            "draft=Mtp(model=...), transformers' MtpModel made of it"
        )
    return MtpLayers(load_mtp(inner, loaded.checkpoint.folder), decoder)


def _open_proposer(
    draft: Draft | None, runner: Runner, options: EngineOptions, loaded: LoadedModel
) -> Proposer | None:
    """Whoever drafts for `runner`."""
    if isinstance(draft, Mtp):
        assert isinstance(runner, Resident) and runner.mtp is not None
        return MtpProposer(runner.mtp, options.max_batch_tokens, options.num_threads)
    if isinstance(draft, EarlyExit):
        assert isinstance(runner, Resident)
        layers = cut.EarlyExit(runner.decoder, draft.layers)
        return EarlyExitProposer(
            layers, runner.store, options.max_batch_tokens, options.num_threads
        )
    if isinstance(draft, DraftModel):
        return _open_draft_model(draft, runner, options, loaded)
    return draft


def _open_draft_model(
    draft: DraftModel, runner: Runner, options: EngineOptions, loaded: LoadedModel
) -> DraftModelProposer:
    """A model that drafts for `runner`, with K and V of its own.

    Raises:
        ModelError, UnsupportedModel, NotSupported: it can't be opened.
        InvalidRequest: it has another vocabulary.
        OutOfBlocks: its `kv_memory` is too small for one block.
    """
    small = open_model(draft.model, None, draft.dtype, None, False)
    if speaks_kv_caches(small.module):
        raise NotSupported(f"draft={small.name}: a module with kv_caches can't draft for another")
    decoder = Decoder(small.module)
    inner, anatomy = inner_model(small.module), decoder.anatomy
    check_same_ids(
        small.name, loaded.tokenizer, small.tokenizer, runner.vocab_size, anatomy.vocab_size
    )
    if draft.kv_memory is None:
        per_token = bytes_per_token(anatomy.layers, options.kv_dtype or anatomy.dtype)
        as_many = runner.num_blocks * runner.block_size * per_token
        kv_bytes = min(as_many, int(available_memory() * _DRAFT_KV_SHARE))
    else:
        kv_bytes = memory_bytes(draft.kv_memory, total_memory())
    limit, _ = max_length_of(inner.config)
    return DraftModelProposer(
        open_resident(decoder, small, replace(options, kv_bytes=kv_bytes), limit),
        vocab_size=runner.vocab_size,
        num_embeddings=num_embeddings(inner, anatomy.vocab_size),
        max_length=limit,
        max_rows=options.max_batch_tokens,
        live=small.live,
    )


def _drafting(proposer: Proposer, drafts: DraftOptions, runner: Runner) -> Drafting:
    number = drafts.num_tokens
    lengths = AdaptiveLengths() if number is None else FixedLengths(number)
    return Drafting(proposer, lengths, runner.vocab_size)


def settle_length(options: EngineOptions, limit: int | None, source: str) -> tuple[int | None, str]:
    """The model's own limit or the `max_length` that was asked for, and where the number comes from."""
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
    tokenizer: Any,
    limit: tuple[int | None, str],
    eos_ids: frozenset[int],
    live: bool,
    config: Any = None,
    generation_config: Any = None,
    drafting: Drafting | None = None,
) -> Opened:
    """Build the engine over a runner.

    Args:
        tokenizer: a transformers tokenizer, or None where ids go in and out.
        limit: tokens of prompt and completion together, and where the number comes from.
        live: somebody else owns the model, and may change its weights.
    """
    length, source = limit
    capacity = (runner.num_blocks - 1) * options.block_size
    if length is None or capacity < length:
        length, source = capacity, "what kv_memory holds"
    scheduler = Scheduler(
        BlockPool(runner.num_blocks),
        options.block_size,
        options.max_batch_tokens,
        options.max_sequences,
        max(16, _PROMPT_LOGITS_BYTES // (4 * runner.vocab_size)),
        prefix_cache=options.prefix_cache,
    )
    engine = Engine(
        runner,
        scheduler,
        max_waiting=options.max_waiting,
        drafting=drafting,
        live=live,
    )
    text = None if tokenizer is None else Tokenizer(tokenizer)
    admission = Admission(text, runner, length, source, eos_ids, drafts=drafting is not None)
    return Opened(admission, engine, config, generation_config)


def _probe_findings() -> list[str]:
    """How matrix products are kept row-invariant: by the kernels, or by what the probe found for torch."""
    return [
        f"{rows}x{columns} {dtype_name(dtype)}: tiles of {' and '.join(map(str, tiles.heights))} rows"
        + (", one thread" if tiles.one_thread else "")
        for (rows, columns), dtype, tiles in probe_report()
    ] or ["not needed: the kernels' products are row-invariant by construction"]


def numerics_key(dtype: str, kv_dtype: str) -> str:
    """What two machines must have in common to give the same bits."""
    instructions = kernels.instruction_set()
    computed_by = f"kernels{kernels.VERSION}-{instructions}"
    if instructions is None:
        computed_by = f"torch{torch.__version__}-{torch.backends.cpu.get_cpu_capability()}"
    return f"cpu/{computed_by}/{dtype}/kv-{kv_dtype}"


def open_model(
    model: Any,
    tokenizer: Any,
    dtype: str | torch.dtype,
    revision: str | None,
    trust_remote_code: bool,
    config: Any = None,
) -> LoadedModel:
    """The module and tokenizer that `LLM`'s first arguments mean."""
    dcp = find_dcp(model) if isinstance(model, str | os.PathLike) else None
    if config is not None and dcp is None:
        raise InvalidRequest(
            f"config={config!r}: only a torch.distributed.checkpoint needs one, and model={model!r} is "
            "none; leave it at None"
        )
    if isinstance(tokenizer, str | os.PathLike):
        tokenizer = Tokenizer.open(
            os.fspath(tokenizer), revision=revision, trust_remote_code=trust_remote_code
        ).hf
    if dcp is not None:
        from verbatim.model.dcp.load import load_dcp

        return load_dcp(
            dcp,
            config,
            tokenizer=tokenizer,
            dtype=dtype,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
    if isinstance(model, nn.Module):
        check_runnable(model)
        model = unwrap(model)
        _check_live(model, dtype)
        if speaks_kv_caches(model):
            return LoadedModel(model, tokenizer, None, type(model).__name__, live=True)
        inner = inner_model(model)
        name = getattr(inner.config, "name_or_path", "") or type(inner).__name__
        generation_config = getattr(inner, "generation_config", None)
        return LoadedModel(model, tokenizer, generation_config, name, live=True)
    if model is not None and not isinstance(model, str | os.PathLike):
        raise InvalidRequest(
            f"model={model!r}: must be None, a folder, a hub id or a transformers module"
        )
    loaded = load(
        storyteller.path() if model is None else model,
        dtype=dtype,
        revision=revision,
        trust_remote_code=trust_remote_code,
        with_tokenizer=tokenizer is None,
    )
    loaded.name = "storyteller" if model is None else loaded.name
    loaded.tokenizer = loaded.tokenizer if tokenizer is None else tokenizer
    return loaded


def _check_live(module: nn.Module, dtype: str | torch.dtype) -> None:
    """A live module is used as it is, in a dtype we compute in."""
    if dtype != "auto":
        raise NotSupported(f"dtype={dtype!r}: a live module keeps its own; leave it at 'auto'")
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point() and parameter.dtype not in DTYPES.values():
            raise NotSupported(
                f"{name} is {dtype_name(parameter.dtype)}; a live module must be one of {sorted(DTYPES)}"
            )


def _make_store(
    decoder: Decoder, options: EngineOptions, max_length: int | None, mtp: MtpLayers | None
) -> KVStore:
    anatomy = decoder.anatomy
    dtype = options.kv_dtype or anatomy.dtype
    recorded = 0 if anatomy.routed is None else anatomy.routed.bytes_per_token
    drafting = 0 if mtp is None else mtp.bytes_per_token(dtype)
    token_bytes = bytes_per_token(anatomy.layers, dtype) + recorded + drafting
    blocks = options.num_blocks(token_bytes, max_length)
    if mtp is not None:
        mtp.open_stores(blocks, options.block_size, dtype)
    return make_store(anatomy.layers, blocks, options.block_size, dtype, torch.device("cpu"))
