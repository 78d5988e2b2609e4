"""Selection of the engine for a model: a kept one, or one for a single call."""

from __future__ import annotations

from typing import Any

from torch import nn

from verbatim.compat.coati.arguments import GenerateArguments
from verbatim.errors import InvalidRequest, NotSupported, PromptTooLong, UnsupportedModel
from verbatim.llm import LLM
from verbatim.placement.actor import Actor, Takes, limit_of
from verbatim.placement.foreign import Foreign
from verbatim.placement.hooked import Hooked, Hooks
from verbatim.placement.kv_caches import speaks_kv_caches
from verbatim.placement.options import EngineOptions
from verbatim.placement.wrapped import check_runnable, is_transformers, unwrap
from verbatim.tensors import engine_of

_BLOCK_SIZE = 64  # blocks of a per-call engine hold only ids
_LONGEST = 2**20  # tokens, if no config states a limit: blocks are allocated for all of them


def engine_for(
    model: Any, args: GenerateArguments, hooks: Hooks | None
) -> tuple[LLM, bool, GenerateArguments]:
    """Return the engine, whether the call must close it, and the arguments within the model's limit.

    Raises:
        NotSupported: a sharded model; hooks with an open LLM or with beams.
        InvalidRequest: an argument without effect.
        UnsupportedModel: the model can't be run.
        PromptTooLong: the prompt exceeds the model's limit.
    """
    if hooks is not None and args.num_beams > 1:
        raise NotSupported(
            f"num_beams={args.num_beams} with prepare_inputs_fn or update_model_kwargs_fn: hooks keep one "
            "cache for rows that stay what they are, and beams change places"
        )
    if isinstance(model, LLM):
        if hooks is not None:
            raise NotSupported(
                "prepare_inputs_fn and update_model_kwargs_fn are for a module that is called with what "
                "they make; an open LLM makes its own inputs"
            )
        _refuse_kwargs(args, "an open LLM")
        return model, False, _within_limit(model, args)
    check_runnable(model)
    model = unwrap(model)
    if hooks is None and (is_transformers(model) or _has_kv_caches(model)):
        _refuse_kwargs(args, type(model).__name__)
        try:
            llm = engine_of(model)
        except UnsupportedModel:
            if not _runs_row_by_row(model):
                raise
        else:
            return llm, False, _within_limit(llm, args)
    limit, source = limit_of(model)
    if limit is not None:
        args = args.clamp(limit, source, args.input_ids.shape[1])
    return _open_engine(model, args, hooks), True, args


def _within_limit(llm: LLM, args: GenerateArguments) -> GenerateArguments:
    longest = max(map(len, args.prompts), default=0)
    return args.clamp(llm.max_length, llm.engine.admission.limit_source, longest)


def _has_kv_caches(model: Any) -> bool:
    return isinstance(model, nn.Module) and speaks_kv_caches(model)


def _runs_row_by_row(model: Any) -> bool:
    """Return whether the model's own forward can be called row by row."""
    if speaks_kv_caches(model):
        return "input_ids" in Takes.of(model)
    return model.can_generate() and not getattr(model.config, "is_encoder_decoder", False)


def _refuse_kwargs(args: GenerateArguments, name: str) -> None:
    for kwarg in args.model_constants:
        raise InvalidRequest(
            f"{kwarg} is not known: {name} is run on the engine's own inputs. Arguments for the model go "
            "through a prepare_inputs_fn, or to an actor whose forward takes them"
        )


def _open_engine(model: Any, args: GenerateArguments, hooks: Hooks | None) -> LLM:
    """Open an engine over the model's own forward, sized for the full length of all rows."""
    limit, source = limit_of(model)
    length = args.input_ids.shape[1] + args.new_tokens
    if length > (_LONGEST if limit is None else limit):
        raise PromptTooLong(
            f"max_length leaves {args.new_tokens} new tokens for input_ids of {args.input_ids.shape[1]}, "
            f"{length} together; the limit is {_LONGEST if limit is None else limit} ({source})"
        )
    num_rows = max(1, len(args.prompts) * args.num_beams)
    blocks = 1 + num_rows * (1 + -(-length // _BLOCK_SIZE))
    options = EngineOptions(
        kv_dtype=None,
        kv_bytes=None,
        block_size=_BLOCK_SIZE,
        max_batch_tokens=max(1, num_rows * length),
        max_sequences=num_rows,
        max_waiting=None,
        max_length=None,
        prefix_cache=False,
        num_threads=None,
    )
    runner: Foreign
    if hooks is None:
        runner = Actor(model, args.model_constants, block_size=_BLOCK_SIZE, num_blocks=blocks)
    else:
        runner = Hooked(
            model,
            hooks,
            args.input_ids.cpu(),
            args.attention_mask.cpu(),
            args.model_kwargs,
            pad_of(model, args),
            block_size=_BLOCK_SIZE,
            num_blocks=blocks,
        )
    name = type(model).__name__
    return LLM._over(runner, options, name=name, max_length=(limit, source))


def pad_of(model: Any, args: GenerateArguments) -> int:
    """Return the pad id: of the caller, the tokenizer, the model, or else 0."""
    if args.pad_id is not None:
        return args.pad_id
    if isinstance(model, LLM):
        return model.pad_token_id
    config = getattr(model, "config", None)
    for name in ("pad_token_id", "eos_token_id"):
        token_id = getattr(config, name, None)
        token_id = token_id[0] if isinstance(token_id, list) and token_id else token_id
        if isinstance(token_id, int) and token_id >= 0:
            return token_id
    return 0
