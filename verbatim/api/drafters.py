"""Opens the proposer of `LLM(draft=...)`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from verbatim.api.source import open_model
from verbatim.common.checks import memory_bytes
from verbatim.draft.config import NAMES, Drafter, DraftModel
from verbatim.draft.layers import LayersProposer
from verbatim.draft.model import DraftModelLayers, DraftModelProposer
from verbatim.engine.drafting import Drafting
from verbatim.engine.lengths import DraftLengths
from verbatim.errors import InvalidRequest, ModelError, NotSupported, OutOfBlocks
from verbatim.kv.store import bytes_per_token
from verbatim.model.device import resolve_device
from verbatim.model.early_exit import EarlyExit
from verbatim.model.limits import max_length_of
from verbatim.model.loader import LoadedModel, ModelSource
from verbatim.model.mtp_source import Mtp
from verbatim.model.spec import inner_model
from verbatim.placement.distributed.ranks import FollowingRunner
from verbatim.placement.kv_caches import takes_kv_caches
from verbatim.placement.options import EngineOptions
from verbatim.placement.resident import open_decoder, open_resident
from verbatim.protocols import Runner
from verbatim.weights.load import open_weights

_KV_SHARE = 0.1  # fraction of the memory available when a draft model is opened
_MAX_PADDING = 1024  # maximum number of padding ids of a vocabulary


def open_drafting(
    draft: Drafter | None,
    num_tokens: int | None,
    runner: Runner,
    options: EngineOptions,
    loaded: LoadedModel,
) -> Drafting | None:
    """Open the proposer for `runner`; return None without `draft`.

    Args:
        runner: the model's runner; no draft model is opened for a `FollowingRunner`, which runs no steps.
        num_tokens: tokens per draft; None: adaptive.
    """
    if draft is None:
        return None
    proposer: Any = draft
    if isinstance(draft, Mtp | EarlyExit):
        proposer = LayersProposer(runner, options.max_batch_tokens, live=loaded.live)
    elif isinstance(draft, DraftModel) and not isinstance(runner, FollowingRunner):
        proposer = _open_draft_model(draft, runner, options, loaded)
    owns = proposer is not draft
    return Drafting(proposer, DraftLengths(num_tokens), runner.vocab_size, owns=owns)


def _open_draft_model(
    draft: DraftModel, runner: Runner, options: EngineOptions, loaded: LoadedModel
) -> DraftModelProposer:
    """Open a draft model for `runner`, with its own KV store."""
    try:
        small = open_weights(open_model, ModelSource(draft.model, draft.dtype), None)
    except ModelError as error:
        if isinstance(draft.model, str):  # it may be a misspelt proposer name
            message = (
                f"draft={draft.model!r}: not one of {NAMES}, and can't be opened as a model: "
                f"{error}"
            )
            raise type(error)(message) from error
        raise
    if takes_kv_caches(small.module):
        raise NotSupported(f"draft={small.name}: a module with kv_caches can't draft for another")
    if small.live:  # it stays on its device
        exact: Any = options.device.batch_invariant or "auto"
        options = replace(options, device=resolve_device("auto", exact, small.module))
    decoder, device = open_decoder(small, options), options.device
    inner, spec = inner_model(small.module), decoder.spec
    _check_same_ids(
        small.name, loaded.tokenizer, small.tokenizer, runner.vocab_size, spec.vocab_size
    )
    if draft.kv_memory is None:
        per_token = bytes_per_token(spec.layers, options.kv_dtype or spec.dtype)
        full_bytes = runner.num_blocks * runner.block_size * per_token
        full_bytes += 8 * options.max_sequences * sum(state.nbytes for state in spec.states)
        kv_bytes = min(full_bytes, int(device.available_memory * _KV_SHARE))
    else:
        kv_bytes = memory_bytes(draft.kv_memory, device.total_memory)
    limit, _ = max_length_of(inner.config)
    num_embeddings = _num_embeddings(inner, spec.vocab_size)
    layers = DraftModelLayers(decoder, runner.vocab_size, num_embeddings)
    try:
        options = replace(options, kv_bytes=kv_bytes)
        draft_runner = open_resident(decoder, small, options, limit, layers)
    except OutOfBlocks as error:
        raise OutOfBlocks(f"DraftModel: {error}") from None
    return DraftModelProposer(
        draft_runner,
        options.max_batch_tokens,
        max_length=limit,
        live=small.live,
        shares=options.prefix_cache,
    )


def _num_embeddings(inner: Any, vocab_size: int) -> int:
    """Return the number of rows of a transformers model's embedding; `vocab_size` if it has no embedding."""
    try:
        rows: int = inner.get_input_embeddings().weight.shape[0]
    except (AttributeError, NotImplementedError):
        return vocab_size
    return rows


def _check_same_ids(
    name: str, ours: Any, theirs: Any, vocab_size: int, draft_vocab_size: int
) -> None:
    """Raise InvalidRequest unless the draft model `name` has the model's vocabulary.

    If both tokenizers are known, every id that is in both must be the same token. Otherwise only the sizes
    are compared, which may differ by padding.

    `ours` and `theirs` are transformers tokenizers of the model and of the draft model, or None.
    """
    if ours is not None and theirs is not None:
        tokens = {i: token for token, i in ours.get_vocab().items()}
        others = {i: token for token, i in theirs.get_vocab().items()}
        differing = sorted(i for i in tokens.keys() & others.keys() if tokens[i] != others[i])
        if differing:
            i = differing[0]
            raise InvalidRequest(
                f"draft={name!r}: its tokenizer differs from the model's: id {i} is {others[i]!r} there and "
                f"{tokens[i]!r} here, and {len(differing)} ids of {len(tokens)} differ"
            )
    elif abs(vocab_size - draft_vocab_size) > _MAX_PADDING:
        raise InvalidRequest(
            f"draft={name!r}: its vocabulary has {draft_vocab_size} ids, and the model's has "
            f"{vocab_size}; without both tokenizers to compare, the sizes may differ by at most "
            f"{_MAX_PADDING} ids of padding"
        )
