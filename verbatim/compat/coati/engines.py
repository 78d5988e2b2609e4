"""Which engine runs a model: the one that is kept for it, or one for this call alone."""

from __future__ import annotations

from typing import Any

from torch import nn

from verbatim.compat.coati.arguments import Ask
from verbatim.errors import InvalidRequest, NotSupported, PromptTooLong, UnsupportedModel
from verbatim.llm import LLM
from verbatim.placement.actor import Actor, Takes, limit_of
from verbatim.placement.foreign import Foreign
from verbatim.placement.hooked import Hooked, Hooks
from verbatim.placement.kv_caches import speaks_kv_caches
from verbatim.placement.options import EngineOptions
from verbatim.placement.wrapped import check_runnable, is_transformers, unwrap
from verbatim.tensors import engine_of

_BLOCK_SIZE = 64  # ids are all that such an engine's blocks hold
_LONGEST = 2**20  # tokens, where no config tells a limit: blocks are made for all of them


def engine_for(model: Any, ask: Ask, hooks: Hooks | None) -> tuple[LLM, bool]:
    """The engine, and whether it was made for this call and must be closed with it.

    Raises:
        NotSupported: a sharded model; hooks with an open LLM or with beams.
        InvalidRequest: an argument that nothing would use.
        UnsupportedModel: the model can't be run.
        PromptTooLong: prompt and completion go beyond the model's limit.
    """
    if hooks is not None and ask.num_beams > 1:
        raise NotSupported(
            f"num_beams={ask.num_beams} with prepare_inputs_fn or update_model_kwargs_fn: hooks keep one "
            "cache for rows that stay what they are, and beams change places"
        )
    if isinstance(model, LLM):
        if hooks is not None:
            raise NotSupported(
                "prepare_inputs_fn and update_model_kwargs_fn are for a module that is called with what "
                "they make; an open LLM makes its own inputs"
            )
        _refuse_kwargs(ask, "an open LLM")
        return model, False
    check_runnable(model)
    model = unwrap(model)
    if hooks is None and (is_transformers(model) or _has_kv_caches(model)):
        _refuse_kwargs(ask, type(model).__name__)
        try:
            return engine_of(model), False
        except UnsupportedModel:
            if not _is_actor(model):
                raise
    return _own_engine(model, ask, hooks), True


def _has_kv_caches(model: Any) -> bool:
    return isinstance(model, nn.Module) and speaks_kv_caches(model)


def _is_actor(model: Any) -> bool:
    """Can its own forward be called row by row, if not on the engine's inputs?"""
    if speaks_kv_caches(model):
        return "input_ids" in Takes.of(model)
    return model.can_generate() and not getattr(model.config, "is_encoder_decoder", False)


def _refuse_kwargs(ask: Ask, name: str) -> None:
    for kwarg in ask.model_constants:
        raise InvalidRequest(
            f"{kwarg} is not known: {name} is run on the engine's own inputs. Arguments for the model go "
            "through a prepare_inputs_fn, or to an actor whose forward takes them"
        )


def _own_engine(model: Any, ask: Ask, hooks: Hooks | None) -> LLM:
    """An engine over the model's own forward, with a seat and blocks for all that each row may become."""
    limit, source = limit_of(model)
    length = ask.input_ids.shape[1] + ask.new_tokens
    if length > (_LONGEST if limit is None else limit):
        raise PromptTooLong(
            f"max_length leaves {ask.new_tokens} new tokens for input_ids of {ask.input_ids.shape[1]}, "
            f"{length} together; the limit is {_LONGEST if limit is None else limit} ({source})"
        )
    seats = max(1, len(ask.prompts) * ask.num_beams)
    blocks = 1 + seats * (1 + -(-length // _BLOCK_SIZE))
    options = EngineOptions(
        kv_dtype=None,
        kv_bytes=None,
        block_size=_BLOCK_SIZE,
        max_batch_tokens=max(1, seats * length),
        max_sequences=seats,
        max_waiting=None,
        max_length=None,
        prefix_cache=False,
        num_threads=None,
    )
    runner: Foreign
    if hooks is None:
        runner = Actor(model, ask.model_constants, block_size=_BLOCK_SIZE, num_blocks=blocks)
    else:
        runner = Hooked(
            model,
            hooks,
            ask.input_ids.cpu(),
            ask.attention_mask.cpu(),
            ask.model_kwargs,
            pad_of(model, ask),
            block_size=_BLOCK_SIZE,
            num_blocks=blocks,
        )
    name = type(model).__name__
    return LLM._over(runner, options, name=name, max_length=(limit, source))


def pad_of(model: Any, ask: Ask) -> int:
    """What fills a row after its end: what the caller or the tokenizer says, else the model, else 0."""
    if ask.pad_id is not None:
        return ask.pad_id
    if isinstance(model, LLM):
        return model.pad_token_id
    config = getattr(model, "config", None)
    for name in ("pad_token_id", "eos_token_id"):
        found = getattr(config, name, None)
        found = found[0] if isinstance(found, list) and found else found
        if isinstance(found, int) and found >= 0:
            return found
    return 0
