"""`verbatim.generate`: tensors in, tensors out, for training code and custom loops."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from verbatim.api.llm import LLM
from verbatim.api.opening import open_runner
from verbatim.api.padded import PaddedRows
from verbatim.common.checks import check_kind, integer, optional_integer
from verbatim.core import Request, Result
from verbatim.engine.handle import EngineHandle
from verbatim.engine.lockstep import run_together
from verbatim.errors import (
    EngineClosed,
    InvalidRequest,
    ModelChanged,
    PromptTooLong,
    UnsupportedModel,
)
from verbatim.model.limits import eos_ids_of, pad_id_of
from verbatim.options import on_cpu
from verbatim.params import SamplingParams
from verbatim.placement.actor import ActorDecoder, StepForward, limit_of
from verbatim.placement.callbacks import CallbackDecoder
from verbatim.placement.external import RowsDecoder, RowsRunner
from verbatim.placement.kv_caches import takes_kv_caches
from verbatim.placement.options import engine_options
from verbatim.placement.wrapped import check_runnable, is_transformers, unwrap

_T = TypeVar("_T")
_ID_BLOCK = 64  # block size of an engine without a KV cache: its blocks hold only ids
_MAX_LENGTH = 2**20  # of a row if no config states a limit; blocks are allocated for all of it
# Maximum ids of all rows of such an engine, unless a single row needs more; excess rows are evicted.
_MAX_IDS = 2**22

# One engine per live module, dropped with its module.
_engines: weakref.WeakKeyDictionary[nn.Module, LLM] = weakref.WeakKeyDictionary()
_engines_lock = threading.Lock()  # held briefly: opening and refreshing wait for other forwards


def engine_of(model: LLM | nn.Module) -> LLM:
    """Return `model` itself if it is an LLM, else the LLM that is cached for this module."""
    if isinstance(model, LLM):
        return model
    kinds = "an LLM, or a module, either transformers' or one with kv_caches"
    check_kind("model", model, nn.Module, kinds)
    with on_cpu():
        while (cached := _engines.get(model)) is not None:
            with suppress(ModelChanged, EngineClosed):
                cached.engine.runner.refresh()
                if not cached.engine.closed:
                    return cached
            with _engines_lock:
                if _engines.get(model) is cached:
                    del _engines[model]
            cached.close()
        opened = LLM(model, _weak=True)
        with _engines_lock:
            engine = _engines.setdefault(model, opened)
        if engine is not opened:  # another thread was faster
            opened.close()
        return engine


def run_admitted(
    model: LLM | nn.Module,
    admit: Callable[[LLM], tuple[list[Request], _T]],
    process_group: Any = None,
) -> tuple[list[Result], _T]:
    """Open `model` and run the requests that `admit` returns, on all ranks of `process_group` if given.

    An error of `admit` also fails the other ranks' calls.

    Returns:
        The results, and the second value that `admit` returns.
    """
    extras: list[_T] = []

    def requests_for(llm: LLM) -> list[Request]:
        requests, extra = admit(llm)
        extras.append(extra)
        return requests

    def begin() -> tuple[EngineHandle, list[Request]]:
        llm = engine_of(model)
        return llm.engine, requests_for(llm)

    if process_group is not None:
        return run_together(begin, process_group), extras[0]
    llm = engine_of(model)
    return llm.engine.admit_and_run(lambda: requests_for(llm)), extras[0]


def has_known_layers(model: Any) -> bool:
    """Return whether `LLM` can open `model`: a transformers module, or one with `kv_caches`.

    Other models with a forward are opened by `open_forward`.
    """
    model = unwrap(model)
    return isinstance(model, nn.Module) and (takes_kv_caches(model) or is_transformers(model))


def open_forward(
    model: Callable[..., Any],
    *,
    max_length: int,
    max_sequences: int = 256,
    arguments: Mapping[str, Any] = MappingProxyType({}),
    hooks: tuple[Callable[..., Any] | None, Callable[..., Any] | None] | None = None,
    batch: tuple[Tensor, Tensor] | None = None,
    pad_token_id: int | None = None,
) -> LLM:
    """Open any model that returns logits, to run its own forward. Close the LLM after use.

    Without hooks, every step computes each row from its beginning: nothing is cached, and a step costs as
    much as a prefill.

    Args:
        model: called as `model(input_ids=ids)` with `[1, L]` int64, and an `attention_mask` of ones if it
            takes one. It returns an object or a dict with `logits` `[1, T, V]` of the last T positions.
            Alternatively, a wrapper with Megatron's `run_one_forward_step`.
        max_length: maximum tokens of a row; the model's own limit applies as well.
        max_sequences: maximum number of rows at once.
        arguments: further keyword arguments of the model, the same for each call.
        hooks: `prepare(input_ids, past=past, **arguments)` returns the model's inputs, `update(outputs,
            arguments)` the arguments of the next step; either may be None. All rows then run together.
        batch: with hooks, the ids `[B, P]`, padded on the left, and their mask; no other rows can be run.
        pad_token_id: with hooks, the id that fills a row after its end. None: the model's `pad_token_id`.

    Raises:
        UnsupportedModel: the model takes no `input_ids`, or returns no such logits.
        PromptTooLong: `max_length` above 2**20, if the model's config has no limit.
        InvalidRequest, NotSupported: arguments that the model does not take, hooks without a batch, numbers
            out of range, or modules on another device.
    """
    name = type(model).__name__
    max_length = integer("max_length", max_length)
    max_sequences = integer("max_sequences", max_sequences)
    check_kind("arguments", arguments, Mapping, "a dict of names and values")
    pad_token_id = optional_integer("pad_token_id", pad_token_id, -(2**63), 2**63 - 1)
    if hooks is not None:
        _check_hooks(hooks, batch)
    if hasattr(model, "run_one_forward_step"):
        model = type(name, (StepForward,), {})(model)  # errors name the wrapper
    check_runnable(model)
    model = unwrap(model)
    config: Any = getattr(model, "config", None)
    if hooks is None and is_transformers(model):
        generates: Any = getattr(model, "can_generate", bool)
        if not generates() or getattr(config, "is_encoder_decoder", False):
            raise UnsupportedModel(f"{name} has no logits for input_ids alone")
    limit, source = limit_of(model)
    if limit is None and max_length > _MAX_LENGTH:
        raise PromptTooLong(f"max_length={max_length}: at most {_MAX_LENGTH} ({source})")
    if limit is None or max_length < limit:
        limit, source = max_length, "max_length"
    blocks_per_row = 1 + -(-limit // _ID_BLOCK)
    num_blocks = max_sequences * blocks_per_row
    if hooks is None:
        num_blocks = min(num_blocks, max(blocks_per_row, _MAX_IDS // _ID_BLOCK))
    options = engine_options(
        block_size=_ID_BLOCK,
        max_batch_tokens=max(1, max_sequences * limit),
        max_sequences=max_sequences,
        prefix_cache=False,
    )
    eos_ids = eos_ids_of(config)
    decoder: RowsDecoder
    if hooks is None:
        decoder = ActorDecoder(model, arguments)
    else:
        assert batch is not None
        (ids, mask), pad = batch, pad_token_id
        if pad is None:
            pad = pad_id_of([config], eos_ids)
        prepare, update = hooks
        decoder = CallbackDecoder(model, prepare, update, ids, mask, arguments, pad)
    runner = RowsRunner(decoder, block_size=_ID_BLOCK, num_blocks=1 + num_blocks)
    handle = open_runner(
        runner, options, limit=(limit, source), eos_ids=eos_ids, name=name, config=config
    )
    return LLM._over(handle)


def _check_hooks(hooks: Any, batch: Any) -> None:
    is_pair = isinstance(hooks, tuple | list) and len(hooks) == 2
    if not (is_pair and all(hook is None or callable(hook) for hook in hooks)):
        raise InvalidRequest(f"hooks={hooks!r}: must be a pair of prepare and update")
    if not isinstance(batch, tuple | list) or len(batch) != 2 or batch[1] is None:
        raise InvalidRequest("hooks need batch=(ids, mask), the rows that they are called with")
    PaddedRows.of(*batch, name="ids of batch", left=True)  # checks them


def generate(
    model: LLM | nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    max_new_tokens: int | None = None,
    *,
    pad_token_id: int | None = None,
    **params: Any,
) -> Tensor:
    """Complete each row of `input_ids`.

    Args:
        model: a live module, either transformers' or one with `kv_caches`; or an open `LLM`.
        input_ids: `[B, P]` int64.
        attention_mask: `[B, P]` of 0 and 1, or bool; 0 marks padding, before or after a row's tokens.
            None: no padding. Padding is not part of the prompt: the completion of a row is the same with
            and without it.
        max_new_tokens: maximum new tokens per row; None: up to the length limit.
        pad_token_id: id that fills a row after its end. None: the model's pad id, else its
            end-of-sequence id, else 0.
        params: fields of `SamplingParams`, except `n`, `max_tokens` and those that request more than
            ids (`logprobs`, `prompt_logprobs`, `hidden_states`, `record_routing`, `record_indices`). Row b
            draws with sample index b and `seed`; without a seed, one is drawn from torch's default generator.

    Returns:
        `[B, P + N]` int64, an ordinary tensor on `input_ids`' device: the input, then the new tokens;
        N is the length of the longest completion.

    Raises:
        InvalidRequest: wrong shapes, a row with padding only, a parameter out of range.
    """

    def admit(llm: LLM) -> tuple[list[Request], tuple[PaddedRows, int]]:
        rows = PaddedRows.of(input_ids, attention_mask)
        _check_names(params)
        pad = optional_integer("pad_token_id", pad_token_id, -(2**63), 2**63 - 1)
        seed = draw_seed() if params.get("seed") is None else params["seed"]
        settings = SamplingParams(max_tokens=max_new_tokens, **params | {"seed": seed})
        requests = llm._admit_rows(rows.rows(), settings)
        return requests, (rows, llm.pad_token_id if pad is None else pad)

    with on_cpu():
        results, (rows, pad) = run_admitted(model, admit)
    completions = [result.outputs[0].token_ids for result in results]
    return rows.joined(completions, pad, device=input_ids.device)


def draw_seed() -> int:
    """Draw a seed from torch's default generator, so that `torch.manual_seed` makes a run repeatable."""
    return int(torch.randint(2**53, (), device="cpu"))


_NOT_ACCEPTED = frozenset(
    "n max_tokens logprobs prompt_logprobs hidden_states record_routing record_indices".split()
)


def _check_names(params: dict[str, Any]) -> None:
    known = set(SamplingParams.__slots__) - _NOT_ACCEPTED
    for name in params:
        if name in _NOT_ACCEPTED:
            raise InvalidRequest(
                f"{name} is not accepted here: one completion per row, max_new_tokens long, ids only"
            )
        if name not in known:
            raise InvalidRequest(
                f"{name} is unknown; SamplingParams has {', '.join(sorted(known))}"
            )
