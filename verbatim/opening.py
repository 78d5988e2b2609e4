"""From `LLM`'s options to a model that is ready to run: module, KV store, runner, engine."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from verbatim import kernels, storyteller
from verbatim.admission import Admission
from verbatim.engine.engine import Engine
from verbatim.engine.scheduler import Scheduler
from verbatim.errors import InvalidRequest, NotSupported, OutOfBlocks
from verbatim.kv.blocks import BlockPool
from verbatim.kv.quantized import KVDtype, settle_kv_dtype
from verbatim.kv.store import KVStore, bytes_per_token, make_store
from verbatim.model.anatomy import inner_model
from verbatim.model.decoder import Decoder
from verbatim.model.limits import eos_ids_of, max_length_of
from verbatim.model.loader import DTYPES, LoadedModel, load
from verbatim.model.products import probe_report
from verbatim.options import available_memory, dtype_name
from verbatim.placement.resident import Resident
from verbatim.text.tokenizer import Tokenizer

_DEFAULT_KV_SHARE = 0.4  # of the memory that is available when the model is opened
_PROMPT_LOGITS_BYTES = 256 * 2**20  # what the logits of one chunk of prompt log-probs may take


@dataclass(slots=True)
class Opened:
    """Everything that `LLM` stands on."""

    admission: Admission
    engine: Engine
    decoder: Decoder
    config: Any  # the model's own
    generation_config: Any

    def info(self) -> dict[str, Any]:
        """What was opened and how it is run, as plain values."""
        module, anatomy = self.decoder.module, self.decoder.anatomy
        runner, admission = self.engine.runner, self.admission
        placed = runner.info()
        dtype = dtype_name(anatomy.dtype)
        parameters = list(module.parameters())
        return {
            "architecture": type(inner_model(module)).__name__,
            "parameters": sum(p.numel() for p in parameters),
            "dtype": dtype,
            "weight_bytes": sum(p.nbytes for p in parameters),
            "layers": len(anatomy.layers),
            "vocab_size": anatomy.vocab_size,
            "max_length": admission.max_length,
            "max_length_from": admission.limit_source,
            "eos_ids": sorted(admission.eos_ids),
            "kv_bytes_per_token": bytes_per_token(
                anatomy.layers, settle_kv_dtype(placed["kv_dtype"])
            ),
            "block_size": runner.block_size,
            "num_blocks": runner.num_blocks,
            **placed,
            "numerics_key": numerics_key(dtype, placed["kv_dtype"]),
            "safety_net": sorted(anatomy.needs_safety_net),
            "probe": _probe_findings(),
        }


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """`LLM`'s options that shape the engine, checked; its docstring says what they mean."""

    kv_dtype: KVDtype | None  # None: that of the model's keys
    kv_bytes: int | None  # None: a share of what is available
    block_size: int
    max_batch_tokens: int
    max_sequences: int
    max_waiting: int | None
    max_length: int | None
    prefix_cache: bool
    num_threads: int | None


def open_engine(loaded: LoadedModel, options: EngineOptions, *, weak: bool = False) -> Opened:
    """Build the rooms under `LLM`; `weak` holds the module only weakly."""
    if kernels.missing():
        warnings.warn(kernels.MISSING, RuntimeWarning, stacklevel=3)
    decoder = Decoder(loaded.module, weak=weak)
    config = inner_model(loaded.module).config
    limit, source = max_length_of(config)
    if options.max_length is not None:
        if limit is not None and options.max_length > limit:
            raise InvalidRequest(
                f"max_length={options.max_length}: the model's limit is {limit} ({source})"
            )
        limit, source = options.max_length, "max_length"
    store = _make_store(decoder, options, limit)
    capacity = (store.num_blocks - 1) * options.block_size
    if limit is None or capacity < limit:
        limit, source = capacity, "what kv_memory holds"
    runner = Resident(decoder, store, options.num_threads)
    runner.checkpoint = loaded.checkpoint
    scheduler = Scheduler(
        BlockPool(store.num_blocks),
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
        forget_when_idle=loaded.live,
    )
    admission = Admission(
        None if loaded.tokenizer is None else Tokenizer(loaded.tokenizer),
        runner,
        limit,
        source,
        eos_ids_of(loaded.generation_config, config),
    )
    return Opened(admission, engine, decoder, config, loaded.generation_config)


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
) -> LoadedModel:
    """The module and tokenizer that `LLM`'s first arguments mean."""
    if isinstance(tokenizer, str | os.PathLike):
        tokenizer = Tokenizer.open(
            os.fspath(tokenizer), revision=revision, trust_remote_code=trust_remote_code
        ).hf
    if isinstance(model, nn.Module):
        _check_live(model, dtype)
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
    """A live module is used as it is: on the CPU, in a dtype we compute in."""
    if dtype != "auto":
        raise NotSupported(f"dtype={dtype!r}: a live module keeps its own; leave it at 'auto'")
    for name, parameter in module.named_parameters():
        if parameter.device.type != "cpu":
            raise NotSupported(f"{name} is on {parameter.device}; only the CPU is built")
        if parameter.is_floating_point() and parameter.dtype not in DTYPES.values():
            raise NotSupported(
                f"{name} is {dtype_name(parameter.dtype)}; a live module must be one of {sorted(DTYPES)}"
            )


def _make_store(decoder: Decoder, options: EngineOptions, max_length: int | None) -> KVStore:
    """As many blocks as the memory holds, and no more than can ever be used at once."""
    anatomy, size = decoder.anatomy, options.block_size
    dtype = options.kv_dtype or anatomy.dtype
    recorded = 0 if anatomy.routed is None else anatomy.routed.bytes_per_token
    block_bytes = size * (bytes_per_token(anatomy.layers, dtype) + recorded)
    budget = options.kv_bytes or int(available_memory() * _DEFAULT_KV_SHARE)
    blocks = budget // block_bytes - 1
    if blocks < 1:
        raise OutOfBlocks(
            f"kv_memory of {budget} bytes is too small: one block of {size} tokens and the "
            f"scratch block take {2 * block_bytes} bytes"
        )
    if max_length is not None:
        blocks = min(blocks, options.max_sequences * -(-max_length // size))
    return make_store(anatomy.layers, blocks + 1, size, dtype, torch.device("cpu"))
