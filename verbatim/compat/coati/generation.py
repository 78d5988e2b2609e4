"""`generate` and `generate_streaming`, with Coati's signatures, and its helper functions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, closing
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from verbatim.api.llm import LLM
from verbatim.api.padded import PaddedRows
from verbatim.api.tensors import draw_seed, engine_of, has_known_layers, open_forward
from verbatim.common.checks import check_kind, integer, optional_integer
from verbatim.compat.shared import check_search, flag, new_rows
from verbatim.core import Request
from verbatim.engine.handle import EngineHandle
from verbatim.engine.lockstep import run_together
from verbatim.errors import InvalidRequest, NotSupported, PromptTooLong, UnsupportedModel
from verbatim.params import SamplingParams
from verbatim.placement.actor import field_of

if TYPE_CHECKING:
    from transformers import LogitsProcessorList

_LARGEST_ID = 2**63 - 1  # of int64
_CACHE_KWARGS = ("use_cache", "cache_position")


def generate(
    model: Any,
    input_ids: Tensor,
    tokenizer: Any,
    max_length: int,
    num_beams: int = 1,
    do_sample: bool = True,
    early_stopping: bool = True,
    top_k: int | None = None,
    top_p: float | None = None,
    temperature: float | None = None,
    prepare_inputs_fn: Callable[..., dict[str, Any]] | None = None,
    update_model_kwargs_fn: Callable[..., dict[str, Any]] | None = None,
    **model_kwargs: Any,
) -> Tensor:
    """Continue each row of `input_ids`.

    Args:
        model: an open `LLM`; a live transformers module, even within PEFT or DistributedDataParallel; a
            module called as `model(tokens, kv_caches=...)`; or any callable `model(input_ids=...,
            attention_mask=...)` that returns an object or a dict with `logits` `[B, T, V]`.
        input_ids: `[B, P]` integers, padded on the left.
        tokenizer: its `padding_side` must be "left"; its `eos_token_id` ends a row; its `pad_token_id` is
            masked before a row, and fills it after its end.
        max_length: maximum number of columns of the result, including the prompt. It is clamped to the
            model's limit, with a warning.
        num_beams: above 1, return the best beam of each row; requires `do_sample=False`.
        do_sample: False always takes the likeliest token.
        early_stopping: False pads the result to the full length; True ends it with the longest row.
        top_k, top_p, temperature: None disables each; so does `top_k=-1`.
        prepare_inputs_fn: `f(input_ids, past=past, **model_kwargs)` returns the inputs of each forward.
        update_model_kwargs_fn: `f(outputs, model_kwargs)` returns the `model_kwargs` of the next step.
        model_kwargs: `max_new_tokens`; `stop_token_ids`: sequences of ids that end a row, `[[20, 21], [10]]`,
            or a single one, `[20, 21]` or `20`; `attention_mask` `[B, P]` (default: leading pads are
            masked); `seed` (default: drawn from torch's default generator); `pad_token_id`;
            `stream_interval`, for `generate_streaming`; `process_group`, a torch.distributed group for a
            model that communicates between ranks: all ranks run the same number of forwards;
            `use_cache` and `cache_position`, for hooks, and `apply_loss_mask`, which is ignored: they
            change no token. Others are passed to the hooks, or to a model run by its own forward.

    Returns:
        `[B, P + N]` int64 on the device of `input_ids`, an ordinary tensor.

    Raises:
        InvalidRequest, NotSupported, PromptTooLong, UnsupportedModel: before any token is generated.
        RequestFailed: no token can be drawn for a row.

    Exceptions of the model and of hooks are passed on.
    """
    group = model_kwargs.pop("process_group", None)
    sampling = num_beams, do_sample, top_k, top_p, temperature
    hooks = prepare_inputs_fn, update_model_kwargs_fn
    rows = input_ids, tokenizer, max_length, early_stopping
    calls: list[_Call] = []

    def begin() -> tuple[EngineHandle, list[Request]]:
        calls.append(call := _Call(model, *rows, sampling, hooks, model_kwargs))
        return call.llm.engine, list(call.requests.values())

    try:
        run_together(begin, group)
        return calls[0].output(*calls[0].progress())
    finally:
        for call in calls:
            call.close()


def generate_streaming(
    model: Any,
    input_ids: Tensor,
    tokenizer: Any,
    max_length: int,
    num_beams: int = 1,
    do_sample: bool = True,
    early_stopping: bool = False,
    top_k: int | None = None,
    top_p: float | None = None,
    temperature: float | None = None,
    prepare_inputs_fn: Callable[..., dict[str, Any]] | None = None,
    update_model_kwargs_fn: Callable[..., dict[str, Any]] | None = None,
    **model_kwargs: Any,
) -> Generator[Tensor, None, None]:
    """Stream `generate`: yield the whole tensor, prompt included, at 1, 1 + k, 1 + 2k, ... new tokens.

    k is `stream_interval`, 2 by default; the last tensor is complete, whatever its length. Arguments are
    checked when this is called; the first forward runs when the first tensor is requested. Leaving early,
    or closing the generator, ends the rows.

    Raises:
        NotSupported: `num_beams` above 1, because the best beam is only known at the end.
    """
    if model_kwargs.pop("process_group", None) is not None:
        raise NotSupported(
            "process_group in a stream: the reader controls when each forward runs, but all ranks "
            "must run theirs together; use generate"
        )
    sampling = num_beams, do_sample, top_k, top_p, temperature
    if _sampling(*sampling)["num_beams"] > 1:
        raise NotSupported(
            f"num_beams={num_beams} in a stream: the best beam is known only at the end; use "
            "generate"
        )
    hooks = prepare_inputs_fn, update_model_kwargs_fn
    rows = input_ids, tokenizer, max_length, early_stopping
    return _Call(model, *rows, sampling, hooks, model_kwargs).stream()


def _by_ids(call: Callable[..., Any], early_stopping: bool) -> Callable[..., Any]:
    """Return `call` with the signature of `_sample`, which takes EOS and pad ids in place of a tokenizer."""

    def sample(
        model: Any,
        input_ids: Tensor,
        max_length: int,
        early_stopping: bool = early_stopping,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        **kwargs: Any,
    ) -> Any:
        ends = SimpleNamespace(
            padding_side="left", eos_token_id=eos_token_id, pad_token_id=pad_token_id
        )
        return call(model, input_ids, ends, max_length, early_stopping=early_stopping, **kwargs)

    return sample


_sample = _by_ids(generate, early_stopping=True)
_sample_streaming = _by_ids(generate_streaming, early_stopping=False)


class _Call:
    """A call with checked arguments and admitted rows: `stream` it or run its `requests`, then `close` it."""

    def __init__(
        self,
        model: Any,
        input_ids: Tensor,
        tokenizer: Any,
        max_length: int,
        early_stopping: bool,
        sampling: tuple[Any, ...],
        hooks: tuple[Any, Any],
        kwargs: dict[str, Any],
    ) -> None:
        for name, hook in zip(("prepare_inputs_fn", "update_model_kwargs_fn"), hooks, strict=True):
            check_kind(name, hook, Callable | None, "a function or None")
        has_hooks = hooks != (None, None)
        side = getattr(tokenizer, "padding_side", None)
        if side != "left":
            raise InvalidRequest(
                f"tokenizer.padding_side is {side!r}: must be 'left', or prompts do not end where "
                "generation begins"
            )
        self._pads_to_length = not flag("early_stopping", early_stopping)
        for name in ("use_cache", "apply_loss_mask"):
            check_kind(name, kwargs.get(name), bool | None, "True, False or None")
        kwargs.pop("apply_loss_mask", None)  # Coati's trainer passes it on to every call
        fields = _sampling(*sampling)
        seed, stops = kwargs.pop("seed", None), _stop_sequences(kwargs.pop("stop_token_ids", None))
        # Only the tokenizer's EOS counts, as a stop id.
        params = SamplingParams(seed=seed, stop_token_ids=stops, ignore_eos=True, **fields)
        eos_id, pad_id, pad_override = (
            optional_integer(name, value, 0, _LARGEST_ID)
            for name, value in (
                ("tokenizer.eos_token_id", getattr(tokenizer, "eos_token_id", None)),
                ("tokenizer.pad_token_id", getattr(tokenizer, "pad_token_id", None)),
                ("pad_token_id", kwargs.pop("pad_token_id", None)),
            )
        )
        pad_id = pad_id if pad_override is None else pad_override
        mask = kwargs.pop("attention_mask", None)
        self._columns = columns = PaddedRows.of(input_ids, mask, pad_id=pad_id, left=True)
        self._device, prompts = input_ids.device, columns.rows()
        num_new = _new_tokens(columns.width, max_length, kwargs.pop("max_new_tokens", None))
        interval = optional_integer("stream_interval", kwargs.pop("stream_interval", None), 1)
        self._interval = 2 if interval is None else interval
        pad = eos_id if pad_id is None else pad_id
        with ExitStack() as opened:  # the engine, if it is opened for this call only
            num_beams = fields["num_beams"]
            self.llm = llm = self._open(opened, model, hooks, kwargs, num_new, num_beams, pad)
            self._pad = llm.pad_token_id if pad is None else pad
            # A model with hooks receives padded rows, so padding counts.
            longest = columns.width if has_hooks else max(map(len, prompts), default=0)
            self._num_new = num_new = _clamp_to_limit(num_new, longest, llm)
            if eos_id is not None and eos_id < llm.engine.admission.vocab_size:
                stops.insert(0, eos_id)
            if seed is None and num_new and fields["temperature"] > 0:
                seed = draw_seed()
            params = params.replace(max_tokens=num_new, seed=seed, stop_token_ids=stops)
            admitted = llm._admit_rows(prompts, params) if num_new else []
            self.requests: dict[int, Request] = dict(enumerate(admitted))
            self.close = opened.pop_all().close

    def _open(
        self,
        opened: ExitStack,
        model: Any,
        hooks: tuple[Any, Any],
        kwargs: dict[str, Any],
        num_new: int,
        num_beams: int,
        pad: int | None,
    ) -> LLM:
        """Return the model's engine, or one over its own forward, sized for the full length of all rows.

        `opened` closes the latter.
        """
        is_llm, has_hooks, unsupported = isinstance(model, LLM), hooks != (None, None), None
        if has_hooks and num_beams > 1:
            raise NotSupported(
                f"num_beams={num_beams} with prepare_inputs_fn or update_model_kwargs_fn: hooks "
                "share one cache with fixed rows, and beam search reorders rows"
            )
        if has_hooks and is_llm:
            raise NotSupported(
                "prepare_inputs_fn and update_model_kwargs_fn prepare the inputs of a module; "
                "an open LLM prepares its own"
            )
        if not has_hooks:
            kwargs = {name: value for name, value in kwargs.items() if name not in _CACHE_KWARGS}
        if is_llm or (not has_hooks and has_known_layers(model)):
            for name in kwargs:
                raise InvalidRequest(
                    f"{name} is not supported: the engine prepares the inputs of "
                    f"{'an open LLM' if is_llm else type(model).__name__}. Pass arguments for the model "
                    "through a prepare_inputs_fn, or to an actor whose forward takes them"
                )
            try:
                return engine_of(model)
            except UnsupportedModel as error:
                unsupported = error
        try:
            llm = open_forward(
                model,
                max_length=max(1, self._columns.width + num_new),
                max_sequences=max(1, self._columns.num_rows * num_beams),
                arguments=kwargs,
                hooks=hooks if has_hooks else None,
                batch=(self._columns.ids, self._columns.mask.long()),
                pad_token_id=pad,
            )
        except UnsupportedModel:
            if unsupported is None:
                raise
            raise unsupported from None
        return opened.enter_context(llm)

    def progress(self) -> tuple[list[list[int]], int]:
        """Return the new ids of each row, and the number of columns that are final."""
        rows, ready = new_rows(self.requests)
        if self._pads_to_length and all(request.finished for request in self.requests.values()):
            ready = self._num_new
        return rows, ready

    def output(self, rows: list[list[int]], width: int) -> Tensor:
        """Return the prompts with `width` columns of completions."""
        return self._columns.joined(rows, self._pad, width, self._device)

    def stream(self) -> Generator[Tensor, None, None]:
        """Yield the whole tensor each time it has grown by the stream interval."""
        sent = 1 - self._interval
        requests = list(self.requests.values())
        with closing(self), closing(self.llm.engine.steps(requests)) as steps:
            for _ in steps:
                rows, ready = self.progress()
                for width in range(sent + self._interval, ready + 1, self._interval):
                    yield self.output(rows, width)
                    sent = width
            if sent < max(ready, 1):  # the rows ended between two intervals, or without a new token
                yield self.output(rows, ready)


def _clamp_to_limit(num_new: int, longest: int, llm: LLM) -> int:
    """Clamp the new tokens to the model's limit, with a warning; admission rejects too long a prompt."""
    room = llm.max_length - longest
    if not 0 <= room < num_new:
        return num_new
    warnings.warn(
        f"max_length leaves {num_new} new tokens after a prompt of {longest}, "
        f"{num_new + longest} together; the model's limit is {llm.max_length} "
        f"({llm.engine.admission.limit_source}), so at most {room} are generated",
        stacklevel=2,
    )
    return room


def _sampling(
    num_beams: Any, do_sample: Any, top_k: Any, top_p: Any, temperature: Any
) -> dict[str, Any]:
    """Return checked sampling fields for `SamplingParams`; None disables a filter."""
    samples, beams = flag("do_sample", do_sample), integer("num_beams", num_beams, 1)
    check_search(beams, samples, 1.0)
    fields: dict[str, Any] = {
        "num_beams": beams,
        "top_k": 0 if top_k is None or (isinstance(top_k, int) and top_k == -1) else top_k,
        "top_p": 1.0 if top_p is None else top_p,
        "temperature": 1.0 if temperature is None else temperature,
    }
    check_search(1, True, SamplingParams(**fields).temperature)
    if not samples and beams == 1:
        fields["temperature"] = 0.0  # every filter keeps the likeliest token
    return fields


def _new_tokens(prompt_width: int, max_length: Any, max_new_tokens: Any) -> int:
    length = integer("max_length", max_length, 0)
    if prompt_width > length:
        raise PromptTooLong(f"input_ids is {prompt_width} tokens wide, but max_length={length}")
    new = optional_integer("max_new_tokens", max_new_tokens, 0)
    return length - prompt_width if new is None else min(new, length - prompt_width)


def _stop_sequences(value: Any) -> list[Any]:
    """Return a list of stop sequences: [[20, 21], [10]] has two, [20, 21] is one, and so is 20."""
    if value is None:
        return []
    value = value.tolist() if hasattr(value, "tolist") else value
    sequences = list(value) if isinstance(value, list | tuple) else [value]
    nested = [hasattr(entry, "__len__") for entry in sequences]
    if any(nested) and not all(nested):
        raise InvalidRequest(
            f"stop_token_ids={value!r}: must be sequences of ids ([[20, 21], [10]]), or a single one "
            "([20, 21]), but not both"
        )
    return sequences if any(nested) or not sequences else [sequences]


# ---- Coati's helper functions: cache hooks, logits processors, and the check that all ranks are done


def prepare_inputs_fn(input_ids: Tensor, **model_kwargs: Any) -> dict[str, Any]:
    """Return the inputs of a model's next forward, as a `prepare_inputs_fn` of `generate`.

    If the model returned a cache, only the ids that are not cached are passed on.

    Args:
        input_ids: `[B, L]`, prompt and completion so far.
        model_kwargs: further inputs, passed on. The cache is `past`, or else `past_key_values` or `cache`
            (transformers 5.24); `position_ids` default to those of `attention_mask`.

    Returns:
        A new dict with `input_ids`.
    """
    past, name = model_kwargs.pop("past", None), _cache_name(model_kwargs)
    cache = model_kwargs.pop(name, None) if past is None else past
    model_kwargs.pop(name, None)
    mask, num_cached = model_kwargs.get("attention_mask"), 0
    if hasattr(cache, "get_seq_length"):
        num_cached = int(cache.get_seq_length())
    elif cache:  # (K, V) pairs [B, heads, length, width]
        num_cached = int(cache[0][0].shape[-2])
    inputs = {**model_kwargs, "input_ids": input_ids[:, num_cached:]}
    if cache is not None:  # the model may not accept one
        inputs[name] = cache
    types = model_kwargs.get("token_type_ids")
    if isinstance(types, Tensor):
        inputs["token_type_ids"] = types[:, num_cached:]
    if isinstance(mask, Tensor) and mask.dim() == 2 and inputs.get("position_ids") is None:
        positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
        inputs["position_ids"] = positions[:, num_cached:]
    return inputs


def _cache_name(values: Any) -> str:
    """Return the name of the cache among a model's arguments or outputs."""
    return "past_key_values" if field_of(values, "cache") is None else "cache"


def update_model_kwargs_fn(
    outputs: Any, new_mask: Any = None, **model_kwargs: Any
) -> dict[str, Any]:
    """Return the `model_kwargs` of the next step, as an `update_model_kwargs_fn` of `generate`.

    Args:
        outputs: the model's output; its `past_key_values` or `cache` is passed on (None if it has none).
        new_mask: `[B, 1]`, the attention mask of the new token; or the `model_kwargs` as a dict, for a
            mask of ones.
        model_kwargs: those of the last step.

    Returns:
        A new dict; `attention_mask` and `token_type_ids`, if present, are one column wider.
    """
    if isinstance(new_mask, Mapping):
        model_kwargs, new_mask = {**new_mask, **model_kwargs}, None
    name = _cache_name(outputs)
    updated = {**model_kwargs, name: field_of(outputs, name)}
    types, mask = updated.get("token_type_ids"), updated.get("attention_mask")
    if types is not None:
        updated["token_type_ids"] = torch.cat([types, types[:, -1:]], dim=-1)
    if mask is not None:
        new = mask.new_ones(mask.shape[0], 1) if new_mask is None else new_mask
        updated["attention_mask"] = torch.cat([mask, new], dim=-1)
    return updated


def _prepare_logits_processor(
    top_k: int | None = None, top_p: float | None = None, temperature: float | None = None
) -> LogitsProcessorList:
    """Return transformers' processors for temperature, top-k and top-p, in this order, if enabled.

    For custom loops; `generate` itself uses Verbatim's sampler.

    Raises:
        ValueError: a value is out of range.
    """
    from transformers import (
        LogitsProcessorList,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    processors = LogitsProcessorList()
    if temperature is not None and temperature != 1.0:
        processors.append(TemperatureLogitsWarper(float(temperature)))
    if top_k is not None and top_k not in (0, -1):
        processors.append(TopKLogitsWarper(top_k))
    if top_p is not None and top_p != 1.0:
        processors.append(TopPLogitsWarper(float(top_p)))
    return processors


def _is_sequence_finished(unfinished_sequences: Tensor) -> bool:
    """Return whether every row of every rank has ended; `unfinished_sequences` `[B]` is 0 for ended rows."""
    check_kind("unfinished_sequences", unfinished_sequences, Tensor, "a tensor")
    num_unfinished = unfinished_sequences.count_nonzero()
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(num_unfinished)
    return int(num_unfinished) == 0
